"""Builds a job's pods: nodes that run torchrun, and the coordinator."""

from __future__ import annotations

import json
from typing import Any

from ddpjob_runtime.protocol import MAX_SECONDS, Hangs

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import DataVolume, JobSpec, Json, Placement, Preflight, PreflightScope, Volume
from ddpjob.api.job_status import JobStatus, PodChanges
from ddpjob.api.merging import merge, mounted_at
from ddpjob.api.schema import default_of
from ddpjob.api.submitted_code import CODE_FOLDER
from ddpjob.core.world import (
    ANNOTATION_GROUP,
    ANNOTATION_WORKLOAD,
    COORDINATOR_CONTAINER,
    LABEL_ATTEMPT,
    LABEL_BUDGET,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_ISOLATED,
    LABEL_ROLE,
    LABEL_ROUND,
    LABEL_UID,
    NODE_ROLES,
    TRAINER_CONTAINER,
    Role,
    coordinator_pod_name,
    gang_name,
    node_pod_name,
)
from ddpjob.objects.git_clone import build_clone
from ddpjob.objects.isolation import token_variable
from ddpjob.objects.platform import COORDINATOR_HOSTNAME, Platform
from ddpjob.objects.pod_template import SNAPSHOT_PATH
from ddpjob.objects.quantities import amount
from ddpjob.objects.service import RUNTIME_FOLDER, make_object, metadata
from ddpjob.objects.strategic_merge import merge_into_coordinator, merge_into_node, trainer_of

RUNTIME_VOLUME, SNAPSHOT_VOLUME, FETCHED_CODE_VOLUME = "ddpjob-runtime", "ddpjob-snapshots", "ddpjob-code"
_CODE_MOUNT: Json = {"name": FETCHED_CODE_VOLUME, "mountPath": CODE_FOLDER}
SECRET_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Keys of the Secret in storage.checkpoints.secretName. AWS tools read environment variables of the
same names. The last key is optional."""
DATA_PREFIX = "DDPJOB_DATA_"
"""Prefix of the environment variables that describe storage.data. The launcher reads these
variables, some of which contain credentials, and removes all of them before it starts the workers.
"""
CODE_PREFIX = "DDPJOB_CODE_"
"""Prefix of the environment variables that describe spec.code. The launcher treats them like those
for storage.data."""
MAX_RESTARTS = 1_000_000
"""The value of torchrun's --max-restarts option. It amounts to no limit, because the operator sees
every failure and enforces the job's restart budget itself."""
_SHUTDOWN_MARGIN = 2
"""Seconds that are reserved for torchrun's own exit at the end of the pod's grace period. When they
begin, torchrun in a `command` stops waiting for its workers."""

_BACKENDS = {"nvidia.com/": "nccl", "amd.com/": "nccl", "huawei.com/": "hccl", "gpu.intel.com/": "xccl"}
"""Maps the prefix of `spec.gpuResource` to the backend that `spec.backend: auto` selects."""
_TAINT_MARGIN = 10
"""Seconds that the pods' tolerations last beyond nodeLostAfterSeconds. This gives the operator time
to act before Kubernetes evicts the pods on a lost host."""
DEFAULT_GRACE = 30
_NETWORK_SOURCES = frozenset({"persistentVolumeClaim", "nfs", "csi", "azureFile", "cephfs", "glusterfs"})
"""Kinds of volume sources whose files are the same in all pods. This includes csi, because a csi
volume without a claim usually mounts a bucket or a network file system, such as gcsfuse,
Azure Files, Azure Blob Storage or JuiceFS."""
_POD_IP: Json = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
_NO_DEVICES: Json = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
"""Keeps NVIDIA's container runtime from adding devices to a container that did not request any.
CUDA images ask this runtime for all devices by default."""
TOPOLOGY_GATE = "kueue.x-k8s.io/topology"
"""The scheduling gate that holds back a pod until Kueue has chosen a topology domain. Kueue then
removes the gate."""
_COORDINATOR_LIMITS = {"cpu": "2", "memory": "2Gi"}
"""The default limits of the coordinator's container. A higher request from the job raises them."""


