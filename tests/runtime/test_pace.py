"""The training speed, computed from reported step counts."""

from __future__ import annotations

import random

import pytest
from ddpjob_pod.pace import FIRST_STEPS, LONGEST_SECONDS, Pace


def speeds(reports: list[tuple[float, float]]) -> list[float | None]:
    pace, seen = Pace(), []
    for count, now in reports:
        pace.add(count, now)
        seen.append(pace.per_second)
    return seen


def test_the_reported_speed_of_a_steady_script_is_steady() -> None:
    """Regression: for steps of 0.3 s, the speed alternated between 2 and 4 steps/s, because it was
    computed every 0.5 s from whole steps.
    """
    looks = [(int(moment / 0.3), moment) for moment in (0.5 * n for n in range(1, 120))]
    settled = [speed for speed, (_, moment) in zip(speeds(looks), looks) if moment > 6]
    assert all(speed == pytest.approx(1 / 0.3, rel=0.08) for speed in settled)


def test_the_first_speed_needs_a_second_or_five_steps() -> None:
    assert speeds([(1, 10.0), (5, 10.03)]) == [None, None], "a step of a few milliseconds is too short to measure"
    assert speeds([(1, 10.0), (2, 11.0)])[-1] == 1.0
    assert speeds([(1, 10.0), (1 + FIRST_STEPS, 10.5)])[-1] == pytest.approx(10)
    assert speeds([(1, 10.0), (90, 10.0)]) == [None, None], "two reports at the same moment give no speed"


def test_the_speed_is_measured_afresh_if_the_step_count_falls() -> None:
    shown = speeds([(100, 0.0), (200, 10.0), (20, 40.0), (24, 42.0)])
    assert shown == [None, 10.0, None, 2.0], "a restarted script is measured from its restart"


def test_the_speed_of_long_steps_follows_a_change_within_a_minute() -> None:
    steady = [(float(n), 30.0 * n) for n in range(20)]
    slower = [(20.0 + n, 570.0 + 60 * (n + 1)) for n in range(3)]
    assert speeds([*steady, *slower])[-1] == pytest.approx(1 / 60)
    assert LONGEST_SECONDS == 60


def test_the_window_stays_small_and_the_speed_correct_with_many_reports() -> None:
    pace, now, chance = Pace(), 0.0, random.Random(3)
    for count in range(20_000):
        pace.add(count, now)
        now += chance.uniform(0.0, 0.002)
    assert len(pace._window) <= 2 + 5 / 0.5 + 2
    assert pace.per_second == pytest.approx(1000, rel=0.1)
