"""What the benchmarks judge by: step logs, and the replay that gives the expected weights of a tortured job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ddpjob_trainer.commands.check_ledger import read
from ranks import TINY, good, run, stop_at

from benchmarks.recovery.step_log import StepLog
from benchmarks.torture.replay import replay, segments

ARGUMENTS = [*TINY, "train.threads=1", "optim.lr=0.05"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(max(folder.glob("step-*.pt")), weights_only=True)["model"]


def equal(one: Path, other: Path) -> bool:
    return all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_a_replay_has_the_bits_of_a_job_that_changed_its_size(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for world, stop in ((2, 5), (1, 9)):
        assert {end.code for end in run(world, [*ARGUMENTS, f"checkpoint.dir={job}"], stop_at(stop))} == {75}
    good(2, [*ARGUMENTS, f"checkpoint.dir={job}"])
    (_, first), (_, second), _ = found = segments(read([job]))
    assert found == ((2, first), (1, second), (2, 16))
    assert equal(job, replay(tmp_path, found, ARGUMENTS))
    assert not equal(job, replay(tmp_path, ((2, 16),), ARGUMENTS)), (
        "the order of sums matters: the reason for the replay"
    )
    assert not equal(job, replay(tmp_path, ((2, first + 1), (1, second), (2, 16)), ARGUMENTS)), (
        "one step more on two ranks is seen"
    )


def log_rows(folder: Path, incarnation: int, world: int, rank: int, times: list[float], first: int = 1) -> None:
    rows = [
        {"incarnation": incarnation, "world": world, "rank": rank, "node": f"n{rank}", "step": first + i, "t": t}
        for i, t in enumerate(times)
    ]
    (folder / f"steps-n{rank}-{incarnation}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_recovery_ends_with_the_first_step_of_all_ranks_of_a_new_incarnation(tmp_path: Path) -> None:
    log_rows(tmp_path, 1, 2, 0, [1.0, 2.0, 3.5])  # continues after the kill at 3.0, and is not a recovery
    log_rows(tmp_path, 1, 2, 1, [1.1, 2.1, 3.6])
    log_rows(tmp_path, 2, 2, 0, [5.0, 6.0], first=4)
    log = StepLog(tmp_path).refresh()
    assert log.first_step_after(3.0, 2) is None, "rank 1 has made no step yet"
    log_rows(tmp_path, 2, 2, 1, [5.5], first=4)
    assert log.refresh().first_step_after(3.0, 2) == 5.5
    assert log.first_step_after(3.0, 1) is None, "another size is another case"
    assert log.newest is log.incarnations[2] and log.incarnations[2].first == {0: 4, 1: 4}


def test_a_line_that_is_not_complete_is_read_later(tmp_path: Path) -> None:
    log_rows(tmp_path, 1, 1, 0, [1.0])
    path = tmp_path / "steps-n0-1.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    log = StepLog(tmp_path).refresh()
    path.write_text(whole + whole.replace("1.0", "2.0"))
    assert log.refresh().incarnations[1].steps == {0: [1.0, 2.0]}


@pytest.mark.parametrize(("begin", "end", "gap"), [(1.0, 3.0, 1.5), (2.5, 9.0, 6.5)])
def test_the_longest_gap_of_any_rank(begin: float, end: float, gap: float, tmp_path: Path) -> None:
    log_rows(tmp_path, 1, 2, 0, [1.0, 1.5, 2.0, 2.5, 3.0])
    log_rows(tmp_path, 1, 2, 1, [1.0, 2.5])
    assert StepLog(tmp_path).refresh().longest_gap(begin, end) == gap
