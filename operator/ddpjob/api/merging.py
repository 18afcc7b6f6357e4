"""Merges parts of specs: pod templates by strategic merge patch, and a class into a job's spec.

Lists merge by the keys that Kubernetes' strategic merge patch uses for them, so that a template can
add a volume or change the trainer's securityContext without repeating the rest.
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
"""Fields below spec that a job class may set. The CRD has no defaults for them, so a field that the
job has not set is absent or empty. A class that fixes env fixes only the variables that it sets."""
_MERGED = ("podTemplate", "resources")
QUEUE = "queue"
"""Name of the job's queue among the fields that a class may set and fix. The job itself has its
queue in a label, not in spec."""

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
"""A probe or a hook has exactly one of these."""
_TERMS = ("requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution")
"""Lists of affinity terms that must all hold or that all add weight. The overlay's terms are
appended to the base's."""


def with_class(own: Mapping[str, Any], given: Mapping[str, Any], fixed: Collection[str] = ()) -> Json:
    """Return a job's spec with the fields from its class.

    The job's own fields take precedence, unless they are fixed. podTemplate and resources merge.
    The trainer's environment and the lists of Secrets are joined; if two entries have the same
    name, the job's is used. Any other field is taken from the class as a whole if the job does not
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
    """Return the value at a path below spec; None if the path does not exist."""
    here: Any = spec
    for name in path.split("."):
        here = here.get(name) if isinstance(here, Mapping) else None
    return here


def is_empty(path: str, value: Any) -> bool:
    """Whether a job has left a field unset.

    An unset podTemplate or resources is {}, because the API server adds an empty object.
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
    """Return both lists as one.

    If two items have the same name, the item from `second` replaces the one from `first`.
    """
    later = {item["name"]: item for item in second}
    known = {item["name"] for item in first}
    return [later.get(item["name"], item) for item in first] + [i for i in second if i["name"] not in known]


# --- merging as Kubernetes does ---------------------------------------------------------------------------------


def merge(base: Json, overlay: Mapping[str, Any]) -> Json:
    """Return a new, merged object.

    Mappings merge, keyed lists merge by key, affinity terms are joined, and everything else is
    replaced. Fields that the overlay does not contain are shared with `base`. If a user's list has
    items without a key, the overlay's list replaces the base's, and validation reports the faults
    in the result.
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
    """Whether a list holds only mappings whose keys can be compared."""
    key = _LIST_KEYS.get(field, "key")
    items = value if isinstance(value, list) else (None,)
    return all(isinstance(item, Mapping) and not isinstance(item.get(key), list | Mapping) for item in items)


def _answered(toleration: Json, given: list[Json]) -> bool:
    """Whether the overlay tolerates the same taint, and therefore replaces this toleration."""
    return any(t.get("key") == toleration.get("key") for t in given)


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
    """Whether the overlay's item replaces the base's item with the same key instead of being
    merged.

    A variable with a value replaces one with valueFrom, and a volume with a new source replaces the
    old volume, since neither can have both.
    """
    sources = new.keys() - {"name"}
    return field == "env" or (field == "volumes" and bool(sources) and sources.isdisjoint(old))


def _key_of(item: Json, key: str) -> Any:
    return mounted_at(item) if key == "mountPath" else item.get(key)


def mounted_at(mount: Mapping[str, Any]) -> str:
    """Return a mount's path; /data and /data/ are the same folder."""
    return str(mount.get("mountPath", "")).rstrip("/")
