"""torchrun's elastic agent, controlled by the coordinator: reports failures and obeys `restart`.

torchrun alone would restart its workers when it sees a failure, wait 30 s for a hung worker, and
leave the workers' child processes behind. Here, the coordinator decides when to restart, and the
workers of one round are gone before the next round begins:

- A worker's failure is reported immediately, together with its error file. If this launcher has
  ended a worker itself, the worker's errors are consequences and are not reported.
- When the coordinator sends `restart`, the launcher sends SIGTERM to all workers and their
  sessions, and SIGKILL after the grace period. It then waits until the kernel has removed these
  processes, because they may hold the device. In a planned restart, the grace period is that of the
  pod, so that workers can save a checkpoint.
- If a worker exits with EXIT_STEPPED_ASIDE, it has saved a checkpoint. The launcher then waits for
  the node's other workers to end, too.

Example: rank 5 fails on node 1. Node 1 reports the ValueError and ends its other workers. Nodes 0
and 2 get `restart` and stop their workers within 0.3 s (Fast mode). All three nodes then send
`ready`.

This module overrides or calls these parts of torch.distributed.elastic (2.6 and later):
`_rendezvous`, `_start_workers`, `_stop_workers`, `_monitor_workers` and `_exit_barrier` of
LocalElasticAgent; `close`, `pids` and `error_files` of the worker context; the error-file parsing
of ProcessFailure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ddpjob_pod.job_environment import JobEnvironment
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher import oom, stacks
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.launcher.conduct_preflight import NodePreflight
from ddpjob_runtime.launcher.rendezvous import FastRendezvous, StandardRendezvous
from ddpjob_runtime.launcher.shutdown import Shutdown, log
from ddpjob_runtime.launcher.worker_vitals import Vitals, read_vitals
from ddpjob_runtime.protocol import NUMBERS_PER_ATTEMPT, FromMember, Mode

POLL_SECONDS = 0.005
ABORTED = (
    ": a library aborted the process; the reason is at the end of the pod's log. With GPUs, the library is "
    "usually NCCL, whose watchdog aborts if a device fails or a collective times out"
)
"""Added to a worker's error message if SIGABRT ended the worker before it could raise an exception.
In this case, the reason is only in the worker's output.
"""
STAYED = " (its process was still running 10 s later, and was killed)"
"""Added to a worker's error message if the worker's program had failed, but its process stayed
until the alarm set by worker.py ended it.
"""
LOADER_KILLED = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)")
"""The error that torch's DataLoader raises in a worker when one of the DataLoader's own processes
is killed.
"""
GONE_SECONDS = 60.0
"""How many seconds workers may take to exit after SIGKILL. The kernel needs time to release a
device or a large amount of memory.
"""
TRACKER_SECONDS = 1.0
"""How many seconds resource trackers may take to exit by themselves. A slower tracker is killed,
because a process outside its session may be using the tracker, which would then stay.
"""
_COUNTS_PER_ATTEMPT = 1000
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Sequences that control a terminal, for example to show torch's error messages in bold. They are
removed, because the messages are also shown where there is no terminal.
"""
LAST_SECONDS = 3.0
"""How many seconds workers may take to exit after SIGKILL if this launcher itself is ending.
Processes that take longer are killed together with the container.
"""
RESTART_GRACE = {Mode.STANDARD: 2.0, Mode.FAST: 0.3}
"""Seconds between SIGTERM and SIGKILL for the workers of a broken round. More time would not help,
because their current step can no longer be completed.
"""


