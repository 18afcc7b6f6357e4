"""What a sink is, and what it knows of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpjob_trainer.atomic_files import write_atomically


@dataclass(frozen=True)
class Run:
    """What sinks know of a run.

    Its folder, name and configuration, the step after which it resumes, and the number of restarts before.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    step: int
    restarts: int


class Sink(Protocol):
    """Takes numbers by name. Methods may raise anything and may be slow."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after global step `step`."""

    def close(self, complete: bool) -> None:
        """This incarnation of the run ends; `complete`: its training is complete."""


def kept(path: Path, make: Callable[[], str]) -> str:
    """The service's id of a run, kept in `path` so that a restart continues the same run.

    At a first start it is what `make` returns. Raises OSError.
    """
    if path.exists() and (identity := path.read_text().strip()):
        return identity
    identity = make()
    write_atomically(path, f"{identity}\n".encode())
    return identity
