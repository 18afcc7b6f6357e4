"""A function as a script: everything that the function needs is sent with it. What cannot be sent
is reported before anything is created.
"""

from __future__ import annotations

import builtins
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.function_source import script_of

OUTSIDE = 3


def whole(lr: float, names: list[str] | None = None, *, times: int = 1) -> None:
    """A function with nested classes and functions, comprehensions, a global variable and
    multi-line strings.
    """
    import json

    global COUNTED, os
    import os

    COUNTED = times
    COUNTED += os.EX_OK

    class Net:
        size = COUNTED

        def __init__(self) -> None:
            super().__init__()
            self.widths = [json.dumps(self.size + width) for width in range(3)]

    def more(number: float) -> float:
        return number * lr

    text = """one
two"""
    print(Net().widths, more(2), text.splitlines(), names, __name__)


def annotated(path: Path) -> None:
    print(path)


class Trainer:
    def fit(self) -> None:
        print(self)


def wrapper(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def inner() -> None:
        function()

    return inner


@wrapper
def decorated() -> None:
    print("decorated")


def mark(function: Callable[..., None]) -> Callable[..., None]:
    return function


@mark
def marked() -> None:
    print("marked")


def uses_a_global() -> None:
    def below() -> int:
        return OUTSIDE

    print(below(), pytest)


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> None:
    print("never")


def run(script: str, folder: Path) -> str:
    (folder / "function.py").write_text(script)
    return subprocess.run([sys.executable, folder / "function.py"], capture_output=True, text=True, check=True).stdout


def test_a_function_runs_in_another_process_with_its_arguments(tmp_path: Path) -> None:
    script = script_of(whole, {"lr": 0.5, "names": ["é", "'\"\\\n"], "times": 2})
    assert run(script, tmp_path) == "['2', '3', '4'] 1.0 ['one', 'two'] ['é', '\\'\"\\\\\\n'] __main__\n"


def test_a_nested_function_keeps_its_multi_line_strings(tmp_path: Path) -> None:
    def nested(count: int = 2) -> None:
        print(repr("""a
  b"""), count)  # fmt: skip

    assert run(script_of(nested, {}), tmp_path) == "'a\\n  b' 2\n"


def test_annotations_that_python_does_not_evaluate_are_not_evaluated(tmp_path: Path) -> None:
    # This file imports `annotations` from __future__.
    assert run(script_of(annotated, {"path": "/x"}), tmp_path) == "/x\n"


def test_annotations_that_python_evaluates_must_be_available() -> None:
    from linecache import cache

    lines = ["def train(path: Path = HERE) -> None:\n", "    print(path)\n"]
    cache["<cell 1>"] = (1, None, lines, "<cell 1>")  # IPython registers a notebook's cells this way.
    made: dict[str, Any] = {"Path": Path, "HERE": 1, "__name__": "cell"}
    exec(compile("".join(lines), "<cell 1>", "exec", dont_inherit=True), made)
    with pytest.raises(
        Mistake, match="its decorators, defaults or annotations use HERE, Path, defined outside the function"
    ):
        script_of(made["train"], {})


def closure() -> Callable[..., None]:
    kept = 1

    def inner() -> None:
        print(kept)

    return inner


def changes_around() -> Callable[..., None]:
    kept = 1

    def inner() -> None:
        nonlocal kept
        kept += 1

    return inner


def counts() -> None:
    global OUTSIDE
    OUTSIDE += 1


def declares() -> None:
    global OUTSIDE
    print(OUTSIDE)


def shows() -> None:
    display(1)  # type: ignore[name-defined]  # noqa: F821


def runs_a_command() -> None:
    get_ipython().system("ls")  # type: ignore[name-defined]  # noqa: F821


def timed() -> None:
    print("fast")


timed = functools.wraps(timed)(lambda: None)


NO_SOURCE: dict[str, Any] = {}
# A separate name, because Python 3.13 keeps the text of `python -c` as "<string>", and pytest-xdist
# starts its workers that way.
exec(compile("def typed(): pass", "<typed>", "exec"), NO_SOURCE)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: None, "a lambda has no source of its own"),
        (Trainer().fit, r"Trainer\.fit: a method needs its class"),
        (Trainer.fit, r"Trainer\.fit: a method needs its class"),
        (Trainer, "Trainer: not a function written with def"),
        (print, "print: not a function written with def"),
        (functools.partial(whole), "not a function written with def"),
        (closure(), "inner uses kept, defined outside the function. Only the function itself"),
        (changes_around(), "inner uses kept, defined outside the function. Only the function itself"),
        (counts, "counts uses OUTSIDE, defined outside the function"),
        (declares, "declares uses OUTSIDE, defined outside the function"),
        (shows, "shows uses display, defined outside the function"),
        (runs_a_command, "runs_a_command uses get_ipython, defined outside the function"),
        (timed, "timed: decorators are not copied to the job; pass the function without its decorator"),
        (uses_a_global, "uses_a_global uses OUTSIDE, pytest, defined outside the function"),
        (decorated, "decorated: decorators are"),
        (marked, "its decorators, defaults or annotations use mark, defined outside"),
        (generator, "a coroutine or generator function does not run it"),
        (coroutine, "a coroutine or generator function does not run it"),
        (NO_SOURCE["typed"], "its source cannot be read"),
    ],
)
def test_objects_that_cannot_be_sent_are_reported(
    function: Callable[..., object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("display", "get_ipython"):  # as IPython does
        monkeypatch.setattr(builtins, name, print, raising=False)
    with pytest.raises(Mistake, match=said):
        script_of(function, {})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "missing a required argument: 'lr'; args must be its keyword arguments"),
        ({"lr": 1, "rl": 1}, "got an unexpected keyword argument 'rl'"),
        ({"lr": {1}}, "the argument lr cannot be written as JSON: Object of type set"),
        ({"lr": {1: 2}}, "the argument lr has the key 1, but JSON keys must be strings; pass a list of pairs"),
        ({"lr": [{"a": ({None: 2},)}]}, "the argument lr has the key None"),
    ],
)
def test_arguments_that_do_not_match_the_function_are_reported(args: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        script_of(whole, args)
