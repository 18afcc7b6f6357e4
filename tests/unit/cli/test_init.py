"""`ddpjob init` creates the first files and overwrites nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob.cli.main import main
from ddpjob.client.manifests.manifest_sources import read_job


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_manifest_is_valid_and_has_the_requested_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "net/main.py", "--name=1on", "--image=on", "--nodes=3", "--gpus=8"]) == 2
    assert "metadata.name" in capsys.readouterr().err and list(folder.iterdir()) == []
    assert main(["init", "net/main.py", "--name=one", "--image=on", "--nodes=3", "--gpus=8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("written: job.yaml and net/main.py\n")
    assert "--image on --nodes 3 --gpus 8 net/main.py" in said
    job = read_job("job.yaml")
    spec = job["spec"]
    assert (job["metadata"]["name"], spec["image"], spec["script"]) == ("one", "on", "net/main.py")
    assert (spec["nodes"], spec["gpusPerNode"], spec["recovery"]["mode"]) == (3, 8, "Fast")
    compile((folder / "net/main.py").read_text(), "main.py", "exec")


def test_a_job_has_its_scripts_name_unless_another_is_given(folder: Path) -> None:
    """Two scripts' jobs with one name would continue each other's checkpoints."""
    names = {(): "first", ("My_Net.py",): "my-net", ("3.py",): "job", ("net.py", "--name=one"): "one"}
    for arguments, name in names.items():
        assert main(["init", *arguments]) == 0
        assert read_job("job.yaml")["metadata"]["name"] == name
        (folder / "job.yaml").unlink()
    assert main(["init", "net.py", "--name="]) == 2, "an unset variable of the shell is not a default"


def test_a_name_with_a_space_and_an_umlaut_is_quoted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed line can be pasted into a shell, and the manifest shows the name unchanged."""
    assert main(["init", "träin me.py"]) == 0
    assert capsys.readouterr().out.endswith("--gpus 0 'träin me.py'\n")
    assert 'script: "träin me.py"' in (folder / "job.yaml").read_text()
    assert read_job("job.yaml")["spec"]["script"] == "träin me.py"
    (folder / "job.yaml").unlink()
    assert main(["init", "a\x7f.py"]) == 0
    assert read_job("job.yaml")["spec"]["script"] == "a\x7f.py"


def test_the_manifests_comments_are_valid_fields(folder: Path) -> None:
    assert main(["init"]) == 0
    manifest = folder / "job.yaml"
    lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join(line.replace("# ", "", 1) if line.startswith("  # ") else line for line in lines))
    spec = read_job("job.yaml")["spec"]
    assert spec["spares"] == 1 and spec["elastic"]["minNodes"] == 1 and spec["storage"]["checkpoints"]["claimName"]


def test_existing_files_are_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text("print(1)\n")
    assert main(["init", "mine.py"]) == 0
    assert capsys.readouterr().out.startswith("written: job.yaml\n")
    before = (folder / "job.yaml").read_text()
    assert main(["init", "mine.py", "--nodes=4"]) == 2
    assert "job.yaml already exists" in (said := capsys.readouterr().err) and "`ddpjob init mine.py --check`" in said
    assert (folder / "job.yaml").read_text() == before and (folder / "mine.py").read_text() == "print(1)\n"


def test_a_misspelt_script_name_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the job would run the example script instead of the user's."""
    (folder / "mnist.py").write_text("print(1)\n")
    assert main(["init", "mnst.py"]) == 0
    assert "mnst.py did not exist. If you meant mnist.py, set spec.script to it" in capsys.readouterr().out
    (folder / "job.yaml").unlink()
    assert main(["init", "train.py"]) == 0
    assert "did not exist" not in capsys.readouterr().out


@pytest.mark.parametrize("script", ["train.sh", "/tmp/train.py", "../train.py"])
def test_a_script_outside_of_the_folder_is_refused(
    script: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", script]) == 2
    assert script in capsys.readouterr().err and list(folder.iterdir()) == []


def test_init_reports_a_folder_that_is_not_writable(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").mkdir()
    assert main(["init"]) == 2
    assert "job.yaml" in capsys.readouterr().err


def test_a_full_disk_leaves_no_partial_file(folder: Path) -> None:
    command = f"ulimit -f 0; trap '' XFSZ; exec {sys.executable} -m ddpjob.cli init"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 2 and done.stderr == "job.yaml: File too large\n", done.stderr
    assert list(folder.iterdir()) == []
    assert main(["init"]) == 0


def test_the_script_reports_if_there_is_nothing_left_to_train(folder: Path) -> None:
    assert main(["init"]) == 0
    text = (folder / "train.py").read_text()
    assert text.index("if first >= args.epochs and rank == 0:") < text.index("for epoch in range(first")


def test_a_notebook_is_not_checked_as_a_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.ipynb").write_text('{"cells": [], "metadata": {}}')
    assert main(["init", "train.ipynb", "--check"]) == 2
    assert "train.ipynb: the script's name must end in .py" in capsys.readouterr().err


def test_a_script_for_one_gpu_is_read_and_not_executed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text("import torch\nraise SystemExit(7)\nfor x in y:\n    x.backward()\n")
    assert main(["init", "mine.py", "--check"]) == 1
    said = capsys.readouterr().out
    assert "written for one process" in said and "init_process_group" in said and list(folder.iterdir()) != [said]
    assert not (folder / "job.yaml").exists()
    assert main(["init", "mine.py"]) == 0
    assert capsys.readouterr().out.endswith("\n\n" + said)
    (folder / "mine.py").write_text("torch.distributed.init_process_group()\n")
    assert main(["init", "mine.py", "--check"]) == 0
    (folder / "mine.py").write_text("print 1\n")
    assert main(["init", "mine.py", "--check"]) == 1
    assert capsys.readouterr().out.count("mine.py, line 1:") == 1
    assert main(["init", "none.py", "--check"]) == 2
    assert "none.py" in capsys.readouterr().err
