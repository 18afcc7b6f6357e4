"""Decides how a job loses its pods when it is suspended or waits for a class or quota."""

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
    """Delete all pods with their grace period, so that scripts can save.

    The slots are planned again for the resume. A job that has finished becomes complete anyway. The
    coordinator is deleted last, because nodes need it until they have ended. `reason`, `waits` and
    `events` are for a job that its queue does not let run.
    """
    done = settle(view) if view.status.slots else None
    if done is not None:
        # It finished unseen, for instance while no operator was running. Restarting it at the
        # resume would be pointless.
        return complete(done, [])
    if view.status.holds(ConditionType.SUSPENDED) and has_finished_while_ending(view):
        return complete(view, [])
    status, now = view.status, view.now
    states = [status.rendezvous.state, *(s.state for s in status.slots)]
    created = view.coordinator is not None or any(pod is not None for pod in view.pods)
    if created or any(state is not SlotState.PLANNED for state in states):
        # This also covers pods that no status shows yet, since their names are used up. The spec is
        # checked when the job resumes.
        status = replace(begin_generation(view), template_hash=status.template_hash, runtime=status.runtime)
    leaving = [p for p in view.world.pods if is_left(p, view.world)]
    if events is None:
        already = status.condition(ConditionType.SUSPENDED)
        fresh = already is None or not already.status or already.reason != reason
        had_pods = leaving or view.job.status.slots
        said = "pods are deleted, checkpoints are kept" if had_pods else "no pods are created"
        events = [Event(False, reason, f"runPolicy.suspend is true: {said}")] if fresh else []
    message = (
        f"{count(len(leaving), 'pod')} still there: {deletion_refused(view.world)}"
        if leaving and view.world.deletion_refused
        else f"{count(len(leaving), 'pod')} still terminating{_overdue(leaving, now)}"
        if leaving
        else waits or "no pods run; set runPolicy.suspend to false to resume"
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
    # An unreachable host will never confirm the end of its pods, so nothing waits for them.
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
    """Return the message to the coordinators, which are deleted last, about pods that stay."""
    port = view.job.spec.rendezvous.endpoint_port
    coordinators = (p for p in leaving if p.role is Role.COORDINATOR and p.address and p.main.running)
    return [action for p in coordinators for action in send_away_deaf(view, host_port(p.address, port))]


def is_left(pod: PodView, world: World) -> bool:
    """Return whether any container of a pod is still running and its host will end it.

    The container may be a sidecar of a program that has ended.
    """
    return not pod.ended or (has_leftovers(pod) and not is_down(pod.host, world.hosts))


def _overdue(leaving: list[PodView], now: datetime) -> str:
    """Return what keeps the first pod that should have ended."""
    pod = next((p for p in leaving if is_overdue(p, now)), None)
    if pod is None:
        return ""
    host = f", or its Kubernetes node {pod.host} does not answer" if pod.host else ""
    return f"; pod {pod.name} should have ended by {format_time(pod.deleted_at)}: a finalizer holds it{host}"
