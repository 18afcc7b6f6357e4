"""The live view of training in a terminal.

The view shows a progress bar, the job's state, and curves of loss, accuracy and speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddpjob_trainer.reporting.terminal import TrainingStatus, duration

_BLOCKS = "▁▂▃▄▅▆▇█"
_REFRESHES_PER_SECOND, _POINTS_KEPT = 4, 512


class LiveView:
    """A panel at the bottom of the terminal, which rich redraws in its own thread.

    Notes are printed above the panel.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._status: TrainingStatus | None = None
        self._losses: list[float] = []
        self._speeds: list[float] = []
        self._accuracies: list[float] = []
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=_REFRESHES_PER_SECOND)
        self._live.start()

    def show(self, status: TrainingStatus) -> None:
        """Set the status that the next redraw shows."""
        self._status = status
        _keep(self._losses, status.loss)
        _keep(self._speeds, status.samples_per_second)
        if status.accuracy is not None and self._accuracies[-1:] != [status.accuracy]:
            _keep(self._accuracies, status.accuracy)

    def note(self, text: str) -> None:
        """Print a line above the panel."""
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Draw the panel for the last time, and leave it on the terminal."""
        self._live.stop()

    def render(self) -> Panel:
        """Return the panel for the current status."""
        status = self._status
        if status is None:
            return Panel(Text("waiting for the first step"), title=self._title, title_align="left", border_style="blue")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        where = f"{status.step / status.steps:4.0%}  step {status.step:,}/{status.steps:,}  eta {duration(status.eta)}"
        bar.add_row(
            f"epoch {status.epoch}/{status.epochs}", ProgressBar(total=status.steps, completed=status.step), where
        )
        width = max(10, min(60, self._live.console.width - 40))
        rows = Table.grid(padding=(0, 2))
        rows.add_row(
            "loss", Text(f"{status.loss:.4f}", style="bold"), Text(sparkline(self._losses, width), style="blue")
        )
        if status.accuracy is not None:
            shown = Text(sparkline(self._accuracies, width), style="dark_orange")
            rows.add_row("test accuracy", Text(f"{status.accuracy:.2%}", style="bold"), shown)
        rows.add_row(
            "samples/s",
            f"{status.samples_per_second:,.0f}",
            Text(sparkline(self._speeds, width, from_zero=True), style="cyan"),
        )
        rows.add_row("data wait", Text(f"{status.data_wait:.0%}", style="red" if status.data_wait > 0.2 else ""), "")
        if status.phases:
            parts = "  ".join(f"{name} {seconds * 1000:.1f}" for name, seconds in status.phases.items())
            rows.add_row("ms per step", Text(parts), "")
        state = "   ".join([*_job(status), *status.extras()])
        return Panel(
            Group(bar, Text(), rows, Text(), Text(state)), title=self._title, title_align="left", border_style="blue"
        )


def _job(status: TrainingStatus) -> list[str]:
    age = (
        "none yet"
        if status.checkpoint_time is None
        else f"{duration(max(0.0, time.time() - status.checkpoint_time))} ago"
    )
    return [f"ranks {status.world}", f"restarts {status.restarts}", f"checkpoint {age}"]


def _keep(values: list[float], value: float) -> None:
    """Append a value if it is finite. If the list becomes too long, drop every other value."""
    if math.isfinite(value):
        values.append(value)
        if len(values) > _POINTS_KEPT:
            del values[:-1:2]


def sparkline(values: Sequence[float], width: int, *, from_zero: bool = False) -> str:
    """Return a curve of at most `width` block characters.

    Each block shows the mean of a part of `values`. The heights of the blocks are scaled so that
    the smallest mean (or, with `from_zero`, zero) is the lowest block, and the largest mean is the
    highest.
    """
    if not values:
        return ""
    width = min(width, len(values))
    parts = [values[len(values) * part // width : len(values) * (part + 1) // width] for part in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = (min(0.0, *means) if from_zero else min(means)), max(means)
    return "".join(
        _BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1)) if high > low else 0] for mean in means
    )
