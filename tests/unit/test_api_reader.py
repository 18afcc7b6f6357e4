"""The reader's errors name the right document and line, and are always a ManifestError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api import schema
from ddpjob.api.reader import MAX_BYTES, MOST_LINES, ManifestError, read_manifests, validate, with_defaults
from ddpjob.api.schema import Problem
from ddpjob.api.yamltext import YamlError, read_documents
from ddpjob.client.manifests.later_refusals import later_refusals

JOB = """\
apiVersion: ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: digits}
spec:
  image: train:1
  script: train.py
"""


def _checked(source: Path | str) -> dict[str, Any]:
    return read_manifests(source)[0].checked()


def _message(source: Path | str) -> str:
    with pytest.raises(ManifestError) as caught:
        _checked(source)
    return str(caught.value)


def test_defaults_are_filled_in_at_every_depth() -> None:
    spec = _checked(JOB)["spec"]
    assert spec["nodes"] == 1
    assert spec["rendezvous"]["resources"]["requests"] == {"cpu": "50m", "memory": "400Mi"}
    assert spec["storage"] == {"sharedMemory": "1Gi", "snapshotMemory": "8Gi"}


def test_reading_does_not_change_the_manifest() -> None:
    spec = {"image": "a", "script": "a", "args": None}
    manifest = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "a"}, "spec": spec}
    assert validate(manifest) == []
    assert spec == {"image": "a", "script": "a", "args": None}
    with_defaults(manifest)["spec"]["rendezvous"]["resources"]["requests"]["cpu"] = "9"
    assert with_defaults(manifest)["spec"]["rendezvous"]["resources"]["requests"]["cpu"] == "50m"


def test_all_problems_are_reported_with_their_lines() -> None:
    with pytest.raises(ManifestError) as caught:
        _checked(JOB + "  nodes: 0\n  env:\n    - name: A\n    - value: b\n  recovery:\n    maxRestart: 3\n")
    assert str(caught.value).splitlines() == [
        "spec.env[1].name: required, but missing (the manifest, line 10)",
        "spec.nodes: 0 is less than 1, the smallest allowed (the manifest, line 7)",
        "spec.recovery.maxRestart: unknown field; did you mean maxRestarts? (the manifest, line 12)",
    ]
    assert caught.value.problems[1] == Problem("spec.nodes", "0 is less than 1, the smallest allowed")


def test_a_generated_name_is_completed() -> None:
    name = _checked(JOB.replace("name:", "generateName:"))["metadata"]["name"]
    assert name.startswith("digits") and len(name) == len("digits") + 5


def test_the_job_is_found_among_objects_of_other_kinds() -> None:
    claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\n"
    assert _checked(f"---\n{claim}---\n{JOB}---\n")["metadata"]["name"] == "digits"
    assert "no DDPJob found, only PersistentVolumeClaim (line 1); a DDPJob has apiVersion" in _message(claim)


def test_lines_are_counted_from_the_beginning_of_the_file() -> None:
    assert "line 14" in _message("# one\n---\nkind: Secret\napiVersion: v1\n---\n# two\n---\n" + JOB + "  nodes: x\n")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty; expected a DDPJob"),
        ("---\n---\n", "empty; expected"),
        ("- a\n", "line 1: a manifest must be a mapping with apiVersion and kind"),
        ("hello\n", "a manifest must be a mapping"),
        ("a: [b\nc: d\n", "line 2: not YAML"),
        ("a: \x00", "line 1: not YAML: the character 0x00"),
        ("a: &x [*x]", "an alias refers to a value that contains the alias; write the value out"),
        ("a: !secret b", "the tag !secret is not supported"),
        ("? [a]\n: b", "a field name must be a string"),
        ("a: .nan", "quote it if it is text"),
        ("a:\n\tb: c\n", "line 2: not YAML: found character '\\t' that cannot start any token; indent with spaces"),
        ("a: b\nc: 'd\ne: f\n", "line 2: not YAML: a quote opened on this line is not closed"),
        ('{"a": "\\ud83d"}', "only half of a surrogate pair; write both escapes"),
        (JOB + "  image: other\n", "line 7: spec.image: given twice (first in line 5); remove one"),
        (JOB.replace("v1alpha1", "v2"), "apiVersion: 'ddpjob.io/v2' is not supported; use ddpjob.io/v1alpha1"),
        (JOB.replace("kind: DDPJob\n", ""), "kind: required, but missing; use DDPJob"),
        (JOB.replace("metadata: {name: digits}\n", ""), "metadata.name: required, but missing"),
        (
            JOB + "  recovery: {rules: [{on: Hang, action: Fail}]}\n",
            "spec.recovery.rules[0].true: unknown field; YAML reads unquoted on",
        ),
        (JOB.replace("{name: digits}", "digits"), "metadata: must be a mapping, not a string"),
    ],
)
def test_input_that_is_not_a_manifest_is_refused(text: str, part: str) -> None:
    assert part in _message(text)


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("env: [A=b=c]", "spec.env[0]: must be a mapping, not a string ('A=b=c'); write {name: A, value: \"b=c\"}"),
        ("imagePullSecrets: [own]", "write {name: own}"),
        ("storage: {checkpoints: claim:own}", "write {claimName: own}"),
        ("storage: {checkpoints: /mnt/own}", "write {hostPath: /mnt/own}"),
        ("storage: {checkpoints: 's3://own/a'}", "write {url: s3://own/a}"),
        ("storage: {data: own}", "write {claimName: own}"),
        ("storage: {checkpoints: {pvc: own}}", "spec.storage.checkpoints.pvc: unknown field; did you mean claimName?"),
        ("recovery: fast", "write {mode: Fast}"),
        ("preflight: true", "not a boolean (true); write {}"),
        ("preflight: false", "not a boolean (false); leave it out"),
        ("elastic: true", "not a boolean (true); write {minNodes: 1}"),
        ("runPolicy: {ttlSecondsAfterFinished: 1d}", "write 86400"),
        ("runPolicy: {suspend: 'yes'}", "write true, without quotes"),
        ("namespace: own", "did you mean metadata.namespace?"),
    ],
)
def test_a_misspelled_value_is_refused_with_a_suggestion(written: str, remedy: str) -> None:
    assert remedy in _message(f"{JOB}  {written}\n")


def test_a_yaml_alias_bomb_is_refused() -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert "too many for a manifest" in _message("\n".join(["l0: &l0 [a, b, c]", *levels]))


def test_a_yaml_merge_bomb_is_refused_before_it_is_expanded() -> None:
    bomb = "&a0 {k: v}"
    for level in range(1, 9):
        bomb = f"&a{level} {{<<: [{bomb}{f', *a{level - 1}' * 9}]}}"
    began = time.process_time()
    wide = "a: &a {" + ", ".join(f"k{n}: 1" for n in range(1000)) + "}\nb: {<<: [" + ", ".join(["*a"] * 10_000) + "]}"
    for text in (f"x: {bomb}", wide):
        with pytest.raises(ManifestError, match="<<: merges more than"):
            _checked(text)
    assert time.process_time() - began < 20
    chain = "[&a0 {k: v}" + "".join(f", &a{n} {{<<: *a{n - 1}}}" for n in range(1, 2000)) + "]"
    with pytest.raises(ManifestError, match="<<: merges through more than 100 levels"):
        _checked(f"x: {chain}\n<<: *a1999\n")


def test_explicit_and_earlier_keys_take_precedence_over_merged_ones() -> None:
    text = "a: &a {k: 1, m: 1}\nb: &b {k: 2, o: 2}\nc: {<<: [*a, *b], m: 3}\nd: &d {<<: *d, e: 1}\nf: {<<: *b}"
    [document] = read_documents(text)
    assert document.value["c"] == {"k": 1, "o": 2, "m": 3} and document.value["f"] == {"k": 2, "o": 2}
    assert document.value["d"] == {"e": 1}
    for wrong in ("a: {<<: 5}", "a: {<<: [5]}"):
        with pytest.raises(YamlError, match="<<: merges a mapping"):
            list(read_documents(wrong))


def test_deeply_nested_yaml_is_refused() -> None:
    assert "line 1: nested more than 100 levels deep" in _message("[" * 5000)


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    assert f"{tmp_path}: this is a folder; specify a file" in _message(tmp_path)
    assert _message(tmp_path / "missing.yaml").endswith("missing.yaml: no such file")
    (tmp_path / "job.yaml").touch()
    assert "jb.yaml: no such file; did you mean job.yaml?" in _message(tmp_path / "jb.yaml")
    assert str(Path.cwd()) in _message(Path("missing.yaml"))
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert "not UTF-8 text (invalid byte at offset 0)" in _message(tmp_path / "image.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    assert "larger than 3 MiB" in _message(tmp_path / "large.yaml")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in _message(tmp_path / "file" / "job.yaml")


def test_a_byte_order_mark_and_windows_lines_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xef\xbb\xbf" + JOB.replace("\n", "\r\n").encode())
    assert _checked(tmp_path / "job.yaml")["spec"]["script"] == "train.py"


def test_json_with_tabs_and_surrogate_escapes_is_read() -> None:
    """kubectl reads both, although YAML allows neither tabs before a value nor characters written
    as two surrogates.
    """
    job = yaml.safe_load(JOB)
    job["spec"]["args"] = ["\N{GRINNING FACE}", "a\tb"]
    assert _checked(json.dumps(job, indent="\t"))["spec"]["args"] == job["spec"]["args"]


def test_a_manifest_can_be_read_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, JOB.encode())
    os.close(writing)
    try:
        assert _checked(Path(f"/dev/fd/{reading}"))["kind"] == "DDPJob"
    finally:
        os.close(reading)


def test_importing_the_reader_loads_no_large_libraries() -> None:
    """Only validation needs the large libraries, and reading must not wait for them."""
    code = (
        "import sys, ddpjob.api.reader; print([m for m in ('celpy', 'jsonschema', 'kubernetes') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def job_with_nodes(value: str) -> str:
    head = "apiVersion: ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: job}\n"
    return f"{head}spec: {{image: i, module: m, nodes: {value}}}\n"


NINES, ONES = "9" * 100_000, "1:" * 20_000
_TOO_LONG = r"spec\.nodes=\S{20}\.\.\.\(\d+ more\)\.\.\.\S{20}: a number of [\d,]+ characters; write an integer"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, _TOO_LONG) for value in (NINES, f"-{NINES}", f"{NINES}.5", f"1e{NINES}", f"!!int {ONES}1")),
        *((f"{sign}{base}", _TOO_LONG) for sign in ("", "-") for base in ("0x" + "f" * 500_000, "0" + "7" * 200_000)),
        *((value, _TOO_LONG) for value in ("0b" + "1" * 50_000, "1_0" * 30_000, f"!!float {ONES}1.5")),
        *(
            (value, rf"spec\.nodes={value}: a number of more than 64 bits; write an integer of at most 64 bits")
            for value in (str(2**63), str(-(2**63) - 1), hex(2**63), "1_0000_0000_0000_0000_0000")
        ),
        *((value, rf"spec\.nodes={value}: not a number that a manifest can") for value in ("1e400", "-1e400", ".inf")),
        (f"1, ? {NINES}\n : 1", r"spec\[9{95}\.\.\.\(\d+ more\)\.\.\.9{99}\]: unknown field"),
        (f"1, {NINES}: 1", r"not YAML: expected ',' or '}', but got ':'"),
        (f'"{NINES}"', r"spec\.nodes: must be an integer, not a string \('9+\.\.\.\)"),
        ('!!int ""', "'' is not a valid value for the tag"),
        ('!!float ""', "'' is not a valid value for the tag"),
        (f"!{NINES} 1", r"the tag !9+\.\.\.\(\d+ more\)\.\.\.9+ is not supported"),
        (f"*{NINES}", r"not YAML: found undefined alias '9+\.\.\.\(\d+ more\)\.\.\."),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_a_huge_number_is_reported_in_one_short_line_with_its_field(value: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message) as caught:
        _checked(job_with_nodes(value))
    assert len(str(caught.value)) < 2_300 and "\n" not in str(caught.value) and "line 4" in str(caught.value)


@pytest.mark.parametrize(
    "value", ["9223372036854775807", "-9223372036854775808", "0x7fffffffffffffff", "0b" + "1" * 63]
)
def test_a_64_bit_integer_is_read(value: str) -> None:
    [document] = read_documents(f"a: {value}")
    assert document.value == {"a": int(value, 0)}


def test_a_message_quotes_little_of_a_long_manifest() -> None:
    """The beginning of the field and the remedy are kept, and the middle is cut."""
    problem = str(Problem("spec." + "x" * 10_000, "y" * 10_000 + "; write less"))
    assert len(problem) < 2_300 and problem.startswith("spec.xxx") and problem.endswith("yyy; write less")


def test_a_number_beyond_64_bits_is_read_as_the_api_server_does() -> None:
    spec = {"image": "a", "script": "b", "podTemplate": {"spec": {"terminationGracePeriodSeconds": 2**70}}}
    manifest = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "job"}, "spec": spec}
    assert validate(manifest) == []


def test_only_the_first_problems_are_shown_and_the_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    near = schema._near

    def searching(name: str, known: Any) -> str:
        searched.append(name)
        return near(name, known)

    monkeypatch.setattr(schema, "_near", searching)
    message = _message(JOB + "".join(f"  schedulinf{n}: 1\n" for n in range(5000)))
    assert len(message.splitlines()) == MOST_LINES + 1
    assert message.splitlines()[-1] == "... and at least 79 more; correct these first"
    assert len(searched) <= schema.MOST_PROBLEMS
    few = _message(JOB + "".join(f"  schedulinf{n}: 1\n" for n in range(30)))
    assert few.splitlines()[-1] == "... and 9 more; correct these first"
    long = _message(JOB + "".join(f"  ? {'x' * 10_000}{n}\n  : 1\n" for n in range(30)))
    assert len(long) < 25_000 and "line" in long


def test_the_error_about_a_spec_above_the_size_limits_names_the_field() -> None:
    body = _checked(JOB)
    assert later_refusals(body) == []
    spec = {**body["spec"], "podTemplate": {"spec": {"containers": [{} for _ in range(5000)]}}}
    [problem] = later_refusals({**body, "spec": spec})
    assert problem.path == "spec.podTemplate" and problem.message.startswith("more than 256 KiB of text or 5000")


@pytest.mark.parametrize(
    ("rendezvous", "path"),
    [
        ({"nodeSelector": {"pool": "-"}}, "spec.rendezvous.nodeSelector.pool"),
        ({"runtimeClassName": "g V"}, "spec.rendezvous.runtimeClassName"),
        ({"tolerations": [{"operator": "Equal"}]}, "spec.rendezvous.tolerations[0].key"),
        (
            {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
            "spec.rendezvous.tolerations[0].value",
        ),
    ],
)
def test_fields_that_the_api_server_refuses_in_the_coordinators_pod_are_reported(
    rendezvous: dict[str, Any], path: str
) -> None:
    body = _checked(JOB)
    assert [p.path for p in later_refusals({**body, "spec": {**body["spec"], "rendezvous": rendezvous}})] == [path]
