"""The corpus, read by ddpjob. tests/cluster/test_corpus_on_server.py sends it to the API server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from corpus import Case, cases
from ddpjob.api import cel
from ddpjob.api.reader import ManifestError, read_manifests, validate
from ddpjob.api.schema import object_schema


@cache
def _refusals(case: Case) -> tuple[Any, ...]:
    """Return the reasons why ddpjob refuses a case. They are cached, because two tests need them
    and evaluating a rule in Python is slow.
    """
    *before, new = case.documents()
    return tuple(validate(new, *before))


def _named(kind: str) -> list[Any]:
    return [pytest.param(case, id=case.path.stem) for case in cases(kind)]


@pytest.mark.parametrize("case", _named("valid"))
def test_a_valid_case_of_the_corpus_is_accepted(case: Case) -> None:
    assert read_manifests(case.path)[0].checked()["kind"] == "DDPJob"


@pytest.mark.parametrize("case", _named("invalid"))
def test_an_invalid_case_of_the_corpus_is_refused(case: Case) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifests(case.path)[0].checked()
    for text in case.says + case.locally:
        assert text in str(caught.value)
    assert str(case.path) in str(caught.value)


@pytest.mark.slow  # in Python, each rule takes a quarter of a second
@pytest.mark.parametrize("case", _named("updates"))
def test_an_update_in_the_corpus_is_accepted_or_refused_as_expected(case: Case) -> None:
    assert validate(case.documents()[0]) == []
    message = "\n".join(map(str, _refusals(case)))
    assert bool(message) == case.refused, message
    for text in case.says:
        assert text in message


# --- every field is used ----------------------------------------------------------------------------------------

OF_KUBERNETES = ("podTemplate", "env", "envFrom")
"""Parts of the spec with fields that Kubernetes defines."""


def _fields(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, child in schema.get("properties", {}).items():
        yield f"{path}{key}"
        yield from _fields(child, f"{path}{key}.") if key not in OF_KUBERNETES else ()
    if isinstance(schema.get("items"), Mapping):
        yield from _fields(schema["items"], path)


def _used(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield f"{path}{key}"
            yield from _used(child, f"{path}{key}.")
    elif isinstance(value, list):
        for child in value:
            yield from _used(child, path)


def test_every_field_of_the_spec_is_used_by_a_valid_case() -> None:
    """A real API server reads these cases, so it must accept and keep the field."""
    used = {path for case in cases("valid") for body in case.documents() for path in _used(body.get("spec"))}
    unused = sorted(set(_fields(object_schema()["properties"]["spec"])) - used)
    where = "tests/corpus/valid/everything.yaml (CONTRIBUTING.md, A field of the spec, step 4)"
    assert unused == [], f"use these fields in {where}"


# --- every rule is needed ---------------------------------------------------------------------------------------


def _rules(schema: Mapping[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the position of each rule in the CRD: the path of the schema, and the rule's index in
    it.
    """
    yield from ((keys, number) for number in range(len(schema.get("x-kubernetes-validations", ()))))
    for key, child in schema.get("properties", {}).items():
        yield from _rules(child, (*keys, "properties", key))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield from _rules(schema[key], (*keys, key))


def _without(keys: tuple[str, ...], number: int) -> Any:
    schema = deepcopy(object_schema())
    part = schema
    for key in keys:
        part = part[key]
    del part["x-kubernetes-validations"][number]
    return schema


@pytest.fixture(scope="module")
def sole_refusals() -> list[tuple[str, Any, Any]]:
    """The message, the new object and the old object of every case that is refused for a single
    reason.
    """
    found = []
    for kind in ("invalid", "updates"):
        for case in cases(kind):
            if case.refused and case.says:
                *before, new = case.documents()
                if len(problems := _refusals(case)) == 1:
                    found.append((problems[0].message, new, before))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "number"), [pytest.param(p, n, id=f"{'.'.join(p[1::2])}-{n}") for p, n in _rules(object_schema())]
)
def test_each_rule_is_the_only_reason_to_refuse_some_case(
    keys: tuple[str, ...], number: int, sole_refusals: list[tuple[str, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = object_schema()
    for key in keys:
        part = part[key]
    message = part["x-kubernetes-validations"][number]["message"]
    monkeypatch.setattr(cel, "object_schema", lambda: _without(keys, number))
    accepted = [new for found, new, before in sole_refusals if found == message and not validate(new, *before)]
    advice = (
        "add a file to tests/corpus/invalid that only this rule refuses (CONTRIBUTING.md, A field of the spec, step 4)"
    )
    assert accepted, f"{advice}: {message}"
