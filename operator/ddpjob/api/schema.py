"""Loads the CRD file, sets default values, and checks manifests as the API server does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain, islice
from typing import Any

import yaml

from ddpjob.api import near_misses
from ddpjob.api.yamltext import MAX_MESSAGE, shown
from ddpjob.api.yamltext import join as join

Json = dict[str, Any]
CRD_FILE = "ddpjobs.ddpjob.io.yaml"
_PRESERVE = "x-kubernetes-preserve-unknown-fields"

_TEXTS = {"type": "string"}
_TEXT_MAP: Json = {"type": "object", "additionalProperties": _TEXTS}
# The schema of metadata is the same for every kind and is built into the API server. A CRD cannot
# describe it.
_METADATA: Json = {
    "type": "object",
    "properties": {
        "name": _TEXTS,
        "namespace": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "labels": _TEXT_MAP,
        "annotations": _TEXT_MAP,
        **dict.fromkeys(
            ("generateName", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "selfLink"), _TEXTS
        ),
        **{name: {"type": "integer"} for name in ("generation", "deletionGracePeriodSeconds")},
        "finalizers": {"type": "array", "items": _TEXTS},
        **{
            name: {"type": "array", "items": {"type": "object", _PRESERVE: True}}
            for name in ("ownerReferences", "managedFields")
        },
    },
}


@dataclass(frozen=True, order=True)
class Problem:
    """An error in a manifest.

    `path` is the path of the faulty field. `message` says what is wrong and how to correct it.
    """

    path: str
    message: str

    def __str__(self) -> str:
        message = shown(self.message, MAX_MESSAGE)
        return f"{shown(self.path)}: {message}" if self.path else message


@cache
def load_crd() -> Json:
    """Return the CustomResourceDefinition.

    The result is cached, so callers must not modify it.
    """
    text = resources.files(__package__).joinpath(CRD_FILE).read_text(encoding="utf-8")
    # Parsing the file takes 8 ms with libyaml and 70 ms with PyYAML's own parser. PyYAML's wheels
    # contain libyaml, but a PyYAML that was built from source may lack it.
    crd: Json = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return crd


@cache
def object_schema() -> Json:
    """Return the OpenAPI schema of a whole DDPJob, including its metadata.

    The result is cached, so callers must not modify it.
    """
    version = next(v for v in load_crd()["spec"]["versions"] if v["storage"])
    schema: Json = deepcopy(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = _METADATA
    return schema


def schema_of(path: str) -> Json:
    """Return the schema for the field with this path, such as `spec.nodes`.

    The result is cached, so callers must not modify it.
    """
    schema = object_schema()
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


# --- defaults ---------------------------------------------------------------------------------------------------


def default_of(path: str) -> Any:
    """Return the default value of the field with this path."""
    return apply_defaults(schema_of(path)["default"], schema_of(path))


def apply_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a copy of `value` as the API server would store it.

    Null fields are removed unless the schema allows null. Missing fields get their defaults. In an
    integer field, a number such as 2.0 becomes 2.
    """
    if isinstance(value, Mapping) and "x-kubernetes-int-or-string" not in schema:
        return _default_object(value, schema)
    if isinstance(value, list):
        return [apply_defaults(item, schema.get("items", {})) for item in value]
    if isinstance(value, float) and value.is_integer() and schema.get("type") == "integer":
        return int(value)
    return deepcopy(value) if isinstance(value, Mapping) else value


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


def without_nulls(value: Any) -> Any:
    """Return a copy of `value` without null fields.

    A rendered template, for example, has null where a value is empty. Use this function for the
    parts of a manifest that the schema does not describe. Nulls in lists are kept, because the
    validation must report them.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def exceeds(value: Any, text: int, values: int) -> bool:
    """Return whether a JSON value exceeds either of two limits.

    `text` limits the number of characters in all names and strings together, and `values` limits
    the number of values. Counting stops at the limits, so the function is fast even for huge
    values.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        values -= 1
        if isinstance(item, str):
            text -= len(item)
        elif isinstance(item, Mapping | list):
            if len(item) > values - len(waiting):
                return True
            waiting.extend(item.values() if isinstance(item, Mapping) else item)
            text -= sum(map(len, item)) if isinstance(item, Mapping) else 0
        if text < 0 or values < 0:
            return True
    return False


# --- JSON schema ------------------------------------------------------------------------------------------------


