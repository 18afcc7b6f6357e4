"""`ddpjob explain` and `ddpjob schema`: the definition for readers and for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api.schema import object_schema
from ddpjob.cli.main import main
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.explain_fields import editor_schema, explain, paths
from jsonschema import Draft7Validator, Draft202012Validator

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


def messages(schema: Any) -> Iterator[str]:
    """Yield every rule's message, without white space."""
    if isinstance(schema, dict):
        yield from ("".join(rule["message"].split()) for rule in schema.get("x-kubernetes-validations", ()))
        for child in schema.values():
            yield from messages(child)


def test_every_field_and_every_rule_is_explained() -> None:
    assert len(paths()) > 150
    said = "".join("".join(line.split()) for path in ("", *paths()) for line in explain(path))
    assert [message for message in messages(object_schema()) if message not in said] == []
    listed = {line.split()[0] for line in explain("spec", recursive=True) if line.startswith("  ")}
    assert {"nodes", "causes", "secretKeyRef"} - listed == {"causes"}


def test_explain_prints_type_default_bounds_and_rules() -> None:
    assert list(explain("ddp.spec.nodes"))[:5] == [
        *("GROUP:      ddpjob.io", "KIND:       DDPJob", "VERSION:    v1alpha1", "", "FIELD: spec.nodes <integer>"),
    ]
    text = "\n".join(explain("spec.nodes"))
    assert "Default: 1." in text and "From 1 to 1024." in text and "- nodes is more than elastic.maxNodes" in text
    assert "One of: Standard, Fast." in "\n".join(explain("spec.recovery.mode"))
    assert "  image                 <string>" in "\n".join(explain("spec")).splitlines()


@pytest.mark.parametrize(
    ("path", "said"),
    [("nodes", "nodes: DDPJob has no such field; did you mean spec.nodes?"),
     ("my-job", "its fields are apiVersion, kind, metadata, spec, status (`ddpjob why my-job` explains a job)"),
     ("spec.nodez", "spec.nodez: spec has no such field; did you mean spec.nodes?"),
     ("spec.maxRestarts", "did you mean spec.recovery.maxRestarts?"),
     ("spec.nodes.x", "spec.nodes has no fields"),
     ("spec.elastic.zzz", "its fields are minNodes, maxNodes"),
     ("spec.podTemplate.spec.affinity", "run `kubectl explain pod.spec.affinity` to see its fields")],
)  # fmt: skip
def test_an_unknown_field_is_refused_with_a_suggestion(
    path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Mistake) as raised:
        list(explain(path))
    assert said in str(raised.value)
    assert main(["explain", path]) == 2 and said in capsys.readouterr().err


def test_the_schema_for_editors_accepts_the_examples_and_finds_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == editor_schema()
    for dialect in (Draft7Validator, Draft202012Validator):  # yaml-language-server uses Draft 7
        dialect.check_schema(schema)
        for example in EXAMPLES:
            assert list(dialect(schema).iter_errors(yaml.safe_load(example.read_text()))) == [], example.name
    wrong = yaml.safe_load(EXAMPLES[0].read_text())
    wrong["spec"]["nodez"] = wrong["spec"]["nodes"] = "2"
    wrong["kind"] = "DDPjob"
    found = {".".join(map(str, error.path)): error for error in Draft7Validator(schema).iter_errors(wrong)}
    assert set(found) == {"spec", "spec.nodes", "kind"}
    assert schema["properties"]["spec"]["properties"]["nodes"]["description"].startswith("Number of training pods")
    assert "\\Z" not in json.dumps(schema), "JavaScript must be able to compile the patterns"
