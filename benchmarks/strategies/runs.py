"""Runs a case once, and measures the run from its metrics.jsonl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.strategies.cases import Case, accelerators, environment


@dataclass(frozen=True)
class Measured:
    """Samples per second after the first epoch, the last mean loss, and the run's seconds."""

    speeds: list[float]
    loss: float
    whole: float


class NotMeasured(Exception):
    """A case has failed; the message gives the reason."""


def arguments(settings: list[str], epochs: int) -> list[str]:
    """Return the trainer's arguments, with one report per epoch and nothing else in between."""
    own = (
        []
        if any(setting.startswith("model.name=") for setting in settings)
        else ["model.name=" + ("resnet18_cifar" if accelerators() else "small_cnn")]
    )
    size = "50000" if accelerators() else "2048"
    return [
        *("data.name=synthetic", "data.shape=3,32,32", f"data.size={size}", "data.batch=256", "optim.lr=0.05", *own),
        *(f"train.epochs={epochs}", f"train.eval_every={epochs}", "train.print_seconds=1e9"),
        *("checkpoint.every_epochs=0", "checkpoint.every_seconds=0", *settings),
    ]


def run(case: Case, ranks: int, settings: list[str], epochs: int, timeout: float) -> Measured:
    """Train once. Raises NotMeasured."""
    with tempfile.TemporaryDirectory(prefix="strategies-") as folder:
        given = arguments(settings, epochs)
        steps = -(-int(_value(given, "data.size")) // int(_value(given, "data.batch")))
        command = [*case.command(ranks), *given, *case.settings, f"train.log_every={steps}", f"checkpoint.dir={folder}"]
        began = time.perf_counter()
        with Path(folder, "out.txt").open("w+") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment(), cwd=folder, start_new_session=True
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise NotMeasured(f"did not finish within {timeout:.0f} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            whole = time.perf_counter() - began
            if code:
                out.seek(0)
                raise NotMeasured(_cause(out.read(), code))
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    epochs_done: list[dict[str, Any]] = [row for row in rows if row["event"] == "step"]
    if len(epochs_done) != epochs:
        raise NotMeasured(f"{len(epochs_done)} of {epochs} epochs were reported")
    return Measured([float(row["samplesPerSecond"]) for row in epochs_done[1:]], float(epochs_done[-1]["loss"]), whole)


def samples(settings: list[str]) -> int:
    """Return the number of samples in an epoch."""
    return int(_value(arguments(settings, 1), "data.size"))


def _value(given: list[str], key: str) -> str:
    return [argument.partition("=")[2] for argument in given if argument.startswith(f"{key}=")][-1]


def _cause(output: str, code: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower() or "Error:" in line]
    print(output[-3000:], file=sys.stderr)
    return (errors or lines or [f"exit code {code}"])[0][:300]
