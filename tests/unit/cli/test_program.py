"""The `ddpjob` command as a program: its start without the extra `cli`, Ctrl-C, and its help."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from ddpjob.cli.main import root
from ddpjob.cli.root import GROUPS
from ddpjob.local.paths import JobFolder
from ddpjob.local.record import read_record, runner
from ddpjob.missing_package import INSTALL

from scripts import demo

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture(params=["ddpjob", "kubectl-ddp"])
def program(request: pytest.FixtureRequest) -> EntryPoint:
    scripts = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]
    return EntryPoint(request.param, scripts[request.param], "console_scripts")


def test_a_missing_extra_is_reported_with_the_install_command(
    program: EntryPoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "ddpjob.cli.main", raising=False)
    monkeypatch.setitem(sys.modules, "click", None)
    assert program.load()() == 2
    assert capsys.readouterr().err == f"ddpjob needs the package click; run {INSTALL.format(extra='cli')}\n"


@pytest.mark.parametrize("missing", ["jsonschema", "ddpjob.cli.gone"])
def test_a_missing_package_that_is_imported_late_is_reported_too(
    program: EntryPoint, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing module of ddpjob itself is not an installation problem."""

    def main() -> int:
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr("ddpjob.cli.main.main", main)
    if missing.startswith("ddpjob"):
        with pytest.raises(ModuleNotFoundError):
            program.load()()
    else:
        assert program.load()() == 2
        assert f"jsonschema; run {INSTALL.format(extra='cli')}" in capsys.readouterr().err


def test_ctrl_c_during_the_start_prints_no_traceback(program: EntryPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's imports take half a second, or two seconds on a busy machine."""

    class Interrupted:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "ddpjob.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ddpjob.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert program.load()() == 130


def test_a_missing_module_of_the_standard_library_is_not_called_installable(
    program: EntryPoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An example is fcntl on Windows."""

    def main() -> int:
        raise ModuleNotFoundError(name="fcntl")

    monkeypatch.setattr("ddpjob.cli.main.main", main)
    assert program.load()() == 2
    said = capsys.readouterr().err
    assert "pip" not in said and "on Windows in WSL 2" in said and "fcntl" in said


def test_ctrl_c_while_the_demo_is_evaluated_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo's ledger and plot take a few seconds."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_judge", interrupted)
    monkeypatch.setattr(demo.subprocess, "Popen", lambda words: SimpleNamespace(wait=lambda: 0, poll=lambda: 0))
    monkeypatch.setattr(sys, "argv", ["demo", str(PYPROJECT.parent / "examples" / "digits.yaml")])
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    assert demo.main() == 130


def test_a_terminated_demo_stops_its_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "scripts.demo", str(PYPROJECT.parent / "examples" / "digits.yaml")]
    environment = {**os.environ, "DDPJOB_RUNS": str(tmp_path)}
    with subprocess.Popen(words, cwd=PYPROJECT.parent, env=environment, stdout=subprocess.DEVNULL) as running:
        folder = JobFolder(tmp_path / "digits")
        while read_record(folder) is None:
            assert running.poll() is None, "the demo ended before its run had started"
            time.sleep(0.1)
        assert runner(folder) is not None
        running.terminate()
        assert running.wait(120) == 143
    assert runner(folder) is None


def test_no_help_is_wider_than_80_columns_and_no_summary_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", *root.commands):
        shown = CliRunner().invoke(root, [*filter(None, [name]), "--help"], prog_name="ddpjob").output
        wide = [line for line in shown.splitlines() if len(line) > 80]
        assert wide == [] and (name or "..." not in shown.partition("Begin:")[2]), (name, wide)


def test_the_help_begins_with_examples_and_lists_each_command_once_in_a_group() -> None:
    shown = CliRunner().invoke(root, ["--help"], prog_name="ddpjob").output
    titles = [shown.index(f"\n{title}:") for title in ("Begin", "Watch", "Change", "Check")]
    assert shown.index("ddpjob init train.py") < shown.index("Options:") < titles[0] and titles == sorted(titles)
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(root.commands)


def test_the_argument_help_shows_the_help_as_the_option_does() -> None:
    def shown(*words: str) -> str:
        return CliRunner().invoke(root, list(words), prog_name="ddpjob").output

    assert shown("help") == shown("--help") and shown("help", "run") == shown("run", "--help")
    assert "no command runn; did you mean run?" in shown("help", "runn")


@pytest.mark.parametrize(("file", "command"), [("job.yaml", "run"), ("train.py", "init")])
def test_a_file_given_instead_of_a_command_suggests_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).touch()
    said = CliRunner().invoke(root, [file]).output
    assert f"no command {file}; did you mean `ddpjob {command} {file}`?" in said


@pytest.mark.parametrize("option", ["--nodes=3", "--image=a", "-n", "--context=c"])
def test_run_refuses_options_of_submit_and_names_the_remedy(option: str) -> None:
    said = CliRunner().invoke(root, ["run", "job.yaml", option]).output
    assert f"no option {option.partition('=')[0]}; `ddpjob run` takes the job from the manifest" in said
    assert "Did you mean '--fresh'?" in CliRunner().invoke(root, ["run", "job.yaml", "--fress"]).output
