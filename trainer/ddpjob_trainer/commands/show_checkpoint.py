"""`python -m ddpjob_trainer checkpoint FILE|DIR` shows the contents of a checkpoint, or of a folder
of checkpoints, and whether each one is intact.
"""

from __future__ import annotations

import contextlib
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
from ddpjob_trainer.errors import CheckpointError, ConfigError, first_line

_HEAD = ("checkpoint", "step", "epoch", "ranks", "saved", "size", "state")


def main(arguments: list[str]) -> int:
    """Print a table and, for a single checkpoint, its settings and tensors. Return the exit code.

    The exit code is 1 if a checkpoint is broken. Raises TrainerError.
    """
    if wants_help(arguments):
        print(__doc__)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("usage: python -m ddpjob_trainer checkpoint FILE|DIR")
    path = Path(arguments[0])
    try:
        single = not path.is_dir() or path.resolve().suffix == dcp.SUFFIX
        path.stat()
        found = [path] if single else sorted([*path.glob("step-*.pt"), *path.glob("step-*.dcp")])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; specify a checkpoint or its folder") from error
    if not found:
        raise CheckpointError(
            f"{path} contains no checkpoint; specify a checkpoint, or the folder that checkpoint.dir names"
        )
    marked = best.find_marked(path if not single else path.resolve().parent)
    rows, content = list[tuple[str, ...]](), list[str]()
    for one in found:
        try:
            snapshot, row = _row(one, best=marked is not None and one.resolve() == marked.resolve())
            content = list(_content(snapshot))
        except FileNotFoundError as error:
            if not os.path.lexists(one):
                continue  # A running job has just deleted the checkpoint.
            row = _broken(one, f"not readable: {error.filename or one}: {error.strerror}")
        except CheckpointError as error:
            row = _broken(one, str(error))
        except OSError as error:
            row = _broken(one, f"not readable: {error.strerror or error}")
        except Exception as error:  # Reading another program's file can raise any exception.
            row = _broken(one, f"not readable: {type(error).__name__}: {first_line(error)}")
        rows.append(row)
    print("\n".join(map(_printable, _align([_HEAD, *rows]))))
    intact = all(row[-1].startswith("intact") for row in rows)
    if single and intact:
        print("\n".join(map(_printable, content)))
    return 0 if intact else 1


def _row(path: Path, *, best: bool) -> tuple[Snapshot, tuple[str, ...]]:
    """Check a checkpoint completely, and return its content and its row in the table.

    Tensors in the content may lack values.
    """
    if path.is_dir():
        metadata, size = dcp.check(path), dcp.size(path)
        snapshot = dcp.describe(path)
    else:
        metadata, size = torch_file.check_file(path), path.stat().st_size
        snapshot = torch_file.describe(path)
    row = (
        path.name,
        str(metadata.step),
        _epoch(snapshot, metadata),
        str(metadata.world),
        _when(metadata.time),
        _bytes(size),
        "intact, the best" if best else "intact",
    )
    return snapshot, row


def _broken(path: Path, problem: str) -> tuple[str, ...]:
    size = ""
    with contextlib.suppress(OSError):
        size = _bytes(dcp.size(path) if path.is_dir() else path.stat().st_size)
    return (path.name, *[""] * 4, size, f"BROKEN: {problem}")


def _epoch(snapshot: Snapshot, metadata: Metadata) -> str:
    """Format the epoch: `3` at the end of the third epoch, `2 + 41 %` during it."""
    if metadata.epoch is not None:
        return str(metadata.epoch)
    sampler = snapshot["sampler"]
    return f"{int(sampler['epoch'])} + {sampler['consumed'] / sampler['size']:.0%}"


def _content(snapshot: Snapshot) -> Iterator[str]:
    if config := snapshot.get("config"):  # A user's own training loop may not have saved a configuration.
        yield from ("", "configuration")
        yield from (f"  {key}={value}" for key, value in config.items() if value is not None)
    tensors: list[tuple[str, torch.Tensor]] = []
    map_tensors(snapshot, lambda name, tensor: tensors.append((".".join(map(str, name)), tensor)))
    yield from ("", f"{len(tensors)} tensors, {_bytes(sum(tensor.nbytes for _, tensor in tensors))}")
    yield from _align(
        [("  " + name, _shape(tensor), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors]
    )


def _printable(text: str) -> str:
    """Replace non-printable characters, which a terminal could interpret as commands."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _shape(tensor: Any) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
