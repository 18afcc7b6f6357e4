"""Complete replicas of the operator in the simulated world, with a kopf that runs in virtual time.

They reach objects and coordinators only over HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ddpjob.controller import main as operator_main
from ddpjob.controller import report_watch
from ddpjob.controller.kube.rest import Rest
from ddpjob.controller.operator_settings import Settings
from ddpjob.engine import reconcile as reconcile_module
from ddpjob.engine.coordinator_client import CoordinatorClient
from kubernetes.aio import client
from simulation.coordinator import CoordinatorProcess
from simulation.coordinator_port import listen
from simulation.kubelet import Pod
from simulation.simulated import Simulation
from simulation.story import Story

from .api_server import ApiServer, RandomFaults
from .world import LoopClock, ReplicaTasks, kopf_of, loop_moment


class HttpSimulation(Simulation):
    """A simulation that uses the event loop's clock. Its coordinators listen on separate loopback
    addresses.
    """

    clock_class = LoopClock

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.servers: list[asyncio.AbstractServer] = []
        self._starting: set[asyncio.Task[None]] = set()
        self.machines.address = lambda number: f"127.{1 + number // 250}.{1 + number % 250}.1"
        self.machines.on_pod = self._serve

    def _serve(self, pod: Pod) -> None:
        if pod.coordinator is not None:
            task = asyncio.create_task(self._listen(pod.coordinator, pod.address))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _listen(self, process: CoordinatorProcess, address: str) -> None:
        self.servers.append(await listen(process, address))

    def close(self) -> None:
        """Close the listeners of all coordinators."""
        for server in self.servers:
            server.close()


class Replicas(ReplicaTasks):
    """Replicas of the operator. Each of them runs `ddpjob.controller.main.run`."""

    def __init__(self, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(server)
        self.rests: dict[str, list[MortalRest]] = {}
        self._connecting = ""
        self.acting: dict[tuple[int, int], str] = {}
        """The acting replica of each shard, by (shard, number of shards)."""
        self.overlaps: list[str] = []
        monkeypatch.setattr(Rest, "connect", self._connect)
        monkeypatch.setattr(
            operator_main, "reconcile", functools.partial(reconcile_module.reconcile, clock=loop_moment)
        )
        monkeypatch.setattr(report_watch, "CoordinatorClient", functools.partial(CoordinatorClient, clock=loop_moment))

        monkeypatch.setattr(operator_main, "follow_jobs", kopf_of(server))
        act = operator_main.Operator.act
        replicas = self

        async def watched(operator: operator_main.Operator, shard: int) -> None:
            name = operator.settings.identity
            beside = replicas.acting.setdefault((shard, operator.settings.shards), name)
            if beside != name or any(count != operator.settings.shards for _, count in replicas.acting):
                replicas.overlaps.append(f"{name} acts for shard {shard} beside {replicas.acting}")
            try:
                await act(operator, shard)
            finally:
                replicas.acting.pop((shard, operator.settings.shards), None)

        monkeypatch.setattr(operator_main.Operator, "act", watched)

    async def _connect(self, connections: int = 64) -> Rest:
        rest = MortalRest(client.ApiClient(configuration=client.Configuration(host=self.server.url)))
        self.rests.setdefault(self._connecting, []).append(rest)
        return rest

    def start(self, name: str, namespaces: tuple[str, ...] = ("space",), shards: int = 1) -> None:
        """Start a replica like a pod of the operator's Deployment. No fault of the API server may
        end it.
        """
        settings = Settings(
            key=b"0123456789abcdef",
            identity=name,
            lease_namespace="space",
            health_port=0,
            metrics_port=0,
            namespaces=namespaces,
            shards=shards,
        )

        async def run() -> None:
            self._connecting = name
            await operator_main.run(settings)

        self.tasks[name] = asyncio.create_task(run())

    async def stop(self, name: str, *, crash: bool = False) -> None:
        """Stop a replica with SIGTERM or, with `crash`, with SIGKILL. After SIGKILL, it sends
        nothing more.
        """
        for rest in self.rests.pop(name, []):
            rest.dead = crash
        await super().stop(name)

    def check(self) -> None:
        """Check that no replica has ended, and that no two replicas have acted at the same time."""
        assert not self.overlaps, self.overlaps
        for name, task in self.tasks.items():
            if task.done() and not task.cancelled():
                raise AssertionError(f"replica {name} has ended: {task.exception()!r}") from task.exception()


class MortalRest(Rest):
    """A client that sends nothing once its process is dead."""

    dead = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.paths: set[str] = set()

    async def _send(self, method: str, path: str, *args: Any) -> Any:
        if self.dead:
            await asyncio.sleep(1e6)
        self.paths.add(path)
        return await super()._send(method, path, *args)


class HttpStory(Story):
    """A seeded story with complete operators. Faults that other stories inject into the in-memory
    operator become HTTP faults.
    """

    left_out = frozenset({"kill-operator", "conflicts", "watch-gap", "lossy", "key", "init-failure"})
    replicas: Replicas
    server: ApiServer

    async def _run(self, until: float) -> None:
        while self.s.now < until:
            await asyncio.sleep(min(1.0, until - self.s.now))
            self.replicas.check()
            assert not self.s.invariants.violations, self.s.invariants.violations
            if not self.calm:
                await self._harass()

    async def _harass(self) -> None:
        """Disturb the watches or a replica from time to time."""
        what = self.random.random()
        if what < 0.02:
            self.server.break_watches()
        elif what < 0.04:
            self.server.compact()
            self.server.gone_as_event = self.random.random() < 0.5
        elif what < 0.07:
            name = self.random.choice(list(self.replicas.tasks))
            await self.replicas.stop(name, crash=self.random.random() < 0.7)
            self.replicas.start(name)

    async def _idempotent(self) -> None:
        """Check that nothing is written in two seconds without a change, except status and
        Lease.
        """

    async def _end(self) -> None:
        self.server.faults = lambda method, path: None
        await super()._end()


@asynccontextmanager
async def played(seed: int, monkeypatch: pytest.MonkeyPatch, replicas: int = 2) -> AsyncIterator[HttpStory]:
    """Play a story, and yield it with its server and its replicas."""
    story = HttpStory(seed, simulation=HttpSimulation)
    assert isinstance(story.s, HttpSimulation)
    async with ApiServer(story.s.store).serve() as server:
        story.server = server
        story.replicas = Replicas(server, monkeypatch)
        chance = random.Random(seed)
        server.faults = RandomFaults(chance, chance.choice((0.0, 0.02, 0.1)))
        for number in range(replicas):
            story.replicas.start(f"operator-{number}")
        try:
            yield story
        finally:
            for name in list(story.replicas.tasks):
                await story.replicas.stop(name)
            story.s.close()
