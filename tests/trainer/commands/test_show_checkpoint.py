"""`python -m ddpjob_trainer checkpoint`: the output for a file and for a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.checkpoints import dcp, torch_file
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.commands import show_checkpoint
from ddpjob_trainer.commands.show_checkpoint import main
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError
from ranks import TINY, good, stop_at
from ranks import run as ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for two and a half epochs, with checkpoints in parts."""
    folder = tmp_path_factory.mktemp("trained")
    good(2, [*TINY, "checkpoint.keep_best=1", f"checkpoint.dir={folder}"])
    arguments = [*TINY, "train.epochs=3", "checkpoint.keep_best=1", "checkpoint.format=dcp", f"checkpoint.dir={folder}"]
    assert [end.code for end in ranks(1, arguments, prepare=stop_at(20))] == [75]
    return folder


def table(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split("  ") for line in capsys.readouterr().out.splitlines()]


def test_the_checkpoints_in_a_folder_are_shown_as_a_table(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained)]) == 0
    head, *rows = [[cell.strip() for cell in line if cell.strip()] for line in table(capsys)]
    assert head == ["checkpoint", "step", "epoch", "ranks", "saved", "size", "state"]
    assert [row[:4] for row in rows] == [
        ["step-000000008.pt", "8", "1", "2"],
        ["step-000000016.pt", "16", "2", "2"],
        ["step-000000020.dcp", "20", "2 + 56%", "1"],
    ]
    assert sorted(row[6] for row in rows) == ["intact", "intact", "intact, the best"] and rows[0][5].endswith("kB")


@pytest.mark.parametrize("name", ["best.pt", "step-000000016.pt", "step-000000020.dcp"])
def test_a_single_checkpoint_is_shown(name: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained / name)]) == 0
    text = capsys.readouterr().out
    assert "model.width=4" in text and "4 x 1 x 3 x 3  float32" in text and "momentum_buffer" in text


def test_a_broken_checkpoint_is_reported_with_an_exit_code(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (trained / "step-000000016.pt").read_bytes()
    (tmp_path / "step-000000008.pt").write_bytes(whole[:-5])
    (tmp_path / "step-000000016.pt").write_bytes(whole)
    (tmp_path / "step-000000024.dcp").mkdir()
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        "BROKEN: truncated" in lines[1]
        and lines[2].endswith("intact")
        and "BROKEN: incomplete (the manifest is missing)" in lines[3]
    )


def test_a_checkpoint_deleted_during_the_listing_is_left_out(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: for a running job's folder, an error was shown instead of the table."""
    for name in ("step-000000008.pt", "step-000000016.pt"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    row = show_checkpoint._row

    def delete(path: Path, *, best: bool) -> Any:
        (tmp_path / "step-000000008.pt").unlink(missing_ok=True)
        return row(path, best=best)

    monkeypatch.setattr(show_checkpoint, "_row", delete)
    assert main([str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["checkpoint", "step-000000016.pt"]
    (tmp_path / "step-000000024.pt").symlink_to(tmp_path / "moved.pt")
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("intact") and "BROKEN: not readable" in lines[2] and "No such file" in lines[2]


def test_every_checkpoint_has_a_row_even_if_another_one_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the list ended at an unreadable checkpoint, without naming it."""
    state = {"step": 1, "sampler": {"epoch": 0, "consumed": 1, "size": 4}, "a": torch.ones(3)}
    for step in (1, 3):
        dcp.write(tmp_path / f"step-{step:09d}.dcp", 1, state, Metadata(step), None, lambda: None)
    torch_file.write(tmp_path / "step-000000002.pt", {"config": torch.nn.Linear(1, 1)}, Metadata(2))
    torch_file.write(tmp_path / "step-000000004.pt", {"no sampler": "\x1b[2J"}, Metadata(4))
    (tmp_path / "step-000000005.dcp").mkdir()
    (tmp_path / "step-000000006.pt").mkdir()
    write, name = (tmp_path / "step-000000001.dcp" / dcp.MANIFEST), "step-000000007.dcp"
    dcp.write(tmp_path / name, 1, state | {"sampler": {"epoch": "\x1b[2J"}}, Metadata(7), None, lambda: None)
    monkeypatch.setattr(dcp, "read", lambda *_: pytest.fail("the tensors of a checkpoint are not needed for a list"))
    write.write_bytes(b"{")
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0][5:14].lstrip("0") for line in lines] == list("1234567"), "one row per checkpoint, in order"
    said = ["its manifest is damaged", "UnpicklingError", "intact", "KeyError", "incomplete", "BROKEN", "BROKEN"]
    assert all(text in line for text, line in zip(said, lines, strict=True)), lines
    assert "0 + 25%" in lines[2] and "\x1b" not in "".join(lines)


def test_a_checkpoint_of_a_custom_loop_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file contains what the loop saved, without the trainer's settings."""
    with CheckpointFolder.open(Group(), dir=tmp_path) as folder:
        sampler = {"epoch": 0, "consumed": 4, "size": 8, "seed": 0}
        folder.save(lambda: {"step": 1, "sampler": sampler, "model": {"weight": torch.zeros(2, 3)}}, 1)
        folder.finish()
    assert main([str(tmp_path / "step-000000001.pt")]) == 0
    text = capsys.readouterr().out
    assert "0 + 50%" in text and "model.weight" in text and "\nconfiguration\n" not in text


def test_the_command_checkpoint_works_in_a_separate_process(trained: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddpjob_trainer", "checkpoint", str(trained)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "step-000000016.pt" in done.stdout, done


def test_a_folder_without_checkpoints_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"contains no checkpoint; specify a checkpoint"):
        main([str(tmp_path)])
    with pytest.raises(CheckpointError, match=r"none.pt cannot be read: No such file"):
        main([str(tmp_path / "none.pt")])
    with pytest.raises(ConfigError, match="usage"):
        main([])
