"""The interface of a sink, and the facts about a run that a sink receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpjob_trainer.atomic_files import write_atomically


@dataclass(frozen=True)
class Run:
    """The facts about a run that its sinks receive.

    The run resumes after step `step`, and has had `restarts` restarts so far.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    step: int
    restarts: int


class Sink(Protocol):
    """A destination for named numbers. Its methods may be slow, and may raise any error."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Accept the numbers after global step `step`."""

    def close(self, complete: bool) -> None:
        """End this incarnation of the run. `complete` states whether training is complete."""


def kept(path: Path, make: Callable[[], str]) -> str:
    """Return a run's id at a service.

    The id is kept in `path`, so that a restart continues the same run at the service. At the first
    start, the id is the result of `make`. Raises OSError.
    """
    if path.exists() and (identity := path.read_text().strip()):
        return identity
    identity = make()
    write_atomically(path, f"{identity}\n".encode())
    return identity
