"""Decides the attempt of each slot in a new generation, after a loss, and when the job changes
size.

A slot is a numbered position in the group. `status.slots` has the current attempt of each
slot, and the pod of slot 2 in attempt 5 is called `JOB-2-5`. The slots are the whole plan: a
missing pod is created, and a running pod that no slot names is deleted.

No pod name is ever used twice. A replacement therefore need not wait for a deletion, and a name
never resolves to the address of a different pod. So attempts only grow, and a new slot starts above
the highest attempt of any dropped slot. An operator may also have died right after it created a
pod, before the status showed that pod, so the attempts of all existing pods are skipped.

Example with 2 nodes:

    begin                slots 0 and 1 at attempt 0           pods train-0-0, train-1-0
    train-1-0 is lost    slot 1 is planned at attempt 1       pod train-1-1, created immediately
    nodes=1              slot 1 is dropped; highest_attempt=1
    nodes=2              slot 1 is new, at attempt 2          pod train-1-2

A new generation replaces the coordinator and every pod, because the spec, the token or the runtime
has changed, or because the group cannot be repaired pod by pod (`begin_generation`).

If a pod ends within QUICK of being created, and waiting may help, the next pod backs off
(`count_repetition`). The first replacement does not wait. The second one waits for
`recovery.backoff.initialSeconds`, and after that the wait doubles each time. A pod that lasts
longer than QUICK resets the count.

Why: docs/decisions/0009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob_runtime import protocol

from ddpjob.api.job_spec import Placement
from ddpjob.api.job_status import ConditionType, JobStatus, RendezvousStatus, Slot, SlotState
from ddpjob.core.failures.classify import Cause, End
from ddpjob.core.plan.gang import plan_gang
from ddpjob.core.view import View
from ddpjob.core.world import PodView

QUICK = timedelta(seconds=60)
"""A pod that ends within this time after being created is assumed to have made no progress."""
ROOM = timedelta(seconds=8)
"""How long the next pod waits after a preempted pod has ended. kube-scheduler 1.36 does not reserve
the freed room for the gang that preempted the pod. The scheduler retries the gang within 10 s
(podMaxBackoffSeconds) of the preemption, and the pod's shutdown takes part of that time. Without
the wait, the next pod would take the room and be preempted again."""
_REPEATING = frozenset(
    {
        *(Cause.EXIT_CODE, Cause.OOM_KILLED, Cause.STORAGE_EXCEEDED, Cause.INIT_FAILURE, Cause.EVICTED),
        *(Cause.NODE_FAULT, Cause.START_ERROR, Cause.PREFLIGHT_FAILED, Cause.NODE_LOST, Cause.WORKER_FAILED),
    }
)
"""Causes that make the next pod back off when they repeat, because a delay may help. Other causes
predict nothing about the next pod. NodeLost is included because a pod that tolerates every taint
may be placed on a dead host repeatedly."""
_PROGRAM = frozenset(
    {Cause.EXIT_CODE, Cause.OOM_KILLED, Cause.STORAGE_EXCEEDED, Cause.INIT_FAILURE, Cause.WORKER_FAILED}
)
"""Causes that come from the program. Every pod runs the same program, so a different pod may be the
first to end each time."""


@dataclass(frozen=True)
class Repeated:
    """A cause, how many times in a row it has occurred, and the end of the next back-off."""

    reason: str = ""
    failures: int = 0
    not_before: datetime | None = None


_MOST_FORMER_KEYS = 8
"""Maximum number of replaced keys that the status keeps. Older keys are dropped."""
SUPPORTED_PROTOCOLS = frozenset({protocol.VERSION})
"""Protocol versions of the runtimes that this operator can build pods for. The runtime may come
from a different release."""


def template_mark(view: View) -> str:
    """Return a string that identifies the properties that all pods in a generation share.

    The string covers the spec that the pods are built from, the key of their token, and the
    protocol version of their runtime.
    """
    version = protocol_of(view.status) if view.status.runtime else protocol.VERSION
    return f"{_spec_and_key(view)}-{version}"


def _spec_and_key(view: View) -> str:
    return f"{view.job.spec.template_hash}-{view.world.key_mark}"


def key_of(status: JobStatus) -> str:
    """Return the mark of the key that the job's token was made from; empty for a new job."""
    return status.template_hash.partition("-")[2].partition("-")[0]


