"""`status` of a DDPJob as frozen dataclasses, which pydantic reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import groupby
from operator import not_
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasPath,
    BeforeValidator,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from ddpjob.api.job_spec import CONFIG, JobSpec, Json, NotifyEvent


class SlotState(StrEnum):
    """State of the pod of a slot's current attempt; see docs/architecture.md."""

    PLANNED = "Planned"
    CREATED = "Created"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    LOST = "Lost"


class ConditionType(StrEnum):
    """Types of `status.conditions`."""

    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    FAST_RECOVERY = "FastRecovery"
    PREFLIGHT_PASSED = "PreflightPassed"
    """Only set with spec.preflight."""
    RANKS_ORDERED = "RanksOrdered"
    """Only set with spec.rankOrder: whether the ranks of the running group follow it."""
    ISOLATED = "Isolated"
    """Only set where something prevents the isolation that spec.network asks for."""
    ADMITTED = "Admitted"
    """Only set for a job in a queue of Kueue's: whether the queue has granted the quota to run."""
    NODES_HEALTHY = "NodesHealthy"
    """Only set where a pod stays on a Kubernetes node that a health agent calls unhealthy."""
    CHECKPOINTS_COPIED = "CheckpointsCopied"
    """Only set where checkpoints do not reach the bucket, although they should."""
    NOTIFIES = "Notifies"
    """Only set where the job's namespace may not use the receiver that spec.notify names."""
    CLASS_APPLIED = "ClassApplied"
    """Only set with spec.className: whether the job has what its class gives, and keeps to its limits."""


class NotificationState(StrEnum):
    """State of a notification."""

    PENDING = "Pending"
    DELIVERED = "Delivered"
    GIVEN_UP = "GivenUp"


class Phase(StrEnum):
    """Summary of the conditions for display; no decision depends on it."""

    QUEUED = "Queued"
    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


def parse_time(text: str | None) -> datetime | None:
    """RFC 3339 to an aware datetime; None stays None."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def known_time(text: Any) -> datetime | None:
    """The time in a text that anybody may have written; None: there is none that can be computed with."""
    try:
        return _computable(datetime.fromisoformat(text))
    except (TypeError, ValueError):
        return None


def _computable(moment: datetime) -> datetime:
    if moment.tzinfo is None or not 1970 <= moment.year < 9000:
        raise ValueError("a time without a zone, or one to which an hour cannot be added")
    return moment


def format_time(moment: datetime | None) -> str | None:
    """An aware datetime as RFC 3339 in UTC, to the second; None stays None."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None


_OMIT_EMPTY = Field(exclude_if=not_)
"""Not written while it is None, empty or 0."""
_OMIT_NONE = Field(exclude_if=lambda value: value is None)
_MOST = 10**9
"""Of a count or a number in a status: one more than it can still be written."""
_Number = Annotated[int, Field(ge=0, le=_MOST)]
_Moment = Annotated[datetime, AfterValidator(_computable)]
_Time = Annotated[_Moment, PlainSerializer(format_time)]
_OptionalTime = Annotated[_Moment | None, PlainSerializer(format_time), _OMIT_EMPTY]
_Status = Annotated[bool, BeforeValidator(lambda text: text == "True"), PlainSerializer(str)]


def _below(*path: str) -> Any:
    """Where a field is read that the CRD puts into an object of its own; JobStatus.write writes it."""
    return Field(validation_alias=AliasPath(*path), exclude=True)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One entry of `status.conditions`."""

    type: ConditionType
    status: _Status
    reason: str
    message: str
    since: Annotated[_Time, Field(alias="lastTransitionTime")]
    generation: Annotated[_Number, Field(alias="observedGeneration")] = 0


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A numbered position in the job; it outlives its pods."""

    attempt: _Number = 0
    state: SlotState = SlotState.PLANNED
    node: Annotated[str, _OMIT_EMPTY] = ""
    round: Annotated[_Number, _OMIT_EMPTY] = 0
    """The job's round when the pod was created: the pod has no part in earlier breaks."""
    reason: Annotated[str, _OMIT_EMPTY] = ""
    failures: Annotated[_Number, _OMIT_EMPTY] = 0
    """How many of its pods in a row ended for `reason`, soon after their start."""
    not_before: _OptionalTime = None
    lost_since: _OptionalTime = None


