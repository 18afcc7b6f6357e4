"""Last stage: decide what replaces ended pods, and when.

The next attempt is planned for every slot that lost its pod, or a new generation if the rendezvous
itself is lost.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob.api.job_spec import Placement
from ddpjob.api.job_status import JobStatus
from ddpjob.core.failures.classify import Cause
from ddpjob.core.follow.ends import Ended
from ddpjob.core.follow.recording import Recorded
from ddpjob.core.plan.gang import is_broken_up
from ddpjob.core.plan.slots import (
    Repeated,
    begin_generation,
    can_replace,
    count_in_a_row,
    count_repetition,
    plan_next_attempt,
    plan_next_coordinator,
    with_slots,
)
from ddpjob.core.view import View

_REGROUPS = frozenset({Cause.RENDEZVOUS_LOST})
"""Causes after which only a new generation helps."""


def replace_ended(recorded: Recorded) -> View:
    """Return the view with the next attempts of ended pods, or the next generation, planned."""
    ends, view = recorded.slots, recorded.view.with_status(_with_backoff(recorded))
    if _must_regroup(recorded, view):
        return view.with_status(begin_generation(view if view.job.spec.under_torchrun else _all_wait(view, ends)))
    status = plan_next_coordinator(view.status) if recorded.coordinator is not None else view.status
    slots = [
        plan_next_attempt(s, Repeated(s.reason, s.failures, s.not_before)) if i in ends else s
        for i, s in enumerate(status.slots)
    ]
    return view.with_status(with_slots(status, slots))


def _must_regroup(recorded: Recorded, view: View) -> bool:
    """Return whether the group cannot be repaired pod by pod."""
    spec, ends, lost = view.job.spec, recorded.slots, recorded.coordinator is not None
    causes = {ended.end.cause for ended in ends.values()}
    return (
        (lost and not spec.fast)
        or ((lost or bool(ends)) and not can_replace(view))
        or (bool(ends) and not spec.under_torchrun)
        or (0 in ends and spec.rendezvous.placement is Placement.MASTER)
        or not _REGROUPS.isdisjoint(causes)
        or (
            Cause.PREEMPTED in causes
            and is_broken_up(view, [s for i, s in enumerate(view.status.slots) if i not in ends])
        )
    )


def _all_wait(view: View, ends: dict[int, Ended]) -> View:
    """Return the view in which all pods wait as long as the failed one.

    The others cannot train without it, and may fail as well.
    """
    ended = [view.status.slots[i] for i in ends]
    waiting = [(slot.not_before, slot) for slot in ended if slot.failures and slot.not_before is not None]
    if not waiting:
        return view
    until, last = max(waiting, key=lambda pair: pair[0])
    slots = [replace(s, reason=last.reason, failures=last.failures, not_before=until) for s in view.status.slots]
    return view.with_slots(slots)


def _with_backoff(recorded: Recorded) -> JobStatus:
    """Return the status with the numbers of consecutive failures of slots and coordinator.

    A consequence says nothing about its pod, unless the program fails in both pods, which then wait
    equally long. Pods that were preempted together each leave their room.
    """
    view, coordinator = recorded.view, recorded.coordinator
    causes = {finding.restart.pod for finding in recorded.attribution.merged.causes}
    slots, rendezvous = list(view.status.slots), view.status.rendezvous
    for index, ended in sorted(recorded.slots.items(), key=lambda item: item[1].name not in causes):
        slot, again, cause = slots[index], Repeated(), ended.end.cause
        if ended.name in causes or cause is Cause.PREEMPTED:
            own = slot.failures if slot.reason == cause else 0
            again = count_repetition(view, Repeated(cause, max(own, count_in_a_row(view, cause))), ended.end, ended.pod)
        elif shared := count_in_a_row(view.with_slots(slots), cause):
            again = count_repetition(view, Repeated(cause, shared - 1), ended.end, ended.pod)
        slots[index] = replace(slot, reason=again.reason, failures=again.failures, not_before=again.not_before)
    if coordinator is not None:
        before = Repeated(coordinator.end.cause, rendezvous.failures)
        again = count_repetition(view, before, coordinator.end, coordinator.pod)
        rendezvous = replace(rendezvous, failures=again.failures, not_before=again.not_before)
    return replace(view.status, slots=tuple(slots), rendezvous=rendezvous)
