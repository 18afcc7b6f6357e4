"""Full, unmounted and read-only disks are reported clearly. The last good checkpoint is kept, and
no rank hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.atomic_files import remove
from ddpjob_trainer.checkpoints import folder, torch_file
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.config.sections import CheckpointConfig
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, LedgerError, TrainingError
from ddpjob_trainer.lifecycle.fence import Claim
from ddpjob_trainer.lifecycle.stack_dumps import StackDumps
from ddpjob_trainer.reporting.ledger import Ledger
from ddpjob_trainer.reporting.reporter import open_log
from ranks import TINY, good, metrics, run

FORMATS = pytest.mark.parametrize("format", ["torch", "dcp"])


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    path = tmp_path / "volume"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=False)


def opened(path: Path, **settings: Any) -> CheckpointFolder:
    made = CheckpointFolder(CheckpointConfig(**settings), path, Group())
    made.claim(Claim(0, 0, 1))
    return made


def save(checkpoints: CheckpointFolder, step: int, size: int = 1000) -> None:
    checkpoints.save(
        lambda: {"step": step, "sampler": {"epoch": 0, "consumed": 1}, "model": {"w": torch.randn(size)}}, step
    )
    checkpoints._writer.wait()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name not in ("fence.json", "owner.json"))


@FORMATS
def test_a_full_disk_is_reported_and_leaves_no_partial_file(
    format: str, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = opened(volume, format=folder.Format(format), failures=2)
    save(checkpoints, 1)
    good = names(volume)
    assert len(good) == 1
    save(checkpoints, 2, size=1_000_000)
    assert names(volume) == good, "no partial file is left"
    assert not checkpoints.state.failed, "the next save may succeed"
    warning = capsys.readouterr().err
    assert (
        "No space left on device" in warning
        and "consecutive failures: 1, limit 2; training continues, and the next save tries again" in warning
        and "Free some space" in warning
    )
    save(checkpoints, 3)
    assert len(names(volume)) == 2 and checkpoints._writer.failure is None
    save(checkpoints, 4, size=1_000_000)
    assert not checkpoints.state.failed, "failures that are not consecutive do not count"
    save(checkpoints, 5, size=1_000_000)
    assert checkpoints.state.failed
    with pytest.raises(CheckpointError, match=r"step-000000005.* cannot be written: .*No space left on device"):
        checkpoints.finish()
    assert (found := opened(volume).newest()) is not None and found["step"] == 3


@FORMATS
def test_a_read_only_volume_is_reported(format: str, volume: Path) -> None:
    checkpoints = opened(volume, format=folder.Format(format))
    save(checkpoints, 1)
    before = names(volume)
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    save(checkpoints, 2)
    with pytest.raises(CheckpointError, match=r"Read-only file system"):
        checkpoints.finish()
    assert names(volume) == before


@FORMATS
def test_nothing_is_written_in_place_of_an_unmounted_volume(format: str, volume: Path, tmp_path: Path) -> None:
    """The folder under the mount point is on the node's own disk, where nobody would find a
    checkpoint.
    """
    checkpoints = opened(volume, format=folder.Format(format))
    save(checkpoints, 1)
    subprocess.run(["umount", volume], check=True)
    save(checkpoints, 2)
    with pytest.raises(CheckpointError, match=r"no longer contains fence.json"):
        checkpoints.finish()
    assert list(volume.iterdir()) == []


@FORMATS
def test_a_folder_that_was_removed_is_not_recreated(format: str, tmp_path: Path) -> None:
    path = tmp_path / "gone"
    checkpoints = opened(path, format=folder.Format(format))
    save(checkpoints, 1)
    shutil.rmtree(path)
    save(checkpoints, 2)
    with pytest.raises(CheckpointError, match=r"folder .*gone"):
        checkpoints.finish()
    assert not path.exists()


def failing(first: int, last: int) -> Any:
    """Simulate a full disk in each rank for the checkpoints of these steps."""

    def prepare(rank: int) -> None:
        write = torch_file.write

        def full(path: Path, snapshot: Any, metadata: Any, check: Any) -> None:
            if first <= metadata.step <= last:
                raise OSError(28, os.strerror(28))
            write(path, snapshot, metadata, check)

        folder.torch_file.write = full  # type: ignore[assignment]

    return prepare


def test_on_a_full_disk_metrics_are_dropped_and_training_continues(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = open_log(volume)
    log.write("step", step=1)
    with (volume / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(b"x" * 4096) == 4096 and os.statvfs(volume).f_bavail:
            pass
    for step in range(2, 200):
        log.write("step", step=step, filler="x" * 100)
    assert capsys.readouterr().err.count("metrics.jsonl (No space left on device), so lines are lost") == 1
    (volume / "ballast").unlink()
    log.write("step", step=200)
    lines = (volume / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 1 and json.loads(lines[-1])["step"] == 200
    broken = [line for line in lines if not line.endswith("}")]
    assert len(broken) <= 1, "an incomplete line is not joined with the next"


def test_metrics_that_cannot_be_appended_to_are_reported(tmp_path: Path) -> None:
    """The metrics may belong to a different user. Root may write to any file, so a folder takes
    their place here.
    """
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        TrainingError, match=r"metrics.jsonl cannot be opened for appending \(Is a directory\); .* train.run_dir"
    ):
        open_log(tmp_path)


ARGUMENTS = [*TINY, "checkpoint.every_steps=1", "checkpoint.every_epochs=0"]


def test_training_continues_after_a_failed_save_and_saves_later(tmp_path: Path) -> None:
    ends = run(2, [*ARGUMENTS, "checkpoint.failures=9", f"checkpoint.dir={tmp_path}"], prepare=failing(4, 7))
    assert [end.code for end in ends] == [0, 0], ends
    saved = {line["step"] for line in metrics(tmp_path / "run", "checkpoint")}
    assert saved and max(saved) == 16 and not saved & {4, 5, 6, 7}


def test_after_too_many_failed_saves_all_ranks_exit_with_the_reason(tmp_path: Path) -> None:
    ends = run(3, [*ARGUMENTS, "train.epochs=40", f"checkpoint.dir={tmp_path}"], prepare=failing(4, 999))
    assert [end.code for end in ends] == [1, 1, 1]
    assert "cannot be written: No space left on device" in ends[0].error
    assert all("CheckpointError: another rank can no longer save checkpoints" in end.error for end in ends[1:]), ends
    assert len(metrics(tmp_path / "run", "step")) < 300
    assert max(int(path.stem[5:]) for path in tmp_path.glob("*.pt")) < 4


def test_a_failed_final_save_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """One rank cannot write to its node's folder. Training was complete, but its result would be
    missing.
    """
    own = {rank: {"DDPJOB_CHECKPOINT_DIR": str(tmp_path / f"node{rank}"), "LOCAL_RANK": "0"} for rank in (0, 1)}

    def prepare(rank: int) -> None:
        if rank == 1:
            failing(16, 16)(rank)

    ends = run(2, [*TINY, "checkpoint.shared=false"], prepare=prepare, env=lambda rank: own[rank])
    assert [end.code for end in ends] == [1, 1]
    assert "another rank can no longer save" in ends[0].error and "No space left on device" in ends[1].error


def test_a_best_mark_that_cannot_be_written_does_not_count_as_a_failed_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = opened(tmp_path, keep_best=1, failures=1)
    (tmp_path / "best.json").mkdir()
    save(checkpoints, 1)
    checkpoints.scored(1, {"accuracy": 0.5})
    save(checkpoints, 2)
    checkpoints.finish()
    assert not checkpoints.state.failed and "(Is a directory); older checkpoints remain" in capsys.readouterr().err
    (tmp_path / "best.json").rmdir()
    checkpoints.finish()
    assert json.loads((tmp_path / "best.json").read_text())["best"] == "step-000000001.pt", (
        "writing the mark is retried"
    )


def test_an_evaluation_that_cannot_be_written_is_reported_and_training_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval").touch()
    good(1, [*TINY, f"checkpoint.dir={tmp_path}"])
    assert (
        capfd.readouterr().out.count("run/eval cannot be written (File exists), so this evaluation's files are missing")
        == 2
    )


def test_if_stacks_cannot_be_written_the_reason_why_training_ends_is_still_shown(tmp_path: Path) -> None:
    stacks = StackDumps(tmp_path, 0, 60)
    shutil.rmtree(tmp_path / "stacks")
    (tmp_path / "stacks").touch()
    stacks.close()


def test_a_ledger_that_cannot_be_written_is_reported(volume: Path) -> None:
    ledger = Ledger(volume, Group(), Claim(0, 0, 1))
    ledger.start(0, 10, 1)
    with pytest.raises(
        LedgerError, match=r"ledger/rank-0-.* cannot be written \(No space left on device\); free some space"
    ):
        for step in range(10**6):
            ledger.checkpoint(step)
    (volume / "ledger").rename(volume / "other")
    (volume / "ledger").touch()
    with pytest.raises(LedgerError, match=r"set train\.ledger=false"):
        Ledger(volume, Group(), Claim(0, 0, 1))


def test_a_link_in_place_of_a_checkpoint_is_deleted_but_not_its_target(tmp_path: Path) -> None:
    """A user had moved the folder of parts to a different disk. Regression: each deletion failed
    without a reason.
    """
    (tmp_path / "moved.dcp").mkdir()
    (tmp_path / "step-000000001.dcp").symlink_to("moved.dcp")
    remove(tmp_path / "step-000000001.dcp")
    assert names(tmp_path) == ["moved.dcp"]
