"""Checkpoints: atomic, checksummed, fenced; a start resumes from the newest whole one, whoever holds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from ddpjob_trainer import config, train
from ddpjob_trainer.checkpoint import CheckpointConfig, CheckpointFolder
from ddpjob_trainer.checkpoint_file import check, decode, encode, write_atomically
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.fence import Claim
from ddpjob_trainer.group import Group
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TINY, good, metrics, run, stop_at

CONTENT = encode({"weights": torch.arange(100.0), "step": 7}, 7)


def test_content_comes_back_and_torch_load_reads_the_file(tmp_path: Path) -> None:
    assert check(CONTENT) == 7
    assert torch.equal(decode(CONTENT)["weights"], torch.arange(100.0))
    (tmp_path / "a.pt").write_bytes(CONTENT)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["step"] == 7


@settings(max_examples=150, deadline=None)
@given(length=st.integers(0, len(CONTENT) - 1))
def test_every_truncation_is_found(length: int) -> None:
    with pytest.raises(CheckpointError):
        check(CONTENT[:length])


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, len(CONTENT) - 1), flip=st.integers(1, 255))
def test_every_changed_byte_is_found(place: int, flip: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[place] ^= flip
    try:
        step = check(bytes(damaged))
    except CheckpointError:
        return
    assert step != 7, "only the step in the comment is outside of the checksum; the file's name holds it again"


def folder(path: Path, *, life: int = 1, keep: int = 3) -> CheckpointFolder:
    made = CheckpointFolder(CheckpointConfig(keep=keep), path, Group())
    made.claim(Claim(0, 0, life))
    return made


def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "x.pt"
    write_atomically(target, b"old")

    def crash() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, b"new", crash)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_the_last_three_are_kept(tmp_path: Path) -> None:
    checkpoints = folder(tmp_path)
    for step in range(1, 6):
        checkpoints.save({"step": step}, step)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"step-00000000{step}.pt" for step in (3, 4, 5)]


def test_broken_ones_are_named_and_the_next_older_one_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = folder(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save({"step": step}, step)
    newest, middle = tmp_path / "step-000000003.pt", tmp_path / "step-000000002.pt"
    newest.write_bytes(newest.read_bytes()[:-300])
    middle.write_bytes(b"")
    assert checkpoints.newest() == {"step": 1}
    warnings = capsys.readouterr().err
    assert f"{newest} is truncated" in warnings and f"{middle} is truncated (0 bytes" in warnings


def test_all_broken_is_an_error_and_nothing_is_overwritten(tmp_path: Path) -> None:
    good(1, [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    before = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole .* nothing was overwritten"):
        train.run(config.load(None, [*TINY, f"checkpoint.dir={tmp_path}"]))
    assert {path: path.read_bytes() for path in tmp_path.glob("*.pt")} == before


def test_a_zombie_of_an_older_life_writes_nothing(tmp_path: Path) -> None:
    zombie = folder(tmp_path, life=1)
    zombie.save({"step": 1}, 1)
    fresh = CheckpointFolder(CheckpointConfig(), tmp_path, Group())
    fresh.claim(Claim(1, 4, 2))
    message = r"was claimed on .*generation 1, round 4.*belongs to generation 0, round 0 and writes nothing more"
    with pytest.raises(CheckpointError, match=message):
        zombie.save({"step": 2}, 2)
    with pytest.raises(CheckpointError, match="was claimed on"):
        folder(tmp_path, life=3)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-000000001.pt"]
    assert json.loads((tmp_path / "fence.json").read_text())["life"] == 2


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"folder .*file/checkpoints cannot be written \(Not a directory\).*checkpoint.dir"):
        train.run(config.load(None, [*TINY, f"checkpoint.dir={tmp_path / 'file' / 'checkpoints'}"]))
    with pytest.raises(CheckpointError, match=r"folder /proc/nowhere cannot be written"):
        train.run(config.load(None, [*TINY, "checkpoint.dir=/proc/nowhere"]))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"]
    good(1, arguments)
    with pytest.raises(CheckpointError, match=r"it holds model.name=small_cnn"):
        train.run(config.load(None, [*arguments, "model.width=8"]))
    with pytest.raises(CheckpointError, match=r"checkpoint.resume=false, and .* holds a checkpoint of step 8"):
        train.run(config.load(None, [*arguments, "checkpoint.resume=false"]))


@pytest.mark.parametrize("lost", [0, 1])
def test_with_a_folder_per_node_any_node_may_be_lost(lost: int, tmp_path: Path) -> None:
    """Two nodes of one rank; after a stop, one node's folder is gone."""
    arguments = [*TINY, "checkpoint.shared=false"]

    def node(rank: int) -> dict[str, str]:
        return {"DDPJOB_CHECKPOINT_DIR": str(tmp_path / f"node{rank}"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    assert [end.code for end in run(2, arguments, prepare=stop_at(3), env=node)] == [75, 75]
    assert (tmp_path / "node0" / "step-000000003.pt").exists() and (tmp_path / "node1" / "step-000000003.pt").exists()
    shutil.rmtree(tmp_path / f"node{lost}")
    good(2, arguments, env=node)
    assert metrics(tmp_path / f"node{lost}" / "run", "start")[0]["step"] == 3
    models = [torch.load(tmp_path / f"node{rank}" / "step-000000016.pt", weights_only=True)["model"] for rank in (0, 1)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
