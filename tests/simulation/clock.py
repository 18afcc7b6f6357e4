"""Virtual time, which jumps from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH_SECONDS = EPOCH.timestamp()


class Clock:
    """Seconds since EPOCH, and the planned calls with their times.

    Events of the same moment happen in the order in which they were planned.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call `function` after `seconds`. There is no way to cancel: the function checks
        whether it still applies.
        """
        self._planned += 1
        heapq.heappush(self._due, (self.now + seconds, self._planned, function))

    def step(self, until: float) -> bool:
        """Run the next event. If no event is due before `until`, move the clock to `until` and
        return False.
        """
        if not self._due or self._due[0][0] > until:
            self.now = max(self.now, until)
            return False
        when, _, function = heapq.heappop(self._due)
        self.now = max(self.now, when)
        function()
        return True

    def moment(self) -> datetime:
        """Return the present time of the simulated world."""
        return EPOCH + timedelta(seconds=self.now)

    def stamp(self) -> str:
        """Return the present time as the API server writes it: whole seconds."""
        return stamp(self.now)


def stamp(seconds: float) -> str:
    """Format a time as RFC 3339 in whole seconds, as Kubernetes objects do."""
    return (EPOCH + timedelta(seconds=int(seconds))).strftime("%Y-%m-%dT%H:%M:%SZ")
