"""The id by which a service knows a run, kept in the run's folder so that a restart goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddpjob_trainer.atomic import write_atomically


def kept(path: Path, make: Callable[[], str]) -> str:
    """What `path` holds; what `make` gives, written there, at a first start. Raises OSError."""
    if path.exists() and (identity := path.read_text().strip()):
        return identity
    identity = make()
    write_atomically(path, f"{identity}\n".encode())
    return identity
