"""The one decision: from a job, what was observed of it and the time, to what to write and what to do. No I/O, no clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.api.types import ConditionType, DDPJob, JobStatus, Placement, Restart, SlotState
from ddpjob.core.classify import Cause, stuck
from ddpjob.core.conditions import with_condition, with_phase
from ddpjob.core.decision import (
    Action,
    CreateCoordinator,
    CreateNode,
    CreatePodFiles,
    CreateService,
    Decision,
    DeletePod,
    Event,
    Tell,
)
from ddpjob.core.finish import wind_down
from ddpjob.core.group import Failure, Followed, coordinator_pod, follow, new_generation, node_pods, record, template_mark
from ddpjob.core.leftovers import end_leftovers, has_leftovers
from ddpjob.core.progress import shown_progress
from ddpjob.core.volumes import unusable_claim
from ddpjob.core.world import LABEL_ROLE, LABEL_UID, PodView, Role, World, node_pod_name

POLL = 1.0
"""Seconds between two looks at the coordinator of a job that is under way."""
BLOCKED_POLL = 10.0
"""Seconds between two tries where something outside is missing (a claim, a quota)."""
_ENDING_MARGIN = timedelta(seconds=5)
CREATION_REFUSED = "CreationRefused"
NAME_IS_TAKEN = "NameTaken"


def decide(job: DDPJob, world: World, now: datetime) -> Decision:
    """What the job's status should say and what should be done, as of `now`."""
    if job.deleting:
        return Decision(job.status)
    status = replace(
        job.status,
        observed_generation=job.generation,
        selector=f"{LABEL_UID}={job.uid},{LABEL_ROLE}={Role.NODE}",
        nodes_wanted=job.spec.nodes,
        max_restarts=job.spec.recovery.max_restarts,
    )
    if status.terminal:
        return wind_down(job, replace(job.status, observed_generation=job.generation), world, now)
    if world.problems and not (job.spec.run_policy.suspend and status.slots):
        return _fail(job, status, world, now, Failure("InvalidPodTemplate", "; ".join(world.problems)))
    if job.spec.run_policy.suspend:
        return _suspend(job, status, world, now)
    return _drive(job, status, world, now)


def _drive(job: DDPJob, status: JobStatus, world: World, now: datetime) -> Decision:
    """A job that is to run."""
    status, events = _begin(job, status, world, now)
    deadline = _deadline(job, status)
    followed = follow(job, status, world, now)
    if deadline is not None and now >= deadline and not followed.complete:
        return _fail(job, status, world, now, _too_late(job))
    refused = next((r for r in world.rejections if r.final), None)
    if refused is not None:
        message = f"the API server refuses {refused.object}: {refused.message}"
        return _fail(job, status, world, now, Failure("InvalidPod", message))
    events += [_restart_event(job, followed, r) for r in followed.restarts]
    if followed.failure is not None:
        return _fail(job, followed.status, world, now, followed.failure, events)
    if followed.complete:
        return _complete(job, followed.status, world, now, events)
    actions, held = _ensure(job, followed.status, world, now)
    creating = any(isinstance(a, CreateService | CreatePodFiles | CreateCoordinator | CreateNode) for a in actions)
    status = _describe(job, followed.status, world, now, followed.restarts, creating=creating)
    events += _news(job.status, status)
    actions += _tell_of_vanished(job.status.rendezvous.endpoint, world, followed.restarts)
    wake = [BLOCKED_POLL if _blocked(job, world) else POLL]
    wake += [max(0.0, (moment - now).total_seconds()) for moment in (deadline, held) if moment is not None]
    return Decision(status, actions, tuple(events), min(wake))


