"""Decides which events a reconcile records: what happened, whether it counts, and what follows.

Events are for people who watch a job. The status is the record, and events are derived from the
difference between the old and the new status, so no event has to be remembered. Kubernetes drops
events about a noisy object, so only these changes have events:

- Each new restart has one event. If more than SINGLE_EVENTS restarts are alike, they share one
  event.
- A condition that becomes false, or changes its reason, has an event (_WARNED), unless the reason
  occurs at every start, restart or end (_QUIET).
- Running, a newly avoided host, and newly lagging ranks have one event each. If the first step
  after a restart arrives later than Running, that step has a separate event, which states the
  number of repeated steps.

Example: pod train-1-0 runs out of memory.

    Warning  OOMKilled  pod train-1-0 used more memory than spec.resources.limits.memory allows
                        (counts against recovery.maxRestarts; train-1-1 replaces it)
    Normal   Running    2 nodes train again, 8.2 s after train-1-0 broke the group
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType, JobStatus, Restart
from ddpjob.core.decision import Event
from ddpjob.core.failures.classify import PLANNED, PULLING, Cause, names_pod, without_wait
from ddpjob.core.only_copy import ONLY_COPY, STATE
from ddpjob.core.status.conditions import GROUP_RESTARTS
from ddpjob.core.status.messages import count, event_text, why_held
from ddpjob.core.status.repeated import and_repeats, current_restart, repeats
from ddpjob.core.status.running import FINISHED_EARLY, NO_GROUP, NODES_RUN, STEP_OVERDUE, UNREACHABLE_LONG, last_step
from ddpjob.core.view import View
from ddpjob.core.world import node_pod_name

_WARNED = (
    *(ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.FAST_RECOVERY, ConditionType.ISOLATED),
    *(ConditionType.CHECKPOINTS_COPIED, ConditionType.SNAPSHOTS_HELD, ConditionType.RANKS_KEEP_PACE),
)
"""Conditions that cause an event when they become false or change their reason."""
_QUIET = ("Placing", "NodesMissing", "GroupForming", "CoordinatorUnreachable", GROUP_RESTARTS, "GroupFinished")
"""Reasons that do not cause an event, because they occur at every start, restart or end."""


def restart_events(
    view: View, restarts: tuple[Restart, ...], idle: tuple[Restart, ...] = (), *, failed: bool
) -> list[Event]:
    """Return events for the restarts that this reconcile recorded, and for ends of idle spares."""
    broken = any(restart.round and not restart.consequence for restart in restarts)
    alike: dict[tuple[str, str], list[Restart]] = {}
    for restart in (*idle, *restarts):
        meaning = "a spare, so nothing restarts" if restart in idle else _counts(restart)
        alike.setdefault((restart.reason, meaning), []).append(restart)
    events = []
    for (_, meaning), several in alike.items():
        if len(several) <= SINGLE_EVENTS:
            events += [_restart_event(view, restart, meaning, failed=failed, broken=broken) for restart in several]
        else:
            events.append(_summary(several, meaning))
    return events[:MOST_EVENTS]


def _counts(restart: Restart) -> str:
    return "counts against recovery.maxRestarts" if restart.counted else "not counted"


def _summary(several: list[Restart], meaning: str) -> Event:
    first, pods = several[0], ", ".join(restart.pod for restart in several)
    return Event(True, first.reason, event_text(f"{len(several)} pods: {first.reason} ({meaning}): {pods}"))


def _restart_event(view: View, restart: Restart, meaning: str, *, failed: bool, broken: bool) -> Event:
    """Return the event for a new restart or the end of a spare.

    `meaning` states whether the restart counts. If the job has `failed`, no restart follows.
    `broken` is true if one of the new restarts broke the group.
    """
    if restart.reason == Cause.JOINED:
        return Event(False, restart.reason, event_text(restart.message))
    if failed:
        restart = replace(restart, message=without_wait(restart.message))
    follows = "" if failed else _what_follows(view, restart, broken=broken)
    return Event(True, restart.reason, event_text(restart.message, f"{meaning}{follows}"))


def _what_follows(view: View, restart: Restart, *, broken: bool) -> str:
    if restart.reason == Cause.COORDINATOR_LOST and not restart.round:
        return f"; {'' if broken else 'training continues, and '}a new coordinator takes over"
    slot = view.status.slot(restart.index)
    if slot is None or restart.index is None:
        return ""
    successor = node_pod_name(view.job, restart.index, slot.attempt)
    if successor == restart.pod:
        return "; it restarts in its pod"
    wait = f" at {slot.not_before:%H:%M:%S} UTC ({why_held(slot)})" if slot.not_before is not None else ""
    return f"; {successor} replaces it{wait}"


SINGLE_EVENTS = 3
"""Maximum number of restarts of one kind that get separate events. If there are more restarts of
that kind, all of them share one event."""
MOST_EVENTS = 20
"""Maximum number of restart events in one reconcile."""


def change_events(old: JobStatus, new: JobStatus) -> list[Event]:
    """Return events for the changes from the old to the new status, except for restarts."""
    events = []
    if new.holds(ConditionType.RUNNING) and not old.holds(ConditionType.RUNNING):
        events.append(Event(False, "Running", _begun(old, new)))
    events += _recovered(old, new)
    for kind in _WARNED:
        condition, before = new.condition(kind), old.condition(kind)
        if condition is None or condition.status or condition.reason in _QUIET:
            continue
        if before is not None and before.reason in PULLING and condition.reason in PULLING:
            continue
        if before is None or before.reason != condition.reason:
            events.append(Event(True, condition.reason, event_text(condition.message)))
    placed, before = new.condition(ConditionType.SCHEDULED), old.condition(ConditionType.SCHEDULED)
    if placed is not None and STATE in placed.message and (before is None or STATE not in before.message):
        events.append(Event(True, ONLY_COPY, event_text(placed.message)))
    running, before = new.condition(ConditionType.RUNNING), old.condition(ConditionType.RUNNING)
    known_before = before is not None and UNREACHABLE_LONG in before.message
    late = running is not None and running.reason == STEP_OVERDUE and last_step(before) != last_step(running)
    if running is not None and (late or (UNREACHABLE_LONG in running.message and not known_before)):
        events.append(Event(True, running.reason, event_text(running.message)))
    changed = running is not None and (before is None or before.reason != running.reason)
    if running is not None and changed and running.reason in (NO_GROUP, FINISHED_EARLY):
        events.append(Event(True, running.reason, event_text(running.message)))
    known = {entry.node for entry in old.avoided_nodes}
    for entry in new.avoided_nodes:
        if entry.node not in known:
            why = f"until {entry.until:%H:%M} UTC: {entry.reason}"
            message = f"new pods avoid Kubernetes node {entry.node} if they can, {why}"
            events.append(Event(True, "NodeAvoided", message))
    return events + _lagging(old, new)


def _lagging(old: JobStatus, new: JobStatus) -> list[Event]:
    """Return one event for all ranks that have started to lag."""
    known = {_episode(entry) for entry in old.progress.get("stragglers", ())}
    named = [
        f"rank {entry['rank']} ({entry['pod']}{_where(entry)}) takes {entry['slowdown']} times as long"
        for entry in new.progress.get("stragglers", ())
        if _episode(entry) not in known
    ]
    its, it = ("its", "it") if len(named) == 1 else ("their", "them")
    text = f"as the median rank for {its} own work, and all other ranks wait for {it}"
    return [Event(True, "RankLags", event_text(f"in each step, {', '.join(named)} {text}"))] if named else []


def _episode(entry: Json) -> tuple[object, ...]:
    return entry.get("rank"), entry.get("pod"), entry.get("since")


def _where(entry: Json) -> str:
    return f" on Kubernetes node {entry['node']}" if "node" in entry else ""


def _begun(old: JobStatus, new: JobStatus) -> str:
    """Return the message for the Running event.

    After a restart, the message also describes the last break and the pause that followed.
    """
    running = new.condition(ConditionType.RUNNING)
    verb = "run" if running is not None and running.reason == NODES_RUN else "train"
    text = f"{count(new.ready, 'node')} {verb}{'s' if new.ready == 1 else ''}"
    restarting = ConditionType.RESTARTING
    if not old.holds(restarting) or new.holds(restarting) or not new.restarts.recent:
        return text
    breaks = (r for r in reversed(new.restarts.recent) if r.round and not r.consequence)
    last = next(breaks, new.restarts.recent[-1])
    return f"{text} again, {_after(last)}"


def _after(restart: Restart) -> str:
    """Describe what broke the group, how long the pause was, and how many steps were repeated."""
    if restart.reason in PLANNED:
        return f"after a planned restart: {restart.reason}"
    after = f"{restart.seconds} s after" if restart.seconds is not None else "after"
    broke = f"{restart.pod} broke the group" if names_pod(restart) else f"the group broke: {restart.reason}"
    return f"{after} {broke}{and_repeats(restart)}"


def _recovered(old: JobStatus, new: JobStatus) -> list[Event]:
    """Return an event about a restart's effects if they became known after the group ran again.

    The pause and the number of repeated steps are known only once the first step is complete.
    """
    before, restart = current_restart(old), current_restart(new)
    if before is None or restart is None or before.round != restart.round or not old.holds(ConditionType.RUNNING):
        return []
    if _is_accounted(before) or not _is_accounted(restart) or restart.reason in PLANNED:
        return []
    return [Event(False, "Recovered", f"the first step was completed {_after(restart)}")]


def _is_accounted(restart: Restart) -> bool:
    """Whether the pause and the number of repeated steps are known."""
    return restart.seconds is not None and bool(repeats(restart))
