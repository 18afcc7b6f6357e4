"""A container's environment and arguments on one machine, with $(NAME) and the downward API as
Kubernetes documents them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ddpjob.local.environment import argument_vector, expand, field_value, inherited, manifest_variables

POD = {
    "metadata": {"name": "job-0-0", "namespace": "default", "uid": "u", "labels": {"a/b": "c"}},
    "spec": {"containers": []},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)$(B)y", "x12y"),
        ("$(NO)", "$(NO)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $(A", "$A ${A} $(A"),
        ("$()", "$()"),
        ("100$", "100$"),
    ],
)
def test_references_to_variables_are_expanded_as_kubernetes_does(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


def test_a_variable_may_refer_only_to_earlier_variables() -> None:
    container = {"env": [{"name": "A", "value": "$(B)"}, {"name": "B", "value": "b"}, {"name": "C", "value": "$(B)c"}]}
    assert manifest_variables(POD, container) == {"A": "$(B)", "B": "b", "C": "bc"}


def test_the_downward_api_and_this_shells_variables_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "from this shell")
    monkeypatch.delenv("MISSING", raising=False)
    container = {
        "env": [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "MISSING", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
        ],
        "command": ["run", "--addr=$(IP)"],
        "args": ["$(KEY)"],
    }
    variables = manifest_variables(POD, container)
    assert variables == {"IP": "127.0.0.1", "KEY": "from this shell"}
    assert argument_vector(container, variables) == ["run", "--addr=127.0.0.1", "from this shell"]


def test_references_to_pod_fields_are_resolved() -> None:
    assert field_value(POD, "metadata.labels['a/b']") == "c"
    assert field_value(POD, "metadata.name") == "job-0-0"
    assert field_value(POD, "status.startTime") is None


def test_variables_of_a_job_that_runs_this_job_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_COORDINATOR", "elsewhere:1")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("RANKING", "kept")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PATH", "/bin")
    environment = inherited(cores_per_rank=2)
    assert not {"DDPJOB_COORDINATOR", "RANK"} & set(environment)
    assert environment["RANKING"] == "kept" and environment["OMP_NUM_THREADS"] == "3"
    assert environment["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]
