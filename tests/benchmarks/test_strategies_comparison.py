"""The comparison of strategies: its figures, its chart, and the reasons for strategies that could
not run.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from benchmarks.strategies import cases, report, runs

pytestmark = pytest.mark.slow


def measured(*speeds: float) -> runs.Measured:
    return runs.Measured(list(speeds), 0.5, 9.0)


def test_the_comparison_writes_a_table_a_csv_file_and_a_chart(tmp_path: Path) -> None:
    shown = [case for case in cases.CASES if case.name in ("single", "dp", "ddp")]
    found = {
        "single": [measured(50.0, 25.0, 100.0)],
        "ddp": [measured(100.0), measured(200.0, 100.0)],
    }
    missing = {"dp": "needs two accelerators"}
    table = report.table(shown, found, missing, samples=100)
    # The median times are 2 s for single and 1 s for ddp. Samples per second are computed from the
    # median time.
    assert "| single | 2.00 | 1.00, 4.00 | 50 | 1.00 | 2.00 | 0.5000 | 9.0 |" in table
    assert "| ddp | 1.00 | 0.50, 1.00 | 100 | 0.50 | 1.00 | 0.5000 | 9.0 |" in table
    assert "Not measured: dp: needs two accelerators." in table
    report.write_csv(tmp_path / "all.csv", found, missing, 100)
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert [(row["strategy"], row["round"], row["epoch"]) for row in rows[3:6]] == [
        ("ddp", "1", "2"),
        ("ddp", "2", "2"),
        ("ddp", "2", "3"),
    ]
    assert rows[4]["seconds"] == "0.5" and rows[-1]["not_measured"] == "needs two accelerators"
    report.draw(tmp_path / "all.png", shown, found, missing, 100, "made up")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "all.png").stat().st_size > 10_000


def test_the_first_epoch_does_not_count_and_a_failure_is_reported_with_its_cause() -> None:
    single = next(case for case in cases.CASES if case.name == "single")
    tiny = ["data.size=40", "data.batch=20", "data.shape=1,8,8", "model.width=4"]
    result = runs.run(single, 1, tiny, epochs=3, timeout=240)
    assert len(result.speeds) == 2 and min(result.speeds) > 0 and 0 < result.loss < 10 and result.whole > 0
    with pytest.raises(runs.NotMeasured, match=r"model.width=5: must be a positive multiple of 4"):
        runs.run(single, 1, [*tiny, "model.width=5"], epochs=3, timeout=240)


def test_cases_that_cannot_run_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "horovod" not in path])
    monkeypatch.setattr(cases, "accelerators", lambda: 0)
    for name in [module for module in sys.modules if module.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    lacks = {case.name: case.lacks(2) for case in cases.CASES}
    assert "two accelerators" in lacks["dp"] and "install_horovod.py" in lacks["horovod"]
    assert "DeepSpeed is not installed" in lacks["deepspeed ZeRO-3"]
    assert lacks["single"] == lacks["ddp"] == lacks["ddp O2"] == ""
    monkeypatch.setattr(cases, "accelerators", lambda: 1)
    assert "needs 2 devices, but 1 are visible" in {case.name: case.lacks(2) for case in cases.CASES}["ddp"]
