"""`--spawn N` starts the N ranks of this node without torchrun, like mp.spawn."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any, cast

from ddpjob_pod.job_environment import GRACE_SECONDS, JobEnvironment

from ddpjob_trainer.config.command_line import take_option
from ddpjob_trainer.distributed.init_method import INIT_METHOD, free_port, read_method
from ddpjob_trainer.errors import ConfigError, RendezvousError, TrainerError, exit_code
from ddpjob_trainer.lifecycle import fast_exit
from ddpjob_trainer.lifecycle.signals import EXIT_STEPPED_ASIDE

USAGE = "--spawn N [--init METHOD] [--nodes K --node-rank R]"
MOST_RANKS = max(64, 8 * (os.cpu_count() or 1))
"""Maximum number of ranks on this node. Without a limit, a typo could start processes until memory
runs out.
"""
_FAREWELL_SECONDS = 2.0
"""The time in seconds that the other ranks have to exit by themselves after a rank has failed. With
gloo, they fail immediately and report an error. With NCCL, they hang.
"""


@dataclass(frozen=True)
class Launch:
    """A request to start `processes` ranks on each of `nodes` nodes. This node is number
    `node_rank`.
    """

    processes: int
    nodes: int = 1
    node_rank: int = 0
    init: str = "env://"

    @property
    def world(self) -> int:
        """The total number of ranks, on all nodes."""
        return self.nodes * self.processes

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for one of this node's ranks."""
        ranks = {"RANK": self.node_rank * self.processes + local_rank, "WORLD_SIZE": self.world}
        local = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self.processes, "GROUP_RANK": self.node_rank}
        return {name: str(number) for name, number in (ranks | local).items()} | {INIT_METHOD: self.init}


def read(arguments: list[str]) -> tuple[Launch, list[str]]:
    """Return the launch that the command line requests, and the arguments for the ranks.

    Raises ConfigError.
    """
    numbers = {}
    for name, default, least in (("--spawn", 1, 1), ("--nodes", 1, 1), ("--node-rank", 0, 0)):
        text, arguments = take_option(arguments, name)
        if text is not None and (not text.isdigit() or int(text) < least):
            raise ConfigError(f"{name}={text}: must be an integer of at least {least}; usage: {USAGE}")
        numbers[name] = default if text is None else int(text)
    if numbers["--spawn"] > MOST_RANKS:
        raise ConfigError(f"--spawn={numbers['--spawn']}: must be at most {MOST_RANKS}, which is this machine's limit")
    init, arguments = take_option(arguments, "--init")
    launch = Launch(numbers["--spawn"], numbers["--nodes"], numbers["--node-rank"], init or "env://")
    if launch.node_rank >= launch.nodes:
        raise ConfigError(
            f"--node-rank {launch.node_rank}: must be from 0 to {launch.nodes - 1} with --nodes {launch.nodes}"
        )
    if launch.init == "env://" and launch.nodes == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    read_method(launch.init)
    return launch, arguments


def main(arguments: list[str]) -> int:
    """Run the ranks until they end, and return the exit code.

    The exit code is 0 if all ranks succeeded, and 75 if a signal made the ranks save and exit. If a
    signal ended ranks that had not saved, it is 128 plus the number of the signal. Otherwise, it is
    the exit code of the rank that failed first. Raises ConfigError, RendezvousError.
    """
    from ddpjob_trainer.commands.dispatch import COMMANDS
    from ddpjob_trainer.config.command_line import read_settings

    launch, rest = read(arguments)
    if not rest or rest[0] not in COMMANDS:
        read_settings(rest)  # Report a wrong setting once instead of once per rank.
    with _own_file(launch), tempfile.TemporaryDirectory(prefix="ddpjob-spawn-") as folder:
        return Ranks(launch, rest, Path(folder)).run()


