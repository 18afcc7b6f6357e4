"""Files and folders that are there whole or not at all, whatever instant a process or a machine dies at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

Check = Callable[[], None]


@contextmanager
def replacing(path: Path, before_rename: Check | None = None) -> Iterator[IO[bytes]]:
    """A temporary file beside `path`; at the end of the `with` it is synced, renamed to `path`, and the folder is synced.

    `before_rename`, if given, is called when the content is on disk; what it or the body raises keeps the old file. Raises OSError.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename()
        temporary.rename(path)
    except BaseException:
        discard(temporary)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, content: bytes, before_rename: Check | None = None) -> None:
    """As `replacing`, with all of the content at hand."""
    with replacing(path, before_rename) as file:
        write_all(file, content)


def write_all(file: IO[bytes], content: bytes | memoryview) -> None:
    """An unbuffered file takes at most 2 GiB at a time, and less when the disk is about to be full. Raises OSError."""
    view = memoryview(content).cast("B")
    while len(view):
        view = view[file.write(view) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder, which is never seen in part: it loses its name first. Raises OSError."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    going = path.rename(path.with_name(f".{path.name}.gone.tmp"))
    shutil.rmtree(going)


def discard(path: Path) -> None:
    """Remove a file or a folder if it is there and can be removed: on a volume that has gone, what is left behind is cleaned up later."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
