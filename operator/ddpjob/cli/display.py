"""Shows a running job as a live panel if the output is a terminal, and otherwise as plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, Phase, Restart
from ddpjob.cli.output import printable
from ddpjob.core.status.messages import put_cause_first
from ddpjob.core.status.repeated import and_repeats
from ddpjob.core.status.restarting import RECOVERED
from ddpjob.core.status.shown_progress import duration
from ddpjob.local.process_cluster import TimedEvent
from ddpjob.local.runner import RunDisplay, Shown

PLAIN_SECONDS = 2.0
PHASE_COLOURS = {
    Phase.RUNNING: "green",
    Phase.COMPLETE: "bold green",
    Phase.FAILED: "bold red",
    **dict.fromkeys((Phase.RESTARTING, Phase.SUSPENDED, Phase.QUEUED), "yellow"),
}


def open_display() -> RunDisplay:
    """Return a live panel for a terminal, or a display of plain lines for any other output."""
    console = Console()
    # Jupyter sets FORCE_COLOR, and rich then treats even a file as a terminal. A live panel moves
    # the cursor, which would make the file unreadable, so the file itself is checked too.
    live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
    return LivePanel(console) if live else PlainLines()


def summary(job: DDPJob, status: JobStatus) -> str:
    """Return a line with the job's state, its nodes and its progress."""
    head = f"{status.phase or Phase.PENDING!s:<10} nodes {status.nodes_display(job.spec)}"
    return "  ".join([head, *_figures(status)])


def _figures(status: JobStatus) -> list[str]:
    """Return words for whichever of progress, loss, time left, speed and accuracy are known."""
    shown = (("", "display"), ("loss ", "lossDisplay"), ("eta ", "eta"), ("", "speedDisplay"))
    words = [f"{label}{status.progress[name]}" for label, name in shown if name in status.progress]
    words += [f"accuracy {accuracy:.2%}" for accuracy in [reported_accuracy(status)] if accuracy is not None]
    return words


def reported_accuracy(status: JobStatus) -> float | None:
    """Return the `accuracy` metric, a fraction from 0 to 1.

    Return None if the script does not report this metric.
    """
    accuracy = (status.progress.get("metrics") or {}).get("accuracy")
    return float(accuracy) if accuracy is not None else None


def event_line(happened: TimedEvent) -> str:
    """Return a line with an event's reason and the first line of its message.

    The last line of a longer message may end with a remark in parentheses, such as "(counts against
    ...)". This remark is appended to the returned line.
    """
    message = happened.event.message.splitlines() or [""]
    counts = f" {message[-1][message[-1].rindex(' (') :].strip()}" if len(message) > 1 and " (" in message[-1] else ""
    return f"{happened.event.reason}: {message[0]}{counts}"


def recoveries(status: JobStatus) -> list[str]:
    """Return a line for each restart from which the group has recovered.

    The line shows what broke the group, how long the group took to run again, and how much work it
    repeated. A restart gets its line once the repeated work is known, or can no longer become
    known. A job without reported progress has no lines, because its group may soon fail again.
    """
    if not status.progress:
        return []

    def line(restart: Restart) -> str:
        cause = put_cause_first(restart.message.splitlines()[0].rstrip("."))
        return f"Recovered in {restart.seconds:.1f} s{and_repeats(restart)}: {cause}"

    recent = status.restarts.recent
    known = {restart.round for restart in recent if restart.continued_from or restart.round < status.round}
    return [line(r) for r in recent if r.seconds is not None and (r.round in known or status.terminal)]


def stall_line(seconds: float) -> str:
    """Return a line that reports the time between a break and the next step."""
    return f"Next training step after {seconds:.1f} s"


class NewLines:
    """Finds the lines to show next, about new events, recoveries and stalls."""

    def __init__(self) -> None:
        self._events = self._recovered = self._stalls = 0
        self._traces: set[tuple[str, ...]] = set()

    def lines(self, shown: Shown) -> Iterator[tuple[bool, str]]:
        """Yield a pair for each new line: whether the line is a warning, and the line itself.

        `shown` is the current state of the run.
        """
        for happened in shown.events[self._events :]:
            if happened.event.reason == RECOVERED:
                # Skip this event, because `recoveries` gives a line that also includes the cause.
                continue
            yield happened.event.warning, event_line(happened)
            for line in self._new_trace(happened):
                yield happened.event.warning, f"  {line}"
        self._events = len(shown.events)
        over = recoveries(shown.status)
        for line in over[self._recovered :]:
            yield False, line
        self._recovered = max(self._recovered, len(over))
        for seconds in shown.stalls[self._stalls :]:
            yield False, stall_line(seconds)
        self._stalls = len(shown.stalls)

    def _new_trace(self, happened: TimedEvent) -> list[str]:
        """Return the lines of the traceback in an event, or no lines if it was shown before.

        The same traceback appears again if the error recurs, and also when the error finally fails
        the job.
        """
        trace = happened.event.message.splitlines()[1:]
        # Compare tracebacks by their last lines, which contain the error's location and message.
        known = tuple(line.partition(" (counts against")[0] for line in trace[-3:])
        if known in self._traces:
            return []
        self._traces.add(known)
        return trace


