"""When a neighbour's report and the coordinator's own probe suffice to declare a member lost early,
in virtual time.
"""

from __future__ import annotations

import pytest
from coordinator_world import STANDARD, World, formed
from ddpjob_runtime.coordinator.member_lines import HANDLERS
from ddpjob_runtime.coordinator.members import Member


def cut(world: World, *members: Member) -> None:
    """Cut the network of the members' hosts."""
    for member in members:
        world.silent.add(member.pod)
        world.cut.add(member.pod)


def heal(world: World, *members: Member) -> None:
    """Repair the network."""
    for member in members:
        world.silent.discard(member.pod)
        world.cut.discard(member.pod)


def report(world: World, by: Member, of: Member, silent: bool = True) -> None:
    """Send a line from a neighbour."""
    assert of.rank is not None
    world.coordinator.neighbour(by, world.round.number, of.rank, silent)


def lost(world: World) -> list[str]:
    """Return the lost members in the report that the operator reads."""
    return [entry["pod"] for entry in world.report()["lost"]]


@pytest.mark.parametrize("mode", ["Fast", STANDARD])
def test_a_spare_takes_over_within_half_a_second_of_the_report(mode: str) -> None:
    world = World(4, mode=mode)
    members = world.form(4, spares=1)
    cut(world, members[2])
    report(world, members[1], members[2])
    world.pass_time(0.3)
    assert world.round.number == 1 and lost(world) == []
    world.pass_time(0.1)
    assert lost(world) == ["job-2-0"] and "restart" in world.verbs(members[0])
    world.ready(members[0], members[1], members[3])
    assert world.ranks() == [0, 1, 3, 4]
    assert world.incidents() == [("PeerLost", "job-2-0", 0)]
    message = world.report()["incidents"][0]["message"]
    assert message == "its host does not acknowledge bytes from job-1-0 or from the coordinator"


def test_a_stopped_process_whose_host_acknowledges_is_not_lost() -> None:
    world, *members = formed(4, spares=1)
    world.silent.add(members[2].pod)
    report(world, members[1], members[2])
    world.pass_time(5)
    assert lost(world) == []


def test_a_report_about_an_earlier_round_does_not_replace_reports_of_this_one() -> None:
    world, *members = formed(4, spares=1)
    cut(world, members[2])
    report(world, members[1], members[2])
    world.coordinator.neighbour(members[3], 0, 2, True)
    world.pass_time(0.5)
    assert lost(world) == ["job-2-0"]


def test_a_single_witness_does_not_prove_a_loss() -> None:
    world, *members = formed(4, spares=1)
    report(world, members[1], members[2])
    world.pass_time(3)
    assert lost(world) == []
    report(world, members[1], members[2], silent=False)
    cut(world, members[3])
    world.pass_time(3)
    assert lost(world) == [] and world.round.number == 1


def test_a_withdrawn_report_does_not_count_as_a_witness() -> None:
    world, *members = formed(4, spares=1)
    cut(world, members[2])
    report(world, members[1], members[2])
    report(world, members[3], members[2])
    world.pass_time(0.2)
    report(world, members[1], members[2], silent=False)
    report(world, members[3], members[2], silent=False)
    world.pass_time(5)
    assert lost(world) == []


def test_a_report_that_is_not_repeated_expires() -> None:
    world, *members = formed(4, spares=1)
    report(world, members[1], members[2])
    world.pass_time(3)
    cut(world, members[2])
    report(world, members[3], members[0])
    world.pass_time(3)
    assert lost(world) == []


def test_a_member_that_still_sends_counts_as_alive_despite_reports() -> None:
    world, *members = formed(4, spares=1)
    world.cut.add(members[2].pod)  # It sends, but its kernel acknowledges nothing.
    report(world, members[1], members[2])
    world.pass_time(5)
    assert lost(world) == []


