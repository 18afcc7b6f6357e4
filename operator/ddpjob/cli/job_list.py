"""The job list of `ddpjob top`, which adapts to the size of the screen and is navigated with keys.

Many finished jobs must not push a running job off the screen, and long names must not push the last
columns off. Jobs with pods therefore come first, then waiting jobs, the newest first in each group.
Finished jobs are folded into one line that counts them; `e` unfolds them. The list never has more
lines or columns than the terminal:

1. The columns GPUHOURS, ATRISK, DURATION and REASON are dropped, one by one, until the rest fits.
2. If this is not enough, names are cut in their middle, to no fewer than 16 characters.
3. If this is not enough, SPEED, LOSS, AGE, RESTARTS, NODES and PROGRESS are dropped, in this order.

Names, states, nodes, progress, loss and restarts fit in 80 columns; everything fits in 200.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import JobStatus, utc_now
from ddpjob.cli.keys import PressedKeys
from ddpjob.cli.output import STATE_COLOURS, printable
from ddpjob.client.backends.backend import ENDED, Backend, Mistake, NoSuchJob, OutagePatience
from ddpjob.client.texts.job_text import gpu_hours, header, phase, row
from ddpjob.core.status.messages import count

_DROPPED = ("GPUHOURS", "ATRISK", "DURATION", "REASON", "", "SPEED", "LOSS", "AGE", "RESTARTS", "NODES", "PROGRESS")
"""Titles of columns, in the order in which they are dropped if the terminal is too narrow. The
empty string marks the point at which names are cut."""
_WAITING = ("Queued", "Pending", "Suspended")
_NAME, _GAP = 16, 2
_FIXED = 4
"""Number of screen lines that are needed for the counts, the titles, the folded jobs and the keys.
"""
_HELP = "up/down move   Enter open   / find   e finished jobs   q quit"
_FILTER_CHARACTERS = 40


class JobList:
    """The list of jobs as the screen shows it, with the position of the cursor and the filter."""

    def __init__(self) -> None:
        self.selected = self.filter = ""
        self.finding = self.unfolded = False
        self._top = 0
        self._names: list[str] = []
        self._page = 10

    def press(self, key: str) -> str:
        """Change the list in response to a key.

        Return `quit` or `open` if the key asks to quit or to open a job, and otherwise an empty
        string.
        """
        if self.finding:
            self._type(key)
        elif key in ("q", "escape"):
            return "quit"
        elif key == "enter":
            return "open" if self.selected else ""
        elif key == "/":
            self.finding, self.filter = True, ""
        elif key == "e":
            self.unfolded = not self.unfolded
        else:
            self._move(key)
        return ""

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.finding = False
            self.filter = "" if key == "escape" else self.filter
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter = (self.filter + key)[:_FILTER_CHARACTERS]

    def _move(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self._page, "page down": self._page}
        steps |= {"home": -len(self._names), "g": -len(self._names), "end": len(self._names), "G": len(self._names)}
        if self._names and key in steps:
            at = self._names.index(self.selected) if self.selected in self._names else 0
            self.selected = self._names[min(max(at + steps[key], 0), len(self._names) - 1)]

    def frame(self, bodies: Sequence[Json], now: datetime, width: int, height: int) -> list[Text]:
        """Return the lines of the screen: at most `height` lines of at most `width` characters."""
        found = [body for body in in_order(bodies) if self.filter in body["metadata"]["name"]]
        shown = [body for body in found if self.unfolded or phase(body) not in ENDED]
        folded = [body for body in found if phase(body) in ENDED] if not self.unfolded else []
        self._names = [body["metadata"]["name"] for body in shown]
        if self.selected not in self._names:
            self.selected = self._names[0] if self._names else ""
        self._page = max(1, height - _FIXED)
        at = self._names.index(self.selected) if self.selected else 0
        self._top = min(max(self._top, at - self._page + 1), at, max(0, len(shown) - self._page))
        rows = fit([header(wide=True), *(row(body, now, wide=True) for body in shown)], width)
        visible = rows[1:][self._top : self._top + self._page]
        lines = [Text(_counts(bodies) + _cost(bodies), style="bold"), Text(rows[0], style="dim")]
        for line, name in zip(visible, self._names[self._top :], strict=False):
            lines.append(_painted(line, selected=name == self.selected))
        hidden = len(shown) - len(visible)
        below = [f"{count(hidden, 'more job')} above or below"] if hidden else []
        below += [f"{_counts(folded)} (press e to show)"] if folded else []
        lines.append(Text("   ".join(below) or ("no jobs" if not shown else ""), style="dim"))
        keys = f"find: {self.filter}_   Enter keep   Esc all" if self.finding else _HELP
        lines.append(Text(keys + (f"   [{self.filter}]" if self.filter and not self.finding else ""), style="dim"))
        for each in lines:
            each.truncate(width, overflow="ellipsis")
        return lines[:height]


def in_order(bodies: Sequence[Json]) -> list[Json]:
    """Return the jobs in the order of the list.

    Jobs with pods come first, waiting jobs next, and finished jobs last. Within each group, the
    newest job comes first.
    """
    newest = sorted(bodies, key=lambda body: str(body["metadata"].get("creationTimestamp")), reverse=True)
    return sorted(newest, key=lambda body: (phase(body) in ENDED, phase(body) in _WAITING))


def _counts(bodies: Sequence[Json]) -> str:
    counted = Counter(phase(body) for body in bodies)
    order = sorted(counted, key=lambda state: (state in ENDED, -counted[state]))
    return ", ".join(f"{counted[state]} {state.lower()}" for state in order) or "no jobs"


def _cost(bodies: Sequence[Json]) -> str:
    """Return a text with the total GPU hours of the jobs.

    The text is empty if no GPU was used.
    """
    spent = (JobStatus.read({"gpuSeconds": (body.get("status") or {}).get("gpuSeconds")}) for body in bodies)
    hours = gpu_hours(sum(status.gpu_seconds for status in spent))
    return f"; {hours} GPU hours" if hours else ""


def fit(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return each row as a line with aligned columns.

    Columns are dropped and names are cut until the lines fit into `width`. The first row contains
    the titles, and the first column is NAME.
    """
    columns = [[printable(cell) for cell in cells] for cells in zip(*rows, strict=True)]
    names, cut = columns[0], False
    for dropped in (None, *_DROPPED):
        cut = cut or dropped == ""
        columns = [cells for cells in columns if cells[0] != dropped]
        # Each dropped column leaves more room for the names.
        if cut:
            most = max(_NAME, width - sum(_wide(cells) + _GAP for cells in columns[1:]))
            columns[0] = [_cut(name, most) for name in names]
        if sum(map(_wide, columns)) + _GAP * (len(columns) - 1) <= width:
            break
    padded = ([cell.ljust(_wide(cells)) for cell in cells] for cells in columns)
    return [(" " * _GAP).join(cells).rstrip() for cells in zip(*padded, strict=True)]


