"""Prepares jobs for the pages: the sorted and filtered list, and one job's details."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddpjob_runtime.protocol import CHECKPOINT_TIME, COPY_TIME, is_number
from markupsafe import Markup, escape

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType, JobStatus, Restart
from ddpjob.client.backends.backend import ENDED, PodLine
from ddpjob.client.logs.log_follower import ranks_of_pods
from ddpjob.client.texts.metric_series import MetricSeries, Points
from ddpjob.core.status.messages import count
from ddpjob.core.status.shown_progress import duration
from ddpjob.dashboard.fleet import STATES, CurveSamples, FleetRow

PER_PAGE = 100
MOST_SLOTS = 256
"""Maximum number of rows for pods and slots on a job's page."""
_POINTS = 1200
"""Maximum number of points in a curve."""
_CURVES = 16
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\S\n\t ]|\x1b")
"""Matches characters that move the cursor, and escape sequences that programs use to set a
terminal's colours or title.
"""


def plain(text: str) -> str:
    """Return a text without the escape sequences and control characters that jobs may write."""
    return "".join(c for c in _CONTROL.sub("", text) if c.isprintable() or c in "\n\t")


# --- all jobs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Which jobs the list shows, and in which order. The page's address contains this choice."""

    words: str = ""
    state: str = ""
    sort: str = "state"
    descending: bool = False
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Choice:
        """Read the query string of a URL. Invalid values are replaced with the defaults."""
        page, sort = query.get("page", ""), query.get("sort", "")
        state = query.get("state", "")
        return cls(
            words=query.get("q", "")[:200],
            state=state if state in STATES or state == "active" else "",
            sort=sort if sort in SORTS else "state",
            descending=query.get("dir") == "desc",
            page=int(page) if page.isascii() and page.isdigit() and len(page) < 6 else 1,
        )

    def query(self, **changed: str | int) -> dict[str, str]:
        """Return the query for this choice, after replacing the values in `changed`.

        Values that are equal to their defaults are omitted.
        """
        full = {"q": self.words, "state": self.state, "sort": self.sort, "dir": "desc" if self.descending else "",
                "page": self.page, **changed}  # fmt: skip
        defaults = ("", 0, 1, "state") if full["sort"] == "state" else ("", 0, 1)
        return {name: str(value) for name, value in full.items() if value not in defaults}


