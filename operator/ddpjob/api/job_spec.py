"""Defines the `spec` of a DDPJob as frozen dataclasses, which pydantic fills from a manifest.

The CRD file is the only source of names, defaults and ranges. If the CRD has a default for a field,
the dataclass has none, because `JobSpec.read` fills in the CRD's defaults first. This makes it
possible to read a spec with the CRD of a different release. The default in a dataclass applies only
to an absent field that has no default in the CRD.
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
"""The value of `spec.managedBy` that stands for this operator. The operator also runs jobs that do
not set the field."""
Json = dict[str, Any]
"""A JSON object that has not been converted to a dataclass: a manifest or a part of one."""


# The validator must not be a builtin such as itemgetter. pydantic reads the signatures of
# validators, and different patch releases of Python report different signatures for builtins. In
# Python 3.12.3, an itemgetter seems to take any arguments, so pydantic rejects it.
def _name_of(reference: Json) -> Any:
    return reference["name"]


def _as_text(value: Any) -> str:
    return str(value)


class Placement(StrEnum):
    """The pod in which the coordinator and the rendezvous store run."""

    DEDICATED = "Dedicated"
    MASTER = "Master"


class WhenDeleted(StrEnum):
    """What happens to a job's claim when the job is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class SlowRanks(StrEnum):
    """What the operator does about a clearly slow rank."""

    MOVE = "Move"
    REPORT = "Report"


class RuleCause(StrEnum):
    """The causes that a rule in `recovery.rules` can name."""

    OOM_KILLED = "OOMKilled"
    EXIT_CODE = "ExitCode"
    DISRUPTION = "Disruption"
    NODE_LOST = "NodeLost"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"


class RuleAction(StrEnum):
    """What the operator does when a rule matches."""

    RESTART = "Restart"
    RESTART_UNCOUNTED = "RestartUncounted"
    FAIL = "Fail"


class CleanPodPolicy(StrEnum):
    """Which of a job's pods are deleted when the job has finished."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class NotifyEvent(StrEnum):
    """The kinds of events that `notify.events` may list."""

    COMPLETE = "Complete"
    FAILED = "Failed"
    BUDGET_NEARLY_SPENT = "BudgetNearlySpent"


CONFIG = ConfigDict(alias_generator=to_camel, defer_build=True)
"""The pydantic configuration of a dataclass and of all dataclasses nested in it. pydantic builds
the validators on the first read, not on import."""


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
    """A claim that the job creates.

    `metadata` and `spec` are those of the PersistentVolumeClaim's manifest.
    """

    when_deleted: WhenDeleted
    metadata: Json = field(default_factory=dict)
    spec: Json


@dataclass(frozen=True, kw_only=True)
class BucketVolume(Volume):
    """A volume, or a bucket given by its URL and the settings of the bucket's server."""

    url: str | None = None
    endpoint: str | None = None
    region: str | None = None
    secret_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointVolume(BucketVolume):
    """The volume for checkpoints.

    The job names a volume in `claim_name`, `host_path` or `nfs`, defines a claim to create, or
    names a bucket to which its checkpoints are copied.
    """

    shared: bool
    exclusive: bool
    claim_template: ClaimTemplate | None = None

    @property
    def seen_by_every_node(self) -> bool:
        """Whether files that one pod writes to the volume are visible in all other pods."""
        return self.url is None and (self.host_path is None or self.shared)