def _cut(name: str, most: int) -> str:
    """Shorten a name by cutting out its middle.

    The end is kept, because the names of a sweep's jobs often differ only there.
    """
    return name if len(name) <= most else f"{name[: most - _NAME // 2]}…{name[1 - _NAME // 2 :]}"


def _wide(cells: Sequence[str]) -> int:
    return max(map(len, cells))


def _painted(line: str, *, selected: bool) -> Text:
    text = Text(line, no_wrap=True)
    for state, colour in STATE_COLOURS.items():
        at = line.find(f"  {state}")
        if at >= 0:
            text.stylize(colour, at + 2, at + 2 + len(state))
    if selected:
        text.stylize("reverse")
    return text


class _Lines:
    """Lines of a screen that rich has already rendered."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: object) -> list[Segment]:
        return [segment for line in self._lines for segment in (*line, Segment.line())]


def page(console: Console, frame: RenderableType, top: int) -> tuple[RenderableType, int]:
    """Return the part of a job's screen that fits on the console, and the number of its first line.

    The part begins at line `top`. If the lines from there on would not fill the console, the part
    begins earlier.
    """
    lines = console.render_lines(frame, console.options, pad=False)
    room = max(1, console.height - 1)
    top = min(max(0, top), max(0, len(lines) - room))
    more = f"   {len(lines) - top - room} lines below" if len(lines) > top + room else ""
    keys = Text(f"Esc back   up/down scroll   q quit{more}", style="dim", no_wrap=True)
    return Group(_Lines(lines[top : top + room]), keys), top


OpenJob = Callable[[str], Callable[[], RenderableType]]
"""Maps the name of a job to a function that draws the job's screen."""


def show_list(backend: Backend, console: Console, open_job: OpenJob, seconds: float) -> None:
    """Show the list of jobs until the user presses `q` or Ctrl-C.

    Enter opens the screen of a job, and Esc returns to the list.
    """
    jobs, patience, top = JobList(), OutagePatience(), 0
    draw_job: Callable[[], RenderableType] | None = None
    bodies = backend.jobs()
    frame: RenderableType = Text()
    with PressedKeys() as keys, Live(console=console, auto_refresh=False, screen=True) as live:
        looked = time.monotonic()
        while True:
            if draw_job is None:
                live.update(Group(*jobs.frame(bodies, utc_now(), console.width, console.height)), refresh=True)
            else:
                shown, top = page(console, frame, top)
                live.update(shown, refresh=True)
            opened = draw_job
            for key in keys.wait(max(0.05, looked + seconds - time.monotonic())):
                if draw_job is not None:
                    if key == "q":
                        return
                    draw_job = None if key in ("escape", "enter") else draw_job
                    room = console.height - 2
                    top += {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -room, "page down": room}.get(key, 0)
                    continue
                asked = jobs.press(key)
                if asked == "quit":
                    return
                if asked == "open":
                    draw_job, top = open_job(jobs.selected), 0
            if time.monotonic() - looked >= seconds or draw_job is not opened:
                try:
                    if draw_job is None:
                        bodies = backend.jobs()
                    else:
                        frame = draw_job()
                    patience.answered()
                # The job was deleted while its screen was open, so return to the list.
                except NoSuchJob:
                    draw_job = None
                except Mistake as mistake:
                    patience.tolerate(mistake)
                looked = time.monotonic()
