"""Keeps the newest training states in a node's memory, where they outlive its workers.

Problem: a restart repeats all steps since the last checkpoint, and a checkpoint after each step is
too expensive. A copy into memory costs a hundredth as much, but the memory must outlive the
workers.

Rule: each pod has a small folder in memory (a tmpfs) with *slots*, files that each hold one state.
Each part of the state has two slots, which are written in turn. While one slot is overwritten, the
other one still holds a whole state. A slot's mark is cleared before its data is written, and set
afterwards, each time by a single aligned write. So if a worker is killed in between, the slot is
marked as incomplete. Another file holds the number of the last completed step, even if the state
after that step was not copied. This number shows how many steps a restart repeats.

A memory barrier is not needed, not even on ARM. A kill is a precise exception: all writes before it
in program order reach memory, and no later writes do. Other processes read only after the writer
has ended, or after a collective in which the writer took part. The launcher starts workers only
once all processes of earlier workers have ended, so no older incarnation is still writing.

The slot to overwrite is not always the one with the older state. If another node lacked its part of
the latest state, the job has restarted from an older state. The latest state is then abandoned, and
its slot is overwritten (`begin`).

Example: a part has slots at steps 40 and 50, but another node's part has only 40. So all ranks
continue from step 40. The next copy overwrites step 50, because step 40 is needed until a later
copy is complete.

States are ordered by incarnation (generation, round) first, and by step second. A node that was
partitioned can hold a state with a higher step, but from an older round. In the meantime, the job
has continued without that node from an earlier step. Only the job's history counts (`choose`).

With replicated state (DDP), a node has one part, `ALL`, written by its first rank. The copy on any
single node is enough to restore all nodes. With sharded state, each rank has its own part, and the
next node keeps a copy of this part. A state counts only if all of its parts are there and come from
a group of the same size. Why: docs/decisions/0023.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ALL = "all"
"""Name of the only part of a replicated state."""
HEADER_BYTES = 4096
ALIGNMENT = 64
"""Tensors in a slot begin at multiples of this number of bytes."""
MOST_INVENTORY_BYTES = 1 << 16
_MAGIC = b"ddpjob:1"
_HEAD = struct.Struct("=8sQQQQQ")
_MARK = 1
"""Index, in the header, of the 8-byte word that shows whether the slot holds a whole state."""
_WHOLE = 0x77686F6C65
_MADE = struct.Struct("=8sQQQ")
_MADE_MAGIC = int.from_bytes(_MAGIC, sys.byteorder)
_SHARED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0x8000 if sys.platform == "linux" else 0)
"""Flags for mapping a slot into memory. All pages of the slot are mapped at once, because a page
fault takes five times as long as copying into the page. Python 3.9 does not define MAP_POPULATE, so
its value on Linux is repeated here.
"""
_SLOT = re.compile(r"(all|[0-9]{1,6}of[0-9]{1,6})\.([01])")
_PART = re.compile(r"([0-9]+)of([0-9]+)")
_HELD = struct.Struct("<QQQQ16s")

Order = tuple[int, int]
"""(generation, round), which identifies an incarnation. Later incarnations compare as greater."""


@dataclass(frozen=True, order=True)
class Moment:
    """A point in the job's history: a step of an incarnation."""

    order: Order
    step: int
    """Number of steps completed since training began."""


@dataclass(frozen=True)
class Held:
    """One part of a complete state, held by a node."""

    part: str
    moment: Moment
    size: int
    """Number of bytes in the file after the header."""
    slot: int = 0


def part_of(rank: int, world: int) -> str:
    """Return the name of a rank's part of a sharded state."""
    return f"{rank}of{world}"


class NoRoom(Exception):
    """The volume cannot hold two states of a part. `needed` and `room` are in bytes."""

    def __init__(self, needed: int, room: int) -> None:
        super().__init__(f"two states need {needed} bytes, but only {room} bytes are free")
        self.needed, self.room = needed, room


