"""What status.progress shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ddpjob.core.progress import duration, shown_progress

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_displays() -> None:
    told = {"epoch": 3, "epochs": 10, "step": 45, "steps": 100, "loss": 0.31249, "samplesPerSecond": 1234.5, "eta": 754.2}
    shown = shown_progress({}, told, NOW, at_once=False)
    assert shown["display"] == "epoch 3/10 45 %"
    assert shown["lossDisplay"] == "0.3125"
    assert shown["speedDisplay"] == "1,234/s"
    assert shown["eta"] == "12m34s"
    assert shown["percent"] == 45


def test_it_is_written_at_most_every_two_seconds() -> None:
    first = shown_progress({}, {"step": 1}, NOW, at_once=False)
    assert shown_progress(first, {"step": 2}, NOW + timedelta(seconds=1), at_once=False) is first
    assert shown_progress(first, {"step": 2}, NOW + timedelta(seconds=1), at_once=True)["step"] == 2
    assert shown_progress(first, {"step": 2}, NOW + timedelta(seconds=2), at_once=False)["step"] == 2
    assert shown_progress(first, {"step": 1}, NOW + timedelta(seconds=9), at_once=False) is first, "nothing new is nothing to write"


def test_what_is_no_number_is_not_shown() -> None:
    shown = shown_progress({}, {"step": 1, "loss": float("nan"), "samplesPerSecond": float("inf")}, NOW, at_once=False)
    assert set(shown) == {"step", "display", "updatedAt"}


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.4, 60, 3599, 3660, 90000)] == ["0s", "59s", "1m00s", "59m59s", "1h01m", "25h00m"]
