"""The benchmark of the trainer's speed measures real runs of both loops; here a few steps of each."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.trainer import bookkeeping, made_data, pipelines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar-input", "jpeg-input"])
def test_a_case_measures_the_plain_loop_and_the_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_data, "DIFFERENT", 8)
    case = replace(next(case for case in pipelines.CASES if case.name == name), batch=8, warm=1, steps=4)
    found = pipelines.measure([case], 1, 1)
    ((plain, trained),) = found[name]
    assert plain > 0 and trained > 0
    assert f"| {case.meaning}, 8 per step | {plain:.0f} | {trained:.0f} | {trained / plain:.2f} (" in pipelines.table(
        [case], found, 1
    )


def test_made_jpegs_are_as_large_as_imagenets(tmp_path: Path) -> None:
    made_data.jpegs(tmp_path, 12)
    sizes = [path.stat().st_size for path in (tmp_path / "train").rglob("*.JPEG")]
    assert len(sizes) == 12 and 25_000 < sum(sizes) / len(sizes) < 120_000


def test_overhead_is_the_median_of_the_turns() -> None:
    text = bookkeeping.table([(0.100, 0.101), (0.100, 0.103), (0.100, 0.102)], 32)
    assert "| 100.00 | 102.00 | +2.00% (" in text


def test_a_turn_measures_the_time_of_a_step_and_freezes_the_process_again(tmp_path: Path) -> None:
    times = tmp_path / "times"
    write = f"open({str(times)!r}, 'a').write(f'{{n}} {{time.time()}}\\n')"
    script = f"import time\nfor n in range(100000):\n time.sleep(0.01)\n {write}"
    process = bookkeeping._start(["-c", script])
    try:
        bookkeeping._wait_for_steps(process, lambda: bookkeeping._bare_times(times))
        step = bookkeeping._turn(process, lambda: bookkeeping._bare_times(times), 2.0)
        assert 0.01 < step < 0.5
        time.sleep(0.2)
        size = times.stat().st_size
        time.sleep(0.3)
        assert times.stat().st_size == size, "frozen"
    finally:
        bookkeeping.kill_all(process)
