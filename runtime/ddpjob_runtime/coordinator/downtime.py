"""Measures how long the job makes no progress after a break."""

from __future__ import annotations


class Downtime:
    """Measures the time from a break to the next step. If no steps are reported, it ends with the
    next round instead.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.last_seconds: float | None = None
        self._steps_are_seen = False

    def begin(self, now: float) -> None:
        """Begin the downtime, unless it has begun already."""
        self.since = self.since or now

    def round_runs(self, now: float) -> None:
        """End the downtime because a round runs, if the job has never reported a step.

        If steps are reported, the downtime lasts until the next step.
        """
        if not self._steps_are_seen:
            self._end(now)

    def step(self, now: float, running: bool) -> None:
        """Record that a step was reported. If a round is running, the downtime ends."""
        self._steps_are_seen = True
        if running:
            self._end(now)

    def forget(self) -> None:
        """Discard the current downtime, because its break belongs to a round of this coordinator
        that was superseded.
        """
        self.since = None

    def _end(self, now: float) -> None:
        if self.since is not None:
            self.last_seconds, self.since = now - self.since, None
