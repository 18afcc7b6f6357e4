"""Decides which events a pass records: what happened, whether it counts, what follows."""

from __future__ import annotations

from ddpjob.api.types import ConditionType, DDPJob, JobStatus, Restart
from ddpjob.core.classify import Cause
from ddpjob.core.decision import Event
from ddpjob.core.group import Followed
from ddpjob.core.texts import event_text
from ddpjob.core.world import node_pod_name

_QUIET = ("Placing", "NodesMissing", "GroupForming", "CoordinatorUnreachable")


def restart_event(job: DDPJob, followed: Followed, restart: Restart) -> Event:
    """What happened, whether it counts, and what follows."""
    if restart.reason == Cause.JOINED:
        return Event(False, restart.reason, event_text(restart.message))
    counted = "counts" if restart.counted else "does not count"
    facts = f"{counted} against recovery.maxRestarts{_what_follows(job, followed, restart)}"
    return Event(True, restart.reason, event_text(restart.message, facts))


def _what_follows(job: DDPJob, followed: Followed, restart: Restart) -> str:
    slots = followed.status.slots
    if followed.failure is not None:
        return ""
    if restart.reason == Cause.COORDINATOR_LOST and job.spec.fast:
        return "; training goes on, another coordinator takes over"
    if restart.index is None or restart.index >= len(slots):
        return ""
    slot = slots[restart.index]
    successor = node_pod_name(job, restart.index, slot.attempt)
    if successor == restart.pod:
        return "; it restarts in its pod"
    wait = f" at {slot.not_before:%H:%M:%S} UTC, after a wait since it repeats" if slot.not_before is not None else ""
    return f"; {successor} takes its place{wait}"


def news(old: JobStatus, new: JobStatus) -> list[Event]:
    """Events for what became so in this pass."""
    events = []
    if new.holds(ConditionType.RUNNING) and not old.holds(ConditionType.RUNNING):
        recovered = old.holds(ConditionType.RESTARTING) and not new.holds(ConditionType.RESTARTING) and new.restarts.recent
        after = f", {new.restarts.recent[-1].seconds} s after {new.restarts.recent[-1].pod} broke the group" if recovered else ""
        events.append(Event(False, "Running", f"round {new.round} trains on {new.ready} nodes{after}"))
    for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.FAST_RECOVERY):
        condition, before = new.condition(kind), old.condition(kind)
        if condition and not condition.status and condition.reason not in _QUIET and (before is None or before.reason != condition.reason):
            events.append(Event(True, condition.reason, event_text(condition.message)))
    known = {entry.node for entry in old.avoided_nodes}
    for entry in new.avoided_nodes:
        if entry.node not in known:
            events.append(
                Event(True, "NodeAvoided", f"new pods keep away from node {entry.node} until {entry.until:%H:%M} UTC: {entry.reason}")
            )
    return events
