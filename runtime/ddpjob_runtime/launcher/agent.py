"""torchrun's elastic agent, controlled by the coordinator: reports failures and obeys `restart`.

torchrun alone would restart its workers when it sees a failure, wait 30 s for a hung worker, and
leave the workers' child processes behind. Here the coordinator decides when to restart, and the
workers of a round are gone before the next round begins:

- A worker's failure is reported immediately, with its error file. Workers that this launcher has
  ended are not reported, because their errors are consequences.
- When the coordinator sends `restart`, the launcher stops all workers and their sessions with
  SIGTERM, and with SIGKILL after the grace period. The launcher then waits until the kernel has
  removed these processes, because they may hold the device. In a planned restart, workers have the
  pod's grace period to save a checkpoint.
- A worker that exits with EXIT_STEPPED_ASIDE has saved a checkpoint. The launcher then waits until
  the node's other workers have ended, too.

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
"""Added to a worker's error message if SIGABRT ended the worker without an exception. In this case,
only the worker's output shows the reason."""
STAYED = " (its process was still running 10 s later, and was killed)"
"""Added to a worker's error message if its program had failed, but its process had to be ended by
the alarm that worker.py sets."""
LOADER_KILLED = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)")
"""The error that torch's DataLoader raises in a worker if one of the DataLoader's processes was
killed."""
GONE_SECONDS = 60.0
"""How many seconds workers can take to exit after SIGKILL. The kernel needs time to release a
device or a large amount of memory.
"""
TRACKER_SECONDS = 1.0
"""How many seconds resource trackers can take to exit by themselves. Trackers that take longer are
killed, because a tracker does not exit while a process outside its session uses it.
"""
_COUNTS_PER_ATTEMPT = 1000
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Sequences that control a terminal. The error messages of torch contain bold words, and those of
other packages contain colours. The messages are also shown where there is no terminal.
"""
LAST_SECONDS = 3.0
"""How many seconds workers can take to exit after SIGKILL if this launcher itself is ending.
Processes that take longer are killed together with the container.
"""
RESTART_GRACE = {Mode.STANDARD: 2.0, Mode.FAST: 0.3}
"""Seconds between SIGTERM and SIGKILL for the workers of a broken round. The workers need no more
time, because their current step can no longer be completed.
"""


class CoordinatedAgent(LocalElasticAgent):
    """torchrun's agent, changed so that the coordinator controls it.

    `parameters()` returns the parameters of torchrun's own rendezvous, which is used in Standard
    mode. The remaining arguments come from torchrun.
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
        # The exit codes of workers that this launcher has not ended, by local rank.
        self._ended: dict[int, int] = {}
        # The exit codes of programs that have failed, although their processes have not ended yet.
        self._ending: dict[int, int] = {}
        self._oom_kills = 0
        self._activity = stacks.Activity()
        shutdown.stop_workers = self._stop_for_good
        # The vitals that the last check has read, by each worker's pid.
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
            # A node died after the rendezvous, before that node had written its first key to the
            # store.
            except dist.DistStoreError as error:
                log(f"the round broke ({str(error)[:200]}); waiting for the next one")
        self._round = worker_group.spec.rdzv_handler.number

    # ---- workers

    def _start_workers(self, worker_group: Any) -> Any:
        self._node_shutdown.block_if_begun()
        assert self._round is not None
        # Scripts and stores use TORCHELASTIC_RESTART_COUNT, so it must be equal on all nodes, even
        # on nodes that joined at different times.
        self._remaining_restarts = worker_group.spec.max_restarts - restarts_before(self._round)
        os.environ["DDPJOB_FENCE"] = f"{JobEnvironment.read().generation or 0}.{self._round}"
        self._oom_kills = oom.oom_kills()
        pids: Any = {}
        # The shutdown waits for this lock, so no code in this block may wait for the shutdown.
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
                # The workers have ended, so this only closes the log files.
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

        This wait is limited to the pod's grace period.
        """
        deadline = time.monotonic() + self._node_shutdown.grace_seconds
        while time.monotonic() < deadline and any(h.proc.poll() is None for h in handlers.values()):
            time.sleep(0.05)
        self._ended = {rank: h.proc.returncode for rank, h in handlers.items() if h.proc.poll() is not None}

    def _end_workers(self, context: Any, death_sig: signal.Signals) -> bool:
        """Stop the workers, and return whether they and their children have ended.

        The workers get SIGTERM, and SIGKILL after the grace period. This method waits until all
        these processes have ended, because new workers must not start while a process of an earlier
        round still holds the device. torch waits differently. After SIGKILL, torch 2.6 waits for
        workers forever, and torch 2.15 waits only for the length of the grace period. torch never
        waits for the workers' children.
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
        """Kill the workers in a planned restart, without waiting until they have saved.

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
            # torchrun must not give up here, because the operator counts the restarts.
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
        """Report the workers that have ended without being stopped by this launcher.

        A worker whose error file has an exception is reported even if its process still waits for a
        thread or a device. A worker with exit code 0 is also reported, because its exit may explain
        the errors of its peers.
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
            # The next check must compare with the counters from now on, because workers become
            # active when they write their stacks.
            self._vitals = read_vitals(local.values())
        share = protocol.MAX_LOOKS // max(1, len(local))
        self._client.send(
            FromMember.LOOKED,
            round=number,
            ranks=[
                {
                    "rank": rank,
                    # Keep the beginning of the text, because it has the innermost frames.
                    "text": text[:share],
                    "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
                    **now[pid].since(before.get(pid)),
                }
                for rank, pid in local.items()
                for text in (texts.get(rank, stacks.NONE),)
            ],
        )

    def _exit_barrier(self) -> None:
        """Do nothing. `_monitor_workers` has already waited for the other nodes.

        torchrun's own barrier would not notice that a peer was lost.
        """


