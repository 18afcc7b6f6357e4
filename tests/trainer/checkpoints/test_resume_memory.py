"""Resuming from a large checkpoint: no tensor is in memory twice, each rank reads only its own
part, and each part is verified only once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddpjob_trainer.checkpoints import dcp, torch_file
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.config.sections import CheckpointConfig
from ddpjob_trainer.distributed.process_group import Group
from machine import free_port, slowness

M_MMAP_THRESHOLD = -3  # malloc.h
BYTES = 256 * 2**20
TENSORS = 12


def state(step: int = 1) -> dict[str, Any]:
    """Return large tensors of `BYTES` in total, and small ones."""
    rows = BYTES // TENSORS // 4096
    model = {f"weight{n}": torch.full((rows, 1024), float(n + step)) for n in range(TENSORS)}
    small = {"small": torch.arange(5), "scalar": torch.tensor(2.5), "half": torch.ones(3, dtype=torch.bfloat16)}
    return {"step": step, "sampler": {"epoch": 0, "consumed": 3}, "model": {**model, **small}}


def kilobytes(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(key)).split()[1])


def in_ranks(world: int, act: Callable[[Group], Any]) -> list[Any]:
    """Call `act` in each of `world` forked ranks with a process group, and return the results."""
    port, context = free_port(), multiprocessing.get_context("fork")

    def rank(number: int, send: Any) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=world)
        try:
            send.send(act(Group(number, world, number, world)))
        finally:
            os._exit(0)

    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [context.Process(target=rank, args=(number, send)) for number, (_, send) in enumerate(pipes)]
    for process in processes:
        process.start()
    try:
        assert all(receive.poll(60 * slowness()) for receive, _ in pipes), "a rank sent no result"
        return [receive.recv() for receive, _ in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def peak(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return the peak memory of `act`, in multiples of a checkpoint, and its result.

    Large blocks are allocated from the kernel and returned to it. Otherwise, memory that the
    process had freed but kept would not be counted.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    result = act()
    return (kilobytes("VmHWM") - before) * 1024 / BYTES, result


def test_a_checkpoint_file_is_in_memory_only_once_on_each_rank(tmp_path: Path) -> None:
    torch_file.write(tmp_path / "step-000000001.pt", state(), Metadata(1, None, 2))

    def resume(group: Group) -> tuple[float, bool]:
        folder = CheckpointFolder(CheckpointConfig(dir=tmp_path), tmp_path, group)
        most, found = peak(folder.newest)
        expected = state()
        same = all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
        return most, same and found["sampler"] == expected["sampler"]

    for most, same in in_ranks(2, resume):
        assert same
        assert most < 1.25


def test_each_rank_reads_its_own_part_of_a_folder_of_parts(tmp_path: Path) -> None:
    dcp.write(tmp_path / "step-000000001.dcp", 1, state(), Metadata(1, None, 1), None, lambda: None)

    def resume(group: Group) -> tuple[float, bool]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (group.world,))
        rows = BYTES // TENSORS // 4096
        like = distribute_tensor(torch.empty(rows, 1024), mesh, [Shard(0)], src_data_rank=None)
        folder = CheckpointFolder(CheckpointConfig(dir=tmp_path), tmp_path, group)
        most, found = peak(lambda: folder.newest(lambda place, shape: like if shape == like.shape else None))
        same = all(
            torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, state()["model"][name])
            for name, value in found["model"].items()
        )
        return most, same

    for most, same in in_ranks(2, resume):
        assert same
        assert most < 0.8


def parts(folder: Path, step: int) -> Path:
    """Save a checkpoint with three files of tensors."""
    path = folder / f"step-{step:09d}.dcp"
    small = {"step": step, "sampler": {"epoch": 0, "consumed": 3}, "model": {f"w{n}": torch.ones(99) for n in range(3)}}
    dcp.write(path, 1, small, Metadata(step, None, 1), None, lambda: None)
    return path


def test_each_part_is_hashed_by_only_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parts(tmp_path, 1)
    hashed: list[str] = []
    digest = dcp.sha256
    monkeypatch.setattr(dcp, "sha256", lambda part: hashed.append(part.name) or digest(part))
    for rank in range(2):
        dcp.check_share(path, rank, 2)
    assert sorted(hashed) == sorted(entry.name for entry in path.iterdir() if entry.name != "manifest.json")
    hashed.clear()
    dcp.check_sizes(path)
    assert not hashed


@pytest.mark.parametrize("place", [0, 1])
def test_if_any_rank_finds_a_part_broken_all_ranks_use_an_older_checkpoint(place: int, tmp_path: Path) -> None:
    parts(tmp_path, 1)
    broken = sorted(part for part in parts(tmp_path, 2).iterdir() if part.name != "manifest.json")[place]
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)

    def resume(group: Group) -> int:
        found = CheckpointFolder(CheckpointConfig(dir=tmp_path), tmp_path, group).newest()
        return int(found["step"]) if found else -1

    assert in_ranks(3, resume) == [1, 1, 1]
