"""The compared ways to train, with their commands and missing requirements on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import CHECKOUT
from scripts import install_horovod


@dataclass(frozen=True)
class Case:
    """One way to train.

    `kind` is its group in the chart. `command(ranks)` returns the command without the trainer's
    arguments. `lacks(ranks)` returns why this machine cannot run it, empty if it can.
    """

    name: str
    kind: str
    settings: tuple[str, ...]
    command: Callable[[int], list[str]]
    lacks: Callable[[int], str] = lambda ranks: ""


def alone(ranks: int) -> list[str]:
    """Return the command for a single process."""
    return [sys.executable, "-m", "ddpjob_trainer"]


def torchrun(ranks: int) -> list[str]:
    """Return the command with which torchrun starts all ranks."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "ddpjob_trainer",
    ]


def spawn(ranks: int) -> list[str]:
    """Return the command with which torch.multiprocessing starts all ranks."""
    return [sys.executable, "-m", "ddpjob_trainer", "--spawn", str(ranks)]


def horovodrun(ranks: int) -> list[str]:
    """Return the command with which Horovod's launcher starts all ranks."""
    folder = horovod_folder()
    launcher = str(folder / "bin" / "horovodrun") if folder else shutil.which("horovodrun") or "horovodrun"
    return [
        sys.executable,
        launcher,
        "-np",
        str(ranks),
        "-H",
        f"localhost:{ranks}",
        sys.executable,
        "-m",
        "ddpjob_trainer",
    ]


def server_and_workers(ranks: int) -> list[str]:
    """Return the command for a parameter server.

    On the CPU, which ranks share, the server is an additional rank; on GPUs, it is one of the
    ranks.
    """
    return torchrun(ranks if accelerators() else ranks + 1)


def accelerators() -> int:
    """Return the number of GPUs; 0 if ranks use the CPU."""
    return torch.cuda.device_count()


def horovod_folder() -> Path | None:
    """Return where the tests installed Horovod for this torch; None if they did not.

    The folder is next to the cached wheel.
    """
    site = install_horovod.wheel_folder(install_horovod.probe(sys.executable)) / "site"
    return site if (site / "horovod").exists() else None


def _devices(ranks: int) -> str:
    if 0 < accelerators() < ranks:
        return f"needs {ranks} devices, but {accelerators()} are visible"
    return ""


def _two_devices(ranks: int) -> str:
    return (
        ""
        if accelerators() > 1
        else "needs two accelerators: with fewer, DataParallel passes the batch to the model, as single does"
    )


def _horovod(ranks: int) -> str:
    if importlib.util.find_spec("horovod") is None and horovod_folder() is None:
        return "Horovod is not installed; run python scripts/install_horovod.py"
    return _devices(ranks)


def _deepspeed(ranks: int) -> str:
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed; run pip install deepspeed"
    return _devices(ranks)


def _server(ranks: int) -> str:
    return "needs 2 devices: one is the server's" if ranks < 2 and accelerators() else _devices(ranks)


def environment() -> dict[str, str]:
    """Return this process's environment, with this checkout's trainer and Horovod on PYTHONPATH."""
    paths = [CHECKOUT / "trainer", *([folder] if (folder := horovod_folder()) else [])]
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *([known] if known else [])])}


CASES = [
    Case("single", "one process", ("strategy=single",), alone),
    Case("dp", "one process", ("strategy=dp",), alone, _two_devices),
    Case("ddp", "ddp", ("strategy=ddp",), torchrun, _devices),
    Case("ddp --spawn", "ddp", ("strategy=ddp",), spawn, _devices),
    *(
        Case(
            f"ddp {level}",
            "precision",
            ("strategy=ddp", f"amp.level={level}", "amp.loss_scale=128.0"),
            torchrun,
            _devices,
        )
        for level in ("O1", "O2", "O3")
    ),
    Case("horovod", "libraries", ("strategy=horovod",), horovodrun, _horovod),
    Case("horovod fp16", "libraries", ("strategy=horovod", "horovod.compression=fp16"), horovodrun, _horovod),
    *(
        Case(
            f"deepspeed ZeRO-{stage}",
            "libraries",
            ("strategy=deepspeed", f"deepspeed.stage={stage}"),
            torchrun,
            _deepspeed,
        )
        for stage in range(4)
    ),
    Case("fsdp", "parts of a model", ("strategy=fsdp",), torchrun, _devices),
    Case("pipeline", "parts of a model", ("strategy=pipeline",), torchrun, _devices),
    Case("parameter_server", "parts of a model", ("strategy=parameter_server",), server_and_workers, _server),
]
