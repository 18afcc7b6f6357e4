"""Device and process-group backend, chosen in this one place."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ddpjob_trainer.errors import ConfigError

_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl", "cpu": "gloo"}


@dataclass(frozen=True)
class Placement:
    """Where a rank computes (`device`) and how ranks talk (`backend`, as init_process_group takes it)."""

    device: torch.device
    backend: str


def choose(backend: str, local_rank: int) -> Placement:
    """The accelerator of this machine and its backend, or what `backend` (auto, nccl, gloo, hccl, xccl, mpi) asks for.

    An accelerator's group gets gloo beside it for tensors on the CPU: small decisions must not wait for the device's stream.
    mps has no collectives, so that ranks on a Mac compute on the CPU with gloo. Raises ConfigError.
    """
    kinds = {name: kind for kind, name in _BACKENDS.items()}
    if backend == "auto":
        kind = _accelerator()
    elif backend in kinds:
        kind = kinds[backend]
    elif backend == "mpi":
        return Placement(torch.device("cpu"), "mpi")
    else:
        raise ConfigError(f"train.backend: {backend!r} is not known; write auto, nccl, gloo, hccl, xccl or mpi")
    if kind == "cpu":
        return Placement(torch.device("cpu"), "gloo")
    count = _count(kind)
    if local_rank >= count:
        raise ConfigError(
            f"train.backend={backend}: local rank {local_rank} needs {kind} device {local_rank}, and {count} are visible;"
            f" start fewer processes per node, or set train.backend=gloo to train on the CPU"
        )
    device = torch.device(kind, local_rank)
    getattr(torch, kind).set_device(device)
    return Placement(device, f"cpu:gloo,{kind}:{_BACKENDS[kind]}")


def _accelerator() -> str:
    return next((kind for kind in ("cuda", "npu", "xpu") if _count(kind) > 0), "cpu")


def _count(kind: str) -> int:
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def limit_threads(threads: int, local_world: int) -> None:
    """Share this machine's cores among its ranks; `threads` 0 means an equal share. OMP_NUM_THREADS, set by a user, counts more.

    Raises ConfigError.
    """
    if threads < 0:
        raise ConfigError(f"train.threads: {threads} is less than 0; write a number of threads, or 0 for an equal share of the cores")
    if threads == 0 and os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // local_world))
