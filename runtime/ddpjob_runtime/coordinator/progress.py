"""The job's progress: the last value of each figure reported by the script or the step counter.

Scripts report progress by calling `ddpjob_report`. In addition, the step counter in the workers
reports without any help from the script. The reports from both are merged:

- Once the script reports a step, the step counter's figures are ignored, and the speed that the
  step counter has measured is dropped.
- A figure keeps its value until it is reported again. Only figures about ranks are dropped at the
  end of their round.
- An activity, such as evaluating, applies until the next report. `shows_life` decides whether a
  report restarts the time limit for hangs. A report that repeats a known step does not restart the
  time limit.
- Reports about copies in the bucket are sent in the background, so they do not show that the script
  is alive.

Example: the counter reports step 40, so the progress is 40. Then the script, which counts optimizer
steps, reports step 2. The progress is now 2, and the counter's 41 is ignored.
"""

from __future__ import annotations

import re
from typing import Any

from ddpjob_runtime.protocol import (
    AT_RISK,
    COPY_BEHIND,
    COPY_STEP,
    COPY_TIME,
    COUNTED_SPEED,
    ENVIRONMENT,
    FLAGS,
    MAX_FIGURES,
    RESUMED,
    RESUMED_WORDS,
    ROUND,
    SNAPSHOT_BYTES,
    START,
    STRAGGLERS,
    UNCOUNTABLE,
    is_number,
    iso,
    read_environment,
    read_start,
    read_stragglers,
    time_of,
)

NUMBERS = ("epoch", "epochs", "step", "steps", "loss", "samplesPerSecond", "eta", AT_RISK, SNAPSHOT_BYTES)
AUTOMATIC = "automatic"
"""Key that marks a report from the step counter. Such reports are used until the script itself
reports a step.
"""
ACTIVITY = "activity"
"""Key of the script's activity between steps, such as evaluating. The value applies until the next
report.
"""


def check(body: Any) -> dict[str, Any]:
    """Check the format of a report, and return it.

    Raises:
        ValueError: the message names the field and states the rule.
    """
    if not isinstance(body, dict):
        raise ValueError("progress must be a JSON object")
    for name, value in body.items():
        if name in (AUTOMATIC, *FLAGS):
            if not isinstance(value, bool):
                raise ValueError(f"{name}: must be true or false")
        elif name == RESUMED:
            if value not in RESUMED_WORDS:
                raise ValueError(f"{name}: must be one of {', '.join(RESUMED_WORDS)}, not {value!r:.80}")
        elif name == "metrics":
            _check_metrics(value)
        elif name == ACTIVITY:
            if value is not None and not (isinstance(value, str) and len(value) <= MAX_FIGURES):
                raise ValueError(f"{ACTIVITY}: must be a string of at most {MAX_FIGURES} characters, or null")
        elif name == START:
            if not read_start(value):
                raise ValueError(f"{START}: must be an object with step and source, not {value!r:.80}")
        elif name == ENVIRONMENT:
            if not isinstance(value, dict):
                raise ValueError(f"{ENVIRONMENT}: must be an object with gpu and packages, not {value!r:.80}")
        elif name == STRAGGLERS:
            if not isinstance(value, list):
                raise ValueError(f"{STRAGGLERS}: must be a list, not {value!r:.80}")
        elif name == ROUND:
            if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,19}\.[0-9]{1,19}", value):
                raise ValueError(f"{ROUND}: must be GENERATION.ROUND, as in DDPJOB_FENCE, not {value!r:.80}")
        elif name not in NUMBERS:
            known = ", ".join([*NUMBERS, "metrics", STRAGGLERS, START, ENVIRONMENT, ROUND, ACTIVITY])
            raise ValueError(f"{name}: unknown field; the fields are {known}")
        elif value is not None and not _may_be_number(value):
            raise ValueError(f"{name}: must be a number, not {value!r:.80}")
    return body


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, dict):
        raise ValueError("metrics: must be an object whose values are numbers")
    if len(metrics) > MAX_FIGURES:
        raise ValueError(f"metrics: must have at most {MAX_FIGURES} entries, not {len(metrics)}")
    for name, value in metrics.items():
        if len(name) > MAX_FIGURES:
            why = f"names must have at most {MAX_FIGURES} characters, not {len(name)}"
            raise ValueError(f"metrics: {why}: {name[:40]}...")
        if not _may_be_number(value):
            raise ValueError(f"metrics.{name}: must be a number, not {value!r:.80}")


