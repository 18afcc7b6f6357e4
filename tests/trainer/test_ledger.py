"""The ledger check passes real runs and fails under deliberate defects of the sampler, through real training on two ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ddpjob_trainer import sampler, train
from ddpjob_trainer.errors import LedgerError
from ddpjob_trainer.ledger_check import main, read, verify
from ranks import TINY, good, metrics, run, stop_at, torchrun, until


def drop_one(rank: int) -> None:
    share = sampler.share
    sampler.share = lambda samples, rank, world: share(samples, rank, world)[1:] if rank == 1 else share(samples, rank, world)


def repeat_one(rank: int) -> None:
    share = sampler.share

    def broken(samples: list[int], rank: int, world: int) -> list[int]:
        mine = share(samples, rank, world)
        return mine[:-1] + share(samples, 0, world)[:1] if rank == 1 else mine

    sampler.share = broken


def own_permutation(rank: int) -> None:
    permutation = sampler.permutation
    sampler.permutation = lambda seed, epoch, size: permutation(seed + rank, epoch, size)


@pytest.mark.parametrize(
    ("defect", "message"),
    [(drop_one, "epoch 1: .* of 1438 samples were never taken"), (repeat_one, "taken twice"), (own_permutation, "taken twice")],
)
def test_a_broken_sampler_is_found(defect: Callable[[int], None], message: str, tmp_path: Path) -> None:
    good(2, [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"], prepare=defect)
    with pytest.raises(LedgerError, match=message):
        verify(read([tmp_path]))


def test_a_counter_that_begins_anew_at_a_restart_is_found(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"]

    def forget_the_count(rank: int) -> None:
        def load(self: sampler.ElasticSampler, state: dict[str, Any]) -> None:
            self.state = sampler.SamplerState(state["epoch"], 0, state["seed"])

        sampler.ElasticSampler.load_state_dict = load  # type: ignore[method-assign]

    assert [end.code for end in run(2, arguments, prepare=stop_at(4))] == [75, 75]
    good(2, arguments, prepare=forget_the_count)
    with pytest.raises(LedgerError, match=r"sample .* was taken twice, in step 1 and in step 5"):
        verify(read([tmp_path]))


def test_a_resume_from_an_older_checkpoint_than_the_newest_is_found(tmp_path: Path) -> None:
    arguments = [*TINY, "checkpoint.every_steps=2", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, arguments, prepare=stop_at(5))] == [75]
    (tmp_path / "step-000000005.pt").unlink()
    good(1, arguments)
    with pytest.raises(LedgerError, match="went on after step 4, though step 5 was in a checkpoint"):
        verify(read([tmp_path]))


def test_kill_9_of_a_rank_under_torchrun_loses_and_repeats_nothing(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=6", "checkpoint.every_steps=3", "data.batch=40", f"checkpoint.dir={tmp_path}"]
    agent = torchrun(2, arguments, tmp_path, max_restarts=2)
    try:
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run", "step")) > 20)
        (victim,) = (tmp_path / "run" / "ledger").glob("rank-1-*.jsonl")
        os.kill(int(victim.stem.split("-")[-2]), signal.SIGKILL)
        assert agent.wait(120) == 0, (tmp_path / "out.txt").read_text()
    finally:
        agent.kill()
    verdict = verify(read([tmp_path]))
    assert len(verdict.lives) == 2 and verdict.lives[1].start >= 18
    assert verdict.epochs == dict.fromkeys(range(1, 7), verdict.size)


def test_command_line_prints_a_table_and_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good(1, [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    assert main([str(tmp_path)]) == 0
    assert "epochs: 1 whole, 1438 samples each exactly once" in capsys.readouterr().out
    with pytest.raises(LedgerError, match=r"train with train.ledger=true"):
        main([str(tmp_path / "elsewhere")])


def test_train_uses_the_sampler_that_the_defects_break() -> None:
    assert train.ElasticSampler is sampler.ElasticSampler
