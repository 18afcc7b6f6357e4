"""`spec` of a DDPJob as frozen dataclasses, which pydantic reads.

The CRD file is the only source of names, defaults and ranges. A field with a default in the CRD has
no default in its dataclass, because `JobSpec.read` fills in the CRD's defaults first. A spec can
therefore also be read under the CRD of a different release. A default in a dataclass applies to a
field that is absent and has no default in the CRD.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from ddpjob_runtime.protocol import Hangs, Mode
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.alias_generators import to_camel

from ddpjob.api.schema import apply_defaults, default_of, exceeds, schema_of, without_nulls

MANAGER = "ddpjob.io/operator"
"""The value of `spec.managedBy` for jobs that this operator runs. A missing field means the
same.
"""
Json = dict[str, Any]
"""An unparsed JSON object: a manifest or a part of one."""


# pydantic reads a validator's signature, and Python's patch releases report different signatures
# for builtins. In Python 3.12.3, an itemgetter appears to take any arguments, which pydantic
# refuses.
def _name_of(reference: Json) -> Any:
    return reference["name"]


def _as_text(value: Any) -> str:
    return str(value)


class Placement(StrEnum):
    """Where the coordinator and the rendezvous store run."""

    DEDICATED = "Dedicated"
    MASTER = "Master"


class WhenDeleted(StrEnum):
    """How a job's deletion affects the claim that it created."""

    RETAIN = "Retain"
    DELETE = "Delete"


class SlowRanks(StrEnum):
    """The reaction to a clearly slow rank."""

    MOVE = "Move"
    REPORT = "Report"


class RuleCause(StrEnum):
    """A cause that a rule in `recovery.rules` matches."""

    OOM_KILLED = "OOMKilled"
    EXIT_CODE = "ExitCode"
    DISRUPTION = "Disruption"
    NODE_LOST = "NodeLost"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"


class RuleAction(StrEnum):
    """The effect of a matching rule."""

    RESTART = "Restart"
    RESTART_UNCOUNTED = "RestartUncounted"
    FAIL = "Fail"


class CleanPodPolicy(StrEnum):
    """Which pods are deleted when the job has finished."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class NotifyEvent(StrEnum):
    """Events that `notify.events` may contain."""

    COMPLETE = "Complete"
    FAILED = "Failed"
    BUDGET_NEARLY_SPENT = "BudgetNearlySpent"


CONFIG = ConfigDict(alias_generator=to_camel, defer_build=True)
"""pydantic's configuration of a dataclass and of the dataclasses nested in it. Validators are built
on the first read."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A volume of the node pods. Exactly one of claim_name, host_path and nfs is set."""

    mount_path: str
    claim_name: str | None = None
    host_path: str | None = None
    nfs: Json | None = None
    sub_path: str | None = None
    read_only: bool


@dataclass(frozen=True, kw_only=True)
class ClaimTemplate:
    """A PersistentVolumeClaim that the job creates.

    `metadata` and `spec` are as in the claim's manifest.
    """

    when_deleted: WhenDeleted
    metadata: Json = field(default_factory=dict)
    spec: Json


@dataclass(frozen=True, kw_only=True)
class BucketVolume(Volume):
    """A volume, or a bucket that is given by its URL and the settings to reach its server."""

    url: str | None = None
    endpoint: str | None = None
    region: str | None = None
    secret_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointVolume(BucketVolume):
    """The volume for checkpoints.

    Instead of using `claim_name`, `host_path` or `nfs`, the job can create a claim or copy
    checkpoints to a bucket.
    """

    shared: bool
    exclusive: bool
    claim_template: ClaimTemplate | None = None

    @property
    def seen_by_every_node(self) -> bool:
        """Whether all pods see the same files."""
        return self.url is None and (self.host_path is None or self.shared)