def build_node(job: DDPJob, status: JobStatus, platform: Platform, index: int, attempt: int) -> Json:
    """Build the pod of one slot.

    `status` supplies the pod's generation, round, runtime and avoided hosts.
    """
    name = node_pod_name(job, index, attempt)
    containers = [_trainer(job, status, platform, index, attempt)]
    if index == 0 and job.spec.rendezvous.placement is Placement.MASTER:
        containers.append(_coordinator(job, status, platform))
    spec: Json = {
        **_pod_basics(job, status, name),
        "containers": containers,
        "volumes": _volumes(job, status),
        **_clone(job, platform),
    }
    affinity = _affinity(job, status)
    if affinity:
        spec["affinity"] = affinity
    # The role is provisional, because only the coordinator decides which nodes train. Once the
    # coordinator reports the role, the operator corrects the label (see core.plan.actions).
    role = Role.NODE if index < job.spec.nodes else Role.SPARE
    pod = _pod(job, status, name, spec, _slot_labels(job, status, role, index, attempt))
    pod = merge_into_node(pod, job.spec.pod_template)
    pod["spec"]["terminationGracePeriodSeconds"] = _grace(job)
    return _queued(pod, status.queue.changes_of(index) if status.queue else None)


def build_coordinator(job: DDPJob, status: JobStatus, platform: Platform) -> Json:
    """Build the coordinator's own pod, for placement Dedicated.

    The pod does not request a GPU. It runs the job's image, because the store needs torch.
    """
    name = coordinator_pod_name(job, status.rendezvous.generation, status.rendezvous.attempt)
    spec = {
        **_pod_basics(job, status, name),
        "containers": [_coordinator(job, status, platform)],
        "volumes": [_runtime_volume(status)],
    }
    # Prefer machines with the architecture on which the job's nodes run, because the job's image is
    # known to work there. Otherwise, the scheduler could place the coordinator on an empty machine
    # with a different architecture.
    like_nodes = {"labelSelector": _node_pods(job), "topologyKey": "kubernetes.io/arch"}
    preferred = [{"weight": 100, "podAffinityTerm": like_nodes}]
    spec["nodeSelector"] = {"kubernetes.io/os": "linux"}
    spec["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    if status.avoided_nodes:
        spec["affinity"] |= _elsewhere(status)
    if job.spec.fast:
        spec["hostname"] = COORDINATOR_HOSTNAME
    scheduler = (job.spec.pod_template.get("spec") or {}).get("schedulerName")
    if status.gang_waits and scheduler:
        spec["schedulerName"] = scheduler  # All pods in a gang need the same scheduler.
    pod = _pod(job, status, name, spec, _slot_labels(job, status, Role.COORDINATOR, None, status.rendezvous.attempt))
    pod = merge_into_coordinator(pod, job.spec.pod_template)
    pod["spec"] = merge(pod["spec"], job.spec.rendezvous.pod_fields)
    return _queued(pod, status.queue.coordinator if status.queue else None)


def _queued(pod: Json, changes: PodChanges | None) -> Json:
    """Return the pod with the fields that the queue's flavor and topology require.

    Without these fields, the pod could run on machines that the job's quota does not cover. If
    Kueue assigns topology domains, the pod also gets a scheduling gate. The gate holds the pod back
    until Kueue has added a domain to the pod's node selector.
    """
    if changes is None:
        return pod
    meta, spec = dict(pod["metadata"]), dict(pod["spec"])
    if changes.node_selector:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **changes.node_selector}
    if changes.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", ()), *changes.tolerations]
    if changes.labels:
        meta["labels"] = {**changes.labels, **meta["labels"]}
    if changes.annotations:
        meta["annotations"] = {**meta.get("annotations", {}), **changes.annotations}
    if ANNOTATION_WORKLOAD in changes.annotations:
        spec["schedulingGates"] = [*spec.get("schedulingGates", ()), {"name": TOPOLOGY_GATE}]
    return {**pod, "metadata": meta, "spec": spec}


def _pod(job: DDPJob, status: JobStatus, name: str, spec: Json, labels: dict[str, str]) -> Json:
    meta = metadata(job, name, labels)
    if status.gang_waits and job.spec.scheduling.by_volcano:
        meta["annotations"] = {ANNOTATION_GROUP: gang_name(job, status.rendezvous.generation)}
    return make_object("v1", "Pod", meta, spec=spec)