class SnapshotStore:
    """The folder in memory where one node keeps its states.

    A folder that cannot be used counts as one without states and without room.

    Attributes:
        fault: why the folder cannot be used; empty if there is no fault or no folder.
    """

    def __init__(self, folder: Path | None) -> None:
        """Open `folder`. None means that this node has no such folder."""
        self.folder = folder or Path()
        self._open: dict[tuple[str, int], mmap.mmap] = {}
        self._made: memoryview | None = None
        self._noted: Order | None = None
        self.fault = ""
        try:
            self._made = None if folder is None else self._map_made()
        except OSError as error:
            self.fault = f"{folder}: {error.strerror}"

    def _map_made(self) -> memoryview:
        with (self.folder / "made").open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, _MADE.size)
            return memoryview(mmap.mmap(file.fileno(), _MADE.size)).cast("Q")

    def held(self) -> list[Held]:
        """Return the complete states in the folder, oldest first. Damaged files are skipped."""
        found = []
        for path, match in self._slots():
            part, slot = match[1], int(match[2])
            with contextlib.suppress(OSError), path.open("rb") as file:
                found.append(_complete(part, slot, file.read(_HEAD.size), os.fstat(file.fileno()).st_size))
        return sorted((held for held in found if held), key=lambda held: held.moment)

    def _held_of(self, part: str) -> list[Held]:
        """Return the complete states of a part, oldest first.

        If both slots are already mapped, their headers are read from memory instead of from the
        files.
        """
        slots = [self._open.get((part, slot)) for slot in (0, 1)]
        if None in slots:
            return [held for held in self.held() if held.part == part]
        found = [_complete(part, slot, it, len(it)) for slot, it in enumerate(slots) if it is not None]
        return sorted((held for held in found if held), key=lambda held: held.moment)

    def _slots(self) -> list[tuple[Path, re.Match[str]]]:
        if self._made is None:
            return []
        found = [(path, _SLOT.fullmatch(path.name)) for path in self.folder.iterdir()]
        return [(path, match) for path, match in found if match is not None]

    def begin(self, part: str, size: int, base: Moment | None = None) -> Writing:
        """Return memory for the next state of a part, in one of the part's two slots.

        `base` is the moment that training continued from. Pass None once a later state is complete
        on all nodes. The state from `base` is kept even if this node holds a newer one, because the
        job has abandoned the newer state.

        Raises NoRoom, without changing anything, if there is not enough room.
        """
        held = self._held_of(part)
        kept = [h for h in held if base is None or h.moment <= base] or held
        slot = 1 - kept[-1].slot if kept else 0
        memory = self._map(part, slot, size)
        _words(memory)[_MARK] = 0
        return Writing(memory, size, slot)

    def read(self, held: Held) -> memoryview:
        """Return a state's bytes, mapped from its file.

        The bytes change when the slot is overwritten.
        """
        memory = self._map(held.part, held.slot, held.size, existing=True)
        return memoryview(memory)[HEADER_BYTES : HEADER_BYTES + held.size]

    def drop(self, parts: Container[str]) -> None:
        """Delete all states of these parts, whether complete or not."""
        for path, match in self._slots():
            if match[1] in parts:
                self._open.pop((match[1], int(match[2])), None)
                path.unlink(missing_ok=True)

    def keep_only(self, parts: Container[str]) -> None:
        """Delete the states of all parts except `parts`."""
        self.drop({match[1] for _, match in self._slots() if match[1] not in parts})

    @property
    def made(self) -> Moment | None:
        """The last step that a worker on this node completed.

        None if no step was completed, or if the file is damaged.
        """
        try:
            magic, generation, round_, step = _MADE.unpack((self.folder / "made").read_bytes()[: _MADE.size])
        except (OSError, struct.error):
            return None
        return Moment((generation, round_), step) if magic == _MAGIC else None

    def note_made(self, moment: Moment) -> None:
        """Record that a worker on this node has completed a step.

        If the process is killed during this write, the file still holds the previous step. At the
        first step of a new incarnation, the file may hold no step instead.
        """
        if self._made is None:
            return
        if self._noted != moment.order:
            self._made[0] = 0
            self._made[1], self._made[2], self._made[3] = *moment.order, moment.step
            self._made[0] = _MADE_MAGIC
            self._noted = moment.order
        self._made[3] = moment.step

    def room(self, part: str) -> int:
        """Return how many bytes the two slots of a part can occupy together.

        The result includes the bytes that the slots already occupy. It is also limited by the free
        memory, because the volume's pages count towards the container's memory limit.
        """
        if self._made is None:
            return 0
        volume = os.statvfs(self.folder)
        own = 0
        for path in (self._path(part, 0), self._path(part, 1)):
            with contextlib.suppress(FileNotFoundError):
                own += path.stat().st_size
        return max(0, min(volume.f_bavail * volume.f_frsize, free_memory())) + own

    def _path(self, part: str, slot: int) -> Path:
        return self.folder / f"{part}.{slot}"

    def _map(self, part: str, slot: int, size: int, *, existing: bool = False) -> mmap.mmap:
        whole = HEADER_BYTES + size
        known = self._open.get((part, slot))
        if known is not None and len(known) >= whole:
            return known
        if not existing:
            self._reserve(part, whole)
        with self._path(part, slot).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, _SHARED)
        self._open[part, slot] = memory
        return memory

    def _reserve(self, part: str, whole: int) -> None:
        """Reserve the pages of both slots in advance.

        Without this, a worker would be killed by SIGBUS if it wrote to a page that could not be
        allocated. Raises NoRoom.
        """
        room = self.room(part)
        if 2 * whole > room:
            raise NoRoom(2 * whole, room)
        try:
            for slot in (0, 1):
                with self._path(part, slot).open("a+b") as file:
                    os.posix_fallocate(file.fileno(), 0, whole)
        except OSError as error:
            raise NoRoom(2 * whole, room) from error


