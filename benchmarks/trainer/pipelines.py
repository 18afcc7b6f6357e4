"""Compares the trainer with a plain loop of the same model, batch and precision.

With several ranks, torchrun starts both, and the plain loop is a plain DDP loop. Processor time is
that of all ranks and of their data workers.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.processes import kill_all


@dataclass(frozen=True)
class Case:
    """A measured case, in which the first `warm` of its `steps` do not count.

    On a GPU, `recorded` more steps show the device's busy share.

    `target` is the trainer's speed relative to the plain loop's. `batch` is the global batch.
    """

    name: str
    kind: str
    model: str
    batch: int
    warm: int
    steps: int
    target: float | None
    meaning: str
    recorded: int = 0
    ranks: int = 1


CASES = (
    Case(
        "cifar-resnet18", "cifar", "resnet18_cifar", 128, 2, 8, 1.3,
        "CIFAR-10, ResNet-18: dominated by arithmetic on a CPU",
    ),
    Case(
        "cifar-small", "cifar", "small_cnn:8", 128, 20, 140, 1.3,
        "CIFAR-10, a small network: arithmetic and input take about as long",
    ),
    Case("cifar-input", "cifar", "tiny", 128, 20, 320, 1.3, "CIFAR-10, tiny network: the input alone"),
    Case(
        "jpeg-resnet18", "jpeg", "torchvision:resnet18", 32, 2, 8, None,
        "JPEGs, ResNet-18 at 224: dominated by arithmetic on a CPU",
    ),
    Case("jpeg-input", "jpeg", "tiny", 64, 5, 45, 1.5, "JPEGs, tiny network: reading and decoding alone"),
    Case("cifar-resnet18-2", "cifar", "resnet18_cifar", 128, 2, 10, 1.0, "CIFAR-10, ResNet-18, 2 ranks", ranks=2),
    Case("cifar-small-2", "cifar", "small_cnn:8", 128, 20, 220, 1.0, "CIFAR-10, a small network, 2 ranks", ranks=2),
)  # fmt: skip


_DATA = {"cifar": "cifar10", "jpeg": "imagefolder", "bare": "synthetic"}


@dataclass(frozen=True)
class Speed:
    """Images per second, and milliseconds of processor time per step."""

    images: float
    processor: float


def _start(case: Case) -> list[str]:
    """Return the start of a command that runs a module on each rank."""
    ranks = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", "-m"]
    return [sys.executable, "-m", *(ranks if case.ranks > 1 else [])]


def plain_command(case: Case, data: Path, workers: int) -> list[str]:
    """Return the plain loop's command."""
    script = {"cifar": "plain_cifar", "jpeg": "plain_imagenet", "bare": "bare_loop"}[case.kind]
    sizes = {"batch": case.batch, "warm": case.warm, "steps": case.steps, "recorded": case.recorded, "workers": workers}
    options = [f"--{name}={value}" for name, value in {**sizes, "model": case.model}.items()]
    return [*_start(case), f"benchmarks.trainer.{script}", str(data), *options]


def trainer_command(case: Case, data: Path, workers: int, folder: Path) -> list[str]:
    """Return the trainer's command, which writes into `folder`."""
    from benchmarks.trainer import models_of_cases, step_timer

    generated = [f"data.size={(case.steps + case.recorded) * case.batch}", "data.shape=[3,224,224]"]
    arguments = [
        f"data.name={_DATA[case.kind]}",
        *(generated if case.kind == "bare" else [f"data.dir={data}"]),
        f"data.batch={case.batch}",
        f"data.workers={workers}",
        *models_of_cases.trainer_arguments(case.model),
        "optim.lr=0.01",
        "optim.weight_decay=1e-4",
        *("train.epochs=1", "train.eval_every=0", "checkpoint.every_epochs=0"),
        f"train.log_every={math.gcd(case.warm, case.steps, case.recorded)}",
        f"train.callbacks={step_timer.__name__}:callback",
        f"checkpoint.dir={folder}",
    ]
    timer = f"{step_timer.STEPS}={case.warm},{case.steps - case.warm},{case.recorded},{case.batch}"
    return ["env", timer, *_start(case), "benchmarks.trainer.trained", case.model, *arguments]


