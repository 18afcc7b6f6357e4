"""Whether a command uses this machine or a cluster if neither --local nor --cluster is given."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli.display import shortest
from ddpjob.cli.main import main
from ddpjob.cli.places import Place
from ddpjob.client.backends.backend import Mistake

HERE = Place(None, None, None, None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ("DDPJOB_RUNS", "DDPJOB_PLACE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("sys.argv", ["ddpjob"])
    return tmp_path


def record(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(text)


def test_a_command_uses_this_machine_if_a_job_was_run_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not HERE.is_local()
    monkeypatch.setenv("DDPJOB_RUNS", str(folder / "elsewhere"))
    assert not HERE.is_local()
    record(folder / "elsewhere" / "j", json.dumps({"metadata": {"name": "j"}, "spec": {}, "local": {}}))
    assert HERE.is_local()
    assert not Place("ml", None, None, None).is_local() and Place("ml", None, None, True).is_local()


@pytest.mark.parametrize(
    "text",
    ['{"state": "running"}', "[]", "{not json", "", '{"metadata": {"name": "x"}, "local": {}}',
     '{"metadata": {"name": "x"}, "spec": {}, "local": {}}', '{"metadata": 1, "spec": {}, "local": {}}'],
)  # fmt: skip
def test_runs_of_other_tools_are_not_taken_for_jobs(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(folder / "runs" / "tensorboard", text)
    assert not HERE.is_local()
    record(folder / "runs" / "j", json.dumps({"metadata": {"name": "j"}, "spec": {}, "local": {}}))
    (folder / "runs" / "folder" / "status.json").mkdir(parents=True)
    (folder / "runs" / "notes.txt").touch()
    assert main(["--local", "get"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "j"]
    assert f"{folder}/runs/tensorboard/status.json is " in err and f"{folder}/runs/folder/status.json cannot" in err
    assert len(err.splitlines()) == 2
    assert main(["--local", "describe", "tensorboard"]) == 2
    assert f"{folder}/runs/tensorboard/status.json is " in capsys.readouterr().err


def test_the_environment_variable_chooses_between_machine_and_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("local", "cluster"):
        monkeypatch.setenv("DDPJOB_PLACE", said)
        assert HERE.is_local() is (said == "local")
    monkeypatch.setenv("DDPJOB_PLACE", "locl")
    with pytest.raises(Mistake, match="DDPJOB_PLACE=locl: write local or cluster"):
        HERE.is_local()


def test_a_removed_current_folder_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.rmdir()
    assert main(["get"]) == 2
    assert capsys.readouterr().err == "the current folder no longer exists; change to a different folder\n"
    assert shortest(folder / "runs") == str(folder / "runs"), "a run with --workdir and DDPJOB_RUNS still works"


@pytest.mark.parametrize("words", [["get", "-A"], ["dashboard", "-A"], ["validate", "--server", "-"]])
def test_cluster_options_are_refused_together_with_local(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--local"]) == 2
    said = capsys.readouterr().err
    assert words[1 if len(words) > 1 else 0] in said and said.endswith("remove --local\n")


@pytest.mark.parametrize("words", [["-nml", "get"], ["-n=ml", "get"], ["-n", "ml", "get"], ["get", "-n=ml"]])
def test_a_namespace_is_accepted_in_kubectls_forms(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str | None]()

    def backend(place: Place, **options: Any) -> Any:
        asked.append(place.namespace)
        raise Mistake("enough")

    monkeypatch.setattr(Place, "backend", backend)
    assert main(["--context", "c", *words]) == 2
    assert asked == ["ml"]


def test_a_file_system_without_locks_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `ddpjob get` ended with a traceback of the error ENOLCK."""

    def none(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    record(folder / "runs" / "j", json.dumps({"metadata": {"name": "j"}, "spec": {}, "local": {}}))
    (folder / "runs" / "j" / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", none)
    assert main(["get"]) == 2
    assert capsys.readouterr().err == f"{folder}/runs/j/lock: No locks available\n"
