"""The ways to train that are compared, how each is started, and why one cannot be on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """`kind` is what it is drawn as; `command(ranks)` starts it, before the trainer's arguments; `lacks(ranks)` is what is missing here."""

    name: str
    kind: str
    settings: tuple[str, ...]
    command: Callable[[int], list[str]]
    lacks: Callable[[int], str] = lambda ranks: ""


def alone(ranks: int) -> list[str]:
    """One process."""
    return [sys.executable, "-m", "ddpjob_trainer"]


def torchrun(ranks: int) -> list[str]:
    """All ranks by torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "ddpjob_trainer"]


def spawn(ranks: int) -> list[str]:
    """All ranks by torch.multiprocessing."""
    return [sys.executable, "-m", "ddpjob_trainer", "--spawn", str(ranks)]


def horovodrun(ranks: int) -> list[str]:
    """All ranks by Horovod's launcher."""
    folder = horovod_folder()
    launcher = str(folder / "bin" / "horovodrun") if folder else shutil.which("horovodrun") or "horovodrun"
    return [sys.executable, launcher, "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable, "-m", "ddpjob_trainer"]


def server_and_workers(ranks: int) -> list[str]:
    """On the CPU, where nothing keeps two ranks apart, the server comes on top of as many workers as others have ranks."""
    return torchrun(ranks if accelerators() else ranks + 1)


def accelerators() -> int:
    """Devices that ranks can compute on, 0 where it is the CPU."""
    return torch.cuda.device_count()


def horovod_folder() -> Path | None:
    """Where scripts/install_horovod.py or the tests have put a Horovod for this torch, beside its wheel."""
    spec = importlib.util.spec_from_file_location("install_horovod", REPOSITORY / "scripts" / "install_horovod.py")
    assert spec is not None and spec.loader is not None
    installer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(installer)
    site: Path = installer.wheel_folder(installer.probe(sys.executable)) / "site"
    return site if (site / "horovod").exists() else None


def _devices(ranks: int) -> str:
    if 0 < accelerators() < ranks:
        return f"needs {ranks} devices, and {accelerators()} are visible"
    return ""


def _two_devices(ranks: int) -> str:
    return "" if accelerators() > 1 else "needs two accelerators: with fewer DataParallel hands the batch on to the model, as single does"


def _horovod(ranks: int) -> str:
    if importlib.util.find_spec("horovod") is None and horovod_folder() is None:
        return "Horovod is not installed: python scripts/install_horovod.py"
    return _devices(ranks)


def _deepspeed(ranks: int) -> str:
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install 'ddpjob[deepspeed]'"
    return _devices(ranks)


def _server(ranks: int) -> str:
    return "needs 2 devices: one is the server's" if ranks < 2 and accelerators() else _devices(ranks)


def environment() -> dict[str, str]:
    """This process's, with the trainer of this checkout and Horovod to be found."""
    places = [REPOSITORY / "trainer", *([folder] if (folder := horovod_folder()) else [])]
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, places), *([known] if known else [])])}


CASES = [
    Case("single", "one process", ("strategy=single",), alone),
    Case("dp", "one process", ("strategy=dp",), alone, _two_devices),
    Case("ddp", "ddp", ("strategy=ddp",), torchrun, _devices),
    Case("ddp --spawn", "ddp", ("strategy=ddp",), spawn, _devices),
    *(
        Case(f"ddp {level}", "precision", ("strategy=ddp", f"amp.level={level}", "amp.loss_scale=128.0"), torchrun, _devices)
        for level in ("O1", "O2", "O3")
    ),
    Case("horovod", "libraries", ("strategy=horovod",), horovodrun, _horovod),
    Case("horovod fp16", "libraries", ("strategy=horovod", "horovod.compression=fp16"), horovodrun, _horovod),
    *(
        Case(f"deepspeed ZeRO-{stage}", "libraries", ("strategy=deepspeed", f"deepspeed.stage={stage}"), torchrun, _deepspeed)
        for stage in range(4)
    ),
    Case("fsdp", "parts of a model", ("strategy=fsdp",), torchrun, _devices),
    Case("pipeline", "parts of a model", ("strategy=pipeline",), torchrun, _devices),
    Case("parameter_server", "parts of a model", ("strategy=parameter_server",), server_and_workers, _server),
]
