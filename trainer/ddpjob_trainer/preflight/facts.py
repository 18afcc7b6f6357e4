"""Collects a rank's own findings: software, device, folders, memory, threads and limits.

CHECKS is the table of these checks.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import resource
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import DataName
from ddpjob_trainer.data.shard_index import FILE as INDEX
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.init_method import meeting
from ddpjob_trainer.distributed.interfaces import is_loopback
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import PreflightError
from ddpjob_trainer.preflight.addresses import network_stack
from ddpjob_trainer.preflight.results import RankFinding, Status, gigabytes

_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY, _INFINIBAND = "/dev/shm", Path("/dev/infiniband")
COUNTED = ("files", "entries in the first two levels")
_BATCHES_AHEAD, _FEW_FILES, _FREE_SHARE, _NCCL_BYTES = 4, 16, 0.9, 2**30


@dataclass(frozen=True)
class Context:
    """The input for a check.

    `threads` is the number of torch threads in this process. `rank_0_stack` identifies the loopback
    of rank 0's node. `mark` is the name of rank 0's file in the checkpoint folder.
    """

    config: Config
    group: Group
    threads: int
    rank_0_stack: str
    mark: str


def versions(_: Context) -> RankFinding:
    """Return the versions of this process's software.

    Ranks with different versions of torch or NCCL cannot form a group, or get different results.
    """
    nccl = "none"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found: Any = torch.cuda.nccl
        nccl = ".".join(str(part) for part in found.version()) + _implementation()
    try:
        trainer = importlib.metadata.version("ddpjob")
    except importlib.metadata.PackageNotFoundError:
        trainer = "none"  # The trainer is running from a checkout, without being installed.
    same = {"torch": str(torch.__version__), "CUDA": torch.version.cuda or "none", "NCCL": nccl, "trainer": trainer}
    same["Python"] = platform.python_version()
    shown = ("torch", "Python") if nccl == "none" else ("torch", "NCCL", "Python")
    return RankFinding(", ".join(f"{name} {same[name]}" for name in shown), same=same)


def _implementation() -> str:
    """Return which of torch's two implementations the "nccl" backend has (nccl2 since torch 2.15).

    All ranks need the same implementation.
    """
    has_new = hasattr(torch.distributed.distributed_c10d, "_create_nccl2_process_group")
    return " (nccl2)" if has_new and os.environ.get("TORCH_DIST_USE_NCCL2") != "0" else ""


def device(context: Context) -> RankFinding:
    """Open the device that training would choose, and describe it.

    Raises ConfigError or RuntimeError if the device cannot be opened.
    """
    placement = devices.choose_for(context.config, context.group.local_rank)
    kind = placement.device.type
    if kind == "cpu":
        return RankFinding(f"CPU, {placement.backend}", same={"device": kind})
    module = getattr(torch, kind)
    free, total = module.mem_get_info(placement.device)
    name, driver = module.get_device_name(placement.device), _driver() if kind == "cuda" else "unknown"
    same = {"device": kind, "model": name, "driver": driver}
    if free < _FREE_SHARE * total:
        remedy = "another process is using GPU memory; see nvidia-smi"
        return RankFinding(f"{gigabytes(free)} of {gigabytes(total)} free", Status.WARN, remedy, same)
    return RankFinding(f"{name}, driver {driver}, {gigabytes(free)} free", same=same)


def _driver() -> str:
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text()) if _DRIVER.exists() else None
    return found[0] if found else "unknown"


def master_address(context: Context) -> RankFinding:
    """Return FAIL if the master address leads a node to itself instead of to rank 0.

    Raises OSError if the master address cannot be resolved on this node.
    """
    if context.group.world == 1 or meeting().file:
        return RankFinding("not needed, because there is only one rank" if context.group.world == 1 else "a file")
    name = meeting().address
    found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    shown = ", ".join(found)
    value = shown if name == shown else f"{name} is {shown}"
    if not any(map(is_loopback, found)):
        return RankFinding(value, same={"address": shown})
    if network_stack() == context.rank_0_stack:
        # Debian's /etc/hosts maps a node's own name to a loopback address, which is correct for the
        # ranks on that node.
        return RankFinding(value)
    remedy = "set MASTER_ADDR (or --init tcp://HOST:PORT) to rank 0's address on the network that the nodes share"
    return RankFinding(
        f"{name} resolves to a loopback address, so each node would connect to itself", Status.FAIL, remedy
    )


def checkpoint_folder(context: Context) -> RankFinding:
    """Write, sync and read back a small file in the folder where training would write.

    Rank 0's file is kept until the end of the preflight, so that other nodes can look for it.
    """
    folder, rank = context.config.checkpoint_dir, context.group.rank
    own = folder / (f"{context.mark}-{rank}" if rank else context.mark)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with own.open("wb") as file:
                file.write(own.name.encode())
                os.fsync(file.fileno())
            if own.read_bytes() != own.name.encode():
                raise PreflightError(f"{folder}: data read back differs from what was written")
        finally:
            if rank:
                own.unlink(missing_ok=True)
        counts, free = os.statvfs(folder), shutil.disk_usage(folder).free
        largest = max((_size(entry) for entry in folder.iterdir() if entry.name.startswith("step-")), default=0)
    except OSError as error:
        raise PreflightError(f"{folder} cannot be written: {error.strerror or error}") from error
    wanted = max(int(context.config.preflight.free_gb * 2**30), 2 * largest)
    if free < wanted or (counts.f_files and counts.f_favail < _FEW_FILES):
        remedy = f"free some space, lower checkpoint.keep, or use a larger volume; {gigabytes(wanted)} are needed"
        return RankFinding(f"{gigabytes(free)} free in {folder}", Status.WARN, f"{remedy} (preflight.free_gb)")
    return RankFinding(f"{folder}, {gigabytes(free)} free")


def _size(path: Path) -> int:
    return sum(_size(entry) for entry in path.iterdir()) if path.is_dir() else path.stat().st_size


def data_folder(context: Context) -> RankFinding:
    """List the data folder, read a byte from one of its files, and count its files.

    Counting takes at most half of a check's time limit.
    """
    data = context.config.data
    url = data.url if data.name == DataName.SHARDS else None
    own = data.dir is None and ":" in data.name
    if url or own or data.name in (DataName.DIGITS, DataName.SHAPES, DataName.SYNTHETIC):
        return RankFinding(f"not needed ({url or data.name})")
    if data.dir is None:
        raise PreflightError(f"no folder: data.name={data.name} needs data.dir")
    if data.download and not data.dir.exists():
        return RankFinding(f"{data.dir} does not exist yet (data.download)")
    try:
        same = count(data.dir, context.config.preflight.step_seconds / 2)
    except OSError as error:
        raise PreflightError(f"{error.filename or data.dir} cannot be read: {error.strerror}") from error
    counted = [f"{number} {what}" for what, number in same.items()] or [
        "too many files to count in preflight.step_seconds"
    ]
    return RankFinding(f"{data.dir}, {counted[-1]}", same=same)


def count(root: Path, seconds: float) -> dict[str, str]:
    """Count the entries in the first two levels of a folder, and the files in all of its levels.

    The folder is read level by level. If time runs out, only the counts of finished levels are
    returned. Hidden entries, the shard index and lost+found do not count as data. Raises
    PreflightError if there are no files.
    """
    deadline = time.monotonic() + seconds
    upper = files = 0
    waiting = deque([(str(root), 0)])
    while waiting:
        folder, depth = waiting.popleft()
        for entry in os.scandir(folder):
            if entry.name.startswith(".") or entry.name in (INDEX, "lost+found"):
                continue
            upper += depth < 2
            if entry.is_dir():
                waiting.append((entry.path, depth + 1))
                continue
            files += 1
            if files == 1:
                with Path(entry.path).open("rb") as file:
                    file.read(1)
        if waiting and time.monotonic() > deadline:
            return {COUNTED[1]: str(upper)} if waiting[0][1] > 1 else {}
    if not files:
        raise PreflightError(f"{root}: the folder is empty")
    return dict(zip(COUNTED, (str(files), str(upper)), strict=True))


def shared_memory(context: Context) -> RankFinding:
    """Compare the size of /dev/shm with the memory that loader processes need there.

    For each rank, loader processes keep a few batches ready in /dev/shm, as uint8.
    """
    group, data, needed = context.group, context.config.data, 0
    if data.size_key and data.workers:
        pixels = math.ceil(data.batch / group.world) * data.image_size**2
        # The test set has its own pool of loader processes.
        pixels += context.config.train.eval_batch * (data.size_tested or data.image_size) ** 2
        per_rank = _BATCHES_AHEAD * 3 * pixels
        needed = group.local_world * per_rank
    usage = shutil.disk_usage(_SHARED_MEMORY)
    # For the user's own data set, only the function in data.name knows the size of a sample.
    unknown = data.workers and ":" in data.name
    need = (
        f"the memory that data.workers need for data.name={data.name} is unknown"
        if unknown
        else (f"data.workers need {gigabytes(needed)}")
    )
    value = f"{gigabytes(usage.free)} free of {gigabytes(usage.total)}; {need}"
    remedy = "set storage.sharedMemory of the DDPJob to {} (docker: --shm-size{})"
    if usage.free < needed:  # With less memory, loader processes would die from a bus error.
        remedy = remedy.format(gigabytes(2 * needed).replace(" ", "").removesuffix("B"), "")
        return RankFinding(value, Status.FAIL, f"{remedy}, or lower data.workers or data.batch")
    # Docker's default size of /dev/shm is 64 MiB.
    if torch.cuda.is_available() and group.local_world > 1 and usage.free < _NCCL_BYTES:
        remedy = remedy.format("1Gi or more", "=1g")
        return RankFinding(value, Status.WARN, f"{remedy}; NCCL uses this memory between a node's GPUs")
    return RankFinding(value)


def cpu_threads(context: Context) -> RankFinding:
    """Return WARN if the ranks on a node have more threads than the node has cores.

    The threads then take turns on the cores, and each OpenMP barrier waits for all of them.
    """
    ranks, cores = context.group.local_world, devices.usable_cores()
    if context.threads * ranks > max(math.ceil(cores), ranks):
        remedy = "set train.threads (or OMP_NUM_THREADS) to cores / ranks per node, or raise the container's CPU limit"
        return RankFinding(f"{context.threads * ranks} threads on {cores:g} cores", Status.WARN, remedy)
    return RankFinding(f"{context.threads} per rank, {cores:g} cores per node")


def limits(context: Context) -> RankFinding:
    """Return WARN if too few files can be open, or if memory cannot be locked for InfiniBand.

    Connections to ranks and pipes to loader processes count as open files.
    """
    files, locked = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    needed = 256 + 8 * context.group.world + 64 * context.config.data.workers
    if files != resource.RLIM_INFINITY and files < needed:
        remedy = f"raise this limit before training: ulimit -n {max(65536, needed)}, or the container runtime's default"
        return RankFinding(f"{files} open files, but {needed} may be needed", Status.WARN, remedy)
    if locked != resource.RLIM_INFINITY and _INFINIBAND.is_dir():
        remedy = "run ulimit -l unlimited (container runtime: memlock=-1); otherwise NCCL cannot use InfiniBand"
        return RankFinding(f"{gigabytes(locked)} of memory may be locked", Status.WARN, remedy)
    return RankFinding(f"{'unlimited' if files == resource.RLIM_INFINITY else files} open files")


@dataclass(frozen=True)
class Check:
    """A check that each rank, or each node's first rank, runs without the other ranks.

    If `find` raises an error, the result is a FAIL with this `remedy`. `same` names the values that
    must not differ between ranks. It maps each name to (status, remedy) for ranks that differ. In
    this remedy, {norm} stands for the most common value.
    """

    name: str
    find: Callable[[Context], RankFinding]
    remedy: str = ""
    per_node: bool = False
    same: dict[str, tuple[Status, str]] = field(default_factory=dict)


_SOFTWARE = "install {name} {norm} there, or run the same image (spec.image) on all nodes"
_DEVICES = "start as many ranks per node as the node has devices; see CUDA_VISIBLE_DEVICES and nvidia-smi there"
_VISIBLE = "check that the node's devices are visible (driver, CUDA_VISIBLE_DEVICES, spec.gpusPerNode)"
_KIND = f"{_VISIBLE}, or set train.backend=gloo for all ranks"
_WRITABLE = f"mount it writable for uid {os.getuid()}, or set checkpoint.dir to a different folder"
_DATA, _COPY = "mount the data there, or correct data.dir (a DDPJob: storage.data)", "copy the data there again"
CHECKS = (
    Check("versions", versions, same={
        **dict.fromkeys(("torch", "CUDA", "NCCL", "trainer"), (Status.FAIL, _SOFTWARE)),
        "Python": (Status.WARN, _SOFTWARE),
    }),
    Check("devices", device, _DEVICES, same={
        "device": (Status.FAIL, _KIND),
        "model": (Status.WARN, "use nodes of the same kind, because the slowest node sets the pace"),
        "driver": (Status.WARN, "install the same driver on all nodes"),
    }),
    Check("master address", master_address, "check MASTER_ADDR and the node's DNS", same={
        "address": (Status.WARN, "fix /etc/hosts or the DNS there, unless the difference is due to a NAT"),
    }),
    Check("checkpoint folder", checkpoint_folder, f"{_WRITABLE} (a DDPJob: storage.checkpoints)", per_node=True),
    Check("data folder", data_folder, _DATA, per_node=True, same=dict.fromkeys(
        COUNTED, (Status.FAIL, f"{_COPY}: ranks must see the same samples")
    )),
    Check("/dev/shm", shared_memory, per_node=True),
    Check("cpu threads", cpu_threads, per_node=True),
    Check("limits", limits, per_node=True),
)  # fmt: skip