@dataclass(frozen=True, kw_only=True)
class RendezvousStatus:
    generation: _Number = 0
    attempt: Annotated[_Number, _OMIT_EMPTY] = 0
    """Coordinators of this generation before the current one."""
    failures: Annotated[_Number, _OMIT_EMPTY] = 0
    """How many coordinators in a row ended soon after their start."""
    not_before: _OptionalTime = None
    state: SlotState = SlotState.PLANNED
    endpoint: str = ""
    nodes: _Number = 0
    """Number of nodes that the slots were last laid out for."""


@dataclass(frozen=True, kw_only=True)
class GangStatus:
    """The gang of a generation, as it was decided when the generation began."""

    nodes: _Number = 0
    """Slots 0 to nodes - 1 are in it."""
    placed: Annotated[bool, _OMIT_EMPTY] = False
    """Whether all of it has been scheduled. Pods that are made later are scheduled one by one."""


@dataclass(frozen=True, kw_only=True)
class PodChanges:
    """What the queue's flavor, and its admission checks, add to the pods of one kind."""

    node_selector: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    tolerations: Annotated[tuple[Json, ...], _OMIT_EMPTY] = ()
    labels: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    annotations: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """The quota that the job has been granted by Kueue, and runs with."""

    workload: str
    """Name of the Workload that holds it."""
    uid: str
    """Of the Workload."""
    cluster_queue: Annotated[str, _OMIT_EMPTY] = ""
    pods: _Number = 0
    """For so many pods of slots, and the coordinator's own."""
    node: PodChanges = field(default_factory=PodChanges)
    coordinator: PodChanges = field(default_factory=PodChanges)


@dataclass(frozen=True, kw_only=True)
class ClassLimits:
    """What no job of a class exceeds; None and empty: no limit."""

    max_nodes: Annotated[_Number | None, _OMIT_NONE] = None
    """Of nodes and spares."""
    max_gpus_per_node: Annotated[_Number | None, _OMIT_NONE] = None
    images: Annotated[tuple[str, ...], _OMIT_EMPTY] = ()
    """Of all containers; with a final `*` a prefix."""