@dataclass(frozen=True, kw_only=True)
class DataVolume(BucketVolume):
    """The volume for the training data.

    The job names a bucket, or a volume in `claim_name`, `host_path` or `nfs`. Pods fetch the data
    of a bucket into `cache`, a folder on the Kubernetes node. Without `cache`, each pod fetches the
    data onto a disk of its own.
    """

    cache: str | None = None

    @property
    def fetched_folder(self) -> str:
        """Name of the folder that holds the data from `url`.

        The name is a hash of the URL and its server, so different sources have different folders.
        """
        text = f"{(self.endpoint or '').rstrip('/')} {(self.url or '').rstrip('/')}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class GitCode:
    """A commit of a git repository.

    `ref` is a branch or tag that contains the commit.
    """

    url: str
    commit: str
    ref: str | None = None
    secret_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code that pods fetch before the workers start: an archive in a bucket, or a git commit."""

    archive: str | None = None
    digest: str | None = None
    endpoint: str | None = None
    region: str | None = None
    secret_name: str | None = None
    git: GitCode | None = None

    @property
    def version(self) -> str:
        """The git commit, or the hexadecimal part of the archive's digest.

        Equal versions have equal content.
        """
        return self.git.commit if self.git else (self.digest or "").rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class Storage:
    data: DataVolume | None = None
    checkpoints: CheckpointVolume | None = None
    shared_memory: Annotated[str, BeforeValidator(_as_text)]
    snapshot_memory: Annotated[str, BeforeValidator(_as_text)]

    @property
    def checkpoint_path(self) -> str:
        """Path of the checkpoint folder in the trainer's container.

        If the job has no `checkpoints`, the folder is part of the pod and is lost when the pod is
        deleted.
        """
        return self.checkpoints.mount_path if self.checkpoints else default_of("spec.storage.checkpoints.mountPath")

    @property
    def url(self) -> str | None:
        """URL of the bucket that checkpoints are copied to, as written in the spec.

        None if checkpoints are not copied to a bucket.
        """
        return self.checkpoints.url if self.checkpoints else None

    @property
    def claim_template(self) -> ClaimTemplate | None:
        """Template for the claim that the job creates, or None if the job creates no claim."""
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
        """The fields to add to the spec of the coordinator's own pod."""
        fields: Json = {
            "nodeSelector": self.node_selector,
            "tolerations": list(self.tolerations),
            "runtimeClassName": self.runtime_class_name,
        }
        return {name: value for name, value in fields.items() if value}

    @property
    def endpoint_port(self) -> int:
        """The port on which the coordinator listens. The rendezvous store listens on `port`."""
        return self.port + 1

    @property
    def master_port(self) -> int:
        """The value of MASTER_PORT for a `command`.

        The command's process in pod 0 can listen on this port.
        """
        return self.port + 2 if self.port < 65534 else self.port - 1


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The smallest and the largest number of nodes that an elastic job can run with."""

    min_nodes: int
    max_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How long to wait before a restart after consecutive failures.

    The first failure is followed by an immediate restart, and the second by a wait of `initial`
    seconds. The wait doubles with every further failure until it reaches `maximum`.
    """

    initial: Annotated[float, Field(alias="initialSeconds")]
    maximum: Annotated[float, Field(alias="maxSeconds")]

    def seconds(self, failures: int) -> float:
        """Return the wait in seconds after this number of consecutive failures."""
        return 0.0 if failures < 2 else min(self.maximum, self.initial * 2.0 ** min(failures - 2, 40))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of `recovery.rules`. A rule without exit codes matches every exit code."""

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
    """`auto`, `none`, or the number of steps between two copies of the training state."""
    hangs: Hangs
    hang_after_seconds: int | None = None
    """Number of seconds without progress after which the group is restarted. With None, only a
    proven hang restarts the group."""
    slow_ranks: SlowRanks

    @property
    def keeps_snapshots(self) -> bool:
        """Whether pods keep copies of the latest training states in memory."""
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
    """A Kubernetes node label that must have the same value on all Kubernetes nodes that run the
    job's node pods. None sets no such requirement."""
    disruption_budget: bool
    gang: bool | None = None
    """Whether the pods are scheduled as a gang. None means yes if the cluster supports gangs."""

    @property
    def by_volcano(self) -> bool:
        """Whether Volcano schedules the pods.

        The operator recognizes Volcano by the default name of Volcano's scheduler.
        """
        return self.scheduler_name == "volcano"


class PreflightScope(StrEnum):
    """Whether each pod is checked alone, or together with the other pods of its group."""

    NODE = "Node"
    GROUP = "Group"


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Checks that new pods must pass before they train.

    If `min_megabytes_per_second` is None, no minimum speed is required.
    """

    scope: PreflightScope
    timeout_seconds: int
    min_megabytes_per_second: int | None = None


@dataclass(frozen=True, kw_only=True)
class Network:
    """Who may connect to the job's pods, and the network interface that the pods use."""

    isolate: bool
    interface: str | None = None


