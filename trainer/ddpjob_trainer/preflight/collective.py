"""An all-reduce on the backend that training would use: is the sum right, how fast is it?"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer import devices
from ddpjob_trainer.config import Config
from ddpjob_trainer.group import Group
from ddpjob_trainer.preflight.check import Nodes, Result, Status, gigabytes

_SMALL, _LARGE = 2**18, 2**22  # float32 elements: 1 MiB, 16 MiB
_PATIENT_SECONDS = 0.1
_WATCHDOG_SECONDS = 300.0
_PATTERN = 97


@dataclass(frozen=True)
class Outcome:
    """`problem`: why there was no right sum; bytes per all-reduce, its bus bandwidth in GB/s (10^9), milliseconds of a single number's."""

    problem: str = ""
    bytes: int = 0
    bandwidth: float = 0.0
    latency: float = 0.0


def measure(config: Config, group: Group, store: Any, seconds: float) -> Outcome:
    """On every rank: form a group over `store`, add up, leave it. Raises what the backend raises."""
    import torch.distributed as dist

    placement = devices.choose(config.train.backend, group.local_rank)
    # NCCL's watchdog ends the process when the group's time is over; who waits for this has a deadline of its own, and a table to show.
    timeout = datetime.timedelta(seconds=seconds if placement.device.type == "cpu" else 10 * seconds + _WATCHDOG_SECONDS)
    dist.init_process_group(placement.backend, timeout=timeout, store=store, rank=group.rank, world_size=group.world)
    try:
        for device in dict.fromkeys((torch.device("cpu"), placement.device)):
            if problem := _wrong(group, device):
                return Outcome(problem)
        return _speed(group, placement.device)
    finally:
        dist.destroy_process_group()


def _wrong(group: Group, device: torch.device) -> str:
    """Small whole numbers, whose sum float32 holds exactly: element i is i mod 97 plus the rank."""
    pattern = torch.arange(_SMALL, device=device, dtype=torch.float32) % _PATTERN
    found = pattern + group.rank
    group.sum(found)
    right = pattern * group.world + group.world * (group.world - 1) / 2
    different = int((found != right).sum())
    return f"{different} of {_SMALL} sums are wrong on {device}" if different else ""


def _speed(group: Group, device: torch.device) -> Outcome:
    """Bus bandwidth as nccl-tests define it: 2 (n - 1) / n times the bytes, by the time."""
    number, small, large = (torch.zeros(size, device=device) for size in (1, _SMALL, _LARGE))
    latency = statistics.median(_timed(group, number) for _ in range(20))
    # The slowest rank decides for all: each must take the same size.
    patient = torch.tensor([max(_timed(group, small) for _ in range(2))])
    tensor = small if group.sum(patient).item() > _PATIENT_SECONDS * group.world else large
    took = statistics.median(_timed(group, tensor) for _ in range(3))
    size = tensor.numel() * tensor.element_size()
    return Outcome("", size, 2 * (group.world - 1) / group.world * size / took / 1e9, latency * 1e3)


def _timed(group: Group, tensor: torch.Tensor) -> float:
    wait: Callable[[], None] = getattr(torch, tensor.device.type).synchronize if tensor.device.type != "cpu" else lambda: None
    wait()
    began = time.perf_counter()
    group.sum(tensor)
    wait()
    return time.perf_counter() - began


def judge(outcomes: dict[int, Outcome], stages: dict[int, str], nodes: Nodes, backend: str, least: float) -> Result:
    """FAIL for a wrong sum, an error or silence, WARN for less than `least` GB/s. `stages`: what those without an outcome were at."""
    name, world = "all-reduce", len(outcomes) + len(stages)
    if stages:
        remedy = "look at their own output; with NCCL, set NCCL_DEBUG=INFO"
        return Result(name, Status.FAIL, f"no answer while {next(iter(stages.values()))} ({backend})", nodes.ranks(stages), remedy)
    wrong = [rank for rank, outcome in outcomes.items() if outcome.problem]
    if wrong:
        remedy = "a wrong sum is a fault of the network, the driver or a device there" if "wrong" in outcomes[wrong[0]].problem else ""
        remedy = remedy or "look at its own output; with NCCL, set NCCL_DEBUG=INFO; check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return Result(name, Status.FAIL, f"{outcomes[wrong[0]].problem} ({backend})", nodes.ranks(wrong), remedy)
    slowest = min(outcomes.values(), key=lambda outcome: outcome.bandwidth)
    several = len(nodes.leaders) > 1
    value = f"right on {world} ranks ({backend}); {slowest.bandwidth:.2f} GB/s bus ({gigabytes(slowest.bytes)}), {slowest.latency:.2f} ms"
    if several and slowest.bandwidth < least:
        names = "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
        remedy = f"less than preflight.bandwidth_gbs={least:g}: see that the fast network is used ({names})"
        return Result(name, Status.WARN, value, (), remedy)
    return Result(name, Status.OK, value if several else f"{value}; one node: no network")
