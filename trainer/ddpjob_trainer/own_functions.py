"""Loads users' functions and classes that the configuration names as `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpjob_trainer.errors import ConfigError, TrainerError, first_line


def load_function(key: str, name: str, kinds: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the function or class named by `key`.

    `kinds` lists other words that may precede the colon in that key. They improve the hint. Raises
    ConfigError with the remedy.
    """
    where, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        near = difflib.get_close_matches(where, kinds, n=1)
        hint = f"did you mean {near[0]}:{attribute}?" if near else "put its folder on PYTHONPATH (in a job: its image)"
        raise ConfigError(f"{key}={name}: {error}; {hint}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {where}:{near[0]}?" if near else ""
        raise ConfigError(f"{key}={name}: {where} has no function {attribute!r}{hint}")
    function: Callable[..., Any] = found
    return function


def check_name(key: str, name: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless `name` is one of `known` or has the form package.module:name."""
    if ":" in name or name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {str(near[0])!r}?" if near else ""
    raise ConfigError(f"{key}: {name!r} is unknown; use {', '.join(known)} or package.module:function{hint}")


@contextmanager
def explain(key: str, name: str, call: str, kind: type[TrainerError] = ConfigError) -> Iterator[None]:
    """Turn an exception of the user's code into a `kind` that names the key, call and line."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise kind(
            f"{key}={name}: {call} raised {type(error).__name__} in {Path(last.filename).name}, line {last.lineno}:"
            f" {first_line(error)}; correct it, and start again"
        ) from error
