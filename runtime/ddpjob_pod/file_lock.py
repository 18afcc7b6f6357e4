"""Locks a file, so that only one rank of a node at a time does shared work, such as a download."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path, *, strict: bool = False) -> Iterator[None]:
    """Hold a lock on a file while this `with` block runs, so that only one process at a time does
    the work.

    The file is created if it does not exist. Raises OSError if the file cannot be opened.

    If the file system does not support locks, `strict` decides what happens. With `strict`, OSError
    is raised. Without `strict`, the block runs unlocked, so several processes could do the work at
    once.
    """
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if strict:
                text = f"{error.strerror}: the folder must be on a file system that supports locks"
                raise OSError(error.errno, text, str(lock)) from None
        yield
