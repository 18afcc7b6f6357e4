"""The runtime on the oldest and the newest Python and torch, as rows of `make matrix`
(`scripts/matrix.py`).

The test suite's own environment is an additional row, because it runs all of tests/runtime.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "matrix.py"
    spec = importlib.util.spec_from_file_location("matrix", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up in sys.modules
    spec.loader.exec_module(module)
    return module


matrix = load()
LISTED = """\
torch (2.15.0)
Available versions: 2.15.0, 2.14.1, 2.14.0, 2.8.0, 2.6.0+cpu, 2.5.1, 1.13.1
  INSTALLED: 2.15.0
"""
MINORS = {(2, 6): "2.6.0", (2, 8): "2.8.0", (2, 14): "2.14.1", (2, 15): "2.15.0"}
OLDEST_TORCH = "2.6.0"


def run(row: object) -> None:
    result = matrix.run_row(row)
    if result.skipped_because:
        pytest.skip(result.skipped_because)
    print(matrix.table([result]))
    if not result.ok:
        # On a machine with far more work than CPUs, one worker in hundreds did not exit with its
        # group (torch 2.6 and 2.9). The cause is unknown, so the output contains the worker's
        # stacks. Only two failures in a row count as a defect.
        print(result.output)
        again = matrix.run_row(row)
        print(matrix.table([again]))
        assert again.ok, f"{result.output}\n--- again:\n{again.output}"


@pytest.mark.slow
def test_the_runtime_works_with_only_the_standard_library() -> None:
    run(matrix.Row("3.9"))


@pytest.mark.slow
def test_the_runtime_works_with_the_oldest_torch() -> None:
    run(matrix.Row("3.9", OLDEST_TORCH))


@pytest.mark.slow
def test_the_runtime_works_with_the_newest_torch() -> None:
    torch = pytest.importorskip("torch")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    newest = matrix.choose(False, torches=["newest"])
    if not newest:
        pytest.skip("the package registry returned no list of torch's versions")
    row = newest[-1]
    if (row.python, row.torch) == (own, torch.__version__.partition("+")[0]):
        pytest.skip(
            f"tests/runtime runs in this environment, which has the newest versions: Python {own}, torch {row.torch}"
        )
    run(row)


@pytest.mark.slow
def test_checkpoints_work_on_debian_12s_python() -> None:
    run(matrix.Row(matrix.TRAINER_PYTHON, trainer=True))


# ---- the command itself


def test_the_newest_patch_release_of_each_minor_version_from_2_6_on_has_a_row() -> None:
    assert matrix.newest_patches(LISTED) == MINORS
    assert matrix.newest_patches("") == {}


def test_the_newest_pre_release_of_torch_has_a_row_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "Available versions: 2.16.0.dev20261127+cpu, 2.16.0.dev20261126+cpu, 2.15.0\n"
    monkeypatch.setattr(matrix, "list_versions", lambda *_: listed)
    row = matrix.Row("3.13", "2.16.0.dev20261127", pre=True)
    assert matrix.pre_release("3.13", (2, 15)) == [row]
    assert matrix.pre_release("3.13", (2, 16)) == [], "this version has been released"
    failed = matrix.Result(row, passed=3, failed=1)
    assert failed.ok and not failed.went_well and "which may fail" in matrix.table([failed])


def test_the_oldest_and_newest_python_for_a_torch_version_are_chosen() -> None:
    wheels = {"3.9": {(2, 8): "2.8.0"}, "3.10": {(2, 8): "2.8.0"}, "3.13": {(2, 8): "2.8.0", (2, 9): "2.9.1"}}
    rows = [matrix.Row("3.9", "2.8.0"), matrix.Row("3.13", "2.8.0")]
    assert matrix.of_minor((2, 8), wheels, everything=False) == rows
    assert matrix.of_minor((2, 8), wheels, everything=True) == [rows[0], matrix.Row("3.10", "2.8.0"), rows[1]]
    assert matrix.of_minor((2, 9), wheels, everything=False) == [matrix.Row("3.13", "2.9.1")]


def test_a_missing_interpreter_skips_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    result = matrix.run_row(matrix.Row("3.99"))
    assert result.ok and result.skipped_because == "no python3.99 on PATH or in pyenv"
    assert "skipped: no python3.99" in matrix.table([result])


def test_a_missing_patch_release_skips_the_row_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    result = matrix.run_row(matrix.Row("3.99.1", trainer=True))
    assert result.ok and result.skipped_because.startswith("no Python 3.99.1 on PATH")


def test_an_interpreter_is_found_by_its_patch_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "versions" / "3.98.2" / "bin" / "python"
    found.parent.mkdir(parents=True)
    found.write_text(f"#!/bin/sh\necho 3.98.2 {found}\n")
    found.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert matrix.interpreter("3.98.2") == matrix.interpreter("3.98") == str(found)
    assert matrix.interpreter("3.98.20") is None and matrix.interpreter("3.98.1") is None


def test_failures_and_modules_that_cannot_be_imported_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"></testsuite></testsuites>')
    assert matrix.counts(report) == (4, 3, 3)
    assert not matrix.Result(matrix.Row("3.9"), *matrix.counts(report)).ok
    assert not matrix.Result(matrix.Row("3.9")).ok, "a row without a test proves nothing"


@pytest.mark.slow
def test_newer_syntax_fails_on_the_oldest_python(tmp_path: Path) -> None:
    """This proves that a row can fail, because Python 3.9 has no `match`."""
    test = tmp_path / "test_newer.py"
    test.write_text("def test() -> None:\n    match 1:\n        case 1:\n            pass\n")
    result = matrix.run_row(matrix.Row("3.9"), tests=[str(test)])
    if result.skipped_because:
        pytest.skip(result.skipped_because)
    assert not result.ok and "SyntaxError" in result.output
