"""Observes processes on this machine, and kills them all at once, as a pod's death would."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
"""Number of clock ticks per second in /proc's times."""


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # The process has just ended.
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def kill_all(*processes: subprocess.Popen[bytes]) -> float:
    """Send SIGKILL to the processes and their descendants, and return the Unix time just before."""
    victims = [pid for process in processes for pid in (process.pid, *descendants(process.pid))]
    moment = time.time()
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # The process died with its parent.
    for process in processes:
        process.wait()
    return moment


def processor_seconds(pid: int) -> float:
    """Return the CPU time of a process and its threads, in seconds.

    These are fields 14 and 15 in proc(5); field 2 may contain spaces.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory(pid: int, what: str = "VmRSS") -> float:
    """Return the resident memory in MiB, or its peak with `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def free_port() -> int:
    """Return a free TCP port on 127.0.0.1, outside the range for outgoing connections."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(32000, 32768)
            probe.bind(("127.0.0.1", port))
            return port


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that every started process is stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
