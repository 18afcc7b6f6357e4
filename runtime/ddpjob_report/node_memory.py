"""Keeps a framework's newest state in the nodes' memory, and returns it as a checkpoint.

Problem: a framework restores its state from a checkpoint in its own format and order (model,
optimizers, loops, position in the data). Code that restores the parts from outside would have to
repeat that order, which changes from version to version.

Rule: a state in memory has the content that the framework would save. At startup, `as_checkpoint`
writes the newest state as a checkpoint in the framework's format, once per node, and the framework
resumes from that file. The file is removed once training has begun. It is written to the node's
memory if that has room for it in addition to the two states; otherwise, to the temporary folder.

A script asks for its checkpoint before the framework has formed its process group. The ranks then
meet in a temporary group over gloo, which ends before the framework forms its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.rank_snapshots import RankSnapshots, Restored, TorchExchange
from ddpjob_runtime import protocol

from ddpjob_report import link, stop
from ddpjob_report.snapshots import current_exchange, open_memory, tensors_of

_FOLDER = "restored"
_store: list[Any] = []
"""The temporary group's store. It is kept alive because the framework's group shares its server."""


class FrameworkMemory:
    """One rank's access to its node's memory. All ranks make the same calls."""

    _at_start: FrameworkMemory | None = None
    """The memory that `as_checkpoint` has opened."""

    def __init__(self, snapshots: RankSnapshots, found: Restored | None = None, folder: Path | None = None) -> None:
        self._snapshots = snapshots
        self._found, self._folder = found, folder

    @classmethod
    def begin(cls, step: int) -> FrameworkMemory | None:
        """Record that training begins after `step` steps. All ranks of the group must call this.

        Return None if the job does not keep states in memory.
        """
        job = JobEnvironment.read()
        if not job.may_have_snapshots:
            return None
        exchange = current_exchange()
        memory, FrameworkMemory._at_start = FrameworkMemory._at_start, None
        if memory is None:
            memory = cls(open_memory(job, exchange, together=True))
            memory._snapshots.agree()
        memory._snapshots.use(exchange)
        if memory._snapshots.is_off:
            return None
        in_memory = memory._found is not None and memory._found.moment.step == step
        source = protocol.MEMORY if in_memory else protocol.STORAGE if step else protocol.SCRATCH
        if not in_memory:
            memory._found = None
        memory._snapshots.begin(step, source)
        link.post(memory._snapshots.news())
        return memory

    @property
    def own(self) -> bytes:
        """This rank's private part of the restored state; empty if it has none."""
        return b"" if self._found is None else self._found.owns.get(int(os.environ.get("RANK", "0")), b"")

    def note(self, step: int) -> None:
        """Record a step whose state will be taken later."""
        self._snapshots.note(step)

    def take(self, step: int, make: Callable[[], Any], own: Callable[[], bytes]) -> None:
        """Keep the result of `make` as the state after `step` steps, if that is due.

        `own` returns this rank's private part.

        Raises RuntimeError if a rank is gone, as in any collective.
        """
        self._snapshots.take(step, make, own)
        link.post(self._snapshots.news())

    def forget(self) -> None:
        """Remove the checkpoint that `as_checkpoint` wrote, after all ranks have loaded it."""
        folder, self._folder, self._found = self._folder, None, None
        if folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def as_checkpoint(newest: int, name: str, write: Callable[[Path, Restored], None]) -> Path | None:
    """Return a checkpoint of the newest state in memory; None if its step is at most `newest`.

    All ranks must call this at the start.

    Args:
        newest: number of steps in the newest checkpoint; 0 if there is none.
        name: name for the checkpoint, which contains `{step}`.
        write: function that writes the checkpoint to a new path, on one rank of each node.

    Raises:
        OSError: there is no room for the checkpoint; the message names the folder.
    """
    job = JobEnvironment.read()
    if not job.may_have_snapshots:
        return None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for leftover in _folders(job):  # left behind by a process that was killed at startup
            shutil.rmtree(leftover, ignore_errors=True)
    with _early_exchange() as exchange:
        snapshots = open_memory(job, exchange, together=True)
        found = snapshots.restore(views=True)
        snapshots.use(TorchExchange(0, 1))  # The temporary group ends here.
        # All ranks must make the same decision, although they may see different checkpoints.
        highest = max(int(said) for said in exchange.gather_bytes(str(newest).encode()))
        if found is None or found.moment.step <= highest:
            FrameworkMemory._at_start = FrameworkMemory(snapshots)
            return None
        made = b""
        if exchange.local_rank == 0:
            folder = _folder_for(job, found)
            path = folder / name.format(step=found.moment.step)
            write(path, found)
            made = os.fsencode(path)
        paths = exchange.gather_bytes(made)
        path = Path(os.fsdecode(paths[exchange.rank - exchange.local_rank]))
        found = Restored(found.moment, None, found.owns, found.made)
        FrameworkMemory._at_start = FrameworkMemory(snapshots, found, path.parent)
        return path


def _folder_for(job: JobEnvironment, found: Restored) -> Path:
    """Return an empty folder with room for a checkpoint."""
    needed = sum(tensor.nbytes for tensor in tensors_of(found.tree))
    *in_memory, folder = _folders(job)
    if in_memory and shutil.disk_usage(in_memory[0].parent).free > needed * 1.1 + (1 << 20):
        folder = in_memory[0]
    folder.mkdir(mode=0o700)
    return folder


def _folders(job: JobEnvironment) -> list[Path]:
    """Return the folders for a checkpoint on this node: in memory, if there is one, and on disk."""
    in_memory = [Path(job.snapshot_folder, _FOLDER)] if job.snapshot_folder else []
    return [*in_memory, Path(tempfile.gettempdir(), f"ddpjob-{job.uid or os.getuid()}-{job.index or 0}")]


@contextlib.contextmanager
def _early_exchange() -> Iterator[TorchExchange]:
    """Yield the ranks' exchange, over a temporary group if the framework has not formed one yet."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or stop.torch_distributed() is not None:
        yield current_exchange()
        return
    import torch.distributed

    dist: Any = torch.distributed
    store, rank, world = next(dist.rendezvous("env://"))
    _store.append(store)
    dist.init_process_group("gloo", store=dist.PrefixStore("ddpjob-memory", store), rank=rank, world_size=world)
    try:
        yield current_exchange()
    finally:
        dist.destroy_process_group()


def say(what: str) -> None:
    """Print a callback's message on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"ddpjob_report: {what}\n")
