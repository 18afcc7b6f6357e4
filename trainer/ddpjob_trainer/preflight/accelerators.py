"""The devices: one for each rank, all of one kind, with their memory free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ddpjob_trainer import devices
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.preflight.check import Check, Context, Result, Seen, Status, gigabytes, odd

_DRIVER = Path("/proc/driver/nvidia/version")
_FREE_SHARE = 0.9


@dataclass(frozen=True)
class Device:
    """`problem`: why this rank has none. Memory in bytes; `count`: visible to this process."""

    kind: str = "cpu"
    backend: str = ""
    problem: str = ""
    name: str = ""
    driver: str = ""
    count: int = 0
    free: int = 0
    total: int = 0


def look(context: Context) -> Device:
    """This rank's, as training would choose it; opens it."""
    try:
        placement = devices.choose(context.config.train.backend, context.group.local_rank)
    except ConfigError as error:
        return Device(problem=str(error))
    kind = placement.device.type
    if kind == "cpu":
        return Device(backend=placement.backend)
    module = getattr(torch, kind)
    try:
        free, total = module.mem_get_info(placement.device)
        name = module.get_device_name(placement.device)
    except RuntimeError as error:
        return Device(kind, placement.backend, problem=str(error).splitlines()[0], count=module.device_count())
    return Device(kind, placement.backend, "", name, _driver() if kind == "cuda" else "", module.device_count(), free, total)


def _driver() -> str:
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text()) if _DRIVER.exists() else None
    return found[0] if found else ""


def judge(seen: Seen[Device]) -> Result:
    """FAIL where a rank has no device or another kind, WARN for another model, another driver, or memory that is taken."""
    name, nodes = "devices", seen.nodes
    without = [rank for rank, value in seen.values.items() if value.problem]
    if without:
        remedy = "start as many ranks per node as it has devices; look at CUDA_VISIBLE_DEVICES and at what nvidia-smi says there"
        return Result(name, Status.FAIL, seen.values[without[0]].problem, nodes.ranks(without), remedy)
    kind, ranks = odd({rank: value.kind for rank, value in seen.values.items()})
    if ranks:
        other = seen.values[ranks[0]].kind
        remedy = (
            "see that the node's devices are visible (driver, CUDA_VISIBLE_DEVICES, spec.gpusPerNode), or set train.backend=gloo for all"
        )
        return Result(name, Status.FAIL, f"{kind}, but {other} there", nodes.ranks(ranks), remedy)
    if kind == "cpu":
        return Result(name, Status.OK, f"CPU, {seen.values[min(seen.values)].backend}")
    for what, remedy in (("name", "the slowest sets the pace: use nodes of one kind"), ("driver", "install the same driver")):
        norm, ranks = odd({rank: getattr(value, what) for rank, value in seen.values.items()})
        if ranks:
            return Result(name, Status.WARN, f"{norm}, but {getattr(seen.values[ranks[0]], what)} there", nodes.names(ranks), remedy)
    taken = [rank for rank, value in seen.values.items() if value.free < _FREE_SHARE * value.total]
    first = seen.values[min(seen.values)]
    if taken:
        value = seen.values[taken[0]]
        shown = f"{gigabytes(value.free)} of {gigabytes(value.total)} free"
        return Result(name, Status.WARN, shown, nodes.ranks(taken), "another process has memory there: see nvidia-smi")
    return Result(name, Status.OK, f"{len(seen.values)} x {first.name}, driver {first.driver or 'unknown'}, {gigabytes(first.free)} free")


CHECK = Check("devices", Device, look, judge)
