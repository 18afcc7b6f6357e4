"""The Scheduled condition: whether all pods have been placed, and what the remaining pods wait for.

Several obstacles may exist at once. The condition shows the first one, in the order in which users
have to remove them (`judge_scheduled`):

1. a faulty podTemplate, an unusable claim, or a gang that the cluster does not serve
2. an object that the API server rejects, with the field that it comes from
3. a pod that the scheduler finds no room for, or that no scheduler has considered
4. an old pod that the API server refuses to delete
5. if there are no such obstacles, pods that are being placed, or that back off

Example of a job with 2 nodes in a full cluster:

    Placing         0 of 2 pods are scheduled
    Unschedulable   pod train-1-0: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu
    AllPlaced       2 of 2 pods are scheduled

While a rejected object is being created again, the condition keeps its message. A different message
would be written to the status, and each write triggers the next reconcile, so the operator would
retry in an endless loop without pauses.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import partial

from ddpjob.api.job_status import ConditionType, JobStatus, SlotState
from ddpjob.core.decision import BLOCKED_POLL
from ddpjob.core.only_copy import STATE, explain_kept, find_holders
from ddpjob.core.status.conditions import with_condition
from ddpjob.core.status.group_counts import count_training_nodes
from ddpjob.core.status.messages import count, why_held
from ddpjob.core.status.waiting_pods import find_not_considered
from ddpjob.core.view import View
from ddpjob.core.volumes import FIELD
from ddpjob.core.world import PodView, Rejection, Role, World, gang_name

UNSCHEDULABLE = "Unschedulable"
CREATION_REFUSED = "CreationRefused"
NAME_IS_TAKEN = "NameTaken"
DELETION_REFUSED = "DeletionRefused"


def judge_scheduled(view: View, alive: list[PodView], *, creating: bool) -> JobStatus:
    """Return the status with the Scheduled condition.

    `alive` contains the slots' pods that have not ended. `creating` is true if objects are about to
    be created.
    """
    status, spec, world = view.status, view.job.spec, view.world
    condition = partial(with_condition, status, ConditionType.SCHEDULED, now=view.now)

    if world.problems:
        remedy = "existing pods stay as they are, and no pod is created until spec.podTemplate is corrected"
        return condition(False, "InvalidPodTemplate", f"{'; '.join(world.problems)} ({remedy})")
    if view.claim_problem is not None:
        return condition(False, view.claim_problem.reason, view.claim_problem.message)
    if status.gang_waits and not world.serves_gangs:
        return condition(False, GANG_NOT_SERVED, _gang_not_served(volcano=spec.scheduling.by_volcano))
    blocking = [rejection for rejection in world.rejections if not rejection.of_budget]
    if blocking:
        return condition(False, *_refused(view, alive, blocking[0]))
    before = status.condition(ConditionType.SCHEDULED)
    if creating and not world.rejections and before is not None and before.reason in (CREATION_REFUSED, NAME_IS_TAKEN):
        return status  # Keep the message until the retry has succeeded or failed.
    coordinator = view.coordinator
    dedicated = [coordinator] if coordinator is not None and coordinator.role is Role.COORDINATOR else []
    waiting = next((p for p in [*alive, *dedicated] if p.unschedulable and not p.host), None)
    if waiting is not None:
        message = f"pod {waiting.name}: {waiting.unschedulable}{_spread_hint(view, waiting)}"
        if status.gang_waits:
            message = _gang_waits(view, alive)
        elif status.gang is not None and find_holders(view):
            message += f"; the other pods stay, because only they hold {STATE}"
        return condition(False, UNSCHEDULABLE, f"{message}{_kept(view)}")
    by_volcano = status.gang_waits and spec.scheduling.by_volcano
    ignored = find_not_considered([*alive, *dedicated], spec.scheduling, view.now) if not by_volcano else None
    if ignored is not None:
        return condition(False, *ignored)
    placed = sum(bool(p.host) for p in alive) + sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    if world.deletion_refused and placed < spec.pods:
        return condition(False, DELETION_REFUSED, deletion_refused(world))
    if placed >= spec.pods:
        budget = next((rejection for rejection in world.rejections if rejection.of_budget), None)
        if budget is None and creating and before is not None and before.status and _NO_BUDGET in before.message:
            return status  # Keep the message until the retry has succeeded or failed.
        refused = f"; {budget.object} {_NO_BUDGET}: {budget.message}" if budget is not None else ""
        return condition(True, "AllPlaced", f"{_are_scheduled(spec.pods, spec.pods)}{refused}{_kept(view)}")
    message = f"{_are_scheduled(placed, spec.pods)}{_backing_off(status, view.now)}"
    if by_volcano and alive:
        group = gang_name(view.job, status.rendezvous.generation)
        message += (
            "; Volcano has not reported on the unscheduled pods yet; if this persists, check that their queue exists "
            f"and is open, and read the events of PodGroup {group} (podgroups.scheduling.volcano.sh)"
        )
    return condition(False, "Placing", message)


def _kept(view: View) -> str:
    kept = explain_kept(view)
    return f"; {kept}" if kept else ""


def _are_scheduled(placed: int, pods: int) -> str:
    return f"{placed} of {count(pods, 'pod')} {'is' if 1 in (placed, pods) else 'are'} scheduled"


def _refused(view: View, alive: list[PodView], rejected: Rejection) -> tuple[str, str]:
    """Return the reason and message for a rejected object, with the spec field to correct."""
    what = f"{rejected.object}{f' ({FIELD})' if rejected.is_claim else ''}: {rejected.message}"
    if rejected.name_taken:
        return NAME_IS_TAKEN, f"{what}; retried within {BLOCKED_POLL:.0f} s"
    if _NO_CLASS.search(rejected.message):
        what += "; the value comes from spec.scheduling.priorityClassName"
    elif rejected.of_gang:
        what += "; to schedule the pods one by one, without a gang, set scheduling.gang to false"
    if _OF_A_CONTAINER.search(rejected.message):
        of_coordinator = rejected.object.startswith(f"Pod {view.job.name}-coordinator-")
        what += f"; the values come from {'spec.rendezvous.resources' if of_coordinator else 'spec.resources'}"
    if "violates PodSecurity" in rejected.message:
        where = "the securityContext of spec.podTemplate.spec or of the container that the message names"
        instead = "replace hostPath and nfs with claims, and remove hostNetwork and hostPort"
        what += f"; set the missing fields in {where}; {instead}"
    return CREATION_REFUSED, f"{what}; retried within a minute{_idle(view, alive)}"


_OF_A_CONTAINER = re.compile(r"usage per (Container|Pod) is|request ratio per (Container|Pod) is")
"""Matches messages about objects that a LimitRange rejects. These messages do not name the
container."""
_NO_CLASS = re.compile(r"no PriorityClass with name \S+ was found")
"""Matches messages about objects that name a missing PriorityClass. Such an object would be
rejected without a gang too."""
_NO_BUDGET = (
    "is refused, so a drain can end several pods at once (to run without a budget, set scheduling.disruptionBudget to "
    "false)"
)


def deletion_refused(world: World) -> str:
    """Describe the pod that the API server does not let the operator delete."""
    return f"the API server refuses to delete {world.deletion_refused}; retried within a minute"


def _gang_waits(view: View, alive: list[PodView]) -> str:
    """Describe what a gang is waiting for, and how many of its pods would fit now."""
    spec, gang = view.job.spec, view.status.gang
    nodes = gang.nodes if gang is not None else spec.nodes
    gpus = f" with {count(spec.gpus_per_node, 'GPU')} each" if spec.gpus_per_node else ""
    text = f"waits for room for {nodes} nodes{gpus} at once, and holds none of them until then"
    judged = [pod for pod in alive if pod.unschedulable and not pod.host]
    fitting = [pod for pod in judged if _FITS in pod.unschedulable]
    short = next((pod for pod in judged if pod not in fitting), None)
    if len(judged) == nodes and not spec.scheduling.by_volcano:  # Volcano does not report which pods fit.
        text += f"; {len(fitting)} of them would fit now"
    if short is None:
        return text + _backing_off(view.status, view.now)
    return f"{text}; pod {short.name}: {short.unschedulable}{_spread_hint(view, short)}"


_FITS = "waiting for minCount pods from a gang"
"""The message of kube-scheduler 1.36 about a pod that has room, although other pods of its group do
not."""
GANG_NOT_SERVED = "GangNotServed"


def _gang_not_served(*, volcano: bool) -> str:
    """Report that the cluster does not serve PodGroups, and explain how to run without them."""
    kubernetes = (
        "PodGroups (scheduling.k8s.io/v1alpha2, in Kubernetes 1.36 with the feature gates GenericWorkload and "
        "GangScheduling)"
    )
    missing = "Volcano PodGroups (scheduling.volcano.sh/v1beta1)" if volcano else kubernetes
    return (
        f"scheduling.gang is true, but this cluster does not serve {missing}; leave scheduling.gang out, or set it to "
        "false, to schedule the pods one by one"
    )


def _idle(view: View, alive: list[PodView]) -> str:
    """Describe the pods that wait for rejected pods, and explain how to release the waiting pods.

    The result is empty if no pod exists, or if the group may be training.
    """
    spec, unknown = view.job.spec, view.report is None and view.status.holds(ConditionType.RUNNING)
    if not alive or unknown or count_training_nodes(view) is not None:
        return ""
    are = "is" if len(alive) == 1 else "are"
    gpus = len(alive) * spec.gpus_per_node
    held = f" with {count(gpus, 'GPU')}" if gpus else ""
    text = f"; {len(alive)} of {count(spec.pods, 'pod')} {are} already waiting{held}"
    return f"{text}: to release them, set runPolicy.suspend to true; to train with fewer pods, lower spec.nodes"


def _backing_off(status: JobStatus, now: datetime) -> str:
    held = [
        (s.not_before, i, s)
        for i, s in enumerate(status.slots)
        if s.state is SlotState.PLANNED and s.not_before and s.not_before > now
    ]
    if not held:
        return ""
    until, index, slot = min(held, key=lambda h: h[0])
    return f"; the next pod with index {index} is created at {until:%H:%M:%S} UTC ({why_held(slot)})"


def _spread_hint(view: View, pod: PodView) -> str:
    scheduling = view.job.spec.scheduling
    leaving = next((p for p in view.world.nodes() if p.deleted_at is not None and not p.ended), None)
    if leaving is not None and leaving.deleted_at is not None:
        until = f"{leaving.deleted_at:%H:%M:%S} UTC"
        return f" (pod {leaving.name} is still terminating and keeps its Kubernetes node until {until} at the latest)"
    if scheduling.same_topology and "pod affinity" in pod.unschedulable:
        return (
            f" (all pods must be in the same {scheduling.same_topology}; if the one with the placed pods is full, set "
            "runPolicy.suspend to true and then back to false so that all pods are placed again)"
        )
    if scheduling.one_pod_per_node and "anti-affinity" in pod.unschedulable:
        wanted = "spec.nodes and spec.spares" if view.job.spec.spares else "spec.nodes"
        return (
            f" (one pod per {scheduling.topology_key}: too few Kubernetes nodes fit for {wanted}; to let pods share a "
            "Kubernetes node, set scheduling.onePodPerNode to false)"
        )
    return ""
