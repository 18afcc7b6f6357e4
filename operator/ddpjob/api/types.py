"""The DDPJob of `ddpjob.io/v1alpha1` as frozen dataclasses, which pydantic reads and writes.

The CRD file is the only source of names, defaults and ranges. A field that has a default there has none here:
`JobSpec.read` fills in the CRD's defaults first, so that a spec can be read under a CRD of another release too.
A default here is the value of a field that is absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import groupby
from operator import itemgetter, not_
from typing import Annotated, Any

from ddpjob_runtime.protocol import Mode
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic.alias_generators import to_camel

from ddpjob.api.schema import apply_defaults, default_of, schema_of, without_nulls

GROUP, VERSION, KIND, PLURAL = "ddpjob.io", "v1alpha1", "DDPJob", "ddpjobs"
API_VERSION = f"{GROUP}/{VERSION}"

POD_DEFAULTS = 1
"""What new jobs' pods get where the spec is silent. 1: a security context, and limits of the coordinator."""

Json = dict[str, Any]
"""A JSON object at the edge: a manifest or a part of one."""


class Placement(StrEnum):
    """Where the coordinator and the rendezvous store run."""

    DEDICATED = "Dedicated"
    MASTER = "Master"


class RuleCause(StrEnum):
    """The cause that a rule of `recovery.rules` matches."""

    OOM_KILLED = "OOMKilled"
    EXIT_CODE = "ExitCode"
    DISRUPTION = "Disruption"
    NODE_LOST = "NodeLost"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"


class RuleAction(StrEnum):
    """What a matching rule does."""

    RESTART = "Restart"
    RESTART_UNCOUNTED = "RestartUncounted"
    FAIL = "Fail"


class CleanPodPolicy(StrEnum):
    """Which pods are deleted when the job ends."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


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
    ISOLATED = "Isolated"
    """Only set where something prevents the isolation that spec.network asks for."""


class Phase(StrEnum):
    """Summary of the conditions for display; no decision depends on it."""

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


_CONFIG = ConfigDict(alias_generator=to_camel, defer_build=True)
"""Applies to the dataclass that has it and to those nested in it. They are built for pydantic at the first read."""


# --- spec -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A volume of the node pods: exactly one of claim_name, host_path and nfs is set."""

    mount_path: str
    claim_name: str | None = None
    host_path: str | None = None
    nfs: Json | None = None
    sub_path: str | None = None
    read_only: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointVolume(Volume):
    """The volume of the checkpoints."""

    shared: bool

    @property
    def seen_by_every_node(self) -> bool:
        """Whether all pods see the same files."""
        return self.host_path is None or self.shared


@dataclass(frozen=True, kw_only=True)
class Storage:
    data: Volume | None = None
    checkpoints: CheckpointVolume | None = None
    shared_memory: Annotated[str, BeforeValidator(str)]

    @property
    def checkpoint_path(self) -> str:
        """Path of the checkpoints in the container. Without `checkpoints` it holds a folder of the pod's own."""
        return self.checkpoints.mount_path if self.checkpoints else default_of("spec.storage.checkpoints.mountPath")

    @property
    def claims(self) -> tuple[str, ...]:
        """Names of the PersistentVolumeClaims, each once."""
        volumes = (self.data, self.checkpoints)
        return tuple(dict.fromkeys(v.claim_name for v in volumes if v and v.claim_name))


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    placement: Placement
    port: int
    join_timeout_seconds: int
    resources: Json

    @property
    def endpoint_port(self) -> int:
        """The coordinator's own port; the store's is `port`."""
        return self.port + 1


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Bounds of `nodes`."""

    min_nodes: int
    max_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Seconds to wait before a restart after a repeated failure: `initial`, doubled each time, at most `maximum`."""

    initial: Annotated[float, Field(alias="initialSeconds")]
    maximum: Annotated[float, Field(alias="maxSeconds")]

    def seconds(self, failures: int) -> float:
        """The wait after this many failures in a row; none after the first."""
        return 0.0 if failures < 2 else min(self.maximum, self.initial * 2.0 ** min(failures - 2, 40))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of `recovery.rules`; without exit codes it matches all of them."""

    cause: Annotated[RuleCause, Field(validation_alias=AliasChoices("cause", "on"))]
    action: RuleAction
    exit_codes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recovery:
    mode: Mode
    max_restarts: int
    reset_after_seconds: int
    backoff: Backoff
    rules: tuple[Rule, ...] = ()
    node_lost_after_seconds: int
    hang_after_seconds: int | None = None
    """None: a step that is overdue is reported, and the group is left alone."""


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    suspend: bool
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy
    failed_pods_kept: int


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    one_pod_per_node: bool
    topology_key: str
    disruption_budget: bool


@dataclass(frozen=True, kw_only=True)
class Network:
    """Who reaches the job's pods."""

    isolate: bool


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """`spec`, with the CRD's defaults."""

    __pydantic_config__ = _CONFIG
    image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[Annotated[str, BeforeValidator(itemgetter("name"))], ...] = ()
    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    torchrun_args: tuple[str, ...] = ()
    env: tuple[Json, ...] = ()
    env_from: tuple[Json, ...] = ()
    working_dir: str | None = None
    nodes: int
    elastic: Elastic | None = None
    spares: int
    procs_per_node: int
    gpus_per_node: int
    gpu_resource: str
    resources: Json
    backend: str
    rendezvous: Rendezvous
    recovery: Recovery
    run_policy: RunPolicy
    scheduling: Scheduling
    network: Network
    storage: Storage
    pod_template: Json
    template_hash: str
    """Changes with every field that a running pod cannot adopt."""

    @property
    def under_torchrun(self) -> bool:
        """False for `command`: then no process in the node pods talks to the coordinator."""
        return not self.command

    @property
    def fast(self) -> bool:
        """Whether recovery.mode is Fast."""
        return self.recovery.mode is Mode.FAST

    @property
    def min_nodes(self) -> int:
        """The least number of nodes to train with."""
        return self.elastic.min_nodes if self.elastic else self.nodes

    @property
    def on_host_network(self) -> bool:
        """Whether podTemplate puts the node pods on their hosts' network, where no NetworkPolicy applies."""
        pod = self.pod_template.get("spec")
        return isinstance(pod, Mapping) and bool(pod.get("hostNetwork"))

    @property
    def isolated(self) -> bool:
        """Whether a NetworkPolicy closes the job's pods to others."""
        return self.network.isolate and not self.on_host_network

    @property
    def pods(self) -> int:
        """Node pods wanted, spares included."""
        return self.nodes + self.spares

    @classmethod
    def read(cls, spec: Mapping[str, Any]) -> JobSpec:
        """Read a `spec`, with or without the CRD's defaults. Raises ValueError for one that does not fit the CRD."""
        full = apply_defaults(spec, schema_of("spec"))
        full.setdefault("procsPerNode", max(full["gpusPerNode"], 1))
        full["podTemplate"] = without_nulls(full["podTemplate"])
        full["templateHash"] = _template_hash(spec, full["recovery"]["mode"])
        return _SPEC.validate_python(full)


