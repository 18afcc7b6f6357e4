"""Snapshots of the newest state in the nodes' memory, with threads as ranks: agreement, restore,
and kills at any point.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_pod import rank_snapshots, snapshot_store
from ddpjob_pod.rank_snapshots import AUTO, NONE, SHARE, Cadence, Cost, RankSnapshots, Restored
from ddpjob_pod.snapshot_store import HEADER_BYTES, Moment, SnapshotStore, part_of
from ddpjob_runtime import protocol
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.torture.defective import DEFECTS, OF_SNAPSHOTS

DEADLOCK_SECONDS = 60


class Died(Exception):
    """Raised when the rank is killed."""


class Group:
    """The messages that the ranks of one incarnation have sent each other."""

    def __init__(self, world: int, per_node: int = 1) -> None:
        self.world, self.per_node = world, per_node
        self._changed, self._is_broken = threading.Condition(), False
        self._gathered: dict[int, dict[int, bytes]] = {}
        self._sent: dict[tuple[int, int], list[bytes]] = {}

    def break_up(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def start_gathering(self, number: int, rank: int, content: bytes) -> Callable[[], list[bytes]]:
        said = self._gathered.setdefault(number, {})
        with self._changed:
            said[rank] = content
            self._changed.notify_all()

        def wait() -> list[bytes]:
            with self._changed:
                self._wait(lambda: len(said) == self.world)
                return [said[each] for each in range(self.world)]

        return wait

    def send(self, rank: int, to: int, content: bytes) -> None:
        with self._changed:
            self._sent.setdefault((rank, to), []).append(content)
            self._changed.notify_all()

    def receive(self, source: int, rank: int) -> bytes:
        with self._changed:
            waiting = self._sent.setdefault((source, rank), [])
            self._wait(lambda: bool(waiting))
            return waiting.pop(0)

    def _wait(self, ready: Callable[[], bool]) -> None:
        assert self._changed.wait_for(lambda: ready() or self._is_broken, DEADLOCK_SECONDS), "a rank waits forever"
        if not ready():
            raise RuntimeError("a rank is gone")

    def run(self, program: Callable[[Rank], Any], budgets: dict[int, int] | None = None) -> list[Any]:
        """Run a program on all ranks, and return their results. A killed rank has Died, and a
        failed one a RuntimeError.
        """
        results: list[Any] = [None] * self.world

        def run(number: int) -> None:
            here.left = (budgets or {}).get(number, sys.maxsize)
            try:
                results[number] = program(Rank(self, number))
            except BaseException as error:
                results[number] = error
                self.break_up()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (Died, RuntimeError)):
                raise result
        return results


class Rank:
    """A rank that exchanges data with other threads."""

    def __init__(self, group: Group, number: int) -> None:
        self._group, self._calls = group, 0
        self.rank, self.world = number, group.world
        self.local_rank, self.local_world = number % group.per_node, group.per_node

    @property
    def node(self) -> int:
        return self.rank // self.local_world

    def gather_bytes(self, content: bytes) -> list[bytes]:
        return self.start_gathering(content)()

    def start_gathering(self, content: bytes) -> Callable[[], list[bytes]]:
        act()
        self._calls += 1
        return self._group.start_gathering(self._calls, self.rank, content)

    def send(self, content: memoryview, to: int) -> None:
        act()
        self._group.send(self.rank, to, bytes(content))

    def receive(self, content: memoryview, source: int) -> None:
        whole = self._group.receive(source, self.rank)
        half = len(whole) // 2
        content[:half] = whole[:half]
        act()
        content[half:] = whole[half:]

    def swap(self, content: memoryview, to: int, received: memoryview, source: int) -> None:
        if content:
            self.send(content, to)
        if received:
            self.receive(received, source)


here = threading.local()


def act() -> None:
    """Count an action of the thread's rank, and kill the rank when its number of actions is used
    up.
    """
    here.left = getattr(here, "left", sys.maxsize) - 1
    if here.left < 0:
        raise Died


@pytest.fixture
def killable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it possible to kill a rank before or after each write to its node's memory."""

    def may_die(place: Any, name: str) -> None:
        original = getattr(place, name)

        def acting(*args: Any) -> Any:
            act()
            result = original(*args)
            act()
            return result

        monkeypatch.setattr(place, name, acting)

    may_die(rank_snapshots, "_copy_to")
    may_die(SnapshotStore, "begin")
    may_die(snapshot_store.Writing, "complete")
    may_die(SnapshotStore, "note_made")


