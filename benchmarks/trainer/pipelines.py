"""Compares the trainer's images per second with a plain loop's: same model, batch and precision."""

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


@dataclass(frozen=True)
class Case:
    """A measured case, in which the first `warm` of its `steps` do not count.

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
    gpu: bool = False


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
    Case(
        "cifar-gpu", "cifar", "resnet18_cifar", 128, 100, 400, None,
        "GPU: CIFAR-10, ResNet-18", ("model.channels_last=true",), gpu=True,
    ),
    Case(
        "cifar-gpu-compiled", "cifar", "resnet18_cifar", 128, 100, 400, 5,
        "GPU: CIFAR-10, ResNet-18, compiled", ("model.channels_last=true", "model.compile=reduce-overhead"), gpu=True,
    ),
    Case(
        "resnet50-gpu", "bare", "torchvision:resnet50", 256, 20, 80, 0.97,
        "GPU: generated images, ResNet-50 at 224, compared with a single repeated batch",
        ("model.channels_last=true", "data.shape=[3,224,224]", "checkpoint.every_epochs=0"), gpu=True,
    ),
)  # fmt: skip


def gpu_is_here() -> bool:
    """Whether torch sees a GPU.

    A separate process checks, so that this one does not hold any GPU memory.
    """
    code = "import torch; print(torch.cuda.is_available())"
    return _run([sys.executable, "-c", code]).strip() == "True"


_DATA = {"cifar": "cifar10", "jpeg": "imagefolder", "bare": "synthetic"}


def plain(case: Case, data: Path, workers: int) -> float:
    """Return the plain loop's images per second."""
    script = {"cifar": "plain_cifar", "jpeg": "plain_imagenet", "bare": "bare_loop"}[case.kind]
    sizes = [
        f"--batch={case.batch}",
        f"--warm={case.warm}",
        f"--steps={case.steps}",
        f"--workers={workers}",
        f"--model={case.model}",
    ]
    result = json.loads(
        _run([sys.executable, "-m", f"benchmarks.trainer.{script}", str(data), *sizes]).splitlines()[-1]
    )
    return float(result["images"] / result["seconds"])


def trained(case: Case, data: Path, workers: int, folder: Path) -> float:
    """Return the trainer's images per second, from the times in its metrics.jsonl."""
    from benchmarks.trainer import models_of_cases

    arguments = [
        f"data.name={_DATA[case.kind]}",
        f"data.size={case.steps * case.batch}" if case.kind == "bare" else f"data.dir={data}",
        f"data.batch={case.batch}",
        f"data.workers={workers}",
        *models_of_cases.trainer_arguments(case.model),
        "optim.lr=0.01",
        "optim.weight_decay=1e-4",
        "train.epochs=1",
        f"train.log_every={_log_every(case)}",
        f"checkpoint.dir={folder}",
        *case.keys,
    ]
    _run([sys.executable, "-m", "benchmarks.trainer.trained", case.model, *arguments])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines if line["event"] == "step"}
    return (case.steps - case.warm) * case.batch / (times[case.steps] - times[case.warm])


def _log_every(case: Case) -> int:
    """Return a report interval for the trainer that includes both ends of the counted steps."""
    return next(every for every in (10, 5, 2, 1) if case.warm % every == 0 and case.steps % every == 0)


def _run(command: list[str]) -> str:
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def measure(cases: list[Case], rounds: int, workers: int) -> dict[str, list[tuple[float, float]]]:
    """Return (plain loop, trainer) in images per second, one pair per case and round.

    The two alternate in going first.
    """
    from benchmarks.trainer import made_data

    found: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as scratch:
        make = {"cifar": made_data.cifar10, "jpeg": made_data.jpegs}
        for case in cases:
            if case.kind in make:
                make[case.kind](Path(scratch) / case.name, case.steps * case.batch)
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