def _slot_labels(job: DDPJob, status: JobStatus, role: Role, index: int | None, attempt: int) -> dict[str, str]:
    labels = {
        **({LABEL_ISOLATED: "true"} if job.spec.isolated else {}),
        **({LABEL_BUDGET: "true"} if job.spec.scheduling.disruption_budget else {}),
        LABEL_ROLE: str(role),
        LABEL_GENERATION: str(status.rendezvous.generation),
        LABEL_ROUND: str(status.round),
    }
    if index is not None:
        labels[LABEL_INDEX] = str(index)
    return labels | {LABEL_ATTEMPT: str(attempt)}


def as_non_root(pod: Json) -> Json | None:
    """Return the pod with runAsNonRoot, for a namespace that rejects pods without it.

    Return None if the pod already sets runAsNonRoot, or if it sets runAsUser to root. A pod with
    any other runAsUser gets runAsNonRoot too, because the namespace still requires it.
    """
    context = pod["spec"].get("securityContext", {})
    if "runAsNonRoot" in context or context.get("runAsUser") == 0:
        return None
    return {**pod, "spec": {**pod["spec"], "securityContext": {**context, "runAsNonRoot": True}}}


def _pod_basics(job: DDPJob, status: JobStatus, name: str) -> Json:
    spec = job.spec
    patience = spec.recovery.node_lost_after_seconds + _TAINT_MARGIN
    # These tolerations replace the 300 s tolerations that Kubernetes adds by default.
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": patience}
    basics: Json = {
        "restartPolicy": "Never",
        "hostname": name,
        "subdomain": job.name,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": DEFAULT_GRACE,
        "tolerations": [{"key": f"node.kubernetes.io/{taint}", **lost} for taint in ("unreachable", "not-ready")],
        # Do not set runAsNonRoot, because many images run as root and the kubelet would refuse
        # them.
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    }
    if spec.image_pull_secrets:
        basics["imagePullSecrets"] = [{"name": secret} for secret in spec.image_pull_secrets]
    if status.gang_waits and not spec.scheduling.by_volcano:
        basics["schedulingGroup"] = {"podGroupName": gang_name(job, status.rendezvous.generation)}
    if spec.scheduling.scheduler_name:
        basics["schedulerName"] = spec.scheduling.scheduler_name
    if spec.scheduling.priority_class_name:
        basics["priorityClassName"] = spec.scheduling.priority_class_name
    return basics


def _affinity(job: DDPJob, status: JobStatus) -> Json:
    affinity: Json = {}
    if job.spec.scheduling.one_pod_per_node and job.spec.pods > 1:
        apart = {"labelSelector": _node_pods(job), "topologyKey": job.spec.scheduling.topology_key}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    if job.spec.scheduling.same_topology and job.spec.pods > 1:
        # The selector also matches the pod itself. The scheduler therefore accepts any domain for
        # the job's first pod, when no other matching pod has been placed yet.
        together = {"labelSelector": _node_pods(job), "topologyKey": job.spec.scheduling.same_topology}
        affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [together]}
    if status.avoided_nodes:
        affinity |= _elsewhere(status)
    return affinity


def _elsewhere(status: JobStatus) -> Json:
    """Build the affinity that keeps pods off avoided Kubernetes nodes if possible."""
    # A field selector takes only one value, so each avoided Kubernetes node gets its own selector.
    # The selectors belong in one term, because a Kubernetes node must match every selector of a
    # term.
    fields = [
        {"key": "metadata.name", "operator": "NotIn", "values": [avoided.node]} for avoided in status.avoided_nodes
    ]
    elsewhere = {"weight": 100, "preference": {"matchFields": fields}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [elsewhere]}}


def _node_pods(job: DDPJob) -> Json:
    roles = {"key": LABEL_ROLE, "operator": "In", "values": [str(role) for role in NODE_ROLES]}
    return {"matchLabels": {LABEL_UID: job.uid}, "matchExpressions": [roles]}


# --- containers -------------------------------------------------------------------------------------------------


