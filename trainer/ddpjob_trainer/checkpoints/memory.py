"""Keeps the newest training states in the nodes' memory (`ddpjob_pod.rank_snapshots`).

Checkpoints are still needed in case all nodes are lost. A starting job resumes from a state in
memory or a checkpoint, whichever is from the later step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.rank_snapshots import NONE, RankSnapshots, TorchExchange
from ddpjob_pod.snapshot_store import Order, SnapshotStore

from ddpjob_trainer.checkpoints.snapshot import Layout, Snapshot, with_local
from ddpjob_trainer.distributed.dtensors import local
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError


class NodeMemory:
    """One rank's access to the training states in its node's memory.

    The methods do nothing if the job does not keep states in memory.
    """

    def __init__(self, group: Group, order: Order, layout: Layout, *, sharded: bool) -> None:
        job = JobEnvironment.read()
        self._layout, self._rank, self._world = layout, group.rank, group.world
        self._snapshots: RankSnapshots | None = None
        if job.may_have_snapshots:
            several = dist if group.world > 1 else None
            exchange = TorchExchange(group.local_rank, group.local_world, several, group.process_group)
            folder = Path(job.snapshot_folder) if job.snapshot_folder else None
            every = job.snapshot_interval if folder else NONE
            self._snapshots = RankSnapshots(
                SnapshotStore(folder), exchange, order, every, sharded=sharded, together=True
            )

    def restore(self) -> Snapshot | None:
        """Return the latest state that the nodes together hold completely, or None."""
        if self._snapshots is None:
            return None
        found = self._snapshots.restore(self._rebuild, self._rows)
        if self._snapshots.is_off:
            self._snapshots = None
        return None if found is None else found.tree

    def begin(self, step: int, source: str) -> dict[str, Any]:
        """Record the step that training continues from.

        Return the figures to report about this start. `source` is one of protocol.SOURCES, and says
        where the training state came from.
        """
        if self._snapshots is None:
            return {}
        self._snapshots.begin(step, source)
        return self._snapshots.news()

    def take(self, step: int, make: Callable[[], Snapshot]) -> dict[str, Any]:
        """Record that a step is complete, and return new figures to report.

        If a copy of the state is due, `make` is called, and its result is kept in memory. All ranks
        must call this together after each step.
        """
        if self._snapshots is None:
            return {}
        self._snapshots.take(step, make)
        return self._snapshots.news()

    def interrupt(self) -> None:
        """Exclude the next step from the estimate of what copies cost.

        Call this if the step's time includes other work, such as an evaluation.
        """
        if self._snapshots is not None:
            self._snapshots.interrupt()

    def close(self) -> None:
        """Wait until the copies in progress are complete."""
        if self._snapshots is not None:
            self._snapshots.close()

    def _rows(self, path: tuple[Any, ...], whole: tuple[int, ...]) -> range | None:
        """Return which rows of a tensor are in this rank's shard; None if the rank has the whole
        tensor.
        """
        like = self._layout(path, torch.Size(whole))
        if like is None:
            return None
        first = min(whole[0], self._rank * -(-whole[0] // self._world))
        return range(first, first + len(local(like)))

    def _rebuild(self, path: tuple[Any, ...], shard: torch.Tensor, whole: tuple[int, ...]) -> Any:
        like = self._layout(path, torch.Size(whole))
        if like is None:
            raise CheckpointError(f"the state in memory has a sharded tensor at {path}, but this model does not")
        return with_local(like, shard)
