"""The ledger check accepts correct runs, and rejects runs with deliberate defects in the sampler.
Two real ranks train.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer import train
from ddpjob_trainer.commands.check_ledger import main, read, verify
from ddpjob_trainer.data import sampler
from ddpjob_trainer.data.sampler import Micro, SamplerState, Step
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import LedgerError
from ddpjob_trainer.lifecycle.fence import Claim
from ddpjob_trainer.reporting import ledger as ledger_module
from ddpjob_trainer.reporting.ledger import Ledger
from machine import slowness
from ranks import TINY, good, metrics, run, stop_at, torchrun, until


def drop_one(rank: int) -> None:
    share = sampler.share
    sampler.share = lambda samples, rank, world: (
        share(samples, rank, world)[1:] if rank == 1 else share(samples, rank, world)
    )


def repeat_one(rank: int) -> None:
    share = sampler.share

    def broken(samples: list[int], rank: int, world: int) -> list[int]:
        mine = share(samples, rank, world)
        return mine[:-1] + share(samples, 0, world)[:1] if rank == 1 else mine

    sampler.share = broken


def own_permutation(rank: int) -> None:
    order = sampler._order
    sampler._order = lambda seed, epoch, size: order(seed + rank, epoch, size)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (drop_one, "epoch 1: .* of 1438 samples were never used"),
        (repeat_one, "used twice"),
        (own_permutation, "used twice"),
    ],
)
def test_a_broken_sampler_is_detected(defect: Callable[[int], None], message: str, tmp_path: Path) -> None:
    good(2, [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"], prepare=defect)
    with pytest.raises(LedgerError, match=message):
        verify(read([tmp_path]))


def test_a_sample_counter_that_restarts_at_0_is_detected(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"]

    def forget_the_count(rank: int) -> None:
        def load(self: sampler.ElasticSampler, state: dict[str, Any]) -> None:
            self.state = sampler.SamplerState(state["epoch"], 0, state["seed"])

        sampler.ElasticSampler.load_state_dict = load  # type: ignore[method-assign]

    assert [end.code for end in run(2, arguments, prepare=stop_at(4))] == [75, 75]
    good(2, arguments, prepare=forget_the_count)
    with pytest.raises(LedgerError, match=r"sample .* was used twice, in steps 1 and 5"):
        verify(read([tmp_path]))


def test_a_resume_from_a_checkpoint_that_is_not_the_newest_is_detected(tmp_path: Path) -> None:
    arguments = [*TINY, "checkpoint.every_steps=2", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, arguments, prepare=stop_at(5))] == [75]
    (tmp_path / "step-000000005.pt").unlink()
    good(1, arguments)
    # Step 4 has no checkpoint if the checkpoint of step 2 was still being written.
    with pytest.raises(LedgerError, match=r"resumed after step [24], although there was a checkpoint of step 5"):
        verify(read([tmp_path]))


def test_after_kill_9_of_a_rank_under_torchrun_no_step_is_lost_or_repeated(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=6", "checkpoint.every_steps=3", "data.batch=40", f"checkpoint.dir={tmp_path}"]
    agent = torchrun(2, arguments, tmp_path, max_restarts=2)
    try:
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run", "step")) > 20)
        (victim,) = (tmp_path / "run" / "ledger").glob("rank-1-*.jsonl")
        os.kill(int(victim.stem.split("-")[-2]), signal.SIGKILL)
        assert agent.wait(120 * slowness()) == 0, (tmp_path / "out.txt").read_text()
    finally:
        agent.kill()
    verdict = verify(read([tmp_path]))
    assert len(verdict.incarnations) == 2 and verdict.incarnations[1].start >= 18
    assert verdict.epochs == dict.fromkeys(range(1, 7), verdict.size)


def test_incarnations_are_ordered_correctly_even_if_the_nodes_clocks_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the second incarnation's node is 85 s slow. Then the job is created again, so
    its rounds start at 1 again.
    """

    def incarnation(job: str, round_: int, clock: float, start: int, *steps: int) -> None:
        monkeypatch.setattr(ledger_module.time, "time", lambda: clock)
        ledger = Ledger(tmp_path, Group(), Claim(0, round_, round_ if job == "first" else -round_, job))
        ledger.start(start, size=6, epochs=1)
        for number in steps:
            micro = Micro([number - 1], [number - 1], 1)
            ledger.step(number, Step(0, [number - 1], [micro], SamplerState(0, number)))
        ledger.checkpoint(steps[-1])

    incarnation("first", 1, 1000, 0, 1, 2)
    incarnation("first", 2, 1030 - 85, 2, 3, 4)
    incarnation("again", 1, 1100, 4, 5, 6)
    found = read([tmp_path])
    assert [(it.job, it.round, it.start) for it in found] == [("first", 1, 0), ("first", 2, 2), ("again", 1, 4)]
    assert verify(found).epochs == {1: 6}


def test_check_ledger_prints_a_table_and_reports_a_missing_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good(1, [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    assert main([str(tmp_path)]) == 0
    assert "epochs: 1 whole, 1438 samples, each used exactly once" in capsys.readouterr().out
    with pytest.raises(LedgerError, match=r"train with train.ledger=true"):
        main([str(tmp_path / "elsewhere")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no step yet"),
        (b'{"time": 1, "li', "contains no step yet"),
        (b"\xff\xfe\n", r"rank-0-a.jsonl, line 1 is damaged"),
        (b'{"a": 1}\n', "line 1 is damaged: it is not a line of a ledger"),
        (b"12\n", "line 1 is damaged: it is not a line of a ledger"),
    ],
)
def test_a_missing_or_invalid_ledger_is_reported(content: bytes, message: str, tmp_path: Path) -> None:
    """Regression: each of these cases caused a traceback. A job that ended before its first step
    leaves an empty file.
    """
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "rank-0-a.jsonl").write_bytes(content)
    with pytest.raises(LedgerError, match=message):
        main([str(tmp_path)])


def test_steps_that_changed_no_weight_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 3 is in the valid history, and step 6 is in a part that a resume undid."""

    def broken(*steps: int) -> Callable[[int], None]:
        def prepare(rank: int) -> None:
            from ddpjob_trainer.optim import loss

            compute, calls = loss.loss_sum, [0]

            def loss_sum(*arguments: Any, **more: Any) -> torch.Tensor:
                calls[0] += 1
                return compute(*arguments, **more) * (torch.nan if rank == 1 and calls[0] in steps else 1.0)

            loss.loss_sum = loss_sum

        return prepare

    def stopped(rank: int) -> None:
        broken(3, 6)(rank)
        stop_at(6)(rank)

    keys = [*TINY, "train.epochs=1", "checkpoint.every_steps=4", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(2, keys, prepare=stopped)] == [75, 75]
    summary = verify(read([tmp_path]))
    assert (summary.left_out, summary.epochs) == ({3: 200, 6: 200}, {1: 1200})
    (tmp_path / "step-000000006.pt").unlink()
    for file in (tmp_path / "run" / "ledger").glob("*.jsonl"):  # as if it had been killed before the save
        rows = file.read_text().splitlines(keepends=True)
        file.write_text("".join(row for row in rows if '"checkpoint": 6' not in row))
    good(2, keys)
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "epochs: 1 whole, 1438 samples, each used exactly once" in shown
    assert "skipped: 1 steps (3) with 200 samples left the weights unchanged" in shown


def test_training_uses_the_sampler_in_which_the_defects_are_planted() -> None:
    assert train.ElasticSampler is sampler.ElasticSampler
