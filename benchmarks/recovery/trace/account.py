"""Computes the effects of a trace on a training run, from the run's step logs.

A step counts when the first rank has taken it. It is useful once; if a later group takes it again,
it is repeated. A group of ranks is an incarnation or, under torchft, a quorum. A standstill is the
gap between the last step of an incarnation and the first step of the next one. The part of a
standstill beyond the usual gap is the pause. Several standstills after one failure are added up,
such as those of a group that shrinks and then grows again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.recovery.step_log import Incarnation
from benchmarks.recovery.trace.events import Kind


@dataclass(frozen=True)
class Seen:
    """The effects of a failure until the next failure. `pause` is in seconds."""

    kind: Kind
    pause: float
    repeated: int
    recovered: bool = True
    """Whether any group took a step after the last standstill."""


@dataclass(frozen=True)
class Account:
    """The account of one played trace."""

    seconds: float
    useful: int
    """Number of steps that were taken for the first time."""
    gap: float
    """Median seconds from one step to the next in one incarnation."""
    mean_gap: float
    """Mean seconds between such steps, which includes checkpoints and copies."""
    seen: tuple[Seen, ...]

    def per_ideal(self, ideal_gap: float) -> float:
        """Return useful steps per ideal step. `ideal_gap` is the time of a step without any system,
        in seconds.
        """
        return self.useful * ideal_gap / self.seconds


@dataclass(frozen=True, order=True)
class _Made:
    when: float
    incarnation: int
    step: int


def keep_account(
    incarnations: Mapping[int, Incarnation], events: Sequence[tuple[float, Kind]], begin: float, end: float
) -> Account:
    """Return the account from `begin` to `end`. `events` contains the time and kind of each
    failure.
    """
    every = _made(incarnations)
    made = [one for one in every if begin <= one.when <= end]
    gaps = [after.when - before.when for before, after in pairwise(made) if before.incarnation == after.incarnation]
    gap = statistics.median(gaps) if gaps else 0.0
    first: dict[int, _Made] = {}
    for one in every:
        first.setdefault(one.step, one)
    again = [one for one in made if first[one.step] is not one]
    useful = sum(begin <= one.when <= end for one in first.values())
    until = [*(moment for moment, _ in events), end][1:]
    seen = []
    for (moment, kind), limit in zip(events, until, strict=True):
        pause, recovered = _pause(every, moment, limit, gap)
        seen.append(Seen(kind, round(pause, 4), sum(moment < one.when <= limit for one in again), recovered))
    return Account(end - begin, useful, gap, statistics.fmean(gaps) if gaps else 0.0, tuple(seen))


def _made(incarnations: Mapping[int, Incarnation]) -> list[_Made]:
    """Return when the first rank of each incarnation took each step, oldest first."""
    found: dict[tuple[int, int], float] = {}
    for number, incarnation in incarnations.items():
        for rank, times in incarnation.steps.items():
            for step, when in enumerate(times, incarnation.first[rank]):
                found[number, step] = min(when, found.get((number, step), when))
    return sorted(_Made(when, number, step) for (number, step), when in found.items())


def _pause(every: Sequence[_Made], moment: float, limit: float, gap: float) -> tuple[float, bool]:
    """Return the pause after a failure, and whether training continued before the next failure."""
    pause = 0.0
    for before, after in pairwise(every):
        start = max(before.when, moment - gap)
        if before.incarnation != after.incarnation and after.when > moment and start < limit:
            pause += max(0.0, min(after.when, limit) - start - gap)
    earlier, own, later = (
        [one for one in every if low < one.when <= high]
        for low, high in ((-math.inf, moment), (moment, limit), (limit, math.inf))
    )
    last = (earlier + own)[-1]
    is_standing = later[0].incarnation != last.incarnation if later else last.when < limit - 3 * gap
    if is_standing and not later:
        pause += max(0.0, limit - max(last.when, moment - gap) - gap)  # No group took another step.
    changed = any(one.incarnation != earlier[-1].incarnation for one in own) if earlier else bool(own)
    return pause, bool(own) and (changed or not is_standing)