def test_silent_members_are_declared_lost_early_only_if_each_has_a_spare() -> None:
    world, *members = formed(6)
    cut(world, members[2])
    report(world, members[1], members[2])
    world.pass_time(5)
    assert lost(world) == []

    world, *members = formed(6, spares=1)
    cut(world, members[2], members[3])
    report(world, members[1], members[2])
    report(world, members[4], members[3])
    world.pass_time(5)
    assert lost(world) == []

    world, *members = formed(6, spares=2)
    cut(world, members[2], members[3])
    report(world, members[1], members[2])
    report(world, members[4], members[3])
    world.pass_time(1)
    assert lost(world) == ["job-2-0", "job-3-0"]


def test_a_spare_that_is_partitioned_too_does_not_justify_an_early_loss() -> None:
    world, *members = formed(4, spares=1)
    cut(world, members[2], members[4])
    report(world, members[1], members[2])
    world.pass_time(5)
    assert lost(world) == []


def test_no_member_is_lost_if_most_members_are_silent() -> None:
    world, *members = formed(4, spares=3)
    cut(world, *members[1:5])
    report(world, members[0], members[1])
    report(world, members[0], members[3])
    world.pass_time(5)
    assert lost(world) == []
    heal(world, members[2], members[3], members[4])
    report(world, members[0], members[3], silent=False)
    world.pass_time(1)
    report(world, members[0], members[1])  # Neighbours repeat their reports.
    world.pass_time(1)
    assert lost(world) == ["job-1-0"]


def test_a_check_that_runs_late_is_repeated_before_it_counts() -> None:
    world, *members = formed(4, spares=1)
    cut(world, members[2])
    report(world, members[1], members[2])
    world.now += 5  # This process was stopped, so its own host acknowledged nothing meanwhile.
    world.pass_time(0)
    assert lost(world) == []
    heal(world, members[2])
    world.pass_time(2)
    assert lost(world) == []


def test_reports_about_other_rounds_or_ranks_have_no_effect() -> None:
    world, *members = formed(4, spares=1)
    cut(world, members[2])
    world.coordinator.neighbour(members[1], 7, 2, True)
    world.coordinator.neighbour(members[4], 1, 2, True)  # A spare has no neighbours.
    with pytest.raises(ValueError, match="rank: must be a neighbour of rank 0 of 4, not 2"):
        world.coordinator.neighbour(members[0], 1, 2, True)
    with pytest.raises(ValueError, match="must be a neighbour"):
        world.coordinator.neighbour(members[0], 1, 0, True)
    world.pass_time(5)
    assert lost(world) == []


def test_a_silent_member_that_returns_becomes_a_spare() -> None:
    world, *members = formed(2, spares=1)
    cut(world, members[1])
    report(world, members[0], members[1])
    world.pass_time(0.5)
    assert members[1].given_up, "its old connection ends with the next line"
    world.ready(members[0])
    world.join(members[0], members[2])
    back = world.resume(1, number=1, rank=1, world=2)
    assert world.last(back)[0] == "restart", "its workers end before it may begin another round"
    world.ready(back)
    assert lost(world) == [] and world.ranks() == [0, 2] and world.coordinator.rounds.state == "Running"
    world.lose(members[2])
    world.ready(members[0])
    assert world.ranks() == [0, 1]


def test_each_member_learns_only_the_address_of_the_next_one() -> None:
    world = World(3)
    members = [world.hello(i) for i in range(3)]
    for member in members:
        world.coordinator.ready(
            member, 0, f"10.0.0.{member.index}", 1, watch=0 if member.index == 2 else 50 + member.index
        )
    gos = [world.last(member)[1] for member in members]
    assert [go.get("next") for go in gos] == [{"host": "10.0.0.1", "port": 51}, None, {"host": "10.0.0.0", "port": 50}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"round": 1, "rank": 2}, "silent: must be true or false, not None"),
        ({"round": 1, "rank": 2, "silent": 1}, "silent: must be true or false, not 1"),
        ({"round": 1, "silent": True}, "rank: must be a whole number"),
        ({"round": "1", "rank": 2, "silent": True}, "round: must be a whole number"),
        ({"round": 1, "rank": -1, "silent": True}, "rank: must be a whole number"),
    ],
)
def test_the_error_about_a_malformed_report_names_the_field(line: dict[str, object], why: str) -> None:
    world, *members = formed(4, spares=1)
    with pytest.raises(ValueError, match=why):
        HANDLERS["neighbour"](world.coordinator, members[1], line)
