"""Defines the `status` of a DDPJob as frozen dataclasses, which pydantic reads and writes.

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
    """State of a slot's current pod. docs/architecture.md describes slots."""

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
    """Set only for a job with spec.preflight."""
    RANKS_ORDERED = "RanksOrdered"
    """Whether the ranks of the running group are in the order that spec.rankOrder asks for. Set
    only for a job with spec.rankOrder."""
    ISOLATED = "Isolated"
    """Set only if something prevents the isolation that spec.network asks for."""
    ADMITTED = "Admitted"
    """Whether the queue has granted the quota to run. Set only for a job in a Kueue queue."""
    NODES_HEALTHY = "NodesHealthy"
    """The condition first appears when a pod of the job remains on a Kubernetes node that a health
    agent has reported as unhealthy."""
    RANKS_KEEP_PACE = "RanksKeepPace"
    """The condition first appears when a clearly slow rank keeps its pod, for example because no
    spare can take over."""
    CHECKPOINTS_COPIED = "CheckpointsCopied"
    """The condition first appears when the copying of checkpoints to the bucket falls behind."""
    SNAPSHOTS_HELD = "SnapshotsHeld"
    """The condition first appears when the latest training states do not fit into memory."""
    NOTIFIES = "Notifies"
    """Set only if the job's namespace is not allowed to use the receiver that spec.notify names."""
    CLASS_APPLIED = "ClassApplied"
    """Whether the job has the class's values and stays within the class's limits. Set only for a
    job with spec.className."""


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
    """Return the current time as a datetime with the time zone UTC."""
    return datetime.now(UTC)


def parse_time(text: str | None) -> datetime | None:
    """Parse an RFC 3339 time into a datetime with a time zone, or return None for None."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def known_time(text: Any) -> datetime | None:
    """Parse a time from untrusted text, or return None if the text is not a usable time.

    A time without a time zone is not usable, and neither is a time outside the years 1970 to 8999.
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
    """Format a time as RFC 3339 in UTC, to the second, or return None for None."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None


_OMIT_EMPTY = Field(exclude_if=not_)
"""When the status is written, omits a field that is None, empty or 0."""
_OMIT_NONE = Field(exclude_if=lambda value: value is None)
_MOST = 10**9
"""The largest number that is accepted when a status is read. The API server stores larger numbers,
so a count that has reached this maximum can still be incremented and written."""
_Number = Annotated[int, Field(ge=0, le=_MOST)]
_Seconds = Annotated[int, Field(ge=0, lt=2**53)]
"""Seconds summed over many devices. The sum must be below 2**53, because every JSON reader can
represent such integers exactly."""
_Moment = Annotated[datetime, AfterValidator(_computable)]
_Time = Annotated[_Moment, PlainSerializer(format_time)]
_OptionalTime = Annotated[_Moment | None, PlainSerializer(format_time), _OMIT_EMPTY]
_Status = Annotated[bool, BeforeValidator(lambda text: text == "True"), PlainSerializer(str)]


def _below(*path: str) -> Any:
    """Declare a dataclass field that the CRD keeps in a nested object.

    `path` is the path to the field, starting with the nested object. pydantic only reads the field,
    and `JobStatus.write` writes it.
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
    """A numbered position in the job. A slot outlives its pods."""

    attempt: _Number = 0
    state: SlotState = SlotState.PLANNED
    node: Annotated[str, _OMIT_EMPTY] = ""
    round: Annotated[_Number, _OMIT_EMPTY] = 0
    """The job's round in which the pod was created. The pod did not take part in any earlier round.
    """
    reason: Annotated[str, _OMIT_EMPTY] = ""
    failures: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of consecutive pods in this slot that ended soon after they started, all for the same
    `reason`."""
    not_before: _OptionalTime = None
    lost_since: _OptionalTime = None


@dataclass(frozen=True, kw_only=True)
class RendezvousStatus:
    generation: _Number = 0
    attempt: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of coordinators that this generation had before the current coordinator."""
    failures: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of consecutive coordinators that ended soon after starting."""
    not_before: _OptionalTime = None
    state: SlotState = SlotState.PLANNED
    endpoint: str = ""
    nodes: _Number = 0
    """The number of nodes for which the slots were last planned."""


@dataclass(frozen=True, kw_only=True)
class GangStatus:
    """The gang of a generation, whose size is fixed when the generation begins."""

    nodes: _Number = 0
    """Number of slots in the gang. The gang consists of slots 0 to nodes - 1."""
    placed: Annotated[bool, _OMIT_EMPTY] = False
    """Whether the whole gang has been scheduled. Pods that are created afterwards are scheduled one
    by one."""


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Number of GPUs that the job's pods hold, and the time up to which their use was counted."""

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
    """Additional quota that an elastic job was granted after its first quota."""

    workload: str
    """Name of the Workload that holds this quota."""
    uid: str
    """UID of the Workload."""
    pods: _Number = 0
    """Number of slot pods that this quota covers."""
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
    """Number of slot pods that the job's quota covers. The number includes the pods that the
    additional quota in `more` covers, but not the coordinator's own pod."""
    node: PodChanges = field(default_factory=PodChanges)
    coordinator: PodChanges = field(default_factory=PodChanges)
    more: Annotated[tuple[QuotaShare, ...], _OMIT_EMPTY] = ()
    """Additional shares of quota, in the order in which they were granted. The covered pods with
    the highest indices use these shares, and the last share is used by the highest of all."""

    @property
    def uids(self) -> frozenset[str]:
        """UIDs of all Workloads that hold a part of the job's quota."""
        return frozenset({self.uid, *(share.uid for share in self.more)})

    def changes_of(self, index: int) -> PodChanges:
        """Return the fields that the queue adds to the pod of the slot with this index."""
        first = self.pods
        for share in reversed(self.more):
            first -= share.pods
            if index >= first:
                return share.node
        return self.node


