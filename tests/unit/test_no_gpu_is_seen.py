"""Which tests see the GPUs of the machine that they run on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parents[1]


def test_tests_run_on_the_cpu_on_any_machine() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("folder", "chosen", "hidden"),
    [
        ("..", ["tests/gpu"], False),
        ("..", ["tests/gpu/test_on_gpus.py::test_it"], False),
        ("gpu", ["test_on_gpus.py"], False),
        ("..", ["tests"], True),
        ("..", ["tests/gpu", "tests/trainer"], True),
        ("gpu", [], True),
    ],
)
def test_those_of_gpus_by_themselves_see_them(
    folder: str, chosen: list[str], hidden: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert conftest is not None
    conftest.pytest_configure(SimpleNamespace(args=chosen, invocation_params=SimpleNamespace(dir=TESTS / folder)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0,1")