class CoordinatedAgent(LocalElasticAgent):
    """torchrun's agent, changed so that the coordinator controls it.

    `parameters()` returns the parameters of torchrun's own rendezvous, which Standard mode uses.
    The remaining arguments come from torchrun.
    """

    def __init__(
        self,
        client: MemberClient,
        shutdown: Shutdown,
        mode: Mode,
        parameters: Callable[[], Any],
        preflight: NodePreflight | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._client, self._node_shutdown, self._mode = client, shutdown, mode
        self._round: int | None = None
        self._remaining_restarts: int
        self._grace = RESTART_GRACE[mode]
        # Maps local ranks to the exit codes of workers that this launcher did not end.
        self._ended: dict[int, int] = {}
        # Maps local ranks to the exit codes of failed programs whose processes have not ended yet.
        self._ending: dict[int, int] = {}
        self._oom_kills = 0
        self._activity = stacks.Activity()
        shutdown.stop_workers = self._stop_for_good
        # Maps the pid of each worker to its vitals as of the last check.
        self._vitals: dict[int, Vitals] = {}
        self._looks = threading.Lock()
        client.on_dump, client.on_look, client.on_hurry = self._dump, self._look, self._hurry
        spec = self._worker_group.spec
        if not isinstance(spec.rdzv_handler, FastRendezvous):
            spec.rdzv_handler = StandardRendezvous(
                client, shutdown, str(spec.local_addr or ""), parameters(), preflight
            )

    # ---- rendezvous

    def _rendezvous(self, worker_group: Any) -> None:
        self._round = None
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            # A node died after the rendezvous and before writing its first key to the store.
            except dist.DistStoreError as error:
                log(f"the round broke ({str(error)[:200]}); waiting for the next one")
        self._round = worker_group.spec.rdzv_handler.number

    # ---- workers

    def _start_workers(self, worker_group: Any) -> Any:
        self._node_shutdown.block_if_begun()
        assert self._round is not None
        # Scripts and stores use TORCHELASTIC_RESTART_COUNT, so it must be the same on all nodes,
        # even if they joined at different times.
        self._remaining_restarts = worker_group.spec.max_restarts - restarts_before(self._round)
        os.environ["DDPJOB_FENCE"] = f"{JobEnvironment.read().generation or 0}.{self._round}"
        self._oom_kills = oom.oom_kills()
        pids: Any = {}
        # The shutdown waits for this lock, so code in this block must not wait for the shutdown.
        with self._node_shutdown.starting:
            if not self._node_shutdown.begun:
                self._ended, self._ending, self._grace = {}, {}, RESTART_GRACE[self._mode]
                pids = super()._start_workers(worker_group)
                self._wrap_close(self._pcontext)
        self._node_shutdown.block_if_begun()
        self._client.joined(self._round)
        return pids

    def _wrap_close(self, context: Any) -> None:
        """Make torchrun end workers with this launcher's grace period instead of its own 30 s."""
        close = context.close
        seen: list[bool] = []

        def close_with_grace(death_sig: Any = None, timeout: float = 30) -> None:
            if not seen:
                seen.append(True)
                self._note_ended(context)
            if self._end_workers(context, death_sig or signal.SIGTERM):
                # The workers have already ended, so `close` now only closes the log files.
                close(death_sig, self._grace)

        context.close = close_with_grace

    def _note_ended(self, context: Any) -> None:
        handlers = getattr(context, "subprocess_handlers", {})
        self._ended = {rank: h.proc.returncode for rank, h in handlers.items() if h.proc.poll() is not None}
        if protocol.EXIT_STEPPED_ASIDE in self._ended.values():
            self._let_step_aside(handlers)
        left = {rank: read_error_file(path).exit_code for rank, path in _error_files(context).items()}
        self._ending = {r: code for r, code in left.items() if code is not None and r not in self._ended}

    def _let_step_aside(self, handlers: Any) -> None:
        """Wait for the node's other workers to end, because they may still be saving.

        Wait no longer than the pod's grace period.
        """
        deadline = time.monotonic() + self._node_shutdown.grace_seconds
        while time.monotonic() < deadline and any(h.proc.poll() is None for h in handlers.values()):
            time.sleep(0.05)
        self._ended = {rank: h.proc.returncode for rank, h in handlers.items() if h.proc.poll() is not None}

    def _end_workers(self, context: Any, death_sig: signal.Signals) -> bool:
        """Stop the workers, and return whether they and their children have ended.

        The workers get SIGTERM first, and SIGKILL after the grace period. This method then waits
        until all these processes have ended, because a process of an earlier round may still hold
        the device that new workers need.

        torch's own method is not enough, because it never waits for the workers' children. After
        SIGKILL, torch 2.6 waits for the workers forever, and torch 2.15 waits only for the length
        of the grace period.
        """
        handlers = list(context.subprocess_handlers.values())
        for handler in handlers:
            if handler.proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    _ask_to_end(handler, death_sig)
        _wait(handlers, time.monotonic() + self._grace)
        killed, passed = time.monotonic(), 0.0
        while left := _kill_sessions(context, spare_trackers=passed < TRACKER_SECONDS) | _find_running(handlers):
            passed = time.monotonic() - killed
            if self._node_shutdown.begun and passed >= LAST_SECONDS:
                return False
            if passed >= GONE_SECONDS:
                what = f"worker processes {sorted(left)} are still running {GONE_SECONDS:.0f} s after SIGKILL"
                self._node_shutdown.exit(1, "Error", f"{what}, because a driver or a file system on the host hangs")
            time.sleep(min(0.1, max(POLL_SECONDS, passed / 10)))
        return True

    def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
        self._node_shutdown.block_if_begun()
        if self._client.is_planned(self._round):
            self._grace = self._node_shutdown.grace_seconds
        super()._stop_workers(worker_group, *args, **kwargs)

    def _hurry(self, number: int) -> None:
        """Kill the workers during a planned restart, instead of waiting for them to save.

        They can no longer save, because a peer was lost.
        """
        if number == self._round and self._pcontext is not None:
            _kill_sessions(self._pcontext, spare_trackers=True)

    def _stop_for_good(self, grace: float) -> None:
        self._grace = grace
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM)

    # ---- the group

    def _monitor_workers(self, worker_group: Any) -> Any:
        self._node_shutdown.block_if_begun()
        if self._client.must_restart(self._round):
            return self._restart_for_peer(worker_group)
        result = super()._monitor_workers(worker_group)
        self._node_shutdown.block_if_begun()
        if result.state == WorkerState.FAILED:
            self._report(self._pcontext, self._round, _ranks(worker_group))
            # The operator counts the restarts, so torchrun must never give up by its own count.
            self._remaining_restarts = max(self._remaining_restarts, 1)
        elif result.state == WorkerState.UNHEALTHY:
            self._remaining_restarts = max(self._remaining_restarts, 1)
        elif result.state == WorkerState.SUCCEEDED:
            assert self._round is not None
            log("all workers of this node have finished; waiting for the other nodes")
            if not self._client.wait_verdict(self._round):
                return self._restart_for_peer(worker_group)
        return result

    def _restart_for_peer(self, worker_group: Any) -> Any:
        log(f"restarting workers: {self._client.why}")
        context: Any
        context, number, ranks = self._pcontext, self._round, _ranks(worker_group)
        self._stop_workers(worker_group)
        for local_rank, path in _error_files(context).items():
            if local_rank not in self._ended and read_error_file(path).exit_code is not None:
                self._ending.setdefault(local_rank, context.subprocess_handlers[local_rank].proc.returncode)
        self._report(context, number, ranks)
        self._initialize_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _report(self, context: Any, number: Any, ranks: dict[int, int]) -> None:
        """Report the workers that ended without being stopped by this launcher.

        A worker is also reported if its error file contains an exception while its process still
        waits for a thread or a device. A worker with exit code 0 is reported because its exit may
        explain the errors of its peers.
        """
        codes = {**self._ending, **self._ended}
        if not any(codes.values()) and len(codes) == len(ranks):
            return  # All workers have finished, and the coordinator already knows that.
        for local_rank, code in codes.items():
            path = _error_files(context)[local_rank]
            self._send_failure(number, ranks[local_rank], local_rank, context.pids()[local_rank], code, path)

    def _send_failure(self, number: Any, rank: int, local_rank: int, pid: int, code: int, error_file: str) -> None:
        kernel_killed = oom.oom_kills() > self._oom_kills
        send_failure(self._client, number, rank, local_rank, pid, code, error_file, kernel_killed)

    # ---- hangs

    def _dump(self, number: int) -> None:
        if number == self._round:
            threading.Thread(target=self._send_stacks, args=(number,), name="ddpjob-stacks", daemon=True).start()

    def _send_stacks(self, number: int) -> None:
        context, workers = self._pcontext, self._worker_group.workers
        if context is None:
            return
        pids = context.pids()
        local = {worker.global_rank: worker.local_rank for worker in workers}
        files = _error_files(context)
        idle = {rank: self._activity.idle(pids[i]) for rank, i in local.items()}
        collected = stacks.collect({rank: pids[i] for rank, i in local.items()})
        self._activity.remember(pids.values())
        for rank in local:
            found = collected.get(rank, stacks.NONE)
            error, text = read_error_file(files.get(local[rank], "")), found
            if error.exit_code is not None and found != protocol.RANK_ENDED:
                said = error.message.partition("\n")[0]
                text = f"{protocol.RANK_FAILED}{said}\n{found}"
            self._client.send(
                FromMember.STACKS,
                round=number,
                rank=rank,
                localRank=local[rank],
                text=protocol.clip_kept(text, protocol.MAX_TRACEBACK),
                idle=True if found == protocol.RANK_ENDED else idle[rank],
            )

    def _look(self, number: int, record: bool) -> None:
        if number == self._round:
            arguments = number, record
            threading.Thread(target=self._send_look, args=arguments, name="ddpjob-look", daemon=True).start()

    def _send_look(self, number: int, record: bool) -> None:
        """Send the stack of each rank, and what the rank has done since the last check."""
        context, workers = self._pcontext, self._worker_group.workers
        if context is None:
            return
        with self._looks:
            pids = context.pids()
            local = {worker.global_rank: pids[worker.local_rank] for worker in workers}
            before, now = self._vitals, read_vitals(local.values())
            texts = stacks.collect(local, record)
            # Read the counters again for the next check, because writing the stacks has made the
            # workers active.
            self._vitals = read_vitals(local.values())
        share = protocol.MAX_LOOKS // max(1, len(local))
        self._client.send(
            FromMember.LOOKED,
            round=number,
            ranks=[
                {
                    "rank": rank,
                    # The innermost frames are at the beginning of the text.
                    "text": text[:share],
                    "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
                    **now[pid].since(before.get(pid)),
                }
                for rank, pid in local.items()
                for text in (texts.get(rank, stacks.NONE),)
            ],
        )

    def _exit_barrier(self) -> None:
        """Do nothing, because `_monitor_workers` has already waited for the other nodes.

        torchrun's own barrier would not notice the loss of a peer.
        """