@pytest.fixture
def nodes() -> Iterator[Callable[[int], Path]]:
    """Yield a function that returns the folder in memory of a node."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:

        def folder(node: int) -> Path:
            made = Path(place, str(node))
            made.mkdir(exist_ok=True)
            return made

        yield folder


def state(step: int, order: tuple[int, int], rank: int = 0, size: int = 3) -> dict[str, Any]:
    """Return a state that contains its step, incarnation and part."""
    values = [float(step), float(order[1]), float(rank)]
    return {"step": step, "weights": torch.tensor(values[:size]), "optimizer": [torch.tensor(values) * 2]}


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [(one["weights"], other["weights"]), (one["optimizer"][0], other["optimizer"][0])]
    return bool(one["step"] == other["step"]) and all(torch.equal(left, right) for left, right in tensors)


def opened(
    rank: Rank, folder: Path | None, order: tuple[int, int] = (0, 0), every: int | str = 1, *, sharded: bool = False
) -> RankSnapshots:
    return RankSnapshots(SnapshotStore(folder), rank, order, every, sharded=sharded)


# ---------------------------------------------------------------- histories


@dataclass
class Job:
    """A training run whose incarnations are killed at random points. It checks the conditions that
    must hold after each restart.
    """

    folder: Callable[[int], Path]
    chance: random.Random
    nodes: int
    sharded: bool
    later: bool = False
    """Whether copies are completed later than `take`, but before the next optimizer step."""
    truth: dict[tuple[Moment, int], dict[str, Any]] = field(default_factory=dict)
    continued: Moment | None = None
    made: int = 0
    """The last step that any rank of the previous incarnation completed."""
    lost: set[int] = field(default_factory=set)
    """Nodes that have lost their memory, or were absent, since all nodes had a state."""

    def incarnation(self, number: int, steps: int = 3) -> None:
        present = list(range(self.nodes))
        if self.chance.random() < 0.5:
            node = self.chance.choice(present)
            self.lost.add(node)
            if self.sharded or self.chance.random() < 0.5:
                shutil.rmtree(self.folder(node))
            else:
                present.remove(node)  # it is partitioned, and returns with its old state
        world, order = len(present), (0, number)
        budgets = {rank: self.chance.randrange(60) for rank in range(world) if self.chance.random() < 0.6}
        reached: dict[int, int] = {}
        starts: dict[int, Restored | None] = {}

        def train(rank: Rank) -> None:
            every = AUTO if self.later else 1
            kept = opened(rank, self.folder(present[rank.rank]), order, every, sharded=self.sharded)
            kept.settles_early = self.later
            found = starts[rank.rank] = kept.restore()
            first = found.moment.step if found else 0
            kept.begin(first, protocol.MEMORY)
            for step in range(first + 1, first + 1 + steps):
                rank.gather_bytes(b"gradients")
                if self.later:
                    kept.settle()
                reached[rank.rank] = step
                part = rank.rank if self.sharded else 0
                self.truth[Moment(order, step), part] = state(step, order, part)
                own = f"{number}:{step}:{rank.rank}".encode()
                kept.take(
                    step,
                    lambda step=step, part=part: state(step, order, part),
                    None if self.sharded else lambda own=own: own,
                )

        newest = self._newest(present)
        Group(world).run(train, budgets)
        assert all((found and found.moment) == newest for found in starts.values()), "the newest complete state counts"
        self._check(starts)
        if all(rank in starts for rank in range(world)):
            self.lost = set(range(self.nodes)) - set(present)
            found = starts[0]
            self.continued, self.made = found and found.moment, max(reached.values(), default=0)
        if not self.sharded and len(present) < self.nodes:
            self.lost = set(range(self.nodes)) - set(present)

    def _newest(self, present: list[int]) -> Moment | None:
        """Return the highest step of the newest incarnation that has a complete state on these
        nodes.
        """
        parts: dict[tuple[int, int], set[str]] = {}
        for held in (held for node in present for held in SnapshotStore(self.folder(node)).held()):
            parts.setdefault((held.moment.order[1], held.moment.step), set()).add(held.part)
        whole = [moment for moment, found in parts.items() if len(found) == (self.nodes if self.sharded else 1)]
        round_ = max((moment[0] for moment in whole), default=0)
        steps = [step for each, step in whole if each == round_]
        return Moment((0, round_), max(steps)) if steps else None

    def _check(self, starts: dict[int, Restored | None]) -> None:
        moments = {found and found.moment for found in starts.values()}
        assert len(moments) <= 1, "all ranks continue from the same moment"
        if not moments:
            return
        moment = moments.pop()
        if len(self.lost) <= 1 and self.continued is not None:
            assert moment is not None, "only one node is lost, so the others have the state"
        if len(self.lost) <= 1 and self.made:
            step = 0 if moment is None else moment.step
            assert step >= self.made - 1, "at most one complete step is repeated"
        if moment is None:
            return
        if self.continued is not None and len(self.lost) <= 1:
            assert moment >= self.continued, "the newest incarnation counts"
        for rank, found in starts.items():
            assert found is not None
            wanted = self.truth[moment, rank if self.sharded else 0]
            assert is_same(found.tree, wanted), "the restored state is the one of that step"
            for each, own in found.owns.items():
                assert own == f"{moment.order[1]}:{moment.step}:{each}".encode(), (
                    "this also holds for the state of each rank"
                )
            assert self.sharded or len(found.owns) >= self.nodes - 1


def torment(folder: Callable[[int], Path], seed: int) -> None:
    """Kill the incarnations of one training run at random points. Raises AssertionError."""
    chance = random.Random(seed)
    job = Job(folder, chance, chance.choice((2, 3)), bool(seed % 2), later=seed % 4 == 2)
    for node in range(job.nodes):
        shutil.rmtree(folder(node))
    for number in range(1, 9):
        job.incarnation(number)


class Lazy:
    """A finisher that completes no copies, so that `settle` has to complete them."""

    def finish(self, copy: Any) -> None:
        """Do nothing."""


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete all copies after the first one as late as possible. Each step is copied."""
    monkeypatch.setattr(rank_snapshots, "_Finisher", Lazy)
    monkeypatch.setattr(rank_snapshots, "_FIRST_COPIES", 1)
    monkeypatch.setattr(rank_snapshots, "SHARE", 1e9)
    cheap = [(1e-9, 0.0, 1.0)] * 15
    monkeypatch.setattr(rank_snapshots, "Cadence", lambda every: Cadence(every, recent=cheap))