def _begin(job: DDPJob, status: JobStatus, world: World, now: datetime) -> tuple[JobStatus, list[Event]]:
    """A first generation for a new job, another for a changed or resumed one."""
    events: list[Event] = []
    if not status.slots:
        status = new_generation(job, status, world)
    elif status.template_hash != template_mark(job, world) or status.rendezvous.nodes != job.spec.nodes:
        if not status.holds(ConditionType.SUSPENDED):
            cause, message = _change(job, status)
            status = record(status, [Restart(time=now, pod=job.name, reason=cause, message=message, counted=False)])
            events.append(Event(False, cause, message))
        status = new_generation(job, status, world)
    if status.holds(ConditionType.SUSPENDED):
        for kind in (ConditionType.SUSPENDED, ConditionType.RESTARTING):
            if status.condition(kind) is not None:
                status = with_condition(status, kind, False, "Resumed", "runPolicy.suspend is false", now)
        events.append(Event(False, "Resumed", "training goes on from the newest checkpoint"))
    if world.pod_files != status.pod_files or not status.pod_files:
        status = replace(status, pod_files=world.pod_files_offered)
    if status.start_time is None:
        status = replace(status, start_time=now.replace(microsecond=0))
    return status, events


def _change(job: DDPJob, status: JobStatus) -> tuple[Cause, str]:
    """Why a job that is not suspended needs pods of another make."""
    if status.rendezvous.nodes != job.spec.nodes:
        return Cause.SCALED, f"spec.nodes changed from {status.rendezvous.nodes} to {job.spec.nodes}"
    if status.template_hash.split("-")[0] != job.spec.template_hash:
        return Cause.SPEC_CHANGED, "the spec changed in what the pods are made from"
    return Cause.KEY_CHANGED, "the operator's key changed, and with it the tokens by which the job's pods know each other"


def _deadline(job: DDPJob, status: JobStatus) -> datetime | None:
    seconds = job.spec.run_policy.active_deadline_seconds
    return status.start_time + timedelta(seconds=seconds) if seconds is not None and status.start_time else None


def _too_late(job: DDPJob) -> Failure:
    """With what was last known to be missing: a job that never began should say why."""
    message = f"not finished within runPolicy.activeDeadlineSeconds = {job.spec.run_policy.active_deadline_seconds}"
    known = (job.status.condition(kind) for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING))
    missing = next((c for c in known if c is not None and not c.status), None)
    return Failure("DeadlineExceeded", message + (f"; when it was over: {missing.reason}: {missing.message}" if missing else ""))


# --- ends -------------------------------------------------------------------------------------------------------


def _fail(job: DDPJob, status: JobStatus, world: World, now: datetime, failure: Failure, events: list[Event] | None = None) -> Decision:
    status = with_condition(status, ConditionType.FAILED, True, failure.reason, failure.message, now)
    return _end(job, status, world, now, [*(events or []), Event(True, failure.reason, failure.message)], "Failed")


def _complete(job: DDPJob, status: JobStatus, world: World, now: datetime, events: list[Event]) -> Decision:
    message = f"all {len(status.slots)} nodes have finished"
    status = with_condition(status, ConditionType.COMPLETE, True, "Finished", message, now)
    return _end(job, status, world, now, [*events, Event(False, "Complete", message)], "Complete")


def _end(job: DDPJob, status: JobStatus, world: World, now: datetime, events: list[Event], reason: str) -> Decision:
    for kind in (ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.SUSPENDED):
        if status.holds(kind) or (kind is not ConditionType.SUSPENDED and status.condition(kind) is not None):
            status = with_condition(status, kind, False, reason, f"the job is {reason.lower()}", now)
    told = world.report.progress if world.report else {}
    ended = SlotState.SUCCEEDED if reason == "Complete" else SlotState.FAILED
    status = replace(
        status,
        rendezvous=replace(status.rendezvous, state=ended),
        completion_time=now.replace(microsecond=0),
        active=0,
        ready=0,
        progress=shown_progress(status.progress, told, now, at_once=True),
    )
    status = with_phase(status)
    return replace(wind_down(job, status, world, now), status=status, events=tuple(events))


