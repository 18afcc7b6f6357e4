"""A process that is killed at any instant of a save leaves complete checkpoints, or nothing under a
checkpoint's name.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.config.sections import CheckpointConfig, Format
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.lifecycle.fence import Claim
from ranks import until

WEIGHTS = torch.arange(50_000.0)


def opened(path: Path, format: Format, incarnation: int) -> CheckpointFolder:
    made = CheckpointFolder(CheckpointConfig(format=format, keep=2, keep_best=1), path, Group())
    made.claim(Claim(0, incarnation, incarnation))
    return made


def save_for_ever(path: Path, format: Format, incarnation: int) -> None:
    """Resume from the existing checkpoint and save forever. The weights show their step."""
    torch.set_num_threads(1)
    folder = opened(path, format, incarnation)
    found = folder.newest()
    step = found["step"] if found else 0
    while True:
        step += 1
        state = {"step": step, "sampler": {"epoch": step, "consumed": 0}, "model": {"w": WEIGHTS + step}}
        folder.save(lambda state=state: state, step)  # type: ignore[misc]
        folder.scored(step, {"accuracy": random.random(), "loss": 1.0})


def start(path: Path, format: Format, incarnation: int) -> Any:
    process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path, format, incarnation))
    process.start()
    return process


@pytest.mark.parametrize("format", list(Format))
def test_a_kill_at_any_instant_leaves_complete_checkpoints(
    format: Format, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(3)
    before = 0
    for incarnation in range(1, 9):
        process = start(tmp_path, format, incarnation)
        until(lambda: any(int(path.name[5:14]) > before for path in tmp_path.glob("step*")))  # noqa: B023
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = (
            opened(tmp_path, format, 100 + incarnation).newest()
            if incarnation % 2
            else CheckpointFolder(CheckpointConfig(), tmp_path, Group()).newest()
        )
        assert found is not None and found["step"] > before, "the newest step never decreases"
        assert torch.equal(found["model"]["w"], WEIGHTS + found["step"])
        before = found["step"]
        best = tmp_path / f"best{'.pt' if format is Format.TORCH else '.dcp'}"
        assert not best.is_symlink() or best.exists(), "the link is never dangling"
        (tmp_path / "fence.json").unlink()
    assert "warning" not in capfd.readouterr().err, "no checkpoint was ever found broken"
