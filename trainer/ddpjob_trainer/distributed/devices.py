"""Chooses the device and the process-group backend for the whole trainer."""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import StrategyName
from ddpjob_trainer.errors import ConfigError, DeviceError

_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl", "cpu": "gloo"}


_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Environment variables that limit which devices a process sees."""


@dataclass(frozen=True)
class RankPlacement:
    """The device on which a rank computes, and the backend for init_process_group."""

    device: torch.device
    backend: str


def choose(backend: str, local_rank: int) -> RankPlacement:
    """Return the device of a rank, and the backend for its process group.

    `backend` is auto, nccl, gloo, hccl, xccl or mpi. With auto, the rank uses an accelerator if the
    machine has one. A group on accelerators also includes gloo for CPU tensors, so that small
    decisions do not wait for the device's stream. Ranks on a Mac compute on the CPU with gloo,
    because mps does not support collectives. Raises ConfigError, DeviceError.
    """
    kinds = {name: kind for kind, name in _BACKENDS.items()}
    if backend == "auto":
        kind = _accelerator()
        if kind == "cpu" and (given := _gpus_of_job()):
            raise DeviceError(
                f"train.backend=auto: this node has {given}, but torch does not see any device; check the"
                " driver (nvidia-smi and the kernel log on that node), or set spec.backend to gloo to train on"
                " the CPU"
            )
    elif backend in kinds:
        kind = kinds[backend]
    elif backend == "mpi":
        return RankPlacement(torch.device("cpu"), "mpi")
    else:
        raise ConfigError(f"train.backend: {backend!r} is unknown; use auto, nccl, gloo, hccl, xccl or mpi")
    if kind == "cpu":
        return RankPlacement(torch.device("cpu"), "gloo")
    count = _count(kind)
    if local_rank >= count == 1 and _each_rank_sees_its_own(kind):
        local_rank = 0
    if local_rank >= count:
        raise DeviceError(
            f"train.backend={backend}: local rank {local_rank} needs {kind} device {local_rank}, but {count}"
            f" are visible ({_VISIBLE[kind]}={os.environ.get(_VISIBLE[kind], '')}); start fewer processes per"
            " node, or set"
            " train.backend=gloo to train on the CPU"
        )
    device = torch.device(kind, local_rank)
    getattr(torch, kind).set_device(device)
    return RankPlacement(device, f"cpu:gloo,{kind}:{_BACKENDS[kind]}")


def devices_per_rank(config: Config) -> int:
    """Return the number of devices on which a process computes."""
    return config.ddp_mp.devices if config.strategy is StrategyName.DDP_MP else 1


def choose_for(config: Config, local_rank: int) -> RankPlacement:
    """Return the placement of a rank, on the first of its devices."""
    return choose(config.train.backend, local_rank * devices_per_rank(config))


def _each_rank_sees_its_own(kind: str) -> bool:
    """Return whether the only visible device is meant for this rank alone, as in Slurm scripts.

    Scripts for Slurm and mpirun choose one device for each rank. torchrun and a job's launcher give
    all processes on a node the same environment, so these processes would share a single visible
    device.
    """
    return bool(os.environ.get(_VISIBLE[kind])) and "TORCHELASTIC_RUN_ID" not in os.environ


def search_algorithms(device: torch.device, *, repeatable: bool) -> None:
    """Let cuDNN time its algorithms for each convolution size and use the fastest one.

    `repeatable` turns this search off, because the next run might choose a different algorithm and
    compute different bits.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not repeatable


def _gpus_of_job() -> str:
    """Return the number and resource name of the job's GPUs that torch should see in this pod.

    The result is empty if the job requests no GPUs, or none that this build of torch can use. If
    the driver fails, torch does not see the GPUs, even after a restart in the same pod. If this
    node then trained on the CPU, all other nodes would wait for it in NCCL.
    """
    number, _, resource = JobEnvironment.read().gpus.partition(" ")
    # `ddpjob run` hides all GPUs of a machine that has too few of them.
    hidden = os.environ.get(_VISIBLE["cuda"]) == ""
    built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    usable = built and resource.startswith(("nvidia.com/", "amd.com/"))
    return f"{number} {resource}" if usable and not hidden and number != "0" else ""


def _accelerator() -> str:
    return next((kind for kind in ("cuda", "npu", "xpu") if _count(kind) > 0), "cpu")


def _count(kind: str) -> int:
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def usable_cores() -> float:
    """Return the number of cores that this process can use. The number can be fractional."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, cpu_limit())


def cpu_limit(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the number of cores that the process's control group allows.

    Version 2 of control groups takes precedence over version 1. Without a limit, the result is
    infinite.
    """
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota not in ("max", "-1") else math.inf
    except (OSError, ValueError):
        return math.inf  # There is no control group, or it has no limit.


def limit_threads(threads: int, local_world: int, *, repeatable: bool = False) -> None:
    """Set the number of threads that torch uses in this rank.

    If `threads` is above 0, this is the number. If `threads` is 0, the number is this rank's equal
    share of the node's usable cores. With `repeatable`, 0 means one thread instead, because sums on
    a CPU depend on the number of threads and must not depend on the number of ranks.

    If `threads` is 0 and the user has set OMP_NUM_THREADS, this function does nothing. It ignores
    OMP_NUM_THREADS=1, because torchrun sets that value by default. Raises ConfigError.
    """
    if threads < 0:
        raise ConfigError(f"train.threads={threads}: must be at least 0; 0 is an equal share of the cores")
    if threads == 0 and os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return
    share = 1 if repeatable else max(1, int(usable_cores() / local_world))
    torch.set_num_threads(threads or share)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # Parameters of mallopt, from malloc.h.
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""The largest mmap threshold, in bytes, that glibc would choose by itself. Setting the trim
threshold stops glibc from adjusting the mmap threshold, so both thresholds must be set.
"""


def keep_freed_memory(device: torch.device) -> None:
    """Keep the memory that a step on the CPU frees, so that the next step can reuse it.

    By default, glibc returns this memory to the kernel, which must clear every page again for the
    next step. With ResNet-18 and 64 images, this costs 90,000 page faults and 4 % of the CPU time
    of each step. Keeping the memory does not raise the peak memory use. This function does nothing
    on other devices, with other C libraries, or if the user has tuned glibc's allocator
    (mallopt(3)).
    """
    tuned = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type == "cpu" and mallopt is not None and not tuned:
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
