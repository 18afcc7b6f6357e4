"""The CRD file is complete, bounded, and consistent with the dataclasses."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Hashable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from ddpjob.api import job_spec
from ddpjob.api.cel import SUPPORTED
from ddpjob.api.job_spec import JobSpec
from ddpjob.api.job_status import ConditionType, JobStatus, NotificationState, Phase, Slot, SlotState
from ddpjob.api.schema import apply_defaults, load_crd, object_schema, schema_of, to_json_schema
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
TIME = "2026-01-02T03:04:05Z"
SPEC, STATUS = (object_schema()["properties"][part] for part in ("spec", "status"))
CRD = "charts/ddpjob-operator/crds/ddpjobs.ddpjob.io.yaml"


def do(what: str, step: int) -> str:
    """Return the advice for a failing check."""
    return f"{what} (CONTRIBUTING.md, A field of the spec, step {step})"


def _schemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every schema below this one with its path. Items and values of mappings end in []."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield from _schemas(schema[key], f"{path}[]")


def test_every_field_of_the_crd_is_described() -> None:
    fields = [
        (path, schema) for part in (SPEC, STATUS) for path, schema in _schemas(part, "") if not path.endswith("[]")
    ]
    assert len(fields) > 150
    silent = [path for path, schema in fields if len(schema.get("description", "")) < 10]
    assert silent == [], do(f"give each of these fields a description in {CRD}", 1)


def test_defaults_are_given_in_the_description() -> None:
    """`kubectl explain` does not show a CRD's defaults."""
    missing = [
        p
        for p, s in _schemas(SPEC, "spec")
        if "default" in s and s["default"] != {} and "Default: " not in s["description"]
    ]
    assert missing == [], do(f'write "Default: VALUE." into the descriptions of these fields in {CRD}', 1)


def test_every_value_is_bounded() -> None:
    """Unbounded values would make the rules too expensive for the API server, or let one object
    fill etcd.
    """
    bounds = {"string": ("maxLength", "enum"), "array": ("maxItems",), "integer": ("maximum",)}
    unbounded = [
        path
        for path, schema in _schemas(SPEC, "spec")
        if not set(bounds.get(schema.get("type", ""), schema)) & set(schema)
    ]
    assert unbounded == [], do(f"bound these in {CRD} by maxLength, enum, maxItems or maximum", 1)
    endless = [p for p, s in _schemas(SPEC, "spec") if "additionalProperties" in s and "maxProperties" not in s]
    assert endless == [], do(f"bound these in {CRD} by maxProperties", 1)


def test_defaults_are_valid_for_their_schema() -> None:
    for path, schema in _schemas(SPEC, "spec"):
        if "default" in schema:
            filled = apply_defaults(schema["default"], schema)
            fits = Draft202012Validator(to_json_schema(schema)).is_valid(filled)
            assert fits, do(f"{path}: its own schema refuses its default; correct one of them in {CRD}", 1)


def test_rules_use_only_features_of_both_evaluators() -> None:
    rules = [rule for _, schema in _schemas(object_schema(), "") for rule in schema.get("x-kubernetes-validations", ())]
    assert len(rules) > 40
    for rule in rules:
        assert set(rule) <= SUPPORTED, f"{rule['rule']}: ddpjob.api.cel evaluates only {SUPPORTED} in a rule"
        assert "\\" not in rule["rule"], (
            "cel-python and the API server treat escapes differently; write the rule without them"
        )


def test_every_field_may_change_while_running_or_has_a_rule_against_it() -> None:
    """A field of spec may change at any time, or has a rule against changes, but never both."""
    free = {"nodes", "elastic", "spares", "recovery", "runPolicy", "notify", "rankOrder"}
    guarded = {rule["fieldPath"].lstrip(".") for rule in SPEC["x-kubernetes-validations"] if "oldSelf" in rule["rule"]}
    fixed = (set(SPEC["properties"]) - free) | {"recovery.mode"}
    assert fixed - guarded == set(), do(f"add a rule with oldSelf to {CRD}, or the field to `free` here", 1)
    assert guarded - fixed == set(), do(f"remove the rule with oldSelf from {CRD}, or the field from `free` here", 1)


RENAMED = {"initialSeconds": "initial", "maxSeconds": "maximum"}
Path_ = tuple[str | int, ...]


