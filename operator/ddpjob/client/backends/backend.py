"""`Backend`: reads and changes jobs in one place, a namespace of a cluster or this machine's runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from ddpjob.api.job_spec import Json

OUTAGE_SECONDS = 300.0
"""Without an answer of the API server, after which `wait`, `logs -f` and others give up."""

LINE_BYTES = 1 << 20
"""Of a line of a log: what follows in the line is cut off."""

SILENCE_SECONDS = 15.0
"""How long a connection for a log that can be stopped waits for the next line before it is opened again."""

METRICS = "run/metrics.jsonl"
"""What the training measures, in the job's checkpoint folder."""
METRICS_WRITERS = "the built-in trainer, and scripts that call ddpjob_report.report(step=...)"
METRICS_BYTES = 8 << 20


class Mistake(Exception):
    """The request cannot be done; the message says why and what to do."""

    passing = False
    """Whether the same request may succeed a little later."""
    denied = False
    """Whether whoever asks may not read this, or is not known."""


class Unreachable(Mistake):
    """The place does not answer: no kubeconfig, no API server, no credentials."""


class NoAnswer(Unreachable):
    """The API server has not answered this time."""

    passing = True


class NotKnown(Unreachable):
    """The API server does not accept the credentials."""

    denied = True


class NoSuchJob(Mistake):
    """There is no job of this name."""


class OutagePatience:
    """Lets what takes long survive an API server that restarts or is overloaded, for OUTAGE_SECONDS."""

    def __init__(self) -> None:
        self._since: float | None = None

    def answered(self) -> None:
        """Ends an outage."""
        self._since = None

    def bear(self, mistake: Mistake) -> None:
        """Raises the mistake, unless it may pass and the outage has not lasted for too long."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if not mistake.passing or now - self._since > OUTAGE_SECONDS:
            raise mistake


@dataclass(frozen=True)
class PodLine:
    """A pod of a job, as far as people need it."""

    name: str
    role: str
    index: int | None
    state: str
    """As in kubectl's column STATUS."""
    host: str = ""
    message: str = ""
    """What it waits for, or why it ended."""
    created: datetime | None = None
    containers: tuple[str, ...] = ()
    ended: bool = False

    @property
    def label(self) -> str:
        """What its log's lines begin with: the slot's index, or the coordinator's name."""
        return "coordinator" if self.index is None else str(self.index)


@dataclass(frozen=True)
class Happened:
    """An event of a job."""

    time: datetime | None
    warning: bool
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True)
class LogOptions:
    """Which part of a log. `since` in seconds; None: all of it."""

    follow: bool = False
    tail: int | None = None
    since: int | None = None
    previous: bool = False
    """The ended container before the present one, of a pod that the kubelet has restarted."""
    stop: threading.Event | None = None
    """Ends a log that is followed, within SILENCE_SECONDS: its reader is gone."""
    line_bytes: int = LINE_BYTES
    """Of a line; the rest is cut off."""

    @property
    def stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()


class Backend(Protocol):
    """Every method raises Mistake with a text for the user."""

    local: bool
    """Whether jobs run on this machine, with its files and its Python."""
    notes: list[str]
    """What the last list of jobs has left out, and why `changes` gets no answer at present, for the user."""
    whole: bool
    """Whether `jobs` and `changes` give the large fields of specs that the operator refuses for their size. False at
    first, because they take a hundred times as much memory as all other jobs."""

    @property
    def where(self) -> str:
        """The place in words: `namespace ml, context prod`, or the folder of the runs."""
        ...

    def jobs(self) -> list[Json]:
        """All jobs as objects, the oldest first."""
        ...

    def job(self, name: str) -> Json:
        """One job. Raises NoSuchJob."""
        ...

    def changes(
        self, name: str | None, seconds: float | None = None, known: Iterable[Json] | None = None
    ) -> Iterator[tuple[Json, bool]]:
        """The jobs now, then each change as (object, whether it was deleted), for so long, None: without end.

        `known`: jobs that the caller knows of. Those of them that are gone come first, and of one that is deleted no
        more than its name may come: nothing else is kept for somebody who keeps what they need.

        Raises NoSuchJob where there is no job `name`, also after its deletion.
        """
        ...

    def pods(self, name: str) -> list[PodLine]:
        """The job's pods, in the order of their index."""
        ...

    def events(self, name: str) -> list[Happened]:
        """The job's events, the oldest first."""
        ...

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        """Pieces of a pod's log."""
        ...

    def metrics(self, name: str) -> str:
        """The end of what rank 0 has written to metrics.jsonl, at most METRICS_BYTES."""
        ...

    def patch(self, name: str, spec: Json) -> None:
        """Merges into `spec`, as `kubectl patch --type=merge`."""
        ...

    def create(self, manifests: list[Json]) -> str:
        """Creates a job, with the objects that it needs before it. Returns its name."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a job and its pods. Checkpoints on volumes stay."""
        ...

    def kill(self, pod: str) -> None:
        """Deletes a pod by force, as its machine's loss would."""
        ...

    def run_in(self, pod: PodLine, code: str) -> str:
        """Runs Python code in a pod's trainer container; what it prints."""
        ...
