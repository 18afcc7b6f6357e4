"""Compares the trainer's images per second with a plain loop's: same model, batch and precision."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CHECKOUT


@dataclass(frozen=True)
class Case:
    """A measured case, in which the first `warm` of its `steps` do not count.

    On a GPU, `recorded` more steps show the device's busy share.

    `target` is the trainer's speed relative to the plain loop's. `keys` contains the trainer's keys
    in addition to those determined by the case.
    """

    name: str
    kind: str
    model: str
    batch: int
    warm: int
    steps: int
    target: float | None
    meaning: str
    keys: tuple[str, ...] = ()
    recorded: int = 0


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
)  # fmt: skip


_DATA = {"cifar": "cifar10", "jpeg": "imagefolder", "bare": "synthetic"}


def plain_command(case: Case, data: Path, workers: int) -> list[str]:
    """Return the plain loop's command."""
    script = {"cifar": "plain_cifar", "jpeg": "plain_imagenet", "bare": "bare_loop"}[case.kind]
    sizes = {"batch": case.batch, "warm": case.warm, "steps": case.steps, "recorded": case.recorded, "workers": workers}
    options = [f"--{name}={value}" for name, value in {**sizes, "model": case.model}.items()]
    return [sys.executable, "-m", f"benchmarks.trainer.{script}", str(data), *options]


def trainer_command(case: Case, data: Path, workers: int, folder: Path) -> list[str]:
    """Return the trainer's command, which writes into `folder`."""
    from benchmarks.trainer import models_of_cases

    generated = [f"data.size={(case.steps + case.recorded) * case.batch}", "data.shape=[3,224,224]"]
    arguments = [
        f"data.name={_DATA[case.kind]}",
        *(generated if case.kind == "bare" else [f"data.dir={data}"]),
        f"data.batch={case.batch}",
        f"data.workers={workers}",
        *models_of_cases.trainer_arguments(case.model),
        "optim.lr=0.01",
        "optim.weight_decay=1e-4",
        "train.epochs=1",
        f"train.log_every={math.gcd(case.warm, case.steps, case.recorded)}",
        f"checkpoint.dir={folder}",
        *case.keys,
    ]
    return [sys.executable, "-m", "benchmarks.trainer.trained", case.model, *arguments]


def make_data(case: Case, folder: Path) -> None:
    """Write the data set of a case that needs one, unless it exists."""
    from benchmarks.trainer import made_data

    make = {"cifar": made_data.cifar10, "jpeg": made_data.jpegs}.get(case.kind)
    if make and not folder.exists():
        make(folder, (case.steps + case.recorded) * case.batch)


def plain(case: Case, data: Path, workers: int) -> float:
    """Return the plain loop's images per second."""
    return float(json.loads(_run(plain_command(case, data, workers)).splitlines()[-1])["images_per_second"])


def trained(case: Case, data: Path, workers: int, folder: Path) -> float:
    """Return the trainer's images per second, from the times in its metrics.jsonl."""
    _run(trainer_command(case, data, workers, folder))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines if line["event"] == "step"}
    return (case.steps - case.warm) * case.batch / (times[case.steps] - times[case.warm])


def environment() -> dict[str, str]:
    """Return the environment for a measured process, so that it can import this package."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=CHECKOUT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def measure(cases: list[Case], rounds: int, workers: int) -> dict[str, list[tuple[float, float]]]:
    """Return (plain loop, trainer) in images per second, one pair per case and round.

    The two alternate in going first.
    """
    found: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as scratch:
        for case in cases:
            make_data(case, Path(scratch) / case.name)
        for round_ in range(rounds):
            for case in cases:
                data, run = Path(scratch) / case.name, Path(scratch) / f"run-{case.name}-{round_}"
                speeds: dict[str, float] = {}
                for who in ("plain", "trainer") if round_ % 2 == 0 else ("trainer", "plain"):
                    speeds[who] = plain(case, data, workers) if who == "plain" else trained(case, data, workers, run)
                found[case.name].append((speeds["plain"], speeds["trainer"]))
                ratio = speeds["trainer"] / speeds["plain"]
                text = f"plain {speeds['plain']:.1f}, trainer {speeds['trainer']:.1f} images/s: {ratio:.2f}"
                print(f"{round_ + 1:>3} {case.name:<16} {text}", file=sys.stderr, flush=True)
    return found


def table(cases: list[Case], found: dict[str, list[tuple[float, float]]], workers: int) -> str:
    """Return a table of medians, and of the median ratio within a round."""
    lines = [
        "| case | plain loop images/s | trainer images/s | ratio (range) | target |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        pairs = found[case.name]
        ratios = sorted(trainer / plain for plain, trainer in pairs)
        slow, fast = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        times = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(
            f"| {case.meaning}, {case.batch} per step | {slow:.0f} | {fast:.0f} | {times} | {case.target or ''} |"
        )
    rounds = len(next(iter(found.values())))
    load = f"load average {os.getloadavg()[0]:.1f}"
    return "\n".join([*lines, "", f"{rounds} rounds, interleaved; {workers} workers; {os.cpu_count()} cores; {load}."])
