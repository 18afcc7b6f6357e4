"""The clock and timers of the decisions, which tests advance by hand, and a timeout for awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Loop:
    """The interface of the event loop that the decisions use.

    `now()` returns Unix seconds that never go back. `later(seconds, function)` calls the function
    after that time. `changed()` must be called after every change to the report. `log(text)` writes
    one line for each event.
    """

    now: Callable[[], float]
    later: Callable[[float, Callable[[], None]], Any]
    changed: Callable[[], None]
    log: Callable[[str], None]


class Alarm:
    """Calls `ring` at the earliest of the times it was set to."""

    def __init__(self, loop: Loop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._at: float | None = None

    def set(self, moment: float) -> None:
        """Ring at `moment`, unless an earlier time is set already."""
        if self._at is not None and self._at <= moment:
            return
        self._at = moment
        self._loop.later(max(0.0, moment - self._loop.now()) + 0.001, lambda: self._due(moment))

    def _due(self, moment: float) -> None:
        if self._at == moment:
            self._at = None
        self._ring()


async def within(seconds: float, what: Awaitable[T], left: Callable[[], float] = lambda: 0.0) -> T | None:
    """Await `what`, and return its result, or None after a timeout.

    When the time is up, `left` returns how many more seconds to allow. Unlike `asyncio.wait_for`
    before Python 3.12, this awaits `what` in the current task. A task for each line would take a
    third of the CPU time when hundreds of members connect at once.
    """
    task, loop, over = asyncio.current_task(), asyncio.get_running_loop(), False
    assert task is not None
    timer: asyncio.Handle

    def end() -> None:
        nonlocal over, timer
        if (more := left()) > 0:
            timer = loop.call_later(more, due)
            return
        over = True
        task.cancel()

    def due() -> None:
        nonlocal timer
        timer = loop.call_soon(end)  # First read data that arrived while this process was suspended.

    timer = loop.call_later(seconds, due)
    try:
        return await what
    except asyncio.CancelledError:
        if not over or (hasattr(task, "uncancel") and task.uncancel()):  # Other code may have cancelled the task too.
            raise
        return None
    finally:
        timer.cancel()
