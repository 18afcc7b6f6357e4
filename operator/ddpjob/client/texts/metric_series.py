"""Reads the measurements that the trainer or `ddpjob_report` has written to a job's metrics.jsonl.

The file cannot be trusted. A line may be incomplete, made by an attacker, or written by another
program.

A curve is drawn in stretches. No line connects the stretches before and after a restart, because
nothing was measured during the outage.

The starts of a job are numbered 0, 1, and so on, and each value carries the number of the start
after which it was measured. After a restart, some steps are repeated, and the latest value of a
step counts. An earlier value that lies between later ones is dropped, because it belongs to work
that was discarded. Earlier values of steps that have not been repeated yet are kept as a separate
stretch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any

from ddpjob.core.status.messages import count
from ddpjob.core.view import is_number

LARGEST = 1e300
"""Values that are not smaller than this limit are left out of curves. Their sum could be infinite,
and a larger integer could be too large for a float."""
_LAST_STEP = 2**63
_LAST_EPOCH = 1e9
_NAMES = 40
"""Maximum number of metrics that are kept, for training steps and for evaluations separately."""
_NO_CURVES = ("event", "time", "step", "epoch", "eta", "round")
AXES = ("step", "time", "epoch")
"""The possible horizontal axes of a curve."""
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Origin:
    """The start and the time that the latest values of a step come from."""

    start: int
    """The number of the start after which the values were measured."""
    time: float | None
    """Unix time in seconds, by the writer's clock."""


