"""`status` of a DDPJob as frozen dataclasses, which pydantic reads and writes.

docs/decisions/0022 explains why some names say "node" for a machine.
"""

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
    """State of a slot's current pod; see docs/architecture.md."""

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
    """Set only with spec.preflight."""
    RANKS_ORDERED = "RanksOrdered"
    """Set only with spec.rankOrder: whether the ranks of the running group follow it."""
    ISOLATED = "Isolated"
    """Set only if something prevents the isolation that spec.network asks for."""
    ADMITTED = "Admitted"
    """Set only for a job in a Kueue queue: whether the queue has granted the quota to run."""
    NODES_HEALTHY = "NodesHealthy"
    """Set only while a pod stays on a Kubernetes node that a health agent reports as unhealthy."""
    RANKS_KEEP_PACE = "RanksKeepPace"
    """Set only while a clearly slow rank keeps its place, because no spare replaces it."""
    CHECKPOINTS_COPIED = "CheckpointsCopied"
    """Set only if checkpoints do not reach the bucket, although they should."""
    SNAPSHOTS_HELD = "SnapshotsHeld"
    """Set only if the newest states did not fit into the memory of a pod."""
    NOTIFIES = "Notifies"
    """Set only if the job's namespace may not use the receiver that spec.notify names."""
    CLASS_APPLIED = "ClassApplied"
    """Set only with spec.className: whether the job has the class's values and stays within the
    class's limits."""


class NotificationState(StrEnum):
    """State of a notification."""

    PENDING = "Pending"
    DELIVERED = "Delivered"
    GIVEN_UP = "GivenUp"


class Phase(StrEnum):
    """Summary of the conditions, only for display. Decisions do not depend on it."""

    QUEUED = "Queued"
    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


def utc_now() -> datetime:
    """Return the current time, timezone-aware."""
    return datetime.now(UTC)


def parse_time(text: str | None) -> datetime | None:
    """Convert RFC 3339 to an aware datetime; None stays None."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def known_time(text: Any) -> datetime | None:
    """Parse a time from untrusted text.

    Return None if it is not a usable time (no time zone, or out of range).
    """
    try:
        return _computable(datetime.fromisoformat(text))
    except (TypeError, ValueError):
        return None


def _computable(moment: datetime) -> datetime:
    if moment.tzinfo is None or not 1970 <= moment.year < 9000:
        raise ValueError("a time without a zone, or too close to datetime.max")
    return moment


def format_time(moment: datetime | None) -> str | None:
    """Format an aware datetime as RFC 3339 in UTC, to the second; None stays None."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None


_OMIT_EMPTY = Field(exclude_if=not_)
"""Omits a field that is None, empty or 0 when the status is written."""
_OMIT_NONE = Field(exclude_if=lambda value: value is None)
_MOST = 10**9
"""Maximum value of a number that is read from a status. The API server stores larger ones too, so a
count at this maximum can still be incremented."""
_Number = Annotated[int, Field(ge=0, le=_MOST)]
_Seconds = Annotated[int, Field(ge=0, lt=2**53)]
"""A number of seconds, summed over many devices. JSON readers represent every value below 2**53
exactly."""
_Moment = Annotated[datetime, AfterValidator(_computable)]
_Time = Annotated[_Moment, PlainSerializer(format_time)]
_OptionalTime = Annotated[_Moment | None, PlainSerializer(format_time), _OMIT_EMPTY]
_Status = Annotated[bool, BeforeValidator(lambda text: text == "True"), PlainSerializer(str)]


def _below(*path: str) -> Any:
    """Declare a field that the CRD nests in a separate object.

    It is read from `path`, and JobStatus.write writes it.
    """
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
    """The job's round when the pod was created. The pod was not part of any earlier round."""
    reason: Annotated[str, _OMIT_EMPTY] = ""
    failures: Annotated[_Number, _OMIT_EMPTY] = 0
    """How many consecutive pods of the slot ended for `reason` soon after they had started."""
    not_before: _OptionalTime = None
    lost_since: _OptionalTime = None


