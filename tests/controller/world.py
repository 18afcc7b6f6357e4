"""Shared parts of the controller's tests: the simulation's clock on the event loop, clients of the
fake API server, and kopf's watch in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

from ddpjob.api.job import KIND
from ddpjob.controller.caches import Caches, collection
from ddpjob.controller.handlers import RETRY as KOPF_RETRY
from ddpjob.controller.handlers import Seen
from ddpjob.controller.kube.rest import METADATA, METADATA_LIST, ApiError, Rest
from ddpjob.controller.operator_settings import Settings
from ddpjob.engine.ports import Unavailable
from kubernetes.aio import client
from simulation.clock import EPOCH, Clock
from simulation.store import Store

from .api_server import ApiServer
from .virtual_loop import virtual_in


class ReplicaTasks:
    """Replicas of the operator as tasks, by name."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def stop(self, name: str) -> None:
        """Stop the replica's process cleanly, so that it releases the Lease."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        """Check that no replica has exited on its own."""
        for name, task in self.tasks.items():
            if task.done():
                raise AssertionError(f"replica {name} has ended: {task.exception()!r}") from task.exception()


class LoopClock(Clock):
    """The simulation's clock, driven by the event loop: HTTP and the simulated world share one
    time.
    """

    @property
    def now(self) -> float:  # type: ignore[override]
        return asyncio.get_running_loop().time()

    @now.setter
    def now(self, value: float) -> None:
        pass

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, function)


def loop_moment() -> datetime:
    """Return the time of day in the simulated world."""
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """Serve an empty store."""
    async with ApiServer(Store(LoopClock())).serve() as server:
        yield server


on_server = virtual_in(api_server)
"""Decorator for a test in virtual time whose first parameter is such a server."""

Follow = Callable[[Settings, Seen], Coroutine[Any, Any, None]]


def kopf_of(server: ApiServer) -> Follow:
    """Return `handlers.follow_jobs` in virtual time, because kopf's own thread has a separate loop
    in real time.

    Like kopf, it shows the jobs that exist when it lists, but not the deletion of jobs while it was
    not watching. An error ends the watch, which is restarted a while later. test_kopf.py tests the
    real kopf.
    """

    async def follow_jobs(settings: Settings, seen: Seen) -> None:
        async with connected(server) as rest, asyncio.TaskGroup() as group:
            for namespace in settings.namespaces or ("",):
                group.create_task(_follow(rest, collection(KIND, namespace), seen))

    return follow_jobs


async def _follow(rest: Rest, path: str, seen: Seen) -> None:
    while True:
        try:
            page = await rest.request("GET", path, accept=METADATA_LIST)
            for body in page["items"] or ():
                seen(None, body)
            await _watch(rest, path, page["metadata"]["resourceVersion"], seen)
        except (ApiError, Unavailable, KeyError):  # KeyError: a page of a different server
            await asyncio.sleep(KOPF_RETRY)


async def _watch(rest: Rest, path: str, version: str, seen: Seen) -> None:
    """Follow the watch until its version has expired."""
    while True:
        query = {"resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": "300"}
        try:
            async for event in rest.watch(path, query, 70.0, accept=METADATA):
                if event["type"] == "ERROR" and event["object"]["code"] == HTTPStatus.GONE:
                    return
                if event["type"] == "ERROR":
                    raise ApiError(event["object"]["code"], "", "kopf ends at an error in a watch")
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    seen(event["type"], event["object"])
        except Unavailable:
            await asyncio.sleep(1.0)


@asynccontextmanager
async def connected(server: ApiServer) -> AsyncIterator[Rest]:
    """Yield a client with its own connections."""
    rest = Rest.open(client.Configuration(host=server.url), connections=100)
    try:
        yield rest
    finally:
        await rest.close()


@asynccontextmanager
async def followed(server: ApiServer, caches: Caches) -> AsyncIterator[None]:
    """Run caches that follow the server, once they have read all objects."""
    kopf = kopf_of(server)(Settings(key=b"", namespaces=tuple(filter(None, caches.namespaces))), caches.seen_by_kopf)
    tasks = [asyncio.create_task(caches.run()), asyncio.create_task(kopf)]
    try:
        await caches.answered()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
