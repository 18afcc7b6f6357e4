"""Starts the cluster's long-running programs, and ends them even if the processes that started them
are gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from machine import slowness

from testcluster import cgroups
from testcluster.settings import ClusterError, Settings

WATCHES = Path("/proc/sys/fs/inotify/max_user_instances")
"""Limit of inotify instances per user. Each kubelet, containerd and proxy needs a few."""
ENOUGH_WATCHES = 1024


def allow_watches() -> None:
    """Raise the machine's limit, which is often 128. Three clusters reach the limit, and programs
    then exit with "too many open files".
    """
    if int(WATCHES.read_text()) >= ENOUGH_WATCHES:
        return
    try:
        WATCHES.write_text(f"{ENOUGH_WATCHES}")
    except OSError as error:
        print(f"{WATCHES} is too low for several clusters and cannot be raised: {error}", file=sys.stderr, flush=True)


def run(
    *command: str | Path, input_text: str | None = None, env: dict[str, str] | None = None, timeout: float = 600
) -> str:
    """Return the standard output of a command, which may take `timeout` seconds (longer on a busy
    machine).

    Raises ClusterError with its standard error if it fails.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, input=input_text, text=True, capture_output=True, env=env, timeout=timeout * slowness(), check=False
    )
    if done.returncode != 0:
        raise ClusterError(
            f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def succeeds(*command: str | Path) -> bool:
    """Return whether the command exits with 0."""
    return subprocess.run([str(word) for word in command], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Process:
    """A process, identified by its pid and start time (clock ticks since boot), so that a reused
    pid is not mistaken for it.
    """

    name: str
    pid: int
    started: int

    def alive(self) -> bool:
        """Return whether the process is alive. A killed process is a zombie while some of its
        threads end, and holds its ports until then.
        """
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and (stat.state != "Z" or stat.threads > 1)


class _Stat(NamedTuple):
    """Fields 3, 20 and 22 of /proc/PID/stat, see proc(5)."""

    state: str
    threads: int
    started: int


def _stat(pid: int) -> _Stat | None:
    """Return the fields, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # field 2 may contain spaces
    return _Stat(fields[0], int(fields[17]), int(fields[19]))


# Each program works in a heap of about 100 MB here, which Go would otherwise collect several times
# a second. With the largest jobs, the API server's heap would grow to four times their size and use
# all of the machine's memory.
_QUICK = {"GOGC": "300", "GOMEMLIMIT": "8GiB"}


def spawn(
    settings: Settings, name: str, netns: str, command: Sequence[str | Path], env: dict[str, str] | None = None
) -> Process:
    """Start a program of the cluster in a network namespace. Its log is `log/NAME.log`, and its pid
    is in `pid/NAME`.

    `nsenter` is used, because `ip netns exec` mounts a new /sys, which hides the cgroups.
    """
    join = 'for file in $DDPJOB_CGROUPS; do echo $$ > "$file/cgroup.procs" || exit 1; done'
    enter = f'{join}; unset DDPJOB_CGROUPS; exec "$@"'
    words = ["sh", "-c", enter, "sh", "nsenter", f"--net=/run/netns/{netns}", *(str(word) for word in command)]
    groups = " ".join(str(folder) for folder in cgroups.system(settings))
    with (settings.run / "log" / f"{name}.log").open("ab") as log:
        child = subprocess.Popen(
            words,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **_QUICK, **(env or {}), "DDPJOB_CGROUPS": groups},
        )
    stat = _stat(child.pid)
    if stat is None:
        raise ClusterError(f"{name} ended immediately: see {settings.run}/log/{name}.log")
    process = Process(name, child.pid, stat.started)
    (settings.run / "pid" / name).write_text(json.dumps({"pid": process.pid, "started": process.started}))
    return process


def recorded(settings: Settings) -> list[Process]:
    """Return every program that was started, whether or not it is alive."""
    return recorded_in(settings.run)


def recorded_in(run_folder: Path) -> list[Process]:
    """Return every program of the cluster whose files are in `run_folder`."""
    processes = []
    for file in sorted((run_folder / "pid").glob("*")):
        try:
            facts = json.loads(file.read_text())
        except json.JSONDecodeError:
            continue  # the writer was killed during the write; its child is found by its cgroup
        processes.append(Process(file.name, facts["pid"], facts["started"]))
    return processes


def check_alive(settings: Settings) -> None:
    """Raise ClusterError with the end of the log if a program of the cluster has ended."""
    for process in recorded(settings):
        if not process.alive():
            log = settings.run / "log" / f"{process.name}.log"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""
            raise ClusterError(f"{process.name} has ended; the end of {log}:\n{tail}")


def kill(pid: int) -> None:
    """Send SIGKILL. It is not an error if the process has already ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def end_all(settings: Settings, timeout: float = 20.0) -> None:
    """Kill the recorded processes, and then those that remain in the cluster's cgroups (shims and
    pods).

    Raises ClusterError if a process remains.
    """
    for process in recorded(settings):
        if process.alive():
            kill(process.pid)
    deadline = time.monotonic() + timeout * slowness()
    while pids := cgroups.members(settings):
        if time.monotonic() > deadline:
            raise ClusterError(f"processes that cannot be killed: {sorted(pids)}")
        for pid in pids:
            kill(pid)
        time.sleep(0.05)


def wait_for(what: str, ready: Callable[[], bool], settings: Settings | None = None, timeout: float = 120.0) -> float:
    """Wait until `ready` returns true, and return the seconds it took.

    Raises ClusterError after `timeout` seconds (longer on a busy machine), or if a program of the
    cluster has ended.
    """
    start = time.monotonic()
    while not ready():
        if settings is not None:
            check_alive(settings)
        if time.monotonic() - start > timeout * slowness():
            raise ClusterError(f"{what}: not within {timeout * slowness():.0f} s")
        time.sleep(0.1)
    return time.monotonic() - start
