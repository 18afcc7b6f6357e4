"""Processes as a pod's death ends them: all at once, and all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Process ids of everything below a process."""
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
    """SIGKILL to the processes and all below them. Returns the moment right before, seconds since 1970."""
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
