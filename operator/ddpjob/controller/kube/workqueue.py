"""A queue of keys to process now or later, in which groups of keys take fair turns.

One process reconciles all jobs, whose keys are grouped by namespace. A pod that changes ten times a
second must not cause ten reconciles, two workers must not reconcile the same job at once, and a
namespace with a thousand new jobs must not keep the other namespaces waiting.

`DelayQueue` decides which key is handled next.

- A key is queued at most once, and the earlier of two requested times counts. A key that is added
  while a worker handles it is handled again afterwards.
- A change that is not urgent waits until INTERVAL after the key's last start, so a burst of changes
  costs one reconcile per second.
- Among due keys, the lowest rank comes first, then the group with the fewest workers, then the key
  that was scheduled first.
- A group gets another worker only if it has no worker yet, or if its workers number fewer than half
  of the idle workers.

Example with 8 workers and any number of keys:

    group A alone          gets 3 workers: 0 < 8/2, 1 < 7/2 and 2 < 6/2, but 3 > 5/2
    then B, C, D and E     B gets 2 of the remaining 5, and C, D and E get 1 each

`Turns` limits what the workers do inside a reconcile, such as creating pods.

- At most `most` turns are taken at a time. A turn that lasts longer than SLOW seconds becomes a
  slow turn and no longer counts, because it probably waits for something else, such as an admission
  webhook. At most `most` slow turns are taken at a time.
- The next turn goes to the waiting group with the fewest recent turns. In this comparison, a turn
  counts only half after HALF_LIFE seconds. A group that holds half of all turns comes last.
  Example: group A has had 400 turns and waits for 600 more. Then group B asks for 4 turns, and it
  gets the next 4.
- Fairness counts turns, not seconds, because turns take much longer at the start of a burst.

A key names the job to reconcile but never says what has happened to it, so merging two changes
loses nothing (docs/decisions/0002).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

log = logging.getLogger("ddpjob.queue")
Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 60.0
INTERVAL = 1.0
"""Minimum delay in seconds between two starts of the same key. The delay does not apply to an
urgent start, or to a start that the key's previous handling has requested."""
CROWDED_INTERVAL = 1.7
"""Minimum delay in seconds between two starts of the same key while more important work is waiting.
It replaces INTERVAL, so a job's status can be up to two seconds late.
"""
HALF_LIFE = 10.0
"""Number of seconds after which a turn counts only half in the comparison of groups."""
SLOW = 0.3
"""Number of seconds after which a turn counts as slow. Another turn can then begin before the slow
one ends.
"""


class DelayQueue(Generic[Key]):
    """Decides which key is handled next, and when.

    Each key has a time from which it is due, on the event loop's clock. If several times are
    requested for a key, the earliest one counts. Due keys are ordered by `rank`, lowest first, then
    by the number of workers of their `group`, fewest first, and then by the time at which they were
    scheduled. `crowded` returns whether each key should start less often than usual.
    """

    def __init__(
        self,
        group: Callable[[Key], Hashable] = lambda key: key,
        rank: Callable[[Key], int] = lambda key: 0,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group, self._rank, self._crowded = group, rank, crowded
        self._due: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._ready: dict[Hashable, list[tuple[int, int, Key]]] = {}
        self._busy: set[Key] = set()
        self._workers: Counter[Hashable] = Counter()
        self._began: dict[Key, float] = {}
        self._order = 0
        self._changed = asyncio.Event()
        self._failures: dict[Key, int] = {}
        self._time: Callable[[], float] = lambda: 0.0

    def add(self, key: Key, delay: float = 0.0, *, urgent: bool = True) -> None:
        """Schedule `key` to start in `delay` seconds, unless it is already due earlier.

        A key that is not `urgent` starts no earlier than INTERVAL seconds after its last start.
        While the queue is crowded, CROWDED_INTERVAL takes the place of INTERVAL.
        """
        when = asyncio.get_running_loop().time() + delay
        if not urgent and key in self._began:
            when = max(when, self._began[key] + (CROWDED_INTERVAL if self._crowded() else INTERVAL))
        if key not in self._due or when < self._due[key][0]:
            self._schedule(key, when)

    def depth(self) -> int:
        """Return the number of due keys that are waiting for a worker.

        This method can be called from any thread.
        """
        return len(self._waiting())

    def age(self) -> float:
        """Return for how many seconds the longest-waiting key has been due; 0 if no key is due.

        This method can be called from any thread.
        """
        return max(0.0, self._time() - min(self._waiting(), default=math.inf))

    def _waiting(self) -> list[float]:
        """Return the due times of all keys that are due and wait for a worker.

        `_ready` is not used here, because it lacks keys that became due while all workers were
        busy.
        """
        now = self._time()
        return [when for key, (when, _) in list(self._due.items()) if when <= now and key not in self._busy]

    def _schedule(self, key: Key, when: float) -> None:
        self._order += 1
        self._due[key] = when, self._order
        heapq.heappush(self._heap, (when, self._order, key))
        self._changed.set()

    async def work(self, handle: Callable[[Key], Awaitable[float | None]], workers: int) -> None:
        """Call `handle` for each key that is due, until cancelled.

        At most `workers` keys are handled at the same time. `handle` returns the number of seconds
        after which the key is due again, or None. If `handle` raises an exception, the exception is
        logged, and the key is due again after FIRST_BACKOFF seconds. This delay doubles with each
        consecutive failure, up to LONGEST_BACKOFF.
        """
        self._time = asyncio.get_running_loop().time
        gate = asyncio.Semaphore(workers)
        async with asyncio.TaskGroup() as group:
            while True:
                await gate.acquire()
                key = await self._next(workers)
                group.create_task(self._one(key, handle, gate))

    async def _next(self, workers: int) -> Key:
        while True:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            while self._heap and self._heap[0][0] <= now:
                when, order, key = heapq.heappop(self._heap)
                # Skip the entry if its key was scheduled again for an earlier time, because the key
                # then has a different entry. Also skip it if the key is being handled now, because
                # the key then gets a new entry.
                if self._due.get(key) == (when, order) and key not in self._busy:
                    heapq.heappush(self._ready.setdefault(self._group(key), []), (self._rank(key), order, key))
            share = max(1, (workers - len(self._busy)) / 2)
            heads = [(keys[0][0], self._workers[g], keys[0][1], g) for g, keys in self._ready.items()]
            chosen = min((head for head in heads if head[1] < share), default=None)
            if chosen is not None:
                return self._begin(chosen[3], now)
            try:
                async with asyncio.timeout_at(self._heap[0][0] if self._heap else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _begin(self, group: Hashable, now: float) -> Key:
        keys = self._ready[group]
        key = heapq.heappop(keys)[2]
        if not keys:
            del self._ready[group]
        del self._due[key]
        assert key not in self._busy, f"{key} is already being handled by another worker"
        self._busy.add(key)
        self._workers[group] += 1
        self._began[key] = now
        return key

    async def _one(self, key: Key, handle: Callable[[Key], Awaitable[float | None]], gate: asyncio.Semaphore) -> None:
        try:
            delay = await handle(key)
            self._failures.pop(key, None)
        except Exception:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures - 1, 10))
            log.exception("the reconcile of %s failed; retrying in %.1f s", key, delay)
        finally:
            self._end(key)
            gate.release()
        if delay is not None:
            self.add(key, delay)
        elif key not in self._due:
            self._began.pop(key, None)

    def _end(self, key: Key) -> None:
        group = self._group(key)
        self._workers[group] -= 1
        if not self._workers[group]:
            del self._workers[group]
        self._busy.discard(key)
        if key in self._due:
            self._schedule(key, self._due[key][0])
        self._changed.set()


