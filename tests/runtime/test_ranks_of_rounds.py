"""The order in which the coordinator numbers the ranks of a round, and how long it waits for that
order.
"""

from __future__ import annotations

import pytest
from coordinator_world import FAST, STANDARD, World, formed
from ddpjob_runtime.coordinator.formation import ORDER_SECONDS
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.protocol import MAX_PODS, order_mark


def pods(*indices: int) -> list[str]:
    return [f"job-{index}-0" for index in indices]


@pytest.mark.parametrize("mode", [STANDARD, FAST])
def test_ranks_are_numbered_in_the_operators_order(mode: str) -> None:
    world = World(4, mode=mode, ordered=True)
    world.coordinator.set_order(pods(0, 2, 1, 3))
    members = world.form(4)
    assert world.ranks() == [0, 2, 1, 3]
    assert [world.heard[m.pod][-1][1]["rank"] for m in members] == [0, 2, 1, 3]
    shown = {m["index"]: m["rank"] for m in world.report()["members"]}
    assert shown == {0: 0, 2: 1, 1: 2, 3: 3}


def test_the_first_round_waits_for_the_order() -> None:
    world = World(3, ordered=True)
    members = [world.hello(i) for i in range(3)]
    world.ready(*members)
    world.pass_time(1)
    assert world.coordinator.rounds.current is None
    world.coordinator.set_order(pods(0, 2, 1))
    assert world.ranks() == [0, 2, 1], "the round begins as soon as the order arrives"


def test_a_round_waits_briefly_and_only_for_members_without_a_place() -> None:
    world = World(3, ordered=True)
    members = [world.hello(i) for i in range(3)]
    world.coordinator.set_order(pods(0, 2))
    world.ready(*members)
    world.pass_time(ORDER_SECONDS - 0.1)
    assert world.coordinator.rounds.current is None
    world.pass_time(0.2)
    assert world.ranks() == [0, 2, 1], "a member without a place comes last"


def test_the_time_limit_for_a_place_begins_when_the_member_connects() -> None:
    """Importing torch and fetching data come after that, so a slow start causes no additional
    wait.
    """
    world = World(2, ordered=True)
    members = [world.hello(i) for i in range(2)]
    world.pass_time(ORDER_SECONDS + 1)
    world.ready(*members)
    assert world.ranks() == [0, 1]


def test_a_round_does_not_wait_for_an_order_that_was_not_announced() -> None:
    world = World(3)
    world.form(3)
    assert world.ranks() == [0, 1, 2] and world.report()["order"] == ""


def test_a_new_order_applies_only_from_the_next_round() -> None:
    world, *members = formed(4)
    world.coordinator.set_order(pods(0, 3, 1, 2))
    world.pass_time(100)
    assert world.report()["state"] == "Running" and world.ranks() == [0, 1, 2, 3] and world.round.number == 1
    world.fail(members[2])
    world.ready(*members)
    world.pass_time(5)
    assert world.ranks() == [0, 3, 1, 2] and world.round.number == 2


@pytest.mark.parametrize("mode", [STANDARD, FAST])
def test_a_replacement_waits_for_the_operator_to_assign_its_place(mode: str) -> None:
    world = World(3, mode=mode, ordered=True)
    world.coordinator.set_order(pods(0, 2, 1))
    members = world.form(3)
    world.lose(members[0])
    world.ready(*members[1:])
    world.ready(world.hello(0, attempt=1))
    world.pass_time(1)
    assert world.round.number == 1, "the round waits for its place"
    world.coordinator.set_order(["job-2-0", "job-0-1", "job-1-0"])
    assert world.round.number == 2 and world.ranks() == [0, 2, 1], "node 0 has rank 0 whenever it trains"


def test_without_the_operator_a_replacement_still_trains() -> None:
    world = World(3, ordered=True)
    world.coordinator.set_order(pods(0, 2, 1))
    members = world.form(3)
    world.lose(members[0])
    world.ready(*members[1:])
    world.ready(world.hello(0, attempt=1))
    world.pass_time(ORDER_SECONDS + 0.1)
    assert world.ranks() == [0, 2, 1], "index 0 comes first, even if its place is unknown"


def test_a_spare_that_takes_over_has_its_place_already() -> None:
    world = World(3, ordered=True)
    world.coordinator.set_order(pods(0, 3, 1, 2))
    members = world.form(3, spares=1)
    assert world.ranks() == [0, 1, 2]
    world.lose(members[1])
    world.ready(members[0], members[2])
    assert world.ranks() == [0, 3, 2], "no wait is needed"


def test_withdrawing_the_order_restores_the_order_of_indices_without_a_wait() -> None:
    world = World(3, ordered=True)
    world.coordinator.set_order(pods(0, 2, 1))
    members = world.form(3)
    world.coordinator.set_order([])
    assert world.report()["order"] == ""
    world.lose(members[0])
    world.ready(*members[1:])
    world.ready(world.hello(0, attempt=1))
    assert world.ranks() == [0, 1, 2]


def test_an_adopted_round_keeps_its_ranks_and_the_next_waits_for_the_order() -> None:
    world = World(3, mode=FAST, ordered=True)
    world.coordinator.set_order(pods(0, 2, 1))
    world.form(3)
    world.restart_coordinator(CoordinatorSettings(3, 3, mode=FAST, attempt=1, ordered=True))
    assert world.report()["order"] == "", "the report shows the operator that it must send the order again"
    members = [world.resume(index, 1, rank, 3) for rank, index in enumerate([0, 2, 1])]
    assert world.report()["state"] == "Running" and world.ranks() == [0, 2, 1]
    world.fail(members[0])
    world.ready(*members)
    world.pass_time(1)
    assert world.round.number == 1
    world.coordinator.set_order(pods(0, 2, 1))
    assert world.round.number > 1 and world.ranks() == [0, 2, 1]


def test_the_report_shows_the_current_order() -> None:
    world = World(3, ordered=True)
    assert world.report()["order"] == ""
    world.coordinator.set_order(pods(0, 2, 1))
    news, mark = world.coordinator.news, world.report()["order"]
    assert mark == order_mark(pods(0, 2, 1)) != order_mark(pods(0, 1, 2))
    world.coordinator.set_order(pods(0, 2, 1))
    assert world.coordinator.news == news, (
        "a repeated order must not count as a change, or the operator would be woken forever"
    )
    world.coordinator.set_order(pods(0, 1, 2))
    assert world.coordinator.news > news and world.report()["order"] == order_mark(pods(0, 1, 2))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([*pods(0, 1), "job-0-0"], "'job-0-0' is listed twice"),
        (pods(*range(MAX_PODS + 1)), f"pods: must have at most {MAX_PODS} entries, not {MAX_PODS + 1}"),
    ],
)
def test_an_invalid_order_changes_nothing(names: list[str], why: str) -> None:
    world = World(2)
    world.coordinator.set_order(pods(0, 1))
    with pytest.raises(ValueError, match=why):
        world.coordinator.set_order(names)
    assert world.report()["order"] == order_mark(pods(0, 1))
    world.coordinator.set_order(pods(*range(MAX_PODS)))
