"""Decides what `status.progress` shows, from what the trainer told the coordinator."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from ddpjob.api.types import Json, format_time, parse_time
from ddpjob.core.world import World

REFRESH = timedelta(seconds=2)
"""Progress alone is no reason to write the status more often than this."""

_INTEGERS = ("epoch", "epochs", "step", "steps")
_LARGEST = 2**53
_METRICS = 100
"""A script that names a new metric at every step must not fill the status."""


def shown_progress(shown: Json, told: Json, now: datetime, *, at_once: bool) -> Json:
    """The progress to write: the one shown before until it is due for refreshing, then what was told last."""
    if not told:
        return shown
    last = parse_time(shown.get("updatedAt"))
    if last is not None and not at_once and now - last < REFRESH:
        return shown
    fresh: Json = {name: int(told[name]) for name in _INTEGERS if _is_number(told.get(name)) and abs(told[name]) <= _LARGEST}
    loss, speed, eta = told.get("loss"), told.get("samplesPerSecond"), told.get("eta")
    if _is_number(loss):
        fresh |= {"loss": loss, "lossDisplay": f"{loss:.4g}"}
    if speed is not None and _is_number(speed):
        fresh |= {"samplesPerSecond": round(speed, 1), "speedDisplay": f"{speed:,.0f}/s"}
    elif _is_number(told.get("stepsPerSecond")):
        fresh["speedDisplay"] = f"{told['stepsPerSecond']:.3g} steps/s"
    if eta is not None:
        fresh["eta"] = duration(eta) if _is_number(eta) else str(eta)
    if isinstance(told.get("metrics"), dict):
        fresh["metrics"] = dict([(str(k), v) for k, v in told["metrics"].items() if _is_number(v)][:_METRICS])
    fresh |= _how_far(fresh)
    if fresh == {key: value for key, value in shown.items() if key != "updatedAt"}:
        return shown
    return fresh | {"updatedAt": format_time(now)}


def _how_far(fresh: Json) -> Json:
    step, steps, epoch, epochs = (fresh.get(name) for name in ("step", "steps", "epoch", "epochs"))
    words = []
    if epoch is not None:
        words.append(f"epoch {epoch}/{epochs}" if epochs is not None else f"epoch {epoch}")
    far: Json = {}
    if step is not None and steps:
        far["percent"] = min(100, 100 * step // steps)
        words.append(f"{far['percent']} %")
    elif step is not None:
        words.append(f"step {step}")
    return far | ({"display": " ".join(words)} if words else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")


def duration(seconds: float) -> str:
    """Seconds as `45s`, `12m30s`, `3h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def trained(shown: Json, world: World) -> bool:
    """Whether the job has ever made a step, as far as anyone has told."""
    told = world.report.progress if world.report is not None else {}
    values = (progress.get(name) for progress in (shown, told) for name in ("step", "epoch", "percent"))
    return any(value is not None and _is_number(value) and value > 0 for value in values)