@pytest.mark.usefixtures("killable", "lazy")
def test_after_a_kill_at_any_point_at_most_one_step_is_repeated(nodes: Callable[[int], Path]) -> None:
    for seed in range(16):
        torment(nodes, seed)


@pytest.mark.usefixtures("lazy")
@pytest.mark.parametrize(("settles", "newest"), [(True, 4), (False, 3)])
def test_completing_the_copy_before_each_optimizer_step_avoids_a_repeated_step(
    settles: bool, newest: int, nodes: Callable[[int], Path]
) -> None:
    def train(rank: Rank) -> None:
        kept = opened(rank, nodes(rank.node), every=AUTO)
        kept.settles_early = True
        kept.restore()
        kept.begin(0, protocol.SCRATCH)
        for step in range(1, 5):
            kept.take(step, lambda step=step: state(step, (0, 0)), lambda: b"own")
        if settles:
            kept.settle()  # all ranks die after the optimizer's fifth step

    Group(2).run(train)
    assert [SnapshotStore(nodes(node)).held()[-1].moment.step for node in (0, 1)] == [newest] * 2


def test_a_later_copy_does_not_wait_for_the_other_ranks(
    nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_snapshots, "SHARE", 1e9)
    cheap = [(1e-9, 0.0, 1.0)] * 15
    monkeypatch.setattr(rank_snapshots, "Cadence", lambda every: Cadence(every, recent=cheap))
    returned = threading.Event()

    def train(rank: Rank) -> int:
        kept = opened(rank, nodes(rank.node), every=AUTO)
        kept.settles_early = True
        kept.restore()
        kept.begin(0, protocol.SCRATCH)
        for step in range(1, 6):
            if rank.rank == 1 and step == 5:
                assert returned.wait(DEADLOCK_SECONDS)
            kept.take(step, lambda step=step: state(step, (0, 0)), lambda: b"own")
        returned.set()
        kept.settle()
        return kept._store.held()[-1].moment.step

    assert Group(2).run(train) == [5, 5]


