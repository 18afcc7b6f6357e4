"""The snapshots in a node's memory: their content after an interruption at any point, and which of
them is restored.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpjob_pod import snapshot_store
from ddpjob_pod.snapshot_store import (
    ALL,
    HEADER_BYTES,
    Held,
    Moment,
    NoRoom,
    SnapshotStore,
    Transfer,
    choose,
    decode,
    encode,
    free_memory,
    transfers,
)
from hypothesis import given
from hypothesis import strategies as st


def keep(store: SnapshotStore, step: int, content: bytes = b"state", order: tuple[int, int] = (0, 0)) -> None:
    writing = store.begin(ALL, len(content))
    writing.data[:] = content
    writing.complete(Moment(order, step))


def steps(store: SnapshotStore) -> list[int]:
    return [held.moment.step for held in store.held()]


def test_the_two_newest_states_are_kept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    for step in range(1, 6):
        keep(store, step, b"%d" % step)
    assert steps(SnapshotStore(tmp_path)) == [4, 5]
    assert bytes(store.read(store.held()[-1])) == b"5"


def test_an_unfinished_state_is_ignored_and_the_previous_one_is_kept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    keep(store, 1)
    keep(store, 2)
    writing = store.begin(ALL, 5)
    writing.data[:3] = b"new"
    assert steps(SnapshotStore(tmp_path)) == [2], "if the worker is killed at this point, the newer state exists"
    writing.complete(Moment((0, 0), 3))
    assert steps(SnapshotStore(tmp_path)) == [2, 3]


def test_a_larger_state_can_replace_a_smaller_one(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    for step, size in enumerate([10, 10_000, 100, 200_000]):
        keep(store, step, bytes([step]) * size)
    newest = store.held()[-1]
    assert newest.size == 200_000 and bytes(store.read(newest)) == b"\3" * 200_000
    assert bytes(store.read(store.held()[0])) == b"\2" * 100


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * HEADER_BYTES, b"ddpjob:1" + b"\xff" * 60])
def test_a_damaged_file_is_ignored(damage: bytes, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    keep(store, 1)
    (tmp_path / "all.1").write_bytes(damage)
    (tmp_path / "unrelated").write_bytes(damage)
    assert steps(SnapshotStore(tmp_path)) == [1]
    keep(SnapshotStore(tmp_path), 2)
    assert steps(SnapshotStore(tmp_path)) == [1, 2]


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a volume")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_states_that_do_not_fit_twice_are_refused_before_anything_is_written(small_volume: Path) -> None:
    store = SnapshotStore(small_volume)
    keep(store, 1, b"x" * 400_000)
    keep(store, 2, b"x" * 400_000)
    with pytest.raises(NoRoom) as error:
        store.begin(ALL, 600_000)
    assert error.value.needed == 2 * (600_000 + HEADER_BYTES)
    assert steps(store) == [1, 2]


def test_the_last_completed_step_is_recorded_even_without_a_copy(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    assert store.made is None
    for step in (4, 5, 6):
        store.note_made(Moment((1, 2), step))
    assert SnapshotStore(tmp_path).made == Moment((1, 2), 6)
    again = SnapshotStore(tmp_path)
    again.note_made(Moment((1, 3), 5))
    assert store.made == Moment((1, 3), 5)


def test_readers_never_see_a_partially_written_step_number(tmp_path: Path) -> None:
    first, second = 0x00FFFFFFFF, 0x0100000000
    SnapshotStore(tmp_path).note_made(Moment((0, 1), first))
    child = os.fork()
    if child == 0:
        store = SnapshotStore(tmp_path)
        store._noted = (0, 1)
        while True:
            store.note_made(Moment((0, 1), second))
            store.note_made(Moment((0, 1), first))
    try:
        numbers = SnapshotStore(tmp_path)._made
        assert numbers is not None
        while numbers[3] != second:
            pass
        assert {numbers[3] for _ in range(300_000)} <= {first, second}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_first_state_after_a_restart_does_not_overwrite_the_restored_one(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    keep(store, 7)
    keep(store, 8)
    abandoned = store.held()[-1]
    writing = store.begin(ALL, 5, Moment((0, 0), 7))
    assert writing.slot == abandoned.slot and steps(store) == [7]
    writing.complete(Moment((0, 1), 8))
    assert steps(store) == [7, 8]
    keep(store, 9, order=(0, 1))
    assert [held.moment for held in store.held()] == [Moment((0, 1), 8), Moment((0, 1), 9)]


def test_room_for_both_states_is_reserved_with_the_first_one(small_volume: Path) -> None:
    store = SnapshotStore(small_volume)
    keep(store, 1, b"x" * 400_000)
    with pytest.raises(OSError, match="No space left"), (small_volume / "other").open("wb") as file:
        file.write(b"x" * 400_000)
    keep(store, 2, b"x" * 400_000)
    assert steps(store) == [1, 2]


def test_parts_that_belong_to_other_ranks_are_dropped(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    for part in ("0of3", "1of3", ALL):
        store.begin(part, 5).complete(Moment((0, 0), 1))
    (tmp_path / "unrelated").touch()
    store.keep_only({"1of3"})
    assert [held.part for held in store.held()] == ["1of3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1of3.0", "1of3.1", "made", "unrelated"]


@pytest.mark.parametrize("fault", ["missing", "read-only", None])
def test_an_unusable_folder_counts_as_empty_and_without_room(fault: str | None, small_volume: Path) -> None:
    folder = small_volume if fault == "read-only" else small_volume / "missing"
    if fault == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", small_volume], check=True)
    store = SnapshotStore(folder if fault else None)
    store.note_made(Moment((0, 0), 1))
    store.keep_only(())
    assert (store.held(), store.made, store.room(ALL)) == ([], None, 0)
    with pytest.raises(NoRoom) as error:
        store.begin(ALL, 100)
    assert error.value.needed == 2 * (100 + HEADER_BYTES)
    assert store.fault == {"missing": f"{folder}: No such file or directory", None: ""}.get(
        fault, f"{folder}: Read-only file system"
    )


MEMORY_INFO = "MemTotal:       1000 kB\nMemAvailable:    900 kB\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, sys.maxsize),
        ({"proc/meminfo": MEMORY_INFO}, 800 << 10),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, sys.maxsize),
        (
            {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "700",
             "sys/fs/cgroup/memory.stat": "anon 400\nfile 300\nshmem 50\ninactive_file 200\nactive_file 50\n"},
            450,
        ),
        (
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "950",
             "sys/fs/cgroup/memory/memory.stat": "inactive_file 900\ntotal_inactive_file 10\ntotal_active_file 0\n"},
            0,
        ),
    ],
    ids=["no limit is known", "machine", "container without a limit", "version 2", "version 1, full"],
)  # fmt: skip
def test_a_tenth_of_each_memory_limit_stays_free(files: dict[str, str], free: int, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert free_memory(tmp_path) == free


def test_states_that_fit_the_volume_but_not_the_memory_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "free_memory", lambda: 20_000)
    store = SnapshotStore(tmp_path)
    keep(store, 1, b"x" * 5_000)
    keep(store, 2, b"x" * 5_000)
    with pytest.raises(NoRoom):
        store.begin(ALL, 50_000)
    assert steps(store) == [1, 2]


MOMENTS = st.builds(Moment, st.tuples(st.integers(0, 2), st.integers(0, 2)), st.integers(0, 5))
HELD = st.builds(Held, st.just(ALL), MOMENTS, st.just(9))
NODES = st.dictionaries(st.integers(0, 5), st.lists(HELD, max_size=2, unique=True))


@given(NODES)
def test_the_newest_incarnation_takes_precedence_over_the_highest_step(nodes: dict[int, list[Held]]) -> None:
    every = [held.moment for states in nodes.values() for held in states]
    found = choose(nodes, 0)
    if not every:
        assert found is None
        return
    newest = max(moment.order for moment in every)
    assert found is not None
    chosen, number_of_parts = found
    assert chosen.order == newest and number_of_parts == 0
    assert chosen.step == max(moment.step for moment in every if moment.order == newest)


def test_a_higher_step_of_an_older_round_is_ignored() -> None:
    cut_off, others = Held(ALL, Moment((0, 5), 900), 9), Held(ALL, Moment((0, 6), 850), 9)
    assert choose({0: [cut_off], 1: [others]}, 0) == (others.moment, 0)


def test_a_sharded_state_is_complete_only_if_all_its_parts_exist() -> None:
    def part(rank: int, step: int) -> Held:
        return Held(f"{rank}of2", Moment((0, 0), step), 9)

    assert choose({0: [part(0, 7), part(0, 8)], 1: [part(1, 7)]}, 2) == (Moment((0, 0), 7), 2)
    assert choose({0: [part(0, 8)], 1: [part(1, 7)]}, 2) is None
    assert choose({0: [part(0, 8), part(1, 8)]}, 2) == (Moment((0, 0), 8), 2), (
        "the neighbour has a copy of the missing part"
    )


def test_parts_of_the_same_step_from_different_incarnations_do_not_combine() -> None:
    def part(rank: int, step: int, round_: int) -> Held:
        return Held(f"{rank}of2", Moment((0, round_), step), 9)

    assert choose({0: [part(0, 8, 5)], 1: [part(1, 8, 6)]}, 2) is None
    older = {0: [part(0, 8, 5), part(0, 7, 6)], 1: [part(1, 8, 5), part(1, 7, 6)]}
    assert choose(older, 2) == (Moment((0, 6), 7), 2)


@given(NODES)
def test_only_nodes_that_lack_the_state_receive_it(nodes: dict[int, list[Held]]) -> None:
    found = choose(nodes, 0)
    if found is None:
        return
    moment, _ = found
    has = {node for node, states in nodes.items() if any(held.moment == moment for held in states)}
    found = transfers(nodes, {node: (node, ALL) for node in nodes}, moment)
    assert sorted(t.to for t in found) == sorted(nodes.keys() - has)
    assert {t.source for t in found} <= has
    sent = [sum(t.source == node for t in found) for node in has]
    assert max(sent) - min(sent) <= 1, "the nodes that have the state share the work"


def test_a_rank_gets_its_part_from_the_neighbour() -> None:
    moment = Moment((0, 0), 3)
    nodes = {0: [Held("0of2", moment, 5), Held("1of2", moment, 6)], 1: []}
    wanted = {0: (0, "0of2"), 1: (1, "1of2")}
    assert transfers(nodes, wanted, moment) == [Transfer(0, 1, "1of2", 6)]


@given(st.lists(st.builds(Held, st.sampled_from([ALL, "3of16"]), MOMENTS, st.integers(0, 2**40))), st.none() | MOMENTS)
def test_an_inventory_survives_a_round_trip(held: list[Held], made: Moment | None) -> None:
    assert decode(encode(held, made)) == (held, made)


@given(st.binary(max_size=200))
def test_a_hostile_inventory_is_either_refused_or_harmless(content: bytes) -> None:
    try:
        held, _ = decode(content)
    except ValueError:
        return
    assert all(each.size >= 0 for each in held)
