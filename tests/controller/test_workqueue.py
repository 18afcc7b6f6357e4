"""The keyed queue runs each key once, on time, never twice concurrently, and with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from ddpjob.controller.kube import workqueue as queue_module
from ddpjob.controller.kube.workqueue import DelayQueue, Turns

from .virtual_loop import virtual


async def drive(
    queue: DelayQueue[str], handle: Callable[[str], Awaitable[float | None]], seconds: float, workers: int = 2
) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await queue.work(handle, workers)


@virtual
async def test_a_key_added_twice_runs_once_at_the_earlier_time() -> None:
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


@virtual
async def test_a_key_woken_during_its_run_runs_again_but_never_concurrently() -> None:
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


@virtual
async def test_a_key_that_fails_backs_off_and_does_not_stop_other_keys() -> None:
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


@virtual
async def test_a_key_added_for_several_times_runs_once_at_the_first_of_them() -> None:
    queue: DelayQueue[str] = DelayQueue()
    starts: list[float] = []
    loop = asyncio.get_running_loop()

    async def handle(key: str) -> None:
        starts.append(loop.time())
        if len(starts) == 1:
            queue.add("a", 0.2)
            queue.add("a", 0.1)
            queue.add("a", 0.2)
            await asyncio.sleep(0.3)  # these times pass while the key is running

    queue.add("a", 0.05)
    queue.add("a", 0.01)
    await drive(queue, handle, 0.8)
    assert len(starts) == 2


@virtual
async def test_only_non_urgent_keys_wait_a_second_after_the_last_start() -> None:
    queue: DelayQueue[str] = DelayQueue()
    starts: list[float] = []
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def handle(key: str) -> float:
        starts.append(loop.time() - began)
        return 60.0

    async def events() -> None:
        for _ in range(20):
            queue.add("a", urgent=False)
            await asyncio.sleep(0.02)
        queue.add("a")
        await asyncio.sleep(0.1)
        queue.add("a", urgent=False)

    await asyncio.gather(drive(queue, handle, 2.5), events())
    assert len(starts) == 3
    assert starts[0] < 0.3 < starts[1] < 0.9, "the first and the urgent addition run immediately"
    assert starts[2] - starts[1] >= queue_module.INTERVAL


@virtual
async def test_non_urgent_keys_wait_longer_while_the_queue_is_crowded() -> None:
    crowded = True
    queue: DelayQueue[str] = DelayQueue(crowded=lambda: crowded)
    starts: list[float] = []
    loop = asyncio.get_running_loop()

    async def handle(key: str) -> float:
        starts.append(loop.time())
        return 60.0

    async def events() -> None:
        nonlocal crowded
        for key in ("a", "a", "a"):
            queue.add(key, urgent=False)
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        crowded = False
        queue.add("a", urgent=False)

    await asyncio.gather(drive(queue, handle, 4), events())
    first, second = starts[1] - starts[0], starts[2] - starts[1]
    assert first >= queue_module.CROWDED_INTERVAL > second >= queue_module.INTERVAL


@virtual
async def test_slow_keys_of_some_groups_leave_workers_to_other_groups() -> None:
    queue: DelayQueue[str] = DelayQueue(group=lambda key: key.split("/")[0])
    slow, started, loop = 0, dict[str, float](), asyncio.get_running_loop()
    began = loop.time()

    async def handle(key: str) -> None:
        nonlocal slow
        started[key] = loop.time() - began
        if key.startswith("hostile"):
            slow += 1
            await asyncio.sleep(60)

    for group in range(3):
        for number in range(50):
            queue.add(f"hostile-{group}/{number}")
    queue.add("other/job", 0.1)
    working = asyncio.create_task(queue.work(handle, workers=16))
    while "other/job" not in started:
        assert loop.time() - began < 30, "the key of the other group waits for slow keys"
        await asyncio.sleep(0.01)
    working.cancel()
    assert 8 <= slow < 16


@virtual
async def test_waiting_keys_are_counted_while_every_worker_hangs() -> None:
    queue: DelayQueue[str] = DelayQueue()
    hang = asyncio.Event()

    async def handle(key: str) -> None:
        await hang.wait()

    for key in ("hangs", "too"):
        queue.add(key)
    working = asyncio.create_task(queue.work(handle, workers=2))
    await asyncio.sleep(1)
    assert (queue.depth(), queue.age()) == (0, 0.0), "both running keys are counted as running"
    for key, delay in (("hangs", 0), ("first", 0), ("second", 50), ("later", 500)):
        queue.add(key, delay)
    await asyncio.sleep(100)
    assert queue.depth() == 2 and 100 <= queue.age() < 101, "'hangs' waits for itself, 'later' is not due"
    hang.set()
    await asyncio.sleep(1)
    assert (queue.depth(), queue.age()) == (0, 0.0)
    working.cancel()


@virtual
async def test_keys_of_a_higher_rank_run_after_keys_of_a_lower_rank() -> None:
    queue: DelayQueue[int] = DelayQueue(rank=lambda key: key % 2)
    seen: list[int] = []

    async def handle(key: int) -> None:
        seen.append(key)
        await asyncio.sleep(0)

    for key in (*range(1, 200, 2), 200):
        queue.add(key)
    await drive(queue, handle, 0.5)
    assert seen[0] == 200 and len(seen) == 101


@virtual
async def test_the_queue_forgets_a_key_that_is_not_due_again() -> None:
    queue: DelayQueue[str] = DelayQueue()

    async def handle(key: str) -> None:
        queue.add(key, 0.05) if not key.endswith("!") else None

    for number in range(100):
        queue.add(f"{number}!")
    await drive(queue, handle, 0.3)
    kept = [vars(queue)[name] for name in ("_due", "_heap", "_ready", "_busy", "_workers", "_began", "_failures")]
    assert not any(kept), kept


@virtual
async def test_a_group_without_a_turn_gets_one_soon_no_matter_how_many_keys_wait() -> None:
    turns, order = Turns(2), list[str]()

    async def take(group: str) -> None:
        async with turns.turn(group):
            order.append(group)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for group in ["crowd"] * 20 + ["late", "crowd", "late", "other"]:
            tasks.create_task(take(group))
    assert len(order) == 24
    assert set(order[2:5]) >= {"late", "other"} and order.index("late") <= 4
    assert order.count("late") == 2 and "late" in order[4:8], "afterwards, the groups take turns"


@virtual
async def test_a_group_with_few_keys_waits_for_a_single_turn_of_other_groups() -> None:
    turns, waited, loop = Turns(2), list[float](), asyncio.get_running_loop()

    async def take(group: str) -> None:
        began = loop.time()
        async with turns.turn(group):
            if group == "one":
                waited.append(loop.time() - began)
            await asyncio.sleep(1)

    async def step_by_step() -> None:
        for _ in range(5):
            await take("one")
            await asyncio.sleep(4)

    async with asyncio.TaskGroup() as tasks:
        for group in ("a", "b", "c", "d", "e") * 20:
            tasks.create_task(take(group))
        tasks.create_task(step_by_step())
    assert len(waited) == 5 and max(waited[1:]) <= 1.01, (
        "except for the first key, because no group has had more turns then"
    )


@virtual
async def test_fairness_counts_turns_and_not_their_duration() -> None:
    """The first creations of a burst take much longer than later ones, whichever job they belong
    to.
    """
    turns, waited, loop = Turns(8), list[float](), asyncio.get_running_loop()

    async def take(group: str, seconds: float) -> None:
        began = loop.time()
        async with turns.turn(group):
            if group == "one":
                waited.append(loop.time() - began)
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(take("one", 2.0))
        for group in ("a", "b", "c", "d", "e") * 100:
            tasks.create_task(take(group, 0.02))
        await asyncio.sleep(0.5)
        await take("one", 0.02)
    assert len(waited) == 4 and waited[-1] <= 0.021


@virtual
async def test_a_group_with_long_turns_leaves_half_of_the_slots_to_others() -> None:
    turns, ends, loop = Turns(4), list[float](), asyncio.get_running_loop()

    async def take(group: str, seconds: float) -> None:
        async with turns.turn(group):
            await asyncio.sleep(seconds)
        if group == "quick":
            ends.append(loop.time())

    async with asyncio.TaskGroup() as tasks:
        for number in range(40):
            tasks.create_task(take("quick", 0.1))
            if number < 10:
                tasks.create_task(take("slow", 30.0))
    assert max(ends) < 3


@virtual
async def test_a_long_turn_frees_its_slot_up_to_a_limit_of_concurrent_turns() -> None:
    async def most_at_once(seconds: float) -> int:
        turns, running, most = Turns(4), 0, 0

        async def take(group: int) -> None:
            nonlocal running, most
            async with turns.turn(group):
                running += 1
                most = max(most, running)
                await asyncio.sleep(seconds)
                running -= 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(60):
                tasks.create_task(take(number % 3))
        assert (turns._free, turns._slow) == (4, 0)
        return most

    assert await most_at_once(queue_module.SLOW / 2) == 4
    assert await most_at_once(queue_module.SLOW * 2) == 8


@virtual
async def test_turns_stay_within_the_limit_and_survive_cancellation() -> None:
    chance, turns, running, most = random.Random(1), Turns(3), 0, 0

    async def take(group: int) -> None:
        nonlocal running, most
        async with turns.turn(group):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(chance.choice((0, 0, 0.001)))
            finally:
                running -= 1

    tasks = []
    for _ in range(500):
        tasks.append(asyncio.create_task(take(chance.randrange(4))))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3 and running == 0
    async with asyncio.timeout(5), turns.turn("a"), turns.turn("b"), turns.turn("c"):
        assert not turns._waiting, "all three slots are free again"