def is_superseded(view: View) -> bool:
    """Whether a different operator has replaced this operator's key and may still run the job.

    Two operators with different keys act on the same job if they are not permitted to hold Leases.
    Each of them would see a changed key and restart the job, and this would repeat forever. An
    operator whose key was replaced therefore leaves the other key in place. Example, with keys a
    and b:

        a begins the job     key a
        b sees key a         key b, formerKeys [a]: one planned restart
        a sees key b         a finds its own key in formerKeys, and leaves the job alone

    This operator restores its key only if that interrupts nothing: when the job resumes, or when a
    change of the job's spec replaces the job's pods. An operator that holds the namespace's Lease
    always acts. No other operator is active there, so an administrator must have restored the key.
    """
    status, world = view.status, view.world
    if world.is_sole_operator or key_of(status) == world.key_mark or world.key_mark not in status.former_keys:
        return False
    stops = status.terminal or status.holds(ConditionType.SUSPENDED) or view.job.spec.run_policy.suspend
    return not stops and status.template_hash.partition("-")[0] == view.job.spec.template_hash


def _former_keys(view: View) -> tuple[str, ...]:
    """Return the keys to record as replaced when a new generation uses this operator's key."""
    keys = dict.fromkeys((*view.status.former_keys, key_of(view.status)))
    return tuple(key for key in keys if key and key != view.world.key_mark)[-_MOST_FORMER_KEYS:]


def protocol_of(status: JobStatus) -> int:
    """Return the protocol version that the pods in the job's generation use."""
    version = status.template_hash.rpartition("-")[2]
    return int(version) if version.isdecimal() else protocol.VERSION


def fits(view: View) -> bool:
    """Whether the current generation still fits the job, so that no new generation is needed.

    An upgrade or rollback of the operator must not end training, so pods with the runtime of a
    different release stay until a pod must be replaced.
    """
    made_from = "-".join(view.status.template_hash.split("-")[:2])
    return made_from == _spec_and_key(view) and (can_replace(view) or not _lacks_pods(view))


def can_replace(view: View) -> bool:
    """Whether single pods in the current generation can be replaced.

    A pod needs the same runtime as its peers. If the runtime's ConfigMap is gone and this operator
    has a different runtime, a new pod could not join its peers.
    """
    version, runtime = protocol_of(view.status), view.status.runtime
    if runtime and runtime == view.world.runtime:
        return version in SUPPORTED_PROTOCOLS
    return version == protocol.VERSION and runtime in ("", view.world.runtime_offered)


def _lacks_pods(view: View) -> bool:
    """Whether any pod of the current generation still has to be created."""
    rendezvous, placement = view.status.rendezvous, view.job.spec.rendezvous.placement
    planned = rendezvous.state is SlotState.PLANNED and placement is Placement.DEDICATED
    slots = zip(view.status.slots, view.pods, strict=True)
    return (planned and view.coordinator is None) or any(s.state is SlotState.PLANNED and not p for s, p in slots)


def with_slots(status: JobStatus, slots: list[Slot]) -> JobStatus:
    """Return the status with these slots, and the highest attempt of any slot so far."""
    grow = all(new.attempt >= old.attempt for old, new in zip(status.slots, slots, strict=False))
    assert grow, "an attempt of a slot was planned twice, so two pods would have the same name"
    highest = max([status.highest_attempt, *(slot.attempt for slot in slots)])
    return replace(status, slots=tuple(slots), highest_attempt=highest)


def begin_generation(view: View) -> JobStatus:
    """Return the status of a new generation, with a new coordinator and every slot replanned.

    A slot keeps its attempt if no pod has been created for it yet. Otherwise its next attempt is
    higher than that of every pod with the same index in the status and in the world. Back-offs are
    kept. The first generation is 0, and the coordinator's attempts begin at 0. If pods can no
    longer be made with the job's current runtime, the job gets the operator's own runtime.
    """
    if not can_replace(view):
        view = view.with_status(replace(view.status, runtime=""))
    job, status = view.job, view.status
    used: dict[int, int] = {}
    for pod in view.world.nodes():
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
    status = replace(with_slots(status, slots), former_keys=_former_keys(view))
    status = replace(status, rendezvous=rendezvous, template_hash=template_mark(view), gang=plan_gang(view))
    return status if status.runtime else replace(status, runtime=view.world.runtime_offered)


def _unused(status: JobStatus) -> int:
    """Return an attempt number that no pod of any slot, including dropped slots, has had."""
    return status.highest_attempt + 1 if status.slots or status.highest_attempt else 0


def resize(view: View) -> JobStatus:
    """Return the status with slots added or dropped at the end, as the spec's size requires."""
    job, status = view.job, view.status
    slots = list(status.slots[: job.spec.pods])
    slots += [Slot(attempt=_unused(status)) for _ in range(job.spec.pods - len(slots))]
    return replace(with_slots(status, slots), rendezvous=replace(status.rendezvous, nodes=job.spec.nodes))


