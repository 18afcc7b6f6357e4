"""Measures the share of a step taken by the trainer's bookkeeping (ledger, reports and checks).

It measures CPU time, which other work on the machine hardly affects. The parts of a
rank's main thread are compared with a bare loop of the same model on the same batches in the same
process, alternating step by step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.processes import free_port, kill_all

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
BATCH = "batches"
BARE = "bare loop"
OTHER_THREADS = "other threads"
REST = "the loop itself"
MODEL = (FORWARD, BACKWARD, OPTIMIZER)

_SETTINGS = (
    *("train.threads=1", "train.eval_every=100000", "train.log_every=10", "train.ledger=true"),
    *("checkpoint.every_epochs=0", "checkpoint.every_seconds=0"),
)


@dataclass(frozen=True)
class Case:
    """A shipped recipe, with its numbers of warm-up steps and of measured steps.

    The number of measured steps is a multiple of ten, because there is a report every ten steps.
    """

    name: str
    meaning: str
    recipe: str
    arguments: tuple[str, ...]
    ranks: int
    warm: int
    steps: int


CASES = (
    Case("digits", "small_cnn, digits, batch 64", "digits", ("train.epochs=12",), 1, 23, 230),
    Case("resnet", "ResNet-18, CIFAR-10, batch 32", "cifar10", ("train.epochs=1", "data.batch=32"), 1, 1, 10),
    Case("digits-2", "digits, 2 ranks", "digits", ("train.epochs=12",), 2, 23, 230),
    Case("resnet-2", "ResNet-18, 2 ranks", "cifar10", ("train.epochs=1", "data.batch=32"), 2, 1, 10),
)


@dataclass(frozen=True)
class Found:
    """CPU seconds per step for the busiest rank's parts."""

    case: Case
    parts: dict[str, float]

    @property
    def bare(self) -> float:
        """The bare loop's seconds."""
        return self.parts[BARE]

    @property
    def model(self) -> float:
        """The trainer's seconds for forward, backward and optimizer."""
        return sum(self.parts[part] for part in MODEL)

    @property
    def kept(self) -> dict[str, float]:
        """The bookkeeping, most expensive part first."""
        own = {part: seconds for part, seconds in self.parts.items() if part not in (*MODEL, BATCH, BARE)}
        return dict(sorted(own.items(), key=lambda item: -item[1]))

    @property
    def share(self) -> float:
        """All bookkeeping as a share of the bare loop's step."""
        return sum(self.kept.values()) / self.bare


def measure(case: Case, rounds: int) -> Found:
    """Return each part's median over rounds and ranks."""
    taken = [parts for _ in range(rounds) for parts in _run(case)]
    names = dict.fromkeys(name for parts in taken for name in parts)
    return Found(case, {name: statistics.median(parts.get(name, 0.0) for parts in taken) for name in names})


def table(found: list[Found]) -> str:
    """Return a table with one column per case. Shares are relative to the bare loop's step."""
    lines = [
        f"| part of a step | {' | '.join(each.case.meaning for each in found)} |",
        "| --- |" + " ---: |" * len(found),
        f"| bare loop: forward, backward, optimizer | {' | '.join(f'{each.bare * 1e3:.4g} ms' for each in found)} |",
        f"| the same within the trainer | {' | '.join(f'{each.model * 1e3:.4g} ms' for each in found)} |",
        f"| reading and augmenting the batch | {' | '.join(f'{each.parts[BATCH] * 1e3:.3g} ms' for each in found)} |",
    ]
    parts = dict.fromkeys(part for each in found for part in each.kept)
    for part in (*(part for part in parts if part not in (REST, OTHER_THREADS)), REST, OTHER_THREADS):
        lines.append(f"| {part} | {' | '.join(_amount(each, each.parts.get(part, 0.0)) for each in found)} |")
    total = " | ".join(f"**{_amount(each, sum(each.kept.values()))}**" for each in found)
    steps = ", ".join(str(each.case.steps) for each in found)
    return "\n".join(
        [
            *(*lines, f"| **all bookkeeping** | {total} |", ""),
            f"CPU time per step; means of {steps} steps; {os.cpu_count()} cores, load average"
            f" {os.getloadavg()[0]:.1f}.",
        ]
    )


def _amount(found: Found, seconds: float) -> str:
    return f"{max(0.0, seconds) * 1e3:.2f} ms, {max(0.0, seconds) / found.bare:.2%}"


def _run(case: Case) -> list[dict[str, float]]:
    """Run a case, and return the parts of each rank."""
    from benchmarks.trainer import made_data

    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="bookkeeping-") as scratch:
        folder = Path(scratch)
        arguments = [*_SETTINGS, *case.arguments, f"checkpoint.dir={folder / 'checkpoints'}"]
        if case.recipe == "cifar10":
            made_data.cifar10(folder / "data", 32 * (case.warm + case.steps + 1))
            arguments.append(f"data.dir={folder / 'data'}")
        arguments.append(f"strategy={'ddp' if case.ranks > 1 else 'single'}")
        group = {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(CHECKOUT)}
        module = [sys.executable, "-m", "benchmarks.trainer.bookkeeping_rank"]
        files = [folder / f"{rank}.json" for rank in range(case.ranks)]
        ranks = [
            subprocess.Popen(
                [*module, str(file), case.recipe, str(case.warm), str(case.steps), *arguments],
                cwd=CHECKOUT,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, file in enumerate(files)
        ]
        try:
            codes = [process.wait() for process in ranks]
            if any(codes):
                raise SystemExit(f"{case.name}: a rank of {case.ranks} failed")
        finally:
            kill_all(*ranks)
        return [json.loads(file.read_text()) for file in files]
