"""The ranks agree on SIGTERM, save and exit with 75. A rank whose peers do not respond exits
without them.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import write_image_folder
from ddpjob_trainer import train
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.distributed.process_group import Group, Reduction
from ddpjob_trainer.lifecycle import signals
from ddpjob_trainer.lifecycle.signals import StopRequest
from machine import slowness
from ranks import TINY, finish, good, metrics, start, steps, stop_torchrun, torchrun, until


def rank_pid(folder: Path, rank: int) -> int:
    (path,) = (folder / "run" / "ledger").glob(f"rank-{rank}-*.jsonl")
    return int(path.stem.split("-")[-2])


def test_sigterm_to_torchrun_saves_and_a_later_start_continues(tmp_path: Path) -> None:
    step = stop_torchrun(2, [*TINY, "train.epochs=40"], tmp_path)
    good(1, [*TINY, f"train.epochs={-(-step // 8)}", f"checkpoint.dir={tmp_path}"])
    assert metrics(tmp_path / "run", "start")[1]["step"] == step
    assert len(verify(read([tmp_path])).incarnations) == 2


@pytest.mark.parametrize("how", ["torchrun", "ctrl-c", "killed"])
def test_a_rank_that_is_asked_to_stop_saves_and_leaves_no_worker_behind(how: str, tmp_path: Path) -> None:
    """torchrun and terminals signal the whole process group. If that ended a worker, the rank would
    fail before it has saved.
    """
    write_image_folder(tmp_path / "images", 8)
    arguments = [
        *TINY,
        "data.name=imagefolder",
        f"data.dir={tmp_path}/images",
        "data.image_size=16",
        "data.batch=4",
        "data.workers=1",
    ]
    agent = torchrun(1, [*arguments, "train.epochs=4000", f"checkpoint.dir={tmp_path}"], tmp_path)
    rank = 0
    try:
        until(lambda: steps(tmp_path) > 3)
        rank = rank_pid(tmp_path, 0)
        workers = [int(pid) for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]
        if how == "torchrun":
            agent.send_signal(signal.SIGTERM)
        else:
            os.killpg(os.getpgid(rank), signal.SIGINT) if how == "ctrl-c" else os.kill(rank, signal.SIGKILL)
        agent.wait(60 * slowness())
    finally:
        if rank and agent.poll() is None:
            os.kill(rank, signal.SIGKILL)
        agent.kill()
    said = (tmp_path / "out.txt").read_text()
    assert workers and "DataLoader worker" not in said
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 10)
    if how == "torchrun":
        (stop,) = metrics(tmp_path / "run", "stop")
        assert (tmp_path / f"step-{stop['step']:09d}.pt").exists() and "exitcode  : 1" not in said


def test_sigterm_to_one_rank_stops_all_ranks_with_75(tmp_path: Path) -> None:
    ranks = start(3, [*TINY, "train.epochs=400", f"checkpoint.dir={tmp_path}"])
    until(lambda: steps(tmp_path) > 3)
    os.kill(rank_pid(tmp_path, 2), signal.SIGTERM)
    assert [end.code for end in finish(ranks)] == [75, 75, 75]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_ten_times_a_second_and_in_the_same_steps(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Group):
        def sum_begin(self, values: torch.Tensor) -> Reduction:
            return Reduction(values * 2, None)

    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    stop, agreed = StopRequest(Two(rank, 2)), []
    seconds = [0.02] * 20 + [0.4] * 10 + [0.00001] * 150
    for step, taken in enumerate(seconds):
        now[0] += taken
        if stop.is_due(certain=step == 7):
            agreed.append(step)
            assert stop.agreement().wait() == (False, False)
    assert agreed[:4] == [0, 6, 7, 13] and set(range(25, 31)) < set(agreed)
    assert max(after - before for before, after in pairwise(agreed)) == 11
    for _ in range(20):  # The duration of evaluation batches does not count as the duration of steps.
        now[0] += 0.001
        stop.agreement().wait()
    assert stop.is_due(certain=False)
    alone = StopRequest(Group())
    for _ in range(5):
        assert alone.is_due(certain=False)
        alone.agreement().wait()


def test_a_save_that_ranks_agree_on_happens_after_exactly_that_step(tmp_path: Path) -> None:
    def noted(rank: int) -> None:
        signals.PACE_SECONDS = 1000.0
        begin = train.Trainer._save_due

        def due(self: train.Trainer, step: Any) -> Any:
            with (tmp_path / f"agreed-{rank}").open("a") as file:
                file.write(f"{self.step + 1} ")
            return begin(self, step)

        train.Trainer._save_due = due  # type: ignore[method-assign]

    good(2, [*TINY, "checkpoint.every_steps=5", "checkpoint.keep=9", f"checkpoint.dir={tmp_path}"], prepare=noted)
    assert [(tmp_path / f"agreed-{rank}").read_text() for rank in (0, 1)] == ["1 5 8 9 10 15 16 "] * 2
    saved = sorted(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("step-*.pt"))
    assert {5, 10, 15, 16} & set(saved) and set(saved) <= {5, 8, 10, 15, 16}


def test_sigterm_during_evaluation_keeps_the_epoch_and_evaluates_later(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"]

    def stop_in_evaluation(rank: int) -> None:
        evaluate = train.evaluate

        def signal_first(*args: Any, **kwargs: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
            return evaluate(*args, **kwargs)

        train.evaluate = signal_first

    assert [end.code for end in finish(start(2, arguments, stop_in_evaluation))] == [75, 75]
    assert metrics(tmp_path / "run", "eval") == []
    good(2, arguments)
    assert [line["epoch"] for line in metrics(tmp_path / "run", "eval")] == [1]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_whose_peer_is_gone_exits_promptly(how: signal.Signals, tmp_path: Path) -> None:
    """After SIGSTOP, the collective blocks forever; after SIGKILL, it fails immediately. No
    checkpoint is being written, because the rank would wait for it.
    """
    ranks = start(2, [*TINY, "train.epochs=4000", "checkpoint.every_epochs=0", f"checkpoint.dir={tmp_path}"])
    until(lambda: steps(tmp_path) > 3)
    stuck = ranks[1][0]
    try:
        os.kill(stuck.pid, how)
        time.sleep(0.3)
        began = time.monotonic()
        if ranks[0][0].is_alive():
            os.kill(ranks[0][0].pid, signal.SIGTERM)
        (end,) = finish(ranks[:1], 30)
        assert end.code == (143 if how is signal.SIGSTOP else 1)
        assert time.monotonic() - began < 8 * slowness()
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.join()
