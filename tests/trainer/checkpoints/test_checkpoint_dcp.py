"""The dcp format: each rank writes its part. It gives the same guarantees as a single file, and any
strategy can resume from it on any number of ranks.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.checkpoints import dcp, manifest, torch_file
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.config.sections import CheckpointConfig, Format
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError
from ddpjob_trainer.lifecycle.fence import Claim
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import TINY, final_losses, finish, good, metrics, run, start, stop_at, until

PARTS = [*TINY, "checkpoint.format=dcp"]

SNAPSHOT = {
    "step": 7,
    "sampler": {"epoch": 0, "consumed": 1},
    "model": {
        "a.b": torch.arange(6.0).reshape(2, 3),
        "a": {"b": torch.ones(2, dtype=torch.int64)},
        "half": torch.ones(3, dtype=torch.bfloat16),
    },
    "optimizer": {"groups": [{"betas": (0.9, 0.99), "lr": 0.1, "name": None}], "state": {}, 5: torch.tensor(3)},
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict) and left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def written(path: Path, step: int = 7) -> Path:
    dcp.write(path, 1, SNAPSHOT, Metadata(step, 2, 4), None, lambda: None)
    return path


def test_content_read_from_a_checkpoint_keeps_its_types(tmp_path: Path) -> None:
    path = written(tmp_path / "step-000000007.dcp")
    metadata = dcp.check(path)
    assert (metadata.step, metadata.epoch, metadata.world) == (7, 2, 4) and dcp.read_metadata(path) == metadata
    assert same(dcp.read(path), SNAPSHOT)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_torch_distributed_checkpoint_can_read_the_folder(tmp_path: Path) -> None:
    """It finds the tensors where it expects them."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(written(tmp_path / "a.dcp"), tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert any(torch.equal(value, SNAPSHOT["model"]["a.b"]) for value in found.values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint to be damaged and repaired."""
    return written(tmp_path_factory.mktemp("whole") / "step-000000007.dcp")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_kind_of_damage_to_any_file_is_detected(whole: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(whole.iterdir())))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "remove"]))
    try:
        if how == "remove":
            path.unlink()
        else:
            flipped = bytes([content[place] ^ data.draw(st.integers(1, 255))])
            path.write_bytes(content[:place] + (flipped + content[place + 1 :] if how == "flip" else b""))
        try:
            metadata = dcp.check(whole)
        except CheckpointError:
            return
        assert path.name == "manifest.json" and how == "flip" and metadata == Metadata(7, 2, 4, metadata.time), (
            "only white space in the file may change undetected"
        )
        assert content[place : place + 1] in b" \n"
    finally:
        path.write_bytes(content)
        dcp.check(whole)


def test_a_crash_before_the_rename_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(CheckpointConfig(format=Format.DCP), tmp_path, Group())
    checkpoints.claim(Claim(0, 0, 1))
    checkpoints.save(lambda: SNAPSHOT, 7)
    checkpoints.finish()
    temporary = tmp_path / ".step-000000009.dcp.1.tmp"
    (tmp_path / "step-000000007.dcp").rename(temporary)
    assert CheckpointFolder(CheckpointConfig(), tmp_path, Group()).newest() is None
    again = CheckpointFolder(CheckpointConfig(format=Format.DCP), tmp_path, Group())
    again.claim(Claim(0, 0, 2))
    assert not temporary.exists(), "the next incarnation cleans up"


def test_a_broken_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-000000007.dcp").mkdir()
    checkpoints = CheckpointFolder(CheckpointConfig(format=Format.DCP), tmp_path, Group())
    checkpoints.claim(Claim(0, 0, 1))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        checkpoints.newest()
    checkpoints.save(lambda: SNAPSHOT, 7)
    checkpoints.finish()
    assert same(checkpoints.newest(), SNAPSHOT)
    assert {entry.name for entry in tmp_path.iterdir()} == {"fence.json", "owner.json", "step-000000007.dcp"}


