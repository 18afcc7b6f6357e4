"""The CRD file: its schema, its defaults, and the checks of an object against them as the API server makes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from ddpjob.api.yamltext import join as join

Json = dict[str, Any]
CRD_FILE = "ddpjobs.ddpjob.io.yaml"
_PRESERVE = "x-kubernetes-preserve-unknown-fields"

_TEXTS = {"type": "string"}
_TEXT_MAP: Json = {"type": "object", "additionalProperties": _TEXTS}
# The API server knows the metadata of every kind by itself; a CRD cannot describe it.
_METADATA: Json = {
    "type": "object",
    "properties": {
        "name": _TEXTS,
        "namespace": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "labels": _TEXT_MAP,
        "annotations": _TEXT_MAP,
        **dict.fromkeys(("generateName", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "selfLink"), _TEXTS),
        **{name: {"type": "integer"} for name in ("generation", "deletionGracePeriodSeconds")},
        "finalizers": {"type": "array", "items": _TEXTS},
        **{name: {"type": "array", "items": {"type": "object", _PRESERVE: True}} for name in ("ownerReferences", "managedFields")},
    },
}


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong with a manifest: where, what, and what to write instead."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@cache
def load_crd() -> Json:
    """The CustomResourceDefinition. Shared: not to be changed."""
    crd: Json = yaml.safe_load(resources.files(__package__).joinpath(CRD_FILE).read_text(encoding="utf-8"))
    return crd


@cache
def object_schema() -> Json:
    """The OpenAPI schema of a whole DDPJob, metadata included. Shared: not to be changed."""
    version = next(v for v in load_crd()["spec"]["versions"] if v["storage"])
    schema: Json = deepcopy(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = _METADATA
    return schema


# --- defaults ---------------------------------------------------------------------------------------------------


def apply_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """A copy of `value` as the API server stores it: without nulls, with defaults, with 2 for 2.0 where an integer belongs."""
    if isinstance(value, Mapping) and "x-kubernetes-int-or-string" not in schema:
        return _default_object(value, schema)
    if isinstance(value, list):
        return [apply_defaults(item, schema.get("items", {})) for item in value]
    if isinstance(value, float) and value.is_integer() and schema.get("type") == "integer":
        return int(value)
    return deepcopy(value)


def _default_object(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Json:
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
    filled: Json = {}
    for name, item in value.items():
        known = properties.get(name, rest if isinstance(rest, Mapping) else None)
        if known is None:
            filled[name] = deepcopy(item)
        elif item is not None or known.get("nullable"):
            filled[name] = apply_defaults(item, known)
    for name, known in properties.items():
        if name not in filled and "default" in known:
            filled[name] = apply_defaults(known["default"], known)
    return filled


# --- JSON schema ------------------------------------------------------------------------------------------------


_SAME_IN_BOTH = frozenset(
    ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "required")
)


def to_json_schema(schema: Mapping[str, Any]) -> Json:
    """A JSON schema (draft 2020-12) that accepts what the structural schema accepts, and refuses unknown fields."""
    converted: Json = {key: schema[key] for key in _SAME_IN_BOTH if key in schema}
    if "pattern" in schema:
        # Python's $ also matches before a line's end, Go's does not.
        converted["pattern"] = schema["pattern"].removesuffix("$") + r"\Z" if schema["pattern"].endswith("$") else schema["pattern"]
    if schema.get("x-kubernetes-int-or-string"):
        converted["type"] = ["integer", "string"]
    if schema.get("nullable"):
        converted["type"] = [converted["type"], "null"]
    if "items" in schema:
        converted["items"] = to_json_schema(schema["items"])
    properties = schema.get("properties", {})
    if properties:
        converted["properties"] = {name: to_json_schema(child) for name, child in properties.items()}
    if isinstance(schema.get("additionalProperties"), Mapping):
        converted["additionalProperties"] = to_json_schema(schema["additionalProperties"])
    elif schema.get("type") == "object" and not schema.get(_PRESERVE):
        converted["additionalProperties"] = False
    return converted


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(to_json_schema(object_schema()))


def check_schema(manifest: Mapping[str, Any]) -> list[Problem]:
    """What of a defaulted manifest the schema refuses."""
    errors = list(_validator().iter_errors(manifest))
    of_wrong_type = {tuple(error.absolute_path) for error in errors if error.validator == "type"}
    told = (error for error in errors if error.validator == "type" or tuple(error.absolute_path) not in of_wrong_type)
    problems = [problem for error in told for problem in _explain(error)]
    return problems + list(_duplicates(manifest, object_schema(), ""))


def _explain(error: Any) -> Iterator[Problem]:
    path = ""
    for key in error.absolute_path:
        path = join(path, key)
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        for name in error.instance:
            if name not in known:
                yield Problem(join(path, name), f"unknown field{_hint(path, name, known)}")
    elif error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                yield Problem(join(path, name), "required, but missing")
    else:
        yield Problem(path, _message(error))


def _message(error: Any) -> str:
    value, limit = error.instance, error.validator_value
    shown = _shown(value)
    messages = {
        "type": lambda: f"must be {_kind_names(limit)}, not {_kind(value)} ({shown}){_quote_hint(limit, value)}",
        "enum": lambda: f"{shown} is not one of {', '.join(map(str, limit))}{_near(str(value), limit)}",
        "minimum": lambda: f"{shown} is less than {limit}, the smallest allowed",
        "maximum": lambda: f"{shown} is more than {limit}, the largest allowed",
        "minLength": lambda: "must not be empty" if limit == 1 else f"{shown} is shorter than {limit} characters",
        "maxLength": lambda: f"is longer than {limit} characters ({len(value)})",
        "minItems": lambda: "must not be empty" if limit == 1 else f"needs at least {limit} items",
        "maxItems": lambda: f"has more than {limit} items ({len(value)})",
        "maxProperties": lambda: f"has more than {limit} entries ({len(value)})",
        "pattern": lambda: f"{shown} does not match {_expected(error.schema['pattern'])}",
    }
    return messages[error.validator]() if error.validator in messages else error.message


_PATTERNS = {"^/": "an absolute path, such as /data", "^/[^:]*\\Z": "an absolute path without ':', such as /data"}


def _expected(pattern: str) -> str:
    if "[KMGTPE]i" in pattern:
        return "a quantity, such as 500m, 8 or 16Gi"
    return _PATTERNS.get(pattern, pattern.replace("\\Z", "$"))


_KINDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "null",
}


def _kind_names(kinds: str | list[str]) -> str:
    return " or ".join(_KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "an integer", float: "a number", str: "a string", dict: "a mapping", list: "a list", type(None): "null"}
    return names[type(value)]


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _quote_hint(expected: Any, value: Any) -> str:
    return "; put it in quotes" if expected == "string" and isinstance(value, bool | int | float) else ""


def _near(name: str, known: Any) -> str:
    folded = {str(k).lower(): str(k) for k in known}
    found = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.7)
    return f"; did you mean {folded[found[0]]}?" if found else ""


def _hint(path: str, name: str, known: Mapping[str, Any]) -> str:
    """The field that was meant: one beside it, or one of the same name elsewhere."""
    if name in ("true", "false"):
        return "; without quotes YAML and kubectl read on, yes and y as true, off, no and n as false: quote the name"
    near = _near(name, known)
    if near:
        return near
    elsewhere = _paths_by_name().get(name.lower(), [])
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    if 0 < len(known) <= 8:
        return f"; known are {', '.join(sorted(known))}"
    return f"; `kubectl explain ddp.{path}` lists the fields" if path else ""


@cache
def _paths_by_name() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def walk(schema: Mapping[str, Any], path: str) -> None:
        for name, child in schema.get("properties", {}).items():
            found.setdefault(name.lower(), []).append(join(path, name))
            walk(child, join(path, name))

    walk(object_schema()["properties"]["spec"], "spec")
    return found


def _duplicates(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Items of keyed lists (x-kubernetes-list-map-keys) that have the same key."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _duplicates(item, schema.get("properties", {}).get(name, {}), join(path, name))
    elif isinstance(value, list):
        seen: dict[tuple[str, ...], int] = {}
        for position, item in enumerate(value):
            key = list_key(schema, item)
            if key is not None and seen.setdefault(key, position) != position:
                yield Problem(join(path, position), f"{', '.join(key)} is given twice (first in {join(path, seen[key])}); remove one")
            yield from _duplicates(item, schema.get("items", {}), join(path, position))


def list_key(schema: Mapping[str, Any], item: Any) -> tuple[str, ...] | None:
    """What tells an item of a keyed list from the others; None in other lists."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(item, Mapping) or any(key not in item for key in keys):
        return None
    return tuple(str(item[key]) for key in keys)