def _two_values(schema: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return two different values of a field. At least one is not its default."""
    if "enum" in schema:
        return schema["enum"][0], schema["enum"][-1]
    by_type: dict[str, tuple[Any, Any]] = {
        "boolean": (False, True), "integer": (70, 71), "number": (7.5, 8.5),
        "string": ("/some", "/other"), "object": ({}, {}),
    }  # fmt: skip
    return by_type.get(schema.get("type", ""), ("7Gi", "8Gi"))


def _one_field_set(schema: Mapping[str, Any]) -> Iterator[tuple[Path_, Any, Any]]:
    """Yield two cases for each field below: its path, a value, and an object with this value and
    the required fields.
    """
    if "properties" in schema:
        required = {name: _two_values(schema["properties"][name])[0] for name in schema.get("required", ())}
        if "on" in schema["properties"]:
            required["cause"] = "Hang"  # a rule of the CRD requires one of the two
        for name, child in schema["properties"].items():
            for path, value, inner in _one_field_set(child):
                siblings = {key: item for key, item in required.items() if (name, key) != ("on", "cause")}
                yield (name, *path), value, siblings | {name: inner}
    elif "items" in schema:
        yield from (((0, *path), value, [inner]) for path, value, inner in _one_field_set(schema["items"]))
    elif isinstance(schema.get("additionalProperties"), Mapping):
        inner_fields = _one_field_set(schema["additionalProperties"])
        yield from ((("some.key", *path), value, {"some.key": inner}) for path, value, inner in inner_fields)
    else:
        yield from (((), value, value) for value in _two_values(schema))


def _attribute(name: str) -> str:
    return RENAMED.get(name) or re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", name)


def _at(model: Any, path: Path_) -> Any:
    """Return the value in a dataclass that corresponds to a path in the CRD."""
    for name in path:
        if is_dataclass(model):
            assert isinstance(name, str)
            declared = hasattr(model, _attribute(name))
            assert declared, do(f"declare {_attribute(name)} of {type(model).__name__} in ddpjob/api/job_spec.py", 2)
            model = getattr(model, _attribute(name))
        elif not isinstance(model, str):  # only the name of an image pull secret is kept
            model = model[name]
    return model


@pytest.mark.parametrize(
    ("path", "value", "spec"),
    [pytest.param(*case, id=f"{'.'.join(map(str, case[0]))}={case[1]}") for case in _one_field_set(SPEC)],
)
def test_every_field_of_spec_is_read(path: Path_, value: Any, spec: Mapping[str, Any]) -> None:
    assert _at(JobSpec.read(spec), path) == value


def _declared(model: Any, schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Field[Any]]]:
    """Yield each field of the CRD that a dataclass has, at any depth, with its declaration."""
    for name, child in schema["properties"].items():
        yield from ((child, f) for f in fields(model) if f.name == _attribute(name))
        inner = getattr(model, _attribute(name), None)  # test_every_field_of_spec_is_read finds missing fields.
        yield from _declared(inner, child) if is_dataclass(inner) else ()


def test_no_default_is_defined_twice() -> None:
    """A field with a default in the CRD has no default in the dataclass. All other defaults in
    dataclasses mean that the field is absent.
    """
    volumes = {"data": {"claimName": "a"}, "checkpoints": {"claimName": "a"}}
    job = JobSpec.read({"image": "a", "elastic": {"minNodes": 1}, "storage": volumes})
    declared = list(_declared(job, SPEC))
    assert len(declared) > 50
    for schema, found in declared:
        twice = do(f"remove the default of {found.name} from the dataclass: the CRD has it", 2)
        assert found.default_factory is MISSING, twice
        assert found.default is MISSING if "default" in schema else found.default in (MISSING, None, (), ""), twice
    # The reading code must not contain a default either. 0, 1 and 10 are excluded, because they
    # have other uses.
    defaults = {s["default"] for _, s in _schemas(SPEC, "") if isinstance(s.get("default"), str | int)} - {0, 1, 10}
    folder = Path(job_spec.__file__).parent
    tree = ast.parse("\n".join((folder / f"{name}.py").read_text() for name in ("job_spec", "job_status", "job")))
    enums = {node for c in tree.body if ast.unparse(c).find("(StrEnum)") > 0 for node in ast.walk(c)}
    literals = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in enums}
    assert literals & defaults == set(), do("read these from the schema: they are defaults of the CRD", 2)


def test_without_storage_checkpoints_the_checkpoint_path_is_the_default() -> None:
    assert JobSpec.read({"image": "a"}).storage.checkpoint_path == "/checkpoints"
    checkpoints = {"claimName": "a", "mountPath": "/b"}
    assert JobSpec.read({"image": "a", "storage": {"checkpoints": checkpoints}}).storage.checkpoint_path == "/b"


def test_a_default_added_by_a_later_release_does_not_change_the_template_hash() -> None:
    """Otherwise, an upgrade would replace the pods of every job."""
    spec = {"image": "a", "recovery": {"maxRestarts": 3}}
    assert JobSpec.read(spec).template_hash == HASH
    assert JobSpec.read(spec | {"nodes": 7}).template_hash == HASH
    assert JobSpec.read(spec | {"rankOrder": ["rack"]}).template_hash == HASH
    assert JobSpec.read({"image": "a", "recovery": {"mode": "Standard"}}).template_hash == HASH
    assert JobSpec.read({"image": "a", "recovery": {"mode": "Fast"}}).template_hash != HASH


HASH = "7720613975"
"""Hash of a spec that names only an image. If it changes, an upgrade replaces the pods of all jobs.
"""


def test_the_enums_have_the_values_of_the_schema() -> None:
    def values(path: str, part: Mapping[str, Any]) -> set[str]:
        return set(dict(_schemas(part, ""))[path]["enum"])

    assert values(".rendezvous.placement", SPEC) == set(job_spec.Placement)
    assert values(".recovery.mode", SPEC) == set(job_spec.Mode)
    assert values(".recovery.rules[].cause", SPEC) == set(job_spec.RuleCause)
    assert values(".recovery.rules[].action", SPEC) == set(job_spec.RuleAction)
    assert values(".runPolicy.cleanPodPolicy", SPEC) == set(job_spec.CleanPodPolicy)
    assert values(".notify.events[]", SPEC) == set(job_spec.NotifyEvent)
    assert values(".notifications[].state", STATUS) == set(NotificationState)
    assert values(".slots[].state", STATUS) == values(".rendezvous.state", STATUS) == set(SlotState)
    columns = load_crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    for text in (STATUS["properties"]["phase"]["description"], columns[0]["description"]):
        assert all(phase in text for phase in Phase), text


def _filled(kind: Any, default: Any = None) -> Any:
    """Return a value of this type that is not its default. In a dataclass, this applies to every
    field.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{f.name: _filled(hints[f.name], f.default) for f in fields(kind)})
    if get_origin(kind) is tuple:
        return (_filled(get_args(kind)[0]),)
    if get_origin(kind) in (Union, UnionType):
        return _filled(get_args(kind)[0])
    if get_origin(kind) is dict:
        return {"key": "a"}
    if issubclass(kind, StrEnum):
        return next(value for value in kind if value != default)
    return {bool: True, int: 7, float: 4.5, str: "a", datetime: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)}[kind]


