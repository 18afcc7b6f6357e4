"""Real ranks for tests: forked processes with gloo, which need not import torch, and real torchrun
for tests that depend on its agent.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from ddpjob_trainer import config, train
from machine import free_port, slowness

# Autograd starts its threads in the first backward pass of a process, one per device that it then
# finds, and forked processes cannot use them. Without a GPU it finds none unless a FakeTensorMode has
# been used before, so this pass comes before all tests.
torch.ones(1, requires_grad=True).sum().backward()

TINY = [
    "data.name=digits",
    "data.batch=200",
    "model.width=4",
    "train.epochs=2",
    "train.log_every=1",
    "optim.lr=0.05",
    "train.ledger=true",
    "checkpoint.every_seconds=0",
    "train.timeout_seconds=60",
    "eval.pictures=false",
]


@dataclass
class Ended:
    """A rank's result: its exit code (negative for a signal), and the message of an exception."""

    code: int
    error: str


Prepare = Callable[[int], None]
Environment = Callable[[int], dict[str, str]]


def start(
    world: int,
    arguments: list[str],
    prepare: Prepare | None = None,
    env: Environment | None = None,
    *,
    clean: bool = False,
) -> list[Any]:
    """Start `world` forked ranks that run the trainer. `prepare(rank)` may plant a defect in the
    rank's process.

    `clean` ranks are forked from a process that has only imported the trainer, because the threads
    of obstore do not survive a fork.
    """
    port = free_port()
    context = _clean_context() if clean else multiprocessing.get_context("fork")
    started = []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **(env(rank) if env else {}),
        }
        process = context.Process(target=_rank, args=(own, arguments, prepare, send))
        process.start()
        send.close()
        started.append((process, receive))
    return started


def _rank(env: dict[str, str], arguments: list[str], prepare: Callable[[int], None] | None, send: Any) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        if prepare is not None:
            prepare(int(env["RANK"]))
        code = train.run(config.load(None, [*arguments, "train.threads=1"]))
        send.send("")
    except Exception as error:
        traceback.print_exc()
        send.send(f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    os._exit(code)


def finish(started: list[Any], timeout: float = 60) -> list[Ended]:
    """Wait for all ranks."""
    ended = []
    for process, receive in started:
        process.join(timeout * slowness())
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"rank process {process.pid} did not end in {timeout} s")
        error = ""
        with contextlib.suppress(EOFError):
            error = receive.recv() if receive.poll() else ""
        ended.append(Ended(process.exitcode, error))
    return ended


def run(
    world: int, arguments: list[str], prepare: Prepare | None = None, env: Environment | None = None
) -> list[Ended]:
    """Start ranks and wait for them."""
    return finish(start(world, arguments, prepare, env))


def called(world: int, act: Callable[[int], Any], timeout: float = 120) -> list[Any]:
    """Call `act(rank)` in each of `world` processes, and return the results. An exception is
    returned as a string.

    The processes are forked from a process without threads: a lock that another thread of the
    tests' process holds would stay locked in its forks.
    """
    context = _clean_context()
    work = cloudpickle.dumps(act)
    started = []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_called, args=(work, rank, send))
        process.start()
        send.close()
        started.append((process, receive))
    try:
        for process, receive in started:
            assert receive.poll(timeout * slowness()), f"rank process {process.pid} sent nothing in {timeout} s"
        return [pickle.loads(receive.recv_bytes()) for _, receive in started]
    finally:
        for process, _ in started:
            process.kill()


def _clean_context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddpjob_trainer.train"])
    return context


def _called(work: bytes, rank: int, send: Any) -> None:
    torch.set_num_threads(1)
    try:
        result = pickle.loads(work)(rank)
    except Exception as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    send.send_bytes(pickle.dumps(result))  # sent by value, because the parent reads it after this process has ended
    os._exit(0)


def good(world: int, arguments: list[str], **more: Any) -> None:
    """Run ranks, and check that all of them exit with 0."""
    ended = run(world, arguments, **more)
    assert [end.code for end in ended] == [0] * world, ended


def stop_at(step: int) -> Callable[[int], None]:
    """Return a hook that sends SIGTERM to the last rank while step number `step` runs."""

    def prepare(rank: int) -> None:
        import signal

        from ddpjob_trainer.lifecycle import signals
        from ddpjob_trainer.reporting.ledger import Ledger

        signals.PACE_SECONDS = 0.0  # Let the ranks agree at each step.
        write = Ledger.step

        def step_and_signal(self: Ledger, number: int, taken: Any) -> None:
            write(self, number, taken)
            if number == step - 1 and rank == int(os.environ["WORLD_SIZE"]) - 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)

        Ledger.step = step_and_signal  # type: ignore[method-assign]

    return prepare


def metrics(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of one kind."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def final_losses(run_dir: Path) -> list[float]:
    """Return the loss of every step. If a step was repeated, return its last loss."""
    losses: dict[int, float] = {}
    for row in (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()):
        if row["event"] == "start":
            losses = {step: loss for step, loss in losses.items() if step <= row["step"]}
        elif row["event"] == "step":
            losses[row["step"]] = row["loss"]
    assert sorted(losses) == list(range(1, len(losses) + 1))
    return [losses[step] for step in sorted(losses)]


def torchrun(nproc: int, arguments: list[str], cwd: Path, *, max_restarts: int = 0) -> subprocess.Popen[str]:
    """Start the trainer under real torchrun. Its output goes to cwd/out.txt."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={nproc}",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
        "-m",
        "ddpjob_trainer",
        *arguments,
    ]
    with (cwd / "out.txt").open("w") as out:
        return subprocess.Popen(
            command,
            cwd=cwd,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def steps(folder: Path) -> int:
    """Return the number of steps that the run with this checkpoint folder has taken."""
    return len(metrics(folder / "run", "step")) if (folder / "run" / "metrics.jsonl").exists() else 0


def stop_torchrun(nproc: int, arguments: list[str], folder: Path) -> int:
    """Train under torchrun, send it SIGTERM after some steps, and return the step of the resulting
    checkpoint.
    """
    agent = torchrun(nproc, [*arguments, f"checkpoint.dir={folder}"], folder)
    try:
        until(lambda: steps(folder) > 3, 120)
        agent.send_signal(signal.SIGTERM)
        agent.wait(60)
    finally:
        agent.kill()
    (stop,) = metrics(folder / "run", "stop")
    assert (folder / f"step-{stop['step']:09d}.pt").exists()
    return int(stop["step"])


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until `condition()` is true, and return its value."""
    began = time.monotonic()
    while time.monotonic() - began < seconds * slowness():
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"the condition was not true within {seconds} s")
