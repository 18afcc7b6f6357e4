"""A checkpoint is put in place only by the newest life of the job; what was left behind ends with an exit code of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.checkpoints import CheckpointConfig, CheckpointFolder
from ddpjob_trainer.errors import ConfigError, FencedError
from ddpjob_trainer.fence import EXIT_FENCED, Claim, place_from_env
from ddpjob_trainer.group import Group
from ddpjob_trainer.ledger import Ledger
from ddpjob_trainer.train import agree_on_life
from ranks import TINY, run, until


def life(folder: Path, monkeypatch: pytest.MonkeyPatch, fence: str) -> CheckpointFolder:
    """A life of the job that was started with this DDPJOB_FENCE."""
    monkeypatch.setenv("DDPJOB_FENCE", fence)
    made = CheckpointFolder(CheckpointConfig(), folder, Group())
    made.claim(agree_on_life(Group()))
    return made


def save(folder: CheckpointFolder, step: int) -> None:
    """A checkpoint, on disk at the end."""
    folder.save(lambda: {"step": step, "sampler": {"epoch": 0, "consumed": step}}, step)
    folder.finish()


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("*.pt"))


@pytest.mark.parametrize(("old", "new"), [("0.9", "0.10"), ("9.3", "10.0"), ("1.7", "2.1")])
def test_generation_and_round_are_compared_as_numbers(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zombie = life(tmp_path, monkeypatch, old)
    save(zombie, 1)
    newest = life(tmp_path, monkeypatch, new)
    with pytest.raises(FencedError, match=r"belongs to generation .* and writes nothing more"):
        save(zombie, 9)
    with pytest.raises(FencedError, match="was claimed on"):
        life(tmp_path, monkeypatch, old)
    save(newest, 2)
    assert steps(tmp_path) == [1, 2]
    assert list(tmp_path.glob(".*.tmp")) == [], "what was not renamed is gone"


def test_a_claim_that_an_older_life_overwrote_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the folder before either had written."""
    newest = life(tmp_path, monkeypatch, "0.5")
    claim = json.loads((tmp_path / "fence.json").read_text())
    (tmp_path / "fence.json").write_text(json.dumps(claim | {"round": 4, "life": 1}))
    save(newest, 3)
    assert json.loads((tmp_path / "fence.json").read_text())["round"] == 5
    zombie = CheckpointFolder(CheckpointConfig(), tmp_path, Group())
    zombie._claim = Claim(0, 4, 1)
    with pytest.raises(FencedError):
        save(zombie, 9)


def test_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DDPJOB_FENCE", "DDPJOB_GENERATION", "DDPJOB_ROUND"):
        monkeypatch.delenv(name, raising=False)
    assert place_from_env() == (0, 0)
    monkeypatch.setenv("DDPJOB_GENERATION", "2")
    monkeypatch.setenv("DDPJOB_ROUND", "11")
    assert place_from_env() == (2, 11)
    monkeypatch.setenv("DDPJOB_FENCE", "3.4")
    assert place_from_env() == (3, 4)
    for wrong in ("3", "3.4.5", "a.b", "-1.2"):
        monkeypatch.setenv("DDPJOB_FENCE", wrong)
        with pytest.raises(ConfigError, match=r"must be GENERATION.ROUND"):
            place_from_env()


def trainer(folder: Path, out: str, *arguments: str, defect: str = "", **env: str) -> subprocess.Popen[bytes]:
    program = f"import sys, ddpjob_trainer.__main__ as m\n{defect}\nsys.exit(m.main())"
    command = [sys.executable, "-c", program, *TINY, f"checkpoint.dir={folder / 'shared'}", f"train.run_dir={folder / out}", *arguments]
    with (folder / f"{out}.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


CHECK_NOTHING = "from ddpjob_trainer.fence import Claim; Claim.check = lambda self, folder: None"


@pytest.mark.parametrize("defect", ["", CHECK_NOTHING], ids=["as-it-is", "defect-no-check"])
def test_a_frozen_process_that_wakes_up_after_its_successor(defect: str, tmp_path: Path) -> None:
    """A node that comes back: its process goes on where it was frozen. Without the check it would undo its successor's end."""
    log, shared = tmp_path / "zombie.txt", tmp_path / "shared"
    zombie = trainer(tmp_path, "zombie", "train.epochs=400", "checkpoint.every_steps=1", defect=defect, DDPJOB_FENCE="0.9")
    try:
        until(lambda: zombie.poll() is not None or any(shared.glob("*.pt")))
        assert zombie.poll() is None, log.read_text()
        zombie.send_signal(signal.SIGSTOP)
        frozen_at = steps(shared)[-1]
        end = frozen_at // 8 + 2
        assert trainer(tmp_path, "new", f"train.epochs={end}", DDPJOB_FENCE="0.10").wait(60) == 0, (tmp_path / "new.txt").read_text()
        theirs = steps(shared)
        assert theirs[-1] == 8 * end
        zombie.send_signal(signal.SIGCONT)
        if defect:
            until(lambda: steps(shared)[-1] != theirs[-1])
            return
        assert zombie.wait(60) == EXIT_FENCED, log.read_text()
    finally:
        zombie.kill()
        zombie.wait()
    assert steps(shared) == theirs
    assert torch.load(shared / f"step-{theirs[-1]:09d}.pt", weights_only=True)["step"] == theirs[-1]
    last = log.read_text().splitlines()[-1]
    assert last.startswith("error: checkpoint folder") and "generation 0, round 10" in last and "Traceback" not in log.read_text()


def test_all_ranks_end_as_fenced_when_the_writer_is(tmp_path: Path) -> None:
    """Rank 0 finds out in the background; rank 1 must not be taken for a failure of its own."""

    def prepare(rank: int) -> None:
        write = Ledger.step

        def step_and_claim(self: Ledger, number: int, taken: Any) -> None:
            write(self, number, taken)
            if rank == 0 and number == 4:
                Claim(7, 0, 99).take(tmp_path)

        Ledger.step = step_and_claim  # type: ignore[method-assign]

    ends = run(2, [*TINY, "train.epochs=50", "checkpoint.every_steps=2", f"checkpoint.dir={tmp_path}"], prepare=prepare)
    assert all(end.error.startswith("FencedError: ") for end in ends), ends
    assert "(generation 7, round 0)" in ends[0].error and "its message says why" in ends[1].error
    assert max(steps(tmp_path)) <= 4


def test_a_start_that_is_older_than_the_folder_ends_with_the_code(tmp_path: Path) -> None:
    assert trainer(tmp_path, "first", "train.epochs=1", DDPJOB_FENCE="1.0").wait(60) == 0
    late = trainer(tmp_path, "late", "train.epochs=9", DDPJOB_FENCE="0.77")
    assert late.wait(60) == EXIT_FENCED, (tmp_path / "late.txt").read_text()
    assert "was claimed on" in (tmp_path / "late.txt").read_text()
