"""The comparison of jobs in a table, and the record of a run: its commit, and records with hostile
content.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ddpjob.api.job_status import utc_now
from ddpjob.client.texts.compare_runs import arguments, compare
from ddpjob.client.texts.job_text import describe
from ddpjob.client.texts.run_record import COMMIT, DIRTY, record_of, with_commit

HASH = "0123456789" * 4


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ml", "uid": "u"}, "spec": {"script": "train.py", **more}}


def test_arguments_are_compared_by_name() -> None:
    words = ["data", "--lr", "0.1", "--wd=-1e-4", "--seed", "-3", "--amp", "optim.lr=0.2"]
    words += ["--bf16", "--tag", "a", "--tag=b"]
    assert arguments(words) == {
        "argument 1": "data", "--lr": "0.1", "--wd": "-1e-4", "--seed": "-3", "--amp": "yes", "optim.lr": "0.2",
        "--bf16": "yes", "--tag": "a, b",
    }  # fmt: skip
    assert arguments(None) == arguments("x") == {}
    assert len(arguments([f"--a{number}" for number in range(10_000)])) == 200


def test_differing_settings_are_separated_from_equal_ones() -> None:
    one = body("one", args=["--lr", "0.1"], nodes=2, procsPerNode=4, image="a:1")
    two = body("two", args=["--lr=0.2"], nodes=2, procsPerNode=8, image="a:1")
    rows = {row.label: row for row in compare([one, two], utc_now())}
    assert rows["--lr"].values == ("0.1", "0.2") and rows["--lr"].differs
    assert rows["world size"].values == ("8", "16") and rows["processes per node"].differs
    assert not rows["image"].differs and not rows["nodes"].differs and rows["program"].values == ("train.py",) * 2
    assert compare([one, two], utc_now())[0].label == "state"


@pytest.mark.parametrize(
    ("annotations", "environment"),
    [
        ("x", 3),
        ({COMMIT: "../x"}, {"gpu": "a\x1b[31m", "packages": ["torch"]}),
        ({COMMIT: 7}, {"gpu": "x" * 81, "packages": {"torch": 2, "a b": "1", "x" * 99: "1"}}),
    ],
)
def test_a_record_with_hostile_content_is_left_out(annotations: Any, environment: Any) -> None:
    job = body("j") | {"status": {"progress": {"environment": environment}}}
    job["metadata"]["annotations"] = annotations
    assert list(record_of(job)) == []


def test_describe_shows_the_record_of_a_run() -> None:
    job = body("j", image="a", nodes=1)
    job["metadata"]["annotations"] = {COMMIT: HASH, DIRTY: "true"}
    job["status"] = {
        "progress": {"environment": {"gpu": "NVIDIA H200", "packages": {"torch": "2.9.1", "numpy": "2.1"}}}
    }
    lines = list(describe({"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", **job}, [], [], utc_now()))
    for line in (
        "Commit:     012345678901 with changes",
        "GPU:        NVIDIA H200",
        "Packages:   torch 2.9.1, numpy 2.1",
    ):
        assert line in lines, lines


def test_the_commit_of_the_folder_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert with_commit(body("j")) == body("j"), "no repository"

    def git(*words: str) -> str:
        user = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *user, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert with_commit(body("j")) == body("j"), "no commit"
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("untracked files are often data")
    made = with_commit(body("j"))
    assert made["metadata"]["annotations"] == {COMMIT: commit, DIRTY: "false"}
    (tmp_path / "train.py").write_text("2")
    assert with_commit(body("j"))["metadata"]["annotations"][DIRTY] == "true"
    # Regression: the changes were reported as none if git could not read the index.
    index = (tmp_path / ".git/index").read_bytes()
    (tmp_path / ".git/index").write_bytes(b"broken")
    unknown = with_commit(body("j"))
    assert unknown["metadata"]["annotations"] == {COMMIT: commit, DIRTY: "unknown"}
    assert dict(record_of(unknown))["git commit"] == f"{commit[:12]} (changes unknown)"
    (tmp_path / ".git/index").write_bytes(index)
    older = body("j")
    older["metadata"]["annotations"] = {COMMIT: HASH, "a": "b"}
    assert with_commit(older) == older
    assert with_commit(older, again=True)["metadata"]["annotations"] == {COMMIT: commit, DIRTY: "true", "a": "b"}
