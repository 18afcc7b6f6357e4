"""Invalid input causes a clear message and exit code 2, and nothing is created."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli.main import main
from process_harness import Machine, manifest


@dataclass(frozen=True)
class Answer:
    """The output and exit code of a command."""

    returncode: int
    stdout: str
    stderr: str


class SameProcess(Machine):
    """Runs commands in this process. Invalid input starts no job, and starting Python would take
    most of the time.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder)
        self._capsys = capsys

    def command(self, *words: str, seconds: float = 60) -> Answer:  # type: ignore[override]
        code = main(list(words))
        return Answer(code, *self._capsys.readouterr())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SameProcess:
    monkeypatch.chdir(tmp_path)
    machine = SameProcess(tmp_path, capsys)
    monkeypatch.setenv("DDPJOB_RUNS", str(machine.runs))
    monkeypatch.setenv("DDPJOB_PLACE", "local")
    return machine


WRONG: list[tuple[str, dict[str, Any] | str, list[str]]] = [
    ("not YAML", "{ not: [yaml", ["job.yaml", "line 1"]),
    ("no job", "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n", ["no DDPJob found"]),
    ("unknown field", manifest(nodez=3), ["spec.nodez", "nodes"]),
    ("no nodes", manifest(nodes=0), ["spec.nodes"]),
    ("two entry points", manifest(script="a.py", command=["b"]), ["exactly one of script, module and command"]),
    (
        "podTemplate, unknown",
        manifest(podTemplate={"spec": {"tolerationz": []}}),
        ["spec.podTemplate.spec.tolerationz", "tolerations"],
    ),
    (
        "podTemplate, owned",
        manifest(podTemplate={"spec": {"restartPolicy": "Always"}}),
        ["spec.podTemplate.spec.restartPolicy"],
    ),
    ("workingDir", manifest(workingDir="/no/such/folder"), ["spec.workingDir", "--workdir"]),
    (
        "secret",
        manifest(env=[{"name": "A_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        ["spec.env[0].valueFrom.secretKeyRef", "export A_KEY"],
    ),
]


def test_a_script_given_as_a_manifest_is_reported(machine: SameProcess) -> None:
    """Users of torchrun pass the script itself. Regression: colons in the script were reported as
    YAML errors.
    """
    machine.write("for i in range(3):\n    print(i)\n", "my train.py")
    refused = machine.command("run", "my train.py")
    assert refused.returncode == 2 and "submit the script with `ddpjob submit 'my train.py'`" in refused.stderr, (
        refused.stderr
    )
    assert not machine.runs.exists()


@pytest.mark.parametrize(
    ("job", "words"), [(job, words) for _, job, words in WRONG], ids=[name for name, _, _ in WRONG]
)
def test_a_manifest_that_cannot_run_here_is_refused(
    machine: SameProcess, job: dict[str, Any] | str, words: list[str]
) -> None:
    refused = machine.command("run", str(machine.write(job)))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert all(word in refused.stderr for word in words), refused.stderr
    assert "Traceback" not in refused.stderr
    assert not machine.runs.exists()


def test_a_missing_manifest_is_reported(machine: SameProcess) -> None:
    refused = machine.command("run", "no.yaml")
    assert refused.returncode == 2 and "no.yaml no such file" in refused.stderr.replace(": ", " ")


def test_a_checkpoint_folder_that_is_not_writable_is_reported(machine: SameProcess) -> None:
    (machine.runs / "job").mkdir(parents=True)
    (machine.runs / "job" / "checkpoints").write_text("in the way")
    refused = machine.command("run", str(machine.write(manifest(command=["true"]))))
    assert refused.returncode == 2 and "checkpoints" in refused.stderr and "Traceback" not in refused.stderr


def test_a_folder_of_runs_that_is_not_writable_is_reported(machine: SameProcess) -> None:
    machine.runs.write_text("in the way")
    refused = machine.command("run", str(machine.write(manifest(command=["true"]))))
    assert refused.returncode == 2 and "DDPJOB_RUNS" in refused.stderr and "Traceback" not in refused.stderr


def test_commands_for_missing_jobs_and_pods_are_refused(machine: SameProcess) -> None:
    for words in (["stop", "no"], ["kill", "no-0-0"], ["logs", "no-0-0"], ["suspend", "no"], ["get", "no"]):
        refused = machine.command(*words)
        assert refused.returncode == 2 and "no job no" in refused.stderr and "was run in" in refused.stderr, (
            refused.stderr
        )


def test_validate_reports_the_faults_of_a_manifest(machine: SameProcess) -> None:
    right, wrong = (
        machine.write(manifest("right"), "right.yaml"),
        machine.write(manifest("wrong", nodes=0), "wrong.yaml"),
    )
    checked = machine.command("validate", str(right), str(wrong))
    assert checked.returncode == 2 and "right is valid" in checked.stdout and "spec.nodes" in checked.stderr


def test_a_full_disk_is_reported_with_the_name_of_the_file(machine: SameProcess) -> None:
    """A file size limit simulates the full disk, because the error of the write contains no file
    name in either case.
    """
    file, limits = str(machine.write(manifest(command=["true"]))), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        run, submitted = machine.command("run", file), machine.command("submit", file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.returncode == submitted.returncode == 2
    assert run.stderr.startswith(f"{machine.runs}/job: File too large; set DDPJOB_RUNS")
    assert submitted.stderr == f"{machine.runs}/job/submitted.json: File too large\n"


def test_too_few_free_ports_are_reported(machine: SameProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the command ended with a traceback."""
    monkeypatch.setattr("ddpjob.local.local_platform._is_free", lambda port: False)
    answer = machine.command("run", str(machine.write(manifest(command=["true"]))))
    assert answer.returncode == 2, answer
    said = answer.stderr.splitlines()[-1]
    assert said.startswith("a job needs three consecutive free TCP ports between 20000 and 32000")


def test_if_ports_are_missing_no_checkpoints_are_moved(machine: SameProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpjob.local.local_platform._is_free", lambda port: False)
    (machine.runs / "job" / "checkpoints").mkdir(parents=True)
    (machine.runs / "job" / "checkpoints" / "model.pt").touch()
    answer = machine.command("run", str(machine.write(manifest(command=["true"]))), "--fresh")
    assert answer.returncode == 2 and "three consecutive free TCP ports" in answer.stderr
    assert (machine.runs / "job" / "checkpoints" / "model.pt").exists()


def test_an_unmounted_checkpoint_disk_is_reported(machine: SameProcess) -> None:
    """Regression: a broken link was reported as `File exists`."""
    (machine.runs / "job").mkdir(parents=True)
    (machine.runs / "job" / "checkpoints").symlink_to("/no/such/disk")
    answer = machine.command("run", str(machine.write(manifest(command=["true"]))))
    assert answer.returncode == 2 and "checkpoints: a link to /no/such/disk, which does not exist" in answer.stderr, (
        answer
    )


def test_a_script_runs_in_a_folder_with_any_name_and_any_modules(
    machine: SameProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name may be in Latin-1, which is not valid UTF-8. Modules in the folder belong to the
    script and do not affect the command.
    """
    folder = machine.folder / os.fsdecode(b'K\xfcnstler "x"')
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DDPJOB_RUNS", str(folder / "runs"))
    machine.write(manifest(nodes=1, command=["bash", "-c", "echo at work"]))
    (folder / "click.py").write_text("raise SystemExit(3)\n")
    submitted = machine.command("submit", "--wait", str(machine.folder / "job.yaml"))
    assert submitted.returncode == 0, submitted.stderr
    main(["logs", "job", "--no-prefix"])
    assert capsys.readouterr().out == "at work\n"