def restarts_before(number: int) -> int:
    """Return TORCHELASTIC_RESTART_COUNT for the round `number`.

    Workers use the count to find each other in the store. It depends only on the round's number,
    and is therefore the same on all nodes.

    Scripts use the count to decide whether to resume, so it is greater than 0 in every round after
    a restart. It is never the same for two rounds, because torchrun empties the log folder of a
    repeated count. It grows by a thousand with each coordinator that takes over.
    """
    attempt, number_of_attempt = divmod(number, NUMBERS_PER_ATTEMPT)
    return _COUNTS_PER_ATTEMPT * attempt + number_of_attempt - 1


def _ask_to_end(handler: Any, number: signal.Signals) -> None:
    """Send the signal to a worker, and in most cases also to the worker's children.

    Only the worker itself gets the signal if it handles the signal and runs the same Python as the
    launcher. Such a worker needs its data-loader processes until it has completed its step and
    saved. Those processes are killed after the worker has exited.

    All other workers get the signal together with their children, as in torchrun. For example, a
    shell with a trap may be waiting for the training process that it started.

    Raises ProcessLookupError if the worker has exited.
    """
    try:
        pid = handler.proc.pid
        alone = stacks.catches(pid, number) and Path(f"/proc/{pid}/exe").samefile("/proc/self/exe")
    # There is no /proc, the process has ended, or this user may not see which program it runs.
    except OSError:
        alone = False
    if alone:
        os.kill(handler.proc.pid, number)
    else:
        handler.close(death_sig=number)


