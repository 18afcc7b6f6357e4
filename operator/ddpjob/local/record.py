"""A job's record on disk: who runs it, how it stands, and what other terminals ask of it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpjob.api.types import Json
from ddpjob.local.paths import JobFolder


class AlreadyRunning(Exception):
    """Another process runs this job."""


@contextmanager
def held(folder: JobFolder) -> Iterator[None]:
    """Holds the job for this process; the kernel lets go when it ends in any way. Raises AlreadyRunning, OSError."""
    descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _locked(descriptor):
            pid = folder.lock.read_text().strip()
            raise AlreadyRunning(f"job {folder.name} runs already (process {pid}); `ddpjob stop {folder.name}` ends it")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """A reader that asks who runs the job holds the lock for an instant, so that one refusal means nothing yet."""
    for _ in range(10):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


def runner(folder: JobFolder) -> int | None:
    """The process id of the `ddpjob run` that holds the job; None when nobody does."""
    try:
        with folder.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = folder.lock.read_text().strip()
        return int(text) if text.isdigit() else None
    return None


def write_record(folder: JobFolder, record: Json) -> None:
    """Replaces status.json; a reader sees the old one or the new one."""
    write_atomically(folder.status, json.dumps(record, indent=1))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def read_record(folder: JobFolder) -> Json | None:
    """status.json; None when the job was never run here. Raises ValueError for a file that is none of ours."""
    try:
        record: Any = json.loads(folder.status.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{folder.status} is damaged ({error}); remove it") from error
    if not isinstance(record, dict) or "metadata" not in record or "local" not in record:
        raise ValueError(f"{folder.status} is not a record of a job; remove it")
    return record


# --- requests of other terminals --------------------------------------------------------------------------------


def ask(folder: JobFolder, verb: str, subject: str, seconds: float = 10.0) -> bool:
    """Leaves a request for the job's runner; returns whether it was taken within `seconds`."""
    folder.requests.mkdir(exist_ok=True)
    path = folder.requests / f"{time.time_ns()}-{os.getpid()}.json"
    write_atomically(path, json.dumps({"verb": verb, "subject": subject}))
    deadline = time.monotonic() + seconds
    while path.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            return False
        time.sleep(0.05)
    return True


def requests(folder: JobFolder) -> list[tuple[Path, str, str]]:
    """(file, verb, subject) of every request that waits, oldest first. The file is removed when it was obeyed."""
    if not folder.requests.is_dir():
        return []
    found = []
    for path in sorted(folder.requests.glob("*.json")):
        body = json.loads(path.read_text())
        found.append((path, str(body["verb"]), str(body["subject"])))
    return found