def _complete(schema: Mapping[str, Any]) -> Any:
    """Return a value with every field of the schema."""
    if schema.get("type") == "object":
        named = {name: _complete(child) for name, child in schema.get("properties", {}).items()}
        return named or {"accuracy": _complete(schema["additionalProperties"])}
    if schema.get("type") == "array":
        return [_complete(schema["items"])]
    return TIME if schema.get("format") == "date-time" else _two_values(schema)[1]


def test_a_written_status_fits_the_schema() -> None:
    """The API server silently drops fields that the schema lacks."""
    full: JobStatus = _filled(JobStatus)
    # 102 slots, so that equal slots are written as runs
    slots = (*full.slots, Slot(), *(Slot(node=f"n{i}") for i in range(100)))
    status = replace(full, slots=slots, progress=_complete(STATUS["properties"]["progress"]))
    assert _at_default(status) == [], "give `_filled` a value for fields of this type that is not their default"
    written = status.write(JobSpec.read({"image": "a"}))
    errors = [error.message for error in Draft202012Validator(to_json_schema(STATUS)).iter_errors(written)]
    assert errors == [], do(f"correct the schema of the status in {CRD}", 1)
    assert JobStatus.read(written) == status, do("let ddpjob/api/job_status.py read what it writes", 2)
    of_class = ".jobClass.spec."  # fields of the spec, which the schema of the status does not list
    paths = {path for path in _paths(written, "") if not path.startswith(of_class)}
    described = {path for path, _ in _schemas(STATUS, "")} - {""}
    assert paths - described == set(), do(f"describe these fields of the status in {CRD}", 1)
    assert described - paths == set(), do(f"write these in ddpjob/api/job_status.py, or remove them from {CRD}", 2)


