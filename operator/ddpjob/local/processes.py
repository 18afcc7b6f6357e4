"""Process trees on Linux: tied to their parent, found by an environment variable, killed completely."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENVIRONMENT = slice(47, 49)
"""The fields env_start and env_end of /proc/PID/stat, counted from the state."""
_EXEC_SECONDS = 1.0
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Makes orphans among this process' descendants its children, so that it can kill and reap them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def dying_with(parent: int) -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child SIGKILL at the death of `parent`, which may be dead already."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def find(marks: Mapping[str, str]) -> list[int]:
    """Process ids of those started with all of `marks` in their environment.

    The environment of zombies and of other users' processes cannot be read: they are not found.
    """
    wanted = {os.fsencode(f"{name}={value}") for name, value in marks.items()}
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environment = _environment(entry.path)
        except OSError:
            continue  # it has ended, or is another user's
        if wanted <= set(environment.split(b"\0")):
            found.append(int(entry.name))
    return found


def _environment(process: str) -> bytes:
    """Raises OSError for a process that has ended, or is another user's.

    One that is just becoming another program (exec) has no environment yet: overlooked, it would outlive those that
    are found and killed.
    """
    deadline = time.monotonic() + _EXEC_SECONDS
    while not (found := Path(process, "environ").read_bytes()) and time.monotonic() < deadline:
        Path(process, "exe").readlink()  # OSError: a thread of the kernel, or a zombie
        start, end = Path(process, "stat").read_text().rpartition(")")[2].split()[_ENVIRONMENT]
        if start == end != "0":
            break  # It has an empty one.
        time.sleep(0.0005)
    return found


def end_all(marks: Mapping[str, str], seconds: float = 5.0) -> list[int]:
    """Kills every process that carries `marks`. Returns the ids of those that are left after `seconds`."""
    deadline = time.monotonic() + seconds
    while left := find(marks):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.005)
    return []


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal; a process that has ended is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each of them, but for other users' processes."""
    for pid in pids:
        with suppress(PermissionError):
            send(pid, signal.SIGKILL)


def send_group(leader: int, number: signal.Signals) -> None:
    """Sends a signal to a process group; one that has ended is no error."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def reap_orphans(own: Collection[subprocess.Popen[bytes]]) -> None:
    """Reaps adopted children that have ended; those in `own` are polled, which reaps them for their owners."""
    by_pid = {process.pid: process for process in own if process.returncode is None}  # others' ids may be in use again
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        process = by_pid.get(ended.si_pid)
        if process is not None:
            process.poll()
        else:
            os.waitpid(ended.si_pid, 0)


def parent(pid: int) -> int | None:
    """Its parent; None for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def command_line(pid: int) -> bytes:
    """With which it was started; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children() -> list[int]:
    """This process' children, adopted ones included."""
    me, found = os.getpid(), list[int]()
    for task in Path(f"/proc/{me}/task").iterdir():
        with suppress(OSError):  # a thread that has ended, or a kernel that does not say it
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Its children, and theirs. Orphans are none of them: they have another parent."""
    by_parent: dict[int | None, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            by_parent.setdefault(parent(int(entry.name)), []).append(int(entry.name))
    found, left = list[int](), [pid]
    while left:
        left += (own := by_parent.get(left.pop(), []))
        found += own
    return found


def end_children(others: Collection[int], own: Collection[subprocess.Popen[bytes]], seconds: float = 5.0) -> list[int]:
    """Kills and reaps all children but `others`. Returns the ids of those that are left after `seconds`.

    `own`: those that have a Popen. Adopted ones may have no mark: with another environment, or with a new title, which
    programs write over it.
    """
    deadline = time.monotonic() + seconds
    while left := set(children()) - set(others):
        if time.monotonic() > deadline:
            return sorted(left)
        kill(left)
        reap_orphans(own)
        time.sleep(0.005)
    return []
