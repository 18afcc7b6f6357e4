"""Decides when to notify a job's receiver, what to send, and how long to retry.

A notification must survive an operator that dies while sending it. The status therefore lists the
notifications. An entry is written together with the event that it reports, and is Pending until its
outcome is known. Each reconcile resends pending notifications with the same id, so that the
receiver can drop duplicates.

- A notification is sent when a job completes or fails, and when its budget is nearly spent.
- If the receiver cannot be used, the Notifies condition shows this from the job's start, and
  notifications are abandoned.
- A job is not deleted after its time to live while a notification is pending.

Example of a job that fails:

    10:00:00   Failed and the entry (Failed, Pending) are written together, and the entry is sent
               the operator dies
    10:00:20   the next operator sends it again with the same id
    10:00:21   the receiver accepts it: Delivered
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, NotifyEvent
from ddpjob.api.job_status import ConditionType, JobStatus, Notification, NotificationState, format_time
from ddpjob.core.decision import BLOCKED_POLL, Decision, DeleteJob, Event, SendNotification
from ddpjob.core.status.conditions import with_condition, without_condition
from ddpjob.core.status.messages import count, event_text, put_cause_first
from ddpjob.core.world import World

_PROGRESS = ("epoch", "epochs", "step", "steps", "percent", "loss", "samplesPerSecond", "eta", "updatedAt")


def with_notifications(job: DDPJob, world: World, now: datetime, decision: Decision) -> Decision:
    """Return the decision, together with the notifications that the job's receiver must get.

    The job is not deleted until all its notifications have been delivered or abandoned.
    """
    notify, status = job.spec.notify, decision.status
    if notify is None:
        if status.notifications or status.condition(ConditionType.NOTIFIES) is not None:
            status = replace(without_condition(status, ConditionType.NOTIFIES), notifications=())
        return replace(decision, status=status)
    entries = {entry.event: entry for entry in status.notifications}
    for event in _happened(job, status):
        if event in notify.events:
            id = f"{job.uid}.{event}.{status.round}"
            if event is NotifyEvent.BUDGET_NEARLY_SPENT:
                # Add the spec's generation to the id. If the user changes the budget, the new
                # budget may be nearly spent again in the same round.
                id += f".{job.generation}"
            entries[event] = Notification(event=event, id=id, time=now.replace(microsecond=0))
    unusable = _unusable(job, world)
    settled = [_settled(entry, world, unusable) for entry in entries.values()]
    pending = [entry for entry in settled if entry.state is NotificationState.PENDING]
    events = [
        Event(True, "NotificationGivenUp", event_text(f"{after.event} to {notify.receiver}: {after.message}"))
        for before, after in zip(entries.values(), settled, strict=True)
        if after.state is NotificationState.GIVEN_UP and before.state is NotificationState.PENDING
    ]
    status, warned = _usable(replace(status, notifications=tuple(settled)), unusable, now)
    sends = [SendNotification(e.id, notify.receiver, _body(job, status, e, world.link)) for e in pending]
    actions = tuple(a for a in decision.actions if not (pending and isinstance(a, DeleteJob)))
    wake = decision.wake
    if pending:
        wake = min(BLOCKED_POLL, wake) if wake is not None else BLOCKED_POLL
    return Decision(status, (*actions, *sends), (*decision.events, *warned, *events), wake)


def _happened(job: DDPJob, status: JobStatus) -> Iterator[NotifyEvent]:
    """Yield the events of spec.notify that happened since the job's last status was written."""
    if status.terminal:
        if not job.status.terminal:
            yield NotifyEvent.FAILED if status.holds(ConditionType.FAILED) else NotifyEvent.COMPLETE
        return
    allowed, old = job.spec.recovery.max_restarts, job.status.restarts
    before = _nearly_spent(old.counted, old.limit(allowed))
    if _nearly_spent(status.restarts.counted, allowed) and not before:
        yield NotifyEvent.BUDGET_NEARLY_SPENT


