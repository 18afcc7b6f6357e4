"""Decides a job's generation and slots when the job starts, is resumed or changed, or gives up
nodes.

A generation is one coordinator with its pods (`plan.slots`). This module decides whether the
current generation still fits the job and, if not, how much of the generation must be replaced.

- A new job starts with generation 0.
- If pods would now be built differently, a new generation replaces all of them. This happens after
  a change to the operator's key or to the spec that pods are built from. It also happens if a
  missing pod cannot get the same runtime as its peers. The restart is planned, so it does not
  count.
- A different spec.nodes or spec.spares resizes the generation in place. Additional nodes join when
  the coordinator next restarts the group. If nodes are removed, the group restarts immediately. A
  new generation is needed only if the job uses `command`, or if missing pods could not join their
  peers.
- If another operator has replaced a job's key, the job is left to that operator
  (`slots.is_superseded`).
- Nothing changes while podTemplate has faults, or if the group has already finished its work.
- A gang that holds nodes but cannot train gives them up (`yield_room`).

Example:

    created with nodes=2    generation 0 with slots 0 and 1
    nodes=3                 slot 2 is added, and joins at the coordinator's next restart
    nodes=2                 slot 2 is dropped, and the group restarts: Scaled, uncounted
    a new image             generation 1, and every slot gets its next attempt: SpecChanged

Why: docs/decisions/0009.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpjob_runtime.protocol import CoordinatorState, MemberState

from ddpjob.api.job_status import ConditionType, JobStatus, Restart
from ddpjob.core.decision import Event
from ddpjob.core.failures.classify import Cause
from ddpjob.core.follow.ends import find_ends
from ddpjob.core.follow.outcome import is_done
from ddpjob.core.follow.recording import record
from ddpjob.core.only_copy import explain_kept
from ddpjob.core.plan.gang import explain_yield, is_outdated, with_placed
from ddpjob.core.plan.job_class import CLASS_MISSING, CLASS_REFUSED
from ddpjob.core.plan.slots import (
    begin_generation,
    can_replace,
    fits,
    is_superseded,
    keep_training,
    key_of,
    resize,
    with_slots,
)
from ddpjob.core.status.conditions import GROUP_RESTARTS, QUEUED, with_condition
from ddpjob.core.status.messages import count
from ddpjob.core.view import View


@dataclass(frozen=True)
class Begun:
    """The result of `begin` and `yield_room`.

    The view has the slots that the job should have, and the events report what has changed.
    """

    view: View
    events: list[Event]


def begin(view: View) -> Begun:
    """Give a new, resumed or changed job the generation and the slots that its spec requires."""
    world, now = view.world, view.now
    status, events = _lay_out(view)
    if status.holds(ConditionType.SUSPENDED):
        before = status.condition(ConditionType.SUSPENDED)
        queued = before is not None and before.reason in QUEUED
        reason, why = "Resumed", "the job is not in a queue" if queued else "runPolicy.suspend is false"
        if before is not None and before.reason in (CLASS_MISSING, CLASS_REFUSED):
            name = view.job.spec.class_name
            why = f"class {name} is applied" if name else "the job no longer names a class"
        if queued and status.queue is not None:
            reason, why = "Admitted", f"{status.queue.cluster_queue} has granted the quota"
        for kind in (ConditionType.SUSPENDED, ConditionType.RESTARTING):
            if status.condition(kind) is not None:
                status = with_condition(status, kind, False, reason, why, now)
        continues = view.job.status.slots and view.trained
        events.append(Event(False, reason, "training continues from the newest checkpoint" if continues else why))
    if (world.runtime != status.runtime or not status.runtime) and can_replace(view.with_status(status)):
        status = replace(status, runtime=world.runtime_offered)
    if status.start_time is None:
        status = replace(status, start_time=now.replace(microsecond=0))
    view = view.with_status(status)
    return Begun(view.with_status(with_placed(view)), events)


def explain_superseded(view: View) -> str:
    """Explain why this operator leaves the job to another; empty if this operator keeps it."""
    if not is_superseded(view):
        return ""
    return (
        "another operator has replaced the token of the job's pods, so this operator leaves the job alone."
        " Let only one operator act in the namespace, or grant both operators access to Leases there so that only one "
        f"acts. To return the job to this operator, stop the other one and run `ddpjob restart {view.job.name}`"
    )


def _lay_out(view: View) -> tuple[JobStatus, list[Event]]:
    """Return the status with slots that fit the spec, and the events that report a change."""
    job, status = view.job, view.status
    if not status.slots:
        return begin_generation(view), []
    if view.world.problems:
        return status, []  # Pods cannot be built from this spec.
    suspended = status.holds(ConditionType.SUSPENDED)
    fitting = fits(view)
    if fitting and is_outdated(view):
        return begin_generation(view), []  # A gang can still change while none of its pods has been placed.
    other_size = status.rendezvous.nodes != job.spec.nodes or len(status.slots) != job.spec.pods
    if (other_size or not fitting) and is_done(find_ends(view)):
        # New pods would have nothing to do, because the group has finished its work.
        return status, []
    if not fitting:
        cause, message = _change(view)
        view = view.with_status(replace(status, runtime=""))  # New pods also get this operator's runtime.
    elif not other_size:
        return status, []
    elif suspended or not job.spec.under_torchrun or (len(status.slots) < job.spec.pods and not can_replace(view)):
        cause, message = Cause.SCALED, _new_size(view)
    else:
        return _resize(view)
    if suspended:
        return begin_generation(view), []
    return begin_generation(_restarted(view, cause, message)), [Event(False, cause, message)]


def _change(view: View) -> tuple[Cause, str]:
    """Return the cause and the message for the restart that replaces all of a job's pods."""
    if view.status.template_hash.partition("-")[0] != view.job.spec.template_hash:
        return Cause.SPEC_CHANGED, "the spec fields that define the pods have changed"
    if key_of(view.status) != view.world.key_mark:
        return Cause.KEY_CHANGED, "the operator's key has changed, and with it the token that the job's pods share"
    return Cause.RUNTIME_CHANGED, "the upgraded operator is not compatible with the runtime in the job's current pods"