def _may_be_number(value: Any) -> bool:
    """Return whether `value` is a number.

    Infinity and NaN count as numbers, because a report of a diverging loss is not malformed.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_of_copies(report: dict[str, Any]) -> bool:
    """Whether a checked report contains only figures about copies of checkpoints in the bucket.

    Such a report does not show that the script is alive, because copies are made in the background.
    """
    metrics = report.get("metrics") or {}
    return (
        bool(metrics) and report.keys() <= {"metrics", ROUND} and metrics.keys() <= {COPY_STEP, COPY_TIME, COPY_BEHIND}
    )


class MergedProgress:
    """Merges the reports from the script and the step counter.

    Infinity and NaN are dropped, because JSON cannot represent them. Malformed entries about
    lagging ranks are dropped too.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.updated_at: float | None = None
        # (epoch, step) after the last report that contained an epoch or a step
        self.position: tuple[float, float] | None = None
        self._script_counts = False

    def shows_life(self, report: dict[str, Any]) -> bool:
        """Whether a checked report shows that the job is alive. Must be called before the report is
        merged.

        A report that only repeats a known epoch and step does not count.
        """
        if report.get(AUTOMATIC):
            return True  # The step counter reports only after a step, or when it can no longer count steps.
        if is_of_copies(report):
            return False
        named = {name: report[name] for name in ("epoch", "step") if report.get(name) is not None}
        return not named or any(self.values.get(name) != value for name, value in named.items())

    def merge(self, report: dict[str, Any], now: float) -> bool:
        """Merge a checked report, and return whether its figures are used.

        Figures from the step counter are ignored if the script itself reports steps.
        """
        if environment := read_environment(report.get(ENVIRONMENT)):
            self.values[ENVIRONMENT] = environment
        if report.get(AUTOMATIC):
            for name in FLAGS:
                if report.get(name) and not (name == UNCOUNTABLE and self._script_counts):
                    self.values[name] = True
                else:
                    self.values.pop(name, None)
            if self._script_counts:
                return False
        elif "step" in report and not self._script_counts:
            self._script_counts = True
            self.values.pop(UNCOUNTABLE, None)
            self.values.pop(RESUMED, None)
            metrics = {name: value for name, value in self.values.pop("metrics", {}).items() if name != COUNTED_SPEED}
            self.values.update({"metrics": metrics} if metrics else {})
        if RESUMED in report and not self._script_counts:
            self.values[RESUMED] = report[RESUMED]
        for name, value in report.items():
            if name == "metrics":
                kept = {k: v for k, v in value.items() if is_number(v)}
                old = {k: v for k, v in self.values.get("metrics", {}).items() if k not in kept}
                self.values["metrics"] = dict([*old.items(), *kept.items()][-MAX_FIGURES:])
            elif name == STRAGGLERS:
                self.values[name] = read_stragglers(value)
            elif name == START:
                # A start with `seconds` is complete. Once such a start is known, keep it.
                if "seconds" not in self.values.get(name, {}):
                    self.values[name] = read_start(value)
            elif name not in (AUTOMATIC, *FLAGS, RESUMED, ACTIVITY, ROUND, ENVIRONMENT):
                self.values[name] = value if is_number(value) else None
        if is_of_copies(report):
            return True
        self._note_activity(report.get(ACTIVITY))
        if "step" in report or "epoch" in report:
            self.position = (self.values.get("epoch") or 0.0, self.values.get("step") or 0.0)
        self.updated_at = now
        return True

    def forget_ranks(self) -> None:
        """Drop the speed, and the figures about ranks and about states in memory.

        In the next round, the ranks have new numbers and report these figures again.
        """
        for name in (STRAGGLERS, START, AT_RISK, SNAPSHOT_BYTES, "samplesPerSecond", "eta"):
            self.values.pop(name, None)
        if COUNTED_SPEED in self.values.get("metrics", {}):
            metrics = self.values["metrics"]
            self.values["metrics"] = {name: value for name, value in metrics.items() if name != COUNTED_SPEED}
        for name in FLAGS:
            self.values.pop(name, None)

    def _note_activity(self, activity: str | None) -> None:
        self.values.pop(ACTIVITY, None)
        if activity:
            self.values[ACTIVITY] = activity

    @property
    def activity(self) -> str:
        """The activity that the script reports between steps; empty if it reports none."""
        return str(self.values.get(ACTIVITY, ""))

    def report(self) -> dict[str, Any]:
        """Return the progress as it appears in the coordinator's report."""
        return dict(self.values, updatedAt=None if self.updated_at is None else iso(time_of(self.updated_at)))
