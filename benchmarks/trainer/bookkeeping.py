"""The cost of the trainer's bookkeeping (progress, ledger, a checkpoint per minute, signals) compared with a bare loop.

The two processes take turns; one is frozen while the other runs. Each turn gives the time of a step; a turn of the
trainer is compared with the mean of the bare loop's turns before and after it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.processes import descendants, kill_all

SETTLE = 0.3
Lines = Callable[[], list[tuple[int, float]]]


def measure(turns: int, seconds: float, width: int) -> list[tuple[float, float]]:
    """(bare loop, trainer): seconds per step, for each turn of the trainer."""
    from benchmarks.trainer import made_data

    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as scratch:
        folder = Path(scratch)
        made_data.cifar10(folder / "data", 10_000)
        arguments = [
            "data.name=cifar10", f"data.dir={folder / 'data'}", "data.batch=128",
            "model.name=small_cnn", f"model.width={width}", "train.epochs=1000", "train.eval_every=1000",
            "train.log_every=10", "train.print_seconds=5", "train.ledger=true", 
            "checkpoint.every_seconds=60", "optim.lr=0.01",
        ]  # fmt: skip
        times, run = folder / "bare", folder / "run"
        bare = _start(["-m", "benchmarks.trainer.bare_loop", str(times), *arguments])
        trainer = _start(
            ["-m", "ddpjob_trainer", f"checkpoint.dir={folder / 'checkpoints'}", f"train.run_dir={run}", *arguments]
        )
        try:
            loops: list[tuple[subprocess.Popen[bytes], Lines]] = [
                (bare, lambda: _bare_times(times)),
                (trainer, lambda: _trainer_times(run / "metrics.jsonl")),
            ]
            for process, lines in loops:
                _wait_for_steps(process, lines)
            _send(trainer, signal.SIGSTOP)
            _send(bare, signal.SIGSTOP)
            order = [0, *([1, 0] * turns)]
            steps = [_turn(*loops[who], seconds) for who in order]
        finally:
            for process in (bare, trainer):
                _send(process, signal.SIGCONT)
            kill_all(bare, trainer)
    bares, trainers = steps[::2], steps[1::2]
    return [((before + after) / 2, mine) for (before, after), mine in zip(pairwise(bares), trainers, strict=True)]


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    environment.pop("OMP_NUM_THREADS", None)
    return subprocess.Popen([sys.executable, *command], cwd=CHECKOUT, env=environment, stdout=subprocess.DEVNULL)


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, number)


def _turn(process: subprocess.Popen[bytes], lines: Lines, seconds: float) -> float:
    """Let the process run alone for a turn. Returns the seconds per step."""
    began = time.time()
    _send(process, signal.SIGCONT)
    time.sleep(seconds)
    _send(process, signal.SIGSTOP)
    if process.poll() is not None:
        raise SystemExit(f"{process.args} ended with {process.returncode}")
    seen = [(step, moment) for step, moment in lines() if moment > began + SETTLE]
    if len(seen) < 2:
        raise SystemExit(f"only {len(seen)} reports in a turn of {seconds} s: increase --seconds or reduce --width")
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def _bare_times(path: Path) -> list[tuple[int, float]]:
    rows = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(moment)) for step, moment in (row.split() for row in rows)]


def _trainer_times(path: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["step"], row["time"]) for row in rows if row["event"] == "step" and row["step"] % 10 == 0]


def _wait_for_steps(process: subprocess.Popen[bytes], lines: Lines, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while len(lines()) < 3:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args}: no steps within {seconds} s, exit code {process.returncode}")
        time.sleep(0.1)


def table(found: list[tuple[float, float]], width: int) -> str:
    """Medians, and the median ratio of a turn with its 95 % interval (order statistics, binomial)."""
    ratios = sorted(trainer / bare - 1 for bare, trainer in found)
    half, middle = 0.98 * len(ratios) ** 0.5, len(ratios) / 2
    low, high = ratios[max(0, int(middle - half))], ratios[min(len(ratios) - 1, int(middle + half))]
    bare, trainer = (statistics.median(pair[side] for pair in found) * 1000 for side in (0, 1))
    over = f"{statistics.median(ratios):+.2%} ({low:+.2%} to {high:+.2%})"
    lines = [
        "| network | bare loop ms per step | trainer ms per step | overhead (95 % interval) | target |",
        "| --- | --- | --- | --- | --- |",
        f"| small_cnn, width {width}, 128 CIFAR images per step | {bare:.2f} | {trainer:.2f} | {over} | below 2 % |",
    ]
    return "\n".join(
        [*lines, "", f"{len(found)} turns; {os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}."]
    )
