"""torchrun's agent with the coordinator's word in it: reports failures, obeys `restart`, ends when every node has finished.

The seams into torch.distributed.elastic (2.6 and later): LocalElasticAgent's `_rendezvous`, `_start_workers`, `_stop_workers`,
`_monitor_workers`, `_exit_barrier`; the worker context's `close`, `pids` and `error_files`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory
import stacks
import torch.distributed as dist
import wire
from departure import Departure, say
from link import Link
from rounds import FastRounds, StandardRounds
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

# Between SIGTERM and SIGKILL when the group is broken: a step can no longer be completed.
RESTART_GRACE = {wire.STANDARD: 2.0, wire.FAST: 0.3}


def agent_class(link: Link, departure: Departure, mode: str, parameters: Any) -> type[Any]:
    """LocalElasticAgent for one launcher. `parameters()`: those of torchrun's own rendezvous (Standard)."""

    class Agent(LocalElasticAgent):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._round: int | None = None
            self._remaining_restarts: int
            self._grace = RESTART_GRACE[mode]
            self._ended: dict[int, int] = {}  # local rank -> exit code, of workers that ended before any signal of ours
            self._oom_kills = 0
            departure.stop_workers = self._stop_for_good
            link.on_dump, link.on_hurry = self._dump, self._hurry
            spec = self._worker_group.spec
            if not isinstance(spec.rdzv_handler, FastRounds):
                spec.rdzv_handler = StandardRounds(link, departure, str(spec.local_addr or ""), parameters())

        # ---- rendezvous

        def _rendezvous(self, worker_group: Any) -> None:
            self._round = None
            while True:
                try:
                    super()._rendezvous(worker_group)
                    break
                except dist.DistStoreError as error:  # a node died between the round's rendezvous and its first word
                    say(f"the round came apart ({str(error)[:200]}); waits for another")
            self._round = worker_group.spec.rdzv_handler.number

        # ---- workers

        def _start_workers(self, worker_group: Any) -> Any:
            departure.park_if_leaving()
            assert self._round is not None
            # The same on all nodes, whatever each has been through: scripts and stores go by TORCHELASTIC_RESTART_COUNT.
            self._remaining_restarts = worker_group.spec.max_restarts - (self._round - 1)
            os.environ["DDPJOB_FENCE"] = "{}.{}".format(os.environ.get("DDPJOB_GENERATION", "0"), self._round)
            self._oom_kills = memory.oom_kills()
            with departure.starting:
                departure.park_if_leaving()
                self._ended, self._grace = {}, RESTART_GRACE[mode]
                pids = super()._start_workers(worker_group)
                self._wrap_close(self._pcontext)
            link.joined(self._round)
            return pids

        def _wrap_close(self, context: Any) -> None:
            """torchrun's own code closes with a grace of 30 s in several places; this node's state decides instead."""
            close = context.close
            seen: list[bool] = []

            def close_with_grace(death_sig: Any = None, timeout: float = 30) -> None:
                if not seen:
                    seen.append(True)
                    self._note_ended(context)
                close(death_sig, self._grace)
                self._kill_groups(context)

            context.close = close_with_grace

        def _note_ended(self, context: Any) -> None:
            handlers = getattr(context, "subprocess_handlers", {})
            self._ended = {rank: h.proc.returncode for rank, h in handlers.items() if h.proc.poll() is not None}
            if wire.EXIT_STEPPED_ASIDE in self._ended.values():
                self._let_step_aside(handlers)

        def _let_step_aside(self, handlers: Any) -> None:
            """One worker has saved and left as asked; the others of this node may still be saving."""
            deadline = time.monotonic() + departure.grace_seconds
            while time.monotonic() < deadline and any(h.proc.poll() is None for h in handlers.values()):
                time.sleep(0.05)
            self._ended = {rank: h.proc.returncode for rank, h in handlers.items() if h.proc.poll() is not None}

        def _kill_groups(self, context: Any) -> None:
            """What workers started and left behind; every worker leads a process group of its own."""
            for pid in context.pids().values():
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

        def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
            departure.park_if_leaving()
            if link.is_planned(self._round):
                self._grace = departure.grace_seconds
            super()._stop_workers(worker_group, *args, **kwargs)

        def _hurry(self, number: int) -> None:
            """The grace of a planned restart is over: a peer that would have saved with these workers is gone."""
            if number == self._round and self._pcontext is not None:
                self._kill_groups(self._pcontext)

        def _stop_for_good(self, grace: float) -> None:
            self._grace = grace
            if self._pcontext is not None:
                self._pcontext.close(signal.SIGTERM)

        # ---- the group

        def _monitor_workers(self, worker_group: Any) -> Any:
            departure.park_if_leaving()
            if link.must_restart(self._round):
                return self._restart_for_peer(worker_group)
            result = super()._monitor_workers(worker_group)
            departure.park_if_leaving()
            if result.state == WorkerState.FAILED:
                self._report(result.failures)
                self._remaining_restarts = max(self._remaining_restarts, 1)  # the budget is the control plane's
            elif result.state == WorkerState.SUCCEEDED:
                assert self._round is not None
                say("all workers of this node have finished; waits for the other nodes")
                if not link.wait_verdict(self._round):
                    return self._restart_for_peer(worker_group)
            return result

        def _restart_for_peer(self, worker_group: Any) -> Any:
            say(f"restarts its workers: {link.why}")
            context, number, ranks = self._pcontext, self._round, {w.local_rank: w.global_rank for w in worker_group.workers}
            self._stop_workers(worker_group)
            for local_rank, path in getattr(context, "error_files", {}).items():
                code = self._ended.get(local_rank)
                if code or (code is None and Path(path).is_file()):
                    code = context.subprocess_handlers[local_rank].proc.returncode if code is None else code
                    self._tell(number, ranks[local_rank], local_rank, context.pids()[local_rank], code, path)
            self._initialize_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)

        def _report(self, failures: Any) -> None:
            for rank, failure in failures.items():
                if self._ended and failure.local_rank not in self._ended:
                    continue  # ended by us because of the others
                self._tell(self._round, rank, failure.local_rank, failure.pid, failure.exitcode, failure.error_file)

        def _tell(self, number: Any, rank: int, local_rank: int, pid: int, code: int, error_file: str) -> None:
            out_of_memory = code == -signal.SIGKILL and memory.oom_kills() > self._oom_kills
            send_failure(link, number, rank, local_rank, pid, code, error_file, out_of_memory)

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
            for rank, text in stacks.collect({rank: pids[i] for rank, i in local.items()}).items():
                link.send("stacks", round=number, rank=rank, localRank=local[rank], text=wire.clip(text, wire.MAX_TRACEBACK))

        def _exit_barrier(self) -> None:
            """Replaced by the wait in `_monitor_workers`: a barrier in the store would not see a lost peer."""

    return Agent


