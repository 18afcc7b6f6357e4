"""The GPU benchmark of snapshots, and of restarts from them: its arithmetic, and the cases that it
does not measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.recovery import copies, gpu, overhead
from benchmarks.recovery.copies import AUTO, EACH, NONE, Cost, Turn, compare, measured, table
from benchmarks.recovery.groups import NotRecovered, Shape
from benchmarks.recovery.step_log import Incarnation, StepLog


def test_a_turn_consists_of_only_its_own_steps_even_if_some_are_slow() -> None:
    incarnation = Incarnation(1, {0: [1.0, 9.0, 10.0, 11.0, 15.0]}, {}, {0: 1}, {0: [0.0, 5.0, 5.5, 6.0, 8.0]})
    assert measured(incarnation, 8.5, 3) == Turn(2.0, 1.0, 3)
    with pytest.raises(NotRecovered, match="increase --seconds"):
        measured(incarnation, 10.5, None)


def test_the_processor_time_of_a_rank_is_read_from_its_log(tmp_path: Path) -> None:
    line = '{"incarnation": 7, "rank": 0, "world": 1, "node": "n", "step": 4, "t": 1.0, "cpu": 2.5}\n'
    (tmp_path / "steps-n-1.jsonl").write_text(line)
    found = StepLog(tmp_path).refresh().incarnations[7]
    assert found.processor == {0: [2.5]} and found.last_step == 4


TURNS = {NONE: Turn(0.100, 0.010, None), AUTO: Turn(0.101, 0.0105, 7), EACH: Turn(0.120, 0.020, 1)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the settings of the turns that were run. Their results come from TURNS."""
    settings = list[str]()

    def take_turn(every: str, shape: Shape, options: tuple[str, ...], seconds: float) -> Turn:
        assert "--state=1000" in options and seconds == 2
        settings.append(every)
        return TURNS[every]

    monkeypatch.setattr(copies, "take_turn", take_turn)
    return settings


def test_each_turn_with_snapshots_is_between_two_turns_without(asked: list[str]) -> None:
    costs = compare(1000, 0.1, Shape(), 2, 2)
    assert asked == [NONE, AUTO, NONE, EACH, NONE, AUTO, NONE, EACH, NONE]
    assert [cost.every for cost in costs] == [AUTO, EACH] * 2
    assert (costs[0].wall, costs[1].processor) == (pytest.approx(0.01), pytest.approx(0.1))
    auto, each = table(costs, 2).splitlines()[2:4]
    assert auto == "| 1 kB | 0.1 | auto | 7 | 100.0 | +1.00% / +1.00% | +0.50% / +0.50% |"
    assert each == "| 1 kB | 0.1 | 1 | 1 | 100.0 | +20.00% / +20.00% | +10.00% / +10.00% |"


def test_the_overhead_of_snapshots_is_printed_and_written(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (page := tmp_path / "page.md").write_text("<!-- snapshots: begin -->\n<!-- snapshots: end -->\n")
    words = ["--snapshots", "--rounds=1", "--seconds=2", "--states=1e3", "--steps=0.1", f"--table={page}"]
    assert overhead.main(words) == 0 and asked == [NONE, AUTO, NONE, EACH, NONE]
    assert (printed := capsys.readouterr().out) and printed in page.read_text()


def test_without_a_gpu_the_benchmark_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda: "torch does not find a GPU on this machine")
    monkeypatch.setattr(gpu, "measure", None)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "not run: torch does not find a GPU on this machine\n"


def test_cases_that_exceed_the_time_limit_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def restart(state: int, step: float, every: str, *more: str) -> gpu.Restart:
        clock[0] += 40
        return gpu.Restart(state, every, 0.8, 1 if every == EACH else 50)

    def fake_compare(state: int, step: float, shape: Shape, rounds: int, seconds: float, *more: str) -> list[Cost]:
        clock[0] += 100
        return [Cost(state, step, EACH, TURNS[EACH], TURNS[NONE])]

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(gpu, "restart", restart)
    monkeypatch.setattr(gpu, "compare", fake_compare)
    text = gpu.measure([1e8, 5e8], 0.05, 6.0, 300.0, "--cuda")
    assert "| 100 MB | 1 | 0.80 | 1 |" in text and "| 100 MB | none | 0.80 | 50 |" in text
    assert text.endswith("Left out, because 300 s were over: 500 MB: restart with none, 500 MB: copies.")
    assert clock[0] <= 300


def test_a_restart_counts_every_repeated_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(folder=tmp_path, nodes={"node-0-0": None}, log=StepLog(tmp_path))
    group.wait = lambda what, ready, seconds: ready() or pytest.fail(what)
    line = '{{"incarnation": {}, "rank": 0, "world": 1, "node": "n", "step": {}, "t": {}, "cpu": 0}}\n'
    old, new, now = tmp_path / "steps-node-0-0-11.jsonl", tmp_path / "steps-node-0-0-12.jsonl", [100.0]
    old.write_text("".join(line.format(1, step, step / 10) for step in range(1, 991)))
    group.log.refresh()
    (tmp_path / "checkpoint.pt").touch()

    @contextmanager
    def keeping(every: str, shape: Shape, options: tuple[str, ...]) -> Iterator[SimpleNamespace]:
        assert every == NONE and "--save-seconds=5.0" in options
        yield group

    def kill_worker(folder: Path, node: str) -> bool:
        assert node == "node-0-0"
        new.write_text(line.format(2, 951, 102.0) + line.format(2, 952, 102.1))
        now[0] = 102.3
        return True

    monkeypatch.setattr(gpu, "keeping", keeping)
    monkeypatch.setattr(gpu, "kill_worker", kill_worker)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(time=lambda: now[0], sleep=lambda seconds: None))
    found = gpu.restart(1000, 0.1, NONE)
    assert found.repeated == 40 and found.pause == pytest.approx(2.0)
