"""Time as the decisions see it: handed in, so that tests turn the clock by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Loop:
    """What the decisions need from the event loop.

    `now()`: Unix seconds that never go back; `later(seconds, function)`: calls the function then; `changed()`: to be
    called after every change of the report; `log(text)`: one line for each event.
    """

    now: Callable[[], float]
    later: Callable[[float, Callable[[], None]], Any]
    changed: Callable[[], None]
    log: Callable[[str], None]


class Alarm:
    """Calls `ring` at the earliest of the moments it was set to."""

    def __init__(self, loop: Loop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._at: float | None = None

    def set(self, moment: float) -> None:
        """Ring at this moment, unless an earlier one is set already."""
        if self._at is not None and self._at <= moment:
            return
        self._at = moment
        self._loop.later(max(0.0, moment - self._loop.now()) + 0.001, lambda: self._due(moment))

    def _due(self, moment: float) -> None:
        if self._at == moment:
            self._at = None
        self._ring()
