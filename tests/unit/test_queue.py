"""The keyed queue: once, in time, never twice at once, with back-off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ddpjob.engine import queue as queue_module
from ddpjob.engine.queue import DelayQueue


async def drive(queue: DelayQueue[str], handle: Callable[[str], Awaitable[float | None]], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await queue.work(handle, workers=2)


async def test_a_key_waits_once_and_the_earlier_wish_wins() -> None:
    queue: DelayQueue[str] = DelayQueue()
    seen: list[str] = []

    async def handle(key: str) -> None:
        seen.append(key)

    queue.add("a", 5.0)
    queue.add("a", 0.0)
    queue.add("a", 0.01)
    queue.add("b", 0.02)
    await drive(queue, handle, 0.2)
    assert seen == ["a", "b"]


async def test_a_key_woken_while_it_is_worked_on_comes_again_but_never_twice_at_once() -> None:
    queue: DelayQueue[str] = DelayQueue()
    running, times, most = 0, 0, 0

    async def handle(key: str) -> None:
        nonlocal running, times, most
        running += 1
        times, most = times + 1, max(most, running)
        if times == 1:
            queue.add(key)
        await asyncio.sleep(0.05)
        running -= 1

    queue.add("a")
    await drive(queue, handle, 0.4)
    assert (times, most) == (2, 1)


async def test_an_error_backs_off_and_does_not_stop_the_others() -> None:
    queue: DelayQueue[str] = DelayQueue()
    seen: list[str] = []

    async def handle(key: str) -> None:
        seen.append(key)
        if key == "bad":
            raise ValueError("no")

    queue.add("bad")
    queue.add("good", 0.05)
    await drive(queue, handle, queue_module.FIRST_BACKOFF + 0.2)
    assert seen.count("good") == 1
    assert seen.count("bad") == 2