@dataclass(frozen=True, kw_only=True)
class Notify:
    """The receiver of the job's notifications, and the events that cause a notification."""

    receiver: str
    events: tuple[NotifyEvent, ...]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The `spec` of a job, with the CRD's defaults filled in."""

    __pydantic_config__ = CONFIG
    managed_by: str | None = None
    """Name of the controller that runs the job. None means this operator."""
    class_name: str = ""
    image: str = ""
    """The image of all node pods. Empty until the status contains the class that sets the image."""
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
    """Kubernetes node labels by which the ranks are ordered, the label of the widest domain first.
    If the list is empty, ranks follow the indices of the slots."""
    preflight: Preflight | None = None
    network: Network
    notify: Notify | None = None
    storage: Storage
    pod_template: Json
    template_hash: str
    """Hash of the fields that take effect only in new pods. All pods are replaced if this hash
    changes."""

    @property
    def managed_elsewhere(self) -> bool:
        """Whether a different controller runs the job. This operator ignores such a job."""
        return self.managed_by not in (None, MANAGER)

    @property
    def under_torchrun(self) -> bool:
        """Whether torchrun starts the workers, which it does unless the job has a `command`.

        The processes that a `command` starts do not connect to the coordinator.
        """
        return not self.command

    @property
    def fast(self) -> bool:
        """Whether recovery.mode is Fast."""
        return self.recovery.mode is Mode.FAST

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes that the job can train with."""
        return self.elastic.min_nodes if self.elastic else self.nodes

    @property
    def on_host_network(self) -> bool:
        """Whether podTemplate puts the node pods on their host's network.

        A NetworkPolicy has no effect on such pods.
        """
        pod = self.pod_template.get("spec")
        return isinstance(pod, Mapping) and bool(pod.get("hostNetwork"))

    @property
    def isolated(self) -> bool:
        """Whether a NetworkPolicy isolates the job's pods."""
        return self.network.isolate and not self.on_host_network

    @property
    def pods(self) -> int:
        """Number of node pods that the job should have, including spares."""
        return self.nodes + self.spares

    @classmethod
    def read(cls, spec: Mapping[str, Any]) -> JobSpec:
        """Read a job's `spec`, after filling in the CRD's defaults.

        Raises ValueError if the spec does not fit the CRD.
        """
        full = apply_defaults(spec, schema_of("spec"))
        full.setdefault("procsPerNode", max(full["gpusPerNode"], 1))
        full["podTemplate"] = without_nulls(full["podTemplate"])
        full["templateHash"] = _template_hash(spec, full["recovery"]["mode"])
        return _SPEC.validate_python(full)


_CHANGEABLE = ("nodes", "elastic", "spares", "recovery", "runPolicy", "notify", "rankOrder")
"""Fields that can change without replacing the running pods. A change of recovery.mode still
replaces them, because `_template_hash` adds the mode to the hash."""


def _template_hash(spec: Mapping[str, Any], mode: str) -> str:
    """Return a hash of the fields from which pods are built.

    Upgrading the CRD must not change the hash, because a new hash replaces all running pods. A spec
    from the API server contains the defaults of the cluster's CRD, which can be newer than this
    operator. The hash therefore omits fields that have their default value and fields that this
    operator does not know.
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
"""Maximum total number of characters in a spec's names and strings, and maximum number of its
values (mappings, lists, strings and numbers). The number of values has its own limit, because an
empty mapping takes only 3 bytes in etcd but 72 bytes in the operator's memory."""
_SMALL_TEXT, _SMALL_VALUES = 4096, 100


def oversized(spec: Mapping[str, Any]) -> str:
    """Return the path to the part of a spec that is too large, or an empty path."""
    parts = (("spec.podTemplate", spec.get("podTemplate")), ("spec", spec))
    return next((path for path, part in parts if exceeds(part, LARGEST_TEXT, MOST_VALUES)), "")


def without_large_fields(spec: Mapping[str, Any]) -> Json:
    """Return a copy of a spec that is too large, without the fields that make it large."""
    return {name: value for name, value in spec.items() if not exceeds(value, _SMALL_TEXT, _SMALL_VALUES)}


def size_fault(path: str) -> str:
    """Return the error message for a part of a spec that is too large."""
    most = f"{LARGEST_TEXT // 1024} KiB of text or {MOST_VALUES} values"
    return f"{path}: more than {most}, the operator's limit; move data into a ConfigMap"
