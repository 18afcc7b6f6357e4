"""Decides how a job ends: what its status says, how training stops, and when objects are deleted.

The end is written once, by `fail` or `complete`. Later reconciles only perform the actions that are
due (`wind_down`), and no longer change the conditions:

1. A failed job's running nodes are stopped by a message sent through the coordinator, because a pod
   that exits on its own keeps its log. After STOP_SECONDS, or if no message can reach these nodes,
   they are deleted.
2. The coordinator's pod is deleted, and so are the other pods that runPolicy.cleanPodPolicy
   selects. A coordinator that is a container in a node's pod is asked to exit.
3. The quota and the PodGroup are released once no pod of the job can be running.
4. After runPolicy.ttlSecondsAfterFinished, the job itself is deleted.

Example of a failed job with a time to live of one hour:

    10:00:00  Failed is written, and the coordinator is asked to stop its nodes
    10:00:03  the nodes have ended; the coordinator's pod is deleted, and the quota is released
    11:00:00  the job is deleted, and Kubernetes deletes everything that belongs to it

None of this happens if a user deletes the job, because jobs have no finalizer.

Why: docs/decisions/0003.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob_runtime.protocol import NO, UNGROUPED, Command

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import CleanPodPolicy
from ddpjob.api.job_status import ConditionType, SlotState
from ddpjob.core.decision import (
    BLOCKED_POLL,
    POLL,
    Action,
    Decision,
    DeleteGang,
    DeleteJob,
    DeletePod,
    Event,
    Failure,
    MarkWorkload,
    NotifyCoordinator,
)
from ddpjob.core.failures.classify import without_wait
from ddpjob.core.failures.liveness import may_run
from ddpjob.core.plan.queue import finish_workloads
from ddpjob.core.status.conditions import with_condition, with_phase, without_condition
from ddpjob.core.status.messages import event_text
from ddpjob.core.status.running import NO_GROUP
from ddpjob.core.status.shown_progress import began_again, show_progress, without_future
from ddpjob.core.view import View
from ddpjob.core.world import COORDINATOR_CONTAINER, PodView, Role, host_port

STOP_SECONDS = 15
"""How long running nodes may take to stop on their own before they are deleted."""
EXIT_SECONDS = 15
"""How long a coordinator that is a container in a node's pod may take to exit. After this time, the
pod is deleted, and the coordinator's log is lost.
"""


# --- the end ----------------------------------------------------------------------------------------------------


def fail(view: View, failure: Failure, events: list[Event] | None = None) -> Decision:
    """Return the decision for a job that has failed for good.

    The decision's events are `events`, followed by the event for the failure.
    """
    recent = view.status.restarts.recent
    if recent:  # The last restart will not happen, so its message must not name a back-off.
        recent = (*recent[:-1], replace(recent[-1], message=without_wait(recent[-1].message)))
    status = replace(view.status, restarts=replace(view.status.restarts, recent=recent))
    status = with_condition(status, ConditionType.FAILED, True, failure.reason, failure.message, view.now)
    announced = Event(True, failure.reason, event_text(failure.message))
    return _end(view.with_status(status), [*(events or []), announced], "Failed")


def complete(view: View, events: list[Event]) -> Decision:
    """Return the decision for a job whose group has finished its work."""
    nodes, least = view.job.spec.nodes, view.job.spec.min_nodes
    if least == nodes:
        # A finished pod may have been removed before the operator saw that it finished. Without
        # elastic nodes, one finished node proves that all nodes have finished, so lost slots count
        # as finished too.
        view = view.with_slots(
            [
                replace(slot, state=SlotState.SUCCEEDED) if slot.state is SlotState.LOST else slot
                for slot in view.status.slots
            ]
        )
    finished = sum(slot.state in (SlotState.SUCCEEDED, SlotState.RUNNING) for slot in view.status.slots)
    done = view.status.rendezvous.nodes or nodes if least == nodes else min(finished, nodes) or nodes
    message = f"all {done} nodes have finished" if done > 1 else "the node has finished"
    if not finished and least < nodes:
        # The number of finished nodes is unknown, because the group may have been smaller, or a
        # suspension has removed its pods.
        message = "all nodes have finished"
    if _trained_apart(view):
        message += (
            ", but the ranks did not form a group, so each of them trained a separate model; run `ddpjob init SCRIPT` "
            "to see the missing lines"
        )
    progress = show_progress(view.status.progress, view.reported_progress, view.now, at_once=True)
    if progress.get("resumed") == NO:
        message += f", but {began_again(progress)}"
    status = with_condition(view.status, ConditionType.COMPLETE, True, "Finished", message, view.now)
    return _end(view.with_status(status), [*events, Event(False, "Complete", message)], "Complete")


def _trained_apart(view: View) -> bool:
    """Whether the ranks trained without forming a group, according to their last report."""
    running = view.status.condition(ConditionType.RUNNING)
    if running is not None and running.reason == NO_GROUP:
        return True
    return view.report is not None and view.report.progress.get(UNGROUPED) is True


def _end(view: View, events: list[Event], reason: str) -> Decision:
    status, now = view.status, view.now
    ended = "the job is complete" if reason == "Complete" else "the job has failed"
    for kind in (ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.SUSPENDED):
        if status.holds(kind) or (kind is not ConditionType.SUSPENDED and status.condition(kind) is not None):
            status = with_condition(status, kind, False, reason, ended, now)
    scheduled = status.condition(ConditionType.SCHEDULED)
    if reason == "Complete" and scheduled is not None and not scheduled.status:
        # A spare may never have been scheduled, because the job did not need it.
        status = with_condition(status, ConditionType.SCHEDULED, True, "Finished", ended, now)
    for kind in (
        *(ConditionType.NODES_HEALTHY, ConditionType.RANKS_ORDERED),
        *(ConditionType.RANKS_KEEP_PACE, ConditionType.SNAPSHOTS_HELD),
    ):
        status = without_condition(status, kind)
    last = SlotState.SUCCEEDED if reason == "Complete" else SlotState.FAILED
    status = replace(
        status,
        rendezvous=replace(status.rendezvous, state=last),
        completion_time=now.replace(microsecond=0),
        active=0,
        ready=0,
        spare=0,
        progress=without_future(show_progress(status.progress, view.reported_progress, now, at_once=True)),
    )
    status = with_phase(status)
    return replace(wind_down(view.with_status(status)), status=status, events=tuple(events))


# --- after the end ----------------------------------------------------------------------------------------------


def wind_down(view: View) -> Decision:
    """Return the actions that are due for a finished job. Its status no longer changes."""
    job, world, now = view.job, view.world, view.now
    ended_at = view.status.completion_time or now
    training = [p for p in world.nodes() if not p.ended and p.deleted_at is None]
    overdue = now >= ended_at + timedelta(seconds=STOP_SECONDS)
    actions = _stop(view, training, overdue=overdue) if training else _clean(view)
    # Kueue must not grant the quota to other jobs while the resources are still in use.
    quota, in_use = finish_workloads(view), any(may_run(p, now) for p in world.nodes())
    if not in_use:
        actions += quota
        actions += [DeleteGang(name, uid) for name, uid in world.gangs.items() if uid]
    # The API server may reject reports to Kueue and deletions for a long time, so retry less often.
    soon = training or (in_use and quota) or any(not isinstance(a, MarkWorkload | DeleteGang) for a in actions)
    wake = [POLL] if soon and not world.deletion_refused else [BLOCKED_POLL] if actions or soon else []
    ttl = job.spec.run_policy.ttl_seconds_after_finished
    if ttl is not None:
        left = (ended_at + timedelta(seconds=ttl) - now).total_seconds()
        if left <= 0:
            # Perform all other due actions too, because the job's deletion may be rejected or may
            # have to wait for a notification.
            actions, left = [*actions, DeleteJob()], BLOCKED_POLL
        wake.append(left)
    return Decision(view.status, tuple(actions), wake=min(wake, default=None))


def _stop(view: View, training: list[PodView], *, overdue: bool) -> list[Action]:
    """Return actions that stop running nodes, by a message if possible and else by deletion.

    Nodes that run a `command`, and nodes whose program has not started, cannot receive a message.
    Nodes of a complete job exit on their own.
    """
    reachable = view.job.spec.under_torchrun and view.coordinator is not None
    if overdue or not reachable:
        return [DeletePod(p.name, p.uid) for p in training]
    idle: list[Action] = [DeletePod(p.name, p.uid) for p in training if not p.main.running]
    failed = view.status.condition(ConditionType.FAILED)
    if failed is None or not failed.status:
        return idle
    return [
        *idle,
        NotifyCoordinator(view.status.rendezvous.endpoint, Command.STOP, {"ok": False, "why": failed.reason}),
    ]


def _clean(view: View) -> list[Action]:
    """Return actions that clean up after the job's nodes have ended.

    Pods are deleted as runPolicy.cleanPodPolicy requires. In a pod that this policy
    keeps, sidecars continue to run, but a coordinator is asked to exit.
    """
    policy = view.job.spec.run_policy.clean_pod_policy
    actions: list[Action] = []
    for pod in view.world.pods:
        if pod.deleted_at is not None:
            continue
        if pod.role is Role.COORDINATOR or policy is CleanPodPolicy.ALL:
            actions.append(DeletePod(pod.name, pod.uid))
        elif has_leftovers(pod):
            ends = end_leftovers(view.job, pod, view.now)
            actions += [e for e in ends if policy is CleanPodPolicy.RUNNING or isinstance(e, NotifyCoordinator)]
    return actions


# --- pods whose trainer has ended while other containers run ----------------------------------------------------


def has_leftovers(pod: PodView) -> bool:
    """Whether the pod's main container has ended while another container is still running.

    A pod in phase Succeeded or Failed has no leftovers. If a container of such a pod has no exit
    code, that container never started, for example because an init container failed.
    """
    return pod.ended and pod.phase not in ("Succeeded", "Failed") and not all(c.ended for c in pod.containers.values())


def end_leftovers(job: DDPJob, pod: PodView, now: datetime) -> list[Action]:
    """Return actions that stop the other containers of a pod whose trainer has exited.

    With Master placement, the coordinator in the pod is asked to exit, so that the pod and its log
    remain. A sidecar can be stopped only by deleting its pod.
    """
    coordinator = pod.containers.get(COORDINATOR_CONTAINER)
    patient = pod.main.finished is None or now < pod.main.finished + timedelta(seconds=EXIT_SECONDS)
    if coordinator is not None and coordinator.running and patient:
        endpoint = host_port(pod.address, job.spec.rendezvous.endpoint_port)
        return [NotifyCoordinator(endpoint, Command.EXIT, {"why": "the trainer in its pod has ended"})]
    return [DeletePod(pod.name, pod.uid)]
