"""`ddpjob submit` and `ddpjob convert`: their output can be read back, and no input is ignored."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api.yamltext import read_documents
from ddpjob.cli.main import main
from ddpjob.cli.places import Place
from ddpjob.client.backends.process_backend import ProcessBackend

JOB = "apiVersion: ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: t}\nspec:\n  image: a\n  script: b.py\n"
OTHER_KIND = "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\n"
ODD = ["1e-4", "5e3", "y", "n", "Y", "0o17", "08", "+.5", "1:30", "2026-01-01", "1E5", "off", "0b1", "1_0", "~", "=",
       "<<", "0x1f", "-", "", " a", "a: b", "#"]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDPJOB_RUNS", raising=False)
    return tmp_path


def read(text: str) -> list[Any]:
    return [document.value for document in read_documents(text)]


def test_arguments_that_look_like_numbers_stay_strings(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--cluster", "--image", "x", "--name", "j", "--dry-run", "-e", "A=1e-4", "m", "--", *ODD]
    assert main(words) == 0
    written = capsys.readouterr().out
    [job] = read(written)
    assert yaml.safe_load(written)["spec"]["args"] == ODD, "it is a string for every YAML reader"
    assert job["spec"]["args"] == ODD and job["spec"]["env"] == [{"name": "A", "value": "1e-4"}]
    assert main(["convert", "--image", "x", "--", "torchrun", "a.py", "--lr", "1e-4", "y"]) == 0
    assert read(capsys.readouterr().out)[0]["spec"]["args"] == ["--lr", "1e-4", "y"]


@pytest.mark.parametrize("text", ["print(1)\n", "import a\n\nif a:\n    a()\n", "a\nb"])
def test_a_script_in_a_manifest_is_written_as_readable_lines(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(text)
    assert main(["submit", "--cluster", "--image", "x", "--name", "t", "--dry-run", "train.py"]) == 0
    written = capsys.readouterr().out
    assert all(f"    {line}\n" in written for line in text.splitlines() if line) and "train.py: |" in written
    assert read(written)[0]["data"]["train.py"] == yaml.safe_load(written.split("---")[0])["data"]["train.py"] == text


def test_the_value_of_a_set_option_is_parsed_like_a_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--cluster", "--image", "x", "--name", "j", "--dry-run", "m"]
    assert main([*words, "--set", "env=[{name: DAY, value: 2026-01-01}]"]) == 0
    assert read(capsys.readouterr().out)[0]["spec"]["env"] == [{"name": "DAY", "value": "2026-01-01"}]
    assert main([*words, "--set", "nodes={"]) == 2
    assert "--set nodes={: not YAML" in capsys.readouterr().err
    for setting in ("nodes=" + "9" * 100_000, "nodes=0x" + "f" * 50_000, "nodes=1e400", "x" * 100_000):
        assert main([*words, "--set", setting]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"--set {setting[:100]}") and len(printed) < 800 and printed.count("\n") == 1
    assert main([*words, "--set", "nodez=3"]) == 2
    assert "spec.nodez: unknown field" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], True),
        (["ddpjob_trainer"], True),
        (["ddpjob_trainer", "--nodes", "2"], False),
        (["train.py", "--set", "storage.checkpoints.claimName=c"], False),
        (["train.py", "--set", "className=team"], False),
        (["train.py", "--set", "podTemplate={spec: {volumes: [{name: v, nfs: {server: s, path: /}}]}}"], False),
        (["train.py", "--set", "podTemplate={spec: {volumes: [{name: v, ephemeral: {}}]}}"], True),
    ],
)
def test_a_warning_is_printed_if_saved_files_are_lost_with_their_pod(
    words: list[str], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("")
    assert main(["submit", "--cluster", "--image", "x", "--name", "j", "--dry-run", *words]) == 0
    assert ("storage.checkpoints is not set" in capsys.readouterr().err) is said
    assert main(["submit", "--local", "--image", "x", "--name", "j", "--dry-run", *words[:1]]) == 0
    assert not capsys.readouterr().err, "on this machine a job's folder stays"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('["/bin/sh", -c, torchrun train.py]', True),
        ('[sh, -ec, "pip install x && torchrun train.py"]', True),
        ('[sh, -c, "pip install x && exec torchrun train.py"]', False),
        ('[sh, -c, "trap stop TERM; torchrun train.py & wait"]', False),
        ("[bash, -c, torchrun train.py]", False),
        ("[sh, train.sh]", False),
        ("[torchrun, train.py]", False),
    ],
)
def test_a_warning_is_printed_if_a_shell_keeps_sigterm_from_the_training(
    command: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """dash, the sh of Debian and Ubuntu, runs even the last program as a child process. bash does
    not.
    """
    Path("job.yaml").write_text(JOB.replace("script: b.py", f"command: {command}"))
    assert main(["submit", "--cluster", "--dry-run", "job.yaml"]) == 0
    assert ("does not pass SIGTERM on" in capsys.readouterr().err) is said
    assert main(["validate", "job.yaml"]) == 0
    assert capsys.readouterr().err.startswith("job.yaml: note: spec.command: sh does not") is said
    assert main(["validate", "--quiet", "job.yaml"]) == 0
    assert main(["submit", "--local", "--dry-run", "job.yaml"]) == 0, "here, the whole process group gets SIGTERM"
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--nproc-per-node=2", "--procs"),
        ("--nnodes=2", "--nodes"),
        ("--max_restarts=3", "--set recovery.maxRestarts=N"),
    ],
)
def test_an_option_of_torchrun_is_not_suggested_as_an_option_of_the_script(
    option: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("")
    assert main(["submit", "--cluster", "--image", "x", "--dry-run", option, "train.py"]) == 2
    assert capsys.readouterr().err.endswith(f"no option {option.partition('=')[0]}; did you mean {meant}?\n")
    words = meant.replace("=N", "=3").split() + ([] if "=" in meant else ["2"])
    assert main(["submit", "--cluster", "--image", "x", "--dry-run", *words, "train.py"]) == 0, (
        "the suggested line is accepted"
    )


def test_the_warning_about_lost_files_names_a_valid_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB)
    assert main(["submit", "--cluster", "--dry-run", "job.yaml"]) == 0
    assert capsys.readouterr().err.endswith("set claimTemplate, claimName or url there\n"), "--set is only for scripts"
    assert main(["submit", "--cluster", "--image", "x", "--dry-run", "m"]) == 0
    assert capsys.readouterr().err.endswith("set claimTemplate, claimName or url there (--set)\n")


@pytest.mark.parametrize("option", [("--nodes", "1"), ("--name", "u"), ("--env", "A=b"), ("--set", "nodes=2")])
def test_a_manifest_is_not_changed_by_options(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB)
    assert main(["submit", "--cluster", "--dry-run", "job.yaml", *option]) == 2
    assert f"{option[0]}: allowed only with a script" in capsys.readouterr().err
    assert main(["-n", "ml", "submit", "--cluster", "--dry-run", "-o", "name", "job.yaml"]) == 0


def test_submit_reports_objects_of_other_kinds_that_it_skips(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB + OTHER_KIND)
    assert main(["submit", "--cluster", "--dry-run", "job.yaml"]) == 0
    out, err = capsys.readouterr()
    assert (
        "ConfigMap" not in out
        and "not ConfigMap settings; to create everything, run `kubectl apply -f job.yaml`" in err
    )


def test_a_generated_name_works_on_this_machine() -> None:
    """The runner refuses this job immediately because of its working directory, but its name exists
    before that.
    """
    job = yaml.safe_load(JOB) | {"metadata": {"generateName": "gen-"}}
    job["spec"] |= {"workingDir": "/no/such/folder"}
    with pytest.raises(Exception, match=r"spec\.workingDir"):
        ProcessBackend().create([job])
    [made] = Path("runs").iterdir()
    assert made.name.startswith("gen-") and len(made.name) == 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["submit", "train.py", "--lr", "1"], "`ddpjob submit train.py -- --lr ...`"),
        (["submit", "train.py", "--node", "3"], "did you mean --code or --mode or --nodes?"),
        (["convert", "torchrun", "--nnodes=2", "a.py"], "`ddpjob convert -- torchrun --nnodes ...`"),
        (["submit", "-f", "job.yaml"], "no option -f; write `ddpjob submit job.yaml`"),
        (["run", "--filename", "job.yaml"], "no option --filename; write `ddpjob run job.yaml`"),
        (["delete", "-f", "job.yaml"], "no option -f; write `ddpjob delete JOB`"),
    ],
)
def test_a_misplaced_option_of_ddpjob_is_shown_in_its_right_place(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torchrun", "train.py"], "spec.module: torchrun is a launcher"),
        (["--", "python3", "train.py"], "spec.module: python3 is a launcher"),
        (["run.sh"], "run.sh is a shell script, and torchrun starts only Python scripts"),
    ],
)
def test_a_launcher_is_refused_as_the_program(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the launcher was submitted and failed in the pods. torchrun found no module
    torchrun, and Python could not parse a shell script.
    """
    (folder / "run.sh").write_text("#!/bin/bash\ntorchrun train.py\n")
    assert main(["submit", "--cluster", "--dry-run", "--image", "i", *words]) == 2
    assert said in capsys.readouterr().err