_CHANGEABLE = ("nodes", "elastic", "spares", "recovery", "runPolicy")
"""Fields that running pods adopt, but for recovery.mode."""
_FIRST_DEFAULTS = frozenset(
    {
        *("gpusPerNode", "gpuResource", "resources", "backend", "podTemplate"),
        *("rendezvous", "rendezvous.placement", "rendezvous.port", "rendezvous.joinTimeoutSeconds"),
        *("rendezvous.resources", "rendezvous.resources.requests"),
        *("scheduling", "scheduling.onePodPerNode", "scheduling.topologyKey"),
        *("storage", "storage.data.mountPath", "storage.data.readOnly", "storage.sharedMemory"),
        *("storage.checkpoints.mountPath", "storage.checkpoints.readOnly", "storage.checkpoints.shared"),
    }
)
"""Fields that had a default in the first release: every stored spec holds them, and every hash does. Never add one."""


def _template_hash(spec: Mapping[str, Any], mode: str) -> str:
    """Hash of what pods are made from: no upgrade of the CRD may change it, since that replaces all running pods.

    A spec is read with the defaults of the CRD in the cluster. Left out are therefore later fields
    that have their defaults, and fields that this operator does not know.
    """
    fixed = {key: value for key, value in spec.items() if key not in _CHANGEABLE}
    hashed = _without_later(fixed, schema_of("spec"), "") | {"recovery.mode": mode}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:10]


def _without_later(value: Any, schema: Mapping[str, Any], path: str) -> Any:
    if isinstance(value, list):
        return [_without_later(item, schema.get("items") or {}, path) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, Mapping) or not properties or "x-kubernetes-preserve-unknown-fields" in schema:
        return value
    kept = {}
    for name, item in value.items():
        known, below = properties.get(name), f"{path}.{name}".lstrip(".")
        if known is None:
            continue
        item = _without_later(item, known, below)
        default = apply_defaults(known.get("default"), known)
        if below in _FIRST_DEFAULTS or "default" not in known or item != _without_later(default, known, below):
            kept[name] = item
    return kept


