"""The DDPJob of `ddpjob.io/v1alpha1` as frozen dataclasses: read from a defaulted object, status written back.

The CRD file is the source of names, defaults and ranges; this module only gives its fields types.
Reading assumes an object that the API server or `ddpjob.api.reader` has validated and defaulted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

GROUP, VERSION, KIND, PLURAL = "ddpjob.io", "v1alpha1", "DDPJob", "ddpjobs"
API_VERSION = f"{GROUP}/{VERSION}"

Json = dict[str, Any]
"""A JSON object at the edge: a manifest or a part of one."""


class Placement(StrEnum):
    """Where the rendezvous store lives."""

    DEDICATED = "Dedicated"
    MASTER = "Master"


class RecoveryMode(StrEnum):
    """How a group goes on after a break."""

    STANDARD = "Standard"
    FAST = "Fast"


class RuleCause(StrEnum):
    """What a rule of `recovery.rules` is for."""

    OOM_KILLED = "OOMKilled"
    EXIT_CODE = "ExitCode"
    DISRUPTION = "Disruption"
    NODE_LOST = "NodeLost"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"


class RuleAction(StrEnum):
    """What follows from a cause."""

    RESTART = "Restart"
    RESTART_UNCOUNTED = "RestartUncounted"
    FAIL = "Fail"


class CleanPodPolicy(StrEnum):
    """Which pods are removed when the job has ended."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class SlotState(StrEnum):
    """What is known of a slot's current attempt; see docs/architecture.md."""

    PLANNED = "Planned"
    CREATED = "Created"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    LOST = "Lost"


class ConditionType(StrEnum):
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    FAST_RECOVERY = "FastRecovery"


class Phase(StrEnum):
    """One word for printing; nothing is decided by it."""

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


def format_time(moment: datetime | None) -> str | None:
    """An aware datetime as RFC 3339 in UTC, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A place for data or checkpoints: exactly one of claim_name, host_path and nfs."""

    mount_path: str
    claim_name: str | None = None
    host_path: str | None = None
    nfs: Json | None = None
    sub_path: str | None = None
    read_only: bool = False
    shared: bool = False

    @property
    def seen_by_every_node(self) -> bool:
        """Whether all pods see the same files."""
        return self.host_path is None or self.shared


