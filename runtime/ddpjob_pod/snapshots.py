"""Copies the training's state into the node's memory after its steps, and restores it at a start.

Problem, rule and order of states: `snapshot_store`. This module knows tensors and ranks.

A copy: the caller's tree of tensors, numbers and containers is split into a *skeleton* (pickled, with
a placeholder for each tensor) and the tensors' bytes, which are copied straight into the mapped slot.
On a GPU the tensors are first cloned on the device, in stream order, which takes a tenth of a
millisecond for 100 MB; a side stream brings the clone to the host while the next step runs, and the
slot is marked complete when it has arrived.

How often: `Cadence`. With "auto" the ranks agree, with each copy, on the interval at which copies take
at most a hundredth of the time. It is the number of steps at risk.

A start: every node says what it holds, all ranks choose the same moment, and only the nodes that lack
it receive it, from the nodes that have it, over the process group. What each rank has for itself (its
random generators) travels with every copy to every node, because it would die with its own.

A failure on the way (a holder that dies during the transfer) is an error of the collective: the job
restarts once more and chooses among what is left. Trust: pickles come only from this job's own pods,
whose program runs here anyway.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import pickle
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ddpjob_runtime import protocol

from ddpjob_pod.snapshot_store import (
    ALIGNMENT,
    ALL,
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
    transfers,
)

AUTO = "auto"
SHARE = 0.01
"""Share of the time that copies may take with "auto"."""
LONGEST = 10**6
"""Steps between two copies at most, however slow they are."""
_CHUNK_BYTES = 1 << 26
_SIZE = struct.Struct("<Q")
_SIZES = struct.Struct("<QQ")
_COST = struct.Struct("<dddd")

Rebuild = Callable[[tuple[Any, ...], Any, "tuple[int, ...]"], Any]
"""Makes the tensor to restore from (path, this rank's shard, shape of the whole tensor)."""


class Exchange(Protocol):
    """What the ranks need to exchange. Every call is collective in `gather`, and pairwise otherwise."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""

    def send(self, content: memoryview, to: int) -> None:
        """Send bytes to a rank that receives as many."""

    def swap(self, content: memoryview, to: int, received: memoryview, source: int) -> None:
        """Send bytes to a rank, and receive another's meanwhile."""

    def receive(self, content: memoryview, source: int) -> None:
        """Fill the memory with a rank's bytes."""


class Cost(NamedTuple):
    """What copies cost one rank, in seconds. 0: not known, as at the first copy."""

    copy: float = 0.0
    exchange: float = 0.0
    """The exchange that goes with a copy, with the wait for the other ranks."""
    pace: float = 0.0
    """One step without a copy."""
    without_room: float = 0.0
    """1 if this rank's node cannot hold the state, or if another rank writes there; 0 otherwise."""


class TorchExchange:
    """The ranks of a process group that takes tensors of the CPU, or one process without a group."""

    def __init__(self, local_rank: int, local_world: int, distributed: Any = None, group: Any = None) -> None:
        """`distributed` is torch.distributed, and None for one process alone."""
        self._distributed, self._group = distributed, group
        self.rank = distributed.get_rank(group) if distributed else 0
        self.world = distributed.get_world_size(group) if distributed else 1
        self.local_rank, self.local_world = local_rank, local_world
        self._capacity = 1024

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order: by one collective, or two if they have grown."""
        if self._distributed is None:
            return [content]
        import torch

        while True:
            sent = torch.zeros(_SIZE.size + self._capacity, dtype=torch.uint8)
            own = _SIZE.pack(len(content)) + (content if len(content) <= self._capacity else b"")
            sent[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            every = [torch.empty_like(sent) for _ in range(self.world)]
            self._distributed.all_gather(every, sent, group=self._group)
            texts = [bytes(each.numpy()) for each in every]
            sizes = [_SIZE.unpack_from(text)[0] for text in texts]
            if max(sizes) <= self._capacity:
                return [text[_SIZE.size : _SIZE.size + size] for text, size in zip(texts, sizes)]
            self._capacity = _aligned(max(sizes))

    def send(self, content: memoryview, to: int) -> None:
        """Send bytes to a rank that receives as many."""
        self._distributed.send(_bytes_of(content), self._global(to), group=self._group)

    def receive(self, content: memoryview, source: int) -> None:
        """Fill the memory with a rank's bytes."""
        self._distributed.recv(_bytes_of(content), self._global(source), group=self._group)

    def swap(self, content: memoryview, to: int, received: memoryview, source: int) -> None:
        """Send bytes to a rank, and receive another's meanwhile."""
        sending = self._distributed.isend(_bytes_of(content), self._global(to), group=self._group)
        self.receive(received, source)
        sending.wait()

    def _global(self, rank: int) -> int:
        if self._group is None:
            return rank
        number: int = self._distributed.get_global_rank(self._group, rank)
        return number


def _bytes_of(content: memoryview) -> Any:
    import torch

    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8)


@dataclass
class Cadence:
    """Which steps are copied. Pure, and the same on every rank."""

    every: int | str
    """A number of steps, or AUTO."""
    due: int = 0
    """The next step that is copied with AUTO."""

    @property
    def agrees(self) -> bool:
        """Whether the ranks agree on the next copy with each one."""
        return self.every == AUTO

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is copied."""
        return step % self.every == 0 if isinstance(self.every, int) else step >= self.due

    def copied(self, step: int, costs: list[Cost]) -> int:
        """Note a copy. Return the steps until the next one. `costs`: every rank's, of the copy before."""
        if isinstance(self.every, int):
            return self.every
        # The last rank to come does not wait for others, so the shortest exchange is the true one.
        copy = max(cost.copy for cost in costs) + min(cost.exchange for cost in costs)
        pace = max(cost.pace for cost in costs)
        interval = 1
        if all(cost.without_room for cost in costs):
            interval = LONGEST
        elif copy > 0 and pace > 0:
            interval = min(LONGEST, max(1, math.ceil(copy / (SHARE * pace))))
        self.due = step + interval
        return interval


@dataclass(frozen=True)
class _Placeholder:
    """A tensor in a skeleton: where its bytes are, and how they are read."""

    offset: int
    count: int
    """Elements."""
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: tuple[int, ...] | None
    """The whole tensor's shape, of which this is a shard; None if it is whole."""


@dataclass(frozen=True)
class Restored:
    """The state that training continues from."""

    moment: Moment
    tree: Any
    owns: dict[int, bytes]
    """What each rank had for itself; empty if no rank had anything."""
    made: Moment | None
    """The last step that was made before the restart, as far as any node knows."""


@dataclass
class _Copied:
    """A copy on its way from a device."""

    writing: Writing
    moment: Moment
    event: Any
    sources: list[Any] = field(default_factory=list)


class Snapshots:
    """The newest states in memory, on one rank. All ranks make the same calls in the same order."""

    def __init__(
        self,
        store: SnapshotStore,
        exchange: Exchange,
        order: Order,
        every: int | str,
        *,
        sharded: bool = False,
        together: bool = False,
    ) -> None:
        """Open a node's memory for a rank.

        Args:
            every: steps between two copies, or AUTO.
            sharded: each rank has a part of the state; otherwise all have the same.
            together: all ranks make the state together, although few keep it.
        """
        self._together = together
        self._store, self._exchange, self._order = store, exchange, order
        self._sharded = sharded
        self._part = part_of(exchange.rank, exchange.world) if sharded else ALL
        self.cadence = Cadence(every)
        self.interval = 0
        """Steps between copies: how many complete steps a loss repeats at most. 0: none was made yet."""
        self.needed = 0
        """Bytes that the volume would need for two states; 0 if they fit."""
        self._views: dict[tuple[int, bytes], list[Any]] = {}
        self._stream: Any = None
        self._on_the_way: _Copied | None = None
        self.start: dict[str, Any] = {}
        """Where training continued, as `protocol.read_start` describes it; empty before `begin`."""
        self._made: Moment | None = None
        self._said: dict[str, Any] = {}
        self._began = 0.0
        self._last: int | None = None
        """The last step that was noted."""
        self._cost, self._since, self._steps = Cost(), 0.0, 0

    @property
    def _speaks(self) -> bool:
        """Whether this rank speaks for its node, and writes replicated state."""
        return self._exchange.local_rank == 0

    @property
    def _writes(self) -> bool:
        return self._sharded or self._speaks

    def use(self, exchange: Exchange) -> None:
        """Exchange with the same ranks in a different way from now on."""
        self._exchange = exchange

    def restore(self, rebuild: Rebuild | None = None) -> Restored | None:
        """Return the newest state that is whole on the nodes together; None if there is none.

        The nodes that lack it have it afterwards. Tensors are copies in the memory of the CPU.

        Raises:
            RuntimeError: a rank is gone, as in any collective.
        """
        own = encode(self._store.held(), self._store.made) if self._speaks else b""
        nodes = {rank: decode(said) for rank, said in enumerate(self._exchange.gather_bytes(own)) if said}
        world, local = self._exchange.world, max(1, self._exchange.local_world)
        wanted = {rank: (rank - rank % local, part_of(rank, world)) for rank in range(world)}
        if not self._sharded:
            wanted = {rank: (rank, ALL) for rank in nodes}
        made = self._made = max((m for _, m in nodes.values() if m is not None), default=None)
        held = {rank: states for rank, (states, _) in nodes.items()}
        moment = choose(held, {part for _, part in wanted.values()})
        if moment is None:
            return None
        for transfer in transfers(held, wanted, moment):
            self._transfer(transfer, moment)
        self._exchange.gather_bytes(b"")  # Every node has it now, for all of its ranks.
        mine = next(h for h in self._store.held() if (h.part, h.moment) == (self._part, moment))
        tree, owns = _read(self._store.read(mine), rebuild)
        return Restored(moment, tree, owns, made)

    def _transfer(self, transfer: Transfer, moment: Moment) -> None:
        rank = self._exchange.rank
        if rank == transfer.source:
            held = next(h for h in self._store.held() if (h.part, h.moment) == (transfer.part, moment))
            content = self._store.read(held)
            for start in range(0, len(content), _CHUNK_BYTES):
                self._exchange.send(content[start : start + _CHUNK_BYTES], transfer.to)
        elif rank == transfer.to:
            writing = self._store.begin(transfer.part, transfer.size)
            for start in range(0, transfer.size, _CHUNK_BYTES):
                self._exchange.receive(writing.data[start : start + _CHUNK_BYTES], transfer.source)
            writing.complete(moment)

    def begin(self, step: int, source: str) -> None:
        """Note the step from which training continues, and where its state came from (protocol.SOURCES)."""
        self._since, self._steps = time.perf_counter(), 0
        self._began, self.start = self._since, {"step": step, "source": source}
        if self._made is not None:
            self.start["made"] = max(step, self._made.step)
        elif source == protocol.SCRATCH and self._order == (0, 0):
            self.start["made"] = step
        if self.start.get("made") == step:
            self.start["seconds"] = 0.0
        if self._speaks:
            self._store.note_made(Moment(self._order, step))

    def note(self, step: int) -> None:
        """Note that a step was made. Callers use it that take its state later, in the next step."""
        if step == self._last:
            return
        self._last = step
        self._steps += 1
        if self._speaks:
            self._store.note_made(Moment(self._order, step))
        if "seconds" not in self.start and step >= self.start.get("made", math.inf):
            self.start["seconds"] = round(time.perf_counter() - self._began, 3)

    def take(self, step: int, make: Callable[[], Any], own: Callable[[], bytes] | None = None) -> None:
        """Note that a step was made, unless `note` has, and copy the state after it if that is due.

        Args:
            step: steps made since the training began.
            make: returns the state, a tree of tensors, numbers, text and containers.
            own: returns what this rank has for itself; None if no rank has anything.

        Raises RuntimeError if a rank is gone.
        """
        self.note(step)
        self._settle()
        if not self.cadence.is_due(step):
            return
        moment = Moment(self._order, step)
        began = time.perf_counter()
        pace = (began - self._since) / self._steps if self._cost.copy else 0.0
        cost = self._cost._replace(pace=pace, without_room=float(bool(self.needed) or not self._writes))
        mine, costs = own() if own is not None else b"", [cost]
        owns = {self._exchange.rank: mine} if own is not None else {}
        if self._exchange.world > 1 and (own is not None or self.cadence.agrees):
            said = self._exchange.gather_bytes(_COST.pack(*cost) + mine)
            costs = [Cost(*_COST.unpack(content[: _COST.size])) for content in said]
            owns = {rank: content[_COST.size :] for rank, content in enumerate(said) if own is not None}
        exchanged = time.perf_counter()
        tree = make() if self._writes or self._together else None
        if self._writes and not self.needed:
            self._copy(tree, owns, moment)
        if self._sharded:
            self._copy_to_neighbour(moment)
        self.interval = self.cadence.copied(step, costs)
        self._since, self._steps = time.perf_counter(), 0
        self._cost = Cost(self._since - exchanged, exchanged - began)

    def _copy(self, tree: Any, owns: dict[int, bytes], moment: Moment) -> None:
        layout = _Layout.of(tree, owns)
        writing = self._writing(self._part, layout.size)
        if writing is None:
            return
        layout.write_head(writing.data)
        if any(tensor.is_cuda for tensor in layout.tensors):
            self._copy_from_device(layout, writing, moment)
            return
        for tensor, place in zip(layout.tensors, layout.places):
            _copy_to(writing.data[layout.base :], tensor, place)
        writing.complete(moment)

    def _targets(self, data: memoryview, slot: int, layout: _Layout) -> list[Any]:
        """Return the tensors in the slot's memory, which are the same while the layout is."""
        key = slot, layout.digest
        if key not in self._views:
            self._views = {known: views for known, views in self._views.items() if known[1] == layout.digest}
            self._views[key] = [_view(data[layout.base :], place) for place in layout.places]
        return self._views[key]

    def _copy_to_neighbour(self, moment: Moment) -> None:
        """Give this rank's part to the same rank of the next node, and take the part of the node before."""
        self._settle()
        rank, world, step = self._exchange.rank, self._exchange.world, self._exchange.local_world
        if world <= step:
            return
        to, source = (rank + step) % world, (rank - step) % world
        own = next((h for h in self._store.held() if (h.part, h.moment) == (self._part, moment)), None)
        content = memoryview(b"") if own is None else self._store.read(own)
        theirs = memoryview(bytearray(_SIZE.size))
        self._exchange.swap(memoryview(bytearray(_SIZE.pack(len(content)))), to, theirs, source)
        size = _SIZE.unpack(theirs)[0]
        writing = self._writing(part_of(source, world), size) if size else None
        received = memoryview(bytearray(size)) if writing is None else writing.data
        for start in range(0, max(len(content), size), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            self._exchange.swap(content[start:end], to, received[start:end], source)
        if writing is not None:
            writing.complete(moment)

    def _writing(self, part: str, size: int) -> Writing | None:
        """Return memory for the next state of a part; None if there is no room for two."""
        try:
            return self._store.begin(part, size)
        except NoRoom as error:
            self._store.drop([part])
            self.needed = error.needed
            return None

    def _copy_from_device(self, layout: _Layout, writing: Any, moment: Moment) -> None:
        """Copy in the background. The next `take` or `close` marks the copy as complete."""
        torch = _untyped_torch()
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
            event = self._stream.record_event()
        self._on_the_way = _Copied(writing, moment, event)

    def _settle(self) -> None:
        """Mark a copy from a device as complete when it has arrived."""
        if self._on_the_way is not None:
            copied, self._on_the_way = self._on_the_way, None
            copied.event.synchronize()
            copied.writing.complete(copied.moment)

    def news(self) -> dict[str, Any]:
        """Return the figures to report that have changed since the last call."""
        figures = {protocol.START: dict(self.start), protocol.AT_RISK: self.interval or None}
        if self.needed:
            figures |= {protocol.SNAPSHOT_BYTES: self.needed, protocol.AT_RISK: None}
        changed = {name: value for name, value in figures.items() if value != self._said.get(name)}
        self._said |= changed
        return changed

    def close(self) -> None:
        """Complete the copy that is on its way."""
        self._settle()


_pinned: set[int] = set()


def _pin(data: memoryview) -> None:
    """Make the slot's memory page-locked for the device, once. A failure costs only speed."""
    torch = _untyped_torch()
    whole = torch.frombuffer(data, dtype=torch.uint8)
    if whole.data_ptr() not in _pinned:
        _pinned.add(whole.data_ptr())
        torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), len(data), 0)


def _untyped_torch() -> Any:
    """Return torch, whose calls for devices have no types."""
    import torch

    return torch


class _Layout:
    """Where the parts of a state are in a slot: sizes, the skeleton, then the tensors."""

    def __init__(self, skeleton: Any, tensors: list[Any], places: list[_Placeholder], owns: dict[int, bytes]) -> None:
        self.tensors, self.places = tensors, places
        self.head = pickle.dumps((skeleton, owns), protocol=4)
        self.base = _aligned(_SIZES.size + len(self.head))
        last = places[-1] if places else None
        self.size = self.base + (0 if last is None else last.offset + last.count * last.dtype.itemsize)
        shapes = repr([(p.offset, p.count, p.dtype, p.shape, p.stride) for p in places])
        self.digest = hashlib.sha256(f"{self.base} {shapes}".encode()).digest()

    @classmethod
    def of(cls, tree: Any, owns: dict[int, bytes]) -> _Layout:
        """Take a state apart."""
        tensors: list[Any] = []
        places: list[_Placeholder] = []
        end = 0

        def take_apart(node: Any) -> Any:
            nonlocal end
            if isinstance(node, dict):
                return {key: take_apart(value) for key, value in node.items()}
            if type(node) in (list, tuple):
                return type(node)(take_apart(value) for value in node)
            if not _is_tensor(node):
                return node
            whole = tuple(node.shape) if hasattr(node, "full_tensor") else None
            tensor = node.detach()
            tensor = tensor.to_local() if whole is not None else tensor
            offset = _aligned(end)
            place = _Placeholder(
                offset, tensor.numel(), tensor.dtype, tuple(tensor.shape), _dense_stride(tensor), whole
            )
            end = offset + place.count * place.dtype.itemsize
            tensors.append(tensor)
            places.append(place)
            return place

        skeleton = take_apart(tree)
        return cls(skeleton, tensors, places, owns)

    def write_head(self, data: memoryview) -> None:
        _SIZES.pack_into(data, 0, len(self.head), self.base)
        data[_SIZES.size : _SIZES.size + len(self.head)] = self.head


def _read(data: memoryview, rebuild: Rebuild | None) -> tuple[Any, dict[int, bytes]]:
    """Return a slot's tree, with tensors of its own, and the ranks' own states."""
    length, base = _SIZES.unpack_from(data, 0)
    skeleton, owns = pickle.loads(data[_SIZES.size : _SIZES.size + length])

    def put_together(node: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(node, dict):
            return {key: put_together(value, (*path, key)) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(put_together(value, (*path, index)) for index, value in enumerate(node))
        if not isinstance(node, _Placeholder):
            return node
        tensor = _view(data[base:], node).clone()
        if node.whole is None:
            return tensor
        if rebuild is None:
            raise TypeError(f"the state has a sharded tensor at {path}, and nothing rebuilds it")
        return rebuild(path, tensor, node.whole)

    return put_together(skeleton, ()), owns


def _copy_to(data: memoryview, tensor: Any, place: _Placeholder) -> None:
    """Copy a tensor of the CPU into a slot."""
    if tuple(tensor.stride()) != place.stride:
        _view(data, place).copy_(tensor)
    elif place.count:
        # torch would share each of many small copies among its threads, which wait for each other.
        size = place.count * place.dtype.itemsize
        target = (ctypes.c_char * size).from_buffer(data, place.offset)
        ctypes.memmove(target, tensor.data_ptr(), size)


def _view(data: memoryview, place: _Placeholder) -> Any:
    """Return a tensor in the memory of a slot."""
    import torch

    if place.count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(data, dtype=place.dtype, count=place.count, offset=place.offset)
    return flat.as_strided(place.shape, place.stride)


def _is_tensor(node: Any) -> bool:
    """Whether it is a tensor whose values are in one piece of memory. Others are pickled."""
    import torch

    return isinstance(node, torch.Tensor) and node.layout is torch.strided and not node.is_quantized


def _dense_stride(tensor: Any) -> tuple[int, ...]:
    """Return the strides of a copy without gaps, in the tensor's own order of dimensions if it has none."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    strides, step = [0] * tensor.dim(), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(1, tensor.shape[dimension])
    return tuple(strides)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