@dataclass(frozen=True, kw_only=True)
class ClassLimits:
    """Limits for every job of a class. A field that is None or empty sets no limit."""

    max_nodes: Annotated[_Number | None, _OMIT_NONE] = None
    """Maximum number of nodes and spares together."""
    max_gpus_per_node: Annotated[_Number | None, _OMIT_NONE] = None
    images: Annotated[tuple[str, ...], _OMIT_EMPTY] = ()
    """Images that the job's containers are allowed to use. An entry that ends in `*` allows every
    image that begins with the text before the `*`."""


@dataclass(frozen=True, kw_only=True)
class JobClass:
    """The values and restrictions that the platform team sets for jobs in a class."""

    name: str
    mark: str
    """Hash of the class's content. If two classes have the same name and the same mark, they are
    equal."""
    spec: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    """The class's values for some of the fields in CLASS_FIELDS."""
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
    """Index of the slot whose pod caused the restart. None if the coordinator or the whole group
    caused the restart.
    """
    node: Annotated[str, _OMIT_EMPTY] = ""
    rank: Annotated[_Number | None, _OMIT_NONE] = None
    seconds: Annotated[float | None, _OMIT_NONE] = None
    """Seconds from the break until the group ran again. None while the group is not running yet."""
    repeated_steps: Annotated[_Number | None, _OMIT_NONE] = None
    """Number of completed steps that the group repeated after the restart. None if the number is
    unknown."""
    repeated_seconds: Annotated[float | None, _OMIT_NONE] = None
    """Seconds that the group spent on the repeated steps. None until the group has repeated all of
    them."""
    continued_from: Annotated[str, _OMIT_EMPTY] = ""
    """Where training got the state to continue from: `memory`, `storage` or `scratch`. The value is
    `unknown` if the script has not reported the source, and empty until the first step after the
    restart."""
    round: Annotated[_Number, _OMIT_EMPTY] = 0
    """The round that began with this restart."""
    consequence: Annotated[bool, _OMIT_EMPTY] = False
    """Whether this failure was a consequence of another failure in the same round."""
    everywhere: Annotated[bool, _OMIT_EMPTY] = False
    """Whether several ranks failed with the same error in the round that broke. The ranks must be
    in different pods, unless the job has only one pod."""


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
    """Number of the last incident that the operator has handled.

    The upper limit is the same as in a coordinator's report. If it were lower, a larger number
    could be written but not read back, and the operator would treat the same incident as new in
    each reconcile.
    """
    seen_round: Annotated[_Number, _below("seen", "round")] = 0
    """Round of the last break that one of the coordinator's incidents has explained."""
    repeated_steps: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of complete steps known to have been repeated since the job started."""
    repeated_seconds: Annotated[float, _OMIT_EMPTY] = 0.0
    """Seconds known to have been spent on repeated steps since the job started."""
    unknown_repeats: Annotated[_Number, _OMIT_EMPTY] = 0
    """Number of restarts for which the number of repeated steps is unknown."""
    seen_start: Annotated[str, _below("seen", "start")] = ""
    """The coordinator's latest round whose repeated steps were counted, as GENERATION.ROUND."""
    recent: tuple[Restart, ...] = ()
    allowed: Annotated[_Number | None, Field(validation_alias="max", exclude=True)] = field(default=None, compare=False)
    """The value of recovery.maxRestarts at the time when the status was last written."""

    def limit(self, most: int) -> int:
        """Return the maximum number of restarts to display.

        This is recovery.maxRestarts from the last written status, or `most` if that status does not
        contain recovery.maxRestarts.
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
    """One entry of `status.notifications`: the latest notification about one kind of event."""

    event: NotifyEvent
    id: str
    """Identifies this notification. All attempts to deliver it use the same id."""
    time: _Time
    state: NotificationState = NotificationState.PENDING
    message: Annotated[str, _OMIT_EMPTY] = ""
    """The reason why the operator stopped trying to deliver the notification."""


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
    """The gang of the current generation. None if the generation's pods are scheduled one by
    one."""
    queue: Annotated[QueueStatus | None, _OMIT_EMPTY] = None
    """The job's quota. None if the job is not in a queue, or is still waiting in one."""
    job_class: Annotated[JobClass | None, _OMIT_EMPTY] = None
    """The job's class as it was when the job started or last resumed. None if no class applies."""
    active: Annotated[_Number, _below("nodes", "active")] = 0
    """Number of pods that exist and have not ended. Spares are not counted."""
    ready: Annotated[_Number, _below("nodes", "ready")] = 0
    """Number of pods that are currently training."""
    spare: Annotated[_Number, _below("nodes", "spare")] = 0
    """Number of spares that are ready to take over immediately."""
    slots: tuple[Slot, ...] = ()
    rank_order: Annotated[tuple[_Number, ...], _OMIT_EMPTY] = ()
    """Slot indices of the last group's nodes, in rank order. If rank order equals index order, the
    list is empty.
    """
    highest_attempt: _Number = 0
    """The highest attempt that any slot has had so far."""
    avoided_nodes: Annotated[tuple[AvoidedNode, ...], _OMIT_EMPTY] = ()
    restarts: Restarts = field(default_factory=Restarts)
    notifications: Annotated[tuple[Notification, ...], _OMIT_EMPTY] = ()
    gpu_seconds: Annotated[_Seconds, _OMIT_EMPTY] = 0
    """Sum of the GPU seconds of all pods from the job's start until `gpu_use.since`. See
    core/status.
    """
    gpu_use: Annotated[GpuUse | None, _OMIT_EMPTY] = None
    """The GPUs that the job's pods hold now. None if the pods hold no GPUs."""
    progress: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    former_keys: Annotated[tuple[str, ...], _OMIT_EMPTY] = ()
    """Marks of operator keys that were replaced by a later key. See `slots.is_superseded`."""
    trained: Annotated[bool, _OMIT_EMPTY] = False
    """Whether the job has completed a training step. If the script reports no steps, the value
    becomes true once the job has run long enough that a step can be assumed."""
    claim_made: Annotated[bool, _OMIT_EMPTY] = False
    """Whether the claim from the job's claimTemplate has ever existed. If the claim has existed and
    is gone, the checkpoints are lost."""

    def slot(self, index: int | None) -> Slot | None:
        """Return the slot with this index, or None if there is no such slot.

        The index can come from a report, and thus from code in the user's image, so it can be out
        of range.
        """
        return self.slots[index] if index is not None and 0 <= index < len(self.slots) else None

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of this type, or None if it was never set."""
        return next((c for c in self.conditions if c.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Return whether the condition of this type exists and is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status

    def nodes_display(self, spec: JobSpec) -> str:
        """Return a summary of the job's nodes, such as `2/2 +1`.

        The summary counts the nodes that train or have succeeded, the nodes wanted, and the spares.
        In a complete job, pods that still run count as succeeded. If no slot of a complete job
        shows a pod, all wanted nodes count as succeeded.
        """
        wanted, complete = self._wanted(spec), self.holds(ConditionType.COMPLETE)
        done = {SlotState.SUCCEEDED, SlotState.RUNNING} if complete else {SlotState.SUCCEEDED}
        present = min(wanted, self.ready + sum(s.state in done for s in self.slots))
        if complete and not present:
            present = wanted
        return f"{present}/{wanted}" + (f" +{self.spare}" if self.spare else "")

    def _wanted(self, spec: JobSpec) -> int:
        """Return the number of nodes that the job should have.

        For a finished job, the result is the number that the job's slots were last planned for.
        Later changes to the job's spec are ignored.
        """
        return self.rendezvous.nodes if self.terminal and self.rendezvous.nodes else spec.nodes

    @property
    def gang_waits(self) -> bool:
        """Whether the generation has a gang that has not been placed yet."""
        return self.gang is not None and not self.gang.placed

    def ended_without_recovery(self, restart: Restart) -> bool:
        """Whether the job was suspended during this restart, before the group ran again.

        The suspension removed the job's pods, so this restart will never be completed.
        """
        return restart.seconds is None and (self.start_time is None or restart.time < self.start_time)

    @property
    def terminal(self) -> bool:
        """Whether the job is Complete or Failed."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> JobStatus:
        """Read the `status` of a job.

        Unknown fields are ignored, because a different release of the operator might have written
        the status. The reader also ignores fields with invalid values, and objects that lack a
        required field. The CRD admits some of these faults, and a file with a job's record can
        contain anything.

        An empty status belongs to a new job. Raises an error if `status` is not a JSON object.
        """
        return _validated({**status, "slots": _expanded(status.get("slots") or ())})

    def write(self, spec: JobSpec) -> Json:
        """Return the job's `status` as the API server stores it.

        The result includes fields that are only for display.
        """
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
"""If a job has at least this many slots, a run of equal slots is written as one entry. Separate
entries for 1,024 slots would add 100 KB to every write."""
_MOST_SLOTS = 4096


