"""Decides which actions bring a job's objects in line with its plan, and which messages its
coordinator gets.

The plan is in the status: its slots name the pods that should exist. Each reconcile compares the
plan with the world and returns the differences as actions. A lost or rejected action is simply
planned again, so no action has to be remembered.

- A missing pod is created after its back-off. Pods of a new generation also wait for the pods of
  the old generation, which may be saving (`_held_until`).
- A pod that no slot names is deleted. The old coordinator is deleted after its nodes. Failed pods
  stay for their logs, up to runPolicy.failedPodsKept for each slot.
- Role labels follow the coordinator's choice of training pods.
- Messages tell the coordinator which pods are gone. Changed settings are sent again at each
  reconcile until the coordinator's report shows them.

Example: pod train-1-0 has failed, and slot 1 is planned at attempt 1 from 10:00:10.

    10:00:00    no action; `held` is 10:00:10, when the next reconcile is due
    10:00:10    create train-1-1; train-1-0 stays for its log
    later       the coordinator takes train-1-1 into the group

Why: docs/decisions/0004 and 0009.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob_runtime.protocol import NUMBERS_PER_ATTEMPT, Command, CoordinatorState, MemberState, order_mark

from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import ConditionType, Restart, SlotState
from ddpjob.core.decision import (
    Action,
    CreateCoordinator,
    CreateNode,
    Creation,
    DeleteGang,
    DeletePod,
    LabelPod,
    NotifyCoordinator,
    Preparation,
)
from ddpjob.core.failures.liveness import ENDING_MARGIN, is_given_up, lost_since, may_run
from ddpjob.core.plan.gang import is_unserved
from ddpjob.core.plan.slots import ROOM, can_replace, with_rounds
from ddpjob.core.plan.wind_down import end_leftovers, has_leftovers
from ddpjob.core.rank_order import order_pods
from ddpjob.core.view import View
from ddpjob.core.volumes import lacks_claim
from ddpjob.core.world import PodView, Role, coordinator_pod_name, gang_name


@dataclass(frozen=True)
class PlannedActions:
    """The planned actions, and the view to continue with.

    The view's status has the current round in each slot that is about to get a pod.
    """

    view: View
    actions: tuple[Action, ...]
    held: datetime | None
    """When the next delayed object may be created; None if no object is delayed."""

    @property
    def creates(self) -> bool:
        """Whether missing objects are about to be created."""
        return any(isinstance(action, Creation) for action in self.actions)


def plan_actions(view: View, lost: frozenset[str]) -> PlannedActions:
    """Return actions that create and delete the job's objects, and change the labels of its pods.

    `lost` names pods to delete immediately (grace period 0). If podTemplate is faulty, no pods are
    created. If a claim is unusable, no objects are created at all. Pods may still be deleted,
    because a terminating claim stays until no pod uses it.
    """
    view = view.with_status(with_rounds(view))
    job, status, world = view.job, view.status, view.world
    actions: list[Action] = []
    if not world.has_service:
        actions.append(Preparation.SERVICE)
    if lacks_claim(job, world):
        actions.append(Preparation.CLAIM)
    if world.runtime != status.runtime and can_replace(view):
        actions.append(Preparation.RUNTIME)
    wants_budget = job.spec.pods > 1 and job.spec.scheduling.disruption_budget and not world.has_budget
    if wants_budget and any(pod is not None and pod.main.running for pod in view.pods):
        # Until a pod runs, there is nothing for a PodDisruptionBudget to protect.
        actions.append(Preparation.BUDGET)
    pods: list[Action] = []
    held = [_held_until(view)]
    dedicated = job.spec.rendezvous.placement is Placement.DEDICATED
    missing = dedicated and status.rendezvous.state is SlotState.PLANNED and view.coordinator is None
    buildable = not world.problems and not is_unserved(view)
    if buildable and held[0] is None:
        planned = [(i, s) for i, s in enumerate(status.slots) if s.state is SlotState.PLANNED and view.pods[i] is None]
        surplus = max(0, len(status.slots) - job.spec.pods)  # Some slots get no pod (see `keep_training`).
        planned = planned[: max(0, len(planned) - surplus)]
        members = status.gang.nodes if status.gang is not None and status.gang_waits else len(status.slots)
        pods += [CreateNode(i, s.attempt) for i, s in planned if i < members and _due(view, s.not_before, held)]
    if buildable and missing and _due(view, status.rendezvous.not_before, held):
        # Create the coordinator second, because it prefers the kind of machine that the first
        # node's pod gets. In a large job, the coordinator should not wait for the remaining pods.
        pods.insert(1, CreateCoordinator())
    isolated = view.status.condition(ConditionType.ISOLATED)
    if world.policy and not world.has_policy and (pods or isolated is None or isolated.status):
        # Retry a rejected NetworkPolicy only when pods are created, not at every reconcile.
        actions.append(Preparation.POLICY)
    if pods and status.gang_waits and gang_name(job, status.rendezvous.generation) not in world.gangs:
        actions.append(Preparation.GANG)
    if (pods and not world.has_token) or _lacks_token(view):
        actions.append(Preparation.TOKEN)
    actions += pods
    actions += _removals(view, lost)
    actions += _labels(view)
    kept = gang_name(job, status.rendezvous.generation) if status.gang is not None else ""
    actions += [DeleteGang(name, uid) for name, uid in world.gangs.items() if uid and name != kept]
    if view.claim_problem is not None:
        return PlannedActions(view, tuple(action for action in actions if not isinstance(action, Creation)), None)
    return PlannedActions(view, tuple(actions), min((moment for moment in held if moment is not None), default=None))


def _due(view: View, not_before: datetime | None, held: list[datetime | None]) -> bool:
    """Whether an object's back-off (`not_before`) is over, so the object may be created now.

    If the back-off is not over, its end is added to `held`. If more time remains than any back-off
    lasts, the clock was set back, so the back-off counts as over.
    """
    longest = max(timedelta(seconds=view.job.spec.recovery.backoff.maximum), ROOM) + timedelta(seconds=1)
    if not_before is None or not timedelta(0) < not_before - view.now <= longest:
        return True
    held.append(not_before)
    return False


def _held_until(view: View) -> datetime | None:
    """Return when a new generation stops waiting for the nodes of the old generation.

    The old nodes may be saving a checkpoint. Nodes on a dead host never confirm their end, so the
    wait is over when the old nodes' grace period ends. Return None if there are no old nodes to
    wait for.
    """
    latest = None
    for pod in view.world.nodes():
        if pod.generation >= view.status.rendezvous.generation or pod.ended:
            continue
        until = (pod.deleted_at or view.now + timedelta(seconds=pod.grace_seconds)) + ENDING_MARGIN
        if until > view.now and (latest is None or until > latest):
            latest = until
    return latest


def _lacks_token(view: View) -> bool:
    """Whether a pod is stuck because its token Secret was deleted.

    Users cannot recreate that Secret.
    """
    containers = (c for p in (view.coordinator, *view.pods) if p is not None for c in p.containers.values())
    waiting = [c.waiting_message for c in containers if c.waiting_reason == "CreateContainerConfigError"]
    secret = rf'"{re.escape(view.job.name)}-token-[0-9a-f]{{10}}"'
    return any(re.search(secret, message) for message in waiting)


# --- removals ---------------------------------------------------------------------------------------------------


def _removals(view: View, lost: frozenset[str]) -> list[Action]:
    """Return actions that delete running pods outside the plan, and the oldest failed pods.

    For each index, the last runPolicy.failedPodsKept failed pods are kept.
    """
    job, world, generation = view.job, view.world, view.status.rendezvous.generation
    actions: list[Action] = []
    kept: dict[int, list[PodView]] = {}
    old_nodes_run = any(p.generation < generation and may_run(p, view.now) for p in world.nodes())
    for pod in world.pods:
        if pod.name in view.current_names and pod.name not in lost:
            continue
        if not pod.ended and (pod.name in lost or is_given_up(view, pod, lost_since(pod, world, view.now))):
            # An unreachable host will never confirm that the pod has ended.
            actions.append(DeletePod(pod.name, pod.uid, 0))
        elif pod.role is Role.COORDINATOR:
            if pod.deleted_at is None and (pod.generation == generation or not old_nodes_run):
                actions.append(DeletePod(pod.name, pod.uid))
        elif pod.ended:
            kept.setdefault(pod.index, []).append(pod)
            actions += end_leftovers(job, pod, view.now) if has_leftovers(pod) and pod.deleted_at is None else []
        elif pod.deleted_at is None:
            actions.append(DeletePod(pod.name, pod.uid))
    for pods in kept.values():
        pods.sort(key=lambda p: p.attempt)
        surplus = pods[: max(0, len(pods) - job.spec.run_policy.failed_pods_kept)]
        actions += [DeletePod(p.name, p.uid) for p in surplus if p.deleted_at is None]
    return actions


# --- labels and messages ----------------------------------------------------------------------------------------


def _labels(view: View) -> list[Action]:
    """Return changes to role labels, so that they follow the coordinator's choice of training pods.

    Labels change only while a group is running.
    """
    report = view.report
    if report is None or report.state != CoordinatorState.RUNNING or report.world is None:
        return []
    state = {m.pod: m.state for m in report.members}
    full = report.world >= view.job.spec.nodes
    actions: list[Action] = []
    for pod in view.pods:
        if pod is None or pod.ended or pod.deleted_at is not None:
            continue
        if state.get(pod.name) == MemberState.RUNNING and pod.role is Role.SPARE:
            actions.append(LabelPod(pod.name, pod.uid, Role.NODE))
        elif state.get(pod.name) == MemberState.READY and full and pod.role is Role.NODE:
            actions.append(LabelPod(pod.name, pod.uid, Role.SPARE))
    return actions


def plan_notifications(view: View, restarts: tuple[Restart, ...], lost: frozenset[str]) -> tuple[Action, ...]:
    """Return the messages that the coordinator must get now.

    The messages contain settings that the coordinator's report does not show yet, and names of pods
    that are gone. A pod on a dead host cannot close its connections, so only such a message keeps
    its peers from waiting.
    """
    endpoint, report, spec = view.status.rendezvous.endpoint, view.report, view.job.spec
    if not spec.under_torchrun:
        return ()
    actions = _dismissal(view, lost)
    if not endpoint:
        return tuple(actions)
    if report is not None and (report.nodes, report.min_nodes) != (spec.nodes, spec.min_nodes):
        actions.append(NotifyCoordinator(endpoint, Command.SIZE, {"nodes": spec.nodes, "minNodes": spec.min_nodes}))
    wanted = spec.recovery
    patience = wanted.hang_after_seconds, (wanted.backoff.initial, wanted.backoff.maximum), wanted.hangs
    if report is not None and (report.hang_after, report.backoff, report.hangs) != patience:
        body: Json = {"hangAfter": patience[0], "backoff": list(patience[1]), "hangs": wanted.hangs}
        actions.append(NotifyCoordinator(endpoint, Command.PATIENCE, body))
    ordered = order_pods(view)
    if report is not None and report.order != order_mark(ordered):
        actions.append(NotifyCoordinator(endpoint, Command.ORDER, {"pods": list(ordered)}))
    present = {p.name for p in view.world.pods} - lost
    gone = [r.pod for r in restarts if r.index is not None and r.pod not in present and not r.consequence]
    if report is not None:
        known = [*(m.pod for m in report.members), *(m.pod for m in report.lost)]
        gone += [pod for pod in known if pod not in view.current_names and pod not in present]
        waits = report.state in (CoordinatorState.FORMING, CoordinatorState.RESTARTING)
        if waits and report.attempt and report.round <= report.attempt * NUMBERS_PER_ATTEMPT:
            # This coordinator has replaced a lost one, and waits for the members of the last round.
            # Name the lost members, because the new coordinator does not know them.
            status = view.status
            lately = [r for r in status.restarts.recent if r.seconds is None and not status.ended_without_recovery(r)]
            gone += [r.pod for r in lately if r.index is not None and r.pod not in present]
    for why, pods in _by_reason(list(dict.fromkeys(gone)), lost).items():
        actions.append(NotifyCoordinator(endpoint, Command.GONE, {"pods": pods, "why": why}))
    return (*actions, *send_away_deaf(view, endpoint))


DEAF = timedelta(seconds=4)
"""How long a launcher may take, after the deletion of its pod, to announce that it is leaving. A
slower launcher has probably not noticed the deletion."""


def send_away_deaf(view: View, endpoint: str) -> list[Action]:
    """Return the message that stops launchers that have not noticed their pods' deletion.

    SIGTERM is lost if it arrives while a container's first process starts. Without the message, the
    launcher would wait for a group until the grace period ends and the kubelet kills the container.
    The coordinator does not pass the message on to training pods, because they may be saving.
    """
    deaf = [pod.name for pod in view.world.nodes() if pod.main.running and _has_been_deleted_for(pod, DEAF, view.now)]
    body = {"pods": deaf, "why": "the pod was deleted, and its launcher has not noticed"}
    return [NotifyCoordinator(endpoint, Command.LEAVE, body)] if deaf and endpoint else []


def _has_been_deleted_for(pod: PodView, time: timedelta, now: datetime) -> bool:
    requested = pod.deleted_at and pod.deleted_at - timedelta(seconds=pod.grace_seconds)
    return requested is not None and requested + time <= now < requested + LONGEST_DEAF


LONGEST_DEAF = timedelta(seconds=20)
"""How long the operator keeps asking the coordinator to stop a deleted pod's launcher, counted from
the request to delete the pod."""


def _dismissal(view: View, lost: frozenset[str]) -> list[Action]:
    """Return the message that stops a replaced coordinator, which may still run on a lost host.

    If the generation continues, the replaced coordinator's members look for the next coordinator.
    If a new generation begins, these members exit. An old generation's coordinator gets the message
    only if its host is lost. On any other host, its pods may still be saving, so the coordinator is
    deleted after them.
    """
    before, after = view.job.status.rendezvous, view.status.rendezvous
    name = coordinator_pod_name(view.job, before.generation, before.attempt)
    if not before.endpoint or (before.generation, before.attempt) == (after.generation, after.attempt):
        return []
    if before.generation == after.generation:
        # The next coordinator may have the same address, as in the process backend. `before` limits
        # the message to coordinators of earlier attempts, so the next coordinator ignores it.
        return [
            NotifyCoordinator(
                before.endpoint, Command.EXIT, {"why": f"{name} has been replaced", "before": after.attempt}
            )
        ]
    if name not in lost:
        return []
    why = f"{name} was replaced, and the group continues as generation {after.generation}"
    return [NotifyCoordinator(before.endpoint, Command.STOP, {"ok": False, "why": why})]


def _by_reason(gone: list[str], lost: frozenset[str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for pod in gone:
        why = "its Kubernetes node is lost" if pod in lost else "the pod was deleted"
        reasons.setdefault(why, []).append(pod)
    return reasons
