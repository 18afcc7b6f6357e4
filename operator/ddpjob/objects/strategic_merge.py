"""Merges spec.podTemplate into the pods that the operator builds.

A null in the template does not remove a field, because JobSpec.read returns a template without
nulls.
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
    """Merge the whole podTemplate into a node's pod.

    With placement Master, this pod also contains the coordinator's container, which gets only the
    trainer's settings that a coordinator needs.
    """
    spec = dict(template.get("spec") or {})
    if spec.get("hostNetwork") and spec.get("dnsPolicy", "ClusterFirst") == "ClusterFirst":
        # For a pod on the host's network, the default policy ClusterFirst uses the host's name
        # server, which cannot resolve the host names of the job's pods.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    if any(c["name"] == COORDINATOR_CONTAINER for c in pod["spec"]["containers"]):
        spec["containers"] = [*(spec.get("containers") or ()), *_coordinator_containers(spec)]
    return _merged(pod, template, spec)


def _merged(pod: Json, template: Mapping[str, Any], spec: Mapping[str, Any]) -> Json:
    """Return `pod` merged with `spec` and with the labels and annotations from the template.

    The operator's value is used for a label or annotation that the operator and the template both
    set.
    """
    merged: Json = merge(pod, {"spec": spec})
    for container in merged["spec"]["containers"]:
        _keep_privileges(container.get("securityContext", {}))
    for container in (*(merged["spec"].get("initContainers") or ()), *merged["spec"]["containers"]):
        # If a container fails without a termination message, this policy makes the kubelet report
        # the end of the container's log. The pod's status then shows the reason for the failure.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _give_temporary_folder(merged["spec"])
    for kind in ("labels", "annotations"):
        given = (template.get("metadata") or {}).get(kind) or {}
        if given:
            meta = merged["metadata"]
            merged["metadata"] = {**meta, kind: {**given, **meta.get(kind, {})}}
    return merged


def _give_temporary_folder(spec: Json) -> None:
    """Mount a volume at /tmp in each of our containers that has a read-only root file system.

    Python needs a folder for temporary files. A container that already mounts a volume at /tmp
    stays unchanged.
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
    """Remove allowPrivilegeEscalation if the template asks for privileges that contradict it.

    The API server would refuse a pod with such a contradiction.
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
"""Matches the names of runtime classes that need a machine with devices. Other machines may lack
the handlers for these classes. Classes such as kata and gVisor do not match, because every machine
in a cluster has their handlers."""
_OF_DEVICES = re.compile(r"(?:NVIDIA|CUDA|HIP|ROCR|HSA|GPU|HABANA|ASCEND|ZE|NEURON)_")
"""Matches the names of variables that a runtime or a library uses to select devices."""
_FAST_NETWORKS = (
    "k8s.v1.cni.cncf.io/networks",
    "networking.gke.io/interfaces",
    "networking.gke.io/default-interface",
)
"""Annotations that make Multus or GKE add fast network interfaces to a pod. The coordinator's pod
does not get these annotations. On GKE, it would use up interfaces that training pods need. With
SR-IOV, its network setup would fail, because it does not request an SR-IOV device."""
_OF_A_CONTAINER = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of annotations whose names end with the name of a container. If a pod has no container of
that name, the API server refuses the pod."""
_OF_A_POD_SET = "kueue.x-k8s.io/podset-"
"""Prefix of the annotations by which Kueue places the nodes. The coordinator does not get these
annotations, because it belongs to a pod set of its own and Kueue refuses a pod with two annotations
for the topology."""
_MACHINE_KEYS = "kubernetes.io/"
_LOCAL_SOURCES = ("hostPath", "emptyDir", "configMap", "secret", "projected", "downwardAPI", "image")
_DEVICES = ("CharDevice", "BlockDevice", "Socket")
"""Types of hostPath volumes that exist only on machines with devices. On any other machine, the
kubelet would wait for the path."""


