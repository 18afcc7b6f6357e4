"""Measures how long the job makes no progress after a break."""

from __future__ import annotations


class Downtime:
    """Measures the time from a break to the next step. Until the job's first step is reported, it
    ends with the next round instead.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.last_seconds: float | None = None
        self._steps_are_seen = False
        self._since_before_first_step: float | None = None

    def begin(self, now: float) -> None:
        """Begin the downtime, unless it has begun already."""
        self.since = self.since or now

    def round_runs(self, now: float) -> None:
        """End the downtime because a round runs, if the job has never reported a step.

        If steps are reported, the downtime lasts until the next step.
        """
        if not self._steps_are_seen and self.since is not None:
            self._since_before_first_step = self.since
            self._end(now)

    def step(self, now: float, running: bool) -> None:
        """Record that a step was reported. If a round is running, the downtime ends.

        With the job's first step, the time since the last break replaces the time that a round has
        ended.
        """
        self._steps_are_seen = True
        if running:
            if self.since is None:
                self.since = self._since_before_first_step
            self._since_before_first_step = None
            self._end(now)

    def forget(self) -> None:
        """Discard the current downtime, because its break belongs to a round of this coordinator
        that was superseded.
        """
        self.since = None

    def _end(self, now: float) -> None:
        if self.since is not None:
            self.last_seconds, self.since = now - self.since, None
