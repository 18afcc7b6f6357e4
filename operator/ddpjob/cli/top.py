"""The `ddpjob top` command, a live screen that shows the status and pods of one job or of
all jobs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from ddpjob_runtime.protocol import COUNTED_SPEED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import JobStatus, Phase, utc_now
from ddpjob.cli.display import PHASE_COLOURS, reported_accuracy
from ddpjob.cli.job_list import in_order, show_list
from ddpjob.cli.output import format_rows, printable
from ddpjob.cli.terminal_curves import sparkline
from ddpjob.client.backends.backend import Backend, Mistake, OutagePatience, PodLine
from ddpjob.client.logs.log_follower import ranks_of_pods
from ddpjob.client.texts.job_text import (
    at_risk,
    missing_pod,
    phase,
    readable,
    restart_counts,
    restart_line,
    slot_lines,
    time_is_left,
    took,
    why,
)
from ddpjob.core.status.messages import count

_KEPT = 600
"""Maximum number of points in a curve. If a curve gets longer, every other point is dropped."""
_WIDTH = 60
_RESTARTS = 5
_PIPED_WIDTH = 200


class StepCurve:
    """The curve of one number that the script reports. Each report adds one value."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: object) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            self.values.append(float(value))
            if len(self.values) > _KEPT:
                del self.values[:-1:2]

    def drawn(self) -> str:
        """Return the curve as a row of blocks.

        The result is empty if there are fewer than two values.
        """
        return sparkline(self.values, _WIDTH) if len(self.values) > 1 else ""


class JobScreen:
    """The screen with one job's details. The screen is drawn again at each refresh."""

    def __init__(self) -> None:
        self._loss, self._speed = StepCurve(), StepCurve()
        self._reported: object = None

    def frame(self, body: Json, pods: list[PodLine], now: datetime) -> RenderableType:
        """Return what the screen shows now, given the job, its pods and the current time."""
        with readable(body):
            job = DDPJob.read(body)
        status, progress = job.status, job.status.progress
        reported = (progress.get("step"), progress.get("updatedAt"))
        if reported != self._reported:
            self._reported = reported
            self._loss.add(progress.get("loss"))
            counted = (progress.get("metrics") or {}).get(COUNTED_SPEED)
            self._speed.add(progress.get("samplesPerSecond", counted))
        ranks = ranks_of_pods([pod for pod in pods if pod.state == "Running"], body)
        state = phase(body)
        head = Table.grid(padding=(0, 3))
        head.add_row(
            Text(job.name, style="bold"),
            Text(state, style=PHASE_COLOURS.get(status.phase or Phase.PENDING, "cyan")),
            f"nodes {status.nodes_display(job.spec)}",
            *([f"ranks {sum(map(len, ranks.values()))}"] if any(ranks.values()) else []),
            f"time {took(body, now) or '-'}",
        )
        return Group(head, *self._progress(job), *self._below(body, job, pods, now))

    def _progress(self, job: DDPJob) -> Iterator[RenderableType]:
        progress = job.status.progress
        if not progress:
            yield Text("no progress reported yet", style="dim")
            return
        bar = Table.grid(padding=(0, 2))
        percent = progress.get("percent")
        cells: list[RenderableType] = [] if percent is None else [ProgressBar(total=100, completed=percent, width=30)]
        cells += [_text(str(progress.get("display", "")))]
        if "eta" in progress and time_is_left(job.status):
            cells.append(_text(f"eta {progress['eta']}"))
        bar.add_row(*cells)
        yield bar
        rows = Table.grid(padding=(0, 2))
        for title, shown, curve in (("loss", "lossDisplay", self._loss), ("speed", "speedDisplay", self._speed)):
            if shown in progress:
                rows.add_row(title, _text(str(progress[shown])), Text(curve.drawn(), style="blue"))
        if (accuracy := reported_accuracy(job.status)) is not None:
            rows.add_row("accuracy", f"{accuracy:.2%}", "")
        if risk := at_risk(job.status):
            rows.add_row("at risk", risk, "")
        yield rows

    def _below(self, body: Json, job: DDPJob, pods: list[PodLine], now: datetime) -> Iterator[RenderableType]:
        if phase(body) != "Running":
            yield Text()
            yield from map(_prose, why(body, pods, now))
        status = job.status
        if phase(body) == "Running" and (missing := list(missing_pod(status, job.name, pods))):
            yield Text()
            yield from map(_prose, missing)
        if status.restarts.recent:
            counts = restart_counts(status, job.spec.recovery.max_restarts)
            yield Text()
            yield _text(f"Restarts: {counts}")
            recent = status.restarts.recent[-_RESTARTS:]
            yield from (_text(f"  {restart_line(restart, now)}") for restart in reversed(recent))
        if status.slots:
            yield Text()
            yield _text(f"Slots ({count(len(status.slots), 'pod')}):")
            yield from (_text(line) for line in slot_lines(status))


def _text(line: str) -> Text:
    return Text(printable(line), overflow="ellipsis", no_wrap=True)


def _prose(line: str) -> Text:
    """Return a line as text that wraps if it is too long.

    The line must not be cut off, because its end says what the user can do.
    """
    return Text(printable(line))


def show(backend: Backend, job: str | None, *, once: bool, seconds: float) -> None:
    """Show a live screen until the job has finished.

    Without a job, show the list of all jobs until the user presses `q` or Ctrl-C. With `once`, or
    if the output is not a terminal, print the screen a single time and return.
    """
    console, screen = Console(), JobScreen()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)

    def look() -> tuple[RenderableType, bool]:
        if job is None:
            rows = format_rows(in_order(backend.jobs()), utc_now())
            return Group(*map(_text, rows)), False
        body = backend.job(job)
        ended = JobStatus.read(body.get("status") or {}).terminal or phase(body) == "Interrupted"
        return screen.frame(body, backend.pods(job), utc_now()), ended

    def open_job(name: str) -> Callable[[], RenderableType]:
        opened = JobScreen()
        return lambda: opened.frame(backend.job(name), backend.pods(name), utc_now())

    if job is None and console.is_terminal and not once:
        show_list(backend, console, open_job, seconds)
        return
    frame, ended = look()
    if once or ended or not console.is_terminal:
        console.print(frame)
        return
    patience = OutagePatience()
    with Live(frame, console=console, auto_refresh=False) as live:
        while not ended:
            time.sleep(seconds)
            try:
                frame, ended = look()
                patience.answered()
            except Mistake as mistake:
                patience.tolerate(mistake)
            live.update(frame, refresh=True)