COMING_FROM = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text()
TORCHRUN = re.findall(r"`(torchrun [^`]* -m ddpjob_trainer [^`]*)`", COMING_FROM)
LINES = [
    *re.findall(r"`(ddpjob (?:submit|convert) --image IMAGE [^`]*train\.py[^`]*)`", COMING_FROM),
    *(f"ddpjob convert --image IMAGE -- {line}" for line in TORCHRUN),
]


@pytest.mark.parametrize("line", LINES)
def test_the_command_lines_on_the_migration_page_become_valid_jobs(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").touch()
    _, command, *words = shlex.split(line.replace("IMAGE", "image"))
    dry = ["--dry-run", "--cluster"] if command == "submit" else []
    assert main([command, *dry, *words]) == 0
    assert read(capsys.readouterr().out)[-1]["kind"] == "DDPJob"


def test_options_that_convert_leaves_out_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may have the name of a command."""
    train = (
        "apiVersion: v1\nkind: TrainJob\nmetadata: {name: t}\nspec: {trainer: {image: i, command: [torchrun, a.py]}}"
    )
    mpi = "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: m}\n"
    (folder / "torchrun.yaml").write_text(f"{train}\n---\n{mpi}{OTHER_KIND}")
    assert main(["convert", "torchrun.yaml"]) == 0
    out, err = capsys.readouterr()
    assert read(out)[0]["spec"]["script"] == "a.py"
    assert "torchrun.yaml: skipped MPIJob, ConfigMap, because only PyTorchJob, TrainJob can be" in err
    (folder / "mpi.yaml").write_text(mpi)
    assert main(["convert", "mpi.yaml"]) == 2
    assert "no PyTorchJob or TrainJob found, only MPIJob; for other kinds, convert" in capsys.readouterr().err
    assert main(["convert", "torchrun.yaml", "torchrun.yaml"]) == 0, "two files must not be mistaken for a command line"
    assert len(read(capsys.readouterr().out)) == 2
    (folder / "broken.yaml").write_text("kind: TrainJob\nspec: {trainer: [}\n")
    assert main(["convert", "broken.yaml"]) == 2
    assert "broken.yaml, line 2: not YAML" in capsys.readouterr().err
    assert main(["convert", "https://example.com/a.yaml"]) == 2
    assert "URLs are not fetched; write `curl -fsSL https://example.com/a.yaml | ddpjob conv" in capsys.readouterr().err
    (folder / "job.sbatch").write_text(
        '#!/bin/bash\n#SBATCH -N 4\nif :; then\n  echo "a: b: c"\nfi\nsrun torchrun a.py\n'
    )
    assert main(["convert", "job.sbatch"]) == 2
    assert "job.sbatch: no PyTorchJob or TrainJob found; for other kinds, conv" in capsys.readouterr().err
    assert main(["convert", "--name", "i", "torchrun.yaml"]) == 2, "the option must have an effect"
    assert "--name: allowed only with a command line" in capsys.readouterr().err
    assert main(["convert", "--image", "other:1", "torchrun.yaml"]) == 0
    assert "image: other:1\n" in capsys.readouterr().out
    assert main(["convert", "--script", "b.py", "torchrun.yaml"]) == 2
    assert "--script b.py: the manifest already starts" in capsys.readouterr().err


def test_notes_on_a_job_with_a_generated_name_begin_with_its_prefix(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "apiVersion: v1\nkind: TrainJob\nmetadata: {generateName: t-}\nspec: {trainer: {image: i, args: [a.py]}}\n"
    (folder / "t.yaml").write_text(job)
    assert main(["convert", "t.yaml"]) == 0
    out, err = capsys.readouterr()
    assert read(out)[0]["metadata"] == {"generateName": "t-"} and "# t-: script: taken from args[0] (a.py)" in err


def test_convert_without_an_image_reports_only_the_missing_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--", "torchrun", "--nnodes=2", "train.py"]) == 1
    [note] = capsys.readouterr().err.splitlines()
    missing = "a command line does not name an image; specify one that contains Python, PyTorch and the script"
    assert note == f"# converted: spec.image: {missing}"


TWO = f"{JOB}---\n{JOB.replace('name: t', 'name: u')}"


def test_the_output_for_several_jobs_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: two jobs shared one document, and a line --- stood between JSON objects."""
    Path("two.yaml").write_text(TWO)
    Path("train.py").write_text("")
    script = ["--image", "x", "--name", "t", "train.py"]
    for words, names in ((["two.yaml"], ["t", "u"]), (script, ["t-code", "t"])):
        assert main(["submit", "--cluster", "--dry-run", *words]) == 0
        made = read(capsys.readouterr().out)
        assert [body["metadata"]["name"][:6] for body in made] == names
        assert main(["submit", "--cluster", "--dry-run", "-o", "json", *words]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "apiVersion": "v1",
            "kind": "List",
            "metadata": {},
            "items": made,
        }
    assert main(["submit", "--local", "--dry-run", "-o", "json", *script]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "DDPJob", "a single object is not a list"


def test_all_jobs_of_a_manifest_are_created_before_the_command_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the second job was created after the first had ended, and not at all if the first
    failed.
    """
    Path("two.yaml").write_text(TWO)
    done = list[str]()

    class Jobs:
        where = "here"

        def create(self, bodies: list[Any]) -> str:
            done.append(f"create {bodies[-1]['metadata']['name']}")
            return str(bodies[-1]["metadata"]["name"])

        def changes(self, name: str, seconds: float | None = None) -> Iterator[tuple[Any, bool]]:
            done.append(f"wait {name}")
            body = {
                "metadata": {"name": name},
                "spec": {},
                "status": {"phase": "Failed" if name == "t" else "Complete"},
            }
            yield body, False

    monkeypatch.setattr(Place, "backend", lambda place: Jobs())
    assert main(["submit", "--cluster", "--wait", "two.yaml"]) == 1
    assert done == ["create t", "create u", "wait t", "wait u"]
    assert "u is Complete" in capsys.readouterr().out


def test_a_long_quoted_command_line_is_not_taken_for_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    line = "torchrun --nnodes=2 train.py " + "--name " * 50
    assert main(["convert", "--image", "x", line]) == 0
    assert read(capsys.readouterr().out)[0]["spec"]["args"] == ["--name"] * 50


def test_no_image_option_is_needed_if_the_class_sets_the_image(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("")
    for field in ("className", "spec.className"):
        assert main(["submit", "--cluster", "--dry-run", "--name", "j", "--set", f"{field}=gpu", "train.py"]) == 0
        spec = read(capsys.readouterr().out)[-1]["spec"]
        assert spec["className"] == "gpu" and "image" not in spec
    assert main(["submit", "--cluster", "--dry-run", "train.py"]) == 2
    assert "image (--image): missing" in capsys.readouterr().err


def test_options_for_a_missing_manifest_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--local", "--nodes", "2", "nofile.yaml"]) == 2
    assert capsys.readouterr().err == "nofile.yaml: No such file or directory\n"
