"""Processes on this machine: killed as a pod's death kills them, all at once and all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The process ids of all descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # It has just ended.
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def kill_all(*processes: subprocess.Popen[bytes]) -> float:
    """Send SIGKILL to the processes and their descendants. Returns the time just before, in seconds since 1970."""
    victims = [pid for process in processes for pid in (process.pid, *descendants(process.pid))]
    moment = time.time()
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # It died with its parent.
    for process in processes:
        process.wait()
    return moment


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that everything that was started is ended on the way out."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
