"""Measures how long the job makes no progress after a break."""

from __future__ import annotations


class Downtime:
    """Measures the downtime: the time from a break to the next step.

    Until the job's first step is reported, a downtime ends when the next round begins to run.
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
        """Record that a round has begun to run.

        If the job has never reported a step, the downtime ends now. Otherwise, the downtime lasts
        until the next step.
        """
        if not self._steps_are_seen and self.since is not None:
            self._since_before_first_step = self.since
            self._end(now)

    def step(self, now: float, running: bool) -> None:
        """Record that a step was reported. If a round is running, the downtime ends.

        If the job had not reported a step before, `round_runs` has already ended the downtime. The
        downtime is then measured again, from the same break to this step.
        """
        self._steps_are_seen = True
        if running:
            if self.since is None:
                self.since = self._since_before_first_step
            self._since_before_first_step = None
            self._end(now)

    def forget(self) -> None:
        """Discard the current downtime, because the round that broke was superseded."""
        self.since = None

    def _end(self, now: float) -> None:
        if self.since is not None:
            self.last_seconds, self.since = now - self.since, None
