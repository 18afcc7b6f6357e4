"""Loads users' functions and classes that the configuration names as `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpjob_trainer.errors import ConfigError, TrainerError, first_line

_OTHERS = (f"{Path(__file__).parent}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
"""Folders of code that does not belong to the user. Installed packages do not belong to the user
either, but they are recognized by the folder name site-packages.
"""


def load_function(key: str, name: str, kinds: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the function or class that `name` refers to.

    `name` is a value of the configuration key `key`. `kinds` are words with which other values of
    this key may begin. If the module does not exist, the error suggests the most similar of these
    words. Raises ConfigError with the remedy.
    """
    where, _, attribute = name.partition(":")
    if not where or not attribute:
        raise ConfigError(f"{key}={name}: must be package.module:name")
    with explain(key, name, f"importing {where}"):
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            # The user's module exists, but a module that it imports does not.
            if not f"{where}.".startswith(f"{error.name}."):
                raise
            near = difflib.get_close_matches(where, kinds, n=1)
            hint = (
                f"did you mean {near[0]}:{attribute}?"
                if near
                else "put the module's folder on PYTHONPATH (in a job, put the module into the image)"
            )
            raise ConfigError(f"{key}={name}: {error}; {hint}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {where}:{near[0]}?" if near else ""
        raise ConfigError(f"{key}={name}: {where} has no function {attribute!r}{hint}")
    function: Callable[..., Any] = found
    return function


@contextmanager
def explain(key: str, name: str, call: str, kind: type[TrainerError] = ConfigError) -> Iterator[None]:
    """Replace an exception from the user's code with an error that explains the exception.

    The error has the class `kind`, and names the key, the call and the line.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        file, line = _find_line(error)
        raise kind(
            f"{key}={name}: {call} raised {type(error).__name__} in {Path(file).name}, line {line}:"
            f" {first_line(error)}; correct it, and start again"
        ) from error


def _find_line(error: Exception) -> tuple[str, int | None]:
    """Return the file and line of the user's code where the error occurred.

    If no line belongs to the user's code, return the last line of the traceback.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OTHERS) and "-packages/" not in frame.filename]
    last = (own or frames)[-1]
    return last.filename, last.lineno