def _container(job: DDPJob, name: str, command: list[str], args: list[str]) -> Json:
    container: Json = {
        "name": name,
        "image": job.spec.image,
        "command": command,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if args:
        container["args"] = args
    if job.spec.image_pull_policy:
        container["imagePullPolicy"] = job.spec.image_pull_policy
    return container


def _program(platform: Platform, name: str) -> list[str]:
    """Return the command line that starts one of the runtime's programs, such as the launcher."""
    return [platform.python, f"{platform.runtime_path}/{RUNTIME_FOLDER.name}", name]


def _trainer(job: DDPJob, status: JobStatus, platform: Platform, index: int, attempt: int) -> Json:
    command, args = _entry_point(job, status, platform)
    container = _container(job, TRAINER_CONTAINER, command, args)
    # A variable can refer only to earlier variables, and the user's variables may refer to
    # $(POD_IP). The operator's variables therefore come first. The schema forbids two variables
    # with the same name.
    container["env"] = [
        *_environment(job, status, platform, index, attempt),
        *_interface(job),
        *_bucket(job, platform),
        *_data_bucket(job),
        *_code(job, platform),
        *([] if _wants_devices(job.spec) else [_NO_DEVICES]),
        *job.spec.env,
    ]
    if job.spec.env_from:
        container["envFrom"] = list(job.spec.env_from)
    if folder := job.spec.working_dir or (CODE_FOLDER if job.spec.code else None):
        container["workingDir"] = folder
    container["resources"] = _resources(job)
    container["volumeMounts"] = _mounts(job, platform)
    return container


def _wants_devices(spec: JobSpec) -> bool:
    """Whether a node's pod uses devices.

    It does if the spec or podTemplate requests devices in any way, or if spec.env sets
    NVIDIA_VISIBLE_DEVICES.
    """
    pod = spec.pod_template.get("spec") or {}
    trainer = trainer_of(pod)
    asked = [resources for kind in (spec.resources, trainer.get("resources") or {}) for resources in kind.values()]
    devices = any("/" in str(name) for names in asked for name in (names if isinstance(names, dict) else ()))
    named = any(variable["name"] == _NO_DEVICES["name"] for variable in spec.env)
    return bool(spec.gpus_per_node or devices or named or pod.get("resourceClaims"))


def _resources(job: DDPJob) -> Json:
    resources = {kind: dict(job.spec.resources.get(kind, {})) for kind in ("requests", "limits")}
    if job.spec.gpus_per_node:
        resources["limits"].setdefault(job.spec.gpu_resource, job.spec.gpus_per_node)
    return {kind: amounts for kind, amounts in resources.items() if amounts}


def rendezvous_settings(job: DDPJob, status: JobStatus, platform: Platform) -> dict[str, str]:
    """Map the names of torchrun's options, without leading dashes, to their values.

    The section "Rendezvous settings" in docs/protocol.md explains the values.
    """
    spec = job.spec
    store = ("c10d", platform.store_host(job, status), spec.rendezvous.port, "0.1")
    # In Fast mode, the coordinator forms the group itself. torchrun has no store to wait for, so
    # `waits` is not used.
    fast = ("ddpjob", platform.coordinator_host(job, status), spec.rendezvous.endpoint_port, "0.02")
    backend, host, port, interval = fast if spec.fast else store
    waits = [
        *_store_elsewhere(job),
        "keep_alive_interval=1",
        "keep_alive_max_attempt=10800",
        "last_call_timeout=1",
        f"join_timeout={spec.rendezvous.join_timeout_seconds}",
        "read_timeout=60",
    ]
    return {
        "nnodes": f"{spec.nodes}:{spec.nodes}",
        "nproc-per-node": str(spec.procs_per_node),
        "rdzv-backend": backend,
        "rdzv-endpoint": f"{host}:{port}",
        "rdzv-id": f"{job.uid}-{status.rendezvous.generation}",
        **({} if spec.fast else {"rdzv-conf": ",".join(waits)}),
        # If a `command` starts torchrun, the operator would not notice torchrun's own restarts.
        # torchrun therefore exits at the first failure, and the operator decides whether to
        # restart.
        "max-restarts": str(MAX_RESTARTS if spec.fast or spec.under_torchrun else 0),
        "monitor-interval": interval,
        "local-addr": "$(POD_IP)",
    }


def _entry_point(job: DDPJob, status: JobStatus, platform: Platform) -> tuple[list[str], list[str]]:
    """Return `command` and `args` of the trainer's container."""
    spec = job.spec
    if not spec.under_torchrun:
        return list(spec.command), list(spec.args)
    options = [f"--{name}={value}" for name, value in rendezvous_settings(job, status, platform).items()]
    # Without `--`, torchrun would read a script's --log or --n as an abbreviation of one of its own
    # options.
    program = ["-m", "--", spec.module] if spec.module else ["--", spec.script or ""]
    args = [*options, *spec.torchrun_args, *program, *spec.args]
    return _program(platform, "launcher"), args


def _environment(job: DDPJob, status: JobStatus, platform: Platform, index: int, attempt: int) -> list[Json]:
    spec = job.spec
    data = spec.storage.data
    shared = platform.checkpoints_shared
    if shared is None:
        shared = _checkpoints_shared(job)
    values = {
        **_identity(job, status, node_pod_name(job, index, attempt)),
        "DDPJOB_INDEX": str(index),
        "DDPJOB_ATTEMPT": str(attempt),
        "DDPJOB_ROUND": str(status.round),
        "DDPJOB_NODES": str(spec.nodes),
        "DDPJOB_PROCS_PER_NODE": str(spec.procs_per_node),
        "DDPJOB_GPUS": f"{spec.gpus_per_node} {spec.gpu_resource}",
        "DDPJOB_COORDINATOR": f"{platform.coordinator_host(job, status)}:{spec.rendezvous.endpoint_port}",
        "DDPJOB_CHECKPOINT_DIR": platform.checkpoint_path or spec.storage.checkpoint_path,
        "DDPJOB_CHECKPOINT_SHARED": "1" if shared else "0",
        **({"DDPJOB_BACKEND": backend} if (backend := _backend(spec)) else {}),
        "DDPJOB_RECOVERY": str(spec.recovery.mode),
        "DDPJOB_GRACE_SECONDS": str(_grace(job)),
        "DDPJOB_CLUSTER": platform.cluster,
    }
    if spec.recovery.keeps_snapshots:
        values |= {"DDPJOB_SNAPSHOT_FOLDER": SNAPSHOT_PATH, "DDPJOB_SNAPSHOT_STEPS": spec.recovery.snapshots}
    checkpoints = spec.storage.checkpoints
    if spec.run_policy.logs_kept and spec.under_torchrun and checkpoints is not None and not checkpoints.read_only:
        values["DDPJOB_LOGS_KEPT"] = str(spec.run_policy.logs_kept)
    if spec.preflight is not None:
        values["DDPJOB_PREFLIGHT"] = _preflight(spec, spec.preflight, values["DDPJOB_CHECKPOINT_DIR"])
    if reason_file := trainer_of(spec.pod_template.get("spec") or {}).get("terminationMessagePath"):
        values["DDPJOB_TERMINATION_LOG"] = reason_file
    if data is not None:
        values["DDPJOB_DATA_DIR"] = platform.data_path or data.mount_path
    owned: list[Json] = [
        _POD_IP,
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        token_variable(job, platform),
        *({"name": name, "value": value} for name, value in values.items()),
    ]
    if not spec.under_torchrun:
        owned += _for_command(job, status, platform)
    return owned


def _for_command(job: DDPJob, status: JobStatus, platform: Platform) -> list[Json]:
    """Return the environment variables for the launcher that the job's `command` starts.

    torchrun reads its options from these variables. Any other launcher finds the pod with index 0
    at MASTER_ADDR. The address contains the name of that pod and is the same in all pods of a
    generation, because the pods of such a job are all replaced together. A new generation has a new
    address, so name servers cannot return the IP address of an older pod.
    """
    settings = rendezvous_settings(job, status, platform)
    grace = str(max(1, _grace(job) - _SHUTDOWN_MARGIN))
    values = {"PET_" + name.upper().replace("-", "_"): value for name, value in settings.items()}
    values |= {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace,
        "MASTER_ADDR": platform.first_host(job, status),
        "MASTER_PORT": str(job.spec.rendezvous.master_port),
        "PYTHON_EXEC": platform.torchrun_python,
    }
    given = {variable["name"] for variable in job.spec.env}
    return [{"name": name, "value": value} for name, value in values.items() if name not in given]


def _store_elsewhere(job: DDPJob) -> list[str]:
    """Return the setting that keeps torchrun from hosting the rendezvous store itself.

    The coordinator hosts the store. If the coordinator has its own pod, torchrun detects that the
    store is not local, so a `command` needs the setting only if the coordinator shares a pod with a
    node. Other jobs with a `command` do not get the setting, because it would also prevent
    `torchrun --standalone` from hosting its own store.
    """
    shared = job.spec.rendezvous.placement is Placement.MASTER
    return ["is_host=false"] if job.spec.under_torchrun or shared else []


def _checkpoints_shared(job: DDPJob) -> bool:
    """Whether all pods of the job see the same checkpoint files.

    The files are on the volume of storage.checkpoints unless podTemplate mounts a different volume
    at the same path.
    """
    storage, pod = job.spec.storage, job.spec.pod_template.get("spec") or {}
    if storage.url:
        return False
    for mount in trainer_of(pod).get("volumeMounts") or ():
        if mounted_at(mount) == storage.checkpoint_path.rstrip("/"):
            volume: Json = next((v for v in pod.get("volumes") or () if v.get("name") == mount.get("name")), {})
            return not _NETWORK_SOURCES.isdisjoint(volume) and "subPathExpr" not in mount
    return storage.checkpoints is not None and storage.checkpoints.seen_by_every_node


def _backend(spec: JobSpec) -> str:
    """Return the name of the backend that scripts pass to init_process_group.

    The name is empty if spec.backend is `auto` and the backend for the job's devices is unknown.
    """
    if spec.backend != "auto":
        return spec.backend
    if not spec.gpus_per_node:
        return "gloo"
    return next((backend for domain, backend in _BACKENDS.items() if spec.gpu_resource.startswith(domain)), "")


def _preflight(spec: JobSpec, preflight: Preflight, folder: str) -> str:
    """Return the launcher's preflight settings as JSON.

    `folder` is the checkpoint folder.
    """
    checkpoints = spec.storage.checkpoints
    settings = {
        "group": preflight.scope is PreflightScope.GROUP,
        "seconds": preflight.timeout_seconds,
        "least": preflight.min_megabytes_per_second or 0,
        "gpus": spec.gpus_per_node,
        "resource": spec.gpu_resource,
        "backend": spec.backend,
        "folder": "" if checkpoints is not None and checkpoints.read_only else folder,
    }
    return json.dumps(settings)


def _interface(job: DDPJob) -> list[Json]:
    """Return the variables that make NCCL and Gloo use the interface in spec.network.interface.

    A variable that spec.env sets is left out. A value in podTemplate takes precedence.
    """
    given, name = {variable["name"] for variable in job.spec.env}, job.spec.network.interface
    variables = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name else ()
    return [{"name": variable, "value": name} for variable in variables if variable not in given]


def _bucket(job: DDPJob, platform: Platform) -> list[Json]:
    """Return the trainer's environment variables for the bucket in storage.checkpoints.url.

    The variables refer to the Secret with the credentials, and never contain a copy of them.
    """
    checkpoints = job.spec.storage.checkpoints
    if checkpoints is None or checkpoints.url is None:
        return []
    values = {
        "DDPJOB_CHECKPOINT_URL": f"{checkpoints.url.rstrip('/')}/{platform.bucket_folder(job)}",
        "AWS_ENDPOINT_URL": checkpoints.endpoint,
        "AWS_REGION": checkpoints.region,
        # boto3 reads AWS_DEFAULT_REGION instead of AWS_REGION.
        "AWS_DEFAULT_REGION": checkpoints.region,
    }
    found: list[Json] = [{"name": name, "value": value} for name, value in values.items() if value]
    return [*found, *_keys(checkpoints.secret_name, "")]


def _data_bucket(job: DDPJob) -> list[Json]:
    """Return the launcher's environment variables for the bucket in storage.data.url.

    The variables have a prefix, because other tools read the names without a prefix, which describe
    the checkpoints' bucket. The two buckets may differ.
    """
    data = job.spec.storage.data
    if data is None or data.url is None:
        return []
    values = {"URL": data.url, "ENDPOINT": data.endpoint, "REGION": data.region}
    found: list[Json] = [{"name": DATA_PREFIX + name, "value": value} for name, value in values.items() if value]
    return [*found, *_keys(data.secret_name, DATA_PREFIX)]


def _code(job: DDPJob, platform: Platform) -> list[Json]:
    """Return the launcher's environment variables for the archive of spec.code.

    The result is empty if the code comes from git.
    """
    code = job.spec.code
    if code is None or code.git:
        return []
    values = {
        "URL": code.archive,
        "DIGEST": code.digest,
        "ENDPOINT": code.endpoint,
        "REGION": code.region,
        "DIR": platform.code_path or CODE_FOLDER,
    }
    found: list[Json] = [{"name": CODE_PREFIX + name, "value": value} for name, value in values.items() if value]
    return [*found, *_keys(code.secret_name, CODE_PREFIX)]


def _clone(job: DDPJob, platform: Platform) -> Json:
    """Return the pod spec's `initContainers` with the container that clones spec.code.git.

    The result is empty if the code does not come from git.
    """
    git = job.spec.code.git if job.spec.code else None
    if git is None:
        return {}
    return {"initContainers": [build_clone(git, platform.git_image, _CODE_MOUNT, job.spec.env)]}


def _keys(secret: str | None, prefix: str) -> list[Json]:
    found = []
    for name in SECRET_KEYS if secret else ():
        source: Json = {"name": secret, "key": name}
        if name == "AWS_SESSION_TOKEN":
            source["optional"] = True
        found.append({"name": prefix + name, "valueFrom": {"secretKeyRef": source}})
    return found


def _grace(job: DDPJob) -> int:
    grace: Any = job.spec.pod_template.get("spec", {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE)
    # Kubernetes treats a negative grace period as 1 second, and the coordinator rejects values
    # above MAX_SECONDS.
    return min(int(grace), MAX_SECONDS) if grace >= 0 else 1


def _identity(job: DDPJob, status: JobStatus, pod: str) -> dict[str, str]:
    return {
        "DDPJOB_NAME": job.name,
        "DDPJOB_NAMESPACE": job.namespace,
        "DDPJOB_UID": job.uid,
        "DDPJOB_POD": pod,
        "DDPJOB_GENERATION": str(status.rendezvous.generation),
    }


def _coordinator(job: DDPJob, status: JobStatus, platform: Platform) -> Json:
    rendezvous = job.spec.rendezvous
    arguments = _coordinator_arguments(job, status, platform)
    container = _container(job, COORDINATOR_CONTAINER, _program(platform, "coordinator"), arguments)
    pod = coordinator_pod_name(job, status.rendezvous.generation, status.rendezvous.attempt)
    container["env"] = [
        _POD_IP,
        token_variable(job, platform),
        *({"name": name, "value": value} for name, value in _identity(job, status, pod).items()),
        _NO_DEVICES,
    ]
    if job.spec.rank_order:
        container["env"].append({"name": "DDPJOB_RANK_ORDER", "value": "1"})
    if job.spec.recovery.max_restarts == 0:
        container["env"].append({"name": "DDPJOB_NO_RESTARTS", "value": "1"})
    container["resources"] = _with_limits(rendezvous.resources)
    container["volumeMounts"] = [_runtime_mount(platform)]
    container["ports"] = [
        {"name": "rendezvous", "containerPort": rendezvous.port},
        {"name": "coordinator", "containerPort": rendezvous.endpoint_port},
    ]
    return container


def _with_limits(resources: Json) -> Json:
    """Return the coordinator's resources with a limit and a request for CPU and memory.

    Without limits, a ResourceQuota may refuse the pod, and a LimitRange may set limits below the
    requests. Each limit comes with a request, because Kubernetes would set a missing request to the
    limit.
    """
    given = resources.get("limits", {})
    usual = default_of("spec.rendezvous.resources.requests")
    requests = {kind: least for kind, least in usual.items() if kind not in given} | resources.get("requests", {})
    limits = {
        kind: max(most, requests.get(kind, most), key=lambda quantity: amount(quantity) or 0.0)
        for kind, most in _COORDINATOR_LIMITS.items()
    }
    return {**resources, "requests": requests, "limits": limits | given}


def _coordinator_arguments(job: DDPJob, status: JobStatus, platform: Platform) -> list[str]:
    recovery, rendezvous = job.spec.recovery, job.spec.rendezvous
    arguments = [
        f"--port={rendezvous.endpoint_port}",
        f"--nodes={job.spec.nodes}",
        f"--min-nodes={job.spec.min_nodes}",
        f"--mode={recovery.mode}",
        f"--attempt={status.rendezvous.attempt}",
        f"--backoff={recovery.backoff.initial:g}:{recovery.backoff.maximum:g}",
    ]
    if platform.coordinator_listens_on:
        arguments.append(f"--host={platform.coordinator_listens_on}")
    if not job.spec.fast:
        arguments.append(f"--store-port={rendezvous.port}")
    if recovery.hang_after_seconds is not None:
        arguments.append(f"--hang-after={recovery.hang_after_seconds}")
    if recovery.hangs is not Hangs.END:
        arguments.append(f"--hangs={recovery.hangs}")
    return arguments


# --- volumes ----------------------------------------------------------------------------------------------------


def _runtime_volume(status: JobStatus) -> Json:
    # The files must be executable, because torchrun in a `command` starts its workers by executing
    # one of them.
    return {"name": RUNTIME_VOLUME, "configMap": {"name": status.runtime, "defaultMode": 0o555}}


def _runtime_mount(platform: Platform) -> Json:
    return {"name": RUNTIME_VOLUME, "mountPath": platform.runtime_path, "readOnly": True}


def _volumes(job: DDPJob, status: JobStatus) -> list[Json]:
    storage = job.spec.storage
    volumes = [
        _runtime_volume(status),
        {"name": "ddpjob-shm", "emptyDir": {"medium": "Memory", "sizeLimit": storage.shared_memory}},
        {"name": "ddpjob-checkpoints", **_checkpoints(job)},
    ]
    if job.spec.recovery.keeps_snapshots:
        memory = {"medium": "Memory", "sizeLimit": storage.snapshot_memory}
        volumes.append({"name": SNAPSHOT_VOLUME, "emptyDir": memory})
    if storage.data:
        volumes.append({"name": "ddpjob-data", **_data(storage.data)})
    if job.spec.code:
        volumes.append({"name": FETCHED_CODE_VOLUME, "emptyDir": {}})
    return volumes


def _data(volume: DataVolume) -> Json:
    if volume.cache:
        return {"hostPath": {"path": volume.cache, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {}} if volume.url else _source(volume)


def _checkpoints(job: DDPJob) -> Json:
    volume = job.spec.storage.checkpoints
    if volume is None or volume.url:
        return {"emptyDir": {}}
    if job.made_claim:
        return {"persistentVolumeClaim": {"claimName": job.made_claim, "readOnly": False}}
    return _source(volume)


def _source(volume: Volume) -> Json:
    if volume.claim_name:
        return {"persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": volume.read_only}}
    if volume.nfs:
        return {"nfs": dict(volume.nfs)}
    return {"hostPath": {"path": volume.host_path}}


def _mounts(job: DDPJob, platform: Platform) -> list[Json]:
    storage = job.spec.storage
    mounts: list[Json] = [_runtime_mount(platform), {"name": "ddpjob-shm", "mountPath": "/dev/shm"}]
    if job.spec.recovery.keeps_snapshots:
        mounts.append({"name": SNAPSHOT_VOLUME, "mountPath": SNAPSHOT_PATH})
    if job.spec.code:
        mounts.append(dict(_CODE_MOUNT))
    for name, volume in (
        ("ddpjob-checkpoints", storage.checkpoints or Volume(mount_path=storage.checkpoint_path, read_only=False)),
        ("ddpjob-data", storage.data),
    ):
        if volume is None:
            continue
        mount: Json = {"name": name, "mountPath": volume.mount_path}
        fetched = isinstance(volume, DataVolume) and volume.url
        folder = job.checkpoint_folder if volume is storage.checkpoints else volume.sub_path
        if folder:
            mount["subPath"] = folder
        if isinstance(volume, DataVolume) and volume.cache:
            mount["subPath"] = f"{job.namespace}/{volume.fetched_folder}"
        if volume.read_only and not fetched:
            mount["readOnly"] = True
        mounts.append(mount)
    return mounts