# --- status -----------------------------------------------------------------------------------------------------

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
class Restart:
    """One entry of `status.restarts.recent`."""

    time: _Time
    pod: str
    reason: str
    message: str
    counted: bool
    index: Annotated[_Number | None, _OMIT_NONE] = None
    """The slot; None for the coordinator."""
    node: Annotated[str, _OMIT_EMPTY] = ""
    rank: Annotated[_Number | None, _OMIT_NONE] = None
    seconds: Annotated[float | None, _OMIT_NONE] = None
    """From the break until the group ran again; None while it does not."""
    round: Annotated[_Number, _OMIT_EMPTY] = 0
    """The round that began with it."""
    consequence: Annotated[bool, _OMIT_EMPTY] = False
    """Whether another failure of the same round was its cause."""


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


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A Kubernetes node that the scheduler should avoid for new pods."""

    node: str
    until: _Time
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """`status`."""

    __pydantic_config__ = _CONFIG
    observed_generation: _Number = 0
    phase: Annotated[Phase | None, _OMIT_EMPTY] = None
    conditions: tuple[Condition, ...] = ()
    selector: Annotated[str, _OMIT_EMPTY] = ""
    runtime: Annotated[str, _OMIT_EMPTY] = ""
    pod_defaults: Annotated[_Number, _OMIT_EMPTY] = 0
    """The defaults that the pods are built with, POD_DEFAULTS of the release that began the job."""
    start_time: _OptionalTime = None
    completion_time: _OptionalTime = None
    template_hash: Annotated[str, _OMIT_EMPTY] = ""
    round: _Number = 0
    rendezvous: RendezvousStatus = field(default_factory=RendezvousStatus)
    active: Annotated[_Number, _below("nodes", "active")] = 0
    """Pods that exist and have not ended, spares left out."""
    ready: Annotated[_Number, _below("nodes", "ready")] = 0
    """Pods that train."""
    spare: Annotated[_Number, _below("nodes", "spare")] = 0
    """Pods that are ready and do not train."""
    slots: tuple[Slot, ...] = ()
    highest_attempt: _Number = 0
    """Of any slot so far."""
    avoided_nodes: Annotated[tuple[AvoidedNode, ...], _OMIT_EMPTY] = ()
    restarts: Restarts = field(default_factory=Restarts)
    progress: Annotated[Json, _OMIT_EMPTY] = field(default_factory=dict)
    trained: Annotated[bool, _OMIT_EMPTY] = False
    """Whether it has made a step, or has run for so long that it must be assumed."""
    schema: Annotated[_Number, _OMIT_EMPTY] = 0
    """Set by the CRD in the cluster, by a default. What a CRD below 1 does not hold is not written."""

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
    def terminal(self) -> bool:
        """Whether the job is Complete or Failed."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> JobStatus:
        """Read a `status`, also of another release: unknown fields are ignored. An empty one is a new job's.

        Never raises: what no operator writes, although the CRD may admit it, is left out.
        """
        read = _validated({**status, "slots": _expanded(status.get("slots") or ())})
        # Not written by early releases.
        if "highestAttempt" not in status:
            read = replace(read, highest_attempt=max((s.attempt for s in read.slots), default=0))
        if "total" not in (status.get("restarts") or {}):
            counts = read.restarts
            read = replace(read, restarts=replace(counts, total=counts.counted + counts.uncounted))
        return read

    def write(self, spec: JobSpec) -> Json:
        """The object's `status`, with what is derived for display."""
        written: Json = _STATUS.dump_python(self, mode="json", by_alias=True)
        if not self.schema:
            written.pop("trained", None)
        elif len(self.slots) >= COMPACT_FROM:
            written["slots"] = _compact(written["slots"])
        written["nodes"] = {
            "wanted": self._wanted(spec),
            "active": self.active,
            "ready": self.ready,
            "spare": self.spare,
        }
        written["nodes"]["display"] = self.nodes_display(spec)
        counts, allowed = self.restarts, spec.recovery.max_restarts
        if self.terminal and counts.allowed is not None:
            allowed = counts.allowed
        seen = {"generation": counts.seen_generation, "incident": counts.seen_incident, "round": counts.seen_round}
        display = f"{counts.counted}/{allowed}" + (f" +{counts.uncounted}" if counts.uncounted else "")
        written["restarts"] |= {"max": allowed, "display": display, "seen": seen}
        return written


SINCE_SCHEMA = frozenset({"status.schema", "status.trained", "status.slots.count", "status.slots.nodes"})
"""Fields without which the operator works too: `JobStatus.schema` says whether the CRD in the cluster holds them."""


# --- slots of large jobs ----------------------------------------------------------------------------------------

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
        count, nodes = entry.get("count", 1), entry.get("nodes") or ()
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


_SPEC = TypeAdapter(JobSpec)
_STATUS = TypeAdapter(JobStatus)


# --- the object -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DDPJob:
    """A job as it was read: identity, spec and the status written last."""

    name: str
    namespace: str
    uid: str
    spec: JobSpec
    status: JobStatus
    generation: int = 1
    resource_version: str = ""
    created: datetime | None = None
    deleting: bool = False

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> DDPJob:
        """Read a whole object with metadata, spec and status. Raises KeyError or ValueError if it does not fit."""
        meta = body["metadata"]
        return cls(
            name=meta["name"],
            namespace=meta.get("namespace", "default"),
            uid=meta["uid"],
            spec=JobSpec.read(body["spec"]),
            status=JobStatus.read(body.get("status") or {}),
            generation=meta.get("generation", 1),
            resource_version=meta.get("resourceVersion", ""),
            created=parse_time(meta.get("creationTimestamp")),
            deleting="deletionTimestamp" in meta,
        )

    @property
    def owner_reference(self) -> Json:
        """For the metadata of the job's objects."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }
