"""Copies the training state into the node's memory at intervals, and restores it at startup.

`snapshot_store` explains why such copies are needed, how states are ordered, and how they are
stored in slots (files in memory that each hold one state). This module handles tensors and ranks.

**Copy.** The caller passes the state as a tree of tensors, numbers and containers. The tree is
split into a *skeleton* (the pickled tree, with a number in place of each tensor) and the tensors'
bytes, which are copied directly into the mapped slot. On a GPU, the tensors are first cloned on the
device, in stream order. Cloning takes a tenth of a millisecond for 100 MB. A side stream copies the
clones to the host while the next step runs, and then the slot is marked complete.

**Private states.** With each copy, every rank sends two things to all other ranks: the cost of its
last copy (`Cost`), and its private state, such as its random generators. On a network, this
exchange takes milliseconds, longer than the copy itself. So with the interval "auto", a background
thread waits for the exchange and then completes the slot, usually early in the next step. `settle`
waits for that thread. If the caller calls `settle` before each step of an optimizer
(`settles_early`), no step is taken until the copy of the previous step is complete. So the interval
still limits how many steps are repeated after a loss. If the caller does not call `settle` before
each step, or if the state is sharded, there is no background thread, and `take` itself waits for
the exchange.

**Interval** (`Cadence`). With "auto", the ranks agree at each copy on the shortest interval at
which copies take at most a hundredth of the training time. After a loss, at most one interval of
steps is repeated. The cost of a copy is its duration or the time that it adds to a step, whichever
is longer. A copy can lengthen a step by more than its own duration, because it also evicts caches,
wakes threads, and delays the other ranks. To find the added time, steps with a copy are compared
with steps without a copy. Therefore, the interval is at least 2 until enough comparisons have been
made. A single slow step changes nothing, because medians are compared. From one copy to the next,
the interval grows at most fourfold.

**Start.** Every node reports which states it holds, and all ranks choose the same moment (an
incarnation and a step). Nodes that lack the state from that moment receive it over the process
group. The ranks also adopt rank 0's interval and the highest incarnation of all ranks. These values
can differ after a change to the spec, because only replacement pods have the new ones. Every copy
on any node includes the private states of all ranks, because a rank's own node may be lost.

**A different group size** (`_Regrouping`). An elastic job can continue from a sharded state even if
it now has fewer or more ranks than the group that wrote the state. Each rank then reads all old
parts, one after another, and takes its own rows from each of them. So a rank never holds more than
one old part in addition to its own part.

**Failures.** A node whose volume is too small keeps no states, and its ranks receive the state at
startup in their own memory. All ranks learn of the missing room at the next copy, and report how
much memory is needed. With replicated state, the other nodes continue to copy. A sharded state
would never be complete, so all nodes stop copying. If a node dies during a transfer, the collective
fails, and the job restarts from the remaining states.

Example, 2 nodes, a copy every 10 steps: node 1 is lost after step 48. Node 0 holds step 40, and the
new node holds nothing. Both nodes choose step 40, and node 0 sends the state after this step to
node 1. Then 8 steps are repeated.

Unpickling adds no risk, because pickles come only from this job's own pods, which run the user's
program anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import mmap
import pickle
import queue
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Protocol

from ddpjob_runtime import protocol

from ddpjob_pod.snapshot_store import (
    ALIGNMENT,
    ALL,
    HEADER_BYTES,
    Held,
    Moment,
    NoRoom,
    Order,
    SnapshotStore,
    Transfer,
    Writing,
    choose,
    decode,
    encode,
    part_of,
    parts_of,
    transfers,
)

AUTO, NONE = "auto", "none"
SHARE = 0.01
"""Maximum share of the training time that copies may take, if the interval is "auto"."""
LONGEST = 10**6
"""Maximum number of steps between two copies, even if copying is very slow."""
_FIRST_COPIES = 2
"""Number of initial copies whose cost is ignored. They take longer than later copies, because they
also reserve slots and connect the ranks.
"""
_RECENT = 15
"""If the interval is "auto", the median cost of this many copies determines it."""
_ENOUGH = 3
"""Minimum number of comparisons between steps with and without a copy. With fewer comparisons, the
interval does not depend on how much a copy lengthens a step.
"""
_GROWTH = 4
"""Maximum factor by which "auto" lengthens the interval from one copy to the next."""
_COMPARED = 64
"""Maximum number of step times to keep between two copies, for comparison with the step that
included a copy.
"""
_UNKNOWN = math.nan
_CHUNK_BYTES = 1 << 26
_OWN_OVERHEAD = 64
"""Maximum number of bytes that pickling adds to a rank's private state."""
_SIZE = struct.Struct("<Q")
_SIZES = struct.Struct("<QQQQ")
_COST = struct.Struct("<dddddd")
_HELLO = struct.Struct("<QQQQQ")
_AUTO_CODE, _NONE_CODE = 0, 2**64 - 1

Rebuild = Callable[[tuple[Any, ...], Any, "tuple[int, ...]"], Any]
"""Function that rebuilds a tensor from this rank's shard. Its arguments are the tensor's path in
the tree, the shard, and the shape of the whole tensor.
"""
Rows = Callable[[tuple[Any, ...], "tuple[int, ...]"], Optional[range]]
"""Function that returns the range of a tensor's rows that this rank needs, or None if the rank
needs the whole tensor. Its arguments are the tensor's path in the tree and the shape of the whole
tensor.
"""


class RankExchange(Protocol):
    """Sends bytes between the ranks.

    All ranks call `gather_bytes` and `start_gathering` together. The other methods involve only the
    sender and the receiver.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""

    def start_gathering(self, content: bytes) -> Callable[[], list[bytes] | None]:
        """Start gathering every rank's bytes, and return a function that waits for them.

        Earlier calls determine the size of the buffers. If a rank's bytes exceed the buffers, the
        returned function returns None, and the caller must call `gather_bytes` instead.
        """

    def send(self, content: memoryview, to: int) -> None:
        """Send bytes to a rank. That rank must receive the same number of bytes."""

    def swap(self, content: memoryview, to: int, received: memoryview, source: int) -> None:
        """Send bytes to one rank, and receive bytes from another rank at the same time.

        If `content` is empty, nothing is sent. If `received` is empty, nothing is received.
        """

    def receive(self, content: memoryview, source: int) -> None:
        """Fill the memory with a rank's bytes."""


class Cost(NamedTuple):
    """The cost of copies on one rank.

    Times are in seconds. Most times are 0 while they are unknown, for example at the first copy.
    """

    copy: float = 0.0
    exchange: float = 0.0
    """Duration of the ranks' exchange before a copy, including the wait for the last rank."""
    pace: float = 0.0
    """Duration of a step without a copy."""
    keeps: float = 0.0
    """1 if this rank keeps copies; 0 if the node has no room, or if a different rank on the node
    writes for this rank.
    """
    needed: float = 0.0
    """Bytes that two states would need on this rank's node; 0 if two states fit."""
    longer: float = _UNKNOWN
    """Time that the copy added to a step; NaN if no step without a copy was measured."""


class TorchExchange:
    """Exchanges bytes through a process group that accepts CPU tensors.

    A single process needs no group.
    """

    def __init__(self, local_rank: int, local_world: int, distributed: Any = None, group: Any = None) -> None:
        """Exchange bytes through the process group `group`.

        `distributed` is the torch.distributed module, or None for a single process.
        """
        self._distributed, self._group = distributed, group
        self.rank = distributed.get_rank(group) if distributed else 0
        self.world = distributed.get_world_size(group) if distributed else 1
        self.local_rank, self.local_world = local_rank, local_world
        self._capacity = 1024
        self._reused: list[Any] = []

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return all ranks' bytes, in rank order.

        If a rank's bytes exceed the buffers, all ranks repeat the exchange with larger buffers.
        """
        while (said := self.start_gathering(content)()) is None:
            pass
        return said

    def start_gathering(self, content: bytes) -> Callable[[], list[bytes] | None]:
        """Start gathering every rank's bytes. See `RankExchange`."""
        if self._distributed is None:
            return lambda: [content]
        capacity = self._capacity
        sent, *every = self._buffers(_SIZE.size + capacity)
        own = _SIZE.pack(len(content)) + (content if len(content) <= capacity else b"")
        memoryview(sent.numpy())[: len(own)] = own
        work = self._distributed.all_gather(every, sent, group=self._group, async_op=True)

        def wait_for_ranks() -> list[bytes] | None:
            work.wait()
            texts = [bytes(each.numpy()) for each in every]
            sizes = [_SIZE.unpack_from(text)[0] for text in texts]
            if max(sizes) > capacity:
                self._capacity = _aligned(max(sizes) * 5 // 4)
                return None
            return [text[_SIZE.size : _SIZE.size + size] for text, size in zip(texts, sizes)]

        return wait_for_ranks

    def _buffers(self, size: int) -> list[Any]:
        """Return one tensor for sending, and one tensor per rank for receiving.

        Later calls reuse these tensors, because allocating new ones took a fifth as long as a small
        copy.
        """
        if not self._reused or len(self._reused[0]) != size:
            torch = _torch()
            self._reused = [torch.empty(size, dtype=torch.uint8) for _ in range(1 + self.world)]
        return self._reused

    def send(self, content: memoryview, to: int) -> None:
        """Send bytes to a rank. That rank must receive the same number of bytes."""
        self._distributed.send(_bytes_of(content), self._global(to), group=self._group)

    def receive(self, content: memoryview, source: int) -> None:
        """Fill the memory with a rank's bytes."""
        self._distributed.recv(_bytes_of(content), self._global(source), group=self._group)

    def swap(self, content: memoryview, to: int, received: memoryview, source: int) -> None:
        """Send `content` to one rank, and fill `received` from another rank.

        If `content` is empty, nothing is sent. If `received` is empty, nothing is received.
        """
        sending = None
        if content:
            sending = self._distributed.isend(_bytes_of(content), self._global(to), group=self._group)
        if received:
            self.receive(received, source)
        if sending is not None:
            sending.wait()

    def _global(self, rank: int) -> int:
        if self._group is None:
            return rank
        number: int = self._distributed.get_global_rank(self._group, rank)
        return number


def _bytes_of(content: memoryview) -> Any:
    torch = _torch()
    return torch.frombuffer(content, dtype=torch.uint8)


class _StepTimes:
    """The times of one rank's steps, with and without a copy, in seconds."""

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=_RECENT)
        """Median times of the steps without a copy, one value per interval. Intervals without such
        steps have no value.
        """
        self._with_copy: float | None = None
        self._others: deque[float] = deque(maxlen=_COMPARED)

    def copied(self) -> None:
        """Treat the next step as one that includes a copy."""
        self._with_copy = None
        self._others.clear()

    def add(self, seconds: float) -> None:
        """Add the time of a step. The first step after a copy includes that copy."""
        if self._with_copy is None:
            self._with_copy = seconds
        elif not math.isnan(seconds):
            self._others.append(seconds)

    def complete(self, cost: Cost) -> Cost:
        """Return the cost of the last copy with `pace` and `longer` filled in, as far as they are
        known.
        """
        if not cost.copy or self._with_copy is None:
            return cost
        if self._others:
            self._paces.append(_median(self._others))
        if self._paces:
            pace = _median(self._paces)
            return cost._replace(pace=pace, longer=self._with_copy - pace - cost.exchange)
        return cost._replace(pace=max(0.0, self._with_copy - cost.copy - cost.exchange))


def _median(values: Iterable[float]) -> float:
    """Return the median; for an even number of values, the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


@dataclass
class Cadence:
    """Decides after which steps the state is copied. All ranks make the same decisions."""

    every: int | str
    """AUTO, NONE, or the number of steps between two copies."""
    due: int = 0
    """Step after which the next copy is due. Used only if `every` is AUTO."""
    recent: list[tuple[float, float, float]] = field(default_factory=list)
    """Measurements of the last copies. Each one consists of three times in seconds: the duration of
    the copy, the time that it added to a step (NaN if unknown), and the duration of a step without
    a copy. Several measurements are kept, because a single copy can be an outlier.
    """
    _interval: int = 1

    def is_due(self, step: int) -> bool:
        """Whether to copy the state after this step."""
        if self.every == NONE:
            return False
        return step % self.every == 0 if isinstance(self.every, int) else step >= self.due

    def copied(self, step: int, costs: list[Cost]) -> int:
        """Record a copy, and return the number of steps until the next one.

        `costs` contains every rank's cost of the previous copy.
        """
        if isinstance(self.every, int):
            return self.every
        # The rank that arrives last does not wait for the others. Its exchange is therefore the
        # shortest, and shows the actual cost.
        exchange = min(cost.exchange for cost in costs)
        copy = max(cost.copy for cost in costs) + exchange
        pace = max(cost.pace for cost in costs)
        if copy > 0 and pace > 0:
            # In each step, all ranks wait for the slowest one, so all ranks measure about the same
            # delay.
            known = [cost.longer for cost in costs if not math.isnan(cost.longer)]
            longer = _median(known) + exchange if known else _UNKNOWN
            self.recent = [*self.recent[1 - _RECENT :], (copy, longer, pace)]
        return self._plan(step, at_most=_GROWTH * self._interval)

    def resume(self, step: int, recent: list[tuple[float, float, float]]) -> int:
        """Plan the next copy as if no restart had happened, and return the interval.

        Return 0 if the interval is still unknown.

        Args:
            step: the step of the state that was restored on all nodes.
            recent: the value of `recent` when that state was copied; empty if no cost was known
                yet.
        """
        if self.every != AUTO or not recent:
            return 0
        self.recent = recent
        return self._plan(step, at_most=LONGEST)

    def _plan(self, step: int, at_most: int) -> int:
        interval = 1
        if self.recent:
            copies, longers, paces = zip(*self.recent)
            known = [longer for longer in longers if not math.isnan(longer)]
            least, cost = 2, _median(copies)
            if len(known) >= _ENOUGH:
                least, cost = 1, max(cost, _median(known))
            interval = min(LONGEST, at_most, max(least, math.ceil(cost / (SHARE * _median(paces)))))
        self._interval, self.due = interval, step + interval
        return interval


class _Tensor:
    """Stands for a tensor in a skeleton. `number` is the tensor's index in the list of places."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _Tensor, (self.number,)


@dataclass(frozen=True)
class _Place:
    """Where the bytes of a tensor are in a slot, and how to read them."""

    offset: int
    count: int
    """Number of the tensor's elements."""
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: tuple[int, ...] | None
    """Shape of the whole tensor if this tensor is a shard; None if it is not."""


class _Places:
    """The places of a state's tensors, one after another in a slot.

    `shapes` describes each tensor as (dtype, shape, stride, whole). The last item is the shape of
    the whole tensor if the tensor is a shard, and otherwise None.
    """

    def __init__(self, shapes: list[tuple[Any, Any, tuple[int, ...], tuple[int, ...] | None]]) -> None:
        self.shapes, self.each, end = shapes, [], 0
        for dtype, shape, stride, whole in shapes:
            dense = _dense_stride(shape, stride)
            place = _Place(_aligned(end), math.prod(shape), dtype, tuple(shape), dense, whole)
            end = place.offset + place.count * dtype.itemsize
            self.each.append(place)
        self.size = end
        self.pickled = pickle.dumps(self.each, protocol=4)


@dataclass(frozen=True)
class Restored:
    """The state that training continues from."""

    moment: Moment
    tree: Any
    owns: dict[int, bytes]
    """Each rank's private state; empty if ranks have none."""
    made: Moment | None
    """The last step completed before the restart; None if no node knows it."""


@dataclass
class _Copy:
    """A copy that has been started. A background thread or `RankSnapshots.settle` completes it."""

    step: int
    moment: Moment
    content: bytes
    """This rank's costs and private state, as sent to all ranks."""
    has_own: bool
    gathering: Callable[[], list[bytes] | None]
    said: list[bytes] | None = None
    """The `content` of every rank, in rank order; None until the contents of all ranks have
    arrived.
    """
    is_agreed: bool = False
    """Whether the ranks have already determined the next interval from the costs in `said`."""
    layout: _StateLayout | None = None
    writing: Writing | None = None
    event: Any = None
    """CUDA event that marks the end of the transfer from the device; None without a transfer."""
    done: Any = None
    """Lock that is held while the background thread works on this copy; None if the thread does not
    take part.
    """
    error: Exception | None = None
    seconds: float = 0.0
    """CPU time that the background thread spent on this copy."""

    @property
    def costs(self) -> list[Cost]:
        return [Cost(*_COST.unpack(content[: _COST.size])) for content in self.said or ()]

    @property
    def owns(self) -> dict[int, bytes]:
        if not self.has_own:
            return {}
        return {rank: content[_COST.size :] for rank, content in enumerate(self.said or ())}

    def finish(self) -> None:
        """Wait for the ranks' private states and for the transfer from the device, and mark the
        slot as complete.
        """
        if self.said is None:
            self.said = self.gathering()
        if self.said is None:
            return  # A rank's private state has grown beyond the buffers, so `settle` gathers again.
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        writing, self.writing = self.writing, None
        if writing is not None and self.layout is not None and self.layout.write_owns(writing.data, self.owns):
            writing.complete(self.moment)


