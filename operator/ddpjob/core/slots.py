"""Decides the slots: which attempt of each pod is wanted, in a new generation, after a loss, at another size. No name is used twice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob.api.types import DDPJob, JobStatus, RendezvousStatus, Slot, SlotState
from ddpjob.core.classify import Cause, End
from ddpjob.core.world import PodView, World

QUICK = timedelta(seconds=60)
"""A pod that ended sooner after it was made did not get anywhere."""
_REPEATING = frozenset({Cause.EXIT_CODE, Cause.OOM_KILLED, Cause.INIT_FAILURE, Cause.EVICTED})
"""Causes that waiting may help; what others do to a pod says nothing of the next one."""


@dataclass(frozen=True)
class Repeated:
    """How often in a row the same has happened, and until when the next pod waits."""

    reason: str = ""
    failures: int = 0
    not_before: datetime | None = None


def template_mark(job: DDPJob, world: World) -> str:
    """What all pods of a generation have in common: the spec they were made from and the key of their token."""
    return f"{job.spec.template_hash}-{world.key_mark}"


def with_slots(status: JobStatus, slots: list[Slot]) -> JobStatus:
    highest = max([status.highest_attempt, *(slot.attempt for slot in slots)])
    return replace(status, slots=tuple(slots), highest_attempt=highest)


def new_generation(job: DDPJob, status: JobStatus, world: World) -> JobStatus:
    """All slots anew around a new coordinator."""
    used: dict[int, int] = {}
    for pod in world.nodes():
        used[pod.index] = max(used.get(pod.index, -1), pod.attempt)
    for index, slot in enumerate(status.slots):
        if slot.state is not SlotState.PLANNED:
            used[index] = max(used.get(index, -1), slot.attempt)
    slots = []
    for index in range(job.spec.pods):
        old = status.slots[index] if index < len(status.slots) else Slot(attempt=_unused(status))
        attempt = max(old.attempt, used.get(index, -1) + 1)
        slots.append(Slot(attempt=attempt, reason=old.reason, failures=old.failures, not_before=old.not_before))
    rendezvous = RendezvousStatus(
        generation=status.rendezvous.generation + 1 if status.slots else 0,
        nodes=job.spec.nodes,
        failures=status.rendezvous.failures,
        not_before=status.rendezvous.not_before,
    )
    return replace(with_slots(status, slots), rendezvous=rendezvous, template_hash=template_mark(job, world))


def _unused(status: JobStatus) -> int:
    """An attempt that no pod of any index, of slots dropped long ago either, has had."""
    return status.highest_attempt + 1 if status.slots or status.highest_attempt else 0


def resized(job: DDPJob, status: JobStatus) -> JobStatus:
    """As many slots as spec.nodes and spec.spares ask for: further ones at the end, or fewer."""
    slots = list(status.slots[: job.spec.pods])
    slots += [Slot(attempt=_unused(status)) for _ in range(job.spec.pods - len(slots))]
    return replace(with_slots(status, slots), rendezvous=replace(status.rendezvous, nodes=job.spec.nodes))


def next_attempt(slot: Slot, repeated: Repeated) -> Slot:
    return Slot(attempt=slot.attempt + 1, reason=repeated.reason, failures=repeated.failures, not_before=repeated.not_before)


def next_coordinator(status: JobStatus) -> JobStatus:
    """Another coordinator for the same generation: the group goes on meanwhile."""
    rendezvous = replace(status.rendezvous, attempt=status.rendezvous.attempt + 1, state=SlotState.PLANNED, endpoint="")
    return replace(status, rendezvous=rendezvous)


def repeated(job: DDPJob, before: Repeated, end: End, pod: PodView | None, now: datetime) -> Repeated:
    """What `end` of a pod makes of what was before it."""
    if end.cause not in _REPEATING or pod is None or pod.created is None or (end.time or now) - pod.created >= QUICK:
        return Repeated()
    failures = before.failures + 1 if before.reason == end.cause else 1
    seconds = job.spec.recovery.backoff.seconds(failures)
    until = now + timedelta(seconds=seconds)
    # Times are written in whole seconds.
    whole = until.replace(microsecond=0) + timedelta(seconds=math.ceil(until.microsecond / 1e6))
    return Repeated(end.cause, failures, whole if seconds else None)


def with_rounds(status: JobStatus, pods: list[PodView | None]) -> JobStatus:
    """Pods that are made now are made in this round."""
    pairs = zip(status.slots, pods, strict=True)
    slots = [replace(s, round=status.round) if s.state is SlotState.PLANNED and pod is None else s for s, pod in pairs]
    return replace(status, slots=tuple(slots))