@dataclass(frozen=True, kw_only=True)
class Storage:
    data: Volume | None = None
    checkpoints: Volume | None = None
    shared_memory: str = "1Gi"

    @property
    def claims(self) -> tuple[str, ...]:
        """Names of the persistent volume claims, each once."""
        volumes = (self.data, self.checkpoints)
        return tuple(dict.fromkeys(v.claim_name for v in volumes if v and v.claim_name))


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    placement: Placement = Placement.DEDICATED
    port: int = 29400
    join_timeout_seconds: int = 600
    resources: Json = field(default_factory=dict)

    @property
    def endpoint_port(self) -> int:
        """The coordinator's own port; the store's is `port`."""
        return self.port + 1


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Bounds around `nodes`."""

    min_nodes: int
    max_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Seconds to wait before a start that repeats a failure: `initial`, doubled each time, at most `maximum`."""

    initial: float = 1.0
    maximum: float = 60.0

    def seconds(self, failures: int) -> float:
        """After so many failures in a row; the first waits for nothing."""
        return 0.0 if failures < 2 else min(self.maximum, self.initial * 2.0 ** min(failures - 2, 40))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of `recovery.rules`; no exit codes: all."""

    cause: RuleCause
    action: RuleAction
    exit_codes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recovery:
    mode: RecoveryMode = RecoveryMode.STANDARD
    max_restarts: int = 10
    reset_after_seconds: int = 3600
    backoff: Backoff = field(default_factory=Backoff)
    rules: tuple[Rule, ...] = ()
    node_lost_after_seconds: int = 30
    hang_after_seconds: int | None = None
    """None: judged by the job's own pace."""

    @classmethod
    def read(cls, recovery: Mapping[str, Any]) -> Recovery:
        backoff = recovery.get("backoff", {})
        return cls(
            mode=RecoveryMode(recovery.get("mode", "Standard")),
            max_restarts=recovery.get("maxRestarts", 10),
            reset_after_seconds=recovery.get("resetAfterSeconds", 3600),
            backoff=Backoff(initial=float(backoff.get("initialSeconds", 1)), maximum=float(backoff.get("maxSeconds", 60))),
            rules=tuple(
                Rule(cause=RuleCause(r.get("cause") or r["on"]), action=RuleAction(r["action"]), exit_codes=tuple(r.get("exitCodes", ())))
                for r in recovery.get("rules", ())
            ),
            node_lost_after_seconds=recovery.get("nodeLostAfterSeconds", 30),
            hang_after_seconds=recovery.get("hangAfterSeconds"),
        )


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    suspend: bool = False
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    failed_pods_kept: int = 3


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    one_pod_per_node: bool = True
    topology_key: str = "kubernetes.io/hostname"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    torchrun_args: tuple[str, ...] = ()
    env: tuple[Json, ...] = ()
    env_from: tuple[Json, ...] = ()
    working_dir: str | None = None
    nodes: int = 1
    elastic: Elastic | None = None
    spares: int = 0
    procs_per_node: int = 1
    gpus_per_node: int = 1
    gpu_resource: str = "nvidia.com/gpu"
    resources: Json = field(default_factory=dict)
    backend: str = "auto"
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    recovery: Recovery = field(default_factory=Recovery)
    run_policy: RunPolicy = field(default_factory=RunPolicy)
    scheduling: Scheduling = field(default_factory=Scheduling)
    storage: Storage = field(default_factory=Storage)
    pod_template: Json = field(default_factory=dict)
    template_hash: str = ""
    """Changes whenever a field changes that a running pod cannot take over."""

    @property
    def under_torchrun(self) -> bool:
        """False for `command`: then nobody in the pods speaks with the coordinator."""
        return not self.command

    @property
    def fast(self) -> bool:
        """Whether recovery.mode is Fast."""
        return self.recovery.mode is RecoveryMode.FAST

    @property
    def min_nodes(self) -> int:
        """The least number of nodes to train with."""
        return self.elastic.min_nodes if self.elastic else self.nodes

    @property
    def pods(self) -> int:
        """Node pods wanted, spares included."""
        return self.nodes + self.spares

    @classmethod
    def read(cls, spec: Mapping[str, Any]) -> JobSpec:
        """From a defaulted `spec`."""
        rendezvous, policy = spec.get("rendezvous", {}), spec.get("runPolicy", {})
        scheduling, storage = spec.get("scheduling", {}), spec.get("storage", {})
        gpus, elastic = spec.get("gpusPerNode", 1), spec.get("elastic")
        return cls(
            image=spec["image"],
            image_pull_policy=spec.get("imagePullPolicy"),
            image_pull_secrets=tuple(s["name"] for s in spec.get("imagePullSecrets", ())),
            script=spec.get("script"),
            module=spec.get("module"),
            command=tuple(spec.get("command", ())),
            args=tuple(spec.get("args", ())),
            torchrun_args=tuple(spec.get("torchrunArgs", ())),
            env=tuple(spec.get("env", ())),
            env_from=tuple(spec.get("envFrom", ())),
            working_dir=spec.get("workingDir"),
            nodes=spec.get("nodes", 1),
            elastic=Elastic(min_nodes=elastic["minNodes"], max_nodes=elastic.get("maxNodes")) if elastic else None,
            spares=spec.get("spares", 0),
            procs_per_node=spec.get("procsPerNode") or max(gpus, 1),
            gpus_per_node=gpus,
            gpu_resource=spec.get("gpuResource", "nvidia.com/gpu"),
            resources=dict(spec.get("resources", {})),
            backend=spec.get("backend", "auto"),
            rendezvous=Rendezvous(
                placement=Placement(rendezvous.get("placement", "Dedicated")),
                port=rendezvous.get("port", 29400),
                join_timeout_seconds=rendezvous.get("joinTimeoutSeconds", 600),
                resources=dict(rendezvous.get("resources", {})),
            ),
            recovery=Recovery.read(spec.get("recovery", {})),
            run_policy=RunPolicy(
                suspend=policy.get("suspend", False),
                active_deadline_seconds=policy.get("activeDeadlineSeconds"),
                ttl_seconds_after_finished=policy.get("ttlSecondsAfterFinished"),
                clean_pod_policy=CleanPodPolicy(policy.get("cleanPodPolicy", "Running")),
                failed_pods_kept=policy.get("failedPodsKept", 3),
            ),
            scheduling=Scheduling(
                scheduler_name=scheduling.get("schedulerName"),
                priority_class_name=scheduling.get("priorityClassName"),
                one_pod_per_node=scheduling.get("onePodPerNode", True),
                topology_key=scheduling.get("topologyKey", "kubernetes.io/hostname"),
            ),
            storage=Storage(
                data=_read_volume(storage.get("data"), "/data", read_only=True),
                checkpoints=_read_volume(storage.get("checkpoints"), "/checkpoints", read_only=False),
                shared_memory=str(storage.get("sharedMemory", "1Gi")),
            ),
            pod_template=dict(spec.get("podTemplate", {})),
            template_hash=_template_hash(spec),
        )