def rendezvous_parameters(config: Any) -> Any:
    """As torchrun would make them of its arguments."""
    return RendezvousParameters(
        config.rdzv_backend, config.rdzv_endpoint, config.run_id, 1, 1, local_addr=config.local_addr, **config.rdzv_configs
    )


def send_failure(
    link: Link, number: int | None, rank: int, local_rank: int, pid: int, code: int, error_file: str, out_of_memory: bool
) -> None:
    """Tell the coordinator of a worker that ended by itself, with what its error file says."""
    error = read_error_file(error_file)
    name, message = signal_name(code), error.message
    if out_of_memory:
        message = "killed by the kernel: the container's memory limit ({}) is used up".format(memory.limit() or "unknown")
    elif not message:
        message = f"killed by signal {name}" if name else f"ended with exit code {code}"
    now = time.time()
    link.send(
        "failure", round=number, rank=rank, localRank=local_rank, pid=pid, exitCode=code, signal=name,
        message=wire.clip(message), traceback=wire.clip(error.traceback, wire.MAX_TRACEBACK), time=error.time or now, sent=now,
        oom=out_of_memory, init=error.init,
    )  # fmt: skip


def signal_name(code: int) -> str | None:
    """Name of the signal that ended a process, None when none did."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@dataclass(frozen=True)
class ErrorFile:
    """What a worker wrote of its end. `init`: it had not begun to train, and trying again would not help."""

    message: str = ""
    traceback: str = ""
    time: float | None = None
    init: bool = False


def read_error_file(path: str) -> ErrorFile:
    """Of torchrun's format; its own time has whole seconds only, the file system knows better."""
    file = Path(path)
    if not file.is_file():
        return ErrorFile()
    when = file.stat().st_mtime
    try:
        content = json.loads(file.read_text())["message"]
    except (ValueError, KeyError, TypeError) as error:
        return ErrorFile(f"its error file {path} is not readable: {error}", time=when)
    if not isinstance(content, dict):
        return ErrorFile(str(content), time=when)
    extra = content.get("extraInfo", {})
    return ErrorFile(str(content.get("message", "")), str(extra.get("py_callstack", "")), when, bool(extra.get("ddpjob_init")))