class Writing:
    """A slot into which a state is being written."""

    def __init__(self, memory: mmap.mmap, size: int, slot: int) -> None:
        self._memory, self._size, self.slot = memory, size, slot
        self.data = memoryview(memory)[HEADER_BYTES : HEADER_BYTES + size]

    def complete(self, moment: Moment) -> None:
        """Mark the slot as complete. All data must already have been written."""
        _HEAD.pack_into(self._memory, 0, _MAGIC, 0, *moment.order, moment.step, self._size)
        _words(self._memory)[_MARK] = _WHOLE


def _complete(part: str, slot: int, memory: bytes | mmap.mmap, size: int) -> Held | None:
    """Return a description of the state in a slot; None if the state is damaged or incomplete.

    `memory` begins with the slot's header. `size` is the size of the slot's file in bytes.
    """
    if len(memory) < _HEAD.size:
        return None
    magic, whole, generation, round_, step, content = _HEAD.unpack_from(memory)
    if magic != _MAGIC or whole != _WHOLE or content > size - HEADER_BYTES:
        return None
    return Held(part, Moment((generation, round_), step), content, slot)


def _words(memory: mmap.mmap) -> memoryview:
    """Return the header of a slot as 8-byte words. Access to such a word is atomic, unlike access
    through `struct`.
    """
    return memoryview(memory)[:HEADER_BYTES].cast("Q")