@dataclass(frozen=True, kw_only=True)
class RendezvousStatus:
    generation: _Number = 0
    attempt: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of coordinators of this generation before the current one."""
    failures: Annotated[_Number, _OMIT_EMPTY] = 0
    """How many consecutive coordinators ended soon after they had started."""
    not_before: _OptionalTime = None
    state: SlotState = SlotState.PLANNED
    endpoint: str = ""
    nodes: _Number = 0
    """The number of nodes for which the slots were last planned."""


@dataclass(frozen=True, kw_only=True)
class GangStatus:
    """The gang of a generation, as decided when the generation began."""

    nodes: _Number = 0
    """Slots 0 to nodes - 1 are in the gang."""
    placed: Annotated[bool, _OMIT_EMPTY] = False
    """Whether the whole gang has been scheduled. Later pods are scheduled one by one."""


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """How many GPUs the job's pods hold, and since when."""

    held: _Number = 0
    since: _Time


@dataclass(frozen=True, kw_only=True)
class PodChanges:
    """Fields that the queue's flavor and its admission checks add to pods of one kind."""

    node_selector: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    tolerations: Annotated[tuple[Json, ...], _OMIT_EMPTY] = ()
    labels: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    annotations: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class QuotaShare:
    """Additional quota of an elastic job, granted after its first quota."""

    workload: str
    """Name of the Workload that holds this quota."""
    uid: str
    """UID of the Workload."""
    pods: _Number = 0
    """Number of the slots' pods that this quota covers."""
    node: PodChanges = field(default_factory=PodChanges)


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """The quota that Kueue has granted to the job."""

    workload: str
    """Name of the Workload that holds the quota."""
    uid: str
    """UID of the Workload."""
    cluster_queue: Annotated[str, _OMIT_EMPTY] = ""
    pods: _Number = 0
    """Number of the slots' pods that the quota covers, with `more`, but without the coordinator's
    own pod."""
    node: PodChanges = field(default_factory=PodChanges)
    coordinator: PodChanges = field(default_factory=PodChanges)
    more: Annotated[tuple[QuotaShare, ...], _OMIT_EMPTY] = ()
    """Additional quota. The last slots use it, in this order."""

    @property
    def uids(self) -> frozenset[str]:
        """UIDs of all Workloads that hold the quota."""
        return frozenset({self.uid, *(share.uid for share in self.more)})

    def changes_of(self, index: int) -> PodChanges:
        """Return the fields that the queue adds to the pod of a slot."""
        first = self.pods
        for share in reversed(self.more):
            first -= share.pods
            if index >= first:
                return share.node
        return self.node


@dataclass(frozen=True, kw_only=True)
class ClassLimits:
    """Limits for every job of a class. None or empty means no limit."""

    max_nodes: Annotated[_Number | None, _OMIT_NONE] = None
    """Maximum number of nodes and spares together."""
    max_gpus_per_node: Annotated[_Number | None, _OMIT_NONE] = None
    images: Annotated[tuple[str, ...], _OMIT_EMPTY] = ()
    """Allowed images of all containers; a final `*` makes an entry a prefix."""


