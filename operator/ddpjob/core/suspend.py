"""Decides how a job's pods are deleted when the job is suspended, or waits for a class or quota.

Scripts must be able to save, no pod must be left running, and the job must find a new plan when it
resumes.

1. If the group has already finished its work, the job is complete and is not suspended.
2. The slots are planned again as a new generation, so that resuming only has to create the pods.
3. Nodes are deleted with their grace period. The coordinator is deleted last, because nodes need it
   until they have ended. Its deletion does not wait for a pod that should have ended long ago.
4. An unreachable host cannot confirm that its pods have ended, so they are deleted without waiting.
5. After the last pod, the PodGroup is deleted, and so are the quota requests unless the job waits
   in a queue.

Example with 2 nodes and a coordinator:

     0 s  runPolicy.suspend becomes true: both nodes are deleted, and their scripts save
     9 s  both nodes have ended: the coordinator is deleted
    11 s  no pods are left: the PodGroup is deleted, and the job waits

A job that waits for a class or quota is treated in the same way, with a different reason.

Why: docs/decisions/0017 for the quota.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob.api.job_status import ConditionType, SlotState, format_time
from ddpjob.core.decision import BLOCKED_POLL, Action, Decision, DeleteGang, DeletePod, Event
from ddpjob.core.failures.liveness import is_given_up, is_overdue, lost_since
from ddpjob.core.follow.outcome import has_finished_while_ending, settle
from ddpjob.core.plan.actions import DEAF, send_away_deaf
from ddpjob.core.plan.queue import drop_workloads
from ddpjob.core.plan.slots import begin_generation
from ddpjob.core.plan.wind_down import complete, has_leftovers
from ddpjob.core.status.conditions import QUEUED, with_condition, with_phase, without_condition
from ddpjob.core.status.messages import count
from ddpjob.core.status.scheduled import deletion_refused
from ddpjob.core.status.shown_progress import show_progress, without_speed
from ddpjob.core.view import View
from ddpjob.core.world import PodView, Role, World, host_port, is_down

_LEAVING_POLL = DEAF.total_seconds() + 1.0


def suspend(view: View, reason: str = "Suspended", waits: str = "", events: list[Event] | None = None) -> Decision:
    """Return the decision for a job that may not have pods now.

    By default, this is a job that its user has suspended. If the job waits for its class or its
    queue, the caller passes the condition's reason and message as `reason` and `waits`, and
    `events` that replace the default event.
    """
    done = settle(view) if view.status.slots else None
    if done is not None:
        # The group finished while no operator was watching. A resumed job would have nothing to do,
        # so complete it now.
        return complete(done, [])
    if view.status.holds(ConditionType.SUSPENDED) and has_finished_while_ending(view):
        return complete(view, [])
    status, now = view.status, view.now
    states = [status.rendezvous.state, *(s.state for s in status.slots)]
    created = view.coordinator is not None or any(pod is not None for pod in view.pods)
    if created or any(state is not SlotState.PLANNED for state in states):
        # Plan new attempts, because a pod may exist that the status does not show yet, and its name
        # cannot be used again. Keep the old template hash, keys and runtime, so that `begin`
        # compares the spec with them when the job resumes.
        planned = replace(begin_generation(view), template_hash=status.template_hash, runtime=status.runtime)
        status = replace(planned, former_keys=status.former_keys)
    leaving = [p for p in view.world.pods if is_left(p, view.world)]
    if events is None:
        already = status.condition(ConditionType.SUSPENDED)
        fresh = already is None or not already.status or already.reason != reason
        had_pods = leaving or view.job.status.slots
        said = "pods are deleted, and checkpoints are kept" if had_pods else "no pods are created"
        events = [Event(False, reason, f"runPolicy.suspend is true: {said}")] if fresh else []
    message = (
        f"{count(len(leaving), 'pod')} not deleted yet: {deletion_refused(view.world)}"
        if leaving and view.world.deletion_refused
        else f"{count(len(leaving), 'pod')} still terminating{_overdue(leaving, now)}"
        if leaving
        else waits or "no pods are running; set runPolicy.suspend to false to resume"
    )
    status = with_condition(status, ConditionType.SUSPENDED, True, reason, message, now)
    for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.RESTARTING):
        if status.condition(kind) is not None:
            status = with_condition(status, kind, False, "Suspended", "the job is suspended", now)
    for kind in (
        *(ConditionType.FAST_RECOVERY, ConditionType.NODES_HEALTHY, ConditionType.RANKS_ORDERED),
        *(
            ConditionType.RANKS_KEEP_PACE,
            ConditionType.CHECKPOINTS_COPIED,
            ConditionType.SNAPSHOTS_HELD,
            ConditionType.PREFLIGHT_PASSED,
        ),
    ):
        status = without_condition(status, kind)
    shown, reported = without_speed(status.progress), without_speed(view.reported_progress)
    progress = show_progress(shown, reported, now, at_once=True)
    status = with_phase(replace(status, start_time=None, active=0, ready=0, spare=0, progress=progress))
    if reason not in QUEUED:
        status = without_condition(replace(status, queue=None), ConditionType.ADMITTED)
    lost = [p for p in leaving if is_given_up(view, p, lost_since(p, view.world, now))]
    alive = [p for p in leaving if p not in lost]
    nodes_first = [p for p in alive if p.role is not Role.COORDINATOR and not is_overdue(p, now)] or alive
    # An unreachable host never confirms that its pods have ended, so delete them without waiting.
    actions: list[Action] = [DeletePod(p.name, p.uid, 0) for p in lost]
    actions += [DeletePod(p.name, p.uid) for p in nodes_first if p.deleted_at is None]
    actions += _send_away(view, leaving)
    if not leaving:
        actions += [DeleteGang(name, uid) for name, uid in view.world.gangs.items() if uid]
        actions += drop_workloads(view) if reason not in QUEUED else []
    recent = any(p.deleted_at is None or now < p.deleted_at for p in alive)
    wake = (_LEAVING_POLL if recent else BLOCKED_POLL) if leaving or actions else None
    return Decision(status, tuple(actions), tuple(events), wake)


def _send_away(view: View, leaving: list[PodView]) -> list[Action]:
    """Return messages to coordinators about launchers that have not noticed their pods' deletion.

    A coordinator of an earlier generation may still exist, so each one is notified at its own
    address.
    """
    port = view.job.spec.rendezvous.endpoint_port
    coordinators = (p for p in leaving if p.role is Role.COORDINATOR and p.address and p.main.running)
    return [action for p in coordinators for action in send_away_deaf(view, host_port(p.address, port))]


def is_left(pod: PodView, world: World) -> bool:
    """Whether the pod still has to terminate.

    If the program has ended but a sidecar still runs, the pod still has to terminate. The exception
    is a pod on a dead host.
    """
    return not pod.ended or (has_leftovers(pod) and not is_down(pod.host, world.hosts))


def _overdue(leaving: list[PodView], now: datetime) -> str:
    """Describe the first pod that should have ended by now; empty if there is no such pod."""
    pod = next((p for p in leaving if is_overdue(p, now)), None)
    if pod is None:
        return ""
    host = f", or its Kubernetes node {pod.host} is unreachable" if pod.host else ""
    return f"; pod {pod.name} should have ended by {format_time(pod.deleted_at)}, but a finalizer holds it{host}"