def merge_into_coordinator(pod: Json, template: Mapping[str, Any]) -> Json:
    """Return the coordinator's pod with the parts of podTemplate that the image needs to run.

    The coordinator does not need a GPU, so it can run on machines where nodes cannot. Claims and
    fast networks are therefore left out. Of nodeSelector and the required node affinity, only keys
    that begin with kubernetes.io/ are kept, such as the architecture and the operating system.
    """
    spec = template.get("spec") or {}
    taken: Json = {field: spec[field] for field in _COORDINATOR_SPEC if field in spec}
    if not _GPU_CLASS.search(spec.get("runtimeClassName") or "nvidia"):
        taken["runtimeClassName"] = spec["runtimeClassName"]
    if "securityContext" in taken:
        # Leave out sysctls, because the kubelet of a machine without devices may not allow them.
        taken["securityContext"] = {k: v for k, v in taken["securityContext"].items() if k != "sysctls"}
    selector = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if key.startswith(_MACHINE_KEYS)}
    if selector:
        taken["nodeSelector"] = selector
    if terms := _machine_terms(spec):
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        taken["affinity"] = {"nodeAffinity": required}
    containers = _coordinator_containers(spec)
    mounted = {mount.get("name") for container in containers for mount in container.get("volumeMounts", ())}
    # Take only the volumes that the coordinator mounts. The kubelet would wait for any other volume
    # too, such as one for the sidecar of a fast network. Keep a volume without a name, so that the
    # API server reports the mistake.
    if volumes := [v for v in _local_volumes(spec) if v.get("name") in {None, *mounted}]:
        taken["volumes"] = volumes
    metadata = template.get("metadata") or {}
    given = (metadata.get("annotations") or {}).items()
    others = (_OF_A_CONTAINER, _OF_A_POD_SET)
    annotations = {k: v for k, v in given if k not in _FAST_NETWORKS and not k.startswith(others)}
    kept = {**template, "metadata": {**metadata, "annotations": annotations}}
    return _merged(pod, kept, {**taken, "containers": containers})


def trainer_of(spec: Mapping[str, Any]) -> Json:
    """Return the trainer's container in the template's `spec`.

    The result is empty if the template does not contain the trainer.
    """
    return next((c for c in spec.get("containers") or () if c.get("name") == TRAINER_CONTAINER), {})


def _machine_terms(spec: Mapping[str, Any]) -> list[Json]:
    """Return the terms of the required node affinity, with only their kubernetes.io/ keys.

    A machine is allowed if it meets any of the terms. A term without such keys would allow every
    machine, so the result is empty if any term has none.
    """
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [
        [e for e in term.get("matchExpressions") or () if str(e.get("key")).startswith(_MACHINE_KEYS)]
        for term in required.get("nodeSelectorTerms") or ()
    ]
    return [{"matchExpressions": term} for term in terms] if all(terms) else []


def _local_volumes(spec: Mapping[str, Any]) -> list[Json]:
    """Return the volumes that a pod can mount without a claim and on any machine."""
    volumes = spec.get("volumes") or ()
    return [v for v in volumes if any(source in v for source in _LOCAL_SOURCES) and not _is_of_a_training_machine(v)]


def _is_of_a_training_machine(volume: Mapping[str, Any]) -> bool:
    """Whether a volume can be mounted only on training machines.

    Such a volume is a device, or consists of huge pages, which a container must also request. A pod
    with the volume would never start on any other machine.
    """
    host, memory = volume.get("hostPath") or {}, (volume.get("emptyDir") or {}).get("medium") or ""
    is_device = host.get("type") in _DEVICES or f"{host.get('path', '')}/".startswith("/dev/")
    return is_device or memory.startswith("HugePages")


def _coordinator_containers(spec: Mapping[str, Any]) -> list[Json]:
    """Return the coordinator's container with the settings that it shares with the trainer.

    The coordinator runs the same image as the trainer, so it needs some of the same settings. The
    result is a list with this one container, or an empty list if the template has no such settings.
    """
    # Keep a volume without a name. The API server refuses it, and the job's condition then shows
    # the path of the mistake.
    names = {v.get("name") for v in _local_volumes(spec)}
    trainer = trainer_of(spec)
    container = {field: trainer[field] for field in _COORDINATOR_CONTAINER_FIELDS if field in trainer}
    if "securityContext" in container:
        container["securityContext"] = {k: v for k, v in container["securityContext"].items() if k != "privileged"}
    if "env" in container:
        container["env"] = [e for e in container["env"] if not _OF_DEVICES.match(e.get("name") or "")]
    if "volumeMounts" in container:
        # Leave out mounts with a subPathExpr, because the expression may refer to variables that
        # only the trainer has.
        mounts = (m for m in container["volumeMounts"] if "subPathExpr" not in m)
        container["volumeMounts"] = [m for m in mounts if m.get("name") in names]
    return [{"name": COORDINATOR_CONTAINER, **container}] if container else []