@dataclass(frozen=True, kw_only=True)
class DataVolume(BucketVolume):
    """The volume of the training data.

    Instead of using `claim_name`, `host_path` or `nfs`, pods can fetch the data from a bucket into
    `cache`, a folder of their Kubernetes node, or onto a disk of their own.
    """

    cache: str | None = None

    @property
    def fetched_folder(self) -> str:
        """Name of the folder for the data from `url`.

        Data from a different URL or server gets a different folder.
        """
        text = f"{(self.endpoint or '').rstrip('/')} {(self.url or '').rstrip('/')}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class GitCode:
    """A commit of a git repository. `ref` is the branch or tag that it was resolved from."""

    url: str
    commit: str
    ref: str | None = None
    secret_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code that pods fetch before the workers start: an archive in a bucket, or a commit."""

    archive: str | None = None
    digest: str | None = None
    endpoint: str | None = None
    region: str | None = None
    secret_name: str | None = None
    git: GitCode | None = None

    @property
    def version(self) -> str:
        """The commit, or the digits of the archive's digest. Equal versions have equal content."""
        return self.git.commit if self.git else (self.digest or "").rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class Storage:
    data: DataVolume | None = None
    checkpoints: CheckpointVolume | None = None
    shared_memory: Annotated[str, BeforeValidator(_as_text)]
    snapshot_memory: Annotated[str, BeforeValidator(_as_text)]

    @property
    def checkpoint_path(self) -> str:
        """Path of the checkpoints in the container.

        Without `checkpoints`, it is a folder inside the pod.
        """
        return self.checkpoints.mount_path if self.checkpoints else default_of("spec.storage.checkpoints.mountPath")

    @property
    def url(self) -> str | None:
        """URL of the bucket that checkpoints are copied to, as written in the spec.

        None if they are not copied.
        """
        return self.checkpoints.url if self.checkpoints else None

    @property
    def claim_template(self) -> ClaimTemplate | None:
        """Template of the claim that the job creates; None if it does not create a claim."""
        return self.checkpoints.claim_template if self.checkpoints else None


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    placement: Placement
    port: int
    join_timeout_seconds: int
    resources: Json
    node_selector: Json | None = None
    tolerations: tuple[Json, ...] = ()
    runtime_class_name: str | None = None

    @property
    def pod_fields(self) -> Json:
        """These settings as fields of the coordinator's own pod spec."""
        fields: Json = {
            "nodeSelector": self.node_selector,
            "tolerations": list(self.tolerations),
            "runtimeClassName": self.runtime_class_name,
        }
        return {name: value for name, value in fields.items() if value}

    @property
    def endpoint_port(self) -> int:
        """The coordinator's own port. The port of the rendezvous store is `port`."""
        return self.port + 1

    @property
    def master_port(self) -> int:
        """MASTER_PORT for a `command`, whose processes in pod 0 can listen on this port."""
        return self.port + 2 if self.port < 65534 else self.port - 1


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Bounds for `nodes`."""

    min_nodes: int
    max_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Seconds to wait before a restart after a repeated failure.

    The wait is `initial`, and doubles each time up to `maximum`.
    """

    initial: Annotated[float, Field(alias="initialSeconds")]
    maximum: Annotated[float, Field(alias="maxSeconds")]

    def seconds(self, failures: int) -> float:
        """Return the wait after this many consecutive failures. It is 0 after the first."""
        return 0.0 if failures < 2 else min(self.maximum, self.initial * 2.0 ** min(failures - 2, 40))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of `recovery.rules`. Without exit codes, it matches every exit code."""

    cause: RuleCause
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
    snapshots: Annotated[str, BeforeValidator(_as_text)]
    """auto, none, or the number of steps between two copies."""
    hangs: Hangs
    hang_after_seconds: int | None = None
    """None means that only a proven hang restarts the group."""
    slow_ranks: SlowRanks

    @property
    def keeps_snapshots(self) -> bool:
        """Whether pods keep the newest training states in memory."""
        return self.snapshots != "none"


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    suspend: bool
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy
    failed_pods_kept: int
    logs_kept: int


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    one_pod_per_node: bool
    topology_key: str
    same_topology: str | None = None
    """Label whose value must be the same on the Kubernetes nodes of all node pods; None if their
    values may differ."""
    disruption_budget: bool
    gang: bool | None = None
    """None means that a gang is used if the cluster supports gangs."""

    @property
    def by_volcano(self) -> bool:
        """Whether Volcano places the pods, recognized by its scheduler's default name."""
        return self.scheduler_name == "volcano"


class PreflightScope(StrEnum):
    """The scope of the checks before a pod trains."""

    NODE = "Node"
    GROUP = "Group"


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Checks of new pods. With `min_megabytes_per_second=None`, any speed passes."""

    scope: PreflightScope
    timeout_seconds: int
    min_megabytes_per_second: int | None = None


@dataclass(frozen=True, kw_only=True)
class Network:
    """Access to the job's pods, and the interface through which they reach each other."""

    isolate: bool
    interface: str | None = None