@dataclass(frozen=True, kw_only=True)
class JobClass:
    """The values and restrictions that the platform team sets for jobs of a class."""

    name: str
    mark: str
    """Hash of the content: two classes with the same name and mark are equal."""
    spec: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    """The class's values, for a subset of CLASS_FIELDS."""
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
    """The slot; None for the coordinator and for causes that concern the whole group."""
    node: Annotated[str, _OMIT_EMPTY] = ""
    rank: Annotated[_Number | None, _OMIT_NONE] = None
    seconds: Annotated[float | None, _OMIT_NONE] = None
    """Seconds from the break until the group ran again; None if it has not."""
    repeated_steps: Annotated[_Number | None, _OMIT_NONE] = None
    """Number of complete steps that were repeated; None if unknown."""
    repeated_seconds: Annotated[float | None, _OMIT_NONE] = None
    """Seconds spent on the repeated steps; None until all of them have been repeated."""
    continued_from: Annotated[str, _OMIT_EMPTY] = ""
    """The source from which training continued: memory, storage, scratch, or unknown if the script
    has not reported it; empty until the first step.
    """
    round: Annotated[_Number, _OMIT_EMPTY] = 0
    """The round that began with this restart."""
    consequence: Annotated[bool, _OMIT_EMPTY] = False
    """Whether another failure in the same round caused this one."""
    everywhere: Annotated[bool, _OMIT_EMPTY] = False
    """Whether ranks of other pods failed with the same error in the round that broke. In a job with
    one pod, whether other ranks of that pod did."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    counted: _Number = 0
    """Number of counted restarts since the budget was last reset."""
    uncounted: _Number = 0
    total: _Number = 0
    """Number of all restarts since the job started."""
    last_counted: _OptionalTime = None
    seen_generation: Annotated[_Number, _below("seen", "generation")] = 0
    seen_incident: Annotated[int, Field(ge=0, lt=2**63), _below("seen", "incident")] = 0
    """Number of the last incident that was handled.

    The limit is the same as in a coordinator's report. If it were lower, some numbers could not be
    read back, and their incidents would look new at each reconcile.
    """
    seen_round: Annotated[_Number, _below("seen", "round")] = 0
    """The round of the last incident."""
    repeated_steps: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of complete steps that are known to have been repeated since the job started."""
    repeated_seconds: Annotated[float, _OMIT_EMPTY] = 0.0
    """Seconds that are known to have been spent on repeated steps since the job started."""
    unknown_repeats: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of restarts with an unknown number of repeated steps."""
    seen_start: Annotated[str, _below("seen", "start")] = ""
    """GENERATION.ROUND of the coordinator's last round whose repeated steps are counted."""
    recent: tuple[Restart, ...] = ()
    allowed: Annotated[_Number | None, Field(validation_alias="max", exclude=True)] = field(default=None, compare=False)
    """recovery.maxRestarts when the status was last written."""

    def limit(self, most: int) -> int:
        """Return recovery.maxRestarts for `display`.

        If the status does not have it, return `most`, the spec's value.
        """
        return most if self.allowed is None else self.allowed


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A Kubernetes node that the scheduler should avoid for new pods."""

    node: str
    until: _Time
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """One entry of `status.notifications`: the latest of its kind."""

    event: NotifyEvent
    id: str
    """Unique to this notification. A retry has the same id."""
    time: _Time
    state: NotificationState = NotificationState.PENDING
    message: Annotated[str, _OMIT_EMPTY] = ""
    """Why the notification was abandoned."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The whole `status` of a job."""

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
    """None if the generation's pods are scheduled one by one."""
    queue: Annotated[QueueStatus | None, _OMIT_EMPTY] = None
    """None if the job has no quota, because it is not in a queue or is still waiting in one."""
    job_class: Annotated[JobClass | None, _OMIT_EMPTY] = None
    """The class as it was when the job started or last resumed; None if no class applies to the
    job."""
    active: Annotated[_Number, _below("nodes", "active")] = 0
    """Number of pods that exist and have not ended, spares excluded."""
    ready: Annotated[_Number, _below("nodes", "ready")] = 0
    """Number of pods that train."""
    spare: Annotated[_Number, _below("nodes", "spare")] = 0
    """Number of pods that are ready to take over immediately."""
    slots: tuple[Slot, ...] = ()
    rank_order: Annotated[tuple[_Number, ...], _OMIT_EMPTY] = ()
    """Indices of the last group's nodes, in rank order. Empty if ranks follow the indices."""
    highest_attempt: _Number = 0
    """The highest attempt of any slot so far."""
    avoided_nodes: Annotated[tuple[AvoidedNode, ...], _OMIT_EMPTY] = ()
    restarts: Restarts = field(default_factory=Restarts)
    notifications: Annotated[tuple[Notification, ...], _OMIT_EMPTY] = ()
    gpu_seconds: Annotated[_Seconds, _OMIT_EMPTY] = 0
    """GPU seconds of all pods from the job's start to `gpu_use.since`; see core/status."""
    gpu_use: Annotated[GpuUse | None, _OMIT_EMPTY] = None
    """None if the job's pods hold no GPUs."""
    progress: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    former_keys: Annotated[tuple[str, ...], _OMIT_EMPTY] = ()
    """Marks of the operator keys that a later key has replaced; see `slots.is_superseded`."""
    trained: Annotated[bool, _OMIT_EMPTY] = False
    """Whether the job has taken a step, or has run long enough that it must be assumed to have done
    so.
    """
    claim_made: Annotated[bool, _OMIT_EMPTY] = False
    """Whether the claim of the job's claimTemplate has ever existed. If it has and is now gone, the
    checkpoints are lost."""

    def slot(self, index: int | None) -> Slot | None:
        """Return the slot with an index, or None.

        The index may be out of range, because reports come from code in the user's image.
        """
        return self.slots[index] if index is not None and 0 <= index < len(self.slots) else None

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of a type; None if it was never set."""
        return next((c for c in self.conditions if c.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Return whether a condition is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status

    def nodes_display(self, spec: JobSpec) -> str:
        """Return a string such as `2/2 +1`: nodes that train or have succeeded, nodes wanted, and
        spares.

        A job may be complete before its last pods have exited, or after their slots were planned
        again.
        """
        wanted, complete = self._wanted(spec), self.holds(ConditionType.COMPLETE)
        done = {SlotState.SUCCEEDED, SlotState.RUNNING} if complete else {SlotState.SUCCEEDED}
        present = min(wanted, self.ready + sum(s.state in done for s in self.slots))
        if complete and not present:
            present = wanted
        return f"{present}/{wanted}" + (f" +{self.spare}" if self.spare else "")

    def _wanted(self, spec: JobSpec) -> int:
        """Return the number of nodes wanted.

        Changes to the spec of a finished job are ignored.
        """
        return self.rendezvous.nodes if self.terminal and self.rendezvous.nodes else spec.nodes

    @property
    def gang_waits(self) -> bool:
        """Whether the generation has a gang that has not been placed yet."""
        return self.gang is not None and not self.gang.placed

    def ended_without_recovery(self, restart: Restart) -> bool:
        """Whether a suspension cut this restart short.

        The restart was never completed, because the suspension removed the job's pods.
        """
        return restart.seconds is None and (self.start_time is None or restart.time < self.start_time)

    @property
    def terminal(self) -> bool:
        """Whether the job is Complete or Failed."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> JobStatus:
        """Read a `status`.

        Unknown fields are ignored, because a different release may have written the status. Fields
        that cannot be read and objects that lack a required field are ignored too, because the CRD
        admits some of them, and a file with a job's record can hold anything. An empty status
        belongs to a new job. Raises an error if `status` is not a JSON object.
        """
        return _validated({**status, "slots": _expanded(status.get("slots") or ())})

    def write(self, spec: JobSpec) -> Json:
        """Return the object's `status`, including fields that are derived for display."""
        written: Json = _STATUS.dump_python(self, mode="json", by_alias=True)
        if len(self.slots) >= COMPACT_FROM:
            written["slots"] = _compact(written["slots"])
        written |= {"image": spec.image} if spec.image else {}
        written["nodes"] = {
            "wanted": self._wanted(spec),
            "active": self.active,
            "ready": self.ready,
            "spare": self.spare,
        }
        written["nodes"]["display"] = self.nodes_display(spec)
        counts, most = self.restarts, spec.recovery.max_restarts
        allowed = counts.limit(most) if self.terminal else most
        seen: Json = {
            "generation": counts.seen_generation,
            "incident": counts.seen_incident,
            "round": counts.seen_round,
        }
        seen |= {"start": counts.seen_start} if counts.seen_start else {}
        display = f"{counts.counted}/{allowed}" + (f" +{counts.uncounted}" if counts.uncounted else "")
        written["restarts"] |= {"max": allowed, "display": display, "seen": seen}
        return written


