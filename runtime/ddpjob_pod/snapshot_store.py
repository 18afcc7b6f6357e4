"""A node's memory of the training's newest states, which outlives its workers.

Problem: a restart repeats all steps since the last checkpoint, and a checkpoint is too dear for
each step. A copy into memory costs a hundredth of it. That memory must not belong to a worker.

Rule: each pod has a small folder in memory (a tmpfs). A state is one file there, a *slot*. Each part
of the state has two slots, which are written in turn: while one is overwritten, the other one is
whole. A slot's header is cleared before its data is written, and filled in afterwards with a single
store, so that a worker that is killed in between leaves an incomplete slot and nothing else. One more
file has the last step that was made, with or without a copy; it says how much a restart repeats.

The order of two states is that of their incarnations first, (generation, round), and of their steps
second. A node that was cut off may hold a higher step of an older round; the job has continued
without it, from an earlier step, and that history is the one that counts (`choose`).

With replicated state (DDP) a node has one part, `ALL`, written by its first rank, and any node's copy
serves all. With sharded state each rank has a part of its own, and the next node has a copy of it.
Decision record 0023.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ALL = "all"
"""The part that holds the whole state."""
HEADER_BYTES = 4096
ALIGNMENT = 64
"""Tensors begin at multiples of it."""
MOST_INVENTORY_BYTES = 1 << 16
_MAGIC = b"ddpjob:1"
_HEAD = struct.Struct("<8sQQQQQ")
_NUMBER = struct.Struct("<Q")
_WHOLE = 0x77686F6C65
_MADE = struct.Struct("<8sQQQ")
_SLOT = re.compile(r"(all|[0-9]{1,6}of[0-9]{1,6})\.([01])")
_HELD = struct.Struct("<QQQQ16s")

Order = tuple[int, int]
"""(generation, round) of an incarnation."""


@dataclass(frozen=True, order=True)
class Moment:
    """A state's place in the job's history."""

    order: Order
    step: int
    """Steps made since the training began."""


@dataclass(frozen=True)
class Held:
    """A complete state that a node holds."""

    part: str
    moment: Moment
    size: int
    """Bytes after the header."""
    slot: int = 0


def part_of(rank: int, world: int) -> str:
    """Return the name of a rank's part of a sharded state."""
    return f"{rank}of{world}"


class NoRoom(Exception):
    """The volume cannot hold the two states of a part. `needed` in bytes."""

    def __init__(self, needed: int, room: int) -> None:
        super().__init__(f"two states need {needed} bytes, and there is room for {room}")
        self.needed, self.room = needed, room


class SnapshotStore:
    """The folder of one node. Raises OSError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[tuple[str, int], mmap.mmap] = {}
        self._made: mmap.mmap | None = None
        self._noted: Order | None = None

    def held(self) -> list[Held]:
        """Return the complete states, oldest first. A damaged file is none."""
        found = []
        for path in self.folder.iterdir():
            if (match := _SLOT.fullmatch(path.name)) is None:
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    continue
                magic, whole, generation, round_, step, size = _HEAD.unpack(head)
                if magic == _MAGIC and whole == _WHOLE and size <= os.fstat(file.fileno()).st_size - HEADER_BYTES:
                    moment = Moment((generation, round_), step)
                    found.append(Held(match[1], moment, size, int(match[2])))
        return sorted(found, key=lambda held: held.moment)

    def begin(self, part: str, size: int) -> Writing:
        """Return memory for the next state of a part, in place of its older one.

        Raises NoRoom, which leaves nothing of this part behind.
        """
        held = [h for h in self.held() if h.part == part]
        slot = 1 - held[-1].slot if held else 0
        memory = self._map(part, slot, size)
        _NUMBER.pack_into(memory, 8, 0)
        return Writing(memory, size, slot)

    def read(self, held: Held) -> memoryview:
        """Return a state's bytes, in the file's memory: they change with the slot's next state."""
        memory = self._map(held.part, held.slot, held.size, existing=True)
        return memoryview(memory)[HEADER_BYTES : HEADER_BYTES + held.size]

    def drop(self, parts: Iterable[str]) -> None:
        """Delete all states of these parts."""
        for part in parts:
            for slot in (0, 1):
                self._open.pop((part, slot), None)
                with contextlib.suppress(FileNotFoundError):
                    self._path(part, slot).unlink()

    @property
    def made(self) -> Moment | None:
        """The last step that a worker of this node made; None: none yet."""
        try:
            magic, generation, round_, step = _MADE.unpack((self.folder / "made").read_bytes()[: _MADE.size])
        except (OSError, struct.error):
            return None
        return Moment((generation, round_), step) if magic == _MAGIC else None

    def note_made(self, moment: Moment) -> None:
        """Record the last step that was made."""
        if self._made is None:
            with (self.folder / "made").open("a+b") as file:
                os.posix_fallocate(file.fileno(), 0, _MADE.size)
                self._made = mmap.mmap(file.fileno(), _MADE.size)
        if self._noted != moment.order:
            _MADE.pack_into(self._made, 0, _MAGIC, *moment.order, moment.step)
            self._noted = moment.order
        _NUMBER.pack_into(self._made, _MADE.size - 8, moment.step)

    def room(self, part: str) -> int:
        """Return how many bytes the two slots of a part may have together."""
        volume = os.statvfs(self.folder)
        own = 0
        for slot in (0, 1):
            with contextlib.suppress(FileNotFoundError):
                own += self._path(part, slot).stat().st_size
        return volume.f_bavail * volume.f_frsize + own

    def _path(self, part: str, slot: int) -> Path:
        return self.folder / f"{part}.{slot}"

    def _map(self, part: str, slot: int, size: int, *, existing: bool = False) -> mmap.mmap:
        whole = HEADER_BYTES + size
        known = self._open.get((part, slot))
        if known is not None and len(known) >= whole:
            return known
        path = self._path(part, slot)
        with path.open("r+b" if existing else "a+b") as file:
            if not existing:
                room = self.room(part)
                if 2 * whole > room:
                    raise NoRoom(2 * whole, room)
                try:
                    # Reserved now: a page that is missing later would end the worker with SIGBUS.
                    os.posix_fallocate(file.fileno(), 0, whole)
                except OSError as error:
                    raise NoRoom(2 * whole, room) from error
            memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        self._open[part, slot] = memory
        return memory


