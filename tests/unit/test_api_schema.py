"""The CRD file as such: complete, bounded, and what the dataclasses read and write."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ddpjob.api import types
from ddpjob.api.cel import SUPPORTED
from ddpjob.api.reader import with_defaults
from ddpjob.api.schema import apply_defaults, load_crd, object_schema, to_json_schema
from ddpjob.api.types import (
    AvoidedNode,
    Condition,
    ConditionType,
    JobSpec,
    JobStatus,
    Phase,
    RendezvousStatus,
    Restart,
    Restarts,
    Slot,
    SlotState,
)
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
SPEC, STATUS = (object_schema()["properties"][part] for part in ("spec", "status"))


def _schemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema below this one with its path; items and values of mappings end in []."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield from _schemas(schema[key], f"{path}[]")


def test_every_field_is_described() -> None:
    fields = [(path, schema) for part in (SPEC, STATUS) for path, schema in _schemas(part, "") if not path.endswith("[]")]
    assert len(fields) > 150
    assert [path for path, schema in fields if len(schema.get("description", "")) < 10] == []


def test_defaults_are_told_in_the_description() -> None:
    """`kubectl explain` does not show a CRD's defaults."""
    untold = [p for p, s in _schemas(SPEC, "spec") if "default" in s and s["default"] != {} and "Default " not in s["description"]]
    assert untold == []


def test_every_value_is_bounded() -> None:
    """What has no bounds makes the rules too expensive for the API server, or lets one object fill etcd."""
    bounds = {"string": ("maxLength", "enum"), "array": ("maxItems",), "integer": ("maximum",)}
    unbounded = [path for path, schema in _schemas(SPEC, "spec") if not set(bounds.get(schema.get("type", ""), schema)) & set(schema)]
    assert unbounded == []
    assert [p for p, s in _schemas(SPEC, "spec") if "additionalProperties" in s and "maxProperties" not in s] == []


def test_defaults_fit_their_schema() -> None:
    for path, schema in _schemas(SPEC, "spec"):
        if "default" in schema:
            filled = apply_defaults(schema["default"], schema)
            assert Draft202012Validator(to_json_schema(schema)).is_valid(filled), path


def test_rules_use_what_both_sides_know() -> None:
    rules = [rule for _, schema in _schemas(object_schema(), "") for rule in schema.get("x-kubernetes-validations", ())]
    assert len(rules) > 40
    for rule in rules:
        assert set(rule) <= SUPPORTED
        assert "\\" not in rule["rule"], "cel-python and the API server read escapes differently"


def test_no_field_changes_by_itself_while_running() -> None:
    """Each field of spec is either free at any time or has a rule that refuses its change, and no other has one."""
    free = {"nodes", "elastic", "spares", "recovery", "runPolicy"}
    guarded = {rule["fieldPath"].lstrip(".") for rule in SPEC["x-kubernetes-validations"] if "oldSelf" in rule["rule"]}
    assert guarded == (set(SPEC["properties"]) - free) | {"recovery.mode"}


def test_the_dataclasses_have_the_same_defaults() -> None:
    """The defaults are written in the CRD; the dataclasses repeat them for objects built in code."""
    manifest = {"apiVersion": types.API_VERSION, "kind": types.KIND, "metadata": {"name": "a"}, "spec": {"image": "a"}}
    stored, bare = JobSpec.read(with_defaults(manifest)["spec"]), JobSpec.read({"image": "a"})
    told = {name for name in vars(stored) if getattr(stored, name) != getattr(bare, name)}
    assert told <= {"rendezvous", "template_hash"}  # the coordinator's resources are the CRD's alone
    assert stored.rendezvous.port == bare.rendezvous.port and stored.rendezvous.placement == bare.rendezvous.placement


def test_the_dataclasses_have_the_same_words() -> None:
    def words(path: str, part: Mapping[str, Any]) -> set[str]:
        return set(dict(_schemas(part, ""))[path]["enum"])

    assert words(".rendezvous.placement", SPEC) == set(types.Placement)
    assert words(".recovery.mode", SPEC) == set(types.RecoveryMode)
    assert words(".recovery.rules[].cause", SPEC) == set(types.RuleCause)
    assert words(".recovery.rules[].action", SPEC) == set(types.RuleAction)
    assert words(".runPolicy.cleanPodPolicy", SPEC) == set(types.CleanPodPolicy)
    assert words(".slots[].state", STATUS) == words(".rendezvous.state", STATUS) == set(SlotState)
    columns = load_crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    for text in (STATUS["properties"]["phase"]["description"], columns[0]["description"]):
        assert all(phase in text for phase in Phase), text


def test_the_status_that_is_written_fits_the_schema() -> None:
    """The API server drops what its schema does not know, without a word."""
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    restart = Restart(
        time=now, pod="job-0-1", reason="WorkerFailed", message="m", counted=True, index=0, node="n1", rank=3, seconds=4.5, round=2
    )
    restart = replace(restart, consequence=True)
    status = JobStatus(
        observed_generation=1,
        phase=Phase.RUNNING,
        conditions=(Condition(type=ConditionType.RUNNING, status=True, reason="AllNodesReady", message="2 of 2", since=now, generation=1),),
        selector="a=b",
        pod_files="job-podfiles-12345678",
        start_time=now,
        completion_time=now,
        template_hash="abc",
        round=3,
        rendezvous=RendezvousStatus(
            generation=1, attempt=2, failures=3, not_before=now, state=SlotState.RUNNING, endpoint="a:29400", nodes=2
        ),
        active=2,
        ready=2,
        nodes_wanted=2,
        spare=1,
        slots=(
            Slot(attempt=1, state=SlotState.RUNNING, node="n1", round=2, reason="ExitCode", failures=3, not_before=now, lost_since=now),
            Slot(),
        ),
        highest_attempt=5,
        avoided_nodes=(AvoidedNode(node="n1", until=now, reason="NodeLost twice"),),
        restarts=Restarts(
            counted=1,
            uncounted=2,
            total=4,
            last_counted=now,
            seen_generation=1,
            seen_incident=4,
            seen_round=2,
            recent=(restart,),
        ),
        progress={"epoch": 1, "percent": 45, "loss": 0.3, "metrics": {"accuracy": 1}, "updatedAt": "2026-01-02T03:04:05Z"},
        max_restarts=10,
    )
    written = status.write()
    assert [error.message for error in Draft202012Validator(to_json_schema(STATUS)).iter_errors(written)] == []
    assert JobStatus.read(written) == status


def test_columns_and_subresources_point_at_fields() -> None:
    version = load_crd()["spec"]["versions"][0]
    paths = [c["jsonPath"] for c in version["additionalPrinterColumns"]] + list(version["subresources"]["scale"].values())
    for path in paths:
        schema: Mapping[str, Any] = object_schema()
        for part in path.lstrip(".").split("."):
            schema = schema["properties"][part]
    names = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert names == ["State", "Nodes", "Progress", "Loss", "Speed", "Restarts", "Age"]


@pytest.mark.slow
def test_a_wheel_carries_the_definition(tmp_path: Path) -> None:
    """In the checkout it is a link to the chart's file; installed, it must be the file."""
    source = tmp_path / "source"  # setuptools leaves its build folder beside pyproject.toml
    for part in ("operator", "trainer", "charts"):
        shutil.copytree(ROOT / part, source / part, symlinks=True)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        carried = wheel.read("ddpjob/api/ddpjobs.ddpjob.io.yaml")
    assert carried == (ROOT / "charts/ddpjob-operator/crds/ddpjobs.ddpjob.io.yaml").read_bytes()
