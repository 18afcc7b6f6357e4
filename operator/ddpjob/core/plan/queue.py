"""Decides what quota a job in a Kueue queue requests, whether the job may run, and with how many
nodes.

Kueue grants quota through its own objects, Workloads. The owner of a Workload creates it, starts
the pods when the Workload is admitted, stops the pods when the Workload is evicted, and releases
the quota. The operator is the owner of each job's Workloads.

- The job runs while one of its Workloads is admitted and holds quota for pods of the job's current
  shape (`_holding`). `status.queue` holds the grant. Pods are built from the grant, so the job has
  the granted size.
- A different size needs a new Workload, which names the current one as its predecessor. Kueue
  admits the new Workload without stopping the job (Kueue calls this a "slice").
- An elastic job starts with the pods that have quota, at least `minNodes` (Kueue's "partial
  admission"). It asks for the remaining pods in additional Workloads. `status.queue.more` lists
  these Workloads in the order of their slots. If one of them is evicted, the job continues without
  the slots of that Workload and without all later slots.
- An evicted job loses its pods first, like a suspended job. Its quota is released only after the
  pods are gone; otherwise two jobs would use the same quota.

Example of a job that is scaled from 4 nodes to 6:

    nodes=6: Workload 7c (6 pods and the coordinator) replaces 1a. The job keeps 4 nodes
    Kueue admits 7c and finishes 1a: the job is resized to 6 nodes, 1a is deleted
    Kueue evicts 7c: the pods end gracefully, then 7c's quota is released, and 7c waits in the queue

Example of a job with nodes=4 and elastic.minNodes=2:

    Kueue admits 3 pods of Workload 1a: slots 0 to 2 train, and Workload 9f asks for 1 pod
    Kueue admits 9f: slot 3 joins
    Kueue evicts 9f: slot 3 ends, and 9f waits again. Slots 0 to 2 continue to train

The queue label is read when a job begins, and while it is suspended. A new or removed label has no
effect on a running job.

Why: docs/decisions/0017 and 0032.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import ConditionType, JobStatus, QueueStatus, QuotaShare
from ddpjob.core.decision import Action, CreateWorkload, DeleteWorkload, MarkWorkload, ReleaseWorkload
from ddpjob.core.failures.liveness import may_run
from ddpjob.core.status.conditions import QUEUE_NOT_SERVED, QUEUE_WAITS, with_condition, without_condition
from ddpjob.core.status.messages import count
from ddpjob.core.view import View
from ddpjob.core.world import ANNOTATION_WORKLOAD, WorkloadView

REPLACED = "WorkloadSliceReplaced"
"""Kueue's reason for finishing a Workload that a newer one replaces. Kueue admits the newer
Workload a moment later."""
_NOT_SERVED = (
    "the job's label names queue {}, but this cluster does not serve Workloads (kueue.x-k8s.io/v1beta2, in Kueue 0.15 "
    "or later); install Kueue, or remove the label kueue.x-k8s.io/queue-name to run the job without a queue"
)
MOST_PARTS = 16
"""Maximum number of additional Workloads that Kueue may admit in part. Each of them has an entry in
the status, so this number limits the size of the status."""
ONE_DOMAIN = "kueue.x-k8s.io/podset-required-topology"
"""The podTemplate annotation that requires one topology domain for all pods in a Workload."""
_OFFSET = "kueue.x-k8s.io/pod-index-offset"
"""Pod annotation with the slot index of the first pod in the pod's Workload."""
_STAYS = "the job does not grow, because spec.podTemplate requires one topology domain for all of its pods"
_NO_LABEL = "the job's label kueue.x-k8s.io/queue-name was removed, so the job does not request a different quota"


def shape_of(job: DDPJob) -> str:
    """Return a hash of the requirements of a single pod.

    The hash does not depend on the number of pods.
    """
    spec = job.spec
    needs = [spec.resources, spec.gpus_per_node, spec.gpu_resource, spec.pod_template]
    needs += [spec.rendezvous.resources, spec.rendezvous.placement]
    return hashlib.sha256(json.dumps(needs, sort_keys=True).encode()).hexdigest()[:10]


def find_request(job: DDPJob, queue: QueueStatus | None) -> CreateWorkload | None:
    """Return the Workload that requests the job's quota; it may exist already.

    `queue` is the job's current quota. The Workload requests all of the job's pods or, if an
    elastic job has quota already, only the missing pods. The result is None if an elastic job has
    quota for all its pods or cannot grow. The Workload's name is a hash of the request, so the name
    stays the same while the request is unchanged.
    """
    pods, held = job.spec.pods, queue.workload if queue is not None else ""
    if job.spec.elastic is None and not (queue is not None and queue.more):
        return CreateWorkload(_name(job, f"{pods}"), pods, replaces=held)
    least = job.spec.min_nodes
    if queue is None or queue.pods > pods:
        return CreateWorkload(_name(job, f"{pods} {least}"), pods, least, held)
    missing = pods - queue.pods
    if not missing or _needs_one_domain(job):
        return None
    least = 1 if len(queue.more) < MOST_PARTS else missing
    return CreateWorkload(_name(job, f"{queue.pods}+{missing}"), missing, least, after=queue.pods)


