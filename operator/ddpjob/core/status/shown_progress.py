"""Decides what `status.progress` shows, from what the training script reported to the coordinator."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob_runtime import protocol

from ddpjob.api.types import Json, format_time, known_time
from ddpjob.core.view import is_number

REFRESH = timedelta(seconds=2)
"""Progress alone is no reason to write the status more often than this."""

_INTEGERS = ("epoch", "epochs", "step", "steps")
_LARGEST = 2**53
"""The largest integer that every reader of JSON gets right."""
_METRICS = 100
"""Limits a script that reports a new metric at every step."""


def shown_progress(shown: Json, reported: Json, now: datetime, *, at_once: bool) -> Json:
    """The progress to write: `reported` in displayable form, or `shown` while it is unchanged or younger than REFRESH.

    `at_once` writes a change without waiting for REFRESH. Values that are no finite numbers are
    left out.
    """
    if not reported:
        return shown
    last = known_time(shown.get("updatedAt"))
    if last is not None and not at_once and timedelta(0) <= now - last < REFRESH:
        return shown
    fresh: Json = {
        name: int(reported[name])
        for name in _INTEGERS
        if is_number(reported.get(name)) and abs(reported[name]) <= _LARGEST
    }
    loss, speed, eta = reported.get("loss"), reported.get("samplesPerSecond"), reported.get("eta")
    if is_number(loss):
        fresh |= {"loss": loss, "lossDisplay": f"{loss:.4g}"}
    if speed is not None and is_number(speed):
        fresh |= {"samplesPerSecond": round(speed, 1), "speedDisplay": f"{speed:,.0f}/s"}
    if eta is not None:
        fresh["eta"] = duration(eta) if is_number(eta) else str(eta)
    if isinstance(reported.get("metrics"), dict):
        numbers = [(str(k), v) for k, v in reported["metrics"].items() if is_number(v)]
        fresh["metrics"] = dict(numbers[:_METRICS])
        if "speedDisplay" not in fresh and protocol.COUNTED_SPEED in fresh["metrics"]:
            fresh["speedDisplay"] = f"{fresh['metrics'][protocol.COUNTED_SPEED]:.3g} steps/s"
    fresh |= _summary(fresh)
    if fresh == {key: value for key, value in shown.items() if key != "updatedAt"}:
        return shown
    return fresh | {"updatedAt": format_time(now)}


def _summary(fresh: Json) -> Json:
    """`percent` and the column `display`, as far as they follow from the counts."""
    step, steps, epoch, epochs = (fresh.get(name) for name in ("step", "steps", "epoch", "epochs"))
    parts = []
    if epoch is not None:
        parts.append(f"epoch {epoch}/{epochs}" if epochs is not None else f"epoch {epoch}")
    summary: Json = {}
    if step is not None and steps is not None and steps > 0:
        summary["percent"] = min(100, 100 * step // steps)
        parts.append(f"{summary['percent']} %")
    elif step is not None:
        parts.append(f"step {step}")
    return summary | ({"display": " ".join(parts)} if parts else {})


def duration(seconds: float) -> str:
    """Seconds as `45s`, `12m30s`, `3h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
