"""Collects hung workers' Python stacks. On a signal, a worker writes its stack even if it is
blocked in C++.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.stack_signal import FOLDER, SIGNAL

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.shutdown import log

NONE = "(this rank has written no stack)"
WRITING_SECONDS = 1.0
_KEEPING = threading.Lock()
"""Held while stacks are written to the checkpoint folder."""
IDLE_SWITCHES, IDLE_SHARE = 20, 0.02
"""A worker counts as idle if, between two checks, its main thread wakes up fewer than IDLE_SWITCHES
times and its session uses less than IDLE_SHARE of a core.
"""
ENVIRONMENT = "DDPJOB_STACKS_DIR"
PREFIX = "ddpjob-worker-stacks-"


def prepare() -> None:
    """Create a folder for stack files, and put its name into the workers' environment.

    If the folder cannot be created, this job has no stacks.
    """
    try:
        # Remove folders left behind by killed launchers.
        for old in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
            with contextlib.suppress(OSError):
                descriptor = _lock(old)
                shutil.rmtree(old)
                os.close(descriptor)
        # Create the folder under a name that other launchers do not remove, and rename it once it
        # is locked.
        made = Path(tempfile.mkdtemp(prefix="new-" + PREFIX))
        prepare.lock = _lock(made)  # type: ignore[attr-defined]
        os.environ[ENVIRONMENT] = str(made.rename(made.with_name(made.name[len("new-") :])))
    except OSError as error:
        log(f"stacks of hanging workers cannot be written: {error}; give the pod a writable /tmp")


def remove() -> None:
    """Remove the folder for stack files, because this launcher is ending."""
    folder = os.environ.pop(ENVIRONMENT, "")
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Lock the folder until this process ends, and return the folder's descriptor.

    Raises OSError if the folder is already locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def collect(ranks: Mapping[int, int], record: bool = True) -> dict[int, str]:
    """Return the stacks of the workers in `ranks`, by global rank.

    `ranks` maps global ranks to pids. With `record`, the stacks are also logged, and are written to
    the checkpoint folder.
    """
    folder = JobEnvironment.read().stacks_dir
    if not folder:
        return {}
    files = {rank: Path(folder) / f"{rank}.txt" for rank in ranks}
    before = {rank: _size(path) for rank, path in files.items()}
    ended = set()
    for rank, pid in ranks.items():
        try:
            if catches(pid, SIGNAL):
                os.kill(pid, SIGNAL)
        except (FileNotFoundError, ProcessLookupError):
            ended.add(rank)
    time.sleep(WRITING_SECONDS)
    found = {}
    for rank, path in files.items():
        text = path.read_bytes()[before[rank] :].decode(errors="replace") if path.exists() else ""
        found[rank] = strip_runtime_frames(text) or (protocol.RANK_ENDED if rank in ended else NONE)
    if record:
        for rank, text in found.items():
            log(f"stacks of rank {rank}:\n{text}")
        # The coordinator waits for the stacks, which show that the checkpoint volume hangs.
        thread = threading.Thread(target=_keep, args=(found,), name="ddpjob-keep-stacks", daemon=True)
        thread.start()
        thread.join(WRITING_SECONDS / 2)
    return found


def strip_runtime_frames(text: str) -> str:
    """Return a stack without the frames of the runtime and of `python -m`."""
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not _OWN_FRAME.match(line)]
    return "".join(kept) if any(line.startswith("  File ") for line in kept) else text


_OWN_FRAME = re.compile(
    rf'  File "(?:{re.escape(str(Path(__file__).resolve().parents[1]))}/|<frozen runpy>|[^"]*/runpy\.py)'
)


class Activity:
    """Measures whether workers have done anything since the last check.

    A rank that waits in a collective counts as idle, because its main thread does not wake up, and
    watchdogs and other parts of its session take almost no CPU time.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int, float]] = {}

    def idle(self, pid: int) -> bool | None:
        """Whether the worker has been idle since the last check.

        The result is None at the first check, or if the worker has ended.
        """
        before, now = self._before.get(pid), _counters(pid)
        if before is None or now is None:
            return None
        seconds, switches, cpu = (after - earlier for after, earlier in zip(now, before))
        return switches < IDLE_SWITCHES and cpu < IDLE_SHARE * seconds

    def remember(self, pids: Iterable[int]) -> None:
        """Store the workers' current counters for comparison at the next check.

        Call this after the stacks are written, because workers wake up to write them.
        """
        found = {pid: _counters(pid) for pid in pids}
        self._before = {pid: counters for pid, counters in found.items() if counters is not None}


def _counters(pid: int) -> tuple[float, int, float] | None:
    """Return the time, the main thread's context switches, and the session's CPU seconds.

    Return None if the worker has ended.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        cpu = sum(_processor_ticks(path, pid) for path in Path("/proc").glob("[0-9]*/stat"))
    except OSError:
        return None
    switches = sum(map(int, re.findall(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", status, re.M)))
    return time.monotonic(), switches, cpu / os.sysconf("SC_CLK_TCK")


def _processor_ticks(path: Path, session: int) -> int:
    """Return the CPU ticks of a process and its ended children; 0 if its session is different."""
    try:
        fields = path.read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15])) if int(fields[3]) == session else 0


def catches(pid: int, number: int) -> bool:
    """Whether the process handles the signal. Without a handler, the signal would end the process.

    Raises FileNotFoundError or ProcessLookupError if the process does not exist.
    """
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _keep(found: Mapping[int, str]) -> None:
    """Write the stacks to the checkpoint folder, unless an earlier call still waits for it."""
    if _KEEPING.acquire(blocking=False):
        try:
            _write(found)
        finally:
            _KEEPING.release()


def _write(found: Mapping[int, str]) -> None:
    job = JobEnvironment.read()
    root = job.checkpoint_dir
    if not root or not Path(root).is_dir():
        return
    mark = job.fence or "0.0"
    folder = Path(root) / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        for rank, text in found.items():
            (folder / f"round-{mark}-rank-{rank}.txt").write_text(
                f"{protocol.iso(protocol.time_of(time.time()))} no step\n{text}"
            )
    except OSError as error:
        log(f"cannot keep stacks in {folder}: {error}")
        return
    log(f"stacks are kept in {folder}")
