"""The arithmetic of a failure trace: useful, repeated and paused time, and the conclusions for
large jobs.
"""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path

import pytest

from benchmarks.recovery.step_log import Incarnation, StepLog
from benchmarks.recovery.trace import command, effective_time, play, report, torchft_packages
from benchmarks.recovery.trace.account import Account, Seen, keep_account
from benchmarks.recovery.trace.effective_time import Parts, parts_of
from benchmarks.recovery.trace.events import Event, Kind, Trace, make_trace
from benchmarks.recovery.trace.play import Run


def incarnation(first: int, *times: float, ranks: int = 1) -> Incarnation:
    return Incarnation(ranks, {rank: list(times) for rank in range(ranks)}, {}, dict.fromkeys(range(ranks), first))


def test_a_repeated_step_is_not_useful_and_the_usual_gap_is_not_a_pause() -> None:
    made = {1: incarnation(1, 1.0, 2.0, 3.0), 2: incarnation(2, 8.0, 9.0, 10.0)}
    found = keep_account(made, [(3.5, Kind.KILL)], 0.0, 10.0)
    assert (found.useful, found.gap) == (4, 1.0)
    assert found.seen == (Seen(Kind.KILL, 4.0, 2),)
    assert found.per_ideal(1.0) == 0.4


def test_a_step_counts_when_the_first_rank_completes_it() -> None:
    made = {1: Incarnation(2, {0: [1.0, 2.0], 1: [1.5, 2.5]}, {}, {0: 1, 1: 1})}
    assert keep_account(made, [], 0.0, 3.0).gap == 1.0


def test_standstills_after_the_same_failure_are_added_up() -> None:
    made = {1: incarnation(1, 1.0, 2.0), 2: incarnation(3, 5.0, 6.0), 3: incarnation(5, 8.0, 9.0)}
    assert keep_account(made, [(2.0, Kind.KILL)], 0.0, 9.0).seen == (Seen(Kind.KILL, 3.0, 0),)


def test_a_standstill_is_divided_among_the_failures_during_it() -> None:
    made = {1: incarnation(1, 1.0, 2.0), 2: incarnation(3, 12.0, 13.0)}
    first, second = keep_account(made, [(2.0, Kind.SILENT), (7.0, Kind.CRASH)], 0.0, 13.0).seen
    assert first == Seen(Kind.SILENT, 4.0, 0, recovered=False)
    assert second == Seen(Kind.CRASH, 5.0, 0)


def test_a_training_run_that_never_continues_is_detected() -> None:
    made = {1: incarnation(1, *(number / 10 for number in range(1, 21)))}
    (seen,) = keep_account(made, [(2.0, Kind.KILL)], 0.0, 30.0).seen
    assert seen == Seen(Kind.KILL, 27.9, 0, recovered=False)


def test_a_failure_without_consequences_is_not_a_pause() -> None:
    made = {1: incarnation(1, *(number / 10 for number in range(1, 101)))}
    assert keep_account(made, [(2.0, Kind.JOIN)], 0.0, 10.0).seen == (Seen(Kind.JOIN, 0.0, 0),)


def test_a_member_that_the_quorum_counts_later_belongs_to_it(tmp_path: Path) -> None:
    line = '{{"incarnation": 7, "rank": {}, "world": {}, "node": "n{}", "step": 1, "t": 1.0}}\n'
    (tmp_path / "steps-n0-1.jsonl").write_text(line.format(0, 1, 0) + line.format(1, 2, 1))
    assert StepLog(tmp_path).refresh().incarnations[7].world == 2


def test_all_systems_get_the_same_trace_which_has_one_join() -> None:
    trace = make_trace(40, 60.0, list(Kind), seed=3)
    assert trace == make_trace(40, 60.0, list(Kind), seed=3) != make_trace(40, 60.0, list(Kind), seed=4)
    assert trace.joins == 1 and {event.kind for event in trace.events} == set(Kind)
    assert all(abs(event.at / 60 - number - 0.5) <= 0.25 for number, event in enumerate(trace.events))
    assert sum(event.number % 2 for event in trace.events) == 10


class Fake:
    """A group that takes a step whenever it is observed, until all of its members are dead."""

    def __init__(self, folder: Path, options: tuple[str, ...], joins: int) -> None:
        self.folder, self.joins, self.restarts, self.struck = folder, joins, 0, list[tuple[str, str]]()
        self.log, self.now = self, Incarnation(2, {0: [], 1: []}, {0: "a", 1: "b"}, {0: 1, 1: 1})
        self.incarnations, self.closed = {1: self.now}, False

    newest = property(lambda self: self.now)

    def start(self) -> None:
        self.refresh()

    settle = start

    def refresh(self) -> Fake:
        if not any(kind == "silence" for kind, _ in self.struck) or self.restarts:
            for rank in (0, 1):
                self.now.steps[rank].append(time.time())
        return self

    def tend(self) -> None: ...

    def kill_node(self, node: str) -> None:
        self.struck.append(("kill", node))

    def crash_worker(self, node: str) -> None:
        self.struck.append(("crash", node))

    def silence_node(self, node: str) -> None:
        self.struck.append(("silence", node))

    def join_node(self) -> None:
        self.struck.append(("join", ""))

    def restart_all(self) -> None:
        self.restarts += 1

    def close(self) -> None:
        self.closed = True