class Ranks:
    """The processes of this node's ranks.

    Each rank leads its own process group, so that killing the group also kills the rank's children.
    """

    def __init__(self, launch: Launch, arguments: list[str], folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self._stopped_by: signal.Signals | None = None
        self._deadline = float("inf")
        # Pairs (rank, exit code) of the ranks that failed before this process killed any rank.
        self._blamed: list[tuple[int, int]] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        from torch.multiprocessing.spawn import start_processes

        self._alive: dict[int, tuple[int, Any]] = {}
        task = (launch, arguments, os.getpid(), str(folder))
        start: Any = start_processes
        context = start(_rank, task, launch.processes, join=False, start_method="spawn")
        self._alive.update(
            {process.sentinel: (self._number(local), process) for local, process in enumerate(context.processes)}
        )
        if self._stopped_by:
            self._signal(signal.SIGTERM)  # A signal arrived while the ranks were being started.

    def run(self) -> int:
        """Wait until all ranks have ended. If one fails, end the others. Return the exit code."""
        codes: dict[int, int] = {}
        try:
            while self._alive:
                for sentinel in connection.wait(
                    list(self._alive), timeout=min(1.0, max(0.0, self._deadline - time.monotonic()))
                ):
                    rank, process = self._alive.pop(cast(int, sentinel))
                    _end_group(process)
                    codes[rank] = process.exitcode
                    if process.exitcode not in (0, EXIT_STEPPED_ASIDE) and not self._stopped_by:
                        self._blamed.append((rank, process.exitcode))
                        self._deadline = min(self._deadline, time.monotonic() + _FAREWELL_SECONDS)
                if time.monotonic() >= self._deadline:
                    break
        finally:
            for rank, process in self._alive.values():
                _end_group(process)
                codes[rank] = process.exitcode
        return self._exit_code(codes)

    def _number(self, local_rank: int) -> int:
        return int(self._launch.environment(local_rank)["RANK"])

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Handle a signal to this process.

        At the first signal, ask the ranks to save and exit within the grace period. At the second
        signal, kill them.
        """
        if self._stopped_by:
            self._deadline = 0.0
            self._signal(signal.SIGKILL)
            return
        self._stopped_by = signal.Signals(number)
        grace = JobEnvironment.read().grace
        self._deadline = time.monotonic() + (GRACE_SECONDS if grace is None else grace)
        print(f"{self._stopped_by.name}: ranks save and exit; a second signal kills them", file=sys.stderr, flush=True)
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for _, process in self._alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _exit_code(self, codes: dict[int, int]) -> int:
        if self._blamed:
            return self._report_cause()
        if EXIT_STEPPED_ASIDE in codes.values() and set(codes.values()) <= {0, EXIT_STEPPED_ASIDE}:
            return EXIT_STEPPED_ASIDE
        return 128 + self._stopped_by if self._stopped_by and any(codes.values()) else 0

    def _report_cause(self) -> int:
        """Print the error of the rank that failed first, and return its exit code.

        Return 1 if a signal ended that rank. All later failures are consequences.
        """
        reported = [json.loads(path.read_text()) for path in self._folder.glob("rank-*.json")]
        silent = [(rank, code) for rank, code in self._blamed if rank not in {entry["rank"] for entry in reported}]
        # A rank that died without reporting an error counts as the cause, and the errors that other
        # ranks reported count as consequences.
        if silent:
            rank, code = silent[0]
            how = f"was terminated by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            hint = "; the kernel kills processes when memory is short (see dmesg)" if code == -signal.SIGKILL else ""
            print(f"error: rank {rank} {how}{hint}; the other ranks were stopped", file=sys.stderr, flush=True)
            return code if code > 0 else 1
        first = min(reported, key=lambda entry: entry["time"])
        print(
            f"{first['text'].rstrip()}\nrank {first['rank']} failed; the other ranks were stopped",
            file=sys.stderr,
            flush=True,
        )
        return dict(self._blamed).get(first["rank"], 1)


def _rank(local_rank: int, launch: Launch, arguments: list[str], launcher: int, folder: str) -> None:
    """Run one rank in this process."""
    # Leave the terminal's process group, so that Ctrl-C reaches only the launcher. The launcher
    # then sends SIGTERM, and the ranks save and exit.
    os.setpgid(0, 0)
    if not fast_exit.end_with(launcher, signal.SIGTERM):
        sys.exit(128 + signal.SIGTERM)
    os.environ.update(launch.environment(local_rank))
    rank = int(os.environ["RANK"])
    try:
        from ddpjob_trainer.commands.dispatch import run

        code = run(arguments)
    except Exception as error:
        when = time.time()
        text = f"error: {error}" if isinstance(error, TrainerError) else traceback.format_exc()
        Path(folder, f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "time": when, "text": text}))
        code = fast_exit.with_code(exit_code(error))
    sys.exit(code)


def _end_group(process: Any) -> None:
    """Kill the remaining processes of a rank's process group, and reap the rank.

    The rank is reaped last, because its process id, which names the group, could be reused after
    that.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


@contextlib.contextmanager
def _hold(lock: Path, init: str) -> Iterator[None]:
    """Hold the lock of a launch, and remove its file at the end.

    A launch that ends between this process's open and its flock removes the file. The lock would
    then be on a file without a name, and a third launch could lock a new one. The file is therefore
    compared with the named one, and opened again if they differ.
    """
    while True:
        try:
            held = lock.open("w")
        except OSError as error:
            raise RendezvousError(
                f"--init {init}: {lock} cannot be opened ({error.strerror}); choose a file in a writable folder"
            ) from error
        with held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RendezvousError(f"--init {init}: another launch uses this file; choose a different one") from None
            except OSError as error:
                remedy = "use a file on a file system that supports locks, or tcp://HOST:PORT"
                raise RendezvousError(f"--init {init}: {lock} cannot be locked ({error.strerror}); {remedy}") from error
            try:
                is_named = os.path.samestat(lock.stat(), os.fstat(held.fileno()))
            except FileNotFoundError:
                is_named = False
            if not is_named:
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def _own_file(launch: Launch) -> Iterator[None]:
    """Reserve the file in `--init file:///PATH` for this launch.

    With a leftover file of an earlier launch, the ranks would wait for processes that no longer
    exist. Node 0 locks a second file next to PATH, and removes both files at the end. Raises
    RendezvousError if another launch uses PATH.
    """
    name = read_method(launch.init).file
    if not name or launch.node_rank > 0:
        yield
        return
    path, lock = Path(name), Path(f"{name}.lock")
    with _hold(lock, launch.init):
        if path.exists():
            if launch.nodes > 1:  # Ranks on another node may already have opened the file.
                raise RendezvousError(f"--init {launch.init}: the file is a leftover of an earlier launch; remove it")
            print(f"warning: removed {path}, a leftover of an earlier launch", file=sys.stderr, flush=True)
            path.unlink()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
