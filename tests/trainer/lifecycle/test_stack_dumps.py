"""A rank dumps its stacks on a signal, even while it is blocked, and all ranks dump theirs if no
step ends.

Profiles of selected steps are tested here as well.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ddpjob_pod.stack_signal import SIGNAL
from ddpjob_runtime.worker import show_stacks_on_signal
from ddpjob_trainer.lifecycle.stack_dumps import StackDumps
from ranks import TINY, finish, good, metrics, start, until


def stacks(folder: Path, rank: int) -> str:
    path = folder / "run" / "stacks" / f"rank-{rank}.txt"
    return path.read_text() if path.exists() else ""


def test_the_signal_dumps_the_stacks_of_a_blocked_rank(tmp_path: Path, capfd: Any) -> None:
    """Rank 1 is stopped, so rank 0 waits for it in a collective and reports where."""
    ranks = start(2, [*TINY, "train.epochs=4000", f"checkpoint.dir={tmp_path}"])
    pids = [process.pid for process, _ in ranks]
    try:
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run", "step")) > 3)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.5)
        before = len(metrics(tmp_path / "run", "step"))
        os.kill(pids[0], SIGNAL)
        until(lambda: "train.py" in stacks(tmp_path, 0))
        written = stacks(tmp_path, 0)
        assert "in _train_epoch" in written
        assert "Stack (most recent call first)" in written and "Thread 0x" not in written, (
            "only the main thread's stack"
        )
        until(lambda: "stacks of rank 0" in capfd.readouterr().err)
        os.kill(pids[1], signal.SIGCONT)
        until(lambda: len(metrics(tmp_path / "run", "step")) > before + 2)
        assert ranks[0][0].is_alive(), "the signal does not end the rank"
        os.kill(pids[0], signal.SIGTERM)
        assert [end.code for end in finish(ranks)] == [75, 75]
        assert stacks(tmp_path, 0) and not (tmp_path / "run" / "stacks" / "rank-1.txt").exists(), (
            "no empty file is left"
        )
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()


def test_all_ranks_dump_their_stacks_before_a_hanging_collective_fails(tmp_path: Path, capfd: Any) -> None:
    """Rank 1 sleeps in step 4. The timeout of collectives is 3 s, so the stacks are dumped after
    2.7 s.
    """

    def prepare(rank: int) -> None:
        from ddpjob_trainer.reporting.ledger import Ledger

        write = Ledger.step

        def step_and_sleep(self: Ledger, number: int, taken: Any) -> None:
            write(self, number, taken)
            if rank == 1 and number == 4:
                time.sleep(30)

        Ledger.step = step_and_sleep  # type: ignore[method-assign]

    ranks = start(2, [*TINY, "train.timeout_seconds=3", f"checkpoint.dir={tmp_path}"], prepare)
    (first,) = finish(ranks[:1])
    assert first.code == 1
    until(lambda: stacks(tmp_path, 1))
    ranks[1][0].kill()
    ranks[1][0].join()
    assert "Timeout" in stacks(tmp_path, 0) and "in _train_epoch" in stacks(tmp_path, 0)
    assert "in step_and_sleep" in stacks(tmp_path, 1)
    assert "rank 1: no step for 2.7 s" in capfd.readouterr().err


def test_the_dump_signal_does_not_end_a_rank_that_is_about_to_exit(tmp_path: Path) -> None:
    """Regression: the signal ended the rank, because faulthandler had restored the default
    action.
    """

    def leave() -> None:
        StackDumps(tmp_path, 0, 60).close()
        os.kill(os.getpid(), SIGNAL)

    rank = multiprocessing.get_context("fork").Process(target=leave)
    rank.start()
    rank.join()
    assert rank.exitcode == 0


def test_under_a_launcher_a_rank_dumps_stacks_until_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank writes to the file that worker.py has registered."""
    monkeypatch.setenv("DDPJOB_STACKS_DIR", str(tmp_path))
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")

    def leave() -> None:
        show_stacks_on_signal()
        dumps = StackDumps(tmp_path / "run", 3, 60)
        os.kill(os.getpid(), SIGNAL)
        dumps.close()
        os.kill(os.getpid(), SIGNAL)

    rank = multiprocessing.get_context("fork").Process(target=leave)
    rank.start()
    rank.join()
    assert rank.exitcode == 0 and (tmp_path / "3.txt").read_text().count("in leave") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["3.txt"]


def test_a_successful_run_leaves_no_stack_files(tmp_path: Path) -> None:
    good(2, [*TINY, f"checkpoint.dir={tmp_path}", "train.timeout_seconds=30"])
    assert not (tmp_path / "run" / "stacks").exists()


def test_the_profile_covers_the_requested_steps(tmp_path: Path) -> None:
    good(2, [*TINY, f"checkpoint.dir={tmp_path}", "train.epochs=1", "report.profile_steps=[4, 2]"])
    for rank in (0, 1):
        with gzip.open(tmp_path / "run" / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        assert {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")} == {
            "ProfilerStep#1",
            "ProfilerStep#2",
        }
        assert sum(event.get("name") == "aten::cross_entropy_loss" for event in events) == 2
        table = (tmp_path / "run" / "profile" / f"rank-{rank}.txt").read_text()
        assert "aten::convolution" in table and "Self CPU" in table


@pytest.mark.parametrize("first", [8, 9])
def test_a_profile_of_steps_that_will_not_be_taken_is_reported_at_the_start(
    first: int, tmp_path: Path, capfd: Any
) -> None:
    good(1, [*TINY, f"checkpoint.dir={tmp_path}", "train.epochs=1", f"report.profile_steps=[{first}, 2]"])
    said = "no profile, because report.profile_steps starts at step 9 but the last step is 8; set an earlier step"
    assert (said in capfd.readouterr().out) is (first == 9)
    assert (tmp_path / "run" / "profile").exists() is (first == 8)


def test_a_profile_is_written_even_if_training_ends_during_it(tmp_path: Path) -> None:
    good(1, [*TINY, f"checkpoint.dir={tmp_path}", "train.epochs=1", "report.profile_steps=[1, 100]"])
    with gzip.open(tmp_path / "run" / "profile" / "rank-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::cross_entropy_loss" for event in events) >= 8
