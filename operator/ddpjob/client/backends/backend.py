"""The `Backend` interface, which reads and changes the jobs of a namespace or of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from ddpjob.api.job_spec import Json

OUTAGE_SECONDS = 300.0
"""Commands such as `wait` and `logs -f` give up after this many seconds without a response from the
API server."""

LINE_BYTES = 1 << 20
"""Maximum size of a log line in bytes. The rest of the line is cut off."""

SILENCE_SECONDS = 15.0
"""If the reader passes an event as `LogOptions.stop`, a followed log's connection is closed and
reopened after this many seconds of silence. The event is checked only after each line and at each
reconnection."""

METRICS = "run/metrics.jsonl"
"""File with the training metrics, in the job's checkpoint folder."""
METRICS_WRITERS = (
    "metrics are written only by the built-in trainer and by scripts that call ddpjob_report.report(step=...)"
)
METRICS_BYTES = 8 << 20


FINISHED = ("Complete", "Failed")
"""Final phases of a job."""
INTERRUPTED = "Interrupted"
ENDED = (*FINISHED, INTERRUPTED)


class Mistake(Exception):
    """The request cannot be carried out. The message says why and what to do."""

    passing = False
    """Whether the request might succeed if it is retried later."""
    denied = False
    """Whether the request failed because the caller is not authenticated or lacks a permission."""

    def _render_traceback_(self) -> list[str]:
        """Show only the message in a notebook.

        The traceback would show only this package's own code.
        """
        return [f"{type(self).__name__}: {self}"]


class Unreachable(Mistake):
    """There is no kubeconfig, no reachable API server, or no valid credentials."""


class NoAnswer(Unreachable):
    """The API server did not respond to a request. The next request might succeed."""

    passing = True


class NotKnown(Unreachable):
    """The API server does not accept the credentials."""

    denied = True


class NoSuchJob(Mistake):
    """There is no job with this name."""


class OutagePatience:
    """Lets long operations survive API server outages of up to OUTAGE_SECONDS.

    An outage occurs when the API server restarts or is overloaded.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def answered(self) -> None:
        """Record that the API server has responded, which ends an outage."""
        self._since = None

    def tolerate(self, mistake: Mistake) -> None:
        """Raise `mistake` if it is not temporary, or if the outage has lasted too long."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if not mistake.passing or now - self._since > OUTAGE_SECONDS:
            raise mistake


@dataclass(frozen=True)
class PodLine:
    """A pod of a job, as it is shown to users."""

    name: str
    role: str
    """`node`, `spare` or `coordinator`."""
    index: int | None
    """The number of the pod's slot; None for the coordinator."""
    state: str
    """The pod's state, usually the word that kubectl shows in its STATUS column."""
    host: str = ""
    message: str = ""
    """Why the pod is waiting, or why it has ended."""
    created: datetime | None = None
    containers: tuple[str, ...] = ()
    ended: bool = False

    @property
    def label(self) -> str:
        """The prefix of the pod's log lines: the slot's index, or `coordinator`."""
        return "coordinator" if self.index is None else str(self.index)


@dataclass(frozen=True)
class Happened:
    """An event recorded for a job, such as a restart."""

    time: datetime | None
    warning: bool
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True)
class LogOptions:
    """Which part of a log to read, and for how long.

    `tail` is the number of lines to read from the end, and `since` is the maximum age of a line in
    seconds. If both are None, the whole log is read. With `follow`, reading continues until the pod
    has ended.
    """

    follow: bool = False
    tail: int | None = None
    since: int | None = None
    previous: bool = False
    """Whether to read the log from before the kubelet's last restart of the container."""
    stop: threading.Event | None = None
    """The reader sets this event to stop following the log. The log then ends within
    SILENCE_SECONDS."""
    line_bytes: int = LINE_BYTES
    """Maximum size of a line in bytes; the rest is cut off."""

    @property
    def stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()