@pytest.mark.usefixtures("killable", "lazy")
@pytest.mark.parametrize("defect", OF_SNAPSHOTS)
def test_a_deliberate_defect_in_snapshots_is_found(
    defect: str, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in (
        (rank_snapshots, "choose"), (RankSnapshots, "take"), (RankSnapshots, "_copy"), (RankSnapshots, "_writing"),
        (RankSnapshots, "_copy_to_neighbour"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, getattr(place, name))
    DEFECTS[defect]()
    sharded = {"prefer-older": [0], "send-older": [1]}.get(defect, [0, 1])
    with pytest.raises(AssertionError):
        for seed in range(200):
            if seed % 2 in sharded:
                torment(nodes, seed)


# ---------------------------------------------------------------- single rules


def trained(folder: Path | None, rank: Rank, steps: list[int], round_: int = 0, **options: Any) -> RankSnapshots:
    """Take steps on one rank, and return its states."""
    kept = opened(rank, folder, (0, round_), **options)
    kept.restore()
    kept.begin(steps[0] - 1, protocol.SCRATCH)
    for step in steps:
        kept.take(step, lambda step=step: state(step, (0, round_), rank.rank))
    return kept


def test_survivors_that_are_one_step_apart_keep_the_state_that_both_have(nodes: Callable[[int], Path]) -> None:
    """Node 1 died before its copy of step 8, and the next incarnation dies during its own copy of
    step 8.
    """

    def first(rank: Rank) -> None:
        trained(nodes(rank.node), rank, [6, 7], sharded=True)
        if rank.node == 0:
            writing = SnapshotStore(nodes(0)).begin(part_of(0, 2), 5)
            writing.complete(Moment((0, 0), 8))

    Group(2).run(first)
    assert [held.moment.step for held in SnapshotStore(nodes(0)).held() if held.part == "0of2"] == [7, 8]

    def second(rank: Rank) -> int:
        kept = opened(rank, nodes(rank.node), (0, 1), sharded=True)
        found = kept.restore()
        assert found is not None
        kept.begin(found.moment.step, protocol.MEMORY)
        kept._writing(kept._part, 200)  # the copy of step 8 is started but never completed
        return found.moment.step

    assert Group(2).run(second) == [7, 7]
    shutil.rmtree(nodes(1))
    assert Group(2).run(second) == [7, 7], "the other node still has the state that both had"


def test_a_replaced_node_also_gets_its_neighbours_part_of_the_state(nodes: Callable[[int], Path]) -> None:
    Group(3).run(lambda rank: trained(nodes(rank.node), rank, [1, 2], sharded=True))
    for lost in (0, 2, 1):  # nothing is copied between the losses
        shutil.rmtree(nodes(lost))
        found = Group(3).run(lambda rank: opened(rank, nodes(rank.node), (0, 1), sharded=True).restore())
        assert [each.moment.step for each in found] == [2, 2, 2]
        assert all(is_same(each.tree, state(2, (0, 0), rank)) for rank, each in enumerate(found))


def test_parts_of_different_sizes_reach_the_neighbour(
    nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with many chunks has a neighbour with one, and vice versa."""
    monkeypatch.setattr(rank_snapshots, "_CHUNK_BYTES", 1 << 10)

    def train(rank: Rank) -> Any:
        kept = opened(rank, nodes(rank.node), sharded=True)
        kept.restore()
        kept.begin(0, protocol.SCRATCH)
        kept.take(1, lambda: {"weights": torch.full((10 + 5_000 * (rank.rank == 1),), float(rank.rank))})
        return kept._exchange.gather_bytes(b"")

    Group(3).run(train)
    for rank in range(3):
        parts = {held.part: held.size for held in SnapshotStore(nodes(rank)).held()}
        assert parts.keys() == {part_of(rank, 3), part_of((rank - 1) % 3, 3)}
    shutil.rmtree(nodes(1))
    found = Group(3).run(lambda rank: opened(rank, nodes(rank.node), (0, 1), sharded=True).restore())
    assert [each.tree["weights"].tolist() for each in found] == [[0.0] * 10, [1.0] * 5_010, [2.0] * 10]


def test_a_rank_without_data_neither_sends_nor_awaits_chunks() -> None:
    """A rank without a part does not take part in its neighbours' exchange of chunks."""
    done: list[str] = []

    class Distributed:
        def get_rank(self, group: Any) -> int:
            return 0

        get_world_size = get_rank

        def isend(self, content: torch.Tensor, to: int, group: Any) -> Any:
            done.append(f"sends {len(content)} bytes to {to}")
            return self

        def recv(self, content: torch.Tensor, source: int, group: Any) -> None:
            done.append(f"receives {len(content)} bytes from {source}")

        def wait(self) -> None:
            pass

    exchange = rank_snapshots.TorchExchange(0, 1, Distributed())
    for mine, theirs in ((b"", b""), (b"ab", b""), (b"", b"abc")):
        exchange.swap(memoryview(bytearray(mine)), 1, memoryview(bytearray(theirs)), 2)
    assert done == ["sends 2 bytes to 1", "receives 3 bytes from 2"]


def test_parts_with_outdated_rank_numbers_are_dropped_after_a_complete_state(nodes: Callable[[int], Path]) -> None:
    Group(3).run(lambda rank: trained(nodes(rank.node), rank, [1, 2], sharded=True))
    places = [1, 2, 0]  # the node of each rank after a restart

    def again(rank: Rank) -> None:
        node = nodes(places[rank.rank])
        kept = opened(rank, node, (0, 1), sharded=True)
        found = kept.restore()
        assert found is not None and is_same(found.tree, state(2, (0, 0), rank.rank))
        kept.begin(2, protocol.MEMORY)
        for step in (3, 4):
            kept.take(step, lambda step=step: state(step, (0, 1), rank.rank))
        assert {h.part for h in kept._store.held()} == {part_of(rank.rank, 3), part_of((rank.rank - 1) % 3, 3)}

    assert Group(3).run(again) == [None] * 3


class Shard(torch.Tensor):
    """A whole tensor that is sharded by rows, like a DTensor of FSDP."""

    rows = range(0)

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def to_local(self) -> torch.Tensor:
        return self.full_tensor()[self.rows.start : self.rows.stop].clone()

    def detach(self) -> Shard:
        return self


def rows_of(rank: int, world: int, count: int) -> range:
    """Return a rank's rows of a tensor, as FSDP divides it."""
    size = -(-count // world)
    return range(min(count, rank * size), min(count, (rank + 1) * size))


ROWS = {"weights": 7, "bias": 2, "moments": 5}
"""The number of rows of each sharded tensor. Some ranks have no rows of some of them."""


def whole_state(step: int, rank: int, world: int) -> dict[str, Any]:
    """Return a state with the rank's shards of ROWS, or with whole tensors if there is one rank."""

    def shard(name: str) -> torch.Tensor:
        whole = torch.arange(3.0 * ROWS[name]).reshape(-1, 3) + 100 * step
        if world == 1:
            return whole
        part = whole.as_subclass(Shard)
        part.rows = rows_of(rank, world, ROWS[name])
        return part

    model = {"weights": shard("weights"), "bias": shard("bias"), "mean": torch.full((4,), float(step))}
    return {"step": step, "model": model, "optimizer": [shard("moments"), torch.tensor(float(step))]}


def regrouped(rank: Rank, folder: Path, round_: int) -> RankSnapshots:
    """Restore a state of any group size, check this rank's part of it, and return the snapshots."""
    kept = opened(rank, folder, (0, round_), sharded=rank.world > 1)

    def rows(path: tuple[Any, ...], whole: tuple[int, ...]) -> range | None:
        is_sharded = len(whole) == 2 and rank.world > 1
        return rows_of(rank.rank, rank.world, whole[0]) if is_sharded else None

    found = kept.restore(lambda path, shard, whole: (shard, whole), rows)
    assert found is not None
    step = found.tree["step"]
    wanted = whole_state(step, rank.rank, rank.world)
    places = [("model", "weights"), ("model", "bias"), ("optimizer", 0)]
    for group, name in places:
        want, has = wanted[group][name], found.tree[group][name]
        if rank.world > 1:
            assert torch.equal(has[0], want.to_local()) and has[1] == tuple(want.shape)
        else:
            assert torch.equal(has, want)
    assert torch.equal(found.tree["model"]["mean"], wanted["model"]["mean"])
    assert torch.equal(found.tree["optimizer"][1], wanted["optimizer"][1])
    kept.begin(step, protocol.MEMORY)
    return kept


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_sharded_state_is_restored_by_a_group_of_any_size(per_node: int, nodes: Callable[[int], Path]) -> None:
    def start(rank: Rank) -> None:
        kept = opened(rank, nodes(rank.node), sharded=True)
        assert kept.restore() is None
        kept.begin(0, protocol.SCRATCH)
        kept.take(1, lambda: whole_state(1, rank.rank, rank.world))

    def again(rank: Rank, round_: int, copies: int) -> int:
        kept = regrouped(rank, nodes(rank.node), round_)
        first = kept.start["step"]
        for step in range(first + 1, first + 1 + copies):
            kept.take(step, lambda step=step: whole_state(step, rank.rank, rank.world))
        return first

    assert Group(4 * per_node, per_node).run(start) == [None] * 4 * per_node
    newest = 1
    # (number of nodes, the node that is then lost, copies); without copies, the same state is regrouped twice
    for round_, (count, lost, copies) in enumerate(
        [
            (4, 3, 1),
            (3, 2, 1),
            (2, None, 1),
            (4, None, 0),
            (3, None, 2),
            (2, 1, 2),
            (1, None, 2),
            (3, 0, 1),
            (4, None, 0),
        ],
        1,
    ):
        group = Group(count * per_node, per_node)
        found = group.run(lambda rank, round_=round_, copies=copies: again(rank, round_, copies))
        assert found == [newest] * count * per_node, f"round {round_}"
        newest += copies
        if lost is not None:
            shutil.rmtree(nodes(lost))


def test_without_rows_a_sharded_state_of_another_group_size_is_not_restored(nodes: Callable[[int], Path]) -> None:
    Group(3).run(lambda rank: trained(nodes(rank.node), rank, [1, 2], sharded=True))
    found = Group(2).run(lambda rank: opened(rank, nodes(rank.node), (0, 1), sharded=True).restore())
    assert found == [None, None]
    Group(2).run(lambda rank: trained(nodes(rank.node), rank, [1, 2], 1, sharded=True))
    assert {held.part for held in SnapshotStore(nodes(0)).held()} == {"0of2", "1of2"}, "and the state is removed"


@pytest.mark.parametrize(("shards", "rows"), [((0, 2, 2), 5), ((0, 1, 0), 9)])
def test_missing_or_repeated_rows_of_a_regrouped_state_are_an_error(
    shards: tuple[int, ...], rows: int, nodes: Callable[[int], Path]
) -> None:
    def start(rank: Rank) -> None:
        kept = opened(rank, nodes(rank.node), sharded=True)
        kept.restore()
        kept.begin(0, protocol.SCRATCH)
        kept.take(1, lambda: whole_state(1, shards[rank.rank], rank.world))

    Group(3).run(start)
    found = Group(2).run(lambda rank: regrouped(rank, nodes(rank.node), 1))
    assert [str(error) for error in found] == [f"the state in memory has {rows} of 7 rows at ('model', 'weights')"] * 2


def test_names_of_parts_that_no_rank_writes_do_not_count(nodes: Callable[[int], Path]) -> None:
    moment = Moment((0, 0), 1)
    odd = [snapshot_store.Held(part, moment, 10) for part in ("0of0", "5of2", "1of2", "0of999999")]
    assert snapshot_store.choose({0: odd}, None) is None
    assert snapshot_store.choose({0: [*odd, snapshot_store.Held("0of2", moment, 10)]}, None) == (moment, 2)


@pytest.mark.parametrize(("first", "other"), [(AUTO, 3), (3, AUTO), (NONE, 1), (1, NONE), (AUTO, NONE)])
def test_ranks_whose_specs_differ_follow_rank_0(
    first: int | str, other: int | str, nodes: Callable[[int], Path]
) -> None:
    def train(rank: Rank) -> tuple[int | str, bool]:
        every = (first, other)[rank.rank]
        kept = opened(rank, nodes(rank.node) if every != NONE else None, (rank.rank, 4), every)
        kept.restore()
        agreed = kept.cadence.every
        kept.begin(0, protocol.SCRATCH)
        for step in range(1, 7):
            kept.take(step, lambda step=step: state(step, (0, 0)))
        return agreed, kept._order == (1, 4)

    assert Group(2).run(train) == [(first, True)] * 2, "the incarnation is the highest of all ranks"


def test_a_node_without_room_still_receives_the_state_and_reports_the_needed_size(
    nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(2, 2).run(lambda rank: trained(nodes(rank.node), rank, [1, 2]))
    room = SnapshotStore.room
    monkeypatch.setattr(SnapshotStore, "room", lambda self, part: 0 if self.folder == nodes(1) else room(self, part))

    def train(rank: Rank) -> tuple[Any, Any]:
        kept = opened(rank, nodes(rank.node), (0, 1))
        found = kept.restore()
        assert found is not None and is_same(found.tree, state(2, (0, 0), 0))
        kept.begin(2, protocol.MEMORY)
        for step in (3, 4):
            kept.take(step, lambda step=step: state(step, (0, 1), 0))
        kept.settle()
        figures = kept.news()
        return figures[protocol.SNAPSHOT_BYTES] > 2 * HEADER_BYTES, figures.get(protocol.AT_RISK)

    assert Group(4, 2).run(train) == [(True, None)] * 4
    assert [len(SnapshotStore(nodes(node)).held()) for node in (0, 1)] == [2, 0]


def test_a_sharded_state_is_not_kept_if_there_is_no_room_for_a_neighbours_part(
    nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SnapshotStore.room
    monkeypatch.setattr(
        SnapshotStore, "room", lambda self, part: 0 if self.folder == nodes(1) and part == "0of2" else room(self, part)
    )

    def train(rank: Rank) -> tuple[bool, bool, int]:
        kept = trained(nodes(rank.node), rank, [1, 2, 3], sharded=True)
        return kept.is_off, kept.needed > 0, len(kept._store.held())

    assert Group(2).run(train) == [(True, True, 0)] * 2


@pytest.mark.parametrize("fault", ["missing", "a file", "none"])
def test_training_continues_without_a_usable_memory_volume(
    fault: str, nodes: Callable[[int], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = {"missing": nodes(0) / "missing", "a file": nodes(0) / "file", "none": None}[fault]
    (nodes(0) / "file").write_text("")

    def train(rank: Rank) -> tuple[bool, int]:
        kept = trained(folder if rank.node == 0 else nodes(1), rank, [1, 2, 3])
        return kept.needed > 0, len(kept._store.held())

    assert Group(2).run(train) == [(True, 0), (True, 2)]
    assert ("this pod does not keep training states in memory" in capfd.readouterr().err) == (fault != "none")


class Scaled(torch.Tensor):
    """A tensor without memory of its own, as in torchao's optimizers."""

    value: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, value: torch.Tensor, scale: float) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)
        made.value, made.scale = value, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["value"], self.scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return Scaled(arguments[0].value, arguments[0].scale)

    def tolist(self) -> list[float]:
        return [self.scale * value for value in self.value.tolist()]


COMPLEX = torch.tensor([[1 + 2j, 3 - 4j, 5j]])


@pytest.mark.parametrize(
    "tensor",
    {
        "conjugated": COMPLEX.conj(),
        "conjugated and transposed": COMPLEX.mH,
        "negated": COMPLEX.conj().imag.t(),
        "without memory": torch.empty(3, device="meta"),
        "computed when it is used": Scaled(torch.arange(3.0), 0.5),
    }.values(),
)
def test_tensors_whose_memory_is_not_their_value_are_restored(tensor: Any) -> None:
    layout = rank_snapshots._StateLayout({"tensor": tensor}, 0, [])
    data = memoryview(bytearray(layout.size))
    layout.write_head(data)
    for each, place in zip(layout.tensors, layout.places.each, strict=True):
        rank_snapshots._copy_to(data[layout.base :], each, place)
    found = rank_snapshots._read(data, None, views=False)[0]["tensor"]
    assert found.shape == tensor.shape and found.is_meta == tensor.is_meta
    assert found.is_meta or found.tolist() == tensor.tolist()


def test_a_malformed_inventory_counts_as_an_empty_one_on_all_ranks(
    nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(2).run(lambda rank: trained(nodes(rank.node), rank, [1, 2]))
    monkeypatch.setattr(rank_snapshots, "encode", lambda held, made: b"x" * 99)
    assert Group(2).run(lambda rank: opened(rank, nodes(rank.node)).restore()) == [None, None]


@pytest.mark.parametrize("claimed", [2**40, 2**63, 2**64 - 1])
def test_no_memory_is_allocated_for_a_size_that_a_peer_merely_claims(claimed: int) -> None:
    before = Path("/proc/self/statm").read_text().split()[1]
    try:
        assert len(rank_snapshots._reserve(claimed)) == claimed
    except RuntimeError as error:
        assert "cannot be received" in str(error)
    assert int(Path("/proc/self/statm").read_text().split()[1]) - int(before) < 1000


# ---------------------------------------------------------------- cadence

LONGER = st.floats(-1, 2) | st.just(math.nan)
COSTS = st.builds(Cost, st.floats(0, 2), st.floats(0, 0.1), st.floats(0.001, 10), st.just(1.0), st.just(0.0), LONGER)


@given(st.lists(st.lists(COSTS, min_size=2, max_size=2), max_size=9), st.sampled_from([AUTO, 1, 7]))
def test_all_ranks_take_snapshots_after_the_same_steps(rounds: list[list[Cost]], every: int | str) -> None:
    one, other = Cadence(every), Cadence(every)
    for step in range(1, 20):
        assert one.is_due(step) == other.is_due(step)
        if one.is_due(step) and rounds:
            costs = rounds.pop()
            assert one.copied(step, costs) == other.copied(step, costs)


@given(st.floats(1e-4, 5), st.floats(0, 0.01), st.floats(0.01, 5), st.floats(-1, 5) | st.just(math.nan))
def test_copies_take_at_most_one_percent_of_the_time(copy: float, exchange: float, pace: float, longer: float) -> None:
    cadence, unknown = Cadence(AUTO), Cost(keeps=1.0)
    assert cadence.copied(1, [unknown]) == 1, "only from the second copy on is the cost known"
    before, cost = 1, Cost(copy, exchange, pace, 1.0, 0.0, longer)
    for _ in range(15):
        interval = cadence.copied(cadence.due, [cost])
        assert interval <= 4 * before
        before = interval
    cost_of_copy = exchange + max(copy, copy if math.isnan(longer) else longer)
    assert cost_of_copy <= SHARE * interval * pace * (1 + 1e-9)
    least = 2 if math.isnan(longer) else 1
    assert interval == least or (interval - 1) * SHARE * pace <= cost_of_copy * (1 + 1e-9), (
        "and copies are not rarer than necessary"
    )


def test_a_single_slow_copy_does_not_make_copies_rarer() -> None:
    cadence, usual = Cadence(AUTO), Cost(0.0004, 0.0001, 0.1, 1.0, 0.0, 0.0)
    slow = usual._replace(copy=0.05, longer=3.0)
    intervals = [cadence.copied(step, [slow if step == 5 else usual]) for step in range(1, 20)]
    assert intervals == [2, 2] + [1] * 17
    assert [cadence.copied(step, [usual._replace(copy=0.05)]) for step in range(20, 30)][-1] == 51, (
        "a lasting change makes copies rarer"
    )


class Clock:
    """The clock of a rank whose copying thread works for 0.4 ms per copy. Its steps take 50 ms, and
    longer after a copy.
    """

    def __init__(self, kept: RankSnapshots, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept, self.now, self.worked, self.step = kept, 100.0, 0.0, 0
        self.spent = 0.0
        """Seconds by which copies have lengthened steps."""
        self.intervals: list[int] = []
        monkeypatch.setattr(rank_snapshots.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(rank_snapshots.time, "thread_time", lambda: self.worked)
        kept.begin(0, protocol.SCRATCH)

    def make(self) -> Any:
        self.worked += 0.0004
        return state(1, (0, 0))

    def run(self, steps: int, longer: float, more: Callable[[int], float]) -> None:
        """Take steps, where step n takes `more(n)` additional seconds."""
        copied = True
        for _ in range(steps):
            self.step += 1
            self.now += 0.05 + more(self.step) + (longer if copied else 0.0)
            self.spent += longer if copied else 0.0
            copied = self.kept.cadence.is_due(self.step)
            self.kept.take(self.step, self.make)
            self.intervals.append(self.kept.interval)


@pytest.mark.parametrize(("longer", "interval"), [(0.0, 1), (0.0024, 5), (0.02, 40)])
def test_the_cost_of_a_copy_is_the_time_by_which_it_lengthens_a_step(
    longer: float, interval: int, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(rank: Rank) -> int:
        clock = Clock(opened(rank, nodes(0), (0, 0), AUTO), monkeypatch)
        clock.run(1500, longer, lambda step: 0.0)
        return clock.kept.interval

    assert Group(1).run(train) == [interval]


@pytest.mark.parametrize("jitter", [0.0025, 0.005])
def test_jitter_of_steps_does_not_hide_the_cost_of_copies(
    jitter: float, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: once the interval was 1, no step without a copy was left to compare with."""

    def train(rank: Rank) -> float:
        clock, chance = Clock(opened(rank, nodes(0), (0, 0), AUTO), monkeypatch), random.Random(1)
        clock.run(6000, 0.0025, lambda step: chance.uniform(-2 * jitter, 2 * jitter))
        return clock.spent / clock.now

    (share,) = Group(1).run(train)
    assert 0.005 < share < 0.02


@pytest.mark.parametrize("slow", [3, 4, 5, 6, 7])
def test_a_slow_step_at_the_beginning_does_not_stop_copies(
    slow: int, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(rank: Rank) -> int:
        clock = Clock(opened(rank, nodes(0), (0, 0), AUTO), monkeypatch)
        clock.run(200, 0.0, lambda step: 60.0 if step == slow else 0.0)
        return max(clock.intervals)

    assert Group(1).run(train)[0] <= 4


def test_an_evaluation_does_not_count_as_the_cost_of_a_copy(
    nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(rank: Rank) -> int:
        clock = Clock(opened(rank, nodes(0), (0, 0), AUTO), monkeypatch)
        for _ in range(100):
            clock.run(2, 0.0, lambda step: 0.0)
            clock.now += 3.0
            clock.kept.interrupt()
        return max(clock.intervals)

    assert Group(1).run(train)[0] <= 2


@given(st.integers(1, 1000), st.integers(1, 10**6))
def test_an_explicit_interval_is_kept_at_any_cost(every: int, step: int) -> None:
    cadence = Cadence(every)
    assert cadence.is_due(step) == (step % every == 0)
    assert cadence.copied(step, [Cost(100.0, 1.0, 0.001, 1.0)]) == every


def test_a_restart_does_not_begin_with_copies_after_each_step() -> None:
    before, after, number = Cadence(AUTO), Cadence(AUTO), Cadence(7)
    assert [before.copied(step, [Cost(0.1, 0.0, 1.0, 1.0)]) for step in range(3)] == [4, 10, 10]
    assert after.resume(40, before.recent) == 10
    assert [step for step in range(41, 52) if after.is_due(step)] == [50, 51]
    assert after.copied(50, [Cost(keeps=1.0)]) == 10, "the first copies after a restart have no cost yet"
    assert Cadence(AUTO).resume(40, []) == 0, "no cost was known"
    assert number.resume(40, before.recent) == 0
    assert number.is_due(42)


def test_the_interval_is_restored_with_the_state(nodes: Callable[[int], Path]) -> None:
    def first(rank: Rank) -> None:
        kept = opened(rank, nodes(rank.node), (0, 0), AUTO)
        kept.restore()
        kept.begin(0, protocol.SCRATCH)
        kept.cadence.recent = [(0.05, math.nan, 1.0)]
        kept.take(1, lambda: state(1, (0, 0)))

    def second(rank: Rank) -> tuple[int, list[bool]]:
        kept = opened(rank, nodes(rank.node), (0, 1), AUTO)
        assert kept.restore() is not None
        return kept.interval, [kept.cadence.is_due(step) for step in (2, 5, 6)]

    Group(2).run(first)
    shutil.rmtree(nodes(1))
    assert Group(2).run(second) == [(5, [False, False, True])] * 2
