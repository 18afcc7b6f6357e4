"""Measures training speed as reported counts per second, over a window of several reports.

A speed computed from only two reports would be poor, because few steps fall between them. For
example, with steps of 0.3 s and a report every half second, the speed would change by a factor of
two from one report to the next.

The window ends with the latest report. It is the shortest window that covers SECONDS and also
covers either STEPS or LONGEST_SECONDS. The speed is unknown until the reports cover FIRST_SECONDS
or FIRST_STEPS. If the count falls, the script has started again, so a new window begins.

Example, with steps of 0.3 s and a report every half second:

    second  0.5  1.0  1.5  2.0 ... 6.0
    count     1    3    5    6      20
    speed     -    -  4.0  3.3     3.4      measured since second 1.0

This file imports nothing, because the step counter loads only this file into a script's processes.
"""

from __future__ import annotations

FIRST_SECONDS, FIRST_STEPS = 1.0, 5
SECONDS = 5.0
LONGEST_SECONDS = 60.0
STEPS = 10
BETWEEN_SECONDS = 0.5
"""Minimum time between reports in the window, in seconds. If reports arrive faster, a new report
replaces the previous one, which keeps the window small.
"""


class Pace:
    """Computes the counts per second from the latest reports.

    `least` is the number of counts that a window must cover. The default is STEPS.
    """

    def __init__(self, least: int = STEPS) -> None:
        self._least = least
        self._window: list[tuple[float, float]] = []  # (count, time of the report), oldest first

    def add(self, count: float, now: float) -> None:
        """Record that `count` was reached at `now`, a time in seconds from a monotonic clock."""
        window = self._window
        if window and count == window[-1][0]:
            return
        if window and count < window[-1][0]:
            window.clear()
        if len(window) > 2 and window[-1][1] - window[-2][1] < BETWEEN_SECONDS:
            window.pop()
        window.append((count, now))
        while len(window) > 2 and self._suffices(window[1]):
            del window[0]

    def _suffices(self, first: tuple[float, float]) -> bool:
        """Whether the window would be long enough if it began with the report `first`."""
        count, moment = self._window[-1]
        seconds = moment - first[1]
        return seconds >= SECONDS and (count - first[0] >= self._least or seconds >= LONGEST_SECONDS)

    @property
    def per_second(self) -> float | None:
        """Counts per second; None while the window is too short."""
        if len(self._window) < 2:
            return None
        (first, began), (last, now) = self._window[0], self._window[-1]
        if now <= began or (now - began < FIRST_SECONDS and last - first < min(self._least, FIRST_STEPS)):
            return None
        return (last - first) / (now - began)