class EndedLogs(Protocol):
    """Access to the kept logs of a job's pods. `kept_logs.KeptLogs` implements this protocol."""

    def pods(self, known: Iterable[str] = ()) -> list[PodLine]:
        """Return the pods whose logs are kept, ordered by slot and attempt.

        Pods whose names are in `known` are left out.
        """

    def text(self, pod: str, options: LogOptions) -> bytes:
        """Return a pod's kept log.

        Raises Mistake if no log is kept, or if `options` has an option that kept logs do not
        support.
        """


class Backend(Protocol):
    """Reads and changes jobs. A method that fails raises Mistake with a message for the user."""

    local: bool
    """Whether jobs run on this machine, with its files and its Python."""
    notes: list[str]
    """Notes for the user about jobs that are missing from the last list, and about why `changes`
    currently gets no response."""
    whole: bool
    """Whether `jobs` and `changes` include the large fields of oversized specs, which the operator
    refuses. The default is False, because these fields can take a hundred times as much memory as
    all other jobs together."""

    @property
    def where(self) -> str:
        """A phrase that says where the jobs are, such as `namespace ml, context prod`."""

    def jobs(self) -> list[Json]:
        """Return all jobs as objects, oldest first."""

    def job(self, name: str) -> Json:
        """Return one job. Raises NoSuchJob."""

    def changes(
        self, name: str | None, seconds: float | None = None, known: Iterable[Json] | None = None
    ) -> Iterator[tuple[Json, bool]]:
        """Yield the current jobs, and then each change, as pairs (object, whether it was deleted).

        Stop after `seconds`; None means never. `known` contains the jobs that the caller already
        has. Known jobs that no longer exist are yielded first, as deleted. The object of a deleted
        job may contain only the job's name and namespace, because callers keep any other fields
        that they need.

        Raises NoSuchJob if job `name` does not exist or is deleted.
        """

    def pods(self, name: str) -> list[PodLine]:
        """Return the job's pods, ordered by index."""

    def events(self, name: str) -> list[Happened]:
        """Return the job's events, oldest first."""

    def kept_logs(self, name: str) -> EndedLogs:
        """Return the kept logs of a job's pods. Most of these pods no longer exist."""

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        """Yield pieces of a pod's log."""

    def metrics(self, name: str) -> str:
        """Return the end of rank 0's metrics.jsonl, at most METRICS_BYTES."""

    def patch(self, name: str, spec: Json) -> None:
        """Merge `spec` into the job's spec, as `kubectl patch --type=merge` does."""

    def create(self, manifests: list[Json]) -> str:
        """Create a job and the objects that it needs, and return the job's name.

        The last manifest is the job.
        """

    def delete(self, name: str) -> None:
        """Delete a job and its pods.

        Checkpoints on volumes are kept, unless `whenDeleted: Delete` is set.
        """

    def kill(self, pod: str) -> None:
        """Force-delete a pod, as if its machine were lost."""

    def run_in(self, pod: PodLine, code: str) -> str:
        """Run Python code in a pod's trainer container and return the output."""


def poll_changes(
    jobs: Callable[[], list[Json]], name: str | None, nowhere: str, pause: float,
    seconds: float | None, known: Iterable[Json] | None,
) -> Iterator[tuple[Json, bool]]:  # fmt: skip
    """Yield changes to jobs as `Backend.changes` does, for a backend without a watch.

    `jobs` returns all current jobs, and is called every `pause` seconds. If there is no job `name`,
    NoSuchJob is raised with the message `nowhere`.
    """
    end = None if seconds is None else time.monotonic() + seconds
    seen = _by_name(known or ())
    while True:
        now = _by_name(job for job in jobs() if name in (None, job["metadata"]["name"]))
        if name is not None and not now and not seen:
            raise NoSuchJob(nowhere)
        yield from [(job, True) for key, job in seen.items() if key not in now]
        yield from [(job, False) for key, job in now.items() if seen.get(key) != job]
        seen = now
        if end is not None and time.monotonic() >= end:
            return
        time.sleep(pause)


def _by_name(jobs: Iterable[Json]) -> dict[tuple[str, str], Json]:
    return {(job["metadata"].get("namespace") or "default", job["metadata"]["name"]): job for job in jobs}
