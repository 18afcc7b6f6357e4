"""spec.podTemplate: what is wrong with it, and how it is laid over the pods that the operator builds.

Lists merge by the keys that Kubernetes' strategic merge uses for them, so that an overlay adds a volume or
changes the trainer's securityContext without repeating the rest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from ddpjob.api.types import Json
from ddpjob.core.world import COORDINATOR_CONTAINER, TRAINER_CONTAINER

_OWNED_SPEC = {
    "restartPolicy": "a pod that ends is replaced by the operator, not restarted by the kubelet",
    "hostname": "names carry the attempt",
    "subdomain": "it is the job's service",
    "nodeName": "use nodeSelector or affinity; a lost node could not be left otherwise",
    "activeDeadlineSeconds": "use spec.runPolicy.activeDeadlineSeconds",
    "schedulerName": "use spec.scheduling.schedulerName",
    "priorityClassName": "use spec.scheduling.priorityClassName",
    "imagePullSecrets": "use spec.imagePullSecrets",
}
_OWNED_CONTAINER = {
    "image": "use spec.image",
    "imagePullPolicy": "use spec.imagePullPolicy",
    "command": "use spec.command, spec.script or spec.module",
    "args": "use spec.args",
    "envFrom": "use spec.envFrom",
    "workingDir": "use spec.workingDir",
    "resources": "use spec.resources, spec.gpusPerNode and spec.gpuResource",
}
_OWNED_VARIABLES = re.compile(r"(DDPJOB_|PET_).*|POD_IP|NODE_NAME|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK")
_OWNED_METADATA = ("name", "generateName", "namespace", "ownerReferences", "finalizers")
_OWNED_MOUNTS = {"/opt/ddpjob": "the pod files", "/dev/shm": "spec.storage.sharedMemory"}

_LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "env": "name",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
_APPENDED = ("tolerations",)


# --- what is wrong ----------------------------------------------------------------------------------------------


def problems(template: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence for each fault of a podTemplate, with its path and what to write instead."""
    unknown = tuple(_unknown_fields(template, "V1PodTemplateSpec", "spec.podTemplate"))
    return unknown or tuple(_overrides(template))


def _overrides(template: Mapping[str, Any]) -> Iterator[str]:
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for field in _OWNED_METADATA:
        if field in metadata:
            yield f"spec.podTemplate.metadata.{field}: belongs to the operator; remove it"
    for kind in ("labels", "annotations"):
        for key in metadata.get(kind) or {}:
            if key.split("/")[0] == "ddpjob.io" or key == "app.kubernetes.io/managed-by":
                yield f"spec.podTemplate.metadata.{kind}.{key}: belongs to the operator; remove it"
    for field, remedy in _OWNED_SPEC.items():
        if field in spec:
            yield f"spec.podTemplate.spec.{field}: belongs to the operator; remove it ({remedy})"
    yield from _volume_overrides(spec)
    for kind in ("containers", "initContainers"):
        for position, container in enumerate(spec.get(kind) or ()):
            yield from _container_overrides(container, f"spec.podTemplate.spec.{kind}[{position}]", kind)


def _volume_overrides(spec: Mapping[str, Any]) -> Iterator[str]:
    for position, volume in enumerate(spec.get("volumes") or ()):
        if str(volume.get("name", "")).startswith("ddpjob-"):
            yield f"spec.podTemplate.spec.volumes[{position}].name: names that begin with ddpjob- belong to the operator; choose another"


def _container_overrides(container: Mapping[str, Any], path: str, kind: str) -> Iterator[str]:
    name = container.get("name")
    if not name:
        yield f"{path}.name: missing; name it {TRAINER_CONTAINER} to change the training container, anything else for a sidecar"
        return
    if name == COORDINATOR_CONTAINER or (name == TRAINER_CONTAINER and kind == "initContainers"):
        yield f"{path}.name: {name} belongs to the operator; choose another name"
    if name != TRAINER_CONTAINER:
        if not container.get("image"):
            yield f"{path}.image: missing for the sidecar {name} (the training container's name is {TRAINER_CONTAINER})"
        return
    for field, remedy in _OWNED_CONTAINER.items():
        if field in container:
            yield f"{path}.{field}: belongs to the operator; remove it ({remedy})"
    for position, variable in enumerate(container.get("env") or ()):
        if _OWNED_VARIABLES.fullmatch(str(variable.get("name"))):
            yield f"{path}.env[{position}].name: {variable['name']} is set by the operator; remove it"
    for position, mount in enumerate(container.get("volumeMounts") or ()):
        owner = _OWNED_MOUNTS.get(str(mount.get("mountPath", "")).rstrip("/"))
        if owner:
            yield f"{path}.volumeMounts[{position}].mountPath: {mount['mountPath']} holds {owner}; choose another path"


def _unknown_fields(value: Any, type_name: str, path: str) -> Iterator[str]:
    """Checks names and kinds of fields against the models of the official client."""
    listed = re.fullmatch(r"[Ll]ist\[(.+)\]", type_name)
    mapped = re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", type_name)
    if value is None:
        return
    if listed:
        if not isinstance(value, list):
            yield f"{path}: must be a list, not {_kind(value)}"
            return
        for position, item in enumerate(value):
            yield from _unknown_fields(item, listed[1], f"{path}[{position}]")
    elif mapped:
        if not isinstance(value, Mapping):
            yield f"{path}: must be a mapping, not {_kind(value)}"
        elif ("labels" in path or "annotations" in path) and any(not isinstance(v, str) for v in value.values()):
            yield f"{path}: values must be strings; put quotes around numbers and booleans"
    elif type_name in _SCALARS:
        if not isinstance(value, _SCALARS[type_name]) or (isinstance(value, bool) and type_name != "bool"):
            yield f"{path}: must be {_SCALAR_NAMES[type_name]}, not {_kind(value)} ({value!r})"
    elif type_name not in ("object", "datetime"):
        yield from _unknown_in_model(value, type_name, path)


