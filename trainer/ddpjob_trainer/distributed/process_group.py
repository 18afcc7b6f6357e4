"""The group of ranks: this rank's position, and the few collectives that the trainer needs."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from ddpjob_pod.job_environment import JobEnvironment, VariableError

from ddpjob_trainer.errors import ConfigError

_T = TypeVar("_T")
_LAST_TENSORS_SECONDS = 0.05


@dataclass(frozen=True)
class Group:
    """This rank's position in a group of ranks, and the collectives of the group.

    If `world` is 1, the collectives do not communicate, so no process group is needed.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    process_group: Any = None
    """The torch process group; None means the group of all ranks."""

    @classmethod
    def from_env(cls) -> Group:
        """Return the group that torchrun's variables describe, or a group of one without them."""
        numbers = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        )
        return cls(*numbers)

    def sum_begin(self, values: torch.Tensor) -> Reduction:
        """Start summing a tensor over all ranks in place; `.wait()` returns the sum."""
        return Reduction(
            values, dist.all_reduce(values, group=self.process_group, async_op=True) if self.world > 1 else None
        )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        return self.sum_begin(values).wait()

    def gather(self, value: int) -> list[int]:
        """Return the `value` of every rank, in rank order."""
        numbers = torch.zeros(self.world, dtype=torch.int64)
        numbers[self.rank] = value
        return [int(number) for number in self.sum(numbers)]

    def all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order, on the device of `values`.

        All tensors must have the same shape.
        """
        if self.world == 1:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(found, values, group=self.process_group)
        return found

    def broadcast_bytes(self, content: bytes | None, source: int) -> bytes:
        """Return the `content` of rank `source` on every rank."""
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
        """Overwrite `tensors` on every rank with the `tensors` of rank `source`.

        The transfer uses the tensors' own device. Tensors can have any dtype and memory layout.
        """
        if self.world == 1:
            return
        for tensor in tensors:
            values = tensor.detach()
            whole = values.contiguous()
            # Send bytes, because gloo does not send booleans.
            sent = whole.flatten().view(torch.uint8)
            dist.broadcast(sent, group=self.process_group, group_src=source)
            if whole is not values:
                values.copy_(whole)

    def send_begin(self, values: torch.Tensor, to: int) -> dist.Work:
        """Start sending a contiguous tensor to rank `to` in this group.

        The tensor must not change before `.wait()` returns.
        """
        work = dist.isend(values, group=self.process_group, group_dst=to)
        assert work is not None
        return work

    def receive(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Fill `values` with a tensor from rank `source` of this group, and return `values`."""
        dist.recv(values, group=self.process_group, group_src=source)
        return values

    def swap(self, own: list[tuple[torch.Tensor, range]]) -> list[list[torch.Tensor]]:
        """Exchange each tensor in `own` with the ranks that are listed with it.

        Each item is a pair (tensor, ranks), and `ranks` includes this rank. The result lists the
        tensors of these ranks for each item. Two ranks may share at most one item. Data moves only
        between ranks of an item, on the tensors' own device.
        """
        found, transfers = [], []
        for values, ranks in own:
            every = [values if rank == self.rank else torch.empty_like(values) for rank in ranks]
            for rank, theirs in zip(ranks, every, strict=True):
                if rank != self.rank:
                    transfers += [
                        dist.P2POp(dist.isend, values, group=self.process_group, group_peer=rank),
                        dist.P2POp(dist.irecv, theirs, group=self.process_group, group_peer=rank),
                    ]
            found.append(every)
        if transfers:
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        return found

    def subgroup(self, members: list[list[int]], timeout_seconds: float) -> Group:
        """Create disjoint groups, and return the group to which this rank belongs.

        Each item of `members` lists the ranks of one group. New groups number their ranks from 0.
        All ranks must call this method together.
        """
        timeout, own = datetime.timedelta(seconds=timeout_seconds), Group()
        for ranks in members:
            process_group = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
            if self.rank in ranks:
                own = replace(self, rank=ranks.index(self.rank), world=len(ranks), process_group=process_group)
        return own

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        self.sum(torch.zeros(1))


class Reduction:
    """An all-reduce in progress."""

    def __init__(self, values: torch.Tensor, work: dist.Work | None) -> None:
        self._values, self._work = values, work

    def wait(self) -> torch.Tensor:
        """Return the sum over all ranks. Raises RuntimeError if the group is broken."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values


def in_thread(name: str, function: Callable[[], _T]) -> Future[_T]:
    """Run `function()` in a daemon thread, and return its future.

    Meanwhile, this rank can still respond to other ranks.
    """
    answer: Future[_T] = Future()

    def work() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return answer


def done_in_thread(
    group: Group, name: str, function: Callable[[], _T], alive: Callable[[], None] = lambda: None
) -> Future[_T]:
    """Run `function()` in a thread, and return its future once all ranks are done.

    The function may take longer than a collective's timeout. Twice a second, the ranks agree on
    whether any of them is still busy, and every rank calls `alive`. All ranks must call
    `done_in_thread` together.
    """
    work, waiting = in_thread(name, function), True
    while waiting:
        waiting = any(group.gather(bool(wait([work], 0.5).not_done)))
        alive()
    return work


def wanted_world() -> int:
    """Return the number of ranks that the job requests, or 0 if it is unknown.

    The number comes from environment variables. The job may start with fewer ranks. Raises
    ConfigError if a variable is malformed.
    """
    job = JobEnvironment.read()
    try:
        return job.number("nodes") * job.number("procs_per_node")
    except VariableError as error:
        raise ConfigError(str(error)) from None


def destroy() -> None:
    """Destroy the process group, after a short wait.

    After the last collective, gloo's thread may still need the GIL to free tensors. Destroying the
    group holds the GIL until gloo's thread ends, so without the wait both threads could block
    forever (seen with torch 2.6 and 2.9).
    """
    time.sleep(_LAST_TENSORS_SECONDS)
    dist.destroy_process_group()