def _suspend(job: DDPJob, status: JobStatus, world: World, now: datetime) -> Decision:
    """All pods go, with their grace, so that scripts can save; the slots are planned anew for the resume."""
    events: list[Event] = []
    if any(s.state is not SlotState.PLANNED for s in status.slots) or status.rendezvous.state is not SlotState.PLANNED:
        status = new_generation(job, status, world)
    leaving = [p for p in world.pods if not p.ended]
    if not status.holds(ConditionType.SUSPENDED):
        events.append(Event(False, "Suspended", "runPolicy.suspend is true: pods are ended, checkpoints stay"))
    message = f"{len(leaving)} pods are still ending" if leaving else "no pods run; set runPolicy.suspend to false to go on"
    status = with_condition(status, ConditionType.SUSPENDED, True, "Suspended", message, now)
    for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.RESTARTING):
        if status.condition(kind) is not None:
            status = with_condition(status, kind, False, "Suspended", "the job is suspended", now)
    status = with_phase(replace(status, start_time=None, active=0, ready=0))
    nodes_first = [p for p in leaving if p.role is Role.NODE] or leaving
    actions = [DeletePod(p.name, p.uid) for p in nodes_first if p.deleted_at is None]
    return Decision(status, tuple(actions), tuple(events))


# --- what is there to do ----------------------------------------------------------------------------------------


def _tell_of_vanished(endpoint: str, world: World, restarts: tuple[Restart, ...]) -> tuple[Action, ...]:
    """A pod that is no longer there may be on a node that has lost the network, and so have said nothing to its peers."""
    present = {p.name for p in world.pods}
    gone = (r.pod for r in restarts if r.index is not None and r.pod not in present)
    return tuple(Tell(endpoint, "gone", {"pod": pod, "why": "the pod was deleted"}) for pod in gone)


def _blocked(job: DDPJob, world: World) -> bool:
    return bool(world.rejections) or unusable_claim(job, world) is not None


def _ensure(job: DDPJob, status: JobStatus, world: World, now: datetime) -> tuple[tuple[Action, ...], datetime | None]:
    """What is missing and what is too much; and until when new nodes are held back."""
    if unusable_claim(job, world) is not None:
        return (), None
    actions: list[Action] = []
    if not world.has_service:
        actions.append(CreateService())
    if world.pod_files != status.pod_files:
        actions.append(CreatePodFiles())
    generation = status.rendezvous.generation
    dedicated = job.spec.rendezvous.placement is Placement.DEDICATED
    if dedicated and status.rendezvous.state is SlotState.PLANNED and coordinator_pod(job, status, world) is None:
        actions.append(CreateCoordinator())
    held = _held_until(world, generation, now)
    if held is None:
        pods = node_pods(job, status, world)
        planned = ((i, s) for i, s in enumerate(status.slots) if s.state is SlotState.PLANNED and pods[i] is None)
        actions += [CreateNode(i, s.attempt) for i, s in planned]
    actions += _removals(job, status, world, now)
    return tuple(actions), held


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


def _removals(job: DDPJob, status: JobStatus, world: World, now: datetime) -> list[Action]:
    """Pods of old generations that still run, what the coordinator should know of lost ones, and failed pods over the limit."""
    generation = status.rendezvous.generation
    actions: list[Action] = []
    kept: dict[int, list[PodView]] = {}
    current = {(i, s.attempt) for i, s in enumerate(status.slots)}
    old_nodes_run = any(p.generation < generation and not p.ended for p in world.nodes())
    for pod in world.pods:
        stale = pod.generation < generation
        if pod.role is Role.COORDINATOR:
            if stale and pod.deleted_at is None and not old_nodes_run:
                actions.append(DeletePod(pod.name, pod.uid))
        elif pod.ended and (pod.index, pod.attempt) not in current:
            kept.setdefault(pod.index, []).append(pod)
            actions += end_leftovers(job, pod, now) if has_leftovers(pod) and pod.deleted_at is None else []
        elif stale and not pod.ended and pod.deleted_at is None:
            actions.append(DeletePod(pod.name, pod.uid))
    for pods in kept.values():
        pods.sort(key=lambda p: p.attempt)
        surplus = pods[: max(0, len(pods) - job.spec.run_policy.failed_pods_kept)]
        actions += [DeletePod(p.name, p.uid) for p in surplus if p.deleted_at is None]
    return actions