@dataclass
class MetricSeries:
    """The measurements of a job. If a step was repeated, only the latest values are kept.

    `steps` and `evaluations` map the name of each metric to a mapping from steps to values.
    """

    steps: dict[str, dict[int, float]] = field(default_factory=dict)
    """Training: loss, samplesPerSecond, ..."""
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)
    """Evaluation on the test set: accuracy, loss, ..."""
    starts: list[int] = field(default_factory=list)
    """The steps after which training continued: one for the first start, and one for each
    restart."""
    restarts: int = 0
    """Number of restarts. If several jobs used the folder, the first start of each job does not
    count."""
    repeated: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of repeated steps. A range consists of the step after which training continued, and
    the last step that is known to have been completed before the restart."""
    not_finite: set[int] = field(default_factory=set)
    """Training steps whose loss is NaN or infinite. In the file, their loss is null."""
    without_loss: set[int] = field(default_factory=set)
    """Training steps without a reported loss."""
    made: dict[int, Origin] = field(default_factory=dict)
    """Origin of the latest values of each training step."""
    evaluated: dict[int, Origin] = field(default_factory=dict)
    """Origin of the latest values of each evaluation."""
    epochs: dict[int, float] = field(default_factory=dict)
    began: float = math.inf
    """The earliest time in any line."""

    def positions(self, by: str) -> tuple[dict[int, float], dict[int, float]]:
        """Return the positions of training steps and of evaluations on the axis `by`.

        On the axis `time`, a position is the number of seconds since the first line. On the axis
        `epoch`, the steps of an epoch are spread evenly, so a step in the middle of the second
        epoch is at 1.5. Steps and evaluations whose position is unknown are left out.
        """
        if by == "epoch":
            found = _fractions(self.epochs)
            return found, found
        return self._positions(self.made, by), self._positions(self.evaluated, by)

    def _positions(self, origins: Mapping[int, Origin], by: str) -> dict[int, float]:
        if by == "step":
            return {step: float(step) for step in origins}
        return {step: origin.time - self.began for step, origin in origins.items() if origin.time is not None}

    def stretches(self, curve: Mapping[int, float], where: tuple[dict[int, float], dict[int, float]]) -> list[Points]:
        """Return the points of a curve, in a separate list for each stretch between restarts.

        A point is (position, value). `where` is the result of `positions`.
        """
        of_evaluations = any(curve is known for known in self.evaluations.values())
        origins, place = (self.evaluated, where[1]) if of_evaluations else (self.made, where[0])
        steps = [step for step in sorted(curve) if step in place]
        starts = [origins[step].start for step in steps]
        before, after = list(accumulate(starts, max)), list(accumulate(reversed(starts), max))[::-1]
        kept = [
            (start, (place[step], curve[step]))
            for step, start, *around in zip(steps, starts, before, after, strict=True)
            if start >= min(around)
        ]
        return sorted(sorted(point for _, point in part) for _, part in groupby(kept, key=lambda pair: pair[0]))

    def restarts_at(self, where: tuple[dict[int, float], dict[int, float]]) -> list[float]:
        """Return the position of the first step after each restart."""
        first: dict[int, float] = {}
        for step, position in where[0].items():
            if step in self.made:
                start = self.made[step].start
                first[start] = min(position, first.get(start, position))
        return [first[start] for start in sorted(first) if start > min(first)]

    def missing_beginning(self) -> str:
        """Return a note on where the curves begin if an earlier run trained the first steps.

        If the curves begin with the first step, the note is empty.
        """
        if not self.starts or self.starts[0] <= 0 or min(self.made, default=0) <= self.starts[0]:
            return ""
        return f"the curves start after step {self.starts[0]}, where training continued from a checkpoint"

    def after_last_loss(self) -> str:
        """Return a note if the loss of the latest steps is not finite or was not reported.

        If these steps have a finite loss, the note is empty.
        """
        known = sorted(self.steps.get("loss", {}))
        last = known[-1] if known else -1
        if self.not_finite and max(self.not_finite) > last:
            return f"loss: not finite (NaN or infinite) at {_counted(self.not_finite)}"
        # Ignore a gap of the usual length. For example, a script can report its loss only every ten
        # steps.
        usual = max((later - step for step, later in pairwise(known)), default=0)
        since = {step for step in self.without_loss if step > last}
        if since and max(since) - last > usual:
            return f"loss: {'no longer' if known else 'not'} reported at {_counted(since)}"
        return ""


def rows_of(series: MetricSeries) -> list[dict[str, float]]:
    """Return one row per step, in order.

    The names of metrics on the test set begin with `eval_`.
    """
    rows: dict[int, dict[str, float]] = {}
    for prefix, curves in (("", series.steps), ("eval_", series.evaluations)):
        for name, curve in curves.items():
            for step, number in curve.items():
                rows.setdefault(step, {"step": step})[f"{prefix}{name}"] = number
    return [rows[step] for step in sorted(rows)]


def _note_loss(series: MetricSeries, step: int, row: dict[str, Any]) -> None:
    loss = row.get("loss")
    is_finite = not (loss is None or (isinstance(loss, float) and not math.isfinite(loss)))
    (series.without_loss.discard if "loss" in row else series.without_loss.add)(step)
    (series.not_finite.discard if "loss" not in row or is_finite else series.not_finite.add)(step)


def _fractions(epochs: Mapping[int, float]) -> dict[int, float]:
    """Return the position of each step, in epochs.

    If the script has reported fractions of epochs, they are used unchanged. Otherwise, the steps of
    each epoch are spread evenly.
    """
    if any(epoch != int(epoch) for epoch in epochs.values()):
        return dict(epochs)
    ends: dict[float, int] = {}
    for step in sorted(epochs):
        ends[epochs[step]] = step
    order = sorted(ends)
    # Training might have continued in the middle of an epoch, so the beginning of the first epoch
    # with steps is unknown.
    begin = min(epochs, default=1) - 1 if order and order[0] != 1 else 0
    spans, length = dict[float, tuple[int, int]](), 1
    for epoch in order:
        # The last epoch might be unfinished, so assume that it is at least as long as the previous
        # epoch.
        length = max(ends[epoch] - begin, length if epoch == order[-1] else 1, 1)
        spans[epoch], begin = (begin, length), ends[epoch]
    return {
        step: epoch - 1 + min(1.0, max(0.0, (step - spans[epoch][0]) / spans[epoch][1]))
        for step, epoch in epochs.items()
    }


def _counted(steps: set[int]) -> str:
    return f"{count(len(steps), 'step')}, most recently step {max(steps)}"


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LAST_STEP


def read_metrics(text: str) -> MetricSeries:
    """Read the end of metrics.jsonl from `text`. Lines that cannot be read are skipped."""
    series, newest, run = MetricSeries(), 0, ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            # The line is incomplete, because `text` begins in the middle of it or its writer was
            # killed.
            continue
        event = row.get("event") if isinstance(row, dict) else None
        time = row.get("time") if event in ("start", "step", "eval") else None
        time = float(time) if is_number(time) and 0 <= time < LARGEST else None
        series.began = min(series.began, math.inf if time is None else time)
        if event == "start":
            before, run = run, str(row.get("run", ""))[:8]
            series.restarts += bool(series.starts) and before == run
            series.starts.append(row["step"] if _is_step(row.get("step")) else 0)
            if series.starts[-1] < newest:
                series.repeated.append((series.starts[-1], newest))
        curves = {"step": series.steps, "eval": series.evaluations}.get(str(event))
        if curves is None or not _is_step(row.get("step")):
            continue
        step = row["step"]
        origins = series.made if event == "step" else series.evaluated
        # A step that has not been repeated since the latest start keeps its origin.
        if step not in origins or step + (event == "eval") > (series.starts or [-1])[-1]:
            origins[step] = Origin(max(len(series.starts) - 1, 0), time)
        if is_number(epoch := row.get("epoch")) and abs(epoch) < _LAST_EPOCH:
            series.epochs[step] = float(epoch)
        if event == "step":
            newest = max(newest, step)
            _note_loss(series, step, row)
        for name, number in row.items():
            known = name in curves or (len(curves) < _NAMES and name not in _NO_CURVES)
            if known and is_number(number) and abs(number) < LARGEST:
                curves.setdefault(name, {})[step] = float(number)
    return series
