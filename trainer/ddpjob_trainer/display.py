"""Progress in the terminal: a live bar on a TTY, plain lines at a steady pace elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


@dataclass(frozen=True)
class Status:
    """What is shown: counts begin at 1; `eta` in seconds; `data_wait` is the share of time spent waiting for data."""

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

    def line(self) -> str:
        """One plain line."""
        accuracy = "" if self.accuracy is None else f"  accuracy {self.accuracy:.2%}"
        where = f"epoch {self.epoch}/{self.epochs}  step {self.step}/{self.steps} ({self.step / self.steps:.0%})"
        speed = f"{self.samples_per_second:,.0f} samples/s  data wait {self.data_wait:.0%}  eta {duration(self.eta)}"
        return f"{where}  loss {self.loss:.4f}{accuracy}  {speed}"


def duration(seconds: float) -> str:
    """`75` -> `1:15`; `3675` -> `1:01:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display(Protocol):
    """Where progress is shown."""

    def show(self, status: Status) -> None:
        """Show where training stands."""

    def note(self, text: str) -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainLines:
    """For logs: a line at most each `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval, self._next = interval, 0.0

    def show(self, status: Status) -> None:
        """Print a line when one is due."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._interval
            print(status.line(), flush=True)

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing to leave."""


class LiveBar:
    """For a TTY: one bar that moves, notes above it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar: RichProgress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TextColumn("{task.fields[facts]}"),
        )
        self._task: TaskID | None = None
        self._bar.start()

    def show(self, status: Status) -> None:
        """Move the bar."""
        accuracy = "" if status.accuracy is None else f"  accuracy {status.accuracy:.2%}"
        facts = f"loss {status.loss:.4f}{accuracy}  {status.samples_per_second:,.0f}/s  eta {duration(status.eta)}"
        if self._task is None:
            self._task = self._bar.add_task("", epoch="", facts="")
        self._bar.update(self._task, total=status.steps, completed=status.step, epoch=f"{status.epoch}/{status.epochs}", facts=facts)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False)

    def close(self) -> None:
        """Stop moving."""
        self._bar.stop()


class Silent:
    """For ranks that print nothing."""

    def show(self, status: Status) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def open_display(first_rank: bool, interval: float) -> Display:
    """The bar on a TTY, lines elsewhere, nothing on ranks other than 0."""
    if not first_rank:
        return Silent()
    return LiveBar() if sys.stdout.isatty() else PlainLines(interval)
