"""What status.progress shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.core.status.shown_progress import duration, shown_progress

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_displays() -> None:
    reported = {
        "epoch": 3,
        "epochs": 10,
        "step": 45,
        "steps": 100,
        "loss": 0.31249,
        "samplesPerSecond": 1234.5,
        "eta": 754.2,
    }
    shown = shown_progress({}, reported, NOW, at_once=False)
    assert shown["display"] == "epoch 3/10 45 %"
    assert shown["lossDisplay"] == "0.3125"
    assert shown["speedDisplay"] == "1,234/s"
    assert shown["eta"] == "12m34s"
    assert shown["percent"] == 45


@pytest.mark.parametrize("steps", [0, -1])
def test_of_no_steps_there_are_no_percent(steps: int) -> None:
    shown = shown_progress({}, {"epoch": 1, "step": 45, "steps": steps}, NOW, at_once=False)
    assert "percent" not in shown and shown["display"] == "epoch 1 step 45"


def test_the_speed_of_a_script_that_reports_no_samples_is_in_steps() -> None:
    reported = {"step": 45, "metrics": {"stepsPerSecond": 9.961}}
    assert shown_progress({}, reported, NOW, at_once=False)["speedDisplay"] == "9.96 steps/s"
    both = shown_progress({}, {**reported, "samplesPerSecond": 80}, NOW, at_once=False)
    assert both["speedDisplay"] == "80/s"


def test_it_is_written_at_most_every_two_seconds() -> None:
    first = shown_progress({}, {"step": 1}, NOW, at_once=False)
    assert shown_progress(first, {"step": 2}, NOW + timedelta(seconds=1), at_once=False) is first
    assert shown_progress(first, {"step": 2}, NOW + timedelta(seconds=1), at_once=True)["step"] == 2
    assert shown_progress(first, {"step": 2}, NOW + timedelta(seconds=2), at_once=False)["step"] == 2
    assert shown_progress(first, {"step": 1}, NOW + timedelta(seconds=9), at_once=False) is first, (
        "nothing new is nothing to write"
    )


def test_what_is_no_number_is_not_shown() -> None:
    shown = shown_progress({}, {"step": 1, "loss": float("nan"), "samplesPerSecond": float("inf")}, NOW, at_once=False)
    assert set(shown) == {"step", "display", "updatedAt"}


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.4, 60, 3599, 3660, 90000)] == [
        "0s",
        "59s",
        "1m00s",
        "59m59s",
        "1h01m",
        "25h00m",
    ]


@pytest.mark.parametrize("written", ["8999-01-01T00:00:00Z", "2026-02-30T00:00:00Z", "never", "2026-01-01T00:00:00", 3])
def test_a_time_that_nobody_can_compute_with_does_not_hold_progress_up(written: Any) -> None:
    fresh = shown_progress({"step": 1, "updatedAt": written}, {"step": 2}, NOW, at_once=False)
    assert (fresh["step"], fresh["updatedAt"]) == (2, "2026-01-01T00:00:00Z")
