"""The watch of coordinators: which reports wake a job, how often a coordinator is asked, and that
no coordinator delays other jobs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count, pairwise
from unittest import mock

from ddpjob.api.job_status import utc_now
from ddpjob.controller import report_watch
from ddpjob.controller.report_watch import STALE_SECONDS, ReportWatch
from ddpjob.engine.coordinator_client import CoordinatorClient, Target
from ddpjob.engine.ports import JobKey
from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator.server import Server
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.protocol import IncidentKind, Overdue

from .virtual_loop import run

KEY = JobKey("space", "job")
TOKEN = "the job's token"


def other(number: int) -> JobKey:
    return JobKey("space", f"other-{number}")


class Coordinator:
    """A coordinator on loopback that counts its requests. It can hang or send invalid reports."""

    def __init__(self) -> None:
        self.server = Server(CoordinatorSettings(2, 2), TOKEN, store_ready=True)
        self.asked: list[float] = []
        self.hangs = False
        self.lie = b""
        self.target = Target("", TOKEN)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(asyncio.get_running_loop().time())
        if not self.hangs and not self.lie:
            await self.server.serve(reader, writer)
            return
        await reader.readuntil(b"\r\n\r\n")
        if self.hangs:
            await asyncio.sleep(1e6)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.lie) + self.lie)
        writer.close()

    def news(self, nodes: int) -> None:
        self.server.coordinator.resize(nodes, 1)

    def requests(self, since: float) -> int:
        return sum(moment >= since for moment in self.asked)


class World:
    """A watch, and the times at which it woke each job."""

    def __init__(self) -> None:
        self.wakes: list[tuple[float, JobKey]] = []
        self.watch = ReportWatch(lambda key: self.wakes.append((self.now, key)), CoordinatorClient())

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def woken(self, key: JobKey = KEY, since: float = 0.0) -> list[float]:
        return [moment for moment, woken in self.wakes if woken == key and moment >= since]


@asynccontextmanager
async def coordinator(world: World) -> AsyncIterator[Coordinator]:
    made = Coordinator()
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.target = Target(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", TOKEN)
    try:
        yield made
    finally:
        listener.close()
        await world.watch.close()


def in_virtual_time(test: Callable[[World, Coordinator], Awaitable[None]]) -> Callable[[], None]:
    def played() -> None:
        async def main() -> None:
            world = World()
            async with coordinator(world) as made:
                await test(world, made)

        run(main())

    played.__name__, played.__doc__ = test.__name__, test.__doc__
    return played


@in_virtual_time
async def test_the_first_report_and_news_in_later_ones_wake_the_job_immediately(world: World, c: Coordinator) -> None:
    assert world.watch.report(KEY) is None and not world.watch.is_asking(KEY)
    world.watch.follow(KEY, c.target)
    assert world.watch.is_asking(KEY)
    await asyncio.sleep(1)
    assert world.woken() and not world.watch.is_asking(KEY)
    await asyncio.sleep(30)
    began = world.now
    c.news(5)
    await asyncio.sleep(0.2)
    assert len(world.woken(since=began)) == 1
    report = world.watch.report(KEY)
    assert report is not None and report.nodes == 5


@in_virtual_time
async def test_a_flapping_job_is_woken_once_a_second(world: World, c: Coordinator) -> None:
    world.watch.follow(KEY, c.target)
    await asyncio.sleep(30)
    began = world.now
    for number in range(1200):
        c.news(3 + number % 1000)
        await asyncio.sleep(0.05)
    wakes = world.woken(since=began)
    assert wakes[0] - began < 0.2 and 20 <= len(wakes) <= 62
    assert all(after - before > 0.99 for before, after in pairwise(wakes))
    assert c.requests(began) <= 80


@in_virtual_time
async def test_news_of_a_large_job_among_many_is_read_soon(world: World, c: Coordinator) -> None:
    """A lost member that has rejoined must not look lost until its pod is abandoned."""
    for number in range(300):
        world.watch.follow(other(number), c.target)
    await asyncio.sleep(30)
    async with coordinator(world) as large:
        for _ in range(20):
            large.server.coordinator.rounds.incidents.add(
                IncidentKind.HANG, world.now + 1.7e9, {"traceback": "y" * 30_000}, 0
            )
        world.watch.follow(KEY, large.target)
        for number in range(60):
            large.news(3 + number)
            await asyncio.sleep(0.1)
        began = world.now
        large.news(2)
        await asyncio.sleep(1.2)
        report = world.watch.report(KEY)
        assert report is not None and report.nodes == 2, f"{world.now - began} s old"


@in_virtual_time
async def test_progress_alone_does_not_wake_a_job_and_is_read_every_ten_seconds(world: World, c: Coordinator) -> None:
    world.watch.follow(KEY, c.target)
    c.server.coordinator.report_progress({"step": 1})
    await asyncio.sleep(30)
    began = world.now
    for step in range(2, 202):
        c.server.coordinator.report_progress({"step": step})
        await asyncio.sleep(0.5)
    assert world.woken(since=began) == [] and 9 <= c.requests(began) <= 12
    report = world.watch.report(KEY)
    assert report is not None and report.progress["step"] > 175


@in_virtual_time
async def test_an_overdue_step_wakes_the_job_only_once_despite_clock_differences(world: World, c: Coordinator) -> None:
    answers = count()
    world.watch._client.clock = lambda: utc_now() + timedelta(seconds=60 + 0.7 * (next(answers) % 2))
    world.watch.follow(KEY, c.target)
    await asyncio.sleep(30)
    began = world.now
    inside = c.server.coordinator
    inside.rounds.overdue = Overdue(utc_now() - timedelta(seconds=600), "rank 0 in all_reduce (train.py:7)")
    inside._bump()
    await asyncio.sleep(300)
    assert len(world.woken(since=began)) == 1 and next(answers) > 20
    inside.rounds.overdue = None
    inside._bump()
    await asyncio.sleep(1)
    assert len(world.woken(since=began)) == 2


@in_virtual_time
async def test_the_first_step_loss_and_speed_wake_the_job(world: World, c: Coordinator) -> None:
    """The first step decides what a later failure means. Users wait for the first loss and
    speed.
    """
    world.watch.follow(KEY, c.target)
    for number, first in enumerate(({"step": 1}, {"loss": 0.5}, {"metrics": {"stepsPerSecond": 2.0}})):
        await asyncio.sleep(15)
        began = world.now
        c.server.coordinator.report_progress({**first, "step": 2 + number})
        await asyncio.sleep(0.2)
        assert len(world.woken(since=began)) == 1
        c.server.coordinator.report_progress({"step": 3 + number, "loss": 0.4} if number else {"step": 3})
        await asyncio.sleep(0.2)
        assert len(world.woken(since=began)) == 1, "later losses and speeds are not news"


@in_virtual_time
async def test_findings_of_the_step_counter_wake_the_job(world: World, c: Coordinator) -> None:
    world.watch.follow(KEY, c.target)
    c.server.coordinator.report_progress({"automatic": True, "step": 1, "metrics": {"stepsPerSecond": 2.0}})
    for number, name in enumerate(protocol.FLAGS, 2):
        await asyncio.sleep(15)
        began = world.now
        c.server.coordinator.report_progress({"automatic": True, "step": number, name: True})
        await asyncio.sleep(0.2)
        assert len(world.woken(since=began)) == 1, name


@in_virtual_time
async def test_150_coordinators_that_hang_do_not_delay_other_jobs(world: World, c: Coordinator) -> None:
    async with coordinator(world) as bad:
        bad.hangs = True
        for number in range(150):
            world.watch.follow(other(number), bad.target)
        world.watch.follow(KEY, c.target)
        await asyncio.sleep(0.2)
        assert world.watch.report(KEY) is not None
        for number in range(2, 8):
            await asyncio.sleep(60)
            began = world.now
            c.news(number)
            await asyncio.sleep(0.2)
            assert len(world.woken(since=began)) == 1, "the news of a healthy coordinator arrives"
        assert all(len(world.woken(other(number))) == 1 for number in range(150)), (
            "one wake, because the coordinator does not answer"
        )
        assert bad.requests(300) <= 150 * 6, "hanging coordinators are asked rarely"


@in_virtual_time
async def test_a_report_is_dropped_while_its_coordinator_is_silent(world: World, c: Coordinator) -> None:
    world.watch.follow(KEY, c.target)
    await asyncio.sleep(5)
    c.hangs, began = True, world.now
    c.news(7)
    await asyncio.sleep(1)
    assert world.watch.report(KEY) is not None, "slow is not dead"
    await asyncio.sleep(20 + STALE_SECONDS)
    assert world.watch.report(KEY) is None
    assert len(world.woken(since=began + 2)) == 1
    c.hangs = False
    await asyncio.sleep(60)
    report = world.watch.report(KEY)
    assert report is not None and report.nodes == 7
    assert len(world.woken(since=began + 2)) == 2


@in_virtual_time
async def test_a_report_is_read_soon_after_a_long_silence_ends(world: World, c: Coordinator) -> None:
    world.watch.follow(KEY, c.target)
    await asyncio.sleep(1)
    c.hangs = True
    c.news(5)  # ends the pending request
    await asyncio.sleep(600)
    assert world.watch.report(KEY) is None
    c.hangs = False
    await asyncio.sleep(20)
    assert world.watch.report(KEY) is not None


@in_virtual_time
async def test_an_invalid_response_does_not_end_the_watch(world: World, c: Coordinator) -> None:
    report = c.server.coordinator.report().write()
    world.watch.follow(KEY, c.target)
    for lie in (b"[]", b"\xff", json.dumps(report).encode(), json.dumps(report | {"recovery": [1]}).encode()):
        c.lie = lie
        await asyncio.sleep(40)
        assert world.watch.report(KEY) is None and "does not prove" in world.watch.refusal(KEY)
    c.lie = b""
    await asyncio.sleep(40)
    assert world.watch.report(KEY) is not None and world.watch.refusal(KEY) == ""


@in_virtual_time
async def test_an_error_while_a_report_is_evaluated_does_not_end_the_watch(world: World, c: Coordinator) -> None:
    assert protocol.progress_news({protocol.START: 5}) == frozenset()
    with mock.patch.object(report_watch, "_news", side_effect=TypeError):
        world.watch.follow(KEY, c.target)
        await asyncio.sleep(5)
    assert not world.watch.is_asking(KEY) and world.watch.report(KEY) is None
    await asyncio.sleep(60)
    assert world.watch.report(KEY) is not None


@in_virtual_time
async def test_a_report_that_is_too_large_is_refused_with_its_size_and_remedy(world: World, c: Coordinator) -> None:
    c.target = replace(c.target, pods=2)
    note = "x" * protocol.MAX_NOTE
    with mock.patch("ddpjob_runtime.coordinator.http_api._report", lambda report: json.dumps([note] * 200)):
        world.watch.follow(KEY, c.target)
        await asyncio.sleep(40)
        assert world.watch.report(KEY) is None
        assert "more than 165888 bytes, the limit for 2 pods; make" in world.watch.refusal(KEY)
    c.news(3)
    await asyncio.sleep(40)
    assert world.watch.report(KEY) is not None and world.watch.refusal(KEY) == ""


@in_virtual_time
async def test_a_new_address_is_used_immediately_and_a_missing_one_ends_the_watch(world: World, c: Coordinator) -> None:
    async with coordinator(world) as bad:
        bad.hangs = True
        world.watch.follow(KEY, bad.target)
        await asyncio.sleep(100)
        world.watch.follow(KEY, c.target)
        await asyncio.sleep(0.2)
        assert world.watch.report(KEY) is not None
        world.watch.follow(KEY, None)
        began = world.now
        await asyncio.sleep(100)
        assert world.watch.report(KEY) is None and c.requests(began) == 0