@dataclass(frozen=True, kw_only=True)
class Notify:
    """The receiver to notify, and the events it is notified of."""

    receiver: str
    events: tuple[NotifyEvent, ...]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """`spec`, with the CRD's defaults."""

    __pydantic_config__ = CONFIG
    managed_by: str | None = None
    """The controller that runs the job; None means this operator."""
    class_name: str = ""
    image: str = ""
    """Empty if the image comes from a class that the status does not contain yet."""
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[Annotated[str, BeforeValidator(_name_of)], ...] = ()
    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    torchrun_args: tuple[str, ...] = ()
    env: tuple[Json, ...] = ()
    env_from: tuple[Json, ...] = ()
    working_dir: str | None = None
    code: Code | None = None
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
    rank_order: tuple[str, ...] = ()
    """Labels of Kubernetes nodes, the widest domain first. If empty, ranks follow the slots'
    indices."""
    preflight: Preflight | None = None
    network: Network
    notify: Notify | None = None
    storage: Storage
    pod_template: Json
    template_hash: str
    """Hash of the fields whose changes running pods cannot adopt."""

    @property
    def managed_elsewhere(self) -> bool:
        """Whether another controller runs the job, so that this operator ignores it."""
        return self.managed_by not in (None, MANAGER)

    @property
    def under_torchrun(self) -> bool:
        """Whether torchrun starts the workers.

        With `command`, the processes in the node pods do not talk to the coordinator.
        """
        return not self.command

    @property
    def fast(self) -> bool:
        """Whether recovery.mode is Fast."""
        return self.recovery.mode is Mode.FAST

    @property
    def min_nodes(self) -> int:
        """The minimum number of nodes that training needs."""
        return self.elastic.min_nodes if self.elastic else self.nodes

    @property
    def on_host_network(self) -> bool:
        """Whether podTemplate puts the node pods on their host's network.

        No NetworkPolicy applies there.
        """
        pod = self.pod_template.get("spec")
        return isinstance(pod, Mapping) and bool(pod.get("hostNetwork"))

    @property
    def isolated(self) -> bool:
        """Whether a NetworkPolicy isolates the job's pods."""
        return self.network.isolate and not self.on_host_network

    @property
    def pods(self) -> int:
        """Number of node pods wanted, spares included."""
        return self.nodes + self.spares

    @classmethod
    def read(cls, spec: Mapping[str, Any]) -> JobSpec:
        """Read a `spec`, with or without the CRD's defaults.

        Raises ValueError if it does not fit the CRD.
        """
        full = apply_defaults(spec, schema_of("spec"))
        full.setdefault("procsPerNode", max(full["gpusPerNode"], 1))
        full["podTemplate"] = without_nulls(full["podTemplate"])
        full["templateHash"] = _template_hash(spec, full["recovery"]["mode"])
        return _SPEC.validate_python(full)


_CHANGEABLE = ("nodes", "elastic", "spares", "recovery", "runPolicy", "notify", "rankOrder")
"""Fields, other than recovery.mode, whose changes running pods adopt."""


def _template_hash(spec: Mapping[str, Any], mode: str) -> str:
    """Hash the fields that pods are made from.

    No upgrade of the CRD may change the hash, since that would replace all running pods. A spec is
    read with the defaults of the CRD in the cluster, which may be newer. Fields with their default
    values and fields that this operator does not know are therefore excluded.
    """
    fixed = {key: value for key, value in spec.items() if key not in _CHANGEABLE}
    hashed = _without_defaults(fixed, schema_of("spec")) | {"recovery.mode": mode}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:10]


def _without_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_without_defaults(item, schema.get("items") or {}) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, Mapping) or not properties or "x-kubernetes-preserve-unknown-fields" in schema:
        return value
    kept = {}
    for name, item in value.items():
        known = properties.get(name)
        if known is None:
            continue
        item = _without_defaults(item, known)
        default = apply_defaults(known.get("default"), known)
        if "default" not in known or item != _without_defaults(default, known):
            kept[name] = item
    return kept


_SPEC = TypeAdapter(JobSpec)

# --- size limits: the operator keeps every job in memory, and users choose how large their jobs are

LARGEST_TEXT, MOST_VALUES = 256 * 1024, 5000
"""Maximum number of characters in all names and strings of a spec, and maximum number of values
(mappings, lists, strings and numbers) in it. Values are limited too, because an empty mapping takes
3 bytes in etcd and 72 in the operator."""
_SMALL_TEXT, _SMALL_VALUES = 4096, 100


def oversized(spec: Mapping[str, Any]) -> str:
    """Return the path of the oversized part of a spec, or an empty string."""
    parts = (("spec.podTemplate", spec.get("podTemplate")), ("spec", spec))
    return next((path for path, part in parts if exceeds(part, LARGEST_TEXT, MOST_VALUES)), "")


def without_large_fields(spec: Mapping[str, Any]) -> Json:
    """Return an oversized spec without its large fields."""
    return {name: value for name, value in spec.items() if not exceeds(value, _SMALL_TEXT, _SMALL_VALUES)}


def size_fault(path: str) -> str:
    """Return the error message for an oversized part of a spec."""
    most = f"{LARGEST_TEXT // 1024} KiB of text or {MOST_VALUES} values"
    return f"{path}: more than {most}, the operator's limit; move data into a ConfigMap"
