"""Carries out decisions. No other module creates, deletes or patches anything that belongs to a
job.

A decision is plain data: the new status, a list of actions, and events. The operator may die
between any two calls to the API server, and its successor knows only what is stored there. The
order of the calls is therefore fixed, and every call may be made twice.

1. The status, guarded by the version that was read. It holds everything that a later reconcile must
   know: attempts, counts and causes. If this write conflicts, none of the later steps is taken.
2. Requests to delete objects. They come early because a deletion makes room in a quota. They carry
   the uid, so a repeated request cannot remove a newer object with the same name.
3. Requests to create objects. Names are deterministic, so a repeated request finds its object and
   changes nothing.
4. Messages to the coordinator, and then notifications. A message may be lost, so each reconcile
   sends it again until the coordinator's report shows that it has arrived.
5. Events, which only humans read.

Example: pod train-1-0 is lost, and the operator dies after step 1 or after step 3.

    after 1  the status plans slot 1 at attempt 1, and has the updated counts. The next
             reconcile finds no pod train-1-1 and creates it. Nothing is counted again
    after 3  the next reconcile finds the pod. The event is missing, which does no harm

If the pod were created before the status was written, the restart could be missed or counted twice.

A new object that the API server rejects is not an error here. It is returned as a `Rejection`, and
the next decision deals with it.

docs/decisions/0004 gives the reasons, and 0002 those for the status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from ddpjob.api.job import KIND, DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import JobStatus
from ddpjob.core.decision import (
    Action,
    Change,
    CreateCoordinator,
    CreateNode,
    CreateWorkload,
    Creation,
    Decision,
    DeleteGang,
    DeleteJob,
    DeletePod,
    DeleteWorkload,
    LabelPod,
    MarkWorkload,
    NotifyCoordinator,
    Preparation,
    ReleaseWorkload,
    SendNotification,
)
from ddpjob.core.world import NAME_TAKEN, Rejection
from ddpjob.engine.ports import Cluster, NameTaken, Refused
from ddpjob.objects.budget import build_budget
from ddpjob.objects.claim import build_claim
from ddpjob.objects.isolation import build_policy, build_token
from ddpjob.objects.pod_group import KIND as GANG
from ddpjob.objects.pod_group import build_gang
from ddpjob.objects.pods import as_non_root, build_coordinator, build_node
from ddpjob.objects.service import build_runtime, build_service
from ddpjob.objects.workload import KIND as WORKLOAD
from ddpjob.objects.workload import build_workload, marked, released

CONCURRENT = 16
"""Maximum number of simultaneous requests in one reconcile."""
MESSAGES_SECONDS = 5.0
"""Timeout in seconds for sending all messages of one decision. The next reconcile sends lost
messages again."""


@dataclass(frozen=True)
class Applied:
    """The outcome of `apply`: the job as written, and all rejected objects.

    These include objects that the job can do without.
    """

    job: DDPJob
    rejections: tuple[Rejection, ...] = ()


async def apply(cluster: Cluster, job: DDPJob, decision: Decision) -> Applied:
    """Perform a decision. Performing it twice does no harm.

    Conflict and Unavailable can be raised at any point. The next reconcile then does the rest.
    """
    job = await _write_status(cluster, job, decision.status)
    actions = decision.actions
    changes = [a for a in actions if isinstance(a, Change)]
    await _together(partial(_perform, cluster, job, change) for change in changes)
    rejections = await _create(cluster, job, decision.status, [a for a in actions if isinstance(a, Creation)])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MESSAGES_SECONDS):
            await _together(partial(_perform, cluster, job, a) for a in actions if isinstance(a, NotifyCoordinator))
    await _together(partial(_perform, cluster, job, a) for a in actions if isinstance(a, SendNotification))
    await _together(partial(cluster.record, job, event) for event in decision.events)
    return Applied(job, rejections)


async def _perform(cluster: Cluster, job: DDPJob, action: Change | NotifyCoordinator | SendNotification) -> None:
    match action:
        case DeletePod(name, uid, grace):
            await cluster.delete_pod(job, name, uid, grace)
        case DeleteGang(name, uid):
            await cluster.delete(job, GANG, name, uid)
        case DeleteWorkload(name, uid):
            await cluster.delete(job, WORKLOAD, name, uid)
        case MarkWorkload(name, uid, condition, reason, message):
            change = partial(marked, condition=condition, reason=reason, message=message)
            await cluster.change_workload(job, name, uid, change)
        case ReleaseWorkload(name, uid):
            await cluster.change_workload(job, name, uid, released)
        case LabelPod(name, uid, role):
            await cluster.label_pod(job, name, uid, role)
        case NotifyCoordinator(endpoint, verb, body):
            await cluster.notify(job, endpoint, verb, body)
        case SendNotification(id, receiver, content):
            await cluster.send_notification(job, id, receiver, content)
        case DeleteJob():
            await cluster.delete(job, KIND, job.name, job.uid)
        case _:
            assert_never(action)


async def _together(requests: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run the requests in order, up to CONCURRENT at a time.

    All requests finish before the first error is raised.
    """
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(request: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await request()

    outcomes = await asyncio.gather(*(one(request) for request in requests), return_exceptions=True)
    for error in (o for o in outcomes if isinstance(o, BaseException)):
        raise error


async def _write_status(cluster: Cluster, job: DDPJob, status: JobStatus) -> DDPJob:
    written = status.write(job.spec)
    if written == job.status.write(job.spec):
        return job
    return await cluster.write_status(job, written)


async def _create(
    cluster: Cluster, job: DDPJob, status: JobStatus, creations: Sequence[Action]
) -> tuple[Rejection, ...]:
    """Create the objects that pods need, and then the pods.

    The first batch of pods has one node, and each later batch is twice as large. After a pod is
    rejected, no more batches are created, because a quota or webhook that rejects one pod usually
    rejects all of them. A missing coordinator is created together with the first node, because
    neither is useful without the other. The rejections are sorted by name, because a condition
    shows the first one.
    """
    rejections: list[Rejection] = []
    granted = job.granted(status)

    async def one(action: Action) -> None:
        sized = job if isinstance(action, CreateWorkload) else granted
        manifest = _manifest(cluster, sized, status, action)
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        optional = action is Preparation.POLICY
        try:
            await _create_one(cluster, job, manifest)
        except NameTaken as owner:
            rejections.append(Rejection(object=name, status=NAME_TAKEN, message=str(owner), optional=optional))
        except Refused as refused:
            rejections.append(Rejection(object=name, status=refused.status, message=refused.message, optional=optional))

    needed = [a for a in creations if not isinstance(a, CreateCoordinator | CreateNode)]
    await _together(partial(one, action) for action in needed)
    pods = [a for a in creations if a not in needed]
    size = 1 + any(isinstance(a, CreateCoordinator) for a in pods)
    while pods and all(r.optional or r.of_queue or r.of_budget for r in rejections):
        await _together(partial(one, action) for action in pods[:size])
        pods, size = pods[size:], min(2 * size, CONCURRENT)
    return tuple(sorted(rejections, key=lambda r: r.object))


async def _create_one(cluster: Cluster, job: DDPJob, manifest: Json) -> None:
    """Create an object, adding runAsNonRoot to a pod if the namespace requires it.

    Raises the same errors as Cluster.create.
    """
    try:
        await cluster.create(job, manifest)
    except Refused as refused:
        demanded = manifest["kind"] == "Pod" and "violates PodSecurity" in refused.message
        other = as_non_root(manifest) if demanded and "runAsNonRoot" in refused.message else None
        if other is None:
            raise
        await cluster.create(job, other)


def _manifest(cluster: Cluster, job: DDPJob, status: JobStatus, action: Action) -> Json:
    match action:
        case Preparation.SERVICE:
            return build_service(job)
        case Preparation.CLAIM:
            return build_claim(job)
        case Preparation.RUNTIME:
            return build_runtime(job)
        case Preparation.BUDGET:
            return build_budget(job)
        case Preparation.POLICY:
            return build_policy(job, cluster.platform)
        case Preparation.TOKEN:
            return build_token(job, cluster.platform)
        case Preparation.GANG:
            return build_gang(job, status)
        case CreateWorkload():
            return build_workload(job, cluster.platform, action)
        case CreateCoordinator():
            return build_coordinator(job, status, cluster.platform)
        case CreateNode(index, attempt):
            return build_node(job, status, cluster.platform, index, attempt)
    raise TypeError(f"{action} does not create anything")
