"""What the tests of the controller share: the simulation's clock on the event loop, clients of the fake API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from ddpjob.controller.rest import Rest
from kubernetes.aio import client
from simulation.clock import EPOCH, Clock
from simulation.store import Store

from .api_server import ApiServer


class ReplicaTasks:
    """Replicas of the operator as tasks, by name."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def stop(self, name: str) -> None:
        """Its process ends in order, and gives the Lease back."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        """No replica has ended by itself."""
        for name, task in self.tasks.items():
            if task.done():
                raise AssertionError(f"replica {name} has ended: {task.exception()!r}") from task.exception()


class LoopClock(Clock):
    """The simulation's clock, driven by the event loop: HTTP and the simulated world share one time."""

    @property
    def now(self) -> float:  # type: ignore[override]
        return asyncio.get_running_loop().time()

    @now.setter
    def now(self, value: float) -> None:
        pass

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, function)


def loop_moment() -> datetime:
    """The time of day in the simulated world."""
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """With an empty store."""
    async with ApiServer(Store(LoopClock())).serve() as server:
        yield server


@asynccontextmanager
async def connected(server: ApiServer) -> AsyncIterator[Rest]:
    """A client of its own connections."""
    rest = Rest.open(client.Configuration(host=server.url), connections=100)
    try:
        yield rest
    finally:
        await rest.close()