def _paths(value: Any, path: str) -> set[str]:
    """Return the paths of a JSON value in the form of `_schemas`, with [] for any key that the
    schema of a mapping admits.
    """
    if isinstance(value, Mapping):
        if path.endswith((".metrics", ".packages", ".nodeSelector", ".labels", ".annotations")):
            return {path, f"{path}[]"}
        if path.endswith(".tolerations[]"):
            return {path}
        found = (_paths(item, f"{path}.{name}") for name, item in value.items())
        return {path for path in (path,) if path}.union(*found)
    if isinstance(value, list):
        return {path}.union(*(_paths(item, f"{path}[]") for item in value))
    return {path}


def _at_default(model: Any) -> list[str]:
    """Return the fields of a dataclass, at any depth, whose value is the default. Only the first
    entry of a list is checked.
    """
    found = [f"{type(model).__name__}.{f.name}" for f in fields(model) if getattr(model, f.name) == f.default]
    for inner in (getattr(model, f.name) for f in fields(model)):
        first = inner[0] if isinstance(inner, tuple) and inner else inner
        found += _at_default(first) if is_dataclass(first) else []
    return found


def test_unset_fields_are_not_written() -> None:
    written = JobStatus(slots=(Slot(),)).write(JobSpec.read({"image": "a", "nodes": 2}))
    assert written == {
        "observedGeneration": 0,
        "conditions": [],
        "image": "a",
        "round": 0,
        "rendezvous": {"generation": 0, "state": "Planned", "endpoint": "", "nodes": 0},
        "nodes": {"wanted": 2, "active": 0, "ready": 0, "spare": 0, "display": "0/2"},
        "slots": [{"attempt": 0, "state": "Planned"}],
        "highestAttempt": 0,
        "restarts": {
            "counted": 0,
            "uncounted": 0,
            "total": 0,
            "max": 10,
            "display": "0/10",
            "seen": {"generation": 0, "incident": 0, "round": 0},
            "recent": [],
        },
    }
    assert JobStatus.read(written) == JobStatus(slots=(Slot(),))
    yaml.safe_dump(written)  # only plain values


def test_a_status_of_a_later_release_can_be_read() -> None:
    later = {"later": {"a": 1}, "rendezvous": {"later": 1, "generation": 3}, "nodes": {"later": 1, "ready": 2}}
    read = JobStatus.read(later | {"slots": [{"attempt": 3, "state": "Running", "later": 1}]})
    assert (read.rendezvous.generation, read.ready, read.active) == (3, 2, 0)
    assert read.slots == (Slot(attempt=3, state=SlotState.RUNNING),)
    assert JobStatus.read({}) == JobStatus()
    unknown = {"type": "Running", "status": "Unknown", "reason": "A", "message": "", "lastTransitionTime": TIME}
    assert not JobStatus.read({"conditions": [unknown]}).holds(ConditionType.RUNNING)


