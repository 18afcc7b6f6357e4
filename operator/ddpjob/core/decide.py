"""The one decision: from a job, what was observed of it and the time, to what to write and what to do. No I/O, no clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.api.types import ConditionType, DDPJob, JobStatus, Restart, SlotState
from ddpjob.core.classify import Cause
from ddpjob.core.conditions import with_condition, with_phase
from ddpjob.core.decision import Action, Creation, Decision, DeletePod, Event
from ddpjob.core.describe import BLOCKED_POLL as BLOCKED_POLL
from ddpjob.core.describe import describe
from ddpjob.core.ensure import ensure, tell
from ddpjob.core.finish import wind_down
from ddpjob.core.group import Failure, follow, node_pods, record
from ddpjob.core.news import news, restart_event
from ddpjob.core.outcome import complete, fail
from ddpjob.core.slots import new_generation, resized, template_mark, with_rounds
from ddpjob.core.volumes import unusable_claim
from ddpjob.core.world import LABEL_ROLE, LABEL_UID, Role, World

POLL = 1.0
"""Seconds between two looks at the coordinator of a job that is under way."""


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
        return fail(job, status, world, now, Failure("InvalidPodTemplate", "; ".join(world.problems)))
    if job.spec.run_policy.suspend:
        return _suspend(job, status, world, now)
    return _drive(job, status, world, now)


def _drive(job: DDPJob, status: JobStatus, world: World, now: datetime) -> Decision:
    """A job that is to run."""
    status, events = _begin(job, status, world, now)
    deadline = _deadline(job, status)
    followed = follow(job, status, world, now)
    if deadline is not None and now >= deadline and not followed.complete:
        return fail(job, status, world, now, _too_late(job))
    refused = next((r for r in world.rejections if r.final), None)
    if refused is not None:
        message = f"the API server refuses {refused.object}: {refused.message}"
        return fail(job, status, world, now, Failure("InvalidPod", message))
    events += [restart_event(job, followed, r) for r in followed.restarts]
    if followed.failure is not None:
        return fail(job, followed.status, world, now, followed.failure, events)
    if followed.complete:
        return complete(job, followed.status, world, now, events)
    status = with_rounds(followed.status, node_pods(job, followed.status, world))
    actions, held = ensure(job, status, world, now, followed.lost)
    creating = any(isinstance(a, Creation) for a in actions)
    status = describe(job, status, world, now, followed.restarts, old_round=job.status.round, creating=creating)
    status, restored = _with_budget_restored(job, status, now)
    events += [*news(job.status, status), *restored]
    actions += tell(job, status, world, followed.restarts, followed.lost)
    blocked = bool(world.rejections) or unusable_claim(job, world) is not None
    wake = [BLOCKED_POLL if blocked else POLL]
    wake += [max(0.0, (moment - now).total_seconds()) for moment in (deadline, held) if moment is not None]
    return Decision(status, actions, tuple(events), min(wake))


# --- how a pass begins ------------------------------------------------------------------------------------------


def _begin(job: DDPJob, status: JobStatus, world: World, now: datetime) -> tuple[JobStatus, list[Event]]:
    """A first generation for a new job, another for a changed or resumed one, other slots for another size."""
    status, events = _laid_out(job, status, world, now)
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


def _laid_out(job: DDPJob, status: JobStatus, world: World, now: datetime) -> tuple[JobStatus, list[Event]]:
    if not status.slots:
        return new_generation(job, status, world), []
    suspended = status.holds(ConditionType.SUSPENDED)
    other_size = status.rendezvous.nodes != job.spec.nodes or len(status.slots) != job.spec.pods
    if status.template_hash != template_mark(job, world):
        cause, message = _change(job, status)
    elif not other_size:
        return status, []
    elif suspended or not job.spec.under_torchrun:
        cause, message = Cause.SCALED, f"spec.nodes changed from {status.rendezvous.nodes} to {job.spec.nodes}"
    else:
        return _resize(job, status, now)
    if suspended:
        return new_generation(job, status, world), []
    status = record(status, [_planned(job, status, cause, message, now)])
    return new_generation(job, status, world), [Event(False, cause, message)]


def _change(job: DDPJob, status: JobStatus) -> tuple[Cause, str]:
    """Why a job that is not suspended needs pods of another make."""
    if status.template_hash.split("-")[0] != job.spec.template_hash:
        return Cause.SPEC_CHANGED, "the spec changed in what the pods are made from"
    return Cause.KEY_CHANGED, "the operator's key changed, and with it the tokens by which the job's pods know each other"


def _resize(job: DDPJob, status: JobStatus, now: datetime) -> tuple[JobStatus, list[Event]]:
    """In place. More nodes join later, by a restart of the coordinator's; fewer are a restart now."""
    before, spares = status.rendezvous.nodes, len(status.slots) - status.rendezvous.nodes
    message = f"spec.nodes changed from {before} to {job.spec.nodes}"
    if job.spec.nodes == before:
        message = f"spec.spares changed from {spares} to {job.spec.spares}"
    elif job.spec.nodes < before:
        status = record(status, [_planned(job, status, Cause.SCALED, message, now)])
    return resized(job, status), [Event(False, Cause.SCALED, message)]


def _planned(job: DDPJob, status: JobStatus, cause: Cause, message: str, now: datetime) -> Restart:
    return Restart(time=now, pod=job.name, reason=cause, message=message, counted=False, round=status.round + 1)


def _deadline(job: DDPJob, status: JobStatus) -> datetime | None:
    seconds = job.spec.run_policy.active_deadline_seconds
    return status.start_time + timedelta(seconds=seconds) if seconds is not None and status.start_time else None


def _too_late(job: DDPJob) -> Failure:
    """With what was last known to be missing: a job that never began should say why."""
    message = f"not finished within runPolicy.activeDeadlineSeconds = {job.spec.run_policy.active_deadline_seconds}"
    known = (job.status.condition(kind) for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING))
    missing = next((c for c in known if c is not None and not c.status), None)
    return Failure("DeadlineExceeded", message + (f"; when it was over: {missing.reason}: {missing.message}" if missing else ""))


# --- budget and suspension --------------------------------------------------------------------------------------


def _with_budget_restored(job: DDPJob, status: JobStatus, now: datetime) -> tuple[JobStatus, list[Event]]:
    """After long enough of training without a failure that counts, maxRestarts may be used again in full."""
    running, counts = status.condition(ConditionType.RUNNING), status.restarts
    if running is None or not running.status or not counts.counted:
        return status, []
    since = max(running.since, counts.last_counted or running.since)
    seconds = job.spec.recovery.reset_after_seconds
    if now < since + timedelta(seconds=seconds):
        return status, []
    message = f"{seconds} s of training without a failure: the {counts.counted} that counted no longer do"
    return replace(status, restarts=replace(counts, counted=0)), [Event(False, "BudgetRestored", message)]


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
    for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.FAST_RECOVERY):
        if status.condition(kind) is not None:
            status = with_condition(status, kind, False, "Suspended", "the job is suspended", now)
    status = with_phase(replace(status, start_time=None, active=0, ready=0, spare=0))
    nodes_first = [p for p in leaving if p.role is not Role.COORDINATOR] or leaving
    actions: list[Action] = [DeletePod(p.name, p.uid) for p in nodes_first if p.deleted_at is None]
    return Decision(status, tuple(actions), tuple(events))