def _read_volume(volume: Mapping[str, Any] | None, mount_path: str, *, read_only: bool) -> Volume | None:
    if volume is None:
        return None
    return Volume(
        mount_path=volume.get("mountPath", mount_path),
        claim_name=volume.get("claimName"),
        host_path=volume.get("hostPath"),
        nfs=volume.get("nfs"),
        sub_path=volume.get("subPath"),
        read_only=volume.get("readOnly", read_only),
        shared=volume.get("shared", False),
    )


def _template_hash(spec: Mapping[str, Any]) -> str:
    fixed = {key: value for key, value in spec.items() if key not in ("nodes", "elastic", "spares", "recovery", "runPolicy")}
    fixed["recovery.mode"] = spec.get("recovery", {}).get("mode", "Standard")
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:10]


@dataclass(frozen=True, kw_only=True)
class Condition:
    type: ConditionType
    status: bool
    reason: str
    message: str
    since: datetime
    generation: int

    def write(self) -> Json:
        return {
            "type": str(self.type),
            "status": "True" if self.status else "False",
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": format_time(self.since),
            "observedGeneration": self.generation,
        }


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One of the job's places for a node."""

    attempt: int = 0
    state: SlotState = SlotState.PLANNED
    node: str = ""
    round: int = 0
    """The job's round when the pod was made: what broke before that is not its doing."""
    reason: str = ""
    failures: int = 0
    """How often in a row its pods ended for `reason`, soon after their start."""
    not_before: datetime | None = None
    lost_since: datetime | None = None

    @classmethod
    def read(cls, slot: Mapping[str, Any]) -> Slot:
        return cls(
            attempt=slot["attempt"],
            state=SlotState(slot["state"]),
            node=slot.get("node", ""),
            round=slot.get("round", 0),
            reason=slot.get("reason", ""),
            failures=slot.get("failures", 0),
            not_before=parse_time(slot.get("notBefore")),
            lost_since=parse_time(slot.get("lostSince")),
        )

    def write(self) -> Json:
        optional = {
            "node": self.node,
            "round": self.round,
            "reason": self.reason,
            "failures": self.failures,
            "notBefore": format_time(self.not_before),
            "lostSince": format_time(self.lost_since),
        }
        return {"attempt": self.attempt, "state": str(self.state)} | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, kw_only=True)