def _moment(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0


SORTS: dict[str, Callable[[FleetRow, datetime], Any]] = {
    "name": lambda row, now: (row.name, row.namespace),
    "namespace": lambda row, now: (row.namespace, row.name),
    "state": lambda row, now: (STATES.index(row.state) if row.state in STATES else len(STATES), -_moment(row.created)),
    "progress": lambda row, now: (-1 if row.percent is None else row.percent, row.name),
    "restarts": lambda row, now: (row.restarts_total, row.name),
    "gpus": lambda row, now: (row.gpus, row.pods, row.name),
    "gpu-hours": lambda row, now: (row.gpu_seconds, row.name),
    "runtime": lambda row, now: (row.runtime(now) or -1.0, row.name),
    "age": lambda row, now: (-_moment(row.created), row.name),
}
"""Maps the name of a column to a function that returns a row's sort key. The row with the smallest
key comes first."""


@dataclass(frozen=True)
class Listed:
    """A page of the list, with totals.

    The numbers of pods, GPUs, GPU seconds and jobs (`total`) are totals over all jobs, including
    jobs that the list does not show.
    """

    rows: list[FleetRow]
    found: int
    """Number of jobs on all pages of the list together."""
    pages: int
    page: int
    states: dict[str, int]
    """Number of jobs per state among those that match the search words."""
    active: int
    """Number of jobs that match the search words and have not finished."""
    pods: int
    gpus: int
    gpus_training: int
    gpu_seconds: int
    total: int


def listed(rows: Iterable[FleetRow], choice: Choice, now: datetime) -> Listed:
    """Return the page of the list that `choice` selects."""
    every = list(rows)
    words = choice.words.lower().split()
    fitting = [row for row in every if all(word in _text(row) for word in words)] if words else every
    states = Counter(row.state for row in fitting)
    chosen = fitting
    if choice.state == "active":
        chosen = [row for row in fitting if row.state not in ENDED]
    elif choice.state:
        chosen = [row for row in fitting if row.state == choice.state]
    chosen = sorted(chosen, key=lambda row: SORTS[choice.sort](row, now), reverse=choice.descending)
    pages = max(1, math.ceil(len(chosen) / PER_PAGE))
    page = min(max(choice.page, 1), pages)
    return Listed(
        rows=chosen[(page - 1) * PER_PAGE : page * PER_PAGE],
        found=len(chosen),
        pages=pages,
        page=page,
        states={state: states[state] for state in sorted(states, key=lambda s: STATES.index(s) if s in STATES else 99)},
        active=sum(row.state not in ENDED for row in fitting),
        pods=sum(row.pods for row in every),
        gpus=sum(row.gpus for row in every),
        gpus_training=sum(row.gpus_training for row in every),
        gpu_seconds=sum(row.gpu_seconds for row in every),
        total=len(every),
    )


def _text(row: FleetRow) -> str:
    return f"{row.namespace}/{row.name} {row.state} {row.reason} {row.message}".lower()


# --- one job ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A part of a job's timeline. `begin` and `width` are in thousandths of the whole timeline."""

    begin: float
    width: float
    kind: str
    """One of start, round, restart, repeat and unknown. During `repeat`, the job repeats steps that
    it had already taken before the restart. If the status no longer lists the first restarts, the
    time before the first listed restart is `unknown`."""
    title: str


@dataclass(frozen=True)
class Timeline:
    spans: list[Span]
    begin: datetime
    end: datetime
    lost: float
    """Total duration of the listed restarts, in seconds."""

    @property
    def useful(self) -> float | None:
        """The share of time spent on new steps, as far as is known.

        The share is None if the status no longer lists all restarts.
        """
        if any(span.kind == "unknown" for span in self.spans):
            return None
        return sum(span.width for span in self.spans if span.kind == "round") / 1000


def timeline(job: DDPJob, state: str, now: datetime) -> Timeline | None:
    """Return the timeline of a job's rounds and restarts; None if the job has not started."""
    status = job.status
    begin, end = status.start_time, status.completion_time or now
    if begin is None or end <= begin:
        return None
    # Restarts are recorded in the order in which they were seen. They may have happened in a
    # different order, because some kubelets report the end of a pod later than others.
    restarts = sorted(
        (restart for restart in status.restarts.recent if begin <= restart.time <= end and not restart.consequence),
        key=lambda restart: restart.time,
    )
    whole = (end - begin).total_seconds()
    spans: list[Span] = []

    def add(since: float, until: float, kind: str, title: str) -> None:
        if until > since:
            spans.append(Span(since / whole * 1000, (until - since) / whole * 1000, kind, title))

    # The start time changes when a suspended job is resumed. The status may still list restarts
    # from before that time, but they are not part of this timeline.
    earlier = [restart.round for restart in status.restarts.recent if restart.time < begin]
    at, lost, number = 0.0, 0.0, max(earlier, default=0)
    unlisted = status.restarts.total > len(status.restarts.recent) and not earlier
    for position, restart in enumerate(restarts):
        moment = (restart.time - begin).total_seconds()
        broke = max(at, moment)
        kind = "unknown" if unlisted and position == 0 else "round"
        what = f"round {number}" if kind == "round" else "earlier restarts, which the status no longer lists"
        add(at, broke, kind, f"{what}: {duration(broke - at)}")
        breaks = ((later.time - begin).total_seconds() for later in restarts[position + 1 :] if later.round)
        following = max(broke, next(breaks, whole))
        over = following if restart.seconds is None else min(max(broke, moment + restart.seconds), following)
        add(broke, over, "restart", f"{restart.reason}: {duration(over - broke)}")
        lost += over - broke
        again = min(following, over + _repeated_seconds(restart))
        add(over, again, "repeat", f"{count(restart.repeated_steps or 0, 'step')} repeated: {duration(again - over)}")
        # After the loss of a spare, or of a coordinator in Fast mode, no round begins, so the round
        # number stays the same.
        at, number = again, restart.round or number
    running = status.condition(ConditionType.RUNNING)
    if not restarts and running is not None and running.status:
        ran = min(max((running.since - begin).total_seconds(), 0.0), whole)
        add(0.0, ran, "start", f"start: {duration(ran)}")
        at = ran
    elif not restarts and not status.terminal:
        add(0.0, whole, "start", f"start: {duration(whole)}")
        at = whole
    add(at, whole, "round", f"round {number}: {duration(whole - at)}")
    return Timeline(spans, begin, end, lost)


def _repeated_seconds(restart: Restart) -> float:
    """Return how long the job repeated steps after a restart, in seconds.

    The result is infinite while the job is still repeating steps.
    """
    unfinished = restart.repeated_steps and restart.seconds is not None
    return restart.repeated_seconds if restart.repeated_seconds is not None else math.inf if unfinished else 0.0


@dataclass(frozen=True)
class SlotRow:
    """A row on a job's page. It shows a pod and the status of its slot, or a slot without a pod."""

    index: int | None
    pod: str
    role: str
    state: str
    ranks: str
    attempt: int | None
    host: str
    created: datetime | None
    message: str
    ended: bool = False


def slot_rows(job: DDPJob, body: Json, pods: Sequence[PodLine]) -> tuple[list[SlotRow], int]:
    """Return the rows for a job's page, and the number of rows that the page does not show.

    The coordinator comes first, followed by the slots in the order of their indices. If there are
    more than MOST_SLOTS rows, the rows with problems come before all others.
    """
    ranks = ranks_of_pods(pods, body)
    slots, rows, with_pod = job.status.slots, list[SlotRow](), set[int]()
    for pod in pods:
        held = ranks.get(pod.name, range(0))
        slot = job.status.slot(pod.index)
        attempt = pod.name.rpartition("-")[2]
        if pod.index is not None and slot is not None and str(slot.attempt) == attempt:
            with_pod.add(pod.index)
        shown = f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0]) if held else ""
        rows.append(
            SlotRow(
                pod.index, pod.name, pod.role, pod.state, shown, int(attempt) if attempt.isdigit() else None, pod.host,
                pod.created, pod.message, pod.ended,
            )
        )  # fmt: skip
    for index, slot in enumerate(slots):
        if index not in with_pod:
            rows.append(SlotRow(index, "", "", str(slot.state), "", slot.attempt, slot.node, None, slot.reason))
    order = sorted(rows, key=lambda row: (-1 if row.index is None else row.index, -(row.attempt or 0)))
    if len(order) > MOST_SLOTS:
        order = sorted(order, key=lambda row: row.state in ("Running", "Completed", "Succeeded"))
    return order[:MOST_SLOTS], max(0, len(order) - MOST_SLOTS)


