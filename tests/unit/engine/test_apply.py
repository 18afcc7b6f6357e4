"""The order and the concurrency in which a decision's actions are carried out."""

from __future__ import annotations

import asyncio
from typing import Any

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.decision import (
    CreateCoordinator,
    CreateNode,
    Decision,
    DeletePod,
    Event,
    NotifyCoordinator,
    Preparation,
)
from ddpjob.engine import apply as apply_module
from ddpjob.engine.apply import CONCURRENT, apply
from ddpjob.engine.ports import Refused
from ddpjob.objects.platform import Platform
from machine import slowness

JOB = DDPJob.read(
    {
        "metadata": {"name": "job", "namespace": "space", "uid": "uid"},
        "spec": {"image": "image", "script": "train.py", "nodes": 100},
        "status": {"runtime": "runtime"},
    }
)
Action = Any


class Recording:
    """A `Cluster` that records its calls, and how many of them run at the same time."""

    platform = Platform(operator_key=b"key")

    def __init__(self, room: int = 1000, seconds: float = 0.01) -> None:
        self.room, self.seconds = room, seconds
        self.begun: list[str] = []
        self.under_way = self.most = 0

    async def _note(self, what: str) -> None:
        self.begun.append(what)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(self.seconds)
        self.under_way -= 1

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        return job

    async def create(self, job: DDPJob, manifest: Json) -> None:
        await self._note(f"create {manifest['metadata']['name']}")
        if manifest["kind"] == "Pod":
            self.room -= 1
            if self.room < 0:
                raise Refused(403, "exceeded quota")

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        await self._note(f"delete {name}")

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        await self._note(f"notify {', '.join(body['pods'])}")

    async def record(self, job: DDPJob, event: Event) -> None:
        await self._note(f"record {event.message}")


async def applied(cluster: Recording, *actions: Action, events: int = 0) -> list[str]:
    """Carry out the decision, and return the objects that were rejected."""
    decision = Decision(JOB.status, actions, tuple(Event(False, "Reason", str(n)) for n in range(events)))
    return [r.object for r in (await apply(cluster, JOB, decision)).rejections]  # type: ignore[arg-type]


async def test_deletions_are_carried_out_before_creations() -> None:
    cluster = Recording()
    await applied(cluster, Preparation.SERVICE, CreateNode(0, 1), DeletePod("job-0-0", "uid", 0), events=1)
    assert cluster.begun == ["delete job-0-0", "create job", "create job-0-1", "record 0"]


async def test_pods_are_created_in_growing_batches_until_one_is_refused() -> None:
    cluster = Recording(room=4)
    rejected = await applied(cluster, CreateCoordinator(), *(CreateNode(index, 0) for index in range(100)))
    assert len(cluster.begun) == 2 + 4, "no batch follows the one that hit the quota"
    assert len(rejected) == 2
    cluster = Recording(room=4)
    assert len(await applied(cluster, *(CreateNode(index, 0) for index in range(100)))) == 3
    assert len(cluster.begun) == 1 + 2 + 4
    cluster = Recording()
    assert await applied(cluster, *(CreateNode(index, 0) for index in range(100))) == []
    assert len(cluster.begun) == 100
    assert cluster.most == CONCURRENT


async def test_deletions_and_events_are_sent_with_limited_concurrency() -> None:
    cluster = Recording()
    await applied(cluster, *(DeletePod(f"job-{index}-0", "uid") for index in range(100)), events=100)
    assert len(cluster.begun) == 200
    assert cluster.most == CONCURRENT


async def test_an_unresponsive_coordinator_delays_a_reconcile_only_for_a_bounded_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(apply_module, "MESSAGES_SECONDS", 0.1)
    cluster = Recording(seconds=0.09)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await applied(cluster, *(NotifyCoordinator("host:1", "gone", {"pods": [str(n)]}) for n in range(1000)), events=1)
    assert loop.time() - began < 1.0 * slowness()
    assert cluster.begun[-1] == "record 0", "the actions after the messages are done"
