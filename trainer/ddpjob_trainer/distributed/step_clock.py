"""Where the time of a step goes: this rank's own work, and waiting for others, apart.

DDP's exchange overlaps with the backward pass and ends inside torch's call of it, so a stopwatch around that call shows
the slowest rank's time on every rank. The autograd engine calls back at the end of a backward pass, in the order in
which callbacks were queued; DDP queues its wait for the exchange when its last gradient is there, and the clock's is
queued when the pass begins. So the clock's comes between a rank's own last gradient and the wait.

On an accelerator marks are events in its stream, read when the numbers are reported, where the host has waited for the
device anyway. Between two events there is what the device did, and where it waited for a slow host.
"""

from __future__ import annotations

import enum
import resource
import sys
import time
from typing import Any

import torch


class Phase(enum.StrEnum):
    """Of a step."""

    DATA = "data"
    """Waiting for the batch, and mixing it."""
    FORWARD = "forward"
    BACKWARD = "backward"
    """Until this rank's last gradient."""
    EXCHANGE = "exchange"
    """Waiting for the other ranks, and what is sent."""
    COMPUTE = "compute"
    """Forward, backward and exchange, where a strategy's passes contain collectives."""
    UPDATE = "update"
    OTHER = "other"
    """Between steps: reports, copies for a checkpoint."""


OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
"""What no other rank can delay."""


class StepClock:
    """Seconds per phase since they were last taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = device.type == "cuda"
        self._marks: list[tuple[Phase, Any]] = []
        self._spare: list[Any] = []
        self._last: Any = None  # Before the first mark: the device is not touched until then.
        self._seconds: dict[Phase, float] = {}

    def restart(self) -> None:
        """What was since the last mark belongs to no phase (an evaluation)."""
        self._last = self._mark()

    def lap(self, phase: Phase) -> None:
        """The time since the last mark was spent in `phase`."""
        now = self._mark()
        if self._last is None:
            pass
        elif self._events:
            self._marks.append((phase, (self._last, now)))
        else:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def watch(self, loss: torch.Tensor) -> None:
        """Mark the end of this rank's backward pass from `loss`, which is about to begin."""
        loss.register_hook(self._at_begin)  # type: ignore[no-untyped-call]

    def take(self) -> dict[Phase, float]:
        """Seconds per phase since the last call. On an accelerator it must have finished what was marked."""
        found, self._seconds = self._seconds, {}
        for phase, (begin, end) in self._marks:
            found[phase] = found.get(phase, 0.0) + begin.elapsed_time(end) / 1000
            self._spare.append(begin)
        self._marks.clear()
        return found

    def _at_begin(self, _: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.lap(Phase.BACKWARD))

    def _mark(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of the device's memory, on the CPU of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