_SAME_IN_BOTH = (
    *("type", "enum", "required", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
)


def to_json_schema(schema: Mapping[str, Any]) -> Json:
    """Convert a structural schema of a CRD to a JSON schema (draft 2020-12).

    The JSON schema accepts the same objects, except that it rejects unknown fields.
    """
    converted: Json = {key: schema[key] for key in _SAME_IN_BOTH if key in schema}
    if "pattern" in schema:
        # In Python, $ also matches before a final newline. In Go, it matches only at the end.
        converted["pattern"] = (
            schema["pattern"].removesuffix("$") + r"\Z" if schema["pattern"].endswith("$") else schema["pattern"]
        )
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


MOST_PROBLEMS = 100
"""Maximum number of problems that are reported for one manifest. Finding a suggestion for a problem
can take a millisecond."""


def check_schema(manifest: Mapping[str, Any]) -> list[Problem]:
    """Return up to MOST_PROBLEMS schema violations in a manifest.

    The manifest must already have its defaults.
    """
    errors = list(islice(_validator().iter_errors(manifest), 2 * MOST_PROBLEMS))
    of_wrong_type = {tuple(error.absolute_path) for error in errors if error.validator == "type"}
    causes = (error for error in errors if error.validator == "type" or tuple(error.absolute_path) not in of_wrong_type)
    explained = (problem for error in causes for problem in _explain(error))
    return list(islice(chain(explained, _duplicates(manifest, object_schema(), "")), MOST_PROBLEMS))


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
        yield Problem(path, _message(path, error))


def _message(path: str, error: Any) -> str:
    value, limit = error.instance, error.validator_value
    shown = _shown(value)
    messages = {
        "type": lambda: (
            f"must be {_kind_names(limit)}, not {_kind(value)} ({shown}){_quote_hint(limit, value)}"
            f"{near_misses.as_type(path, limit, value)}"
        ),
        "enum": lambda: f"{shown} is not one of {', '.join(map(str, limit))}{_near(str(value), limit)}",
        "minimum": lambda: f"{shown} is less than {limit}, the smallest allowed",
        "maximum": lambda: f"{shown} is more than {limit}, the largest allowed",
        "minLength": lambda: "must not be empty" if limit == 1 else f"{shown} is shorter than {limit} characters",
        "maxLength": lambda: f"longer than {limit} characters ({len(value)}); shorten it",
        "minItems": lambda: "must not be empty" if limit == 1 else f"must have at least {limit} items",
        "maxItems": lambda: f"more than {limit} items ({len(value)}); remove some",
        "maxProperties": lambda: f"more than {limit} entries ({len(value)}); remove some",
        "pattern": lambda: f"{shown} {near_misses.refused_by(limit, value)}",
    }
    return messages[error.validator]() if error.validator in messages else error.message


_KINDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "null",
}


_TYPES = {int: "integer", float: "number", str: "string", dict: "object", list: "array", type(None): "null"}


def _kind_names(kinds: str | list[str]) -> str:
    return " or ".join(_KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    return _KINDS[_TYPES[type(value)]]


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _quote_hint(expected: Any, value: Any) -> str:
    quoted = float if isinstance(expected, list) else bool | int | float
    return "; put it in quotes" if "string" in expected and isinstance(value, quoted) else ""


def _near(name: str, known: Any) -> str:
    folded = {str(k).lower(): str(k) for k in known}
    found = difflib.get_close_matches(name[:100].lower(), folded, n=1, cutoff=0.7)
    return f"; did you mean {folded[found[0]]}?" if found else ""


def _hint(path: str, name: str, known: Mapping[str, Any]) -> str:
    """Suggest what the user may have meant by an unknown field.

    The suggestion is a field with a similar name in the same object, or a field with the same name
    elsewhere in the manifest.
    """
    if name in ("true", "false"):
        return "; YAML reads unquoted on, yes and y as true, and off, no and n as false, so quote the name"
    if path == "spec" and name in ("name", "generateName", "namespace"):
        return f"; did you mean metadata.{name}?"
    if "claimName" in known and re.sub("[-_]", "", name.lower()) in ("pvc", "claim", "persistentvolumeclaim"):
        return "; did you mean claimName?"
    other = near_misses.belongs(name)
    # Names from other APIs are recognized only among the fields of spec and of the objects directly
    # below spec.
    if other and path.count(".") < 2:
        return f"; {other}"
    elsewhere = _paths_by_name().get(name.lower(), [])
    below = [place for place in elsewhere if place.startswith(f"{path}.")]
    if below and name.lower() not in map(str.lower, known):
        # The user has probably written the field one level too high. That is more likely than a
        # misspelled field with a similar name.
        return f"; did you mean {' or '.join(below[:3])}?"
    near = _near(name, known)
    if near:
        return near
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    if 0 < len(known) <= 8:
        return f"; the fields are {', '.join(sorted(known))}"
    return f"; run `kubectl explain ddp.{path}` to list the fields" if path else ""


@cache
def _paths_by_name() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def walk(schema: Mapping[str, Any], path: str) -> None:
        for name, child in schema.get("properties", {}).items():
            found.setdefault(name.lower(), []).append(join(path, name))
            # Suggest no fields below dataSource, because a misplaced `name` or `kind` never belongs
            # there.
            if name != "dataSource":
                walk(child, join(path, name))

    walk(object_schema()["properties"]["spec"], "spec")
    return found


def _duplicates(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Yield a problem for each item of a list that has the same key as an earlier item.

    Only lists with x-kubernetes-list-map-keys in their schema have keys.
    """
    if not schema:
        # The schema does not describe this value or anything in it.
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _duplicates(item, schema.get("properties", {}).get(name, {}), join(path, name))
    elif isinstance(value, list):
        seen: dict[tuple[str, ...], int] = {}
        for position, item in enumerate(value):
            key = list_key(schema, item)
            if key is not None and seen.setdefault(key, position) != position:
                yield Problem(
                    join(path, position),
                    f"{', '.join(key)} is given twice (first in {join(path, seen[key])}); remove one",
                )
            yield from _duplicates(item, schema.get("items", {}), join(path, position))


def list_key(schema: Mapping[str, Any], item: Any) -> tuple[str, ...] | None:
    """Return the key of an item in a list with map keys.

    Return None if the list has no map keys, or if the item lacks part of its key.
    """
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(item, Mapping) or any(key not in item for key in keys):
        return None
    return tuple(str(item[key]) for key in keys)
