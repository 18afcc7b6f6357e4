"""Measures how much of a step this rank spends on its own work, and how much on waiting for other
ranks.

DDP's exchange overlaps with the backward pass and ends within torch's backward call. Timing that
call would therefore show the slowest rank's time on every rank. At the end of a backward pass, the
autograd engine runs callbacks in the order in which they were queued. The clock queues its callback
when the pass begins, but DDP queues its wait for the exchange only when the last gradient is ready.
The clock's callback therefore runs after a rank's own last gradient and before DDP's wait.

All other waiting, even in the middle of a pass, goes through a single method of torch, `Work.wait`.
The trainer calls this method, as do torch's FSDP, pipelines and blocking collectives. On the CPU,
`wait` blocks until the other ranks have sent their data. The time spent in `wait` therefore counts
as exchange in every phase.

On a GPU, each mark is an event in the GPU's stream. The clock reads the events when the numbers are
reported, because the host has waited for the device by then. The time between two events includes
the device's work and its waiting for a slow host. On a GPU, `wait` returns immediately, and a
stream waits instead. In newer versions of torch, a blocking collective can itself run in the
stream. The clock therefore places an event before and after each wait and each blocking collective,
and counts the time between them as exchange. If a version of torch waits in other functions, all
ranks show equal times, and the report does not name a slow rank. The clock has not been tested on
several GPUs yet.
"""

from __future__ import annotations

import enum
import functools
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.private_torch import call_after_backward, wrap_collectives, wrap_waits


class StepPhase(enum.StrEnum):
    """The phases of a step."""

    DATA = "data"
    """Waiting for the batch, and mixing its images."""
    FORWARD = "forward"
    BACKWARD = "backward"
    """The backward pass, until this rank's last gradient is ready."""
    EXCHANGE = "exchange"
    """Waiting for the other ranks, and sending."""
    COMPUTE = "compute"
    """The forward and backward passes of a pipeline, which the clock does not separate. The
    exchange is included if the clock cannot distinguish it.
    """
    UPDATE = "update"
    OTHER = "other"
    """Time between steps: reports and copies for a checkpoint."""


OWN = (StepPhase.DATA, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.COMPUTE)
"""Phases that other ranks cannot delay. This holds only if the clock can distinguish the exchange.
"""


class StepClock:
    """Adds up the seconds that this rank spends in each phase. `take` returns the sums."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = device.type == "cuda"
        self.sees_waits = device.type in ("cpu", "cuda")
        """Whether the clock can distinguish waiting in the middle of a pass from this rank's own
        work."""
        if self.sees_waits:
            _count_waits()
        if self._events:
            _count_waits_of_streams()
        self._marks: list[tuple[StepPhase, _Events, list[_Events]]] = []
        self._spare: list[Any] = []
        # None until the first mark. A mark in the constructor would use the device too early.
        self._last: Any = None
        self._seconds: dict[StepPhase, float] = {}

    def restart(self) -> None:
        """Set a mark, and discard the time since the last mark, such as that of an evaluation."""
        _in_streams.clear()
        self._last = self._mark()

    def lap(self, phase: StepPhase) -> None:
        """Set a mark, and count the time since the last mark as `phase`."""
        now = self._mark()
        if self._last is None:
            pass
        elif self._events:
            waits = _in_streams[:]
            del _in_streams[: len(waits)]
            self._marks.append((phase, (self._last, now), waits))
        else:
            waited = now[1] - self._last[1]
            self._add(phase, now[0] - self._last[0] - waited)
            if waited:
                self._add(StepPhase.EXCHANGE, waited)
        self._last = now

    def watch(self, loss: torch.Tensor) -> None:
        """Prepare to mark the end of the backward pass that is about to begin at `loss`."""
        loss.register_hook(self._at_begin)  # type: ignore[no-untyped-call]

    def take(self) -> dict[StepPhase, float]:
        """Return the seconds counted for each phase since the last call.

        On an accelerator, all work that precedes the last mark must have finished.
        """
        found, self._seconds = self._seconds, {}
        for phase, (begin, end), waits in self._marks:
            waited = sum(before.elapsed_time(after) for before, after in waits if after.query()) / 1000
            found[phase] = found.get(phase, 0.0) + max(0.0, begin.elapsed_time(end) / 1000 - waited)
            if waited:
                found[StepPhase.EXCHANGE] = found.get(StepPhase.EXCHANGE, 0.0) + waited
            self._spare.append(begin)
        self._marks.clear()
        return found

    def _add(self, phase: StepPhase, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _at_begin(self, _: torch.Tensor) -> None:
        call_after_backward(lambda: self.lap(StepPhase.BACKWARD))

    def _mark(self) -> Any:
        if not self._events:
            return time.perf_counter(), _waited.seconds if self.sees_waits else 0.0
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Waited(threading.local):
    """The time that each thread has spent waiting for other ranks."""

    seconds = 0.0


_waited = _Waited()


@functools.cache
def _count_waits() -> None:
    """Count the time spent waiting for other ranks, from now until the process ends."""

    def wrap(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def counted(work: dist.Work, *given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(work, *given, **named)
            finally:
                _waited.seconds += time.perf_counter() - began

        return counted

    wrap_waits(wrap)


_Events = tuple[Any, Any]
_in_streams: list[_Events] = []
"""Pairs of events that enclose the waits of streams since the last mark."""


@functools.cache
def _count_waits_of_streams() -> None:
    """Count the time that GPU streams spend waiting, from now until the process ends."""
    trains = threading.get_ident()

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*given: Any, **named: Any) -> Any:
            # Also count calls in threads that torch has created, because backward passes run there.
            # Python gives such threads names that begin with Dummy.
            thread = threading.current_thread()
            counts = thread.ident == trains or thread.name.startswith("Dummy-")
            in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            if not counts or not in_use or torch.cuda.is_current_stream_capturing():
                return call(*given, **named)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            try:
                return call(*given, **named)
            finally:
                after.record()
                _in_streams.append((before, after))

        return counted

    wrap_waits(wrap)
    wrap_collectives(wrap)


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory use so far, in bytes.

    If the device is a GPU, only the device's memory counts; otherwise, only main memory does.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
