"""Threads that follow all jobs of a cluster or of this machine, and keep the job list up
to date.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime

from ddpjob_runtime import protocol

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType, JobStatus, SlotState, known_time
from ddpjob.client.backends.backend import ENDED, Backend, Mistake
from ddpjob.client.texts.job_text import main_condition, phase
from ddpjob.core.status.repeated import makes_new_steps
from ddpjob.core.status.running import STEP_OVERDUE
from ddpjob.core.view import is_number

Key = tuple[str, str]
"""A job's namespace and name."""
WITHOUT_ETA = (*ENDED, "Suspended", "Queued")
"""States in which a job's remaining time is not shown, because the group that reported it is no
longer training.
"""
UNREADABLE = "Unreadable"
STATES = (
    "Failed",
    UNREADABLE,
    "Restarting",
    "Queued",
    "Pending",
    "Starting",
    "Running",
    "Suspended",
    "Interrupted",
    "Complete",
)
"""All states, in the order in which the list shows them. States that need attention come first."""
_POINTS = 512
_RETRY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class FleetRow:
    """A job's row in the list. A field is empty if its value is unknown."""

    namespace: str
    name: str
    state: str
    nodes: str = ""
    progress: str = ""
    percent: int | None = None
    eta: str = ""
    loss: str = ""
    speed: str = ""
    restarts: str = ""
    restarts_total: int = 0
    reason: str = ""
    message: str = ""
    """Why the job is not training, or why it has failed."""
    pods: int = 0
    gpus: int = 0
    """Number of GPUs that the job's pods hold."""
    pods_useful: int = 0
    """Number of pods that are taking new steps, as far as is known."""
    repeated_seconds: float = 0.0
    """Time in seconds that the job is known to have spent on repeated steps."""
    unknown_repeats: int = 0
    """Number of restarts after which the number of repeated steps is unknown."""
    gpus_training: int = 0
    gpu_seconds: int = 0
    created: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    def runtime(self, now: datetime) -> float | None:
        """Return the job's duration in seconds, up to `now` if the job has not ended.

        Return None if the job has not started.
        """
        return ((self.ended or now) - self.started).total_seconds() if self.started is not None else None


def key_of(body: Json) -> Key:
    return str(body["metadata"].get("namespace") or "default"), str(body["metadata"]["name"])


def read_job(body: Json) -> DDPJob:
    """Read a job from an API object or from a local record.

    A local record may lack a uid, and its fields may have any values, so reading it may raise any
    exception.
    """
    return DDPJob.read({**body, "metadata": {"uid": "", **body["metadata"]}})


def fleet_row(body: Json) -> FleetRow:
    """Return a job's row in the list.

    A job that cannot be read also gets a row, because an error would hide the other jobs.
    """
    namespace, name = key_of(body)
    created = known_time(body["metadata"].get("creationTimestamp"))
    try:
        job = read_job(body)
        status, stored, state = job.status, body.get("status") or {}, phase(body)
        first = main_condition(status) if state != "Interrupted" else None
        progress = status.progress
        shown = {part: str((stored.get(part) or {}).get("display", "")) for part in ("nodes", "restarts")}
        percent = progress.get("percent")
        # Do not count pods that have not been scheduled yet, because they do not hold GPUs.
        placed = (slot.state is SlotState.CREATED and bool(slot.node) for slot in status.slots)
        present = sum(placed) + sum(slot.state is SlotState.RUNNING for slot in status.slots)
        pods = present if state not in ENDED else 0
        running = status.condition(ConditionType.RUNNING)
        stalled = running is not None and running.reason == STEP_OVERDUE
        training = min(pods, status.ready) if state == "Running" and not stalled else 0
        each = job.spec.gpus_per_node
    except Exception as error:  # A local record may have any value in any field.
        message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return FleetRow(namespace=namespace, name=name, state=UNREADABLE, created=created, message=message)
    return FleetRow(
        namespace=namespace,
        name=name,
        state=state,
        nodes=shown["nodes"],
        progress=str(progress.get("display", "")),
        percent=min(100, max(0, int(percent))) if is_number(percent) else None,
        eta=str(progress.get("eta", "")) if state not in WITHOUT_ETA else "",
        loss=str(progress.get("lossDisplay", "")),
        speed=str(progress.get("speedDisplay", "")),
        restarts=shown["restarts"],
        restarts_total=status.restarts.total,
        reason=first.reason if first is not None else "",
        message=_in_one_line(first.message) if first is not None else "",
        pods=pods,
        gpus=pods * each,
        pods_useful=training if makes_new_steps(status) else 0,
        repeated_seconds=status.restarts.repeated_seconds,
        unknown_repeats=status.restarts.unknown_repeats,
        gpus_training=training * each,
        gpu_seconds=status.gpu_seconds,
        created=created,
        started=status.start_time,
        ended=status.completion_time,
    )