class PlainLines:
    """A display for logs and files, which prints a line whenever the phase changes.

    Other changes of the progress are printed at most once every PLAIN_SECONDS. The lines of
    `NewLines` are printed immediately.
    """

    def __init__(self) -> None:
        self._new = NewLines()
        self._last = ""
        self._phase: Phase | None = None
        self._printed = float("-inf")

    def show(self, shown: Shown) -> None:
        for _, line in self._new.lines(shown):
            self.note(line)
        line, now = summary(shown.job, shown.status), shown.now.timestamp()
        # The elapsed time is negative if the clock was set back.
        recent = 0 <= now - self._printed < PLAIN_SECONDS
        due = not recent or shown.status.phase is not self._phase
        if line != self._last and due:
            self.note(line)
            self._last, self._printed, self._phase = line, now, shown.status.phase

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    def close(self) -> None:
        sys.stdout.flush()


class LivePanel:
    """A display for terminals, with a panel that is redrawn below the lines printed so far."""

    def __init__(self, console: Console) -> None:
        self._console, self._new = console, NewLines()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, shown: Shown) -> None:
        for warning, line in self._new.lines(shown):
            self._console.print(Text(printable(line), style="yellow" if warning else "dim"))
        self._live.update(panel(shown, self._console.width), refresh=True)

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text), style="bold"))

    def close(self) -> None:
        self._live.stop()


def shortest(path: Path) -> str:
    """Return the path, either unchanged or relative to the current folder, whichever is shorter."""
    try:
        return min(str(path), os.path.relpath(path), key=len)
    # The current folder no longer exists.
    except FileNotFoundError:
        return str(path)


_NARROW = 100
"""A terminal with fewer columns gets a shorter progress bar and a table of pods without the paths
of logs, which would be wrapped."""


def panel(shown: Shown, width: int = _NARROW) -> RenderableType:
    """Draw the panel with the job, its progress and its pods, for a terminal of `width` columns."""
    status = shown.status
    phase = status.phase or Phase.PENDING
    since = shown.now - (status.start_time or shown.now)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(shown.job.name, style="bold"),
        Text(str(phase), style=PHASE_COLOURS.get(phase, "cyan")),
        f"nodes {status.nodes_display(shown.job.spec)}",
        f"restarts {status.restarts.counted}/{shown.job.spec.recovery.max_restarts}"
        + (f" +{status.restarts.uncounted} not counted" if status.restarts.uncounted else ""),
        f"time {duration(max(since, timedelta()).total_seconds())}",
    )
    return Group(head, _bar(shown, width), _pods(shown, width))


def _bar(shown: Shown, width: int) -> RenderableType:
    progress = shown.status.progress
    if not progress:
        return Text("no progress reported yet", style="dim")
    row = Table.grid(padding=(0, 2))
    percent = progress.get("percent")
    size = 30 if width >= _NARROW else 10
    cells: list[RenderableType] = [] if percent is None else [ProgressBar(total=100, completed=percent, width=size)]
    words = "  ".join(printable(word) for word in _figures(shown.status))
    row.add_row(*cells, Text(words, overflow="ellipsis", no_wrap=True))
    return row


def _pods(shown: Shown, width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    titles = ("POD", "STATE", "LOG") if width >= _NARROW else ("POD", "STATE")
    for title in titles:
        table.add_column(title, overflow="fold" if title == "LOG" else "ellipsis")
    for pod in shown.pods[-12:]:
        style = (
            "red" if pod.state.startswith("Error") else "green" if pod.state in ("Running", "Completed") else "yellow"
        )
        cells = (pod.name, Text(pod.state, style=style), Text(shortest(pod.log), style="dim"))
        table.add_row(*cells[: len(titles)])
    return table