def restarts_before(number: int) -> int:
    """Return TORCHELASTIC_RESTART_COUNT for the round `number`.

    Workers use the count to find each other in the store, so the count must be equal on all nodes.
    Therefore the count depends only on the round's number. In every round after a restart, the
    count is greater than 0, because scripts use it to decide whether to resume. A count is never
    used twice, because torchrun empties the log folder of a repeated count. With each coordinator
    that takes over, the count grows by a thousand.
    """
    attempt, number_of_attempt = divmod(number, NUMBERS_PER_ATTEMPT)
    return _COUNTS_PER_ATTEMPT * attempt + number_of_attempt - 1


def _ask_to_end(handler: Any, number: signal.Signals) -> None:
    """Send the signal to a worker, and in most cases also to the worker's children.

    If the worker runs the same Python as the launcher and handles the signal, only the worker gets
    the signal. The worker's data-loader processes must survive until the worker has completed its
    step and saved. They are killed once the worker has exited. All other workers get the signal
    together with their children, just as in torchrun. For example, a shell with a trap may be
    waiting for the training that it started. Raises ProcessLookupError if the worker has exited.
    """
    try:
        pid = handler.proc.pid
        alone = stacks.catches(pid, number) and Path(f"/proc/{pid}/exe").samefile("/proc/self/exe")
    # There is no /proc, the process has ended, or its program is hidden from this user.
    except OSError:
        alone = False
    if alone:
        os.kill(handler.proc.pid, number)
    else:
        handler.close(death_sig=number)


def _kill_sessions(context: Any, spare_trackers: bool) -> set[int]:
    """Send SIGKILL to the workers' processes, and return the pids of those that have not ended yet.

    Every worker leads its own session, whose processes are killed with it. With `spare_trackers`,
    Python's resource trackers are not killed. A tracker removes the files that killed processes
    have left in /dev/shm. It ends by itself once all processes that use it have ended.
    """
    left = set()
    for pid in _processes_of(set(context.pids().values())):
        # Processes of other users cannot be killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0 if spare_trackers and _is_tracker(pid) else signal.SIGKILL)
            left.add(pid)
    return left


def _processes_of(sessions: set[int]) -> list[int]:
    """Return the pids of these sessions' processes that run or still hold resources."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # This process has just ended.
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            # A zombie holds no resources, unless other threads of its process are still running.
            if int(session) in sessions and (state not in "ZX" or len(list((folder / "task").iterdir())) > 1):
                found.append(int(folder.name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _error_files(context: Any) -> dict[int, str]:
    """Return the path of each worker's error file, by the worker's local rank."""
    files: dict[int, str] = getattr(context, "error_files", {})
    return files


def _ranks(worker_group: Any) -> dict[int, int]:
    """Return the global rank of each worker, by the worker's local rank."""
    return {worker.local_rank: worker.global_rank for worker in worker_group.workers}


def _find_running(handlers: list[Any]) -> set[int]:
    """Return the pids of the workers that have not ended yet."""
    return {handler.proc.pid for handler in handlers if handler.proc.poll() is None}


def _wait(handlers: list[Any], until: float) -> None:
    """Wait until all workers have ended, or until the time `until` (monotonic seconds)."""
    while time.monotonic() < until and _find_running(handlers):
        time.sleep(POLL_SECONDS)


def rendezvous_parameters(config: Any) -> Any:
    """Return the rendezvous parameters that torchrun itself would build from its arguments."""
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
    """Report to the coordinator a worker that this launcher has not ended.

    The report contains the content of the worker's error file. `kernel_killed` indicates whether
    the kernel has killed a process in the container to free memory. That process may be this worker
    or a different one.
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
    """Return the name of the signal that killed a process; None if it exited on its own."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@dataclass(frozen=True)
class ErrorFile:
    """A worker's own record of why it failed.

    `init` means that the worker had not begun to train, and that a retry would not help. If the
    program ended with this error, `exit_code` is the program's exit code. If the program might have
    caught the error and continued, `exit_code` is None.
    """

    message: str = ""
    traceback: str = ""
    time: float | None = None
    init: bool = False
    exit_code: int | None = None


def read_error_file(path: str) -> ErrorFile:
    """Read the error file that a worker has written for torchrun.

    The time of the error is the file's modification time, because the time recorded in the file has
    only whole seconds.
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
