"""`python -m ddpjob_trainer checkpoint FILE|DIR`: what a checkpoint, or a folder of them, holds,
and whether each is whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.checkpoints import best, dcp, torch_file
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.snapshot import Snapshot, map_tensors
from ddpjob_trainer.config.command_line import wants_help
from ddpjob_trainer.errors import CheckpointError, ConfigError

_HEAD = ("checkpoint", "step", "epoch", "ranks", "saved", "size", "state")


def main(arguments: list[str]) -> int:
    """Print a table; for a single checkpoint also its settings and tensors.

    Returns 1 when one is broken. Raises TrainerError.
    """
    if wants_help(arguments):
        print(__doc__)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("usage: python -m ddpjob_trainer checkpoint FILE|DIR")
    path = Path(arguments[0])
    try:
        single = not path.is_dir() or path.resolve().suffix == dcp.SUFFIX
        found = [path] if single else sorted([*path.glob("step-*.pt"), *path.glob("step-*.dcp")])
        if not found:
            raise CheckpointError(
                f"{path} holds no checkpoint; give a checkpoint, or the folder that checkpoint.dir was set to"
            )
        marked = best.pointed_to(path if not single else path.resolve().parent)
        rows = []
        for one in found:
            try:
                rows.append(_row(one, best=marked is not None and one.resolve() == marked.resolve()))
            except FileNotFoundError:
                if single or os.path.lexists(one):
                    raise  # Else a training that continues has just deleted it.
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    print("\n".join(_aligned([_HEAD, *rows])))
    whole = all(row[-1].startswith("whole") for row in rows)
    if single and whole:
        print("\n".join(_content(_read(path))))
    return 0 if whole else 1


def _row(path: Path, *, best: bool) -> tuple[str, ...]:
    folder = path.is_dir()
    size = _bytes(dcp.size(path) if folder else path.stat().st_size)
    try:
        metadata = dcp.check(path) if folder else torch_file.check_file(path)
    except CheckpointError as error:
        return (path.name, *[""] * 4, size, f"BROKEN: {error}")
    return (
        path.name,
        str(metadata.step),
        _epoch(path, metadata),
        str(metadata.world),
        _when(metadata.time),
        size,
        "whole, the best" if best else "whole",
    )


def _epoch(path: Path, metadata: Metadata) -> str:
    """`3` at the end of the third epoch, `2 + 41 %` within the next."""
    if metadata.epoch is not None:
        return str(metadata.epoch)
    sampler = _read(path)["sampler"]
    return f"{sampler['epoch']} + {sampler['consumed'] / sampler['size']:.0%}"


def _read(path: Path) -> Snapshot:
    return dcp.read(path) if path.is_dir() else torch_file.decode(path.read_bytes())


def _content(snapshot: Snapshot) -> Iterator[str]:
    if config := snapshot.get("config"):  # A loop of one's own need not have saved any.
        yield "\nmade with"
        yield from (f"  {key}={value}" for key, value in config.items() if value is not None)
    tensors: list[tuple[str, torch.Tensor]] = []
    map_tensors(snapshot, lambda name, tensor: tensors.append((".".join(map(str, name)), tensor)))
    yield f"\n{len(tensors)} tensors, {_bytes(sum(tensor.nbytes for _, tensor in tensors))}"
    yield from _aligned(
        [("  " + name, _shape(tensor), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors]
    )


def _shape(tensor: Any) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
