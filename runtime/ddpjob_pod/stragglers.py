"""Finds lagging ranks, which make all other ranks wait in each step.

A rank that is 30 % slower than the others makes the whole job 30 % slower. The step times do not
show which rank is slow, because a step takes equally long on every rank. The ranks therefore
compare how long they work without waiting. This time is measured by `step_clock.py` in the trainer,
and by `own_work.py` in scripts.

- A rank's slowdown is the time of its own work per step, divided by that of the median rank. In a
  pipeline, a rank is compared only with ranks of the same stage, because stages do different work.
- If the ranks' shares of the batch differ, a second slowdown is computed as if the shares were
  equal, and the smaller of the two slowdowns counts. A rank is not lagging just because it has more
  samples, and the other ranks do not wait for a rank with fewer samples.
- A rank is named once its slowdown has exceeded `factor` for `seconds` and in at least three
  reports. It stays named until its slowdown has been below the midpoint of 1 and `factor` for the
  same time and number of reports. A single slow batch therefore has no effect, and a rank near the
  limit is not named again and again.
- A rank's cost is the share of each step that would be saved if the rank kept pace. The cost may be
  small even if the slowdown is large, because the slow work may take only a hundredth of the step.
  An excess below a millisecond counts as noise. The operator moves a rank to a different host only
  if the move saves enough time (`slow_ranks.py` in the operator).

Example: 8 ranks normally need 100 ms per step and report every 10 s; factor=1.2, seconds=60.

      0 s  rank 5 begins to need 140 ms: slowdown 1.4
     60 s  it is named, with the slowdown 1.4
    300 s  it needs 115 ms. It stays named, because 1.15 is below 1.2, but not below 1.1
    400 s  it needs 105 ms, and 60 s later it is no longer named
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NAMED = 8
"""Maximum number of ranks to name, slowest first. If even more ranks are slow, a longer list would
not help to find the cause.
"""
_REPORTS = 3
_RECENT = 0.3
"""Weight of the latest report in a rank's slowdown and cost."""
_LEAST = 0.001
"""Minimum excess of a rank's time per step over that of the median rank, in seconds. A smaller
excess does not count as a cost.
"""


@dataclass(frozen=True)
class Straggler:
    """A lagging rank. Its own work takes `slowdown` times as long as that of the median rank.

    `slowdown` is at least 1.
    """

    rank: int
    slowdown: float
    cost: float | None = None
    """Excess of this rank's time over that of the median rank, as a share of the step time; None if
    the step time is unknown.
    """

    def as_figures(self) -> dict[str, float]:
        """Return this straggler as an entry for a progress report."""
        known = {} if self.cost is None else {"cost": self.cost}
        return {"rank": self.rank, "slowdown": self.slowdown, **known}


@dataclass
class _Rank:
    slowdown: float = 1.0
    cost: float = 0.0
    named: bool = False
    since: float | None = None
    """When a rank that is not named became slow, or when a named rank became fast enough. None if
    neither applies.
    """
    reports: int = 0


class Stragglers:
    """Names each rank whose slowdown has exceeded `factor` for `seconds` and in three reports.

    A rank stays named until its slowdown has been below the midpoint of 1 and `factor` for the same
    time and number of reports.
    """

    def __init__(self, factor: float, seconds: float) -> None:
        """Watch for lagging ranks. If `factor` is 0, no rank is ever named."""
        self._factor, self._seconds = factor, seconds
        self._back = 1 + (factor - 1) / 2
        self._ranks: dict[int, _Rank] = {}

    def add(
        self,
        now: float,
        own: Sequence[float],
        even: Sequence[float] | None = None,
        stages: int = 1,
        step: float = 0.0,
    ) -> tuple[Straggler, ...]:
        """Record the ranks' times since the last call, and return the lagging ranks.

        Args:
            now: the present time in seconds, from a monotonic clock.
            own: time of each rank's own work per step, in seconds; 0 means unknown.
            even: the values of `own` as they would be with equal shares of the batch; None if the
                shares are equal.
            stages: number of pipeline stages. Ranks r, r + stages, ... are compared only with each
                other.
            step: duration of a whole step, in seconds; 0 means unknown.

        If `even` is given, the smaller of a rank's two slowdowns counts. If only `even` counted, a
        rank with fewer samples could be named, because each pass has a fixed cost and this rank
        needs more time per sample. But the other ranks do not wait for it.
        """
        if not self._factor:
            return ()
        measures = [_slowdowns(times, stages) for times in ([own] if even is None else [own, even])]
        for rank, seconds in enumerate(own):
            found = [measure[rank] for measure in measures if rank in measure]
            if len(found) == len(measures):
                known = self._ranks.setdefault(rank, _Rank())
                excess = seconds - seconds / measures[0][rank]
                cost = min(1.0, excess / step) if step > 0 and excess >= _LEAST else 0.0
                known.cost += _RECENT * (cost - known.cost)
                self._judge(known, now, min(found))
        named = [
            Straggler(rank, max(1.0, round(found.slowdown, 2)), round(found.cost, 2) if step > 0 else None)
            for rank, found in self._ranks.items()
            if found.named
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


def _slowdowns(times: Sequence[float], stages: int) -> dict[int, float]:
    """Return each rank's time divided by the median time of the rank's stage.

    Ranks with unknown times are left out. So are stages in which fewer than two times are known.
    """
    found = {}
    for stage in range(stages):
        known = {rank: times[rank] for rank in range(stage, len(times), stages) if times[rank] > 0}
        if len(known) > 1:
            median = statistics.median_low(known.values())
            found.update({rank: seconds / median for rank, seconds in known.items()})
    return found