def keep_training(view: View) -> list[Slot] | None:
    """Return the slots to keep if spec.spares was reduced while pods in the last slots train.

    A smaller spec.spares normally drops the last slots. If the pods in these slots train, idle
    slots lose their pods instead, and get no new pods until a later loss frees the last slots.
    Return None if no pod in the last slots trains, or if there are too few idle slots.

    Example: the job has 2 nodes and 1 spare. Pod 0 was lost, and the spare, pod 2, trains. If
    spares becomes 0, the idle replacement of pod 0 is deleted, and pods 1 and 2 continue to train.
    """
    spec, status, report = view.job.spec, view.status, view.report
    dedicated = spec.rendezvous.placement is Placement.DEDICATED  # With Master placement, slot 0 has the coordinator.
    if not dedicated or spec.nodes != status.rendezvous.nodes or report is None:
        return None
    last = zip(status.slots[spec.pods :], view.pods[spec.pods :], strict=True)
    if any(slot.state is SlotState.RUNNING and (pod is None or pod.ended) for slot, pod in last):
        return list(status.slots)  # `follow` must record this pod's end first.
    if report.state != protocol.CoordinatorState.RUNNING:
        return None
    members = {member.pod for member in report.members if member.state is protocol.MemberState.RUNNING}
    trains = [pod is not None and pod.name in members for pod in view.pods]
    length = max((index + 1 for index, found in enumerate(trains) if found), default=0)
    idle = [index for index in range(length) if not trains[index]]
    surplus = length - spec.pods
    if surplus <= 0 or len(idle) < surplus or sum(trains) < spec.nodes:
        return None
    slots = list(status.slots[:length])
    idle.sort(key=lambda index: (view.pods[index] is not None, -index))  # Slots without a pod come first.
    for index in idle[:surplus]:
        if view.pods[index] is not None:
            slots[index] = Slot(attempt=slots[index].attempt + 1)
    return slots


def plan_next_attempt(slot: Slot, repeated: Repeated) -> Slot:
    """Return the slot with its next pod planned."""
    return Slot(
        attempt=slot.attempt + 1, reason=repeated.reason, failures=repeated.failures, not_before=repeated.not_before
    )


def plan_next_coordinator(status: JobStatus) -> JobStatus:
    """Return the status with the coordinator's next attempt planned in the same generation."""
    rendezvous = replace(status.rendezvous, attempt=status.rendezvous.attempt + 1, state=SlotState.PLANNED, endpoint="")
    return replace(status, rendezvous=rendezvous)


def count_repetition(view: View, before: Repeated, end: End, pod: PodView | None) -> Repeated:
    """Return the number of similar ends in a row, including this one, and the next back-off.

    The number rises if the pod ended quickly for the same cause, and a delay may help. In all other
    cases, the number starts again. If the cluster serves gangs, the next pod after a preemption
    waits for ROOM instead.
    """
    if end.cause is Cause.PREEMPTED and view.world.serves_gangs:
        return Repeated(end.cause, 0, _whole(view.now + ROOM))
    if end.cause not in _REPEATING or pod is None or pod.created is None:
        return Repeated()
    # The clock of the pod's host can be ahead of the API server's.
    if min(end.time or view.now, view.now) - pod.created >= QUICK:
        return Repeated()
    failures = before.failures + 1 if before.reason == end.cause else 1
    seconds = view.job.spec.recovery.backoff.seconds(failures)
    return Repeated(end.cause, failures, _whole(view.now + timedelta(seconds=seconds)) if seconds else None)


def count_in_a_row(view: View, cause: Cause) -> int:
    """Return how many times in a row pods of the job have ended quickly for the same cause.

    The result is 0 for causes that do not come from the program, because such causes differ from
    pod to pod.
    """
    if cause not in _PROGRAM:
        return 0
    pairs = zip(view.status.slots, view.pods, strict=True)
    fruitless = (s for s, pod in pairs if pod is None or pod.created is None or view.now - pod.created < QUICK)
    return max((slot.failures for slot in fruitless if slot.reason == cause), default=0)


def _whole(until: datetime) -> datetime:
    """Round up to whole seconds, because times are written without fractions."""
    return until.replace(microsecond=0) + timedelta(seconds=math.ceil(until.microsecond / 1e6))


def with_rounds(view: View) -> JobStatus:
    """Return the status, with the current round in each slot that is about to get a pod."""
    status = view.status
    if all(s.state is not SlotState.PLANNED for s in status.slots):
        return status
    pairs = zip(status.slots, view.pods, strict=True)
    slots = [replace(s, round=status.round) if s.state is SlotState.PLANNED and pod is None else s for s, pod in pairs]
    return replace(status, slots=tuple(slots))
