"""Measures the cost of a changed number of ranks for a model with batch normalization.

Whole micro-batches cannot be distributed evenly among a changed number of ranks.

The cost is measured in CPU time of the busiest rank's computing thread, as if each rank had
its own device, because wall time is meaningless with more ranks than cores. It excludes messages
and the time spent waiting for other ranks. With a dedicated network, the messages are one small
message to each neighbour per layer and direction.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.processes import kill_all

BY_ARITHMETIC = ((8, 7), (64, 63), (64, 56), (64, 32), (8, 16), (4, 3), (2, 3))
SAMPLES = (32, 128)
"""Samples per micro-batch: few for a device, and a rank's usual batch with CIFAR."""
MEASURED = ((8, 1, SAMPLES[0]), *((began, now, samples) for samples in SAMPLES for began, now in ((4, 3), (2, 3))))
SHARED = "shared (default)"
KINDS = {"whole micro-batches": ["whole"], SHARED: [], "data.exact=false": ["data.exact=false"]}


@dataclass(frozen=True)
class Cost:
    """The busiest rank's CPU seconds per step, compared with those at the start."""

    began: int
    now: int
    samples: int
    """A rank's number of samples at the start."""
    kind: str
    seconds: float
    at_start: float

    @property
    def name(self) -> str:
        return f"{self.began} -> {self.now}, {self.samples} images"

    @property
    def throughput(self) -> float:
        """The throughput as a share of the initial throughput."""
        return self.at_start / self.seconds


def by_arithmetic(samples: int = SAMPLES[0]) -> str:
    """Return a table of the busiest rank's samples per step, which set an ideal device's time."""
    from ddpjob_trainer.data.sampler import Dealing, Dividing, SamplerState

    lines = [
        "| ranks at the start -> now | an even share would give | whole micro-batches | shared (default) | passes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for began, now in BY_ARITHMETIC:
        batch = list(range(samples * began))
        shares = {}
        for dividing in (Dividing.NO, Dividing.EXACT):
            ranks = [Dealing(rank, now, began, dividing=dividing).deal(batch, SamplerState()) for rank in range(now)]
            shares[dividing] = max(sum(len(micro.samples) for micro in own if micro.counts) for own in ranks)
        passes = Dealing(0, now, began, dividing=Dividing.EXACT).passes(len(batch)) or -(-began // now)
        whole, shared = (f"{samples / share:.0%}" for share in shares.values())
        lines.append(f"| {began} -> {now} | {now / began:.0%} | {whole} | {shared} | {passes} |")
    return "\n".join(lines)


def measure(rounds: int, cases: tuple[tuple[int, int, int], ...] = MEASURED) -> list[Cost]:
    """Measure each case with each way of distributing micro-batches, interleaved over rounds.

    A rank's fastest step counts, because other work on the machine slows down the other steps
    through caches.
    """
    found = []
    for began, now, samples in cases:
        steps: dict[str, list[float]] = {kind: [] for kind in ("start", *KINDS)}
        for _ in range(rounds):
            steps["start"].append(_busiest(began, began, samples, []))
            for kind, arguments in KINDS.items():
                steps[kind].append(_busiest(now, began, samples, arguments))
        at_start = min(steps.pop("start"))
        found += [Cost(began, now, samples, kind, min(values), at_start) for kind, values in steps.items()]
    return found


def table(found: list[Cost]) -> str:
    """Return a table of the throughput relative to the initial throughput."""
    lines = [
        f"| images per rank | ranks at the start -> now | an even share would give | {' | '.join(KINDS)} |",
        "| --- | --- | --- |" + " --- |" * len(KINDS),
    ]
    cases: dict[tuple[int, int, int], dict[str, Cost]] = {}
    for cost in found:
        cases.setdefault((cost.samples, cost.began, cost.now), {})[cost.kind] = cost
    for (samples, began, now), kinds in cases.items():
        row = " | ".join(f"{kinds[kind].throughput:.0%}" for kind in KINDS)
        lines.append(f"| {samples} | {began} -> {now} | {now / began:.0%} | {row} |")
    seconds = "; ".join(
        f"{kinds[SHARED].at_start:.2f} s with {began} ranks and {samples} images each, "
        f"{kinds[SHARED].seconds:.2f} s shared by {now}"
        for (samples, began, now), kinds in cases.items()
    )
    return "\n".join([*lines, "", f"A step of the busiest rank took {seconds}."])


def _busiest(world: int, began: int, samples: int, arguments: list[str]) -> float:
    """Return the busiest rank's CPU seconds per step."""
    from ddpjob_trainer.distributed.init_method import free_port

    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="elasticity-") as scratch:
        folder = Path(scratch)
        settings = [
            *("data.name=synthetic", "data.shape=3,32,32", f"data.batch={samples * began}"),
            *(f"data.size={samples * began * 6}", f"data.micro_batches={began}", "model.name=resnet18_cifar"),
            *("train.epochs=1", "train.eval_every=9", "train.threads=1", "checkpoint.every_epochs=0"),
            *("checkpoint.every_seconds=0", "strategy=ddp", f"checkpoint.dir={folder}", *arguments),
        ]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trainer.elastic_rank", str(folder / f"{rank}.json"), *settings],
                cwd=CHECKOUT,
                stdout=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "PYTHONPATH": str(CHECKOUT),
                },
            )
            for rank in range(world)
        ]
        try:
            codes = [process.wait(600) for process in ranks]
            if any(codes):
                raise SystemExit(f"a rank of {world} failed: {' '.join(settings)}")
        finally:
            kill_all(*ranks)
        steps = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return max(min(seconds) for seconds in steps)