# --- what is so -------------------------------------------------------------------------------------------------


def _describe(job: DDPJob, status: JobStatus, world: World, now: datetime, restarts: tuple[Restart, ...], *, creating: bool) -> JobStatus:
    """Conditions, counts and progress as they are now. `creating`: something is missing and is going to be tried."""
    pods = [p for p in node_pods(job, status, world) if p is not None and not p.ended and p.deleted_at is None]
    status = replace(status, active=len(pods), ready=sum(p.main.running for p in pods))
    status = _scheduled(job, status, world, pods, now, creating=creating)
    running, reason, message = _running(job, status, world)
    status = with_condition(status, ConditionType.RUNNING, running, reason, message, now)
    status = _restarting(job, status, running, restarts, now)
    told = world.report.progress if world.report else {}
    due = status.phase is not with_phase(status).phase
    return with_phase(replace(status, progress=shown_progress(status.progress, told, now, at_once=due)))


def _scheduled(job: DDPJob, status: JobStatus, world: World, pods: list[PodView], now: datetime, *, creating: bool) -> JobStatus:
    def say(holds: bool, reason: str, message: str) -> JobStatus:
        return with_condition(status, ConditionType.SCHEDULED, holds, reason, message, now)

    claim = unusable_claim(job, world)
    if claim is not None:
        return say(False, claim.reason, claim.message)
    if world.rejections:
        refused = world.rejections[0]
        if refused.name_taken:
            return say(False, NAME_IS_TAKEN, f"{refused.object}: {refused.message}; it is tried again every second")
        return say(False, CREATION_REFUSED, f"{refused.object}: {refused.message}; it is tried again every {BLOCKED_POLL:.0f} s")
    before = status.condition(ConditionType.SCHEDULED)
    if creating and before is not None and before.reason in (CREATION_REFUSED, NAME_IS_TAKEN):
        # What the next try says is not known yet. To say something else in the meantime would write, and so wake, for ever.
        return status
    everyone = [*pods, *(p for p in [coordinator_pod(job, status, world)] if p is not None and p.role is Role.COORDINATOR)]
    waiting = next((p for p in everyone if p.unschedulable and not p.node), None)
    if waiting is not None:
        return say(False, "Unschedulable", f"pod {waiting.name}: {waiting.unschedulable}{_spread_hint(job, waiting, world)}")
    placed = sum(bool(p.node) for p in pods) + sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    if placed == job.spec.nodes:
        return say(True, "AllPlaced", f"{placed} of {job.spec.nodes} pods have a node")
    return say(False, "Placing", f"{placed} of {job.spec.nodes} pods have a node")


def _spread_hint(job: DDPJob, pod: PodView, world: World) -> str:
    leaving = next((p for p in world.nodes() if p.deleted_at is not None and not p.ended), None)
    if leaving is not None and leaving.deleted_at is not None:
        return f" (pod {leaving.name} is still ending and holds its place until {leaving.deleted_at:%H:%M:%S} UTC at the latest)"
    if job.spec.scheduling.one_pod_per_node and "anti-affinity" in pod.unschedulable:
        return (
            f" (one pod per {job.spec.scheduling.topology_key}: fewer nodes than spec.nodes fit; "
            "scheduling.onePodPerNode=false lets pods share one)"
        )
    return ""