class Turns:
    """Limits how many turns are taken at the same time.

    At most `most` ordinary turns and at most `most` slow turns are taken. A turn becomes slow after
    SLOW seconds.

    While several groups wait, the group with the fewest recent turns gets the next turn. A group
    that holds half of all turns comes after all other groups.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._slow = 0
        self._taken: Counter[Hashable] = Counter()
        self._had: dict[Hashable, float] = {}
        """The number of recent turns of each group. Every HALF_LIFE seconds, the weight of each
        turn is halved."""
        self._halved = 0.0
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def wanted(self) -> bool:
        """Whether any group is waiting for a turn."""
        return bool(self._waiting)

    @asynccontextmanager
    async def turn(self, group: Hashable) -> AsyncIterator[None]:
        """Wait until the group gets a turn. The turn ends when the context exits."""
        if self._free and not self._waiting:
            self._begin(group)
        else:
            await self._wait(group)
        loop, is_slow = asyncio.get_running_loop(), False
        timer: asyncio.TimerHandle

        def pass_on() -> None:
            nonlocal is_slow, timer
            if self._slow == self._most:
                timer = loop.call_later(SLOW, pass_on)
                return
            self._slow, is_slow = self._slow + 1, True
            self._next()

        timer = loop.call_later(SLOW, pass_on)
        try:
            yield
        finally:
            timer.cancel()
            self._end(group, is_slow=is_slow)

    async def _wait(self, group: Hashable) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                # A turn was granted just before the cancellation. Pass the turn on to the next
                # group.
                self._end(group)
            raise

    def _begin(self, group: Hashable) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._halved + 1.0:
            left = 0.5 ** ((now - self._halved) / HALF_LIFE)
            self._had = {other: had * left for other, had in self._had.items() if had * left > 0.5}
            self._halved = now
        self._had[group] = self._had.get(group, 0.0) + 1
        assert self._free > 0, "a turn was started although none is free"
        self._free -= 1
        self._taken[group] += 1

    def _end(self, group: Hashable, *, is_slow: bool = False) -> None:
        self._taken[group] -= 1
        if not self._taken[group]:
            del self._taken[group]
        if is_slow:
            # When this turn became slow, its place was given to another turn.
            self._slow -= 1
        else:
            self._next()

    def _next(self) -> None:
        """Free one place, and give it to the waiting group that comes first."""
        self._free += 1
        assert self._free <= self._most, "a turn was returned twice"
        while self._free and self._waiting:
            chosen = min(self._waiting, key=self._comes)
            others = self._waiting.pop(chosen)
            first = others.popleft()
            if others:
                self._waiting[chosen] = others
            if not first.cancelled():
                first.set_result(None)
                self._begin(chosen)

    def _comes(self, group: Hashable) -> tuple[bool, float]:
        """Return the sort key for waiting groups.

        If several groups have equal keys, the first of them in `_waiting` is chosen, because it has
        waited longest since its last turn.
        """
        return 2 * self._taken[group] >= self._most, self._had.get(group, 0.0)