def test_all_failures_occur_and_a_system_that_stands_still_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[Fake]()

    def build(folder: Path, options: tuple[str, ...], joins: int) -> Fake:
        assert options == ("--state=1000", "--step=0.1", "--save-seconds=5")
        made.append(Fake(folder, options, joins))
        return made[0]

    monkeypatch.setitem(play.SYSTEMS, "fake", build)
    kinds = (Kind.KILL, Kind.CRASH, Kind.JOIN, Kind.SILENT)
    trace = Trace(1.5, tuple(Event(0.1 * (1 + i), kind, 1 + i) for i, kind in enumerate(kinds)))
    run = play.play("fake", play.Setting(1000, 0.1, 5, patience=0.3), trace, 1)
    assert made[0].struck == [("kill", "a"), ("crash", "b"), ("join", ""), ("silence", "b")]
    assert run.whole_restarts == made[0].restarts >= 1 and made[0].closed and made[0].joins == 1
    assert run.account is not None and [seen.kind for seen in run.account.seen] == list(kinds)


def account(gap: float, mean: float, *seen: Seen, useful: int = 90) -> Account:
    return Account(10.0, useful, gap, mean, seen)


RUNS = [
    Run("ddpjob", 80_000, 0.1, 1, 0.5, account(0.1, 0.1, Seen(Kind.KILL, 0.2, 1), Seen(Kind.JOIN, 9.0, 0))),
    Run("torchft", 80_000, 0.1, 1, 1.5, account(0.1, 0.125, Seen(Kind.KILL, 5.0, 0), useful=40)),
    Run("stock", 80_000, 0.1, 1, 2.5, account(0.1, 0.1, Seen(Kind.KILL, 60.0, 0, recovered=False)), 1),
    Run("stock", 500_000_000, 0.1, 1, 0.7, None, 0, "lost: no node is left"),
]


def test_runs_can_be_saved_loaded_tabulated_and_drawn(tmp_path: Path) -> None:
    path, picture = tmp_path / "runs.jsonl", tmp_path / "trace.png"
    for run in RUNS:
        report.append(path, run)
    assert report.read(path) == RUNS
    text = report.table(RUNS)
    assert (
        "| 80 kB | 0.1 | ddpjob | 1 | 2 | 90.00% / 90.00% | 100.0 | 0.20 / 0.20 | 9.00 / 9.00 | 0.5 / 1 | 0 |" in text
    )
    assert "60.00 / 60.00; 1 not recovered" in text and "did not train" in text
    assert "load average 0.5 to 2.5, median 1.1" in text
    document = tmp_path / "page.md"
    names = ("trace", "effective-time")
    document.write_text("".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in names))
    # A DDPJob that recovered from all failures is fine, no matter what happened to other systems.
    assert command.main(["--from", str(path), "-o", str(picture), "--table", str(document)]) == 0
    assert picture.stat().st_size > 10_000 and text in document.read_text()


def test_a_ddpjob_that_does_not_recover_fails_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.append(tmp_path / "runs", Run("ddpjob", 1, 0.1, 1, 0.5, None, 0, "lost"))
    assert command.main(["--from", str(tmp_path / "runs")]) == 1
    with pytest.raises(SystemExit):
        command.main(["--systems", "ddpjob,slurm"])
    assert "unknown: slurm; choose from ddpjob," in capsys.readouterr().err


def test_effective_time_follows_from_pause_repeats_and_cost() -> None:
    parts = parts_of(RUNS[:1], ideal=0.1)
    assert parts == Parts(0.2, 1.0, 0.0, 0.1), "a join does not count as a failure"
    costly = parts_of(RUNS[1:2], ideal=0.1)
    assert costly is not None and costly.cost == pytest.approx(0.2)
    one_an_hour = Parts(pause=30.0, repeated=60.0, cost=0.01, step=0.5)
    assert one_an_hour.effective(1000, node_days=1000 / 24) == pytest.approx(0.99 * math.exp(-60 / 3600))
    assert "| 80 kB | ddpjob | 0.20 | 1.0 | 0.100 | 0.0% |" in effective_time.table(RUNS, 264)
    rate = "one failure of the job every 6.3 h (1,000 nodes) to 0.4 h (16,000 nodes)."
    assert f"One failure per node every 264 days is {rate}" in effective_time.table(RUNS, 264)


def test_the_formula_is_the_mean_of_a_simulated_job() -> None:
    """Failures occur at random moments, even during pauses, as the formula assumes."""
    parts, nodes, days = Parts(pause=200.0, repeated=100.0, cost=0.0, step=1.0), 1000, 5.0
    random_, rate, work, clock = random.Random(1), nodes / (days * 86_400), 0.0, 0.0
    for _ in range(20_000):
        until_failure = random_.expovariate(rate)
        work += until_failure
        clock += until_failure
        while (again := random_.expovariate(rate)) < 300.0:
            clock += again
        clock += 300.0
    assert work / clock == pytest.approx(parts.effective(nodes, days), rel=0.02)


def test_torchft_is_left_out_with_the_reason_if_it_cannot_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchft_packages, "FOLDER", tmp_path / "venv")

    def refuse(folder: Path, python: Path) -> None:
        raise torchft_packages.NotInstalled("torchft cannot be installed: no network")

    monkeypatch.setattr(torchft_packages, "_install", refuse)
    assert command._installed(["ddpjob", "torchft", "torchft-tuned", "stock"]) == ["ddpjob", "stock"]
    assert "skipped: torchft cannot be installed: no network" in capsys.readouterr().err


def test_a_failed_installation_reports_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'no room on the disk' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(torchft_packages, "FOLDER", tmp_path / "venv")
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(torchft_packages.NotInstalled, match="torchft cannot be installed: no room on the disk"):
        torchft_packages.find_python()