def _running(job: DDPJob, status: JobStatus, world: World) -> tuple[bool, str, str]:
    for pod in [coordinator_pod(job, status, world), *node_pods(job, status, world)]:
        held = stuck(pod, has_run=True) if pod and pod.deleted_at is None else None
        if held is not None:
            return False, held.reason, held.message
    wanted = job.spec.nodes
    finished = sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    if status.ready + finished < wanted:
        return False, "NodesMissing", f"{status.ready} of {wanted} nodes run"
    if not job.spec.under_torchrun:
        return True, "NodesRun", f"{status.ready} of {wanted} nodes run" + (f", {finished} have finished" if finished else "")
    report = world.report
    if report is None or report.generation != status.rendezvous.generation:
        was = status.holds(ConditionType.RUNNING)
        where = status.rendezvous.endpoint or "its pod, which has no address yet"
        return was, "CoordinatorUnreachable", f"{status.ready} of {wanted} nodes run; the coordinator at {where} does not answer"
    if report.state in ("Running", "Succeeded"):
        return True, "GroupRuns", f"{wanted} nodes train as one group"
    return False, "GroupForming", f"{status.ready} of {wanted} nodes run and are joining the rendezvous"


def _restarting(job: DDPJob, status: JobStatus, running: bool, restarts: tuple[Restart, ...], now: datetime) -> JobStatus:
    if restarts:
        last = restarts[-1]
        return with_condition(status, ConditionType.RESTARTING, True, last.reason, last.message.splitlines()[0], now)
    changed = status.round != job.status.round
    if changed:
        last = status.restarts.recent[-1]
        return with_condition(status, ConditionType.RESTARTING, True, last.reason, last.message, now)
    if running and status.holds(ConditionType.RESTARTING):
        status = replace(status, restarts=replace(status.restarts, recent=_timed(status, now)))
        return with_condition(status, ConditionType.RESTARTING, False, "Recovered", f"round {status.round} runs", now)
    return status


def _timed(status: JobStatus, now: datetime) -> tuple[Restart, ...]:
    """Recent restarts with the seconds they took, for those that are over now."""
    return tuple(
        r if r.seconds is not None else replace(r, seconds=round((now - r.time).total_seconds(), 1)) for r in status.restarts.recent
    )


# --- events -----------------------------------------------------------------------------------------------------


def _restart_event(job: DDPJob, followed: Followed, restart: Restart) -> Event:
    """What happened, whether it counts, and what follows. A traceback comes last: events are cut at their end."""
    first, _, traceback = restart.message.partition("\n")
    counted = "counts" if restart.counted else "does not count"
    facts = f"{counted} against recovery.maxRestarts{_what_follows(job, followed, restart)}"
    return Event(True, restart.reason, f"{first} ({facts})" + (f"\n{traceback}" if traceback else ""))


def _what_follows(job: DDPJob, followed: Followed, restart: Restart) -> str:
    slots = followed.status.slots
    if followed.failure is not None or restart.index is None or restart.index >= len(slots):
        return ""
    successor = node_pod_name(job, restart.index, slots[restart.index].attempt)
    return f"; {successor} takes its place" if successor != restart.pod else "; it restarts in its pod"


def _news(old: JobStatus, new: JobStatus) -> list[Event]:
    """Events for what became so in this pass."""
    events = []
    if new.holds(ConditionType.RUNNING) and not old.holds(ConditionType.RUNNING):
        recovered = old.holds(ConditionType.RESTARTING) and not new.holds(ConditionType.RESTARTING) and new.restarts.recent
        after = f", {new.restarts.recent[-1].seconds} s after {new.restarts.recent[-1].pod} broke the group" if recovered else ""
        events.append(Event(False, "Running", f"round {new.round} trains on {new.nodes_wanted} nodes{after}"))
    for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING):
        condition, before = new.condition(kind), old.condition(kind)
        quiet = ("Placing", "NodesMissing", "GroupForming", "CoordinatorUnreachable")
        if condition and not condition.status and condition.reason not in quiet and (before is None or before.reason != condition.reason):
            events.append(Event(True, condition.reason, condition.message))
    return events