def _kill_sessions(context: Any, spare_trackers: bool) -> set[int]:
    """Send SIGKILL to the workers' processes, and return the pids of those that have not ended yet.

    Each worker leads a session of its own, and all processes in that session are killed. With
    `spare_trackers`, Python's resource trackers survive. A tracker removes the files that killed
    processes have left in /dev/shm. It ends by itself once no process uses it.
    """
    left = set()
    for pid in _processes_of(set(context.pids().values())):
        # Another user's process cannot be killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0 if spare_trackers and _is_tracker(pid) else signal.SIGKILL)
            left.add(pid)
    return left


def _processes_of(sessions: set[int]) -> list[int]:
    """Return the pids of all processes in these sessions that run or still hold resources."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process has just ended.
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            # A zombie holds no resources unless other threads of the same process are still
            # running.
            if int(session) in sessions and (state not in "ZX" or len(list((folder / "task").iterdir())) > 1):
                found.append(int(folder.name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _error_files(context: Any) -> dict[int, str]:
    """Map the local rank of each worker to the path of its error file."""
    files: dict[int, str] = getattr(context, "error_files", {})
    return files


def _ranks(worker_group: Any) -> dict[int, int]:
    """Map the local rank of each worker to its global rank."""
    return {worker.local_rank: worker.global_rank for worker in worker_group.workers}


def _find_running(handlers: list[Any]) -> set[int]:
    """Return the pids of the workers that have not ended yet."""
    return {handler.proc.pid for handler in handlers if handler.proc.poll() is None}


def _wait(handlers: list[Any], until: float) -> None:
    """Wait until all workers have ended, or until the monotonic time `until`."""
    while time.monotonic() < until and _find_running(handlers):
        time.sleep(POLL_SECONDS)


def rendezvous_parameters(config: Any) -> Any:
    """Return the rendezvous parameters that torchrun would build from the same configuration."""
    return RendezvousParameters(
        config.rdzv_backend,
        config.rdzv_endpoint,
        config.run_id,
        1,
        1,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def send_failure(
    client: MemberClient,
    number: int | None,
    rank: int,
    local_rank: int,
    pid: int,
    code: int,
    error_file: str,
    kernel_killed: bool,
) -> None:
    """Report to the coordinator a worker that ended without being stopped by this launcher.

    The report includes the content of the worker's error file. `kernel_killed` is true if the
    kernel has killed any process in the container to free memory. That process need not be this
    worker.
    """
    error = read_error_file(error_file)
    message = error.message
    if code == -signal.SIGALRM and error.exit_code is not None:
        code, message = error.exit_code, message + STAYED
    name = signal_name(code)
    of_loader = LOADER_KILLED.search(message) is not None
    out_of_memory = kernel_killed and (code == -signal.SIGKILL or of_loader)
    if out_of_memory:
        message = "killed by the kernel: the container reached its memory limit ({})".format(oom.limit() or "unknown")
        message = f"a DataLoader process was {message}" if of_loader else message
    elif not message:
        message = f"killed by signal {name.removeprefix('signal ')}" if name else f"ended with exit code {code}"
        if code == -signal.SIGABRT:
            message += ABORTED
    now = time.time()
    client.send(FromMember.FAILURE, round=number, rank=rank, localRank=local_rank, pid=pid, exitCode=code, signal=name,
        message=protocol.clip_kept(message, protocol.MAX_TEXT),
        traceback=protocol.clip_kept(error.traceback, protocol.MAX_TRACEBACK),
        time=error.time or now, sent=now, oom=out_of_memory, init=error.init,
    )  # fmt: skip


def signal_name(code: int) -> str | None:
    """Return the name of the signal that killed a process; None if no signal did."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@dataclass(frozen=True)
class ErrorFile:
    """A worker's own record of why it failed.

    `init` means that the worker failed before it began to train, and that a retry would not help.
    `exit_code` is the program's exit code if the error ended the program; None if the program might
    have caught the error and continued.
    """

    message: str = ""
    traceback: str = ""
    time: float | None = None
    init: bool = False
    exit_code: int | None = None


def read_error_file(path: str) -> ErrorFile:
    """Read the error file that a worker has written for torchrun.

    The error's time is the modification time of the file. The time inside the file has only whole
    seconds.
    """
    file = Path(path)
    if not file.is_file():
        return ErrorFile()
    when = file.stat().st_mtime
    try:
        content = json.loads(file.read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return ErrorFile(f"the worker's error file {path} is not readable: {error}", time=when)
    if not isinstance(content, dict):
        return ErrorFile(str(content), time=when)
    known = content.get("extraInfo")
    extra = known if isinstance(known, dict) else {}
    message, trace = (_ESCAPES.sub("", str(t)) for t in (content.get("message", ""), extra.get("py_callstack", "")))
    code = extra.get("ddpjob_exit")
    return ErrorFile(message, trace, when, bool(extra.get("ddpjob_init")), code if isinstance(code, int) else None)
