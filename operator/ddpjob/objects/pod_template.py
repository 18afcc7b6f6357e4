"""Finds faults in spec.podTemplate, for `ddpjob validate` and for the operator.

Unlike the API server's strict field validation, this module finds unknown fields without a cluster
and before a pod is created.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ddpjob.api.merging import mounted_at
from ddpjob.api.schema import without_nulls
from ddpjob.core.world import COORDINATOR_CONTAINER, TRAINER_CONTAINER

_NOT_RESTARTED = "remove it, because the operator replaces terminated pods and counts their failures"
_OWNED_SPEC = {
    "restartPolicy": _NOT_RESTARTED,
    "hostname": "remove it, because each attempt has a different value",
    "subdomain": "remove it, because the value must be the job's service",
    "nodeName": "use nodeSelector or affinity instead, so that pods can leave a lost Kubernetes node",
    "activeDeadlineSeconds": "use spec.runPolicy.activeDeadlineSeconds instead",
    "schedulerName": "use spec.scheduling.schedulerName instead",
    "priorityClassName": "use spec.scheduling.priorityClassName instead",
    "imagePullSecrets": "use spec.imagePullSecrets instead",
}
_OWNED_CONTAINER = {
    "image": "use spec.image instead",
    "imagePullPolicy": "use spec.imagePullPolicy instead",
    "command": "use spec.command, spec.script or spec.module instead",
    "args": "use spec.args instead",
    "envFrom": "use spec.envFrom instead",
    "workingDir": "use spec.workingDir instead",
    "resources": "use spec.resources, spec.gpusPerNode and spec.gpuResource instead; only claims are allowed here",
    "restartPolicy": _NOT_RESTARTED,
    "restartPolicyRules": _NOT_RESTARTED,
}
OWNED_VARIABLES = re.compile(r"(DDPJOB_|PET_).*|POD_IP|NODE_NAME|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK")
_OWNED_METADATA = ("name", "generateName", "namespace", "ownerReferences", "finalizers")
SNAPSHOT_PATH = "/run/ddpjob"
"""The folder that keeps the latest training states in memory."""
_OWNED_MOUNTS = {
    "/opt/ddpjob": "the runtime",
    "/dev/shm": "spec.storage.sharedMemory",
    SNAPSHOT_PATH: "spec.storage.snapshotMemory",
}

MOST_FAULTS = 20
"""Maximum number of faults that are reported for one template. There is a limit because each
unknown field is compared with the names of all known fields."""
MORE_FAULTS = f"spec.podTemplate: more than {MOST_FAULTS} faults; correct these, then check again"
_SHOWN = 100
"""Maximum number of characters of a name or value in a message."""


def problems(template: Mapping[str, Any], *, whole: bool = True) -> tuple[str, ...]:
    """Return one sentence for each fault in a podTemplate, with the field's path and the remedy.

    After MOST_FAULTS faults, the search stops and MORE_FAULTS is added as the last sentence. If
    `whole` is false, the template may lack fields that a job class can provide.
    """
    template = without_nulls(template)
    unknown = _first(_unknown_fields(template, "V1PodTemplateSpec", "spec.podTemplate"))
    return unknown or _first(_overrides(template, whole=whole))


def _first(faults: Iterable[str]) -> tuple[str, ...]:
    found = tuple(islice(faults, MOST_FAULTS + 1))
    return found if len(found) <= MOST_FAULTS else (*found[:MOST_FAULTS], MORE_FAULTS)


def _cut(text: object) -> str:
    shown = str(text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."


def _overrides(template: Mapping[str, Any], *, whole: bool) -> Iterator[str]:
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for field in _OWNED_METADATA:
        if field in metadata:
            yield f"spec.podTemplate.metadata.{field}: the operator sets this field; remove it"
    for kind in ("labels", "annotations"):
        for key in metadata.get(kind) or {}:
            if key.split("/")[0] == "ddpjob.io" or key == "app.kubernetes.io/managed-by":
                yield f"spec.podTemplate.metadata.{kind}.{_cut(key)}: the operator sets it; remove it"
    for field, remedy in _OWNED_SPEC.items():
        if field in spec:
            yield f"spec.podTemplate.spec.{field}: the operator sets this field; {remedy}"
    yield from _volume_overrides(spec)
    for kind in ("containers", "initContainers"):
        for position, container in enumerate(spec.get(kind) or ()):
            yield from _container_overrides(container, f"spec.podTemplate.spec.{kind}[{position}]", kind, whole=whole)


def _volume_overrides(spec: Mapping[str, Any]) -> Iterator[str]:
    for position, volume in enumerate(spec.get("volumes") or ()):
        if str(volume.get("name", "")).startswith("ddpjob-"):
            path = f"spec.podTemplate.spec.volumes[{position}].name"
            yield f"{path}: names with the prefix ddpjob- are reserved; choose a different name"


def _container_overrides(container: Mapping[str, Any], path: str, kind: str, *, whole: bool) -> Iterator[str]:
    name = container.get("name")
    if not name:
        remedy = f"write {TRAINER_CONTAINER} to change the training container, or a different name to add a sidecar"
        yield f"{path}.name: missing; {remedy}"
        return
    if name == COORDINATOR_CONTAINER or (name == TRAINER_CONTAINER and kind == "initContainers"):
        yield f"{path}.name: {name} is reserved for the operator's own container; choose a different name"
    if name != TRAINER_CONTAINER:
        if whole and not container.get("image"):
            trainer = f"the training container's name is {TRAINER_CONTAINER}"
            yield f"{path}.image: missing for the sidecar {_cut(name)} ({trainer})"
        return
    for field, remedy in _OWNED_CONTAINER.items():
        if field == "resources" and set(container.get(field) or ()) == {"claims"}:
            # Accept a field that contains only claims for dynamic resource allocation, because
            # spec.resources has no field for claims.
            continue
        if field in container:
            yield f"{path}.{field}: the operator sets this field; {remedy}"
    for position, variable in enumerate(container.get("env") or ()):
        if OWNED_VARIABLES.fullmatch(str(variable.get("name"))):
            yield f"{path}.env[{position}].name: the operator sets {_cut(variable['name'])}; remove it"
    for position, mount in enumerate(container.get("volumeMounts") or ()):
        owner = _OWNED_MOUNTS.get(mounted_at(mount))
        if owner:
            place = _cut(mount["mountPath"])
            yield f"{path}.volumeMounts[{position}].mountPath: {place} is used for {owner}; choose a different path"


def _unknown_fields(value: Any, type_name: str, path: str) -> Iterator[str]:
    """Yield a fault for each field that is unknown or has a value of the wrong type.

    The models of the official client define the known fields and their types.
    """
    listed = re.fullmatch(r"[Ll]ist\[(.+)\]", type_name)
    mapped = re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", type_name)
    if value is None:
        yield f"{path}: must not be null; remove it"
    elif listed:
        if not isinstance(value, list):
            yield f"{path}: must be a list, not {_kind(value)}"
            return
        for position, item in enumerate(value):
            yield from _unknown_fields(item, listed[1], f"{path}[{position}]")
    elif mapped:
        if not isinstance(value, Mapping):
            yield f"{path}: must be a mapping, not {_kind(value)}"
        elif not _QUANTITIES.search(path) and any(not isinstance(v, str) for v in value.values()):
            yield f"{path}: values must be strings; put quotes around numbers and booleans"
    elif type_name in _SCALARS:
        if not isinstance(value, _SCALARS[type_name]) or (isinstance(value, bool) and type_name != "bool"):
            yield f"{path}: must be {_SCALAR_NAMES[type_name]}, not {_kind(value)} ({_cut(repr(value))})"
    elif type_name not in ("object", "datetime"):
        yield from _unknown_in_model(value, type_name, path)


_QUANTITIES = re.compile(r"\.(requests|limits|overhead)$")
"""Matches the paths of mappings that contain amounts of resources. These amounts may be numbers. In
every other mapping with arbitrary keys, the values must be strings."""
_SCALARS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
_SCALAR_NAMES = {"str": "a string", "int": "an integer", "bool": "true or false", "float": "a number"}


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", int: "an integer"}.get(
        type(value), type(value).__name__
    )


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
            near = difflib.get_close_matches(_cut(name), attributes, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(attributes)[:12])}, ..."
            yield f"{path}.{_cut(name)}: no such field{hint}"