_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""The names used by versions 2 and 1 of cgroups: the folder, the file with the limit, the file with
the usage, and the prefix of the keys in memory.stat.
"""
SPARED = 0.1
"""Share of the container's limit and of the machine's memory that states must leave free."""


def free_memory(root: Path = Path("/")) -> int:
    """Return how many bytes states can use without exhausting the container's or the machine's
    memory.

    A tenth of the container's limit and of the machine's memory stays free. The page cache of files
    on disk counts as free memory.
    """
    free = [sys.maxsize]
    for folder, limit_file, usage_file, prefix in _CGROUPS:
        place = root / folder[1:]
        # An error means that the limit is "max" (none), or that the machine uses the other version
        # of cgroups.
        with contextlib.suppress(OSError, ValueError):
            limit, usage = (int((place / name).read_text()) for name in (limit_file, usage_file))
            statistics = _numbers((place / "memory.stat").read_text())
            cache = sum(statistics.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            free.append(int(limit * (1 - SPARED)) - usage + cache)
    with contextlib.suppress(OSError, KeyError):
        machine = _numbers((root / "proc/meminfo").read_text())
        free.append(1024 * int(machine["MemAvailable:"] - SPARED * machine["MemTotal:"]))
    return max(0, min(free))


def _numbers(text: str) -> dict[str, int]:
    """Parse text in the format of memory.stat. Return the number on each line, keyed by the line's
    first word.
    """
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def parts_of(world: int) -> list[str]:
    """Return the names of all parts of a state, in rank order. `world` is the number of ranks that
    share the state, or 0 for a replicated state.
    """
    return [part_of(rank, world) for rank in range(world)] or [ALL]


def choose(held: Mapping[int, Iterable[Held]], world: int | None) -> tuple[Moment, int] | None:
    """Choose the latest moment for which the nodes together hold all parts.

    Return (moment, number of parts), where 0 stands for a replicated state. Return None if no state
    is complete.

    Args:
        held: the states that each node holds, keyed by the rank that speaks for the node.
        world: the required number of parts, 0 for a replicated state; None if any number will do.
    """
    found: dict[tuple[Moment, int], set[int]] = {}
    for states in held.values():
        for state in states:
            match = _PART.fullmatch(state.part)
            rank, of = (int(match[1]), int(match[2])) if match else (0, 0)
            if world in (None, of) and (rank < of or match is None):
                found.setdefault((state.moment, of), set()).add(rank)
    return max((key for key, ranks in found.items() if len(ranks) == max(1, key[1])), default=None)


@dataclass(frozen=True)
class Transfer:
    """One part that one rank sends to another rank."""

    source: int
    to: int
    part: str
    size: int


def transfers(
    held: Mapping[int, Iterable[Held]], wanted: Mapping[int, tuple[int, str]], moment: Moment
) -> list[Transfer]:
    """Return the transfers that give each rank the part that it wants of the state from `moment`.

    Args:
        held: the states that each node holds, keyed by the rank that speaks for the node.
        wanted: {rank that wants a part: (rank that speaks for its node, the part's name)}. If the
            rank's node already holds the part, no transfer is needed.
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
    """Encode a node's states and its last completed step as bytes, for `decode`."""
    first = made or Moment((0, 0), 0)
    lines = [_HELD.pack(*first.order, first.step, 1 if made else 0, b"made")]
    lines += [_HELD.pack(*h.moment.order, h.moment.step, h.size, h.part.encode()) for h in held]
    return b"".join(lines)


def decode(content: bytes) -> tuple[list[Held], Moment | None]:
    """Decode the states and the last completed step from bytes that `encode` returned.

    Raises ValueError if the content is malformed.
    """
    held, made = [], None
    if len(content) > MOST_INVENTORY_BYTES:
        raise ValueError(f"not an inventory of snapshots: {len(content)} bytes")
    try:
        for generation, round_, step, size, name in _HELD.iter_unpack(content):
            part, moment = name.rstrip(b"\0").decode("ascii"), Moment((generation, round_), step)
            if part == "made":
                made = moment if size else None
            elif _SLOT.fullmatch(f"{part}.0"):
                held.append(Held(part, moment, size))
            else:
                raise ValueError(f"not a part of a state: {part[:20]!r}")
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not an inventory of snapshots: {error}") from None
    return held, made
