"""A queue of keys with delays: a key waits once, is worked on by one worker at a time, and may be woken again."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger("ddpjob.queue")
Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 60.0


class DelayQueue(Generic[Key]):
    """Keys due at times of the event loop's clock. An earlier wish beats a later one."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._busy: set[Key] = set()
        self._order = 0
        self._changed = asyncio.Event()
        self._failures: dict[Key, int] = {}

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Wakes `key` after `delay` seconds, or earlier if that was wished before."""
        when = asyncio.get_running_loop().time() + delay
        if when < self._due.get(key, float("inf")):
            self._due[key] = when
            self._order += 1
            heapq.heappush(self._heap, (when, self._order, key))
            self._changed.set()

    async def work(self, handle: Callable[[Key], Awaitable[float | None]], workers: int) -> None:
        """Runs for ever. `handle` returns after how many seconds the key is due again, or None."""
        gate = asyncio.Semaphore(workers)
        async with asyncio.TaskGroup() as group:
            while True:
                await gate.acquire()
                key = await self._next()
                group.create_task(self._one(key, handle, gate))

    async def _next(self) -> Key:
        while True:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            timeout = None
            held = []
            found = None
            while self._heap:
                when, _, key = self._heap[0]
                if self._due.get(key) != when:
                    heapq.heappop(self._heap)
                elif when > now:
                    timeout = when - now
                    break
                elif key in self._busy:
                    held.append(heapq.heappop(self._heap))
                else:
                    heapq.heappop(self._heap)
                    del self._due[key]
                    self._busy.add(key)
                    found = key
                    break
            for entry in held:
                heapq.heappush(self._heap, entry)
            if found is not None:
                return found
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _one(self, key: Key, handle: Callable[[Key], Awaitable[float | None]], gate: asyncio.Semaphore) -> None:
        try:
            delay = await handle(key)
            self._failures.pop(key, None)
        except Exception:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures - 1, 10))
            log.exception("a pass over %s failed; the next in %.1f s", key, delay)
        finally:
            self._busy.discard(key)
            gate.release()
            self._changed.set()
        if delay is not None:
            self.add(key, delay)
