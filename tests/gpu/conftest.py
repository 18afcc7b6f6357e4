"""Marks all tests here as `gpu`, skips them without a GPU, and writes the tests, the device and
their figures to build/gpu-results.json.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE, RESULTS = Path(__file__).parent, Path(__file__).parents[2] / "build" / "gpu-results.json"
_outcomes: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.slow)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=_why()))


def _why() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "no CUDA device is visible to torch" + " (make test-gpu: other tests hide them)" * hidden


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """Return a function that records a figure with the test's outcome."""

    def keep(name: str, value: Any) -> None:
        request.node.user_properties.append((name, value))

    return keep


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/gpu/" not in report.nodeid or (report.when != "call" and report.outcome == "passed"):
        return
    found = _outcomes.setdefault(report.nodeid, {})
    found["outcome"] = report.outcome
    if report.user_properties:
        found["figures"] = dict(report.user_properties)
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        found["reason"] = report.longrepr[2].removeprefix("Skipped: ")
    if report.outcome == "failed":
        found["reason"] = report.longreprtext[-2000:]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _outcomes or hasattr(terminalreporter.config, "workerinput"):
        return
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    passed, skipped, failed = (
        sum(found.get("outcome") == outcome for found in _outcomes.values())
        for outcome in ("passed", "skipped", "failed")
    )
    content = {
        "devices": devices,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else None,
        },
        "tests": _outcomes,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    on = f"{len(devices)} x {devices[0]}" if devices else "this machine, which has no CUDA device"
    counts = f"{passed} passed, {failed} failed, {skipped} skipped"
    terminalreporter.write_line(f"GPU checks on {on}: {counts}; {RESULTS.relative_to(HERE.parents[1])}")