class Writing:
    """A slot that is being written."""

    def __init__(self, memory: mmap.mmap, size: int, slot: int) -> None:
        self._memory, self._size, self.slot = memory, size, slot
        self.data = memoryview(memory)[HEADER_BYTES : HEADER_BYTES + size]

    def complete(self, moment: Moment) -> None:
        """Mark the state as complete, after all of its data is there."""
        _HEAD.pack_into(self._memory, 0, _MAGIC, 0, *moment.order, moment.step, self._size)
        _NUMBER.pack_into(self._memory, 8, _WHOLE)


def choose(held: Mapping[int, Iterable[Held]], parts: Iterable[str]) -> Moment | None:
    """Return the newest moment of which every part is held by someone; None if there is none.

    `held` maps a holder to what it holds.
    """
    moments: dict[Moment, set[str]] = {}
    for states in held.values():
        for state in states:
            moments.setdefault(state.moment, set()).add(state.part)
    wanted = set(parts)
    return max((moment for moment, found in moments.items() if found >= wanted), default=None)


@dataclass(frozen=True)
class Transfer:
    """A part that one rank sends to another."""

    source: int
    to: int
    part: str
    size: int


def transfers(
    held: Mapping[int, Iterable[Held]], wanted: Mapping[int, tuple[int, str]], moment: Moment
) -> list[Transfer]:
    """Return who sends what, so that everyone has the state of `moment` that it wants.

    Args:
        held: by the rank that speaks for a node, what the node holds.
        wanted: by receiving rank, (the rank that speaks for its node, the part).
    """
    holders: dict[str, list[tuple[int, int]]] = {}
    for holder, states in sorted(held.items()):
        for state in states:
            if state.moment == moment:
                holders.setdefault(state.part, []).append((holder, state.size))
    found, turn = [], 0
    for rank, (node, part) in sorted(wanted.items()):
        if any(holder == node for holder, _ in holders[part]):
            continue
        source, size = holders[part][turn % len(holders[part])]
        turn += 1
        found.append(Transfer(source, rank, part, size))
    return found


def encode(held: Iterable[Held], made: Moment | None) -> bytes:
    """Return an inventory as bytes, for `decode`."""
    first = made or Moment((0, 0), 0)
    lines = [_HELD.pack(*first.order, first.step, 1 if made else 0, b"made")]
    lines += [_HELD.pack(*h.moment.order, h.moment.step, h.size, h.part.encode()) for h in held]
    return b"".join(lines)


def decode(content: bytes) -> tuple[list[Held], Moment | None]:
    """Return what `encode` was given. Raises ValueError for anything else."""
    held, made = [], None
    try:
        for generation, round_, step, size, name in _HELD.iter_unpack(content):
            part, moment = name.rstrip(b"\0").decode("ascii"), Moment((generation, round_), step)
            if part == "made":
                made = moment if size else None
            elif _SLOT.fullmatch(f"{part}.0"):
                held.append(Held(part, moment, size))
            else:
                raise ValueError(f"no part of a state: {part[:20]!r}")
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"no inventory of snapshots: {error}") from None
    return held, made
