"""Writes files and folders that appear completely or not at all, even if a process or host dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ddpjob_pod.job_environment import JobEnvironment

Check = Callable[[], None]


@contextmanager
def replacing(path: Path, before_rename: Check | None = None) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `path` at the end of the context.

    The temporary file is next to `path`. At the end of the context, the temporary file is synced
    and renamed to `path`. Then the folder is synced. If `before_rename` is given, it is called
    after the content is synced and before the rename. If the body of the context or `before_rename`
    raises an exception, the old file is kept. Raises OSError.
    """
    # Process ids alone are not enough, because containers that share the folder usually have the
    # same process ids.
    writer = f"{JobEnvironment.read().host}.{os.getpid()}"
    temporary = path.parent / f".{path.name}.{writer}.tmp"
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
    """Write `content` to a new file that replaces `path`, as described in `replacing`."""
    with replacing(path, before_rename) as file:
        write_all(file, content)


def write_all(file: IO[bytes], content: bytes | memoryview) -> None:
    """Write the whole content to an unbuffered file. Raises OSError.

    A single call of the file's `write` accepts at most 2 GiB, so several calls may be necessary.
    """
    view = memoryview(content).cast("B")
    while len(view):
        view = view[file.write(view) :]


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names of its files survive a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove(path: Path) -> None:
    """Remove a file or folder. Raises OSError.

    A folder is renamed before its content is removed, so that no process sees a folder with only
    part of its content.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    doomed = path.rename(path.with_name(f".{path.name}.gone.tmp"))
    shutil.rmtree(doomed)


def discard(path: Path) -> None:
    """Remove a file or folder if possible. Errors are ignored, because the volume may be gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
