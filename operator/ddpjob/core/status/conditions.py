"""Sets status conditions and derives the phase.

A condition's transition time changes only if its status changes, as Kubernetes requires.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob.api.job_status import Condition, ConditionType, JobStatus, Phase

_ORDER = list(ConditionType)
QUEUED = QUEUE_WAITS, QUEUE_NOT_SERVED = "Queued", "QueueNotServed"
"""Reasons of the Suspended condition while a job is waiting in a queue."""
GROUP_RESTARTS = "GroupRestarts"
"""Reason of the Running condition after a group has broken, until the cause is known."""
MESSAGE_LIMIT = 8192
"""Maximum number of characters in a condition's message. The API server allows 32768, but that is
too long for a terminal."""


def with_condition(
    status: JobStatus, kind: ConditionType, holds: bool, reason: str, message: str, now: datetime
) -> JobStatus:
    """Return the status with one condition set. The middle of an overlong message is removed."""
    old = status.condition(kind)
    since = old.since if old is not None and old.status == holds else now.replace(microsecond=0)
    new = Condition(
        type=kind,
        status=holds,
        reason=reason,
        message=_shortened(message),
        since=since,
        generation=status.observed_generation,
    )
    if new == old:
        return status
    others = [c for c in status.conditions if c.type != kind]
    return replace(status, conditions=tuple(sorted([*others, new], key=lambda c: _ORDER.index(c.type))))


def without_condition(status: JobStatus, kind: ConditionType) -> JobStatus:
    """Return the status without a condition that no longer applies."""
    if status.condition(kind) is None:
        return status
    return replace(status, conditions=tuple(c for c in status.conditions if c.type != kind))


def _shortened(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else message[:200] + "\n...\n" + message[-(MESSAGE_LIMIT - 205) :]


def with_phase(status: JobStatus) -> JobStatus:
    """Return the status with the phase that follows from its conditions and counts."""
    phase = _phase(status)
    return status if phase is status.phase else replace(status, phase=phase)


def _phase(status: JobStatus) -> Phase:
    if status.holds(ConditionType.FAILED):
        return Phase.FAILED
    if status.holds(ConditionType.COMPLETE):
        return Phase.COMPLETE
    suspended = status.condition(ConditionType.SUSPENDED)
    if suspended is not None and suspended.status:
        return Phase.QUEUED if suspended.reason in QUEUED else Phase.SUSPENDED
    if status.holds(ConditionType.RESTARTING):
        return Phase.RESTARTING
    running = status.condition(ConditionType.RUNNING)
    if running is not None and running.status:
        return Phase.RUNNING
    if running is not None and running.reason == GROUP_RESTARTS:
        return Phase.RESTARTING
    return Phase.STARTING if status.ready else Phase.PENDING