@dataclass(frozen=True, kw_only=True)
class JobClass:
    """What the platform team gives to the jobs of a class, and withholds from them."""

    name: str
    mark: str
    """Of the content: two of the same name and mark are equal."""
    spec: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    """Values of some of CLASS_FIELDS."""
    queue: Annotated[str, _OMIT_EMPTY] = ""
    fixed: Annotated[tuple[str, ...], _OMIT_EMPTY] = ()
    limits: ClassLimits = field(default_factory=ClassLimits)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One entry of `status.restarts.recent`."""

    time: _Time
    pod: str
    reason: str
    message: str
    counted: bool
    index: Annotated[_Number | None, _OMIT_NONE] = None
    """The slot; None for the coordinator, and for what is of the whole group."""
    node: Annotated[str, _OMIT_EMPTY] = ""
    rank: Annotated[_Number | None, _OMIT_NONE] = None
    seconds: Annotated[float | None, _OMIT_NONE] = None
    """From the break until the group ran again; None while it does not."""
    round: Annotated[_Number, _OMIT_EMPTY] = 0
    """The round that began with it."""
    consequence: Annotated[bool, _OMIT_EMPTY] = False
    """Whether another failure of the same round was its cause."""
    everywhere: Annotated[bool, _OMIT_EMPTY] = False
    """Whether ranks of other pods, or the other ranks of the only one, failed in that round with the same error."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    counted: _Number = 0
    """Since the budget was last reset."""
    uncounted: _Number = 0
    total: _Number = 0
    """Since the job began."""
    last_counted: _OptionalTime = None
    seen_generation: Annotated[_Number, _below("seen", "generation")] = 0
    seen_incident: Annotated[int, Field(ge=0, lt=2**63), _below("seen", "incident")] = 0
    """As large as a report may number it: one that could not be kept would be new in each reconcile."""
    seen_round: Annotated[_Number, _below("seen", "round")] = 0
    """The round that the last incident belongs to."""
    recent: tuple[Restart, ...] = ()
    allowed: Annotated[_Number | None, Field(validation_alias="max", exclude=True)] = field(default=None, compare=False)
    """recovery.maxRestarts when the status was written last."""

    def limit(self, most: int) -> int:
        """recovery.maxRestarts as `display` has it; `most`, the spec's, where the status does not say it."""
        return most if self.allowed is None else self.allowed


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A Kubernetes node that the scheduler should avoid for new pods."""

    node: str
    until: _Time
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """One entry of `status.notifications`: the last one of its kind."""

    event: NotifyEvent
    id: str
    """Of this notification alone, and the same whenever it is sent again."""
    time: _Time
    state: NotificationState = NotificationState.PENDING
    message: Annotated[str, _OMIT_EMPTY] = ""
    """Why it was given up."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """`status`."""

    __pydantic_config__ = CONFIG
    observed_generation: _Number = 0
    phase: Annotated[Phase | None, _OMIT_EMPTY] = None
    conditions: tuple[Condition, ...] = ()
    selector: Annotated[str, _OMIT_EMPTY] = ""
    runtime: Annotated[str, _OMIT_EMPTY] = ""
    start_time: _OptionalTime = None
    completion_time: _OptionalTime = None
    template_hash: Annotated[str, _OMIT_EMPTY] = ""
    round: _Number = 0
    rendezvous: RendezvousStatus = field(default_factory=RendezvousStatus)
    gang: Annotated[GangStatus | None, _OMIT_EMPTY] = None
    """None: the generation's pods are scheduled one by one."""
    queue: Annotated[QueueStatus | None, _OMIT_EMPTY] = None
    """None: the job has no quota, since it is in no queue or waits in one."""
    job_class: Annotated[JobClass | None, _OMIT_EMPTY] = None
    """As it was when the job started or was last resumed; None: none has been taken."""
    active: Annotated[_Number, _below("nodes", "active")] = 0
    """Pods that exist and have not ended, spares left out."""
    ready: Annotated[_Number, _below("nodes", "ready")] = 0
    """Pods that train."""
    spare: Annotated[_Number, _below("nodes", "spare")] = 0
    """Pods that are ready to take over at once."""
    slots: tuple[Slot, ...] = ()
    rank_order: Annotated[tuple[_Number, ...], _OMIT_EMPTY] = ()
    """Indices of the last group's nodes in the order of their ranks; empty: that of the indices."""
    highest_attempt: _Number = 0
    """Of any slot so far."""
    avoided_nodes: Annotated[tuple[AvoidedNode, ...], _OMIT_EMPTY] = ()
    restarts: Restarts = field(default_factory=Restarts)
    notifications: Annotated[tuple[Notification, ...], _OMIT_EMPTY] = ()
    progress: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    trained: Annotated[bool, _OMIT_EMPTY] = False
    """Whether it has made a step, or has run for so long that it must be assumed."""
    claim_made: Annotated[bool, _OMIT_EMPTY] = False
    """Whether the claim of its claimTemplate has existed: one that is gone then took the checkpoints with it."""

    def slot(self, index: int | None) -> Slot | None:
        """The slot of an index that may be anything: reports are written in the user's image."""
        return self.slots[index] if index is not None and 0 <= index < len(self.slots) else None

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of a type, if it was ever set."""
        return next((c for c in self.conditions if c.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Whether a condition is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status

    def nodes_display(self, spec: JobSpec) -> str:
        """`2/2 +1`: nodes that train or have succeeded, of those wanted, and spares."""
        wanted = self._wanted(spec)
        present = min(wanted, self.ready + sum(s.state is SlotState.SUCCEEDED for s in self.slots))
        return f"{present}/{wanted}" + (f" +{self.spare}" if self.spare else "")

    def _wanted(self, spec: JobSpec) -> int:
        """What a job that has ended had is not changed by its spec any more."""
        return self.rendezvous.nodes if self.terminal and self.rendezvous.nodes else spec.nodes

    @property
    def gang_waits(self) -> bool:
        """Whether the generation has a gang that has not been placed yet."""
        return self.gang is not None and not self.gang.placed

    def ended_without_recovery(self, restart: Restart) -> bool:
        """Whether a suspension has cut it short: what happened then is no recovery, and ended with the job's pods."""
        return restart.seconds is None and (self.start_time is None or restart.time < self.start_time)

    @property
    def terminal(self) -> bool:
        """Whether the job is Complete or Failed."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> JobStatus:
        """Read a `status`, also of another release: unknown fields are ignored. An empty one is a new job's.

        Raises for no JSON object: a field that cannot be read is left out, and so is an object that lacks what it must
        have. The CRD admits some of that, and a file with a job's record may hold anything.
        """
        return _validated({**status, "slots": _expanded(status.get("slots") or ())})

    def write(self, spec: JobSpec) -> Json:
        """The object's `status`, with what is derived for display."""
        written: Json = _STATUS.dump_python(self, mode="json", by_alias=True)
        if len(self.slots) >= COMPACT_FROM:
            written["slots"] = _compact(written["slots"])
        written["nodes"] = {
            "wanted": self._wanted(spec),
            "active": self.active,
            "ready": self.ready,
            "spare": self.spare,
        }
        written["nodes"]["display"] = self.nodes_display(spec)
        counts, most = self.restarts, spec.recovery.max_restarts
        allowed = counts.limit(most) if self.terminal else most
        seen = {"generation": counts.seen_generation, "incident": counts.seen_incident, "round": counts.seen_round}
        display = f"{counts.counted}/{allowed}" + (f" +{counts.uncounted}" if counts.uncounted else "")
        written["restarts"] |= {"max": allowed, "display": display, "seen": seen}
        return written