def make_data(case: Case, folder: Path) -> None:
    """Write the data set of a case that needs one, unless it exists."""
    from benchmarks.trainer import made_data

    make = {"cifar": made_data.cifar10, "jpeg": made_data.jpegs}.get(case.kind)
    if make and not folder.exists():
        make(folder, (case.steps + case.recorded) * case.batch)


def read_speed(output: str, ranks: int) -> Speed:
    """Return the speed of the slowest rank, and the processor time of all ranks."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"images_per_second"')]
    if len(found) != ranks:
        raise ValueError(f"{len(found)} of {ranks} ranks printed figures")
    return Speed(min(one["images_per_second"] for one in found), sum(one["processor_ms"] for one in found))


def environment() -> dict[str, str]:
    """Return the environment for a measured process, so that it can import this package."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def _run(command: list[str]) -> str:
    process = subprocess.Popen(command, cwd=CHECKOUT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = (stream.decode(errors="replace") for stream in process.communicate())
    finally:
        if process.poll() is None:
            kill_all(process)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{out[-2000:]}\n{err[-4000:]}")
    return out


def measure(cases: list[Case], rounds: int, workers: int) -> dict[str, list[tuple[Speed, Speed]]]:
    """Return (plain loop, trainer), one pair per case and round. The two alternate in going first.

    The ranks of a case share the `workers`.
    """
    found: dict[str, list[tuple[Speed, Speed]]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as scratch:
        for case in cases:
            make_data(case, Path(scratch) / case.name)
        for round_ in range(rounds):
            for case in cases:
                data, run = Path(scratch) / case.name, Path(scratch) / f"run-{case.name}-{round_}"
                each = -(-workers // case.ranks)
                commands = {
                    "plain": plain_command(case, data, each),
                    "trainer": trainer_command(case, data, each, run),
                }
                order = list(commands) if round_ % 2 == 0 else list(commands)[::-1]
                speeds = {who: read_speed(_run(commands[who]), case.ranks) for who in order}
                plain, trainer = speeds["plain"], speeds["trainer"]
                found[case.name].append((plain, trainer))
                text = f"plain {plain.images:.1f}, trainer {trainer.images:.1f} images/s:"
                text += f" {trainer.images / plain.images:.2f}; {plain.processor:.1f}, {trainer.processor:.1f} ms"
                print(f"{round_ + 1:>3} {case.name:<16} {text}", file=sys.stderr, flush=True)
    return found


def table(cases: list[Case], found: Mapping[str, list[tuple[Speed, Speed]]], workers: int) -> str:
    """Return a table of medians, and of the median ratio within a round."""
    lines = [
        "| case | plain loop images/s | trainer images/s | ratio (range) | target"
        " | plain loop, processor time per step | trainer | ratio (range) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        pairs = found[case.name]
        images = [(plain.images, trainer.images) for plain, trainer in pairs]
        spent = [(plain.processor, trainer.processor) for plain, trainer in pairs]
        (slow, fast), (more, less) = (map(statistics.median, zip(*values, strict=True)) for values in (images, spent))
        cells = [f"{case.meaning}, {case.batch} per step", f"{slow:.0f}", f"{fast:.0f}", _ratio(images)]
        cells += [str(case.target or ""), f"{more:.0f} ms", f"{less:.0f} ms", _ratio(spent)]
        lines.append(f"| {' | '.join(cells)} |")
    rounds = len(next(iter(found.values())))
    load = f"load average {os.getloadavg()[0]:.1f}"
    return "\n".join([*lines, "", f"{rounds} rounds, interleaved; {workers} workers; {os.cpu_count()} cores; {load}."])


def _ratio(pairs: list[tuple[float, float]]) -> str:
    ratios = sorted(trainer / plain for plain, trainer in pairs)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
