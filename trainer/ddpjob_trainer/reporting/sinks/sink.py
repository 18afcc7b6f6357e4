"""The interface of a sink, and the facts that it gets about a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpjob_trainer.atomic_files import write_atomically


@dataclass(frozen=True)
class Run:
    """The facts about a run for its sinks.

    `step` is the one after which it resumes, and `restarts` the number of restarts so far.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    step: int
    restarts: int


class Sink(Protocol):
    """Takes numbers by name. Its methods may raise anything and may be slow."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers after global step `step`."""

    def close(self, complete: bool) -> None:
        """End this incarnation of the run; `complete` says whether its training is complete."""


def kept(path: Path, make: Callable[[], str]) -> str:
    """Return the service's id of a run, kept in `path` so that a restart continues the same run.

    At a first start it is the result of `make`. Raises OSError.
    """
    if path.exists() and (identity := path.read_text().strip()):
        return identity
    identity = make()
    write_atomically(path, f"{identity}\n".encode())
    return identity
