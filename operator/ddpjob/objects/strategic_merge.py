"""Merges spec.podTemplate into the pods that the operator builds.

Nothing is removed by null: a template without nulls is what JobSpec.read gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ddpjob.api.job_spec import Json
from ddpjob.api.merging import merge, mounted_at
from ddpjob.core.world import COORDINATOR_CONTAINER, TRAINER_CONTAINER

TMP_VOLUME = "ddpjob-tmp"


def merge_into_node(pod: Json, template: Mapping[str, Any]) -> Json:
    """A node's pod with the whole template; in placement Master the coordinator's container gets its part."""
    spec = dict(template.get("spec") or {})
    if spec.get("hostNetwork") and spec.get("dnsPolicy", "ClusterFirst") == "ClusterFirst":
        # Kubernetes' default, written or not: there it means the host's own name server, which knows no pod of the job.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    if any(c["name"] == COORDINATOR_CONTAINER for c in pod["spec"]["containers"]):
        spec["containers"] = [*(spec.get("containers") or ()), *_coordinator_containers(spec)]
    return _merged(pod, template, spec)


def _merged(pod: Json, template: Mapping[str, Any], spec: Mapping[str, Any]) -> Json:
    """`pod` with the template's metadata and `spec`. Labels and annotations of the operator take precedence."""
    merged: Json = merge(pod, {"spec": spec})
    for container in merged["spec"]["containers"]:
        _keep_privileges(container.get("securityContext", {}))
    for container in (*(merged["spec"].get("initContainers") or ()), *merged["spec"]["containers"]):
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # Else it fails without a reason.
    _give_temporary_folder(merged["spec"])
    for kind in ("labels", "annotations"):
        given = (template.get("metadata") or {}).get(kind) or {}
        if given:
            meta = merged["metadata"]
            merged["metadata"] = {**meta, kind: {**given, **meta.get(kind, {})}}
    return merged


def _give_temporary_folder(spec: Json) -> None:
    """Mounts a volume at /tmp where the template makes a container's root read-only: Python needs such a folder."""
    mount, needed = {"name": TMP_VOLUME, "mountPath": "/tmp"}, False
    for container in spec["containers"]:
        mounts = container.get("volumeMounts") or []
        if container.get("name") not in (TRAINER_CONTAINER, COORDINATOR_CONTAINER):
            continue
        if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") and not any(
            mounted_at(known) == "/tmp" for known in mounts
        ):
            container["volumeMounts"], needed = [*mounts, mount], True
    if needed:
        spec["volumes"] = [*(spec.get("volumes") or ()), {"name": TMP_VOLUME, "emptyDir": {}}]


def _keep_privileges(context: Json) -> None:
    """Removes the default that the API server refuses beside privileges that the template gives."""
    added = context.get("capabilities", {}).get("add", ())
    if context.get("privileged") or not {"SYS_ADMIN", "CAP_SYS_ADMIN"}.isdisjoint(added):
        context.pop("allowPrivilegeEscalation", None)


_COORDINATOR_SPEC = (
    "tolerations",
    "serviceAccountName",
    "securityContext",
    "dnsPolicy",
    "dnsConfig",
    "hostAliases",
    "hostUsers",
)
_COORDINATOR_CONTAINER_FIELDS = ("securityContext", "volumeMounts", "env")
_GPU_CLASS = re.compile(r"nvidia|gpu|cuda|amd|rocm|habana|gaudi|ascend|neuron", re.IGNORECASE)
"""Names of runtime classes for devices. A machine without devices may lack their handler; kata's and gVisor's are of
the whole cluster."""
_OF_DEVICES = re.compile(r"(?:NVIDIA|CUDA|HIP|ROCR|HSA|GPU|HABANA|ASCEND|ZE|NEURON)_")
"""Beginnings of variables that choose devices for a runtime or a library."""
_FAST_NETWORKS = (
    "k8s.v1.cni.cncf.io/networks",
    "networking.gke.io/interfaces",
    "networking.gke.io/default-interface",
)
"""Annotations by which Multus and GKE give a pod more interfaces. Those devices are for the pods that train: GKE would
take some from them, and SR-IOV makes no network for a pod that has requested none."""
_OF_A_CONTAINER = "container.apparmor.security.beta.kubernetes.io/"
"""Annotations that end with a container's name: the API server refuses a pod that has no such container."""
_MACHINE_KEYS = "kubernetes.io/"
_LOCAL_SOURCES = ("hostPath", "emptyDir", "configMap", "secret", "projected", "downwardAPI", "image")
_DEVICES = ("CharDevice", "BlockDevice", "Socket")
"""Types of hostPath for which the kubelet waits: only a machine with the devices has them."""


