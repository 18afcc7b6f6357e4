"""The benchmark of the trainer's speed measures real runs of both loops. Here, each takes only a
few steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from machine import slowness

from benchmarks.trainer import bookkeeping, bookkeeping_rank, elasticity, made_data, pipelines, step_timer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar-small-2", "jpeg-input"])
def test_each_case_measures_both_the_plain_loop_and_the_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_data, "DIFFERENT", 8)
    case = replace(next(case for case in pipelines.CASES if case.name == name), batch=8, warm=1, steps=4)
    found = pipelines.measure([case], 1, 2)
    ((plain, trained),) = found[name]
    assert min(plain.images, plain.processor, trained.images, trained.processor) > 0
    text = pipelines.table([case], found, 2)
    ratio, spent = trained.images / plain.images, trained.processor / plain.processor
    assert f"| {case.meaning}, 8 per step | {plain.images:.0f} | {trained.images:.0f} | {ratio:.2f} (" in text
    assert f"| {plain.processor:.0f} ms | {trained.processor:.0f} ms | {spent:.2f} (" in text


def test_the_slowest_ranks_speed_and_all_ranks_processor_time_count() -> None:
    lines = [json.dumps({"images_per_second": speed, "processor_ms": spent}) for speed, spent in ((80, 30), (90, 20))]
    output = "\n".join(["epoch 1", *lines])
    assert pipelines.read_speed(output, 2) == pipelines.Speed(80, 50)
    with pytest.raises(ValueError, match="2 of 3 ranks printed figures"):
        pipelines.read_speed(output, 3)


WORKER = """
import time
for end in (0.3, 0.6):
    input()
    while time.process_time() < end:
        pass
    print(flush=True)
input()
"""


def test_processor_time_includes_the_data_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """The worker works for 0.3 s before the counted step, and for 0.3 s in it."""
    timer = step_timer.StepTimer(1, 1, 0, batch=8)
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin and worker.stdout
        for step in (1, 2):
            worker.stdin.write(b"\n")
            worker.stdin.flush()
            worker.stdout.readline()
            timer.on_step(step)
        worker.kill()
    assert timer.figures["processor_ms"] == pytest.approx(300, abs=100)
    assert pipelines.read_speed(capsys.readouterr().out, 1).processor == timer.figures["processor_ms"]


def test_generated_jpegs_are_as_large_as_imagenets(tmp_path: Path) -> None:
    made_data.jpegs(tmp_path, 12)
    sizes = [path.stat().st_size for path in (tmp_path / "train").rglob("*.JPEG")]
    assert len(sizes) == 12 and 25_000 < sum(sizes) / len(sizes) < 120_000


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_time_is_attributed_to_the_innermost_part_without_the_cost_of_the_clock() -> None:
    meter = bookkeeping_rank.Meter()
    with meter.part("outer"):
        _burn(0.05)
        with meter.part("inner"):
            _burn(0.1)
        _burn(0.05)
    _burn(0.03)
    found = meter.take()
    assert found["outer"] == pytest.approx(0.1, abs=0.02) and found["inner"] == pytest.approx(0.1, abs=0.02)
    assert found[bookkeeping.REST] == pytest.approx(0.03, abs=0.02)
    began = time.thread_time()
    for _ in range(2000):
        with meter.part("empty"):
            pass
    whole, found = time.thread_time() - began, meter.take()
    assert found["empty"] < whole / 4, "the cost of reading the clock is subtracted"


def test_all_work_except_the_model_and_its_input_counts_as_bookkeeping() -> None:
    seconds = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1, "batches": 0.5, "ledger": 0.002, "bare loop": 1.0}
    parts = seconds | {bookkeeping.REST: 0.003, bookkeeping.OTHER_THREADS: 0.001}
    found = bookkeeping.Found(bookkeeping.CASES[0], parts)
    assert found.share == pytest.approx(0.006) and found.model == pytest.approx(1.0)
    text = bookkeeping.table([found])
    assert "| ledger | 2.00 ms, 0.20% |" in text and "| **all bookkeeping** | **6.00 ms, 0.60%** |" in text


@pytest.mark.slow
def test_bookkeeping_in_real_steps_is_attributed_to_its_parts_and_is_small() -> None:
    """Each rank's bookkeeping is attributed to its parts, and is small compared with a step of
    ResNet-18 (5 s on one thread).
    """
    arguments = ("train.epochs=2", "model.width=8", "data.batch=128")
    case = replace(bookkeeping.CASES[0], arguments=arguments, ranks=2, warm=2, steps=20)
    found = bookkeeping.measure(case, 1)
    charged = {part for part, seconds in found.parts.items() if seconds > 0}
    assert {"ledger", "dealing", "progress reports", "stop flag", "step clock", "seeds"} <= charged
    assert 0.3 < found.model / found.bare < 3
    assert 0 < sum(found.kept.values()) < 0.05 * slowness()


@pytest.mark.slow
def test_a_joining_rank_that_gets_no_micro_batch_can_be_measured() -> None:
    """A run that grows from 2 to 3 ranks may have such a rank. A new run with these settings would
    be refused.
    """
    small = ["model.name=small_cnn", "model.norm=batch", "model.width=4"]
    assert elasticity._busiest(3, 2, 32, ["whole", *small]) > 0


def test_relative_throughput_is_the_initial_time_divided_by_the_current_time() -> None:
    found = [
        elasticity.Cost(4, 3, 32, kind, seconds, 0.9)
        for kind, seconds in zip(elasticity.KINDS, (1.8, 1.2, 1.0), strict=True)
    ]
    text = elasticity.table(found)
    assert "| 32 | 4 -> 3 | 75% | 50% | 75% | 90% |" in text
    assert "A step of the busiest rank took 0.90 s with 4 ranks and 32 images each, 1.20 s shared by 3." in text
