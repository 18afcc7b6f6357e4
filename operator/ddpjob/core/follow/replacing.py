"""The last stage of `follow`, which decides when and how ended pods are replaced.

If possible, each lost pod is replaced alone: its slot gets the next attempt, and the other pods
keep running. A new generation replaces the whole group instead (`_must_regroup`):

- if the coordinator is lost, except in Fast mode
- if slot 0 is lost and the placement is Master, because the coordinator is in its pod
- if any pod of a `command` is lost, because its torchruns have no coordinator to regroup them
- if a pod lost the rendezvous, or single pods can no longer join their peers
- if a preemption leaves a gang with too few nodes to train

A pod that ends soon after its start is replaced after a back-off (`plan.slots`). Pods that fail for
the same cause in the program share a count, because any of them may be the first to fail.

Example with initialSeconds: 10, in which pod train-1-0 runs out of memory after 20 s each time:

    first end      train-1-1 is created immediately
    second end     train-1-2 is created after 10 s
    third end      train-1-3 is created after 20 s

Why: docs/decisions/0008 and 0009.
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
    """Return the view with replacements planned: the next attempts, or a new generation."""
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
    """Whether the whole group must be replaced because replacing the ended pods is not enough."""
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
    """Return the view, with the failed pod's back-off applied to all pods.

    The other pods cannot train without the failed pod, and may fail as well.
    """
    ended = [view.status.slots[i] for i in ends]
    waiting = [(slot.not_before, slot) for slot in ended if slot.failures and slot.not_before is not None]
    if not waiting:
        return view
    until, last = max(waiting, key=lambda pair: pair[0])
    slots = [replace(s, reason=last.reason, failures=last.failures, not_before=until) for s in view.status.slots]
    return view.with_slots(slots)


def _with_backoff(recorded: Recorded) -> JobStatus:
    """Return the status with updated back-offs of the slots and the coordinator.

    A pod that ended as a consequence does not back off. But if another pod has failed for the same
    cause, and the cause comes from the program, all pods that failed for this cause wait equally
    long. After a preemption, the next pod always waits, so that the preempting pods get the room.
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
