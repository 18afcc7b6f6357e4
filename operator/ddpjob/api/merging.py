"""Merges pod templates by strategic merge patch, and merges the values of a class into a job's
spec.

Lists are merged by the same keys as in Kubernetes' strategic merge patch. A template can therefore
add a volume, or change the trainer's securityContext, without repeating the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from ddpjob.api.schema import Json, without_nulls
from ddpjob.api.submitted_code import split_code

CLASS_FIELDS = (
    *("image", "imagePullPolicy", "imagePullSecrets", "env", "envFrom", "workingDir", "resources", "preflight"),
    *("rankOrder", "notify", "scheduling.schedulerName", "scheduling.priorityClassName", "scheduling.sameTopology"),
    *("scheduling.gang", "network.interface", "storage.data", "runPolicy.activeDeadlineSeconds"),
    *("runPolicy.ttlSecondsAfterFinished", "podTemplate"),
)
"""Paths below spec of the fields that a job class may set. The CRD has no defaults for these
fields, so a field that the job does not set is absent or empty. A class that fixes env fixes only
the variables that the class itself sets."""
_MERGED = ("podTemplate", "resources")
QUEUE = "queue"
"""The key with which a class sets or fixes the job's queue. The spec has no such field, because a
job names its queue in a label."""

_LIST_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets", "resourceClaims"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_KEYED = (*_LIST_KEYS, "tolerations")
_HANDLED = ("livenessProbe", "readinessProbe", "startupProbe", "preStop", "postStart")
_HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc", "sleep"}
"""The actions of a probe or hook. Every probe or hook has exactly one of these."""
_TERMS = ("requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution")
"""Names of the lists of affinity terms. The result of a merge has the terms of both templates. All
required terms must hold, and each preferred term adds its weight."""


def with_class(own: Mapping[str, Any], given: Mapping[str, Any], fixed: Collection[str] = ()) -> Json:
    """Return a job's spec with the fields from its class added.

    A field that the class fixes gets the class's value. Otherwise, podTemplate and resources are
    merged, and the lists env, imagePullSecrets and envFrom are joined. If the job and the class
    conflict, the job's value is used. Any other field gets the class's value if the job does not
    set it.
    """
    merged = deepcopy(dict(own))
    for path in CLASS_FIELDS:
        mine, theirs = at(own, path), at(given, path)
        if path == "env":
            first, second = (mine, theirs) if path in fixed else (theirs, mine)
            value: Any = _by_name(first or [], second or []) if theirs else mine
        elif path == "podTemplate" and path in fixed:
            value = merge(theirs or {}, split_code(mine, theirs)[0]) or theirs
        elif path in fixed:
            value = theirs
        elif theirs is None:
            value = mine
        elif path == "imagePullSecrets":
            value = _by_name(theirs, mine or [])
        elif path == "envFrom":
            value = [*theirs, *(mine or ())]
        elif path in _MERGED:
            value = merge(theirs, without_nulls(mine or {}))
        else:
            value = theirs if mine is None else mine
        _put(merged, path, deepcopy(value))
    return merged


def at(spec: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path below spec, or None if the path does not exist."""
    here: Any = spec
    for name in path.split("."):
        here = here.get(name) if isinstance(here, Mapping) else None
    return here


def is_empty(path: str, value: Any) -> bool:
    """Whether the job has left a field unset.

    podTemplate and resources also count as unset if all their values are empty, because the API
    server adds an empty object by default.
    """
    return value is None or (path in _MERGED and not any(value.values()))


def _put(spec: Json, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if value is None and not isinstance(spec.get(parent), Mapping):
            return
        spec = spec.setdefault(parent, {})
    if value is not None:
        spec[name] = value
    else:
        spec.pop(name, None)


def _by_name(first: list[Json], second: list[Json]) -> list[Json]:
    """Join two lists whose items have names.

    An item from `second` replaces the item with the same name from `first`.
    """
    later = {item["name"]: item for item in second}
    known = {item["name"] for item in first}
    return [later.get(item["name"], item) for item in first] + [i for i in second if i["name"] not in known]


# --- merging as Kubernetes does ---------------------------------------------------------------------------------


def merge(base: Json, overlay: Mapping[str, Any]) -> Json:
    """Return a new object that is `base` with the changes in `overlay`.

    Mappings are merged. In a keyed list, items with the same key are merged. Lists of affinity
    terms are joined. Any other value from the overlay replaces the value in the base.

    Fields that the overlay does not contain are not copied, so the result shares them with `base`.
    If an item of a keyed list has no usable key, the overlay's list replaces the base's list. The
    fault is reported when the result is validated.
    """
    merged = dict(base)
    for field, value in overlay.items():
        old = merged.get(field)
        if isinstance(old, dict) and isinstance(value, Mapping):
            others = _HANDLERS - value.keys() if field in _HANDLED and _HANDLERS & value.keys() else ()
            merged[field] = merge({name: kept for name, kept in old.items() if name not in others}, value)
        elif field in _KEYED and not (_has_keys(old, field) and _has_keys(value, field)):
            merged[field] = deepcopy(value)
        elif isinstance(old, list) and isinstance(value, list) and field == "tolerations":
            merged[field] = [item for item in old if not _answered(item, value)] + deepcopy(value)
        elif isinstance(old, list) and isinstance(value, list) and field in _TERMS:
            merged[field] = [*old, *deepcopy(value)]
        elif isinstance(old, list) and isinstance(value, list) and field in _LIST_KEYS:
            merged[field] = _merge_list(old, value, field)
        else:
            merged[field] = deepcopy(value)
    return merged


def _has_keys(value: Any, field: str) -> bool:
    """Whether the value is a list of mappings with keys that can be compared."""
    key = _LIST_KEYS.get(field, "key")
    items = value if isinstance(value, list) else (None,)
    return all(isinstance(item, Mapping) and not isinstance(item.get(key), list | Mapping) for item in items)


def _answered(toleration: Json, given: list[Json]) -> bool:
    """Whether the overlay `given` has a toleration that replaces `toleration`.

    It has the same key, and either the same effect or no effect, which means all effects.
    """
    key, effect = toleration.get("key"), toleration.get("effect")
    return any(t.get("key") == key and t.get("effect") in (effect, None, "") for t in given)


def _merge_list(old: list[Json], new: list[Json], field: str) -> list[Json]:
    merged, key = list(old), _LIST_KEYS[field]
    positions = {_key_of(item, key): position for position, item in enumerate(merged)}
    for item in new:
        position = positions.get(_key_of(item, key))
        if position is None:
            merged.append(deepcopy(item))
        else:
            whole = _replaces(merged[position], item, field)
            merged[position] = deepcopy(item) if whole else merge(merged[position], item)
    return merged


def _replaces(old: Json, new: Json, field: str) -> bool:
    """Whether the overlay's item replaces the base's item, so that the two are not merged.

    Both items have the same key. A variable can have only one of value and valueFrom, so the
    overlay's variable replaces the base's. A volume can have only one source, so a volume with a
    different source replaces the base's.
    """
    sources = new.keys() - {"name"}
    return field == "env" or (field == "volumes" and bool(sources) and sources.isdisjoint(old))


def _key_of(item: Json, key: str) -> Any:
    return mounted_at(item) if key == "mountPath" else item.get(key)


def mounted_at(mount: Mapping[str, Any]) -> str:
    """Return the path of a mount without a final slash.

    /data and /data/ are the same folder, so they must give the same result.
    """
    return str(mount.get("mountPath", "")).rstrip("/")
