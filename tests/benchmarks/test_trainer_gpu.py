"""The benchmark of the trainer on a GPU keeps its budget, and its clock counts the right time. Here
it runs on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.trainer import __main__, gpu, step_timer


def _run(monkeypatch: pytest.MonkeyPatch, record: Path, *options: str) -> tuple[int, list[gpu.Figures]]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["benchmarks.trainer", "--gpu", f"--json={record}", *options])
    code = __main__.main()
    return code, json.loads(record.read_text())["rows"]


@pytest.mark.slow
def test_the_gpu_command_measures_the_plain_loop_and_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->\n")
    options = ["--device=cpu", "--cases=cifar-eager", "--workers=1", f"--table={document}"]
    code, rows = _run(monkeypatch, tmp_path / "found.json", *options)
    table = capsys.readouterr().out
    assert code == 0, table
    assert [row["by"] for row in rows] == ["plain loop", "trainer"]
    for row in rows:
        assert row["images_per_second"] == pytest.approx(8 * 1000 / row["step_ms"]) and 0 < row["busy"] <= 1
        assert f"| cifar, tiny, 8 per step, eager | {row['by']} | {row['images_per_second']:,.0f} |" in table
    assert table.strip() in document.read_text()


def test_without_a_gpu_no_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows = _run(monkeypatch, tmp_path / "found.json", "--cases=cifar-eager,resnet50-eager")
    assert code == 1
    assert [row.get("not_run", row["by"]) for row in rows] == [
        *["torch does not find a GPU on this machine"] * 4,
        gpu.PUBLISHED[0],
    ]


def _row(name: str, program: str, seconds: float) -> gpu.Row:
    return gpu.Row(name, name, "trainer", seconds, (sys.executable, "-c", program))


def test_rows_that_fail_or_do_not_fit_are_not_run_and_the_next_rows_are() -> None:
    figures = {"images_per_second": 8.0, "step_ms": 1000.0, "busy": 0.5}
    good = f"print({json.dumps(figures)!r}, flush=True)"
    rows = [
        _row("hangs", "import time; time.sleep(600)", 0.5),
        _row("fails", "raise ValueError('bad | value')", 10),
        _row("large", good, 1000),
        _row("busy", good.replace("0.5", "1.5"), 10),
        _row("silent", "pass", 10),
        _row("crashes later", f"{good}; raise SystemExit('lost')", 10),
        _row("good", good, 10),
    ]
    began = time.monotonic()
    found = {row.name: figures for row, figures in gpu.measure(rows, 300)}
    assert time.monotonic() - began < 120
    assert found["hangs"] == {"not_run": "stopped after 2 s"}
    assert found["fails"] == {"not_run": "exit code 1: ValueError: bad value"}
    assert found["large"]["not_run"].startswith("takes about 1000 s, but only 2")
    assert found["busy"]["not_run"].startswith("ValueError: implausible figures")
    assert found["silent"] == {"not_run": "ValueError: no figures were printed"}
    assert found["crashes later"] == {**figures, "ended": "exit code 1: lost"}
    assert found["good"] == figures
    assert (
        gpu.line(rows[1], found["fails"], None)
        == "| fails | trainer | not run (exit code 1: ValueError: bad value) |  |  |  |"
    )
    assert gpu.line(rows[6], figures, 4.0) == "| good | trainer | 8 | 2.00 | 1000.00 | 50% |"


def test_the_budget_ends_a_row_before_its_own_limit() -> None:
    ((_, figures),) = gpu.measure([_row("hangs", "import time; time.sleep(600)", 1)], 2.4)
    assert figures == {"not_run": "stopped after 2 s"}


def test_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now)
    timer = step_timer.StepTimer(2, 4, 0, batch=8)
    for step in range(1, 7):
        now += 60 if step <= 2 else 0.5
        timer.on_step(step)
    assert timer.figures["step_ms"] == pytest.approx(500) and timer.figures["images_per_second"] == pytest.approx(16)
    assert gpu.read_steps(capsys.readouterr().out) == timer.figures


def test_kernels_that_overlap_count_once() -> None:
    events = [
        {"cat": "kernel", "ts": 100.0, "dur": 50.0},
        {"cat": "kernel", "ts": 120.0, "dur": 20.0},
        {"cat": "gpu_memcpy", "ts": 140.0, "dur": 30.0},
        {"cat": "cuda_runtime", "ts": 0.0, "dur": 900.0},
        {"cat": "kernel", "ts": 300.0, "dur": 10.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert step_timer.working_seconds(events) == pytest.approx(80e-6)


def test_airbench_runs_a_few_times_and_its_warm_up_does_not_count(tmp_path: Path) -> None:
    script = tmp_path / "airbench94_muon.py"
    (tmp_path / "cifar-10-batches-py").mkdir()
    script.write_text(
        "import os\n"
        "assert os.path.isdir('cifar10/cifar-10-batches-py')\n"
        "print('|  run     |  epoch   |  train_acc  |  val_acc   |  tta_val_acc   |  time_seconds  |')\n"
        "print('|  warmup  |    eval  |             |    0.1000  |       0.1000   |      60.0000   |')\n"
        "for run in range(200):\n"
        "    print(f'|  {run}  |  1  |  0.5  |  0.5  |    |  0.3  |')\n"
        "    print(f'|    |    eval  |  0.9800  |  0.9300  |  {0.93 + run / 100:.4f}  |  {2.5 + run:.4f}  |')\n"
    )
    given = argparse.Namespace(airbench=script, cifar=tmp_path)
    rows = [row for row in gpu.plan_airbench(given, tmp_path, 30, "") if row.command and row.read is gpu.read_airbench]
    ((_, figures),) = gpu.measure(rows, 60)
    assert figures == {"accuracy": pytest.approx(0.94), "seconds": pytest.approx(3.5)}
    (without,) = (
        row
        for row in gpu.plan_airbench(argparse.Namespace(airbench=None, cifar=None), tmp_path, 30, "")
        if row.read is gpu.read_airbench
    )
    assert without.why_not == "no --airbench"
