"""The job's progress as the coordinator keeps it: the last value of each figure, from the script or from the step counter."""

from __future__ import annotations

import math
from typing import Any

NUMBERS = ("epoch", "epochs", "step", "steps", "loss", "samplesPerSecond", "eta")
AUTOMATIC = "automatic"  # marks reports of the step counter: a script's own report is richer and wins


def check(body: Any) -> dict[str, Any]:
    """The report, when it is well formed.

    Raises:
        ValueError: names the field and what it must be.
    """
    if not isinstance(body, dict):
        raise ValueError("progress must be a JSON object")
    for name, value in body.items():
        if name == AUTOMATIC:
            if not isinstance(value, bool):
                raise ValueError(f"{AUTOMATIC}: must be true or false")
        elif name == "metrics":
            _check_metrics(value)
        elif name not in NUMBERS:
            raise ValueError("{}: unknown field; known: {}, metrics".format(name, ", ".join(NUMBERS)))
        elif value is not None and not _is_number(value):
            raise ValueError(f"{name}: must be a number, not {value!r}")
    return body


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, dict):
        raise ValueError("metrics: must be an object of numbers")
    if len(metrics) > 100:
        raise ValueError(f"metrics: at most 100 entries, not {len(metrics)}")
    for name, value in metrics.items():
        if not _is_number(value):
            raise ValueError(f"metrics.{name}: must be a number, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Progress:
    """Merges reports. Infinite and undefined figures are kept out: JSON has none."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.updated_at: float | None = None
        self.position: tuple[float, float] | None = None  # (epoch, step) of the last report that named one
        self._script_reports = False

    def shows_life(self, report: dict[str, Any]) -> bool:
        """Whether a checked report, not merged yet, tells of a step, or of anything else than the step that is known already."""
        if report.get(AUTOMATIC):
            return True  # the counter speaks only after a step
        named = {name: report[name] for name in ("epoch", "step") if report.get(name) is not None}
        return not named or any(self.values.get(name) != value for name, value in named.items())

    def merge(self, report: dict[str, Any], now: float) -> bool:
        """Take in a checked report; False when it is ignored because the script reports by itself."""
        if report.get(AUTOMATIC):
            if self._script_reports:
                return False
        elif not self._script_reports:
            self._script_reports, self.values = True, {}
        for name, value in report.items():
            if name == "metrics":
                kept = {k: v for k, v in value.items() if math.isfinite(v)}
                self.values["metrics"] = dict(self.values.get("metrics", {}), **kept)
            elif name != AUTOMATIC:
                self.values[name] = value if value is not None and math.isfinite(value) else None
        if "step" in report or "epoch" in report:
            self.position = (self.values.get("epoch") or 0.0, self.values.get("step") or 0.0)
        self.updated_at = now
        return True
