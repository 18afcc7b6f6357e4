"""The one function that acts. Nothing else creates, deletes or patches anything that belongs to a job.

Order: the status, then the actions, then the events. The status holds all that a later pass must know (attempts,
counts, causes), so that a crash after any call leaves a state from which the next pass goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob.api.types import DDPJob, JobStatus, Json
from ddpjob.core.decision import (
    Action,
    CreateBudget,
    CreateCoordinator,
    CreateNode,
    CreatePodFiles,
    CreateService,
    Creation,
    Decision,
    DeleteJob,
    DeletePod,
    LabelPod,
    Tell,
)
from ddpjob.core.world import NAME_TAKEN, Rejection
from ddpjob.engine.ports import Cluster, NameTaken, Refused
from ddpjob.objects.budget import build_budget
from ddpjob.objects.pods import build_coordinator, build_node
from ddpjob.objects.service import build_pod_files, build_service

CONCURRENT_CREATIONS = 32


@dataclass(frozen=True)
class Applied:
    """What came of a decision: the job as written, and what could not be created."""

    job: DDPJob
    rejections: tuple[Rejection, ...] = ()


async def apply(cluster: Cluster, job: DDPJob, decision: Decision) -> Applied:
    """Performs a decision. Raises Conflict before anything was done, Unavailable at any point."""
    job = await _write_status(cluster, job, decision.status)
    creations = [a for a in decision.actions if isinstance(a, Creation)]
    rejections = await _create(cluster, job, decision.status, creations)
    for action in decision.actions:
        if isinstance(action, DeletePod):
            await cluster.delete_pod(job, action.name, action.uid, action.grace)
        elif isinstance(action, LabelPod):
            await cluster.label_pod(job, action.name, action.uid, action.role)
        elif isinstance(action, Tell):
            await cluster.tell(job, action.endpoint, action.verb, action.body)
        elif isinstance(action, DeleteJob):
            await cluster.delete_job(job)
    for event in decision.events:
        await cluster.record(job, event)
    return Applied(job, rejections)


async def _write_status(cluster: Cluster, job: DDPJob, status: JobStatus) -> DDPJob:
    written = status.write()
    if written == job.status.write():
        return job
    return await cluster.write_status(job, written)


async def _create(cluster: Cluster, job: DDPJob, status: JobStatus, creations: Sequence[Action]) -> tuple[Rejection, ...]:
    """What pods need comes before them; the rest at once, within bounds. What was refused, in an order that does not change."""
    rejections: list[Rejection] = []
    gate = asyncio.Semaphore(CONCURRENT_CREATIONS)

    async def one(action: Action) -> None:
        manifest = _manifest(cluster, job, status, action)
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        async with gate:
            try:
                await cluster.create(job, manifest)
            except NameTaken as owner:
                rejections.append(Rejection(object=name, status=NAME_TAKEN, message=str(owner)))
            except Refused as refused:
                rejections.append(Rejection(object=name, status=refused.status, message=refused.message))

    needed = (CreateService, CreatePodFiles, CreateBudget)
    for batch in ([a for a in creations if isinstance(a, needed)], [a for a in creations if not isinstance(a, needed)]):
        if not rejections:
            outcomes = await asyncio.gather(*(one(action) for action in batch), return_exceptions=True)
            for error in (o for o in outcomes if isinstance(o, BaseException)):
                raise error
    return tuple(sorted(rejections, key=lambda r: r.object))


def _manifest(cluster: Cluster, job: DDPJob, status: JobStatus, action: Action) -> Json:
    match action:
        case CreateService():
            return build_service(job)
        case CreatePodFiles():
            return build_pod_files(job)
        case CreateBudget():
            return build_budget(job)
        case CreateCoordinator():
            return build_coordinator(job, status, cluster.site)
        case CreateNode(index, attempt):
            return build_node(job, status, cluster.site, index, attempt)
    raise TypeError(f"not a creation: {action}")
