"""Process trees on Linux: started so that they end with their parent, found by their environment, ended without a rest."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans among this process' descendants become its children, so that it can end and bury them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def dying_with(parent: int) -> Callable[[], None]:
    """What a child does before exec: asks the kernel for SIGKILL at the death of `parent`, which may be dead already."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def find(marks: Mapping[str, str]) -> list[int]:
    """Processes that were started with all of `marks` in their environment; zombies and other users' have none to be read."""
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue  # ended by now, or another user's
        if wanted <= set(environment.split(b"\0")):
            found.append(int(entry.name))
    return found


def end_all(marks: Mapping[str, str], seconds: float = 5.0) -> list[int]:
    """Kills everything that carries `marks`, until nothing is left. Returns what could not be ended within `seconds`."""
    deadline = time.monotonic() + seconds
    while left := find(marks):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.005)
    return []


def send(pid: int, number: signal.Signals) -> None:
    """A signal; a process that has ended needs none."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def send_group(leader: int, number: signal.Signals) -> None:
    """A signal to a whole process group."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def bury_orphans(own: Collection[subprocess.Popen[bytes]]) -> None:
    """Reaps adopted children that have ended; those in `own` are left to their owners (they are polled, which reaps them)."""
    by_pid = {process.pid: process for process in own}
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


def children() -> list[int]:
    """This process' children, adopted ones included."""
    me, found = os.getpid(), []
    for task in Path(f"/proc/{me}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
