"""Merges spec.podTemplate into the pods that the operator builds.

A null does not remove anything, because JobSpec.read returns a template without nulls.
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
    """Merge a node's pod with the whole template.

    In placement Master, the pod also has the coordinator's container, which gets its part of the
    template.
    """
    spec = dict(template.get("spec") or {})
    if spec.get("hostNetwork") and spec.get("dnsPolicy", "ClusterFirst") == "ClusterFirst":
        # Kubernetes' default, ClusterFirst, selects the host's own name server for pods on the host
        # network. That server cannot resolve the names of the job's pods.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    if any(c["name"] == COORDINATOR_CONTAINER for c in pod["spec"]["containers"]):
        spec["containers"] = [*(spec.get("containers") or ()), *_coordinator_containers(spec)]
    return _merged(pod, template, spec)


def _merged(pod: Json, template: Mapping[str, Any], spec: Mapping[str, Any]) -> Json:
    """Return `pod` with the template's metadata and `spec`.

    The operator's labels and annotations take precedence.
    """
    merged: Json = merge(pod, {"spec": spec})
    for container in merged["spec"]["containers"]:
        _keep_privileges(container.get("securityContext", {}))
    for container in (*(merged["spec"].get("initContainers") or ()), *merged["spec"]["containers"]):
        # If a failing container writes no message, the end of its log becomes the reason.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _give_temporary_folder(merged["spec"])
    for kind in ("labels", "annotations"):
        given = (template.get("metadata") or {}).get(kind) or {}
        if given:
            meta = merged["metadata"]
            merged["metadata"] = {**meta, kind: {**given, **meta.get(kind, {})}}
    return merged


def _give_temporary_folder(spec: Json) -> None:
    """Mount a volume at /tmp if the template makes a container's root file system read-only.

    Python needs a temporary folder.
    """
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
    """Remove a default that conflicts with privileges set in the template.

    The API server would refuse the combination.
    """
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
"""Names of runtime classes for devices. Machines without devices may lack the handlers of these
classes, whereas the handlers of kata and gVisor exist in the whole cluster.
"""
_OF_DEVICES = re.compile(r"(?:NVIDIA|CUDA|HIP|ROCR|HSA|GPU|HABANA|ASCEND|ZE|NEURON)_")
"""Prefixes of variables that select devices for a runtime or a library."""
_FAST_NETWORKS = (
    "k8s.v1.cni.cncf.io/networks",
    "networking.gke.io/interfaces",
    "networking.gke.io/default-interface",
)
"""Annotations with which Multus and GKE add interfaces to a pod. The coordinator must not get these
interfaces, because GKE would take them from training pods, and SR-IOV does not set up a
network for a pod that has not requested it.
"""
_OF_A_CONTAINER = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of annotations that end with a container's name. The API server refuses a pod that lacks
the container."""
_OF_A_POD_SET = "kueue.x-k8s.io/podset-"
"""Prefix of annotations that determine where nodes are placed. The coordinator does not get them,
because it is a different pod set, and Kueue refuses a pod with two topology annotations."""
_MACHINE_KEYS = "kubernetes.io/"
_LOCAL_SOURCES = ("hostPath", "emptyDir", "configMap", "secret", "projected", "downwardAPI", "image")
_DEVICES = ("CharDevice", "BlockDevice", "Socket")
"""hostPath types that exist only on a machine with the devices. Elsewhere, the kubelet would wait
for them."""


def merge_into_coordinator(pod: Json, template: Mapping[str, Any]) -> Json:
    """Return the coordinator's pod with the template parts that its image needs to run.

    Claims and fast networks are left out. Of nodeSelector and required node affinity, only the
    kubernetes.io/ keys (architecture, operating system) are copied, because the coordinator does
    not need a GPU.
    """
    spec = template.get("spec") or {}
    taken: Json = {field: spec[field] for field in _COORDINATOR_SPEC if field in spec}
    if not _GPU_CLASS.search(spec.get("runtimeClassName") or "nvidia"):
        taken["runtimeClassName"] = spec["runtimeClassName"]
    if "securityContext" in taken:
        # The kubelets of training machines may allow sysctls that other kubelets refuse.
        taken["securityContext"] = {k: v for k, v in taken["securityContext"].items() if k != "sysctls"}
    selector = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if key.startswith(_MACHINE_KEYS)}
    if selector:
        taken["nodeSelector"] = selector
    if terms := _machine_terms(spec):
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        taken["affinity"] = {"nodeAffinity": required}
    containers = _coordinator_containers(spec)
    mounted = {mount.get("name") for container in containers for mount in container.get("volumeMounts", ())}
    # The kubelet would also wait for a sidecar's volumes, such as a fast network's, so only mounted
    # volumes are taken. A volume without a name is taken too, so that the API server reports it.
    if volumes := [v for v in _local_volumes(spec) if v.get("name") in {None, *mounted}]:
        taken["volumes"] = volumes
    metadata = template.get("metadata") or {}
    given = (metadata.get("annotations") or {}).items()
    others = (_OF_A_CONTAINER, _OF_A_POD_SET)
    annotations = {k: v for k, v in given if k not in _FAST_NETWORKS and not k.startswith(others)}
    kept = {**template, "metadata": {**metadata, "annotations": annotations}}
    return _merged(pod, kept, {**taken, "containers": containers})


def trainer_of(spec: Mapping[str, Any]) -> Json:
    """Return the trainer's container in the template's `spec`; empty if the template does not have
    it.
    """
    return next((c for c in spec.get("containers") or () if c.get("name") == TRAINER_CONTAINER), {})


def _machine_terms(spec: Mapping[str, Any]) -> list[Json]:
    """Return the required node affinity terms, reduced to their kubernetes.io/ keys.

    A machine must meet one of the terms. The result is empty if one of them would then allow any
    machine.
    """
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [
        [e for e in term.get("matchExpressions") or () if str(e.get("key")).startswith(_MACHINE_KEYS)]
        for term in required.get("nodeSelectorTerms") or ()
    ]
    return [{"matchExpressions": term} for term in terms] if all(terms) else []


def _local_volumes(spec: Mapping[str, Any]) -> list[Json]:
    """Return volumes that need neither a claim nor any part of a training machine."""
    volumes = spec.get("volumes") or ()
    return [v for v in volumes if any(source in v for source in _LOCAL_SOURCES) and not _is_of_a_training_machine(v)]


def _is_of_a_training_machine(volume: Mapping[str, Any]) -> bool:
    """Whether the volume exists only on training machines.

    Such a volume is a device, or huge pages, which a container must request. On other machines, a
    pod would wait for it.
    """
    host, memory = volume.get("hostPath") or {}, (volume.get("emptyDir") or {}).get("medium") or ""
    is_device = host.get("type") in _DEVICES or f"{host.get('path', '')}/".startswith("/dev/")
    return is_device or memory.startswith("HugePages")


def _coordinator_containers(spec: Mapping[str, Any]) -> list[Json]:
    """Return a list of one container, with the trainer's settings that the coordinator needs too.

    The coordinator's container runs the trainer's image. The list is empty if there are no such
    settings.
    """
    # Keep a volume without a name: the API server refuses it, and the job's condition shows the
    # path from the refusal.
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
