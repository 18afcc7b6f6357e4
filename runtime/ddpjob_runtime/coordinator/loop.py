"""The coordinator's clock and timers, which tests advance by hand, and a function that awaits with
a timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Loop:
    """The functions of an event loop that the decision-making modules need.

    `now()` returns Unix seconds that never go back. `later(seconds, function)` calls `function`
    after `seconds`. `changed()` must be called after every change to the report. `log(text)` writes
    one line for each event.
    """

    now: Callable[[], float]
    later: Callable[[float, Callable[[], None]], Any]
    changed: Callable[[], None]
    log: Callable[[str], None]


class Alarm:
    """Calls `ring` at the earliest of the times that were set."""

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

    After `seconds`, `left()` returns how many more seconds to wait; 0 means that the timeout has
    expired.

    Before Python 3.12, `asyncio.wait_for` created a task for each call. When hundreds of members
    connected at the same time, a task for each line took a third of the CPU time. `within`
    therefore awaits `what` in the current task.
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
        # Call `end` only in the next turn of the event loop, after the data that arrived while this
        # process was suspended has been read.
        timer = loop.call_soon(end)

    timer = loop.call_later(seconds, due)
    try:
        return await what
    except asyncio.CancelledError:
        # If other code has cancelled the task too, the cancellation by that code must take effect.
        if not over or (hasattr(task, "uncancel") and task.uncancel()):
            raise
        return None
    finally:
        timer.cancel()
