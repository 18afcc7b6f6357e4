"""Decides what is missing of a job's objects and what is too much, and what the coordinator is to be told."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.api.types import DDPJob, JobStatus, Placement, Restart, SlotState
from ddpjob.core.decision import (
    Action,
    CreateBudget,
    CreateCoordinator,
    CreateNode,
    CreatePodFiles,
    CreateService,
    DeletePod,
    LabelPod,
    Tell,
)
from ddpjob.core.group import coordinator_pod, node_pods
from ddpjob.core.incidents import present_report
from ddpjob.core.leftovers import end_leftovers, has_leftovers
from ddpjob.core.losses import given_up, lost_since
from ddpjob.core.volumes import unusable_claim
from ddpjob.core.world import PodView, Role, World, coordinator_pod_name, node_pod_name

_ENDING_MARGIN = timedelta(seconds=5)


def ensure(job: DDPJob, status: JobStatus, world: World, now: datetime, lost: frozenset[str]) -> tuple[tuple[Action, ...], datetime | None]:
    """What is to be created and removed; and until when something is held back. `lost`: pods to be removed with no time to end."""
    if unusable_claim(job, world) is not None:
        return (), None
    actions: list[Action] = []
    if not world.has_service:
        actions.append(CreateService())
    if world.pod_files != status.pod_files:
        actions.append(CreatePodFiles())
    if job.spec.pods > 1 and not world.has_budget:
        actions.append(CreateBudget())
    held = [_held_until(world, status.rendezvous.generation, now)]
    dedicated = job.spec.rendezvous.placement is Placement.DEDICATED
    missing = dedicated and status.rendezvous.state is SlotState.PLANNED and coordinator_pod(job, status, world) is None
    if missing and _due(status.rendezvous.not_before, now, held):
        actions.append(CreateCoordinator())
    if held[0] is None:
        pods = node_pods(job, status, world)
        planned = [(i, s) for i, s in enumerate(status.slots) if s.state is SlotState.PLANNED and pods[i] is None]
        actions += [CreateNode(i, s.attempt) for i, s in planned if _due(s.not_before, now, held)]
    actions += _removals(job, status, world, now, lost)
    actions += _labels(job, status, world)
    return tuple(actions), min((moment for moment in held if moment is not None), default=None)


def _due(not_before: datetime | None, now: datetime, held: list[datetime | None]) -> bool:
    if not_before is None or now >= not_before:
        return True
    held.append(not_before)
    return False


def _held_until(world: World, generation: int, now: datetime) -> datetime | None:
    """Nodes of a new generation wait for those of the old one, which may be saving; but not for ever: a node may be dead."""
    latest = None
    for pod in world.nodes():
        if pod.generation >= generation or pod.ended:
            continue
        until = (pod.deleted_at or now + timedelta(seconds=pod.grace_seconds)) + _ENDING_MARGIN
        if until > now and (latest is None or until > latest):
            latest = until
    return latest


# --- what is too much -------------------------------------------------------------------------------------------


def _removals(job: DDPJob, status: JobStatus, world: World, now: datetime, lost: frozenset[str]) -> list[Action]:
    """Pods that nobody counts on any more and that still run, and failed pods over the limit."""
    generation = status.rendezvous.generation
    actions: list[Action] = []
    kept: dict[int, list[PodView]] = {}
    current = _current_names(job, status)
    old_nodes_run = any(p.generation < generation and not p.ended for p in world.nodes())
    for pod in world.pods:
        if pod.name in current and pod.name not in lost:
            continue
        if not pod.ended and (pod.name in lost or given_up(job, pod, lost_since(pod, world, now), world, now)):
            # On a node that does not answer nobody will ever confirm its end.
            actions.append(DeletePod(pod.name, pod.uid, 0))
        elif pod.role is Role.COORDINATOR:
            if pod.deleted_at is None and (pod.generation == generation or not old_nodes_run):
                actions.append(DeletePod(pod.name, pod.uid))
        elif pod.ended:
            kept.setdefault(pod.index, []).append(pod)
            actions += end_leftovers(job, pod, now) if has_leftovers(pod) and pod.deleted_at is None else []
        elif pod.deleted_at is None:
            actions.append(DeletePod(pod.name, pod.uid))
    for pods in kept.values():
        pods.sort(key=lambda p: p.attempt)
        surplus = pods[: max(0, len(pods) - job.spec.run_policy.failed_pods_kept)]
        actions += [DeletePod(p.name, p.uid) for p in surplus if p.deleted_at is None]
    return actions


def _current_names(job: DDPJob, status: JobStatus) -> set[str]:
    names = {node_pod_name(job, i, s.attempt) for i, s in enumerate(status.slots)}
    return names | {coordinator_pod_name(job, status.rendezvous.generation, status.rendezvous.attempt)}


# --- what the coordinator has decided, and what it should know --------------------------------------------------


def _labels(job: DDPJob, status: JobStatus, world: World) -> list[Action]:
    """The role label follows the part that the coordinator has given a pod, while a group runs."""
    report = present_report(status, world)
    if report is None or report.state != "Running" or report.world is None:
        return []
    state = {m.pod: m.state for m in report.members}
    full = report.world >= job.spec.nodes
    actions: list[Action] = []
    for pod in node_pods(job, status, world):
        if pod is None or pod.ended or pod.deleted_at is not None:
            continue
        if state.get(pod.name) == "Running" and pod.role is Role.SPARE:
            actions.append(LabelPod(pod.name, pod.uid, Role.NODE))
        elif state.get(pod.name) == "Ready" and full and pod.role is Role.NODE:
            actions.append(LabelPod(pod.name, pod.uid, Role.SPARE))
    return actions


def tell(job: DDPJob, status: JobStatus, world: World, restarts: tuple[Restart, ...], lost: frozenset[str]) -> tuple[Action, ...]:
    """Size and patience until the report shows them, and the pods that are gone: one on a dead node says nothing to its peers."""
    endpoint, report = status.rendezvous.endpoint, present_report(status, world)
    if not job.spec.under_torchrun or not endpoint:
        return ()
    actions: list[Action] = []
    if report is not None and report.wanted is not None and (report.wanted, report.minimum) != (job.spec.nodes, job.spec.min_nodes):
        actions.append(Tell(endpoint, "size", {"nodes": job.spec.nodes, "minNodes": job.spec.min_nodes}))
    recovery = job.spec.recovery
    patience = (recovery.hang_after_seconds, (recovery.backoff.initial, recovery.backoff.maximum))
    if report is not None and report.backoff is not None and (report.hang_after, report.backoff) != patience:
        actions.append(Tell(endpoint, "patience", {"hangAfter": patience[0], "backoff": list(patience[1])}))
    present = {p.name for p in world.pods} - lost
    gone = [r.pod for r in restarts if r.index is not None and r.pod not in present and not r.consequence]
    if report is not None:
        current = _current_names(job, status)
        known = [*(m.pod for m in report.members), *(m.pod for m in report.lost)]
        gone += [pod for pod in known if pod not in current and pod not in present]
    why = {"why": "its node is lost"}, {"why": "the pod was deleted"}
    actions += [Tell(endpoint, "gone", {"pod": pod, **why[pod not in lost]}) for pod in dict.fromkeys(gone)]
    return tuple(actions)
