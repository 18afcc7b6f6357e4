"""How the coordinator lets a group grow and shrink, and backs off from repeated failures."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_world import STANDARD, World, formed, formed_by


@pytest.mark.parametrize(("joiners", "wait"), [(2, 10.0), (1, 60.0)])
def test_the_group_is_interrupted_for_new_members_at_a_limited_rate(joiners: int, wait: float) -> None:
    world, *members = formed_by(2, 4, 2)
    new = [world.hello(2 + i) for i in range(joiners)]
    world.ready(*new)
    world.pass_time(wait - 0.5)
    assert "restart" not in world.verbs(members[0])
    world.pass_time(0.6)
    assert world.last(members[0])[1]["planned"] is True
    world.ready(*members)
    assert world.round.world == 2 + joiners and world.ranks()[:2] == [0, 1]
    world.pass_time(1)
    assert world.incidents() == [("Joined", "job-2-0", 0)]


def test_a_joining_member_does_not_interrupt_members_that_are_finishing() -> None:
    world, *members = formed_by(2, 3, 2)
    world.coordinator.finished(members[0], 1)
    world.ready(world.hello(2))
    world.pass_time(300)
    world.coordinator.finished(members[1], 1)
    assert world.report()["state"] == "Succeeded" and world.verbs(world.coordinator.members.by_index[2])[-1] == "done"


def test_the_group_does_not_wait_for_a_joining_member_that_dies_while_others_drain() -> None:
    world, *members = formed_by(2, 3, 2, STANDARD)
    joiner = world.hello(2)
    world.ready(joiner)
    world.pass_time(10.1)
    world.lose(joiner)
    world.ready(*members)
    assert world.round.number == 2 and world.round.world == 2


def test_members_beyond_the_requested_size_are_spares() -> None:
    world, *members = formed(2, spares=2)
    world.pass_time(1000)
    assert [m.state for m in members] == ["Running", "Running", "Ready", "Ready"]


def test_a_smaller_size_applies_immediately_and_drops_the_highest_indices() -> None:
    world, *members = formed(4)
    world.coordinator.resize(2, 2)
    assert all(
        world.last(m)[1] == {"round": 1, "why": "the group continues with 2 nodes instead of 4", "planned": True}
        for m in members
    )
    world.ready(*members[::-1])
    assert world.ranks() == [0, 1] and world.report()["nodes"] == 2
    assert world.incidents() == [("Joined", None, 0)]
    world.coordinator.resize(2, 2)  # sent again at each pass
    world.join(*members[:2])
    world.pass_time(100)
    assert world.round.number == 2


def test_a_larger_size_applies_once_its_nodes_are_ready() -> None:
    world, *members = formed(2)
    world.coordinator.resize(3, 3)
    world.pass_time(100)
    assert world.report()["state"] == "Running" and world.report()["world"] == 2  # it trains at its old size
    world.ready(world.hello(2))
    assert world.last(members[0])[0] == "restart"


def test_an_impossible_group_size_is_refused() -> None:
    world = World(2)
    with pytest.raises(ValueError, match="minNodes: must be from 1 to nodes"):
        world.coordinator.resize(2, 3)


# ---- back-off


def crash(world: World, members: list[Any]) -> float:
    """Let a member fail, and return the seconds until the next round."""
    began, number = world.now, world.round.number
    world.fail(members[0])
    world.ready(*members)
    while world.round.number == number:
        world.pass_time(0.1)
        assert world.now - began < 100
    world.join(*members)
    return world.now - began


def test_a_crash_loop_backs_off_longer_each_time_up_to_the_limit() -> None:
    world, *members = formed(2, backoff_initial=2.0, backoff_maximum=10.0)
    waits = [crash(world, members) for _ in range(5)]
    assert waits == pytest.approx([0, 2, 4, 8, 10], abs=0.2)
    assert [i["backoffSeconds"] for i in world.report()["incidents"]] == [0, 2, 4, 8, 10]


def test_the_back_off_is_reported() -> None:
    world, *members = formed(2)
    crash(world, members)
    world.fail(members[0])
    world.ready(*members)
    assert world.report()["backoffUntil"] == "1970-01-01T00:16:41.000Z"
    world.pass_time(2)
    assert world.report()["backoffUntil"] is None and world.round.number == 3


def test_a_crash_loop_ends_only_when_training_gets_further_than_before() -> None:
    world, *members = formed(2)
    world.coordinator.report_progress({"step": 10})
    assert crash(world, members) == 0
    world.coordinator.report_progress({"step": 10})
    assert crash(world, members) == pytest.approx(1, abs=0.2)
    world.coordinator.report_progress({"step": 9})
    assert crash(world, members) == pytest.approx(2, abs=0.2)
    world.coordinator.report_progress({"step": 11})
    assert crash(world, members) == 0
    assert crash(world, members) == pytest.approx(1, abs=0.2)


def test_a_crash_loop_ends_after_a_minute_of_training() -> None:
    world, *members = formed(2)
    crash(world, members)
    crash(world, members)
    world.pass_time(61)
    assert crash(world, members) == 0


def test_lost_nodes_cause_no_back_off() -> None:
    world, first, second = formed(2)
    for attempt in range(1, 8):
        world.lose(second)
        second = world.hello(1, attempt=attempt)
        world.ready(first, second)
        world.join(first, second)
    assert world.round.number == 8 and world.now == 1000.0