def test_invalid_content_of_a_status_is_dropped() -> None:
    """If the operator could not read a job's status, it would ignore the job, whose pods would run
    forever.
    """
    good = {"type": "Running", "status": "True", "reason": "A", "message": "", "lastTransitionTime": TIME}
    forged = {
        "phase": "Later",
        "startTime": "9999-12-31T23:59:59-12:00",
        "round": 2**63 - 1,
        "conditions": [good | {"type": "Later"}, good, {}],
        "slots": [{"state": "Later", "attempt": 2}, {"attempt": -1}, {"count": 4000, "attempt": 7}, {"count": 4000}],
        "avoidedNodes": [{}, {"node": "n1"}, {"node": "n2", "until": TIME}],
        "restarts": {"counted": 3, "recent": [{}, {"time": TIME}], "seen": {"round": -1, "incident": 4}},
        "rendezvous": {"generation": 5, "notBefore": "2026-01-01T00:00:00"},
    }
    read = JobStatus.read(forged)
    assert (read.phase, read.start_time, read.round) == (None, None, 0)
    assert [c.type for c in read.conditions] == [ConditionType.RUNNING]
    assert [(s.state, s.attempt) for s in read.slots[:3]] == [("Planned", 2), ("Planned", 0), ("Planned", 7)]
    assert len(read.slots) <= 4096
    assert [entry.node for entry in read.avoided_nodes] == ["n2"]
    assert (read.restarts.counted, read.restarts.seen_incident, read.restarts.recent) == (3, 4, ())
    assert (read.rendezvous.generation, read.rendezvous.not_before) == (5, None)
    for nothing in ({"slots": 3}, {"slots": [None] * 5000}, {"conditions": {}}, {"restarts": None}, {"nodes": []}):
        assert JobStatus.read(nothing) == JobStatus(), nothing
    assert JobStatus.read({"restarts": 5}) == JobStatus()
    assert JobStatus.read({"slots": [{"count": 1, "nodes": 5}]}).slots == (Slot(),)


SCHEMA_WORDS = {
    *("type", "format", "description", "default", "enum", "pattern", "required"),
    *("properties", "additionalProperties", "maxProperties", "items", "minItems", "maxItems"),
    *("minimum", "maximum", "minLength", "maxLength", "anyOf", "nullable"),
}


def test_the_schema_has_only_keywords_that_the_api_server_knows() -> None:
    """In YAML's flow style, a comma ends a description, and the text after the comma becomes keys
    of the schema.
    """

    def unknown(schema: Mapping[str, Any], path: str) -> Iterator[str]:
        yield from (
            f"{path}: {word}"
            for word in schema
            if word not in SCHEMA_WORDS and not re.fullmatch(r"x-kubernetes-[a-z-]+", word)
        )
        for name, field in schema.get("properties", {}).items():
            yield from unknown(field, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), Mapping):
                yield from unknown(schema[key], f"{path}[{key}]")

    fix = do(f"put the description of each of these in {CRD} in quotes, or add the word to SCHEMA_WORDS here", 1)
    assert list(unknown(object_schema(), "")) == [], fix


def test_kubectl_get_all_shows_no_jobs() -> None:
    """Otherwise `kubectl delete all --all` would delete jobs and everything that they own."""
    assert not load_crd()["spec"]["names"].get("categories")


def test_columns_and_subresources_refer_to_existing_fields() -> None:
    version = load_crd()["spec"]["versions"][0]
    paths = [c["jsonPath"] for c in version["additionalPrinterColumns"]] + list(
        version["subresources"]["scale"].values()
    )
    for path in paths:
        schema: Mapping[str, Any] = object_schema()
        for part in path.lstrip(".").split("."):
            schema = schema["properties"][part]
    names = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert names == ["State", "Nodes", "Progress", "Loss", "Speed", "Restarts", "Age"]


@pytest.mark.slow
def test_a_wheel_contains_the_crd(tmp_path: Path) -> None:
    """In the checkout, the file is a link to the chart's file, but a wheel needs the file
    itself.
    """
    source = tmp_path / "source"  # setuptools leaves its build folder next to pyproject.toml
    for part in ("operator", "runtime", "trainer", "charts"):
        shutil.copytree(ROOT / part, source / part, symlinks=True)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        carried = wheel.read("ddpjob/api/ddpjobs.ddpjob.io.yaml")
        names = set(wheel.namelist())
    assert carried == (ROOT / "charts/ddpjob-operator/crds/ddpjobs.ddpjob.io.yaml").read_bytes()
    assert {"ddpjob_runtime/launcher/__main__.py", "ddpjob_trainer/config/shipped/digits.yaml"} <= names


# --- large jobs, and upgrades -----------------------------------------------------------------------------------


