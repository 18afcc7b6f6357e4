"""Which tests see the machine's GPUs, and which see torch."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    return request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_torch_can_be_hidden_as_if_it_were_not_installed(conftest: Any) -> None:
    finder = conftest.Without(frozenset({"json", "none"}))
    assert [finder.find_spec(name) for name in ("json", "json.decoder", "none")] == [None] * 3
    assert finder.find_spec("jsonschema").name == "jsonschema"
    assert list(finder.find_distributions()), "importlib.metadata uses the finder too"


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
def test_gpu_tests_run_alone_see_the_gpus(
    folder: str, chosen: list[str], hidden: bool, conftest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    conftest.pytest_configure(SimpleNamespace(args=chosen, invocation_params=SimpleNamespace(dir=TESTS / folder)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0,1")
