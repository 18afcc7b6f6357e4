"""The group of ranks: who we are, and the few collectives the trainer needs on the CPU."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.devices import Placement
from ddpjob_trainer.rendezvous import open_store


@dataclass(frozen=True)
class Group:
    """This rank's place. `world` 1 needs no process group; every collective is then the identity."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    process_group: Any = None
    """None: all ranks."""

    @classmethod
    def from_env(cls) -> Group:
        """As torchrun sets it; one process alone without torchrun."""
        numbers = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        )
        return cls(*numbers)

    def sum_begin(self, values: torch.Tensor) -> Reduction:
        """Begin an all-reduce (sum, in place), on the tensor's own device; the result is there after `.wait()`."""
        return Reduction(values, dist.all_reduce(values, group=self.process_group, async_op=True) if self.world > 1 else None)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce (sum), in place."""
        return self.sum_begin(values).wait()

    def gather(self, value: int) -> list[int]:
        """Every rank's number, in rank order."""
        numbers = torch.zeros(self.world, dtype=torch.int64)
        numbers[self.rank] = value
        return [int(number) for number in self.sum(numbers)]

    def all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of one shape, in rank order; on its own device."""
        if self.world == 1:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(found, values, group=self.process_group)
        return found

    def broadcast_bytes(self, content: bytes | None, source: int) -> bytes:
        """`content` of rank `source`, on every rank."""
        if self.world == 1:
            assert content is not None
            return content
        size = self.gather(len(content) if content is not None and self.rank == source else 0)[source]
        buffer = torch.empty(size, dtype=torch.uint8)
        if self.rank == source and content:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if size:
            dist.broadcast(buffer, group=self.process_group, group_src=source)
        return buffer.numpy().tobytes()

    def broadcast_tensors(self, tensors: list[torch.Tensor], source: int = 0) -> None:
        """Tensors of rank `source`, in place on every rank; on their own device."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, group=self.process_group, group_src=source)

    def send_begin(self, values: torch.Tensor, to: int) -> dist.Work:
        """Begin to send a contiguous tensor to rank `to` of this group; it must not change before `.wait()`."""
        work = dist.isend(values, group=self.process_group, group_dst=to)
        assert work is not None
        return work

    def receive(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """What rank `source` of this group sends, into `values`."""
        dist.recv(values, group=self.process_group, group_src=source)
        return values

    def subgroup(self, members: list[list[int]], timeout_seconds: float) -> Group:
        """This rank's group among several that have no rank in common; its ranks are numbered anew. All ranks together."""
        timeout, own = datetime.timedelta(seconds=timeout_seconds), Group()
        for ranks in members:
            process_group = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
            if self.rank in ranks:
                own = replace(self, rank=ranks.index(self.rank), world=len(ranks), process_group=process_group)
        return own

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum(torch.zeros(1))


class Reduction:
    """An all-reduce under way."""

    def __init__(self, values: torch.Tensor, work: dist.Work | None) -> None:
        self._values, self._work = values, work

    def wait(self) -> torch.Tensor:
        """The sum over all ranks. Raises RuntimeError when the group is broken."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values


def wanted_world() -> int:
    """Ranks that the job asks for, by its environment; fewer may be there at first. 0: unknown."""
    return int(os.environ.get("DDPJOB_NODES", 0)) * int(os.environ.get("DDPJOB_PROCS_PER_NODE", 0))


@contextmanager
def joined(group: Group, placement: Placement, timeout_seconds: float) -> Iterator[None]:
    """A process group for the time of a `with`; left without ceremony when an exception is under way (peers may be gone)."""
    if group.world == 1:
        yield
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = open_store(group, timeout_seconds)
    dist.init_process_group(placement.backend, timeout=timeout, store=store, rank=group.rank, world_size=group.world)
    yield
    dist.destroy_process_group()
