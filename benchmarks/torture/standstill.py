"""Faults that do not terminate anything: suspended processes, blocked connections, wrong clocks."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ddpjob.local import processes
from ddpjob.local.pod import CONTAINER_VARIABLE, UID_VARIABLE

SHORTEST, LONGEST = 2.0, 12.0
"""Range of a fault's duration in seconds. A coordinator waits 15 s for a suspended member."""


FARTHEST = 120.0
"""How far a pod's clock may be behind, in seconds."""


class Standstill:
    """Causes faults, and undoes them after a few seconds."""

    def __init__(self) -> None:
        self._undoing: list[threading.Thread] = []

    def pause(self, pids: Iterable[int]) -> float:
        """Suspend the processes (SIGSTOP) for a while. Return the number of seconds."""
        stopped = list(pids)
        for pid in stopped:
            processes.send(pid, signal.SIGSTOP)
        return self._later(lambda: [processes.send(pid, signal.SIGCONT) for pid in stopped])

    def cut(self, pids: Iterable[int]) -> float:
        """Drop packets on the processes' connections, and to the ports on which they listen.

        Return the number of seconds. Needs root and a separate network namespace, whose end removes
        the rules.
        """
        rules = [
            ("OUTPUT", "--protocol", "tcp", side, str(port), "--jump", "DROP")
            for port in sorted(tcp_ports(pids))
            for side in ("--sport", "--dport")
        ]
        for rule in rules:
            _iptables("--insert", *rule)
        return self._later(lambda: [_iptables("--delete", *rule) for rule in rules])

    def wait(self) -> None:
        """Wait until all faults are undone."""
        for thread in self._undoing:
            thread.join()
        self._undoing.clear()

    def _later(self, undo: Callable[[], object]) -> float:
        seconds = random.SystemRandom().uniform(SHORTEST, LONGEST)
        thread = threading.Timer(seconds, undo)
        thread.start()
        self._undoing.append(thread)
        return seconds


def set_clock(file: Path, behind: float) -> bool:
    """Set the clock that clocks/sitecustomize.py reads from this file.

    Return False if no process has begun to read it.
    """
    try:
        with file.open("r+b") as clock:
            clock.write(struct.pack("d", behind))
    except FileNotFoundError:
        return False
    return True


def of_container(uid: str, pod: str, container: str) -> tuple[list[int], list[int]]:
    """Return (main process, workers) of a container under `ddpjob run`, without their children."""
    found = processes.find({UID_VARIABLE: uid, CONTAINER_VARIABLE: f"{pod}/{container}"})
    parents = {pid: _parent(pid) for pid in found}
    main = [pid for pid in found if parents[pid] not in found]
    leaders = [pid for pid in found if pid not in main and _leads_its_session(pid)]
    return main, leaders


def tcp_ports(pids: Iterable[int]) -> set[int]:
    """Return the local ports of all TCP sockets of the processes."""
    inodes = set()
    for pid in pids:
        try:
            descriptors = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # The process has ended, or has just closed a socket.
        inodes |= {name[len("socket:[") : -1] for name in descriptors if name.startswith("socket:[")}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _leads_its_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _iptables(*words: str) -> None:
    subprocess.run(["iptables", "--wait", *words], check=True, capture_output=True)
