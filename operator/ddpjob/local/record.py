"""A job's record on disk: its status, the process that runs it, and requests to that process."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddpjob.api.job_spec import Json
from ddpjob.local import processes
from ddpjob.local.paths import JobFolder

_ENDING_SECONDS = 2.0


class AlreadyRunning(Exception):
    """Another process is already running this job."""


class RequestRefused(Exception):
    """The job's runner has refused a request. The message gives the reason."""


@contextmanager
def held(folder: JobFolder) -> Iterator[None]:
    """Hold the job's lock inside the `with` block.

    The kernel releases the lock when the process ends, even if the process is killed. Raises
    AlreadyRunning or OSError.
    """
    descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _locked(descriptor):
            pid = folder.lock.read_text().strip()
            raise AlreadyRunning(
                f"job {folder.name} is already running (process {pid}); run `ddpjob stop {folder.name}` to stop it"
            )
        os.ftruncate(descriptor, 0)
        # Write this process's id to the lock file without delay. A process that fails to lock the
        # job reports this id.
        os.write(descriptor, str(os.getpid()).encode())
        try:
            if parent := _unlocked_runner(folder):
                removed = f"{folder.path} was removed in the meantime; run `kill {parent}` to stop it"
                raise AlreadyRunning(f"job {folder.name} is already running (process {parent}), and {removed}")
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Try to lock the file, for up to 0.2 s.

    A single failed attempt does not mean that the job is running, because `runner` also holds the
    lock for an instant.
    """
    for _ in range(10):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


def _unlocked_runner(folder: JobFolder) -> int | None:
    """Return the id of a `ddpjob run` process that still runs this job without holding the lock.

    This happens if the job's folder was removed, together with the lock, while the job ran. Pods of
    a killed run do not count. They usually end within a moment, and the parent of any remaining
    process is not a `ddpjob` process.
    """
    marks = {"DDPJOB_NAME": folder.name, "DDPJOB_CHECKPOINT_DIR": str(folder.checkpoints)}
    deadline = time.monotonic() + _ENDING_SECONDS
    while (pods := processes.find(marks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    parents = {parent for pid in pods if (parent := processes.parent(pid))} - set(pods)
    return next((pid for pid in parents if b"ddpjob" in processes.command_line(pid)), None)


def runner(folder: JobFolder) -> int | None:
    """Return the id of the `ddpjob run` process that holds the job's lock, or None.

    Raises OSError, with the name of the file, if this cannot be determined.
    """
    try:
        with folder.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = folder.lock.read_text().strip()
        return int(text) if text.isdigit() else None
    except OSError as error:  # For instance ENOLCK on a file system without locks.
        error.filename = error.filename or str(folder.lock)
        raise
    return None


def holds(folder: JobFolder, pid: int) -> bool:
    """Whether the process `pid` on this machine has the job's lock file open.

    If the id in the lock file was written on another machine or in a container, an unrelated
    process on this machine can have the same id. Raises PermissionError if the process belongs to
    another user.
    """
    lock = folder.lock.stat()
    with suppress(FileNotFoundError, ProcessLookupError):  # There is no such process, or it has ended.
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # The lock was closed in the meantime.
                if os.path.samestat(descriptor.stat(), lock):
                    return True
    return False


def write_record(folder: JobFolder, record: Json) -> None:
    """Replace status.json. Readers see either the old record or the new one."""
    write_atomically(folder.status, json.dumps(record, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # A full disk's error does not name the file.
        raise


def read_record(folder: JobFolder) -> Json | None:
    """Read status.json, and return None if the job has never run here.

    Raises ValueError if the file is not a record.
    """
    try:
        read: Any = json.loads(folder.status.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{folder.status} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{folder.status} is damaged or was written by another tool ({error})") from error
    record: Json = read if isinstance(read, dict) else {}
    parts = [record.get(part) for part in ("metadata", "spec", "local")]
    parts.append(record.get("status") or {})
    if not all(isinstance(part, dict) for part in parts) or record["metadata"].get("name") != folder.name:
        raise ValueError(f"{folder.status} is not a record of job {folder.name}; another tool may have written it")
    return record


# --- requests from other terminals ------------------------------------------------------------------------------


def ask(folder: JobFolder, verb: str, subject: str, seconds: float = 10.0) -> bool:
    """Write a request for the job's runner, and wait up to `seconds` until it has been processed.

    Return False if the request is not processed in time, or if the runner ends first. Raises
    RequestRefused if the runner refuses the request.
    """
    folder.requests.mkdir(exist_ok=True)
    path = folder.requests / f"{time.time_ns()}-{os.getpid()}.json"
    write_atomically(path, json.dumps({"verb": verb, "subject": subject}))
    deadline = time.monotonic() + seconds
    while path.exists():
        if time.monotonic() > deadline or runner(folder) is None:
            path.unlink(missing_ok=True)
            return False
        time.sleep(0.05)
    with suppress(FileNotFoundError):
        reason = _refusal(path).read_text(encoding="utf-8")
        _refusal(path).unlink()
        raise RequestRefused(reason)
    return True


def refuse(request: Path, reason: str) -> None:
    """Record the reason for refusing a request, so that the request's sender can read it.

    Call this before removing the request's file, because the sender waits until that file is gone.
    Raises OSError.
    """
    write_atomically(_refusal(request), reason)


def _refusal(request: Path) -> Path:
    return request.with_suffix(".refused")


def requests(folder: JobFolder) -> list[tuple[Path, str, str]]:
    """Return (file, verb, subject) for every pending request, oldest first.

    The runner removes a request's file after processing it.
    """
    if not folder.requests.is_dir():
        return []
    found = []
    for path in sorted(folder.requests.glob("*.json")):
        try:
            body = json.loads(path.read_text())
            found.append((path, str(body["verb"]), str(body["subject"])))
        except OSError:
            # The sender waited too long and withdrew the request, or the file belongs to another
            # user.
            continue
        except (ValueError, KeyError, TypeError):
            # The file is not a request. It might be a conflicting copy in a synchronized folder, or
            # belong to another tool.
            continue
    return found
