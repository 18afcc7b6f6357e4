"""Decides how a job's pods are deleted when the job is suspended, or waits for a class or quota.

Scripts need time to save, no pod may be left running, and a new plan must be ready when the job
resumes.

1. If the group has already finished its work, the job is complete and is not suspended.
2. A new generation is planned, so only its pods have to be created when the job resumes.
3. Nodes are deleted with their grace period. The coordinator is deleted last, because nodes need it
   until they have ended. Its deletion does not wait for a pod that should have ended long ago.
4. An unreachable host cannot confirm that its pods have ended, so these pods are deleted without
   waiting.
5. Once all pods are gone, the PodGroup is deleted. The quota requests are deleted too, unless the
   job waits in a queue.

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

    By default, the job's user has suspended it. If the job waits for its class or its queue
    instead, `reason` and `waits` are the reason and the message of the Suspended condition, and
    `events` replace the default event.
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
        # Plan new attempts. The cluster may have pods that the status does not show yet, and no pod
        # name may be used twice. Keep the old template hash, keys and runtime, because `begin`
        # compares them with the spec when the job resumes.
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

    A coordinator of an earlier generation may still exist, so each coordinator is notified at
    its own address.
    """
    port = view.job.spec.rendezvous.endpoint_port
    coordinators = (p for p in leaving if p.role is Role.COORDINATOR and p.address and p.main.running)
    return [action for p in coordinators for action in send_away_deaf(view, host_port(p.address, port))]


def is_left(pod: PodView, world: World) -> bool:
    """Whether the pod still has to terminate.

    A pod whose program has ended still has to terminate while a sidecar runs, unless its host is
    dead.
    """
    return not pod.ended or (has_leftovers(pod) and not is_down(pod.host, world.hosts))


def _overdue(leaving: list[PodView], now: datetime) -> str:
    """Describe the first pod that should have ended by now; empty if there is no such pod."""
    pod = next((p for p in leaving if is_overdue(p, now)), None)
    if pod is None:
        return ""
    host = f", or its Kubernetes node {pod.host} is unreachable" if pod.host else ""
    return f"; pod {pod.name} should have ended by {format_time(pod.deleted_at)}, but a finalizer holds it{host}"
