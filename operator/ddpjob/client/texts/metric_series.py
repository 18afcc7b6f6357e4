"""Reads metrics.jsonl, the built-in trainer's measurements.

Any line may be cut off, hostile or unrelated.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import pairwise

from ddpjob.core.status.messages import count
from ddpjob.core.view import is_number

LARGEST = 1e300
"""Maximum value in a curve. Sums of larger numbers are infinite, and integers may be too long for a
float."""
_LAST_STEP = 2**63
_NAMES = 40
"""Maximum number of different metrics kept for a step or an evaluation."""
_NO_CURVES = ("event", "time", "step", "epoch", "eta", "round")


@dataclass
class MetricSeries:
    """Numbers by name, then by step.

    A restart repeats steps; the newest value of a step counts.
    """

    steps: dict[str, dict[int, float]] = field(default_factory=dict)
    """Training: loss, samplesPerSecond, ..."""
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)
    """Evaluation on the test set: accuracy, loss, ..."""
    starts: list[int] = field(default_factory=list)
    """The steps after which training began, initially and after each restart."""
    repeated: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of repeated steps: the step after which training began, and the last step that is
    known to have been made before."""
    not_finite: set[int] = field(default_factory=set)
    """Training steps whose loss is NaN or infinite."""
    without_loss: set[int] = field(default_factory=set)
    """Training steps without a loss. ddpjob_report.report also omits a loss that is not finite."""

    def after_last_loss(self) -> str:
        """Describe what the newest steps have instead of a finite loss.

        The text is empty if they have a finite loss.
        """
        known = sorted(self.steps.get("loss", {}))
        last = known[-1] if known else -1
        if self.not_finite and max(self.not_finite) > last:
            return f"loss: not finite (NaN or infinite) at {_counted(self.not_finite)}"
        # A script may report its loss only every ten steps.
        usual = max((later - step for step, later in pairwise(known)), default=0)
        since = {step for step in self.without_loss if step > last}
        if since and max(since) - last > usual:
            return f"loss: none, or not finite (NaN or infinite), at {_counted(since)}"
        return ""


def rows_of(series: MetricSeries) -> list[dict[str, float]]:
    """Return a row for each step, in order; numbers of the test set have the prefix `eval_`."""
    rows: dict[int, dict[str, float]] = {}
    for prefix, curves in (("", series.steps), ("eval_", series.evaluations)):
        for name, curve in curves.items():
            for step, number in curve.items():
                rows.setdefault(step, {"step": step})[f"{prefix}{name}"] = number
    return [rows[step] for step in sorted(rows)]


def _counted(steps: set[int]) -> str:
    return f"{count(len(steps), 'step')}, the last of them {max(steps)}"


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LAST_STEP


def read_metrics(text: str) -> MetricSeries:
    """Read all numbers from the lines that can be read."""
    series, newest = MetricSeries(), 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # The line is cut off at the start, or where the writer was killed.
        event = row.get("event") if isinstance(row, dict) else None
        if event == "start":
            series.starts.append(row["step"] if _is_step(row.get("step")) else 0)
            if series.starts[-1] < newest:
                series.repeated.append((series.starts[-1], newest))
        curves = {"step": series.steps, "eval": series.evaluations}.get(str(event))
        if curves is None or not _is_step(row.get("step")):
            continue
        if event == "step" and isinstance(loss := row.get("loss"), float):
            (series.not_finite.discard if math.isfinite(loss) else series.not_finite.add)(row["step"])
        if event == "step":
            newest = max(newest, row["step"])
            (series.without_loss.add if row.get("loss") is None else series.without_loss.discard)(row["step"])
        for name, number in row.items():
            known = name in curves or (len(curves) < _NAMES and name not in _NO_CURVES)
            if known and is_number(number) and abs(number) < LARGEST:
                curves.setdefault(name, {})[row["step"]] = float(number)
    return series
