"""Lets one process at a time do what the ranks of a node share, such as a download."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path, *, strict: bool = False) -> Iterator[None]:
    """Hold the lock of a file, which is created. Raises OSError if it cannot be.

    On a file system without locks, several processes do the same work, or with `strict` this
    raises OSError.
    """
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if strict:
                text = f"{error.strerror}: the folder must be on a file system that can lock files"
                raise OSError(error.errno, text, str(lock)) from None
        yield
