"""Explains a DDPJob's fields, as `kubectl explain` does, and builds the JSON schema for editors."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob.api.job import API_VERSION, GROUP, KIND, VERSION
from ddpjob.api.schema import object_schema, to_json_schema
from ddpjob.client.backends.backend import Mistake

Schema = Mapping[str, Any]
WIDTH = 100
_OBJECT = ("ddpjob", "ddpjobs", "ddp")


def explain(path: str, *, recursive: bool = False) -> Iterator[str]:
    """Yield lines that explain the field at a path, such as spec.recovery.rules.cause.

    With `recursive`, list the fields below this field at all depths. Raises Mistake for an unknown
    field.
    """
    names = [name.removesuffix("[]") for name in path.split(".") if name]
    if names and names[0] in _OBJECT:
        names = names[1:]
    schema, required = object_schema(), False
    rules = list(_rules_on(schema, names))
    for depth, name in enumerate(names):
        holder = _inner(schema)
        if name not in holder.get("properties", {}):
            raise Mistake(_unknown(names, depth, holder))
        schema, required = holder["properties"][name], name in holder.get("required", ())
        rules += _rules_on(schema, names[depth + 1 :])
        rules += _rules_on(schema.get("items", {}), names[depth + 1 :])
    yield f"GROUP:      {GROUP}"
    yield f"KIND:       {KIND}"
    yield f"VERSION:    {VERSION}"
    yield ""
    if names:
        yield f"FIELD: {'.'.join(names)} <{_type(schema)}>{' -required-' if required else ''}"
        yield ""
    yield "DESCRIPTION:"
    yield from _wrapped(schema.get("description") or "A standard field of every Kubernetes object.", 4)
    for line in _limits(schema):
        yield f"    {line}"
    inner = _inner(schema)
    properties = inner.get("properties", {})
    if rules:
        yield "\nRULES:"
        for message in dict.fromkeys(rule["message"] for rule in rules):
            yield from _wrapped(f"- {message}", 4, hanging=2)
    if properties:
        yield "\nFIELDS:"
        yield from _fields(inner, 2, recursive=recursive)


def _rules_on(schema: Schema, names: list[str]) -> Iterator[Schema]:
    """Return an object's rules (CEL) for the field at the path `names` in this object.

    If the path is empty, return the rules for the object itself.
    """
    path = "".join(f".{name}" for name in names)
    return (rule for rule in schema.get("x-kubernetes-validations", ()) if rule.get("fieldPath", "") == path)


def _unknown(names: list[str], depth: int, holder: Schema) -> str:
    known, name = holder.get("properties", {}), names[depth]
    where = ".".join(names[:depth]) or "DDPJob"
    if holder.get("x-kubernetes-preserve-unknown-fields"):
        return (
            f"{'.'.join(names)}: {where} is defined by Kubernetes; run `kubectl explain "
            f"{_kubernetes(names)}` to see its fields"
        )
    if not known:
        return f"{'.'.join(names)}: {where} has no fields"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    meant = [*(".".join([*names[:depth], found]) for found in near), *_elsewhere(name)]
    hint = f"did you mean {' or '.join(dict.fromkeys(meant[:3]))}?" if meant else f"its fields are {', '.join(known)}"
    if not depth and not meant:
        hint += f" (`ddpjob why {name}` explains a job)"
    return f"{'.'.join(names)}: {where} has no such field; {hint}"


def _kubernetes(names: list[str]) -> str:
    """Return the path with which `kubectl explain` finds a field in podTemplate.

    podTemplate has the same fields as a pod.
    """
    at = names.index("podTemplate") + 1 if "podTemplate" in names else 0
    return ".".join(["pod", *names[at:]])


def paths(of: Schema | None = None) -> list[str]:
    """Return the paths of all fields, at any depth."""
    found: list[str] = []

    def walk(schema: Schema, above: str) -> None:
        for name, child in _inner(schema).get("properties", {}).items():
            found.append(f"{above}{name}")
            walk(child, f"{above}{name}.")

    walk(object_schema() if of is None else of, "")
    return found


def _elsewhere(name: str) -> list[str]:
    """Return the paths of all fields with this name.

    If any of the fields are below spec, return only the paths below spec.
    """
    found = [path for path in paths() if path.rpartition(".")[2].lower() == name.lower()]
    return [path for path in found if path.startswith("spec.")] or found


def _inner(schema: Schema) -> Schema:
    """Return the schema that lists the fields below a field.

    For a list, this is the schema of the items, and for a map, it is the schema of the values.
    Otherwise, it is the schema of the field itself.
    """
    if "items" in schema:
        return _inner(schema["items"])
    rest = schema.get("additionalProperties")
    return _inner(rest) if isinstance(rest, Mapping) and not schema.get("properties") else schema


def _type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return "Object"
    if schema["type"] == "array":
        return f"[]{_type(schema['items'])}"
    if isinstance(rest := schema.get("additionalProperties"), Mapping):
        return f"map[string]{_type(rest)}"
    return "Object" if schema["type"] == "object" else str(schema["type"])


def _limits(schema: Schema) -> Iterator[str]:
    """Yield sentences about a field's allowed values and its default."""
    inner = schema.get("items", schema)
    if "enum" in inner:
        yield f"One of: {', '.join(map(str, inner['enum']))}."
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"From {low} to {high}."
    elif low is not None or high is not None:
        yield f"At least {low}." if low is not None else f"At most {high}."
    default = schema.get("default")
    text = " ".join(schema.get("description", "").split())
    if default not in (None, {}) and "Default" not in text:
        yield f"Default: {default if isinstance(default, str) else json.dumps(default)}."


def _fields(schema: Schema, indent: int, *, recursive: bool) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        required = " -required-" if name in schema.get("required", ()) else ""
        yield f"{' ' * indent}{name}\t<{_type(field)}>{required}".expandtabs(max(24, indent + 2))
        if recursive:
            yield from _fields(_inner(field), indent + 2, recursive=True)
        elif text := field.get("description"):
            yield from _wrapped(text, indent + 2)
            yield ""


def _wrapped(text: str, indent: int, hanging: int = 0) -> Iterator[str]:
    yield from textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + hanging),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def editor_schema() -> dict[str, Any]:
    """Return the JSON schema of a manifest, with descriptions and defaults.

    Rules between fields (CEL) are omitted, because JSON schema cannot express them.
    """
    schema = object_schema()
    made: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "DDPJob"}
    made |= _with_texts(to_json_schema(schema), schema)
    made["properties"]["apiVersion"]["const"] = API_VERSION
    made["properties"]["kind"]["const"] = KIND
    made["required"] = ["apiVersion", "kind", "metadata", *made.get("required", ())]
    return made


def _with_texts(made: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Add descriptions, defaults and patterns from `schema` to `made`, at all depths."""
    for word in ("description", "default"):
        if word in schema:
            made[word] = " ".join(schema[word].split()) if word == "description" else schema[word]
    if "pattern" in schema:
        made["pattern"] = schema["pattern"]
    for name, child in schema.get("properties", {}).items():
        _with_texts(made["properties"][name], child)
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), Mapping):
            _with_texts(made[word], schema[word])
    return made
