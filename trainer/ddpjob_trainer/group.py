"""The group of ranks: who we are, and the few collectives the trainer needs on the CPU."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.devices import Placement


@dataclass(frozen=True)
class Group:
    """This rank's place. `world` 1 needs no process group; every collective is then the identity."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def from_env(cls) -> Group:
        """As torchrun sets it; one process alone without torchrun."""
        numbers = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        )
        return cls(*numbers)

    def sum_begin(self, values: torch.Tensor) -> Reduction:
        """Begin an all-reduce (sum, in place) of a CPU tensor; the result is there after `.wait()`."""
        return Reduction(values, dist.all_reduce(values, async_op=True) if self.world > 1 else None)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce (sum) of a CPU tensor, in place."""
        return self.sum_begin(values).wait()

    def gather(self, value: int) -> list[int]:
        """Every rank's number, in rank order."""
        numbers = torch.zeros(self.world, dtype=torch.int64)
        numbers[self.rank] = value
        return [int(number) for number in self.sum(numbers)]

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
            dist.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def broadcast_tensors(self, tensors: list[torch.Tensor], source: int = 0) -> None:
        """Tensors of rank `source`, in place on every rank; on their own device."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, source)

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


@contextmanager
def joined(group: Group, placement: Placement, timeout_seconds: float) -> Iterator[None]:
    """A process group for the time of a `with`; left without ceremony when an exception is under way (peers may be gone)."""
    if group.world == 1:
        yield
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _fresh_store(group, timeout)
        dist.init_process_group(placement.backend, timeout=timeout, store=store, rank=group.rank, world_size=group.world)
    else:
        dist.init_process_group(placement.backend, timeout=timeout)
    yield
    dist.destroy_process_group()


def _fresh_store(group: Group, timeout: datetime.timedelta) -> Any:
    """The agent's own store, with keys of this life only.

    An agent that restarts its workers in place hands them the same store again (torch 2.15); the addresses of the dead processes in it
    make gloo wait for ever. Agents count their restarts each for itself, and one that has just come counts none: where there is a fence,
    it is what all ranks of a life have in common.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, group.world, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    life = os.environ.get("DDPJOB_FENCE") or f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    return dist.PrefixStore(f"/worker/{life}", store)  # type: ignore[attr-defined]