def _name(job: DDPJob, request: str) -> str:
    asked = f"{job.uid} {shape_of(job)} {request}"
    return f"{job.name}-queue-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"


def _needs_one_domain(job: DDPJob) -> bool:
    """Whether additional pods would have to be in the same topology domain as the first pods.

    Kueue cannot ensure this, because it places each Workload separately.
    """
    return ONE_DOMAIN in ((job.spec.pod_template.get("metadata") or {}).get("annotations") or {})


def is_queued(view: View) -> bool:
    """Whether a queue decides when the job runs.

    If a running job without a queue gets a queue label, the label takes effect only once the job is
    suspended, so that training is not interrupted. If the label is removed, the job keeps its
    quota, because Kueue would grant released quota to other jobs.
    """
    status = view.status
    if view.world.serves_queues is None:
        return False
    begins = bool(view.job.queue) and (not status.slots or status.holds(ConditionType.SUSPENDED))
    return status.queue is not None or begins


def _holding(view: View) -> WorkloadView | None:
    """Return the Workload that holds the job's initial quota; None if the job has no quota.

    Additional Workloads are not considered. If several Workloads hold quota, prefer the one with
    the size in the spec.
    """
    job, shape = view.job, shape_of(view.job)
    request = find_request(job, None)
    name = request.name if request is not None else ""
    firsts = [w for w in view.world.workloads if not w.additional]
    pending = any(not (w.finished or w.leaving) for w in firsts)
    usable = [
        w
        for w in firsts
        if w.admitted and not (w.evicted or w.leaving) and (not w.finished or (w.finished == REPLACED and pending))
        if w.shape == shape and w.grant is not None
        # A changed queue or priority takes effect only when the job begins.
        if view.status.queue is not None or w.asks == _asks(job)
    ]
    return min(usable, key=lambda w: (bool(w.finished), w.name != name), default=None)


def _with_more(view: View, first: QueueStatus) -> QueueStatus:
    """Return the first quota together with the additional quota that the job may use.

    Only the last slots can be dropped, and the additional grants are in the order of their slots.
    If a grant was withdrawn or is no longer needed, the job therefore gives up all later grants
    too.
    """
    job, shape, queue, before = view.job, shape_of(view.job), first, view.status.queue
    usable = {
        w.name: w
        for w in view.world.workloads
        if w.additional and w.shape == shape and w.admitted and not (w.evicted or w.leaving or w.finished)
    }
    for share in before.more if before is not None and before.uid == first.uid else ():
        known = usable.get(share.workload)
        if known is None or known.uid != share.uid or queue.pods + share.pods > job.spec.pods:
            return queue
        queue = replace(queue, pods=queue.pods + share.pods, more=(*queue.more, share))
    request = find_request(job, queue)
    new = usable.get(request.name) if request is not None and request.after else None
    if new is None or new.grant is None:
        return queue
    node = new.grant.node
    if ANNOTATION_WORKLOAD in node.annotations:
        node = replace(node, annotations={**node.annotations, _OFFSET: f"{queue.pods}"})
    share = QuotaShare(workload=new.name, uid=new.uid, pods=new.grant.pods, node=node)
    return replace(queue, pods=queue.pods + share.pods, more=(*queue.more, share))


def with_grant(view: View) -> View:
    """Return the view with Kueue's current grant in `status.queue`.

    `status.queue` is None if there is no grant.
    """
    status = view.status
    if not is_queued(view):
        return view.with_status(without_condition(replace(status, queue=None), ConditionType.ADMITTED))
    if not view.world.serves_queues:
        # Kueue was removed, or the operator is no longer permitted to read its objects. Running
        # jobs are left alone.
        return view
    held = _holding(view)
    queue = _with_more(view, held.grant) if held is not None and held.grant is not None else None
    if queue is not None and queue.pods < _least(view.job):
        queue = None
    return view.with_status(replace(status, queue=queue))


def _least(job: DDPJob) -> int:
    return job.spec.elastic.min_nodes if job.spec.elastic is not None else 1


