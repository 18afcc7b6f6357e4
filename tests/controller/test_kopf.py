"""kopf's watch of the DDPJobs, in a separate thread and event loop and in real time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ddpjob.api.job_spec import Json
from ddpjob.controller import handlers, login
from ddpjob.controller.operator_settings import Settings
from simulation.clock import Clock
from simulation.store import Store

from .api_server import ApiServer


class RealClock(Clock):
    @property
    def now(self) -> float:  # type: ignore[override]
        return time.monotonic()

    @now.setter
    def now(self, value: float) -> None:
        pass


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a limit that suits a busy machine."""
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the condition did not hold within a minute")


def use_kubeconfig(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        f"""{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{token: t}}}}],
        clusters: [{{name: k, cluster: {{server: "{server.url}"}}}}], contexts: [{{name: c,
        context: {{cluster: k, user: u}}}}]}}"""
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))


async def test_kopf_gets_names_and_versions_of_jobs_and_pages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Users decide how large a job and its metadata are, and kopf keeps whole lists."""
    async with ApiServer(Store(RealClock())).serve() as server:
        use_kubeconfig(server, tmp_path, monkeypatch)
        seen: list[tuple[str | None, Json]] = []

        def add(name: str) -> None:
            labels = {f"label-{n}": "x" * 50 for n in range(15_000)}
            server.store.create("DDPJob", {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {}})

        for n in range(8):
            add(f"before-{n}")
        following = asyncio.create_task(
            handlers.follow_jobs(
                Settings(key=b"0123456789abcdef", namespaces=("space",)), lambda event, body: seen.append((event, body))
            )
        )
        await until(lambda: len({body["metadata"]["name"] for _, body in seen}) == 8)
        add("watched")
        await until(lambda: any(event == "ADDED" for event, _ in seen))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert ("GET", "DDPJob") not in server.read_whole
    assert all(len(json.dumps(body)) < 500 for _, body in seen)
    asked = [query for _, path, query in server.requests if path.endswith("/ddpjobs")]
    limits = [int(query["limit"]) for query in asked if "watch" not in query]
    assert limits == [100, 25, 6, 1, 1, 1, 1, 1, 1, 1, 1]
    assert len(asked) == len(limits) + 1, "one watch, which continues after an event"


async def test_a_watch_that_always_ends_is_restarted_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """kopf repeats the request without a pause, which would occupy the whole API server."""
    monkeypatch.setattr(login, "WATCH_PAUSE", 0.4)
    async with ApiServer(Store(RealClock())).serve() as server:
        use_kubeconfig(server, tmp_path, monkeypatch)
        following = asyncio.create_task(
            handlers.follow_jobs(Settings(key=b"0123456789abcdef", namespaces=("space",)), lambda event, body: None)
        )
        await until(lambda: server.watching > 0)
        began = time.monotonic()
        while time.monotonic() < began + 1:
            server.break_watches()
            await asyncio.sleep(0.01)
        watches = [query for _, _, query in server.requests if "watch" in query]
        assert len(watches) <= 2 + (time.monotonic() - began) / login.WATCH_PAUSE
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("namespaces", [(), ("space",)])
async def test_kopfs_watch_restarts_after_an_error_that_ends_kopf(
    namespaces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handlers, "RETRY", 0.2)
    async with ApiServer(Store(RealClock())).serve() as server:
        use_kubeconfig(server, tmp_path, monkeypatch)
        seen: list[tuple[str | None, str]] = []

        def add(name: str) -> None:
            server.store.create("DDPJob", {"metadata": {"name": name}, "spec": {}, "status": {}})

        add("before")
        younger: list[asyncio.Task[None]] = []
        following = asyncio.create_task(
            handlers.follow_jobs(
                Settings(key=b"0123456789abcdef", namespaces=namespaces),
                lambda event, body: seen.append((event, body["metadata"]["name"])),
            )
        )
        await until(lambda: (None, "before") in seen)
        younger.append(asyncio.create_task(asyncio.sleep(1000)))
        add("watched")
        await until(lambda: ("ADDED", "watched") in seen)
        server.send_error(500, "InternalError")
        add("after")
        await until(lambda: any(name == "after" for _, name in seen))
        assert any("kopf stopped watching DDPJobs" in record.getMessage() for record in caplog.records), (
            "the error did end kopf"
        )
        server.store.delete("DDPJob", "before")
        await until(lambda: ("DELETED", "before") in seen)
        assert not following.done() and not younger[0].done(), "nothing else in the process has ended with kopf"
        lists = [query for _, path, query in server.requests if path.endswith("/ddpjobs") and "watch" not in query]
        assert lists and all(int(query["limit"]) <= 500 for query in lists), (
            "a response with all jobs could have any size"
        )
        for task in (following, *younger):
            task.cancel()
        await asyncio.gather(following, *younger, return_exceptions=True)


async def test_kopf_stops_if_the_operators_term_ends_while_kopf_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise kopf would follow the jobs forever in a replica that is not the leader."""
    begun, ended_term, run = threading.Event(), threading.Event(), asyncio.run

    def slow_start(main: Any) -> None:
        begun.set()
        ended_term.wait(60)
        run(main)

    async def operator(*, stop_flag: asyncio.Event, **_: Any) -> None:
        await stop_flag.wait()

    monkeypatch.setattr(handlers.asyncio, "run", slow_start)
    monkeypatch.setattr(handlers.kopf, "operator", operator)
    monkeypatch.setattr(handlers, "RETRY", 0.1)
    before = set(threading.enumerate())
    following = asyncio.create_task(handlers.follow_jobs(Settings(key=b"0123456789abcdef"), lambda event, body: None))
    await until(begun.is_set)
    [thread] = [t for t in threading.enumerate() if t not in before and t.name == "kopf"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    ended_term.set()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()