COMPACT_FROM = 100
"""Slots from which on equal ones in a row are written as one entry; 1,024 of them would be 100 KB at each write."""
_MOST_SLOTS = 4096


def _compact(slots: list[Json]) -> list[Json]:
    """Slots that differ in their node alone, and follow each other, as one entry with `count` and `nodes`."""
    entries: list[Json] = []
    for alike, run in groupby(slots, key=lambda slot: {k: v for k, v in slot.items() if k != "node"}):
        nodes = [slot.get("node", "") for slot in run]
        if len(nodes) == 1:
            entries.append(alike | ({"node": nodes[0]} if nodes[0] else {}))
        else:
            entries.append(alike | {"count": len(nodes)} | ({"nodes": nodes} if any(nodes) else {}))
    return entries


def _expanded(entries: Any) -> Any:
    """One entry for each slot, of the first _MOST_SLOTS. An entry that nobody has written stands for one."""
    if not isinstance(entries, list | tuple):
        return ()
    if len(entries) <= _MOST_SLOTS and not any(isinstance(e, Mapping) and "count" in e for e in entries):
        return entries
    slots: list[Json] = []
    for entry in entries[:_MOST_SLOTS]:
        if not isinstance(entry, Mapping):
            continue
        count, nodes = entry.get("count", 1), entry.get("nodes")
        nodes = nodes if isinstance(nodes, list | tuple) else ()
        if not isinstance(count, int) or not 1 <= count <= _MOST_SLOTS - len(slots):
            count = 1
        alike = {key: value for key, value in entry.items() if key not in ("count", "nodes")}
        slots += [alike | {"node": node} for node in nodes] if len(nodes) == count else [alike] * count
    return slots[:_MOST_SLOTS]


def _validated(status: Json) -> JobStatus:
    """Without the fields that cannot be read, and then without the objects that lack what they must have."""
    try:
        return _STATUS.validate_python(status)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    kept = deepcopy(status)
    paths = dict.fromkeys(p["loc"][:-1] if p["type"] == "missing" else p["loc"] for p in problems)
    for path in reversed(paths):  # the last item of a list first
        _leave_out(kept, path)
    return _validated(kept) if kept != status else JobStatus()


def _leave_out(here: Any, path: tuple[int | str, ...]) -> None:
    """Deletes what is at the path, unless a part of the path is gone already."""
    for position, key in enumerate(path, 1):
        if key not in (range(len(here)) if isinstance(here, list) else here):
            return
        if position == len(path):
            del here[key]
        else:
            here = here[key]


_STATUS = TypeAdapter(JobStatus)
