"""Decides what is written and announced when a job fails or is complete."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob.api.types import ConditionType, DDPJob, JobStatus, SlotState
from ddpjob.core.conditions import with_condition, with_phase
from ddpjob.core.decision import Decision, Event
from ddpjob.core.finish import wind_down
from ddpjob.core.group import Failure
from ddpjob.core.progress import shown_progress
from ddpjob.core.texts import event_text
from ddpjob.core.world import World


def fail(job: DDPJob, status: JobStatus, world: World, now: datetime, failure: Failure, events: list[Event] | None = None) -> Decision:
    """The job has failed, for good."""
    status = with_condition(status, ConditionType.FAILED, True, failure.reason, failure.message, now)
    return _end(job, status, world, now, [*(events or []), Event(True, failure.reason, event_text(failure.message))], "Failed")


def complete(job: DDPJob, status: JobStatus, world: World, now: datetime, events: list[Event]) -> Decision:
    """Every node of the group has ended with 0."""
    finished = sum(slot.state is SlotState.SUCCEEDED for slot in status.slots)
    message = f"all {min(finished, job.spec.nodes) or job.spec.nodes} nodes have finished"
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
        spare=0,
        progress=shown_progress(status.progress, told, now, at_once=True),
    )
    status = with_phase(status)
    return replace(wind_down(job, status, world, now), status=status, events=tuple(events))