COMPACT_FROM = 100
"""Minimum number of slots for which consecutive equal slots are written as one entry. 1,024
separate entries would be 100 KB per write."""
_MOST_SLOTS = 4096


def _compact(slots: list[Json]) -> list[Json]:
    """Write consecutive slots that differ only in their Kubernetes node as one entry.

    The entry has `count` and `nodes`.
    """
    entries: list[Json] = []
    for alike, run in groupby(slots, key=lambda slot: {k: v for k, v in slot.items() if k != "node"}):
        nodes = [slot.get("node", "") for slot in run]
        if len(nodes) == 1:
            entries.append(alike | ({"node": nodes[0]} if nodes[0] else {}))
        else:
            entries.append(alike | {"count": len(nodes)} | ({"nodes": nodes} if any(nodes) else {}))
    return entries


def _expanded(entries: Any) -> Any:
    """Return one entry for each slot, up to _MOST_SLOTS.

    An entry with an invalid `count` counts as one slot.
    """
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
    """Read a status without its invalid parts.

    Invalid fields are dropped first, then objects that lack required fields.
    """
    try:
        return _STATUS.validate_python(status)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    kept = deepcopy(status)
    paths = dict.fromkeys(p["loc"][:-1] if p["type"] == "missing" else p["loc"] for p in problems)
    for path in reversed(paths):  # Deleting from the end of a list keeps earlier indices valid.
        _leave_out(kept, path)
    return _validated(kept) if kept != status else JobStatus()


def _leave_out(here: Any, path: tuple[int | str, ...]) -> None:
    """Delete the value at the path, unless part of the path is already gone."""
    for position, key in enumerate(path, 1):
        if key not in (range(len(here)) if isinstance(here, list) else here):
            return
        if position == len(path):
            del here[key]
        else:
            here = here[key]


_STATUS = TypeAdapter(JobStatus)
