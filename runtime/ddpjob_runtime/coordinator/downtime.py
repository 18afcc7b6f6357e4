"""Measures how long the job makes no progress after a break."""

from __future__ import annotations


class Downtime:
    """The time from a break to the next step, or to the next round if no steps are reported."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.last_seconds: float | None = None
        self._steps_are_seen = False

    def begin(self, now: float) -> None:
        """Begin the downtime, unless it has begun already."""
        self.since = self.since or now

    def round_runs(self, now: float) -> None:
        """End the downtime when a round runs, if no steps are reported.

        Rounds are then the only evidence.
        """
        if not self._steps_are_seen:
            self._end(now)

    def step(self, now: float, running: bool) -> None:
        """End the downtime at a progress report, if a round is running."""
        self._steps_are_seen = True
        if running:
            self._end(now)

    def forget(self) -> None:
        """Discard the downtime, because the break belongs to an earlier coordinator."""
        self.since = None

    def _end(self, now: float) -> None:
        if self.since is not None:
            self.last_seconds, self.since = now - self.since, None