_FIRST = ("loss", "accuracy", "test accuracy", "test loss", "samplesPerSecond", "lr")
_TITLES = {"samplesPerSecond": "samples/s", "lr": "learning rate", "dataWait": "share of time spent waiting for data"}


def trained_curves(series: MetricSeries, by: str = "step") -> Json:
    """Return the curves of the built-in trainer's measurements, as the page's script draws them.

    `by` is the horizontal axis, one of AXES. At each restart, a curve has a null value, so that no
    line crosses the restart.
    """
    named = dict(series.steps)
    named |= {f"test {name}": values for name, values in series.evaluations.items()}
    order = sorted(named, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    where = series.positions(by)
    curves = [_curve(_TITLES.get(name, name), series.stretches(named[name], where)) for name in order[:_CURVES]]
    starts = series.starts[1:] if by == "step" else series.restarts_at(where)
    repeated = [list(stretch) for stretch in series.repeated[-200:]] if by == "step" else []
    return {"curves": [curve for curve in curves if curve["x"]], "starts": starts[-200:], "repeated": repeated}


def reported_curves(samples: CurveSamples, unit: str, by: str = "step") -> Json:
    """Return curves of the values that were reported while the dashboard followed the job."""
    curves, where = [], {"step": samples.steps, "time": samples.times, "epoch": samples.epochs}[by]
    for title, values in (("loss", samples.losses), (unit, samples.speeds)):
        pairs = [(x, y) for x, y in zip(where, values, strict=True) if not (math.isnan(x) or math.isnan(y))]
        if len(pairs) > 1:
            curves.append(_curve(title, [sorted(dict(pairs).items())]))
    return {"curves": curves, "starts": [], "repeated": []}


def _curve(title: str, stretches: Sequence[Points]) -> Json:
    """Return a curve that consists of several stretches, in the form that the page's script draws.

    Between two stretches, the curve has a null value, so that no line joins them. The curve has at
    most _POINTS points. Each stretch needs up to three points and a null. If there are too many
    stretches, only every second, third, ... one is kept, counted from the last.
    """
    every = max(1, math.ceil(4 * len(stretches) / _POINTS))
    stretches = stretches[::-1][::every][::-1]
    room = _POINTS - 4 * len(stretches)
    whole = sum(map(len, stretches))
    x, y = list[float](), list[float | None]()
    for stretch in stretches:
        if x:
            x.append((x[-1] + stretch[0][0]) / 2)
            y.append(None)
        for position, value in _thinned(stretch, 2 + room * len(stretch) // whole):
            x.append(position)
            y.append(value)
    return {"title": title, "x": x, "y": y}


def _thinned(pairs: Points, most: int) -> Points:
    """Reduce the points of a curve to at most `most` + 1.

    The curve is divided into sections of equal length. The points with the smallest and the largest
    value of each section are kept, because readers look for peaks.
    """
    if len(pairs) > most:
        parts, kept = most // 2, Points()
        for part in range(parts):
            some = pairs[len(pairs) * part // parts : len(pairs) * (part + 1) // parts]
            ends = {min(some, key=lambda pair: pair[1]), max(some, key=lambda pair: pair[1])}
            kept += sorted(ends)
        pairs = [*kept, pairs[-1]] if kept[-1] != pairs[-1] else kept
    return pairs


_IN_BACKTICKS = re.compile(r"`([^`\n]{1,200})`")


def with_code(text: str) -> Markup:
    """Convert a text to HTML, with the words in backticks shown as code.

    The text is escaped first, so it cannot contain any HTML of its own.
    """
    return Markup(_IN_BACKTICKS.sub(r"<code>\1</code>", str(escape(text))))


def metrics_of(status: JobStatus) -> list[tuple[str, str]]:
    """Return the names and texts of the job's latest metrics, sorted by name.

    The times of checkpoints and of their copies are left out.
    """
    metrics = {name: value for name, value in (status.progress.get("metrics") or {}).items() if is_number(value)}
    for moment in (CHECKPOINT_TIME, COPY_TIME):
        metrics.pop(moment, None)
    return [(name, _figure(name, value)) for name, value in sorted(metrics.items())][:100]


def _figure(name: str, value: float) -> str:
    """Format a metric.

    Accuracy is shown in percent, as in every other display.
    """
    return f"{value:.2%}" if name == "accuracy" and 0 <= value <= 1 else f"{value:.5g}"