def _nearly_spent(counted: int, allowed: int) -> bool:
    return counted > 0 and allowed - counted <= max(1, allowed // 5)


def _settled(entry: Notification, world: World, unusable: str) -> Notification:
    outcome = world.outcomes.get(entry.id)
    if entry.state is not NotificationState.PENDING:
        return entry
    if outcome is not None and outcome.delivered:
        return replace(entry, state=NotificationState.DELIVERED)
    if outcome is not None or unusable:
        why = outcome.message if outcome is not None else unusable
        return replace(entry, state=NotificationState.GIVEN_UP, message=why[:1000])
    return entry


# --- a receiver that cannot be used -----------------------------------------------------------------------------


def _unusable(job: DDPJob, world: World) -> str:
    """Return why the receiver cannot be used; empty if it can."""
    if job.spec.notify is None or job.spec.notify.receiver in world.receivers:
        return ""
    known = ", ".join(sorted(world.receivers)[:10]) or "none"
    return (
        f'spec.notify.receiver: "{job.spec.notify.receiver}" is not one of the receivers that namespace '
        f"{job.namespace} may use ({known}); choose one of them, or ask the platform team to add it to the chart's "
        "notify.receivers"
    )


def _usable(status: JobStatus, unusable: str, now: datetime) -> tuple[JobStatus, list[Event]]:
    """Return the status, with the Notifies condition if the receiver is unusable.

    An event is added when the condition first appears. Without the condition, users would notice an
    unusable receiver only at the job's end.
    """
    if status.terminal:
        return status, []
    if not unusable:
        return without_condition(status, ConditionType.NOTIFIES), []
    reason, known = "ReceiverUnknown", status.condition(ConditionType.NOTIFIES)
    events = [Event(True, reason, event_text(unusable))] if known is None else []
    return with_condition(status, ConditionType.NOTIFIES, False, reason, unusable, now), events


# --- what is sent -----------------------------------------------------------------------------------------------


def _body(job: DDPJob, status: JobStatus, entry: Notification, link: str) -> Json:
    """Return the JSON that is posted to the receiver.

    The JSON contains fields for programs, and `text` for receivers that use Slack's format.
    """
    reason, message = _why(job, status, entry.event)
    counts = status.restarts
    body: Json = {
        "id": entry.id,
        "event": entry.event,
        "time": format_time(entry.time),
        "job": job.name,
        "namespace": job.namespace,
        "uid": job.uid,
        "state": status.phase,
        "reason": reason,
        "message": event_text(message),
        "nodes": status.nodes_display(job.spec),
        "restarts": {"counted": counts.counted, "total": counts.total, "max": job.spec.recovery.max_restarts},
        "progress": {name: status.progress[name] for name in _PROGRESS if name in status.progress},
    }
    if link:
        body["link"] = link
    return body | {"text": _text(body)}


def _why(job: DDPJob, status: JobStatus, event: NotifyEvent) -> tuple[str, str]:
    if event is not NotifyEvent.BUDGET_NEARLY_SPENT:
        condition = status.condition(ConditionType(event))
        return (condition.reason, condition.message) if condition is not None else (str(event), "")
    counts, allowed = status.restarts, job.spec.recovery.max_restarts
    used = f"{counts.counted} of {count(allowed, 'restart')} {'is' if counts.counted == 1 else 'are'} used up"
    used += " (recovery.maxRestarts)"
    last = next((r for r in reversed(counts.recent) if r.counted), None)
    if last is None:
        return str(event), used
    return str(event), f"{last.reason}: {put_cause_first(last.message, used)}"


def _text(body: Json) -> str:
    progress, counts = body["progress"], body["restarts"]
    facts = [f"restarts {counts['counted']}/{counts['max']}"]
    shown = ((name, progress[name]) for name in ("epoch", "step", "loss") if name in progress)
    facts += [f"{name} {value:z.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown]
    head = f"DDPJob {body['namespace']}/{body['job']}: {body['event']} ({body['reason']}); {', '.join(facts)}"
    lines = [_inert(head), f"```{_inert(body['message'])}```"] + ([body["link"]] if "link" in body else [])
    return "\n".join(lines)


def _inert(text: str) -> str:
    """Return the text in a form that chats show literally.

    The author of a job controls parts of the text, and must not be able to mention a whole channel
    or hide a link. The characters & < > are escaped as Slack requires. A word joiner after @
    prevents mentions in other chats. Backquotes are replaced, so that the text cannot close its
    code block.
    """
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shown = escaped.replace("`", "'").replace("@", "@\u2060")
    return "".join(c if c.isprintable() or c in "\n\u2060" else " " for c in shown)
