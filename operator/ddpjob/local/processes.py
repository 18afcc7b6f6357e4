"""Finds Linux processes by environment variables, kills process trees, and makes children die with
their parent.
"""

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
"""Positions of the env_start and env_end fields in /proc/PID/stat, counted from the state field."""
_EXEC_SECONDS = 1.0
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make this process adopt its orphaned descendants, so that it can kill and reap them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def dying_with(parent: int) -> Callable[[], None]:
    """Return a `preexec_fn` that makes the kernel send the child SIGKILL when `parent` dies.

    If `parent` is already dead, the child exits immediately.
    """

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def find(marks: Mapping[str, str]) -> list[int]:
    """Return the ids of processes that were started with all of `marks` in their environment.

    Zombies and other users' processes are not found, because their environment cannot be read.
    """
    wanted = {os.fsencode(f"{name}={value}") for name, value in marks.items()}
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environment = _environment(entry.path)
        except OSError:
            continue  # The process has ended or belongs to another user.
        if wanted <= set(environment.split(b"\0")):
            found.append(int(entry.name))
    return found


def _environment(process: str) -> bytes:
    """Return a process's environment, and wait until the process has one.

    A process that executes a new program (exec) has no environment for an instant. Without the
    wait, it would be overlooked when the job's processes are killed.

    Raises OSError if the process has ended or belongs to another user.
    """
    deadline = time.monotonic() + _EXEC_SECONDS
    while not (found := Path(process, "environ").read_bytes()) and time.monotonic() < deadline:
        Path(process, "exe").readlink()  # This raises OSError for a kernel thread or a zombie.
        start, end = Path(process, "stat").read_text().rpartition(")")[2].split()[_ENVIRONMENT]
        if start == end != "0":
            break  # The environment is empty.
        time.sleep(0.0005)
    return found


def end_all(marks: Mapping[str, str], seconds: float = 5.0) -> list[int]:
    """Kill every process that has `marks` in its environment.

    Return the ids of those that remain after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while left := find(marks):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.005)
    return []


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal. It is not an error if the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that belongs to this user."""
    for pid in pids:
        with suppress(PermissionError):
            send(pid, signal.SIGKILL)


def send_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process group. It is not an error if the group has ended."""
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


def reap_orphans(own: Collection[subprocess.Popen[bytes]]) -> None:
    """Reap adopted children that have ended.

    A child in `own` is reaped through its Popen object, so that the owner of that object can read
    the exit code.
    """
    # Skip children that have already been reaped, because other processes may have their ids by
    # now.
    by_pid = {process.pid: process for process in own if process.returncode is None}
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
    """Return the id of a process's parent; None if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def command_line(pid: int) -> bytes:
    """Return a process's command line; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children() -> list[int]:
    """Return the ids of this process's children, including adopted ones."""
    me, found = os.getpid(), list[int]()
    for task in Path(f"/proc/{me}/task").iterdir():
        with suppress(OSError):  # The thread has ended, or the kernel does not provide the list.
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, of their children, and so on.

    Descendants whose own parent has ended are not found, because they have been adopted by a
    different process.
    """
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
    """Kill and reap all children except `others`.

    Return the ids of those that remain after `seconds`. `own` are the children that have a Popen
    object. All children are killed, even children without the job's marks. An adopted child can
    lack the marks because it was started with a different environment, or because it has
    overwritten its environment with its title.
    """
    deadline = time.monotonic() + seconds
    while left := set(children()) - set(others):
        if time.monotonic() > deadline:
            return sorted(left)
        kill(left)
        reap_orphans(own)
        time.sleep(0.005)
    return []
