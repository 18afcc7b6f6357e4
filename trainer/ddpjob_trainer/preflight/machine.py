"""The machine: /dev/shm, CPU threads, limits of the process."""

from __future__ import annotations

import math
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.config import Config
from ddpjob_trainer.preflight.check import Check, Context, Result, Seen, Status, gigabytes

SHARED_MEMORY = Path("/dev/shm")
_BATCHES_AHEAD = 4
_NCCL_BYTES = 2**30


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of /dev/shm, what this node's data loading needs of it, and whether several GPUs use it to talk."""

    total: int
    free: int
    needed: int
    gpus: bool


def look_shared_memory(context: Context) -> SharedMemory:
    """The file system itself. Raises OSError where there is none."""
    import torch

    usage = shutil.disk_usage(SHARED_MEMORY)
    needed = loader_bytes(context.config, context.group.world, context.group.local_world)
    return SharedMemory(usage.total, usage.free, needed, torch.cuda.is_available() and context.group.local_world > 1)


def loader_bytes(config: Config, world: int, local_world: int) -> int:
    """Bytes that a node's loader processes hold in /dev/shm: some batches ahead of each rank's, as uint8; 0 without processes."""
    if config.data.name.value not in ("imagefolder", "shards") or config.data.workers == 0:
        return 0
    return local_world * _BATCHES_AHEAD * math.ceil(config.data.batch / world) * 3 * config.data.image_size**2


def judge_shared_memory(seen: Seen[SharedMemory]) -> Result:
    """FAIL where loaders do not fit (they die of a bus error), WARN where NCCL between a node's GPUs may not (Docker gives 64 MiB)."""
    least = min(seen.values.values(), key=lambda value: value.free)
    value = f"{gigabytes(least.free)} free of {gigabytes(least.total)}; data.workers need {gigabytes(least.needed)}"
    small = [rank for rank, value in seen.values.items() if value.free < value.needed]
    if small:
        size = gigabytes(2 * max(seen.values[rank].needed for rank in small)).replace(" ", "").removesuffix("B")
        remedy = f"set storage.sharedMemory of the DDPJob to {size} (docker: --shm-size), or lower data.workers or data.batch"
        return Result("/dev/shm", Status.FAIL, value, seen.nodes.names(small), remedy)
    tight = [rank for rank, value in seen.values.items() if value.gpus and value.free < _NCCL_BYTES]
    if tight:
        remedy = "set storage.sharedMemory of the DDPJob to 1Gi or more (docker: --shm-size=1g): NCCL between a node's GPUs uses it"
        return Result("/dev/shm", Status.WARN, value, seen.nodes.names(tight), remedy)
    return Result("/dev/shm", Status.OK, value)


@dataclass(frozen=True)
class Threads:
    """Of this rank, and the cores of its node: those it may run on, less what a container's CPU limit takes away."""

    threads: int
    cores: float


def look_threads(context: Context) -> Threads:
    """Affinity and the limit of the control group (version 2, then 1)."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    return Threads(context.threads, min(cores, _quota()))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return int(quota) / int(period) if quota not in ("max", "-1") else math.inf
    except (OSError, ValueError):
        return math.inf  # No control group, or one without a limit.


def judge_threads(seen: Seen[Threads]) -> Result:
    """WARN where the ranks of a node have more threads than it has cores: they take turns, and OpenMP's barriers wait for all."""
    crowded: dict[int, tuple[int, float]] = {}
    for leader in seen.nodes.leaders:
        ranks = [rank for rank in seen.values if seen.nodes.leader[rank] == seen.nodes.leader[leader]]
        threads, cores = sum(seen.values[rank].threads for rank in ranks), min(seen.values[rank].cores for rank in ranks)
        if threads > max(math.ceil(cores), len(ranks)):
            crowded[leader] = threads, cores
    if crowded:
        threads, cores = next(iter(crowded.values()))
        remedy = "set train.threads (or OMP_NUM_THREADS) to cores / ranks per node, or raise the container's CPU limit"
        return Result("cpu threads", Status.WARN, f"{threads} threads on {cores:g} cores", seen.nodes.names(crowded), remedy)
    each, cores = sorted({value.threads for value in seen.values.values()}), min(value.cores for value in seen.values.values())
    return Result("cpu threads", Status.OK, f"{'-'.join(map(str, each))} per rank, {cores:g} cores per node")


@dataclass(frozen=True)
class Limits:
    """Soft limits (-1: none), and whether there is InfiniBand, which pins memory."""

    files: int
    locked: int
    infiniband: bool
    files_needed: int


def look_limits(context: Context) -> Limits:
    """Of this process."""
    soft = [-1 if limit == resource.RLIM_INFINITY else limit for limit in (_soft(resource.RLIMIT_NOFILE), _soft(resource.RLIMIT_MEMLOCK))]
    needed = 256 + 8 * context.group.world + 64 * context.config.data.workers
    return Limits(soft[0], soft[1], Path("/dev/infiniband").is_dir(), needed)


def _soft(which: int) -> int:
    return resource.getrlimit(which)[0]


def judge_limits(seen: Seen[Limits]) -> Result:
    """WARN for few open files (connections to each rank, pipes to each loader), and for InfiniBand without memory that may be locked."""
    few = [rank for rank, value in seen.values.items() if 0 <= value.files < value.files_needed]
    if few:
        value = seen.values[few[0]]
        remedy = f"raise it before the start: ulimit -n {max(65536, value.files_needed)}, or the container runtime's default"
        return Result("limits", Status.WARN, f"{value.files} open files, {value.files_needed} may be needed", seen.nodes.names(few), remedy)
    tight = [rank for rank, value in seen.values.items() if value.infiniband and value.locked >= 0]
    if tight:
        remedy = "ulimit -l unlimited (container runtime: memlock=-1), or NCCL cannot use InfiniBand"
        value = seen.values[tight[0]]
        return Result("limits", Status.WARN, f"{gigabytes(value.locked)} of memory may be locked", seen.nodes.names(tight), remedy)
    least = min(seen.values.values(), key=lambda value: math.inf if value.files < 0 else value.files)
    return Result("limits", Status.OK, f"{'unlimited' if least.files < 0 else least.files} open files")


CHECKS = (
    Check("/dev/shm", SharedMemory, look_shared_memory, judge_shared_memory, per_node=True),
    Check("cpu threads", Threads, look_threads, judge_threads),
    Check("limits", Limits, look_limits, judge_limits),
)