class RendezvousStatus:
    generation: int = 0
    attempt: int = 0
    """Coordinators of this generation before the present one."""
    failures: int = 0
    """How often in a row a coordinator ended soon after its start."""
    not_before: datetime | None = None
    state: SlotState = SlotState.PLANNED
    endpoint: str = ""
    nodes: int = 0
    """How many nodes the slots were last laid out for."""

    @classmethod
    def read(cls, rendezvous: Mapping[str, Any]) -> RendezvousStatus:
        return cls(
            generation=rendezvous.get("generation", 0),
            attempt=rendezvous.get("attempt", 0),
            failures=rendezvous.get("failures", 0),
            not_before=parse_time(rendezvous.get("notBefore")),
            state=SlotState(rendezvous.get("state", "Planned")),
            endpoint=rendezvous.get("endpoint", ""),
            nodes=rendezvous.get("nodes", 0),
        )

    def write(self) -> Json:
        optional = {"attempt": self.attempt, "failures": self.failures, "notBefore": format_time(self.not_before)}
        written = {"generation": self.generation, "state": str(self.state), "endpoint": self.endpoint, "nodes": self.nodes}
        return written | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One entry of `status.restarts.recent`."""

    time: datetime
    pod: str
    reason: str
    message: str
    counted: bool
    index: int | None = None
    """The slot; None for the coordinator."""
    node: str = ""
    rank: int | None = None
    seconds: float | None = None
    """From the break until the group ran again; None while it does not."""
    round: int = 0
    """The round that began with it."""
    consequence: bool = False
    """Another failure of the same round was its cause."""

    def write(self) -> Json:
        entry: Json = {
            "time": format_time(self.time),
            "pod": self.pod,
            "reason": self.reason,
            "message": self.message,
            "counted": self.counted,
        }
        optional = {"index": self.index, "node": self.node or None, "rank": self.rank, "seconds": self.seconds}
        optional |= {"round": self.round or None, "consequence": self.consequence or None}
        return entry | {key: value for key, value in optional.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Restarts:
    counted: int = 0
    """Since the budget was last whole."""
    uncounted: int = 0
    total: int = 0
    """All that ever were."""
    last_counted: datetime | None = None
    seen_generation: int = 0
    seen_incident: int = 0
    seen_round: int = 0
    """The round that the last incident belongs to."""
    recent: tuple[Restart, ...] = ()

    @classmethod
    def read(cls, restarts: Mapping[str, Any]) -> Restarts:
        seen = restarts.get("seen", {})
        counted, uncounted = restarts.get("counted", 0), restarts.get("uncounted", 0)
        return cls(
            counted=counted,
            uncounted=uncounted,
            total=restarts.get("total", counted + uncounted),
            last_counted=parse_time(restarts.get("lastCounted")),
            seen_generation=seen.get("generation", 0),
            seen_incident=seen.get("incident", 0),
            seen_round=seen.get("round", 0),
            recent=tuple(_read_restart(r) for r in restarts.get("recent", ())),
        )

    def write(self, maximum: int) -> Json:
        written: Json = {
            "counted": self.counted,
            "uncounted": self.uncounted,
            "total": self.total,
            "max": maximum,
            "display": _restarts_display(self, maximum),
            "seen": {"generation": self.seen_generation, "incident": self.seen_incident, "round": self.seen_round},
            "recent": [r.write() for r in self.recent],
        }
        return written | ({"lastCounted": format_time(self.last_counted)} if self.last_counted else {})


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A Kubernetes node that new pods keep away from, if they can."""

    node: str
    until: datetime
    reason: str

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> AvoidedNode:
        until = parse_time(entry["until"])
        assert until is not None
        return cls(node=entry["node"], until=until, reason=entry.get("reason", ""))

    def write(self) -> Json:
        return {"node": self.node, "until": format_time(self.until), "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """All of `status`; `write()` adds what only printing needs."""

    observed_generation: int = 0
    phase: Phase | None = None
    conditions: tuple[Condition, ...] = ()
    selector: str = ""
    pod_files: str = ""
    start_time: datetime | None = None
    completion_time: datetime | None = None
    template_hash: str = ""
    round: int = 0
    rendezvous: RendezvousStatus = field(default_factory=RendezvousStatus)
    active: int = 0
    """Pods that exist and have not ended, spares left out."""
    ready: int = 0
    """Pods that train."""
    spare: int = 0
    """Pods that run and wait for a place."""
    slots: tuple[Slot, ...] = ()
    highest_attempt: int = 0
    """Of any slot so far."""
    avoided_nodes: tuple[AvoidedNode, ...] = ()
    restarts: Restarts = field(default_factory=Restarts)
    progress: Json = field(default_factory=dict)
    nodes_wanted: int = 0
    max_restarts: int = 0

    def condition(self, kind: ConditionType) -> Condition | None:
        return next((c for c in self.conditions if c.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        condition = self.condition(kind)
        return condition is not None and condition.status

    @property
    def nodes_display(self) -> str:
        """`2/2 +1`: running or finished, of those wanted, and spares."""
        present = min(self.nodes_wanted, self.ready + sum(s.state is SlotState.SUCCEEDED for s in self.slots))
        return f"{present}/{self.nodes_wanted}" + (f" +{self.spare}" if self.spare else "")

    @property
    def terminal(self) -> bool:
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> JobStatus:
        """From the object's `status`; an empty one is a job never looked at."""
        restarts, nodes = status.get("restarts", {}), status.get("nodes", {})
        return cls(
            observed_generation=status.get("observedGeneration", 0),
            phase=Phase(status["phase"]) if "phase" in status else None,
            conditions=tuple(_read_condition(c) for c in status.get("conditions", ())),
            selector=status.get("selector", ""),
            pod_files=status.get("podFiles", ""),
            start_time=parse_time(status.get("startTime")),
            completion_time=parse_time(status.get("completionTime")),
            template_hash=status.get("templateHash", ""),
            round=status.get("round", 0),
            rendezvous=RendezvousStatus.read(status.get("rendezvous", {})),
            active=nodes.get("active", 0),
            ready=nodes.get("ready", 0),
            spare=nodes.get("spare", 0),
            nodes_wanted=nodes.get("wanted", 0),
            slots=tuple(Slot.read(s) for s in status.get("slots", ())),
            highest_attempt=status.get("highestAttempt", max((s["attempt"] for s in status.get("slots", ())), default=0)),
            avoided_nodes=tuple(AvoidedNode.read(n) for n in status.get("avoidedNodes", ())),
            restarts=Restarts.read(restarts),
            max_restarts=restarts.get("max", 0),
            progress=dict(status.get("progress", {})),
        )

    def write(self) -> Json:
        """The object's `status`."""
        written: Json = {
            "observedGeneration": self.observed_generation,
            "phase": str(self.phase) if self.phase else None,
            "conditions": [c.write() for c in self.conditions],
            "selector": self.selector,
            "podFiles": self.pod_files,
            "startTime": format_time(self.start_time),
            "completionTime": format_time(self.completion_time),
            "templateHash": self.template_hash,
            "round": self.round,
            "rendezvous": self.rendezvous.write(),
            "nodes": {
                "wanted": self.nodes_wanted,
                "active": self.active,
                "ready": self.ready,
                "spare": self.spare,
                "display": self.nodes_display,
            },
            "slots": [s.write() for s in self.slots],
            "highestAttempt": self.highest_attempt,
            "avoidedNodes": [n.write() for n in self.avoided_nodes],
            "restarts": self.restarts.write(self.max_restarts),
            "progress": self.progress,
        }
        return {key: value for key, value in written.items() if value not in (None, "", {}) and not (key == "avoidedNodes" and not value)}


def _restarts_display(restarts: Restarts, maximum: int) -> str:
    """`1/10`: counted of those allowed; `1/10 +2` with two that did not count."""
    return f"{restarts.counted}/{maximum}" + (f" +{restarts.uncounted}" if restarts.uncounted else "")


def _read_condition(condition: Mapping[str, Any]) -> Condition:
    since = parse_time(condition["lastTransitionTime"])
    assert since is not None
    return Condition(
        type=ConditionType(condition["type"]),
        status=condition["status"] == "True",
        reason=condition["reason"],
        message=condition["message"],
        since=since,
        generation=condition.get("observedGeneration", 0),
    )


def _read_restart(entry: Mapping[str, Any]) -> Restart:
    moment = parse_time(entry["time"])
    assert moment is not None
    return Restart(
        time=moment,
        pod=entry["pod"],
        index=entry.get("index"),
        reason=entry["reason"],
        message=entry["message"],
        counted=entry["counted"],
        node=entry.get("node", ""),
        rank=entry.get("rank"),
        seconds=entry.get("seconds"),
        round=entry.get("round", 0),
        consequence=entry.get("consequence", False),
    )


@dataclass(frozen=True, kw_only=True)
class DDPJob:
    """A job as it was read: identity, wish and last written state."""

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
        """From a whole object with metadata, spec and status."""
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
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }
