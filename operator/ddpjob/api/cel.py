"""Evaluates the CRD's validation rules (`x-kubernetes-validations`) as the API server does.

A rule that refers to `oldSelf` is a transition rule, which is evaluated only when an update
replaces an existing value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from ddpjob.api.schema import Problem, join, list_key, object_schema

_MISSING = object()
SUPPORTED = frozenset({"rule", "message", "messageExpression", "reason", "fieldPath"})
"""The supported keys of a validation rule. Any other key raises NotImplementedError."""
Variables = Callable[[], dict[str, Any]]
"""A function that returns the CEL variables. They are `self` and, for a value that replaces an
existing one, `oldSelf`."""


def check_rules(manifest: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[Problem]:
    """Return one problem for each CRD rule that `manifest` violates.

    `manifest` must fit the schema. `old` is the object that an update replaces, or None if
    `manifest` is new. Both objects must have their defaults.
    """
    return list(_check(object_schema(), manifest, _MISSING if old is None else old, ""))


def _check(schema: Mapping[str, Any], value: Any, old: Any, path: str) -> Iterator[Problem]:
    # Convert the variables only once for all rules at this path, because the conversion takes most
    # of the time.
    variables = cache(lambda: _variables(value, old))
    for rule in schema.get("x-kubernetes-validations", ()):
        yield from _apply(rule, variables, path, replaces=old is not _MISSING)
    if isinstance(value, Mapping):
        for name, item in value.items():
            child = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(child, Mapping):
                before = old.get(name, _MISSING) if isinstance(old, Mapping) else _MISSING
                yield from _check(child, item, before, join(path, name))
    elif isinstance(value, list) and "items" in schema:
        for position, item in enumerate(value):
            yield from _check(schema["items"], item, _old_item(schema, item, old), join(path, position))


def _old_item(schema: Mapping[str, Any], item: Any, old: Any) -> Any:
    """Return the counterpart of `item` in the old list, which is the item with the same key.

    Only the items of a list with map keys have keys. In any other list, an item has no counterpart.
    """
    key = list_key(schema, item)
    if key is None or not isinstance(old, list):
        return _MISSING
    return next((before for before in old if list_key(schema, before) == key), _MISSING)


def _apply(rule: Mapping[str, Any], variables: Variables, path: str, *, replaces: bool) -> Iterator[Problem]:
    unknown = set(rule) - SUPPORTED
    if unknown:
        raise NotImplementedError(
            f"the rule {rule['rule']!r} at {path} uses {', '.join(sorted(unknown))}, which is not implemented here"
        )
    transition = "oldSelf" in rule["rule"]
    if transition and not replaces:
        return
    if not _holds(rule["rule"], variables, transition):
        yield Problem(
            path + rule.get("fieldPath", "") if path else rule.get("fieldPath", "").lstrip("."),
            _message(rule, variables),
        )


def _holds(text: str, variables: Variables, transition: bool) -> bool:
    from celpy import CELEvalError

    try:
        return bool(_program(text).evaluate(variables()))
    except CELEvalError:
        if transition:
            # cel-python raises an error when a rule compares values of different types, such as 1
            # and "1". The API server treats such values as unequal, so the rule fails.
            return False
        raise


def _message(rule: Mapping[str, Any], variables: Variables) -> str:
    if "messageExpression" in rule:
        return str(_program(rule["messageExpression"]).evaluate(variables()))
    return str(rule.get("message", f"failed rule: {rule['rule']}"))


def _variables(value: Any, old: Any) -> dict[str, Any]:
    return {"self": _to_cel(value)} | ({} if old is _MISSING else {"oldSelf": _to_cel(old)})


def _to_cel(value: Any) -> Any:
    from celpy import json_to_cel

    try:
        return json_to_cel(value)
    except ValueError:
        return json_to_cel(_as_go_reads(value))


def _as_go_reads(value: Any) -> Any:
    """Return a copy with every integer beyond 64 bits converted to a float.

    Go's JSON parser reads such integers as floats too.
    """
    if isinstance(value, Mapping):
        return {key: _as_go_reads(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_go_reads(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(str(value))  # An integer too large for a float becomes infinity.
    return value


@cache
def _environment() -> Any:
    from celpy import Environment

    return Environment()


@cache
def _program(text: str) -> Any:
    environment = _environment()
    return environment.program(environment.compile(text), functions={"matches": _matches})


def _matches(text: str, pattern: str) -> Any:
    """Return whether a text matches a pattern, as CEL's `matches` function does.

    The API server uses RE2, whose `$` matches only at the end of the text. Python's `$` also
    matches before a final newline, so this function replaces `$` with an anchor that does not. This
    is safe because no rule contains an escaped `$`.
    """
    from celpy.celtypes import BoolType

    return BoolType(re.search(pattern.replace("$", r"\Z"), text) is not None)