def _compact(slots: list[Json]) -> list[Json]:
    """Combine consecutive slots into one entry if they differ only in their Kubernetes nodes.

    `count` in the entry is the number of slots, and `nodes` lists the Kubernetes nodes of the
    slots.
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
    """Expand a compact list of slots into one entry for each slot.

    An entry with an invalid `count` stands for one slot. At most _MOST_SLOTS slots are returned.
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

    A field with an invalid value is removed, and an object that lacks a required field is removed
    as a whole. Each removal can leave an enclosing object without a required field, so the function
    repeats until the status is valid.
    """
    try:
        return _STATUS.validate_python(status)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    kept = deepcopy(status)
    paths = dict.fromkeys(p["loc"][:-1] if p["type"] == "missing" else p["loc"] for p in problems)
    # Delete from the end of a list, so that the indices of the earlier entries stay valid.
    for path in reversed(paths):
        _leave_out(kept, path)
    return _validated(kept) if kept != status else JobStatus()


def _leave_out(here: Any, path: tuple[int | str, ...]) -> None:
    """Delete the value at this path. Do nothing if a part of the path is already gone."""
    for position, key in enumerate(path, 1):
        if key not in (range(len(here)) if isinstance(here, list) else here):
            return
        if position == len(path):
            del here[key]
        else:
            here = here[key]


_STATUS = TypeAdapter(JobStatus)
