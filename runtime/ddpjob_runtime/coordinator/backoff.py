"""Decides how long to delay a round after the job has failed repeatedly without making progress.

Without back-off, a script that fails at its first step would restart several times a minute. Its
messages would fill the logs, and the job would use up its restarts before anybody could react. A
job that trains for hours between failures, however, should not wait at all.

- After the first failure in a series, the group does not wait. After the second failure, the group
  waits `initial` seconds. Each later wait is twice as long as the previous wait, up to `maximum`.
- A series ends when the job completes a step beyond the furthest step so far, or when a round has
  run for HEALTHY_SECONDS. Repeating the steps that were lost since the last checkpoint does not end
  a series.
- Only failures of the job itself count. After the loss of a node, the next round begins without
  delay.

Example with initial=10 and maximum=300. The script fails at step 120 each time, after 20 s:

    failure   1   2    3    4    5     6     7     8
    waits     0  10   20   40   80   160   300   300

Once a new checkpoint lets the script reach step 121, the next wait is 0 s again.

A job whose recovery.maxRestarts is 0 waits for at least VERDICT_SECONDS after every failure of its
own. Meanwhile, the operator decides whether the failure counts and, if so, ends the job. The
operator uses the same back-off rule when it replaces pods that end soon after they were created
(`core/plan/slots.py`).
"""

from __future__ import annotations

HEALTHY_SECONDS = 60.0
"""A round that has run for this many seconds does not count as part of a crash loop."""
VERDICT_SECONDS = 5.0
"""Number of seconds that a job whose recovery.maxRestarts is 0 waits after a failure of its own. In
this time, the operator can decide whether the failure counts, and end the job. If it does not, the
job continues, because the operator might be down.
"""


class RoundBackoff:
    """Computes how long to delay the next round after a series of failures.

    With `no_restarts`, the delay also gives the operator time to decide about each failure.
    """

    def __init__(self, initial: float, maximum: float, *, no_restarts: bool = False) -> None:
        self.initial, self.maximum, self._no_restarts = initial, maximum, no_restarts
        self.until: float | None = None
        """Time before which the next round must not begin; None if it can begin immediately."""
        self._failures = 0
        self._furthest: tuple[float, float] | None = None  # (epoch, step)
        self._advanced = False

    def configure(self, initial: float, maximum: float) -> None:
        """Set new delays, which apply from the next failure on."""
        self.initial, self.maximum = initial, maximum

    def step(self, position: tuple[float, float]) -> None:
        """Record that the job has reached `position`, a pair of epoch and step."""
        if self._furthest is None or position > self._furthest:
            self._furthest, self._advanced = position, True

    def fail(self, now: float, ran: float) -> float:
        """Count a failure of the job itself, and return the back-off in seconds.

        `ran` is the number of seconds that the failed round had run. The back-off does not include
        the time for the operator's decision.
        """
        healthy = self._advanced or ran >= HEALTHY_SECONDS
        self._failures = 1 if healthy else self._failures + 1
        self._advanced = False
        wait = 0.0
        if self._failures > 1:
            wait = min(self.maximum, self.initial * 2.0 ** min(self._failures - 2, 60))
        held = max(wait, VERDICT_SECONDS) if self._no_restarts else wait
        self.until = now + held if held else None
        return wait

    def clear(self) -> None:
        """End the wait, because a round begins."""
        self.until = None
