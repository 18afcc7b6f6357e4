"""The same software on all ranks: other versions of torch or NCCL form no group, or compute something else."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

from ddpjob_trainer.preflight.check import Check, Context, Result, Seen, Status, odd


@dataclass(frozen=True)
class Versions:
    """Empty where there is none."""

    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    python: str = ""
    trainer: str = ""


_MUST_BE_SAME = ("torch", "cuda", "nccl", "trainer")


def look(_: Context) -> Versions:
    """This process's."""
    import torch

    nccl = ""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found: Any = torch.cuda.nccl
        nccl = ".".join(str(part) for part in found.version())
    try:
        trainer = importlib.metadata.version("ddpjob")
    except importlib.metadata.PackageNotFoundError:
        trainer = ""  # It runs from a checkout that is not installed.
    return Versions(str(torch.__version__), torch.version.cuda or "", nccl, platform.python_version(), trainer)


def judge(seen: Seen[Versions]) -> Result:
    """FAIL for another torch, CUDA, NCCL or trainer, WARN for another Python."""
    for name in (*_MUST_BE_SAME, "python"):
        norm, ranks = odd({rank: getattr(value, name) for rank, value in seen.values.items()})
        if ranks:
            others = sorted({getattr(seen.values[rank], name) or "none" for rank in ranks})
            return Result(
                "versions",
                Status.FAIL if name in _MUST_BE_SAME else Status.WARN,
                f"{name} {norm or 'none'}, but {', '.join(others)} on {len(ranks)} of {seen.world} ranks",
                seen.nodes.ranks(ranks),
                f"install {name} {norm} there, or run the same image (spec.image) on all nodes",
            )
    first = next(iter(seen.values.values()))
    parts = [f"torch {first.torch}", *([f"NCCL {first.nccl}"] if first.nccl else []), f"Python {first.python}"]
    return Result("versions", Status.OK, ", ".join(parts))


CHECK = Check("versions", Versions, look, judge)
