"""How long the job makes no step after a break."""

from __future__ import annotations


class Downtime:
    """From a break to the next step. Where nobody counts steps, to the next round that runs."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.last_seconds: float | None = None
        self._steps_are_seen = False

    def begin(self, now: float) -> None:
        """A round broke."""
        self.since = self.since or now

    def round_runs(self, now: float) -> None:
        """The group is formed: all that can be seen where no steps are reported."""
        if not self._steps_are_seen:
            self._end(now)

    def step(self, now: float, running: bool) -> None:
        """A progress report has arrived."""
        self._steps_are_seen = True
        if running:
            self._end(now)

    def forget(self) -> None:
        """The break was an earlier coordinator's."""
        self.since = None

    def _end(self, now: float) -> None:
        if self.since is not None:
            self.last_seconds, self.since = now - self.since, None
