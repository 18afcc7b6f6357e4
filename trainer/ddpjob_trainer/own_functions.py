"""Loads users' functions that the configuration names as `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from ddpjob_trainer.errors import ConfigError


def load_function(key: str, name: str, kinds: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the function named by `key`.

    `kinds` lists other words that may precede the colon in that key, for a better hint. Raises
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