def test_consecutive_equal_slots_of_a_large_job_are_written_as_one_entry() -> None:
    spec = JobSpec.read({"image": "a"})
    running = [Slot(state=SlotState.RUNNING, node=f"node-{i}") for i in range(1024)]
    running[7] = replace(running[7], attempt=3)
    status = JobStatus(slots=tuple(running), highest_attempt=3)
    written = status.write(spec)
    assert [entry.get("count", 1) for entry in written["slots"]] == [7, 1, 1016]
    assert len(json.dumps(written["slots"])) < 16_000
    assert JobStatus.read(written) == status
    planned = replace(status, slots=(Slot(),) * 1024)
    assert planned.write(spec)["slots"] == [{"attempt": 0, "state": "Planned", "count": 1024}]
    assert JobStatus.read(planned.write(spec)) == planned
    for wrong in ({"count": 5000}, {"count": 0}, {"count": "all"}, {"nodes": ["n", "m"]}):
        one = JobStatus(slots=(Slot(attempt=4),))
        assert JobStatus.read({"slots": [{"attempt": 4, **wrong}]}) == one


STORED = json.loads(
    """{"image": "image", "script": "train.py", "nodes": 2, "gpusPerNode": 0, "env": [{"name": "LR", "value": "1"}],
    "storage": {"data": {"claimName": "d", "mountPath": "/data", "readOnly": true}, "checkpoints": {"claimName": "c",
    "mountPath": "/checkpoints", "readOnly": false, "shared": false}, "sharedMemory": "1Gi"}, "podTemplate": {"spec":
    {"nodeSelector": {"a": "b"}}}, "spares": 0, "gpuResource": "nvidia.com/gpu", "resources": {}, "backend": "auto",
    "rendezvous": {"placement": "Dedicated", "port": 29400, "joinTimeoutSeconds": 600, "resources": {"requests":
    {"cpu": "50m", "memory": "400Mi"}}}, "recovery": {"mode": "Standard", "maxRestarts": 10, "resetAfterSeconds": 3600,
    "backoff": {"initialSeconds": 1, "maxSeconds": 60}, "nodeLostAfterSeconds": 30}, "runPolicy": {"suspend": false,
    "cleanPodPolicy": "Running", "failedPodsKept": 3}, "scheduling": {"onePodPerNode": true, "topologyKey":
    "kubernetes.io/hostname"}}"""
)


def test_a_new_default_in_the_crd_does_not_restart_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is upgraded from this release to a later one, and back."""
    stored = JobSpec.read(STORED).template_hash
    later = deepcopy(schema_of("spec"))
    queue = {"type": "object", "default": {}, "properties": {"depth": {"type": "integer", "default": 3}}}
    later["properties"]["fabric"] = {
        "type": "object",
        "default": {},
        "properties": {"policy": {"type": "string", "default": "Isolated"}, "queue": queue, "note": {"type": "string"}},
    }
    later["properties"]["storage"]["properties"]["data"]["properties"]["split"] = {
        "type": "boolean",
        "default": False,
    }
    read = apply_defaults(STORED, later)
    assert read["fabric"] == {"policy": "Isolated", "queue": {"depth": 3}} and read["storage"]["data"]["split"] is False
    assert JobSpec.read(read).template_hash == stored, "an earlier operator ignores the fields"
    with monkeypatch.context() as patched:
        patched.setattr(job_spec, "schema_of", lambda path: later if path == "spec" else schema_of(path))
        assert job_spec._template_hash(read, "Standard") == stored
        for change in ({"policy": "Open"}, {"note": "x"}, {"queue": {"depth": 4}}):
            changed = {**read, "fabric": {**read["fabric"], **change}}
            assert job_spec._template_hash(changed, "Standard") != stored


def _functions_of_fields(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield the functions that pydantic calls while it reads or writes a value of `kind`."""
    if kind in seen:
        return
    seen.add(kind)
    yield from (each.func for each in getattr(kind, "__metadata__", ()) if hasattr(each, "func"))
    ours = isinstance(kind, type) and kind.__module__.startswith("ddpjob.")
    parts = get_type_hints(kind, include_extras=True).values() if ours and is_dataclass(kind) else get_args(kind)
    for part in parts:
        if isinstance(part, Hashable):
            yield from _functions_of_fields(part, seen)


def test_functions_that_pydantic_calls_have_one_signature_in_all_python_versions() -> None:
    """Python 3.12.3 reports that an itemgetter takes any arguments, and pydantic then raises an
    error at import.
    """
    found = [*_functions_of_fields(JobSpec, set()), *_functions_of_fields(JobStatus, set())]
    validators = [each for each in found if each is not str]
    assert len(validators) > 4
    assert [each for each in validators if not inspect.isfunction(each)] == []