def _in_one_line(message: str) -> str:
    """Join the first and the last line of a message.

    The last line of a traceback names the error.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(line[:200] for line in dict.fromkeys((*lines[:1], *lines[1:][-1:])))


@dataclass
class CurveSamples:
    """The loss and speed values that a job has reported since the dashboard was started.

    A sample is added for each reported step. Whenever there are more than _POINTS samples, every
    other sample is dropped.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    speeds: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from the job's start to the report."""
    epochs: array[float] = field(default_factory=lambda: array("d"))

    def add(self, status: Json) -> None:
        progress = JobStatus.read({"progress": status.get("progress") or {}}).progress
        speed = progress.get("samplesPerSecond", (progress.get("metrics") or {}).get(protocol.COUNTED_SPEED))
        step, loss = progress.get("step"), progress.get("loss")
        if not is_number(step) or (self.steps and self.steps[-1] == step):
            return
        began, reported = known_time(status.get("startTime")), known_time(progress.get("updatedAt"))
        time = (reported - began).total_seconds() if began is not None and reported is not None else None
        nan, epoch = float("nan"), progress.get("epoch")
        for values, value in (
            (self.steps, step),
            (self.losses, loss),
            (self.speeds, speed),
            (self.times, time),
            (self.epochs, epoch),
        ):
            values.append(float(value) if is_number(value) and abs(value) < 1e300 else nan)
            if len(values) > _POINTS:
                del values[:-1:2]


@dataclass(frozen=True)
class Goodput:
    """How well the pods of all jobs were used while the dashboard followed them."""

    share: float | None
    """The share of the pods' time that was spent on new steps; None if there were no pods. A
    repeated step that was not reported as repeated counts as new."""
    seconds: float
    """How long the jobs were followed, in seconds."""
    unknown: int
    """Number of restarts, while the jobs were followed, after which the number of repeated steps is
    unknown."""


