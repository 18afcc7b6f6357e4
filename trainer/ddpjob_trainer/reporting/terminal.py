"""Shows progress as plain lines, and defines the status that all displays show.

`live_view` is the display for a TTY.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ddpjob_pod.stragglers import Straggler


@dataclass(frozen=True)
class TrainingStatus:
    """The status that a display shows.

    `epoch` and `step` begin at 1, `eta` is in seconds, and `data_wait` is the share of time spent
    waiting for data.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    learning_rate: float
    samples_per_second: float
    eta: float
    data_wait: float
    accuracy: float | None = None
    gradient_norm: float | None = None
    skipped_steps: int = 0
    """Number of steps skipped in this incarnation of the job because the loss or a gradient was not
    finite.
    """
    corrupt_images: int = 0
    """Number of images in this epoch that could not be read."""
    world: int = 1
    restarts: int = 0
    stragglers: tuple[Straggler, ...] = ()
    mfu: float | None = None
    """Share of the devices' peak FLOP/s that the model uses; None if unknown."""
    memory: float = 0.0
    """Peak number of bytes on the rank that has used the most memory."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a step on rank 0 spends in each phase."""
    checkpoint_time: float | None = None
    """Unix time at which this incarnation's latest checkpoint was completely on disk."""

    def line(self) -> str:
        """Return the status as one plain line."""
        accuracy = "" if self.accuracy is None else f"  accuracy {self.accuracy:.2%}"
        where = f"epoch {self.epoch}/{self.epochs}  step {self.step}/{self.steps} ({self.step / self.steps:.0%})"
        speed = f"{self.samples_per_second:,.0f} samples/s  data wait {self.data_wait:.0%}  eta {duration(self.eta)}"
        return "  ".join([f"{where}  loss {self.loss:.4f}{accuracy}", speed, *self.extras()])

    def extras(self) -> list[str]:
        """Return texts for the optional parts of the status that have something to show."""
        norm = [] if self.gradient_norm is None else [f"gradient norm {self.gradient_norm:.3g}"]
        skipped = [f"skipped steps {self.skipped_steps}"] if self.skipped_steps else []
        share = [] if self.mfu is None else [f"MFU {self.mfu:.1%}"]
        slow = [f"rank {found.rank} lags ({found.slowdown:.1f}x)" for found in self.stragglers]
        return (
            norm + share + slow + skipped + ([f"corrupt images {self.corrupt_images}"] if self.corrupt_images else [])
        )


def duration(seconds: float) -> str:
    """Format seconds: `75` -> `1:15`; `3675` -> `1:01:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display(Protocol):
    """A place that shows progress."""

    def show(self, status: TrainingStatus) -> None:
        """Show the current status."""

    def note(self, text: str) -> None:
        """Print a line that remains visible."""

    def close(self) -> None:
        """Restore the terminal."""


class ProgressLines:
    """Prints plain lines for logs, at most one status per `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval, self._next = interval, 0.0

    def show(self, status: TrainingStatus) -> None:
        """Print the status, unless a status was printed less than `interval` seconds ago."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._interval
            print(status.line(), flush=True)

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """Do nothing, because a log needs no cleanup."""


class Silent:
    """The display for ranks that do not print anything."""

    def show(self, status: TrainingStatus) -> None:
        """Ignore the status."""

    def note(self, text: str) -> None:
        """Ignore the line."""

    def close(self) -> None:
        """Do nothing, because a silent rank needs no cleanup."""
