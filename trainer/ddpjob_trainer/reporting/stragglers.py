"""Which ranks lag: all others wait for them in each step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NAMED = 8
"""Ranks that are named at most, the slowest first; more than these are no exception."""
_REPORTS = 3
_RECENT = 0.3
"""Weight of the newest report in a rank's slowdown."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose own work of a step takes `slowdown` times the median rank's, 1 or more."""

    rank: int
    slowdown: float


@dataclass
class _Rank:
    slowdown: float = 1.0
    named: bool = False
    since: float | None = None
    """When it began to be on the other side, slow for one that is not named, fast for one that is."""
    reports: int = 0


class Stragglers:
    """Names a rank that is slower than the median by `factor` for `seconds` and three reports.

    It is named no longer when it has been half as much slower, or less, for as long.
    """

    def __init__(self, factor: float, seconds: float) -> None:
        """`factor` 0: nobody is named."""
        self._factor, self._seconds = factor, seconds
        self._back = 1 + (factor - 1) / 2
        self._ranks: dict[int, _Rank] = {}

    def add(self, now: float, times: Sequence[float]) -> tuple[Straggler, ...]:
        """`times`: each rank's own seconds per step since the last call, for equal shares of the batch; 0: unknown.

        `now`: a clock in seconds that never goes back. Returns who lags.
        """
        known = [seconds for seconds in times if seconds > 0]
        if not self._factor or len(known) < 2:
            return ()
        median = statistics.median_low(known)
        for rank, seconds in enumerate(times):
            if seconds > 0:
                self._judge(self._ranks.setdefault(rank, _Rank()), now, seconds / median)
        named = [
            Straggler(rank, max(1.0, round(found.slowdown, 2))) for rank, found in self._ranks.items() if found.named
        ]
        return tuple(sorted(named, key=lambda straggler: (-straggler.slowdown, straggler.rank))[:NAMED])

    def _judge(self, found: _Rank, now: float, slowdown: float) -> None:
        found.slowdown += _RECENT * (slowdown - found.slowdown)
        other = slowdown < self._back if found.named else slowdown > self._factor
        if not other:
            found.since, found.reports = None, 0
            return
        found.since = now if found.since is None else found.since
        found.reports += 1
        if found.reports >= _REPORTS and now - found.since >= self._seconds:
            found.named, found.since, found.reports = not found.named, None, 0
            found.slowdown = slowdown if found.named else found.slowdown