def merge_into_coordinator(pod: Json, template: Mapping[str, Any]) -> Json:
    """The coordinator's pod with what lets its image run, without claims, fast networks and the nodes' selector.

    Of nodeSelector and required node affinity only kubernetes.io/ keys are taken (architecture,
    operating system): it needs no GPU.
    """
    spec = template.get("spec") or {}
    taken: Json = {field: spec[field] for field in _COORDINATOR_SPEC if field in spec}
    if not _GPU_CLASS.search(spec.get("runtimeClassName") or "nvidia"):
        taken["runtimeClassName"] = spec["runtimeClassName"]
    if "securityContext" in taken:
        # The kubelets of the nodes may allow sysctls that others refuse.
        taken["securityContext"] = {k: v for k, v in taken["securityContext"].items() if k != "sysctls"}
    selector = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if key.startswith(_MACHINE_KEYS)}
    if selector:
        taken["nodeSelector"] = selector
    if terms := _machine_terms(spec):
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        taken["affinity"] = {"nodeAffinity": required}
    containers = _coordinator_containers(spec)
    mounted = {mount.get("name") for container in containers for mount in container.get("volumeMounts", ())}
    # The kubelet waits for the others too: those of a sidecar, such as a fast network's. One without a name is refused.
    if volumes := [v for v in _local_volumes(spec) if v.get("name") in {None, *mounted}]:
        taken["volumes"] = volumes
    metadata = template.get("metadata") or {}
    given = (metadata.get("annotations") or {}).items()
    annotations = {k: v for k, v in given if k not in _FAST_NETWORKS and not k.startswith(_OF_A_CONTAINER)}
    kept = {**template, "metadata": {**metadata, "annotations": annotations}}
    return _merged(pod, kept, {**taken, "containers": containers})


def trainer_of(spec: Mapping[str, Any]) -> Json:
    """What the template says of the trainer's container; empty: nothing. `spec`: the template's."""
    return next((c for c in spec.get("containers") or () if c.get("name") == TRAINER_CONTAINER), {})


def _machine_terms(spec: Mapping[str, Any]) -> list[Json]:
    """The required terms, one of which must hold, without other keys; none where one would then allow any machine."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [
        [e for e in term.get("matchExpressions") or () if str(e.get("key")).startswith(_MACHINE_KEYS)]
        for term in required.get("nodeSelectorTerms") or ()
    ]
    return [{"matchExpressions": term} for term in terms] if all(terms) else []


def _local_volumes(spec: Mapping[str, Any]) -> list[Json]:
    """Volumes that need no claim, and nothing of a machine that trains."""
    volumes = spec.get("volumes") or ()
    return [v for v in volumes if any(source in v for source in _LOCAL_SOURCES) and not _is_of_a_training_machine(v)]


def _is_of_a_training_machine(volume: Mapping[str, Any]) -> bool:
    """Whether it is a device, or huge pages, which a container has to request: elsewhere a pod would wait for it."""
    host, memory = volume.get("hostPath") or {}, (volume.get("emptyDir") or {}).get("medium") or ""
    is_device = host.get("type") in _DEVICES or f"{host.get('path', '')}/".startswith("/dev/")
    return is_device or memory.startswith("HugePages")


def _coordinator_containers(spec: Mapping[str, Any]) -> list[Json]:
    """The coordinator's part of the template: it runs the trainer's image, which needs the same things here."""
    # What lacks a name stays: the API server refuses it with its place, which the job's condition shows.
    names = {v.get("name") for v in _local_volumes(spec)}
    trainer = trainer_of(spec)
    container = {field: trainer[field] for field in _COORDINATOR_CONTAINER_FIELDS if field in trainer}
    if "securityContext" in container:
        container["securityContext"] = {k: v for k, v in container["securityContext"].items() if k != "privileged"}
    if "env" in container:
        container["env"] = [e for e in container["env"] if not _OF_DEVICES.match(e.get("name") or "")]
    if "volumeMounts" in container:
        # A subPathExpr may name variables that only the trainer has.
        mounts = (m for m in container["volumeMounts"] if "subPathExpr" not in m)
        container["volumeMounts"] = [m for m in mounts if m.get("name") in names]
    return [{"name": COORDINATOR_CONTAINER, **container}] if container else []