def explain_waiting(view: View) -> tuple[str, str]:
    """Return a reason and a message for a job that is waiting in its queue."""
    job, world = view.job, view.world
    if not job.queue:
        return QUEUE_WAITS, _NO_LABEL
    if not world.serves_queues:
        return QUEUE_NOT_SERVED, _NOT_SERVED.format(job.queue)
    if world.problems:
        faults = "; ".join(world.problems)
        until = f"the job requests no quota from queue {job.queue} until spec.podTemplate is corrected"
        return QUEUE_WAITS, f"{until}: {faults}"
    request = find_request(job, view.status.queue)
    if request is None:
        return QUEUE_WAITS, _STAYS
    asked = next((w for w in world.workloads if w.name == request.name), None)
    said = asked.message if asked is not None else ""
    refused = _refusal(view)
    if asked is None and refused:
        said = refused
    if asked is not None and asked.grant is not None and asked.grant.pods < _least(job) and not request.after:
        said = f"its Workload is admitted for {count(asked.grant.pods, 'pod')}, fewer than elastic.minNodes"
    wanted = _size(request.pods, "more pod" if request.after else "pod")
    if 0 < request.least < request.pods and not request.after:
        wanted += f", or at least {request.least}"
    return QUEUE_WAITS, f"waits in queue {job.queue} for {wanted}{f': {said}' if said else ''}"


def _size(pods: int, noun: str = "pod") -> str:
    return f"the quota of {count(pods, noun)}"


def _refusal(view: View) -> str:
    refused = next((r for r in view.world.rejections if r.of_queue), None)
    return f"the API server rejects {refused.object}: {refused.message}" if refused is not None else ""


def with_admitted(view: View) -> JobStatus:
    """Return the status of a queued job, with the Admitted condition."""
    job, status, queue = view.job, view.status, view.status.queue
    if queue is None:
        reason, message = explain_waiting(view)
        return with_condition(status, ConditionType.ADMITTED, False, reason, message, view.now)
    reason, message = "Admitted", f"{queue.cluster_queue} has granted {_size(queue.pods)}"
    if queue.pods < job.spec.pods:
        reason, (_, waits) = "Growing", explain_waiting(view)
        message += f"; {waits}"
    return with_condition(status, ConditionType.ADMITTED, True, reason, message, view.now)


def plan_queue_actions(view: View) -> list[Action]:
    """Return actions that create, release, delete and mark the job's quota requests.

    The quota of terminating pods must not be released. A job that has left its queue therefore
    keeps its Workloads until its old pods have ended. For a job in a queue, the caller ensures that
    the job either has quota or has no pods left.
    """
    job, world, queue = view.job, view.world, view.status.queue
    if not is_queued(view):
        # The job has left its queue, so its Workloads are no longer needed.
        old = [pod for pod in world.pods if pod.name not in view.current_names]
        return [] if any(may_run(pod, view.now) for pod in old) else drop_workloads(view)
    if not world.serves_queues:
        return []
    request, actions = find_request(job, queue), list[Action]()
    name = request.name if request is not None else ""
    replaced = any(queue is not None and w.uid == queue.uid and w.finished for w in world.workloads)
    for workload in world.workloads:
        held = queue is not None and workload.uid in queue.uids
        if workload.leaving or held or (replaced and not (workload.finished or workload.additional)):
            continue  # Judge a successor only after it has taken over the quota.
        if workload.additional and _uses_more(view):
            continue
        if workload.name != name or workload.finished or (queue is None and workload.asks != _asks(job)):
            actions.append(DeleteWorkload(workload.name, workload.uid))
        elif workload.evicted and workload.reserved:
            actions.append(ReleaseWorkload(workload.name, workload.uid))
    if request and job.queue and not world.problems and not any(w.name == name for w in world.workloads):
        actions.append(request)
    if queue is not None and view.status.holds(ConditionType.RUNNING):
        running = "the group trains"
        actions += [
            MarkWorkload(w.name, w.uid, "PodsReady", "Started", running)
            for w in world.workloads
            if w.uid in queue.uids and not w.ready
        ]
    return actions


def _uses_more(view: View) -> bool:
    """Whether pods of dropped slots may still run and use quota that the job no longer has."""
    status, now = view.status, view.now
    running = [pod for pod in view.world.nodes() if may_run(pod, now)]
    granted = status.queue.pods if status.queue is not None else 0
    return len(running) > granted or any(pod.index >= len(status.slots) for pod in running)


def _asks(job: DDPJob) -> tuple[str, str]:
    return job.queue, job.queue_priority or job.spec.scheduling.priority_class_name or ""


def drop_workloads(view: View) -> list[Action]:
    """Return actions that delete all of the job's quota requests."""
    return [DeleteWorkload(w.name, w.uid) for w in view.world.workloads if not w.leaving]


def finish_workloads(view: View) -> list[Action]:
    """Return actions that release the quota of a finished job.

    The Workloads stay as a record, as they do for other kinds of jobs.
    """
    failed = view.status.condition(ConditionType.FAILED)
    complete = view.status.condition(ConditionType.COMPLETE)
    ended = failed if failed is not None and failed.status else complete
    reason = "Failed" if ended is failed else "Succeeded"
    message = ended.message if ended is not None else ""
    return [
        MarkWorkload(w.name, w.uid, "Finished", reason, message[:1000])
        for w in view.world.workloads
        if not (w.finished or w.leaving)
    ]