class _Finisher:
    """A thread that finishes copies one after another."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Copy] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ddpjob-snapshots", daemon=True).start()

    def finish(self, copy: _Copy) -> None:
        copy.done = threading.Lock()
        copy.done.acquire()
        self._waiting.put(copy)

    def _run(self) -> None:
        while True:
            copy, began = self._waiting.get(), time.thread_time()
            try:
                copy.finish()
            except Exception as error:
                copy.error = error
            copy.seconds = time.thread_time() - began
            copy.done.release()


class RankSnapshots:
    """One rank's access to the latest states in memory.

    All ranks must call the methods in the same order.
    """

    def __init__(
        self,
        store: SnapshotStore,
        exchange: RankExchange,
        order: Order,
        every: int | str,
        *,
        sharded: bool = False,
        together: bool = False,
    ) -> None:
        """Connect a rank to the states in its node's memory.

        Args:
            store: the node's states.
            exchange: the connection to the other ranks.
            order: the incarnation of this process, as (generation, round).
            every: AUTO, NONE, or the number of steps between two copies.
            sharded: whether each rank has its own part of the state. If False, all ranks have the
                same state.
            together: whether `take` must call `make` on all ranks, even on those that do not keep
                the state.
        """
        self._together = together
        self._store, self._exchange, self._order = store, exchange, order
        self._sharded = sharded
        self._part = part_of(exchange.rank, exchange.world) if sharded else ALL
        self.cadence = Cadence(every)
        self.interval = 0
        """Number of steps between two copies; 0 while no state is held. After a loss, at most this
        many steps are repeated.
        """
        self.needed = 0
        """Bytes that two states need, if some node does not have room for them; otherwise 0."""
        self._lacks = 0
        """Bytes that two states need, if this rank's node does not have room for them; otherwise 0.
        """
        self._copies = 0
        self._base: Moment | None = None
        """The moment that training continued from. None once a later state is complete on all
        nodes.
        """
        self._places: _Places | None = None
        """The places of the tensors in the last copy."""
        self._views: dict[int, tuple[int, _Places, list[Any]]] = {}
        self._stream: Any = None
        self._pending: _Copy | None = None
        self._background: _Finisher | None = None
        self.settles_early = False
        """Whether the caller calls `settle` before each optimizer step. Set by the caller."""
        self._owns_room = 0
        """Bytes reserved at the end of a slot for the ranks' private states."""
        self.start: dict[str, Any] = {}
        """Where training continued from, in the format that `protocol.read_start` reads. Empty
        until `begin` is called.
        """
        self._made: Moment | None = None
        self._said: dict[str, Any] = {}
        self._began = 0.0
        self._last: int | None = None
        """The last step that `note` has recorded."""
        self._cost, self._noted, self._times = Cost(), 0.0, _StepTimes()

    @property
    def _speaks(self) -> bool:
        """Whether this rank speaks for its node. Such a rank reports the node's states and writes
        replicated state.
        """
        return self._exchange.local_rank == 0

    @property
    def _writes(self) -> bool:
        return self._sharded or self._speaks

    def use(self, exchange: RankExchange) -> None:
        """Wait until the last copy is complete, and then switch to a different exchange.

        The new exchange must connect the same ranks.
        """
        self.settle()
        self._exchange = exchange

    def restore(
        self, rebuild: Rebuild | None = None, rows: Rows | None = None, *, views: bool = False
    ) -> Restored | None:
        """Return the latest state that the nodes together hold completely; None if there is none.

        Unless a group of a different size wrote the state, every node with enough room holds it
        afterwards.

        Args:
            rebuild: function that rebuilds a sharded tensor from this rank's shard.
            rows: function that returns which rows of a tensor this rank needs. Without this
                function, only states from groups of the same size count.
            views: whether the tensors share the node's memory and therefore become invalid at the
                next copy. If False, the tensors are copies in CPU memory.

        Raises:
            RuntimeError: a rank is gone.
        """
        said = self.agree()
        if self.is_off:
            return None
        nodes = {rank: _inventory(rank, inventory) for rank, (_, inventory) in said.items()}
        held = {rank: states for rank, (states, _) in nodes.items()}
        made = self._made = max((m for _, m in nodes.values() if m is not None), default=None)
        world = range(self._exchange.world)
        own_parts = len(world) if self._sharded else 0
        chosen = choose(held, own_parts if rows is None else None)
        if chosen is None:
            return None
        moment, number_of_parts = chosen
        self._base = moment
        if rows is not None and number_of_parts != own_parts:
            return self._regroup(moment, number_of_parts, held, _Regrouping(rows, rebuild))
        size = max(h.size for states in held.values() for h in states if h.moment == moment)
        crowded = {rank for rank, (room, _) in said.items() if room < 2 * (size + HEADER_BYTES)}
        node_of = self._nodes(held)
        if self._sharded:
            wanted = {rank: (node_of[rank], part_of(rank, len(world))) for rank in world}
        else:
            wanted = {r: (node, ALL) for r, node in node_of.items() if r == node or node in crowded}
        alone = not self._sharded and node_of[self._exchange.rank] in crowded
        content = None
        for transfer in transfers(held, wanted, moment):
            content = self._transfer(transfer, moment, alone=alone) or content
        if self._sharded and len(world) > self._exchange.local_world:
            # Give each node a copy of the previous node's parts. Otherwise, losing a node before
            # the next copy would lose the state.
            before = {r: (node_of[r], self._part_before(r)) for r in world}
            for transfer in transfers(held, before, moment):
                self._transfer(transfer, moment)
        self._exchange.gather_bytes(b"")  # After this exchange, every node has the state for all of its ranks.
        content = content or self._store.read(self._find(self._part, moment))
        tree, owns, recent = _read(content, rebuild, views=views)
        self.interval = self.cadence.resume(moment.step, recent)
        return Restored(moment, tree, owns, made)

    def _nodes(self, speakers: Iterable[int]) -> dict[int, int]:
        """Return {rank: the rank that speaks for its node}."""
        return {rank: max(s for s in speakers if s <= rank) for rank in range(self._exchange.world)}

    def _regroup(
        self, moment: Moment, number_of_parts: int, held: dict[int, list[Held]], regrouping: _Regrouping
    ) -> Restored | None:
        """Return this rank's part of a state that a group of a different size wrote."""
        owns: dict[int, bytes] = {}
        recent: list[tuple[float, float, float]] = []
        node_of = self._nodes(held)
        for part in parts_of(number_of_parts):
            wanted = {rank: (node, part) for rank, node in node_of.items()}
            content = None
            for transfer in transfers(held, wanted, moment):
                content = self._transfer(transfer, moment, alone=True) or content
            owns, recent = regrouping.add(content or self._store.read(self._find(part, moment)))
        # Wait for all ranks here, because some of them may still be reading this node's parts.
        self._exchange.gather_bytes(b"")
        tree = regrouping.complete()
        self.interval = self.cadence.resume(moment.step, recent)
        return Restored(moment, tree, owns, self._made)

    def _part_before(self, rank: int) -> str:
        """Return the name of the previous node's part of which `rank` keeps a copy."""
        world = self._exchange.world
        return part_of((rank - self._exchange.local_world) % world, world)

    @property
    def is_off(self) -> bool:
        """Whether the ranks have agreed, at startup or later, not to keep states in memory."""
        return self.cadence.every == NONE

    def agree(self) -> dict[int, tuple[int, bytes]]:
        """Agree with the other ranks on the interval and the incarnation.

        Return {rank: (room, states)} for the ranks that speak for a node. `room` is the node's room
        in bytes, and `states` contains the node's states in the form that `encode` returns.
        """
        if self._store.fault:
            _warn(f"this pod does not keep training states in memory: {self._store.fault}")
        own, room = b"", 0
        if self._speaks:
            own, room = encode(self._store.held(), self._store.made), self._store.room(ALL)
        code = {AUTO: _AUTO_CODE, NONE: _NONE_CODE}.get(str(self.cadence.every), self.cadence.every)
        hello = _HELLO.pack(code, *self._order, self._speaks, room)
        said = self._exchange.gather_bytes(hello + own)
        hellos = [_HELLO.unpack_from(content) for content in said]
        first = hellos[0][0]
        self.cadence.every = {_AUTO_CODE: AUTO, _NONE_CODE: NONE}.get(first, first)
        self._order = max((generation, round_) for _, generation, round_, _, _ in hellos)
        return {r: (h[4], said[r][_HELLO.size :]) for r, h in enumerate(hellos) if h[3]}

    def _find(self, part: str, moment: Moment) -> Held:
        for held in self._store.held():
            if (held.part, held.moment) == (part, moment):
                return held
        raise RuntimeError(f"the state after step {moment.step} is no longer in this node's memory")

    def _transfer(self, transfer: Transfer, moment: Moment, *, alone: bool = False) -> memoryview | None:
        """Send or receive a part, if this rank is the sender or the receiver.

        A received part is stored in a slot, and the result is None. But if `alone` is set or the
        node has no room, return the received part instead.
        """
        rank = self._exchange.rank
        if rank == transfer.source:
            content = self._store.read(self._find(transfer.part, moment))
            for start in range(0, len(content), _CHUNK_BYTES):
                self._exchange.send(content[start : start + _CHUNK_BYTES], transfer.to)
        elif rank == transfer.to:
            writing: Writing | None = None
            if not alone:
                with contextlib.suppress(NoRoom):
                    writing = self._store.begin(transfer.part, transfer.size, moment)
            received = _reserve(transfer.size) if writing is None else writing.data
            for start in range(0, transfer.size, _CHUNK_BYTES):
                self._exchange.receive(received[start : start + _CHUNK_BYTES], transfer.source)
            if writing is None:
                return received
            writing.complete(moment)
        return None

    def begin(self, step: int, source: str) -> None:
        """Record the step after which training continues, and where the state came from (one of
        protocol.SOURCES).
        """
        self._began = self._noted = time.perf_counter()
        self.start = {"step": step, "source": source}
        if self._made is not None:
            self.start["made"] = max(step, self._made.step)
        elif source == protocol.SCRATCH and self._order == (0, 0):
            self.start["made"] = step
        if self.start.get("made") == step:
            self.start["seconds"] = 0.0
        if self._speaks:
            self._store.note_made(Moment(self._order, step))

    def note(self, step: int) -> None:
        """Record that a step is complete.

        `take` does this as well, so call `note` only if `take` is called late, during the next
        step.
        """
        if step == self._last:
            return
        self._last = step
        before, self._noted = self._noted, time.perf_counter()
        self._times.add(self._noted - before)
        if self._speaks:
            self._store.note_made(Moment(self._order, step))
        if "seconds" not in self.start and step >= self.start.get("made", math.inf):
            self.start["seconds"] = round(time.perf_counter() - self._began, 3)

    def interrupt(self) -> None:
        """Ignore the time of the next step, which includes other work such as an evaluation."""
        self._noted = _UNKNOWN

    def take(self, step: int, make: Callable[[], Any], own: Callable[[], bytes] | None = None) -> None:
        """Record that a step is complete, and copy the state if a copy is due.

        A step that `note` has already recorded is not recorded again.

        Args:
            step: number of steps completed since training began.
            make: function that returns the state, a tree of tensors, numbers, strings and
                containers.
            own: function that returns this rank's private state; None if ranks have none.

        Raises RuntimeError if a rank is gone.
        """
        self.note(step)
        self.settle()
        if not self.cadence.is_due(step):
            return
        began, worked = time.perf_counter(), time.thread_time()
        keeps = self._writes and not self._lacks
        cost = self._times.complete(self._cost)._replace(keeps=float(keeps), needed=float(self._lacks))
        content = _COST.pack(*cost) + (own() if own is not None else b"")
        exchanges = time.perf_counter()
        gathering = self._exchange.start_gathering(content)
        copy = _Copy(step, Moment(self._order, step), content, own is not None, gathering)
        later = self._settles_later()
        if not later and not self._agree_on(copy):
            return
        exchanged = time.perf_counter()
        self._count_copy()
        tree = make() if self._writes or self._together else None
        if keeps:
            self._copy(tree, copy)
        self._pending = copy
        if self._sharded:
            self._copy_to_neighbour(copy.moment)
        elif later:
            self._background = self._background or _Finisher()
            self._background.finish(copy)
        elif copy.event is None:
            self.settle()
        took = time.perf_counter() - began
        self._times.copied()
        if self._copies > _FIRST_COPIES:
            exchange = 0.0 if later else exchanged - exchanges
            # If the copy waits for another node or the device, its cost is its whole duration.
            # Otherwise, its cost is only the CPU time of this thread, because other processes may
            # run during the copy.
            waits = self._sharded or self._stream is not None
            copying = took - exchange if waits else time.thread_time() - worked
            self._cost = Cost(copying, exchange)

    def _settles_later(self) -> bool:
        """Whether a background thread completes the next copy.

        The first copies are completed without the thread, because they determine the size of the
        ranks' private states.
        """
        return (
            self.settles_early
            and self.cadence.every == AUTO
            and self._copies > _FIRST_COPIES
            and self._exchange.world > 1
        )

    def settle(self) -> None:
        """Wait until the last copy is complete. Raises RuntimeError if a rank is gone."""
        copy, self._pending = self._pending, None
        if copy is None:
            return
        began = time.perf_counter()
        if copy.done is not None:
            self._wait_for_ranks(copy)
        if copy.said is None:
            copy.said = self._exchange.gather_bytes(copy.content)
        copy.finish()
        if not copy.is_agreed:
            self._agree_on(copy)
            waited = time.perf_counter() - began
            self._cost = self._cost._replace(copy=self._cost.copy + copy.seconds + waited)

    def _wait_for_ranks(self, copy: _Copy) -> None:
        """Wait until the background thread has finished this copy."""
        copy.done.acquire()
        if copy.error is not None:
            raise RuntimeError(f"cannot exchange states with the other ranks: {copy.error}") from copy.error

    def _agree_on(self, copy: _Copy) -> bool:
        """Agree with all other ranks on the next interval.

        Return False if copies have become useless (see `_end_if_useless`).
        """
        if copy.said is None:
            copy.said = copy.gathering() or self._exchange.gather_bytes(copy.content)
        copy.is_agreed = True
        costs = copy.costs
        if self._end_if_useless(costs):
            return False
        self.interval = self.cadence.copied(copy.step, costs)
        room = sum(len(content) for content in copy.said) + _OWN_OVERHEAD * len(copy.said) if copy.has_own else 0
        self._owns_room = max(self._owns_room, _aligned(room * 5 // 4))
        return True

    def _end_if_useless(self, costs: list[Cost]) -> bool:
        """Stop all copies if the nodes can never hold a whole state. Return whether copies were
        stopped.
        """
        self.needed = max(self._lacks, int(max(cost.needed for cost in costs)))
        is_held = any(cost.keeps for cost in costs)
        if is_held and not (self._sharded and self.needed):
            return False
        if self._speaks:
            self._store.keep_only(())
        self.cadence.every, self.interval = NONE, 0
        return True

    def _count_copy(self) -> None:
        """Count a copy, and clean up at the second one.

        By then, the first copy is complete on all nodes, because the ranks have exchanged their
        costs since. So the state that training continued from is no longer protected. Parts that
        this node does not need are deleted, such as parts that a group of a different size wrote.
        """
        self._copies += 1
        if self._copies == 2:
            self._base = None
            if self._speaks:
                self._store.keep_only(self._node_parts())

    def _node_parts(self) -> set[str]:
        """Return the names of the parts that this node keeps: those of its own ranks and, as
        copies, those of the previous node's ranks.
        """
        if not self._sharded:
            return {ALL}
        world, local = self._exchange.world, self._exchange.local_world
        first = self._exchange.rank - self._exchange.local_rank
        return {part_of(number % world, world) for number in range(first - local, first + local)}

    def _copy(self, tree: Any, copy: _Copy) -> None:
        """Copy the state into a slot, except for the ranks' private states."""
        layout = copy.layout = _StateLayout(tree, self._owns_room, self.cadence.recent, self._places)
        self._places = layout.places
        writing = copy.writing = self._writing(self._part, layout.size)
        if writing is None:
            return
        layout.write_head(writing.data)
        if any(tensor.is_cuda for tensor in layout.tensors):
            copy.event = self._copy_from_device(layout, writing)
            return
        for tensor, place in zip(layout.tensors, layout.places.each):
            _copy_to(writing.data[layout.base :], tensor, place)

    def _targets(self, data: memoryview, slot: int, layout: _StateLayout) -> list[Any]:
        """Return tensors that use the slot's memory.

        While the layout stays the same, later calls return the same tensors.
        """
        base, places, views = self._views.get(slot, (0, None, []))
        if base != layout.base or places is not layout.places:
            views = [_view(data[layout.base :], place) for place in layout.places.each]
            self._views[slot] = layout.base, layout.places, views
        return views

    def _copy_to_neighbour(self, moment: Moment) -> None:
        """Send this rank's part to the next node, and receive the previous node's part."""
        self.settle()
        rank, world, step = self._exchange.rank, self._exchange.world, self._exchange.local_world
        if world <= step:
            return
        to, source = (rank + step) % world, (rank - step) % world
        own = next((h for h in self._store.held() if (h.part, h.moment) == (self._part, moment)), None)
        content = memoryview(b"") if own is None else self._store.read(own)
        theirs = memoryview(bytearray(_SIZE.size))
        self._exchange.swap(memoryview(bytearray(_SIZE.pack(len(content)))), to, theirs, source)
        size = _SIZE.unpack(theirs)[0]
        writing = self._writing(self._part_before(rank), size) if size else None
        received = memoryview(b"") if not size else _reserve(size) if writing is None else writing.data
        for start in range(0, max(len(content), size), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            self._exchange.swap(content[start:end], to, received[start:end], source)
        if writing is not None:
            writing.complete(moment)

    def _writing(self, part: str, size: int) -> Writing | None:
        """Return memory for the next state of a part, or None if the node has no room for two
        states of this part.
        """
        try:
            return self._store.begin(part, size, self._base)
        except NoRoom:
            self._store.keep_only(self._node_parts())
        try:
            return self._store.begin(part, size, self._base)
        except NoRoom as error:
            self._store.drop([part])
            self._lacks = max(self._lacks, error.needed)
            return None

    def _copy_from_device(self, layout: _StateLayout, writing: Any) -> Any:
        """Start the transfer from the device into the slot, and return an event
        that marks its end.
        """
        torch = _torch()
        targets = self._targets(writing.data, writing.slot, layout)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        _pin(writing.data)
        clones = [tensor.clone() for tensor in layout.tensors]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, clone in zip(targets, clones):
                target.copy_(clone, non_blocking=True)
                if clone.is_cuda:
                    clone.record_stream(self._stream)
            return self._stream.record_event()

    def news(self) -> dict[str, Any]:
        """Return the report figures that have changed since the last call."""
        figures = {protocol.START: dict(self.start), protocol.AT_RISK: self.interval or None}
        if self.needed:
            figures |= {protocol.SNAPSHOT_BYTES: self.needed, protocol.AT_RISK: None}
        changed = {name: value for name, value in figures.items() if value != self._said.get(name)}
        self._said |= changed
        return changed

    def close(self) -> None:
        """Complete an unfinished copy, unless a rank is gone."""
        with contextlib.suppress(RuntimeError):
            self.settle()


def _inventory(rank: int, content: bytes) -> tuple[list[Held], Moment | None]:
    """Decode the states that a node reported.

    A malformed report counts as empty. All ranks receive the same bytes, so they all reach the same
    result.
    """
    try:
        return decode(content)
    except ValueError as error:
        _warn(f"rank {rank} sent a bad inventory: {error}")
        return [], None


def _reserve(size: int) -> memoryview:
    """Return anonymous memory. Its pages take up space only once they are written.

    The size comes from another rank and may be wrong. Raises RuntimeError if this process cannot
    get that much memory.
    """
    try:
        return memoryview(mmap.mmap(-1, size))
    except (OSError, OverflowError, ValueError) as error:
        raise RuntimeError(f"a state of {size} bytes cannot be received: {error}") from None


def _warn(text: str) -> None:
    print(f"ddpjob: {text}", file=sys.stderr, flush=True)


_pinned: set[int] = set()


def _pin(data: memoryview) -> None:
    """Lock the slot's pages in memory, so that the device can access them directly.

    Each slot is locked only once. If locking fails, transfers are slower, but still work.
    """
    torch = _torch()
    whole = torch.frombuffer(data, dtype=torch.uint8)
    if whole.data_ptr() not in _pinned:
        _pinned.add(whole.data_ptr())
        torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), len(data), 0)


def _torch() -> Any:
    """Import and return torch. The package can be imported without torch."""
    return importlib.import_module("torch")


class _StateLayout:
    """Defines where each piece of a state is in a slot.

    The sizes, the skeleton and the places come first, then the tensors, and finally the ranks'
    private states.
    """

    def __init__(
        self, tree: Any, owns_room: int, recent: list[tuple[float, float, float]], known: _Places | None = None
    ) -> None:
        """Split a state into its skeleton and its tensors.

        Args:
            tree: the state.
            owns_room: number of bytes to reserve for the ranks' private states.
            recent: the measurements in `Cadence.recent`, for use after a restart.
            known: the places of the previous state's tensors. They are reused if `_Places.shapes`
                is equal for the new state's tensors.
        """
        self._found: list[tuple[Any, tuple[int, ...] | None]] = []
        try:
            skeleton = self._without_tensors(tree, _torch())
        except RecursionError:
            raise TypeError(explain_recursion(tree)) from None
        self.tensors = [tensor for tensor, _ in self._found]
        shapes = [(it.dtype, it.shape, it.stride(), whole) for it, whole in self._found]
        self.places = known if known is not None and known.shapes == shapes else _Places(shapes)
        self.head = pickle.dumps((skeleton, self.places.pickled, recent), protocol=4)
        self.base = _aligned(_SIZES.size + len(self.head))
        self._tail = self.base + self.places.size
        self.size = self._tail + owns_room

    def _without_tensors(self, node: Any, torch: Any) -> Any:
        """Return the tree with a number in place of each tensor, and append the tensors to
        `_found`.
        """
        if isinstance(node, dict):
            return {key: self._without_tensors(value, torch) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self._without_tensors(value, torch) for value in node)
        # A tensor without plain memory of its own stays in the tree, and is pickled with the
        # skeleton.
        if not isinstance(node, torch.Tensor) or node.layout is not torch.strided or node.is_quantized or node.is_meta:
            return node
        whole = tuple(node.shape) if hasattr(node, "full_tensor") else None
        if whole is None and hasattr(node, "__tensor_flatten__"):
            return node
        tensor = node.detach()
        self._found.append((tensor if whole is None else tensor.to_local(), whole))
        return _Tensor(len(self._found) - 1)

    def write_head(self, data: memoryview) -> None:
        _SIZES.pack_into(data, 0, len(self.head), self.base, self._tail, 0)
        data[_SIZES.size : _SIZES.size + len(self.head)] = self.head

    def write_owns(self, data: memoryview, owns: dict[int, bytes]) -> bool:
        """Write the ranks' private states into the slot. Return False if they do not fit."""
        pickled = pickle.dumps(owns, protocol=4) if owns else b""
        if self._tail + len(pickled) > self.size:
            return False
        data[self._tail : self._tail + len(pickled)] = pickled
        _SIZES.pack_into(data, 0, len(self.head), self.base, self._tail, len(pickled))
        return True


def explain_recursion(tree: Any) -> str:
    """Return an error message for a state that contains itself or is nested too deeply."""
    left: list[tuple[Any, str, tuple[int, ...]]] = [(tree, "", ())]
    seen = set()
    while left:
        node, path, above = left.pop()
        if id(node) in above:
            return f"the state contains itself at state{path}; leave that key out of the state"
        if id(node) in seen:
            continue
        seen.add(id(node))
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
        left += [(value, f"{path}[{key!r}]", (*above, id(node))) for key, value in items]
    return "the state is nested too deeply"


def _read(
    data: memoryview, rebuild: Rebuild | None, *, views: bool
) -> tuple[Any, dict[int, bytes], list[tuple[float, float, float]]]:
    """Return a slot's tree, the ranks' private states, and the measurements in `Cadence.recent`.

    With `views`, unsharded tensors share the slot's memory.
    """
    skeleton, places, tensors, owns, recent = _open(data)

    def read(path: tuple[Any, ...], number: int) -> Any:
        place, tensor = places[number], tensors(number)
        if place.whole is None:
            return tensor if views else tensor.clone()
        if rebuild is None:
            raise TypeError(f"the state has a sharded tensor at {path}, but the caller cannot rebuild sharded tensors")
        return rebuild(path, tensor.clone(), place.whole)

    return _put_together(skeleton, read), owns, recent


def _open(data: memoryview) -> tuple[Any, list[_Place], Callable[[int], Any], dict[int, bytes], list[Any]]:
    """Return (skeleton, places, tensors, private states, measurements) from a slot.

    `tensors` is a function that returns the tensor with a given number, as a view of the slot. The
    measurements are those of `Cadence.recent`.
    """
    length, base, tail, tail_length = _SIZES.unpack_from(data, 0)
    skeleton, pickled_places, recent = pickle.loads(data[_SIZES.size : _SIZES.size + length])
    owns = pickle.loads(data[tail : tail + tail_length]) if tail_length else {}
    places = pickle.loads(pickled_places)
    return skeleton, places, lambda number: _view(data[base:], places[number]), owns, recent


def _put_together(node: Any, read: Callable[[tuple[Any, ...], int], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a skeleton with its tensors filled in.

    `read` returns the tensor with a given path and number.
    """
    if isinstance(node, dict):
        return {key: _put_together(value, read, (*path, key)) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_put_together(value, read, (*path, index)) for index, value in enumerate(node))
    return read(path, node.number) if isinstance(node, _Tensor) else node


class _Regrouping:
    """Puts together one rank's part of a state from the parts of a group of a different size.

    Sharded tensors are divided by rows (dimension 0), just as FSDP divides them. Everything else is
    equal in all parts, and is taken from the first part.
    """

    def __init__(self, rows: Rows, rebuild: Rebuild | None) -> None:
        self._rows, self._rebuild = rows, rebuild
        self._tree: Any = None
        self._shards: dict[tuple[Any, ...], _Shard] = {}

    def add(self, data: memoryview) -> tuple[dict[int, bytes], list[Any]]:
        """Add the old part of the next rank, in rank order.

        Return the private states and measurements that the old part contains.
        """
        skeleton, places, tensors, owns, recent = _open(data)
        is_first = self._tree is None

        def read(path: tuple[Any, ...], number: int) -> Any:
            tensor, whole = tensors(number), places[number].whole
            shape = tuple(tensor.shape) if whole is None else whole
            rows = self._rows(path, shape) if is_first else None
            if is_first and (whole is not None or rows is not None):
                self._shards[path] = _Shard(tensor, shape, rows)
            if path in self._shards:
                self._shards[path].add(tensor)
                return _Tensor(number)
            return tensor.clone() if is_first else None

        tree = _put_together(skeleton, read)
        if is_first:
            self._tree = tree
        return owns, recent

    def complete(self) -> Any:
        """Return the tree. Raises RuntimeError if the parts did not contain all
        rows of a tensor.
        """

        def read(path: tuple[Any, ...], number: int) -> Any:
            shard = self._shards[path]
            if shard.seen != shard.whole[0]:
                raise RuntimeError(f"the state in memory has {shard.seen} of {shard.whole[0]} rows at {path}")
            if shard.rows is None or self._rebuild is None:
                return shard.tensor
            return self._rebuild(path, shard.tensor, shard.whole)

        return _put_together(self._tree, read)


class _Shard:
    """The rows of one tensor that this rank needs, collected from the old shards."""

    def __init__(self, like: Any, whole: tuple[int, ...], rows: range | None) -> None:
        self.whole, self.rows, self.seen, self._is_complete = whole, rows, 0, False
        self._wanted = range(whole[0]) if rows is None else rows
        self.tensor = like.new_empty((len(self._wanted), *whole[1:]))

    def add(self, shard: Any) -> None:
        """Copy the rows that this rank needs from the next old shard.

        Do nothing if the first shard already contained all rows. In that case, every part holds the
        whole tensor.
        """
        if self._is_complete:
            return
        first, self.seen = self.seen, self.seen + len(shard)
        start, end = max(first, self._wanted.start), min(self.seen, self._wanted.stop)
        if start < end:
            self.tensor[start - self._wanted.start : end - self._wanted.start] = shard[start - first : end - first]
        self._is_complete = first == 0 and self.seen == self.whole[0]


def _copy_to(data: memoryview, tensor: Any, place: _Place) -> None:
    """Copy a tensor into a slot."""
    if tuple(tensor.stride()) != place.stride or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        _view(data, place).copy_(tensor)
    elif place.count:
        # Do not let torch copy the bytes. It would divide each small copy among its threads, and
        # the threads would spend more time waiting for each other than copying.
        size = place.count * place.dtype.itemsize
        target = (ctypes.c_char * size).from_buffer(data, place.offset)
        ctypes.memmove(target, tensor.data_ptr(), size)


def _view(data: memoryview, place: _Place) -> Any:
    """Return a tensor that uses a slot's memory."""
    torch = _torch()
    if place.count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(data, dtype=place.dtype, count=place.count, offset=place.offset)
    return flat.as_strided(place.shape, place.stride)


def _dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that a tensor has after it is copied without gaps.

    The copy keeps the order in which the tensor's dimensions lie in memory.
    """
    order = sorted(range(len(shape)), key=lambda d: (stride[d], shape[d]), reverse=True)
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(1, shape[dimension])
    return tuple(strides)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