class Fleet:
    """Follows the jobs of one or more backends, and keeps a row for each job.

    A Fleet is a context manager. On entry, all jobs are read once, and Mistake is raised if this
    fails. The jobs are then followed until the exit. Each backend lists only its own jobs, for
    example those of one namespace, and is followed in a separate thread.
    """

    def __init__(self, *backends: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self.backends = backends
        self.version = 0
        """A number that increases with each change to a row."""
        self._rows: dict[Key, FleetRow] = {}
        self._sources: dict[Key, Backend] = {}
        self._versions: dict[Key, int] = {}
        self._samples: dict[Key, CurveSamples] = {}
        self._clock = clock
        self._begun = self._since = clock()
        self._pod_seconds = self._useful_seconds = 0.0
        """Pod seconds of all jobs up to the time `_since`: the total, and the part spent on new
        steps."""
        self._unknown = 0
        self._lock = threading.Lock()
        self._failures: dict[Backend, str] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Fleet:
        for backend in self.backends:
            self._look(backend)
        for backend in self.backends:
            threading.Thread(target=self._follow, args=(backend,), name="fleet", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    @property
    def problem(self) -> str:
        """Why the rows may be stale or incomplete; empty if there is no problem."""
        notes = [note for backend in self.backends for note in backend.notes]
        return "; ".join([*self._failures.copy().values(), *notes][:3])

    def goodput(self) -> Goodput:
        with self._lock:
            self._account()
            share = self._useful_seconds / self._pod_seconds if self._pod_seconds else None
            return Goodput(share, self._since - self._begun, self._unknown)

    def _account(self) -> None:
        """Bring `_pod_seconds` and `_useful_seconds` up to date.

        The caller must hold the lock, and must call this before changing a row's pods.
        """
        now = self._clock()
        self._pod_seconds += (now - self._since) * sum(row.pods for row in self._rows.values())
        self._useful_seconds += (now - self._since) * sum(row.pods_useful for row in self._rows.values())
        self._since = now

    def _account_restarts(self, before: FleetRow, row: FleetRow) -> None:
        """Correct the sums if a job's row shows repeated steps that were counted as new.

        While a row shows that the job is repeating steps, the time is not counted as useful. If a
        repetition ended before any row showed it, its time was counted as useful, and is subtracted
        here.
        """
        again = max(0.0, row.repeated_seconds - before.repeated_seconds) * before.pods_useful
        self._useful_seconds = max(0.0, self._useful_seconds - again)
        self._unknown += max(0, row.unknown_repeats - before.unknown_repeats)

    def rows(self) -> list[FleetRow]:
        with self._lock:
            return list(self._rows.values())

    def row(self, key: Key) -> FleetRow | None:
        with self._lock:
            return self._rows.get(key)

    def job_version(self, key: Key) -> int:
        """Return a number that increases with each change to a job; 0 if there is no such job."""
        with self._lock:
            return self._versions.get(key, 0)

    def samples(self, key: Key) -> CurveSamples:
        """Return a copy of the samples that the job has reported since the dashboard started."""
        with self._lock:
            return deepcopy(self._samples.get(key) or CurveSamples())

    def _follow(self, backend: Backend) -> None:
        while not self._stop.is_set():
            try:
                # Pass the jobs that are already known. Otherwise, a deletion since the last list
                # would go unnoticed.
                known = [{"metadata": {"namespace": of, "name": name}} for of, name in self._keys(backend)]
                for body, gone in backend.changes(None, known=known):
                    if self._stop.is_set():
                        return
                    if gone:
                        self._drop(key_of(body))
                    else:
                        self._keep(body, backend)
            except Exception as error:
                # This thread must survive Mistakes and bugs in this program. Otherwise, its jobs
                # would no longer be followed.
                self._fail(backend, error)
            while backend in self._failures and not self._stop.wait(_RETRY_SECONDS):
                try:
                    self._look(backend)
                except Exception as error:
                    self._fail(backend, error)

    def _fail(self, backend: Backend, error: Exception) -> None:
        """Record why a backend failed.

        If the backend refused access, the rows of its jobs are dropped. After any other failure,
        they are kept.
        """
        self._failures[backend] = str(error) if isinstance(error, Mistake) else f"{type(error).__name__}: {error}"
        if isinstance(error, Mistake) and error.denied:
            for key in self._keys(backend):
                self._drop(key)

    def _keys(self, backend: Backend) -> list[Key]:
        """Return the keys of a backend's jobs."""
        return [key for key, source in self._sources.copy().items() if source is backend]

    def _look(self, backend: Backend) -> None:
        """Read a backend's jobs, and drop the known jobs that no longer exist."""
        now = {key_of(body): body for body in backend.jobs()}
        for key in self._keys(backend):
            if key not in now:
                self._drop(key)
        for body in now.values():
            self._keep(body, backend)
        self._failures.pop(backend, None)

    def _drop(self, key: Key) -> None:
        with self._lock:
            self._account()
            for kept in (self._rows, self._sources, self._versions, self._samples):
                kept.pop(key, None)
            self.version += 1

    def _keep(self, body: Json, backend: Backend) -> None:
        row = fleet_row(body)
        with self._lock:
            self._sources[row.key] = backend
            before = self._rows.get(row.key)
            if before is not None and before.created != row.created:
                # The earlier job was deleted, and this is a new job with the same name.
                self._samples.pop(row.key, None)
            if before != row:
                if before is None or (before.pods, before.pods_useful) != (row.pods, row.pods_useful):
                    self._account()
                if before is not None and before.created == row.created:
                    self._account_restarts(before, row)
                self._rows[row.key] = row
                self.version += 1
            self._versions[row.key] = self._versions.get(row.key, 0) + 1
            if row.state != UNREADABLE:
                with suppress(Exception):
                    # If the status has invalid values, show the job without curves.
                    self._samples.setdefault(row.key, CurveSamples()).add(body.get("status") or {})