def _resize(view: View) -> tuple[JobStatus, list[Event]]:
    """Return the status with slots added or dropped, and the event that reports the change.

    The generation stays the same. Additional nodes join when the coordinator next restarts the
    group. If nodes are removed, the group restarts immediately. If spares are removed, the group
    restarts only if a dropped pod trains and cannot be kept (`keep_training`).
    """
    job, status = view.job, view.status
    message = _new_size(view)
    slots = keep_training(view)
    if slots is not None:
        same = len(slots) == len(status.slots) and all(a is b for a, b in zip(slots, status.slots, strict=True))
        return (status, []) if same else (with_slots(status, slots), [Event(False, Cause.SCALED, message)])
    if explain_kept(view):
        return status, []
    members = view.report.members if view.report is not None else ()
    going = {pod.name for pod in view.pods[job.spec.pods :] if pod is not None}
    trains = any(member.pod in going and member.state is MemberState.RUNNING for member in members)
    if job.spec.nodes < status.rendezvous.nodes or trains:
        view = _restarted(view, Cause.SCALED, message)
    return resize(view), [Event(False, Cause.SCALED, message)]


def _restarted(view: View, cause: Cause, message: str) -> View:
    """Record a planned restart in the view's status if the restart interrupts a group.

    If no group has formed yet, for example because there is no room, the view does not change.
    """
    status, report = view.status, view.report
    running = status.condition(ConditionType.RUNNING)
    formed = running is not None and (running.status or running.reason == GROUP_RESTARTS)
    formed = formed or (report is not None and report.state != CoordinatorState.FORMING)
    if not formed and not status.holds(ConditionType.RESTARTING):
        return view
    return view.with_status(record(status, [_planned(view, cause, message)]))


def _new_size(view: View) -> str:
    spec, before, queue = view.job.spec, view.status.rendezvous.nodes, view.status.queue
    if queue is not None and spec.elastic is not None:
        old, now = _size(before, len(view.status.slots) - before), _size(spec.nodes, spec.spares)
        return f"the size changed from {old} to {now}; the queue has granted {count(queue.pods, 'pod')}"
    if spec.nodes == before:
        return f"spec.spares changed from {len(view.status.slots) - before} to {spec.spares}"
    asked = view.job.written.get("nodes", spec.nodes)
    if asked > spec.nodes:
        return f"spec.nodes changed from {before} to {asked}, but class {spec.class_name} allows only {spec.nodes}"
    return f"spec.nodes changed from {before} to {spec.nodes}"


def _size(nodes: int, spares: int) -> str:
    return count(nodes, "node") + (f" and {count(spares, 'spare')}" if spares > 0 else "")


def yield_room(view: View) -> Begun:
    """If the job holds nodes but cannot train, begin a new generation that waits as a gang.

    This restart never counts against the budget.
    """
    why = explain_yield(view)
    if not why:
        return Begun(view, [])
    view = view.with_status(record(view.status, [_planned(view, Cause.YIELDED, why)]))
    return Begun(view.with_status(begin_generation(view)), [Event(True, Cause.YIELDED, why)])


def _planned(view: View, cause: Cause, message: str) -> Restart:
    name, number = view.job.name, view.status.round + 1
    return Restart(time=view.now, pod=name, reason=cause, message=message, counted=False, round=number)