def test_a_checkpoint_folder_per_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.format=dcp needs .* checkpoint.url \(a bucket"):
        CheckpointFolder(CheckpointConfig(format=Format.DCP, shared=False), tmp_path, Group())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process without interruption."""
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*TINY, f"checkpoint.dir={folder}"])
    return final_losses(folder / "run")


@pytest.mark.parametrize("formats", [("dcp", "dcp", "dcp"), ("torch", "dcp", "torch")])
def test_fsdp_then_ddp_then_a_single_process_continue_the_same_run(
    formats: tuple[str, str, str], alone: list[float], tmp_path: Path
) -> None:
    """The strategy, the number of ranks and the format differ in each run, but the curve is the
    same.
    """
    incarnations = [(2, "fsdp", 5), (3, "ddp", 10), (1, "single", None)]
    for (world, strategy, stop), format in zip(incarnations, formats, strict=True):
        arguments = [*TINY, f"checkpoint.dir={tmp_path}", f"strategy={strategy}", f"checkpoint.format={format}"]
        ends = run(world, arguments, prepare=stop_at(stop) if stop else None)
        assert [end.code for end in ends] == [75 if stop else 0] * world, ends
    assert [line["step"] for line in metrics(tmp_path / "run", "start")] == [0, 5, 10]
    assert final_losses(tmp_path / "run") == pytest.approx(alone, rel=1e-4, abs=1e-4)


def test_each_rank_of_fsdp_writes_its_part(tmp_path: Path) -> None:
    good(2, [*PARTS, "train.epochs=1", "strategy=fsdp", f"checkpoint.dir={tmp_path}"])
    path = tmp_path / "step-000000008.dcp"
    sizes = [sum(entry.stat().st_size for entry in path.glob(f"__{rank}_*")) for rank in (0, 1)]
    assert min(sizes) > 0.5 * max(sizes), sizes


def test_if_a_rank_cannot_write_its_part_the_save_fails_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        write = FileSystemWriter.write_data

        def full(self: Any, plan: Any, planner: Any) -> Any:
            if rank == 1:
                raise OSError(28, os.strerror(28))
            return write(self, plan, planner)

        FileSystemWriter.write_data = full  # type: ignore[method-assign]

    ends = run(2, [*PARTS, "strategy=fsdp", f"checkpoint.dir={tmp_path}"], prepare=prepare)
    assert [end.code for end in ends] == [1, 1]
    assert all("rank 1: No space left on device" in end.error for end in ends), ends
    assert [entry.name for entry in tmp_path.iterdir() if "step" in entry.name] == []


def test_a_folder_that_is_not_shared_is_detected(tmp_path: Path) -> None:
    """There are two nodes, whose own disks have the same path."""

    def node(rank: int) -> dict[str, str]:
        return {"DDPJOB_CHECKPOINT_DIR": str(tmp_path / f"node{rank}")}

    ends = run(2, [*PARTS, "strategy=fsdp"], env=node)
    assert [end.code for end in ends] == [1, 1], ends
    assert "set checkpoint.dir to a folder that every node sees" in ends[0].error, ends


def test_only_the_newest_incarnation_publishes_parts(tmp_path: Path) -> None:
    zombie = CheckpointFolder(CheckpointConfig(format=Format.DCP), tmp_path, Group())
    zombie.claim(Claim(0, 0, 1))
    CheckpointFolder(CheckpointConfig(format=Format.DCP), tmp_path, Group()).claim(Claim(1, 0, 2))
    zombie.save(lambda: SNAPSHOT, 7)
    with pytest.raises(CheckpointError, match="so this process \\(generation 0, round 0\\) stops writing"):
        zombie.finish()
    assert {entry.name for entry in tmp_path.iterdir()} == {"fence.json", "owner.json"}


def test_if_rank_0_cannot_read_its_claim_for_a_while_the_ranks_stay_in_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other writers must not wait in the collective of an attempt that rank 0 abandoned."""
    ranks = start(
        2,
        [
            *PARTS,
            "train.epochs=4000",
            "checkpoint.every_steps=3",
            "checkpoint.failures=9999",
            f"checkpoint.dir={tmp_path}",
        ],
    )
    until(lambda: (tmp_path / "step-000000003.dcp").exists())
    fence = tmp_path / "fence.json"
    claim = fence.read_text()
    fence.write_text("{")
    until(lambda: "training continues, and the next save tries again" in capfd.readouterr().err)
    fence.write_text(claim)
    before = set(tmp_path.glob("step-*.dcp"))
    until(lambda: set(tmp_path.glob("step-*.dcp")) - before, 20)
    os.kill(ranks[1][0].pid, signal.SIGTERM)
    assert [end.code for end in finish(ranks)] == [75, 75]


# ---- complete means readable


def saved(folder: Path, format: Format, steps: list[int], incarnation: int = 1) -> CheckpointFolder:
    checkpoints = CheckpointFolder(CheckpointConfig(format=format, keep=9), folder, Group())
    checkpoints.claim(Claim(0, 0, incarnation))
    for step in steps:
        checkpoints.save(lambda step=step: SNAPSHOT | {"step": step}, step)  # type: ignore[misc]
        checkpoints.finish()
    return checkpoints


def fails(*_: object) -> None:
    raise RuntimeError("not of this torch\nmore")


@pytest.mark.parametrize(("format", "module"), [(Format.DCP, dcp), (Format.TORCH, torch_file)])
def test_an_unreadable_checkpoint_with_correct_checksums_is_skipped(
    format: Format, module: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the whole training run was lost, although an older checkpoint was complete."""
    checkpoints = saved(tmp_path, format, [7, 9])
    read = module.read
    monkeypatch.setattr(module, "read", lambda path, *more: fails() if "9." in path.name else read(path, *more))
    found = checkpoints.newest()
    assert found is not None and found["step"] == 7
    said = capfd.readouterr().err
    assert f"step-000000009{module.SUFFIX} is not readable on rank 0: RuntimeError: not of this torch; trying" in said
    assert "Repair or remove the broken one" in said
    checkpoints.save(lambda: SNAPSHOT | {"step": 9}, 9)
    checkpoints.finish()
    monkeypatch.setattr(module, "read", read)
    again = saved(tmp_path, format, [], 2).newest()
    assert again is not None and again["step"] == 9, "the state after that step is saved again"


def test_if_one_rank_cannot_read_its_part_all_use_the_next_older_checkpoint(tmp_path: Path) -> None:
    arguments = [*PARTS, "strategy=fsdp", "train.epochs=3", "checkpoint.every_steps=4", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(2, arguments, prepare=stop_at(12))] == [75, 75]

    def prepare(rank: int) -> None:
        read = dcp.read
        if rank == 1:
            dcp.read = lambda path, *more: fails() if "12." in path.name else read(path, *more)  # type: ignore

    ends = run(2, arguments, prepare=prepare)
    assert [end.code for end in ends] == [0, 0], ends
    _, resumed = (line["step"] for line in metrics(tmp_path / "run", "start"))
    assert 0 < resumed < 12, "which step was saved second to last depends on the duration of the saves"


@pytest.mark.parametrize("format", [Format.DCP, Format.TORCH])
def test_a_save_that_cannot_be_read_back_fails_and_older_checkpoints_are_kept(
    format: Format, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may lose writes, or a writer may have a bug. Regression: the older checkpoints were
    then deleted.
    """
    checkpoints = CheckpointFolder(CheckpointConfig(format=format, keep=1), tmp_path, Group())
    checkpoints.claim(Claim(0, 0, 1))
    checkpoints.save(lambda: SNAPSHOT, 7)
    checkpoints.finish()
    write = manifest.write
    monkeypatch.setattr(manifest, "write", lambda recorded: write({**recorded, "tensors": {}}))
    monkeypatch.setattr(torch_file, "write_all", lambda file, content: file.write(content[:-1]))
    checkpoints.save(lambda: SNAPSHOT, 9)
    with pytest.raises(CheckpointError, match=r"its manifest: state does not name|truncated"):
        checkpoints.finish()
    assert [path.name for path in tmp_path.glob("*step*")] == [
        f"step-000000007.{'pt' if format is Format.TORCH else 'dcp'}"
    ]


def test_a_state_that_json_cannot_represent_is_refused_immediately(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(CheckpointConfig(format=Format.DCP), tmp_path, Group())
    checkpoints.claim(Claim(0, 0, 1))
    with pytest.raises(CheckpointError, match=r"torch.dtype as a value at state\['kind'\]"):
        checkpoints.save(lambda: SNAPSHOT | {"kind": torch.float32}, 7)


def test_a_shard_is_read_from_every_layout_of_chunks(tmp_path: Path) -> None:
    """The layouts are rows, columns and both. Each value comes from the chunk that contains it."""
    whole = torch.arange(60.0).reshape(6, 10)
    (tmp_path / "a").write_bytes(b"")
    chunks = []
    with (tmp_path / "a").open("wb") as file:
        for row, rows in ((0, 4), (4, 2)):
            for column, columns in ((0, 3), (3, 7)):
                chunks.append(manifest.TensorChunk((row, column), (rows, columns), "a", file.tell()))
                file.write(whole[row : row + rows, column : column + columns].contiguous().numpy().tobytes())
    stored = manifest.StoredTensor(torch.float32, (6, 10), tuple(chunks))
    for row, rows in ((0, 6), (3, 2), (5, 1)):
        for column, columns in ((0, 10), (2, 5), (4, 1)):
            target = dcp._Target(torch.zeros(rows, columns), (row, column))
            with (tmp_path / "a").open("rb", buffering=0) as file:
                for chunk in target.overlapping(stored):
                    target.fill(file, chunk)
            assert torch.equal(target.content, whole[row : row + rows, column : column + columns])
