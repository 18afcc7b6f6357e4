"""Keeps a framework's newest state in the nodes' memory, and returns it as a checkpoint.

Problem: a framework restores its state from a checkpoint in its own format and order (model,
optimizers, loops, position in the data). If our code restored the parts from outside, it would have
to follow that order, but the order changes from version to version.

Rule: a state in memory has the content that the framework would save. At startup, `as_checkpoint`
writes the latest state as a checkpoint in the framework's format, once per node. The framework
resumes from that checkpoint, which is removed once training has begun. If the node's memory has
room for the checkpoint in addition to two states, the checkpoint is written there. If there is not
enough room, it is written to the folder for temporary files.

A script asks for its checkpoint before the framework has formed a process group. So the ranks form
a temporary group over gloo, and end it before the framework forms its own group.
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
from ddpjob_pod.snapshot_store import free_memory
from ddpjob_runtime import protocol

from ddpjob_report import link, stop
from ddpjob_report.snapshots import current_exchange, open_memory, tensors_of

_FOLDER = "restored"
_store: list[Any] = []
"""The store that was used to form the temporary group. It is kept alive because the framework's
group uses the same server.
"""


class FrameworkMemory:
    """One rank's access to the states in its node's memory.

    All ranks must call the methods in the same order.
    """

    _at_start: FrameworkMemory | None = None
    """The object that `as_checkpoint` has created, until `begin` takes it."""

    def __init__(self, snapshots: RankSnapshots, found: Restored | None = None, folder: Path | None = None) -> None:
        self._snapshots = snapshots
        self._found, self._folder = found, folder

    @classmethod
    def begin(cls, step: int) -> FrameworkMemory | None:
        """Record that training begins after `step` steps, and return this rank's access to the
        memory.

        Return None if the job does not keep states in memory. All ranks of the group must call
        this.
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
        """This rank's private part of the restored state; empty if no state was restored, or if the
        state has no such part.
        """
        return b"" if self._found is None else self._found.owns.get(int(os.environ.get("RANK", "0")), b"")

    def note(self, step: int) -> None:
        """Record that a step is complete. Its state will be taken later, during the next step."""
        self._snapshots.note(step)

    def take(self, step: int, make: Callable[[], Any], own: Callable[[], bytes]) -> None:
        """Keep the result of `make` as the state after `step` steps, if a copy is due.

        `own` returns this rank's private part of the state.

        Raises RuntimeError if a rank is gone.
        """
        self._snapshots.take(step, make, own)
        link.post(self._snapshots.news())

    def forget(self) -> None:
        """Remove the checkpoint that `as_checkpoint` wrote. Call this after all ranks have loaded
        it.
        """
        folder, self._folder, self._found = self._folder, None, None
        if folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def as_checkpoint(newest: int, name: str, write: Callable[[Path, Restored], None]) -> Path | None:
    """Write the latest state in memory as a checkpoint, and return its path.

    Return None if no state in memory has more than `newest` steps. All ranks must call this at the
    start.

    Args:
        newest: number of steps in the newest checkpoint; 0 if there is none.
        name: name of the checkpoint, in which `{step}` is replaced by the number of the step.
        write: function that writes the checkpoint to a new path, on one rank of each node.

    Raises:
        OSError: there is no room for the checkpoint; the message names the folder.
    """
    job = JobEnvironment.read()
    if not job.may_have_snapshots:
        return None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for leftover in _folders(job):  # A leftover is from a process that was killed at startup.
            shutil.rmtree(leftover, ignore_errors=True)
    with _early_exchange() as exchange:
        snapshots = open_memory(job, exchange, together=True)
        found = snapshots.restore(views=True)
        snapshots.use(TorchExchange(0, 1))  # The temporary group ends here.
        # Each rank may see a different newest checkpoint, but all ranks must make the same
        # decision. So they use the highest step that any rank sees.
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
    """Create an empty folder that has room for a checkpoint of this state, and return it."""
    needed = sum(tensor.nbytes for tensor in tensors_of(found.tree))
    *in_memory, folder = _folders(job)
    if in_memory:
        # The container's memory limit may be lower than the free space.
        free = min(shutil.disk_usage(in_memory[0].parent).free, free_memory())
        if free > needed * 1.1 + (1 << 20):
            folder = in_memory[0]
    folder.mkdir(mode=0o700)
    return folder


def _folders(job: JobEnvironment) -> list[Path]:
    """Return the folders where this node can hold a checkpoint: first in memory, if the node keeps
    states there, then on disk.
    """
    in_memory = [Path(job.snapshot_folder, _FOLDER)] if job.snapshot_folder else []
    return [*in_memory, Path(tempfile.gettempdir(), f"ddpjob-{job.uid or os.getuid()}-{job.index or 0}")]


@contextlib.contextmanager
def _early_exchange() -> Iterator[TorchExchange]:
    """Yield the exchange between the ranks. If the framework has not formed a process group yet,
    form a temporary one.
    """
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
    """Print a callback's message to stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"ddpjob_report: {what}\n")