_SCALARS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
_SCALAR_NAMES = {"str": "a string", "int": "an integer", "bool": "true or false", "float": "a number"}


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", int: "an integer"}.get(type(value), type(value).__name__)


def _unknown_in_model(value: Any, type_name: str, path: str) -> Iterator[str]:
    from kubernetes.client import models

    model = getattr(models, type_name)
    if not isinstance(value, Mapping):
        yield f"{path}: must be a mapping, not {_kind(value)}"
        return
    attributes = {json_name: attribute for attribute, json_name in model.attribute_map.items()}
    for name, item in value.items():
        if name in attributes:
            yield from _unknown_fields(item, model.openapi_types[attributes[name]], f"{path}.{name}")
        else:
            near = difflib.get_close_matches(str(name), attributes, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(attributes)[:12])}, ..."
            yield f"{path}.{name}: no such field{hint}"


# --- laying it over ---------------------------------------------------------------------------------------------


def node_overlay(pod: Json, template: Mapping[str, Any]) -> Json:
    """A node pod with the whole overlay; in placement Master its second container gets the coordinator's part too."""
    spec = dict(template.get("spec") or {})
    if spec.get("hostNetwork"):
        # The default, ClusterFirst, means the node's own name server there, which knows no pod of the job.
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    if any(c["name"] == COORDINATOR_CONTAINER for c in pod["spec"]["containers"]):
        spec["containers"] = [*(spec.get("containers") or ()), *_coordinator_containers(spec)]
    return _lay_over(pod, template, spec)


def _lay_over(pod: Json, template: Mapping[str, Any], spec: Mapping[str, Any]) -> Json:
    """Labels and annotations of the operator win."""
    merged: Json = merge(pod, {"spec": spec})
    for kind in ("labels", "annotations"):
        given = (template.get("metadata") or {}).get(kind) or {}
        if given:
            merged["metadata"][kind] = {**given, **merged["metadata"].get(kind, {})}
    return merged


_COORDINATOR_SPEC = (
    "tolerations",
    "serviceAccountName",
    "securityContext",
    "dnsPolicy",
    "dnsConfig",
    "hostAliases",
    "hostUsers",
    "runtimeClassName",
)
_COORDINATOR_CONTAINER_FIELDS = ("securityContext", "volumeMounts", "env")
_LOCAL_SOURCES = ("hostPath", "emptyDir", "configMap", "secret", "projected", "downwardAPI", "image")


def coordinator_overlay(pod: Json, template: Mapping[str, Any]) -> Json:
    """The coordinator takes over what lets the image run and be placed, but neither claims nor the nodes' selector.

    Of nodeSelector only kubernetes.io/ keys count (architecture, operating system): it needs no GPU node.
    """
    spec = template.get("spec") or {}
    taken: Json = {field: spec[field] for field in _COORDINATOR_SPEC if field in spec}
    selector = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if key.startswith("kubernetes.io/")}
    if selector:
        taken["nodeSelector"] = selector
    if volumes := _local_volumes(spec):
        taken["volumes"] = volumes
    return _lay_over(pod, template, {**taken, "containers": _coordinator_containers(spec)})


def _local_volumes(spec: Mapping[str, Any]) -> list[Json]:
    """Those that need no claim."""
    return [v for v in spec.get("volumes") or () if any(source in v for source in _LOCAL_SOURCES)]


def _coordinator_containers(spec: Mapping[str, Any]) -> list[Json]:
    """The coordinator's part of an overlay: what the trainer's image needs there to run, it needs here too."""
    names = {v["name"] for v in _local_volumes(spec)}
    trainer: Json = next((c for c in spec.get("containers") or () if c.get("name") == TRAINER_CONTAINER), {})
    container = {field: trainer[field] for field in _COORDINATOR_CONTAINER_FIELDS if field in trainer}
    if "volumeMounts" in container:
        container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] in names]
    return [{"name": COORDINATOR_CONTAINER, **container}] if container else []


def merge(base: Json, overlay: Mapping[str, Any]) -> Json:
    """A new object: mappings merge, keyed lists merge by key, all else is replaced; null removes."""
    merged = deepcopy(base)
    for field, value in overlay.items():
        old = merged.get(field)
        if value is None:
            merged.pop(field, None)
        elif isinstance(old, dict) and isinstance(value, Mapping):
            merged[field] = merge(old, value)
        elif isinstance(old, list) and isinstance(value, list) and field in _APPENDED:
            merged[field] = [item for item in old if not _answered(item, value)] + deepcopy(value)
        elif isinstance(old, list) and isinstance(value, list) and field in _LIST_KEYS:
            merged[field] = _merge_list(old, value, _LIST_KEYS[field])
        else:
            merged[field] = deepcopy(value)
    return merged


def _answered(toleration: Json, given: list[Json]) -> bool:
    """Whether the overlay speaks of the same taint."""
    return any(t.get("key") == toleration["key"] for t in given)


def _merge_list(old: list[Json], new: list[Json], key: str) -> list[Json]:
    merged = [deepcopy(item) for item in old]
    positions = {item.get(key): position for position, item in enumerate(merged)}
    for item in new:
        position = positions.get(item.get(key))
        if position is None:
            merged.append(deepcopy(item))
        else:
            merged[position] = merge(merged[position], item)
    return merged
