"""A coordinator that replaces an earlier one: it adopts the members' round, or learns that the
round is over.
"""

from __future__ import annotations

import pytest
from coordinator_world import FAST, World
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.coordinator.takeover import ADOPT_SECONDS, BROKEN_SECONDS


def second(nodes: int = 2, min_nodes: int | None = None) -> World:
    """Return a coordinator that replaces another one (attempt 1)."""
    return World(nodes, min_nodes, attempt=1)


def without_looks(world: World, member: Member) -> list[str]:
    """Return the verbs that the member has heard, without the checks of its ranks."""
    return [verb for verb in world.verbs(member) if verb != "look"]


def test_a_new_coordinator_adopts_the_round_when_all_members_are_back() -> None:
    world = second()
    members = [world.resume(i, 7, 1 - i, 2) for i in range(2)]
    report = world.report()
    assert (report["state"], report["round"], report["world"], report["attempt"]) == ("Running", 7, 2, 1)
    assert [m["rank"] for m in report["members"]] == [1, 0]
    world.pass_time(100)
    assert all(without_looks(world, m) == ["welcome"] for m in members) and world.incidents() == []
    world.lose(members[1])
    assert world.verbs(members[0])[-1] == "restart"
    world.ready(members[0], world.hello(1, attempt=1))
    assert world.ranks() == [0, 1], "in the next round, ranks follow the index again"


def test_round_numbers_continue_above_those_of_earlier_coordinators() -> None:
    world = second()
    members = [world.hello(i) for i in range(2)]
    world.ready(*members)
    world.pass_time(6)
    assert world.round.number == 1_000_001
    world.fail(members[0])
    world.pass_time(1)
    assert world.report()["incidents"][0]["id"] == 1_000_001


def test_spares_that_return_first_do_not_form_a_second_group() -> None:
    world = second(2, 1)
    spares = [world.hello(2 + i) for i in range(2)]
    world.ready(*spares)
    world.pass_time(3)
    members = [world.resume(i, 7, i, 2) for i in range(2)]
    world.pass_time(60)
    assert world.report()["state"] == "Running" and world.round.number == 7
    assert all(without_looks(world, m) == ["welcome"] for m in members + spares)


def test_the_coordinator_waits_for_late_members_unless_their_round_is_over() -> None:
    world = second(3)
    first = world.resume(0, 7, 0, 3)
    world.resume(1, 7, 1, 3)
    world.pass_time(ADOPT_SECONDS - 1)
    assert world.verbs(first) == ["welcome"]
    world.resume(2, 7, 2, 3)
    assert world.report()["state"] == "Running"


def test_the_coordinator_does_not_wait_for_members_that_are_gone() -> None:
    """A Kubernetes node with the coordinator and a member was lost. The other members are in a
    collective with it.
    """
    world = second(4, 2)
    members = [world.resume(i, 7, i, 4) for i in range(2)]
    world.coordinator.gone("job-3-0", "its node was lost")
    world.pass_time(BROKEN_SECONDS + 1)
    assert world.verbs(members[0]) == ["welcome"], "one of the two may still return"
    world.coordinator.gone("job-2-0", "its node was lost")
    world.pass_time(BROKEN_SECONDS - 0.5)
    assert world.verbs(members[0]) == ["welcome"], "it may have been a spare"
    world.pass_time(1)
    assert [world.verbs(member)[-1] for member in members] == ["restart"] * 2
    world.ready(*members)
    assert world.round.world == 2


def test_a_member_that_does_not_return_breaks_the_round() -> None:
    world = second(2)
    first = world.resume(0, 7, 0, 2)
    world.pass_time(ADOPT_SECONDS + 0.1)
    assert world.verbs(first) == ["welcome", "restart"]
    world.ready(first, world.hello(1, attempt=1))
    assert world.round.number == 1_000_001 and world.ranks() == [0, 1]
    assert world.incidents() == [("PeerLost", None, 0)]
    assert "group rank(s) 1 of round 7 did not reconnect" in world.report()["incidents"][0]["message"]


def test_a_failure_ends_the_wait_for_members_early_and_is_the_cause() -> None:
    world = second(3, 2)
    first = world.resume(0, 7, 0, 3)
    world.fail(first)
    world.ready(first)
    world.pass_time(2)
    other = world.resume(1, 7, 1, 3)
    assert world.verbs(other) == ["welcome", "restart"]
    world.ready(other)
    assert world.coordinator.rounds.current is not None and world.round.number == 7
    world.pass_time(3.1)
    assert world.round.number == 1_000_001 and world.ranks() == [0, 1]
    assert world.incidents() == [("WorkerFailed", "job-0-0", 0)]


def test_a_communication_error_is_blamed_on_a_member_that_does_not_return() -> None:
    world = second(2)
    first = world.resume(0, 7, 0, 2)
    world.fail(first, "RuntimeError: gloo: Connection closed by peer")
    world.ready(first, world.hello(1, attempt=1))
    world.pass_time(5.1)
    assert world.round.number == 1_000_001
    assert world.incidents() == [("PeerLost", None, 1)]
    assert "group rank(s) 1 of round 7 did not reconnect" in world.report()["incidents"][0]["message"]


def test_a_rank_that_left_early_is_blamed_on_a_member_that_does_not_return() -> None:
    """Regression: the rank left with a node that was asked to stop and had saved, but its exit
    counted as a failure of the job.
    """
    world = second(2)
    first = world.resume(0, 7, 0, 2, "Ready")
    world.fail(first, "SystemExit: 75", code=75)
    world.ready(first, world.hello(1, attempt=1))
    world.pass_time(5.1)
    assert world.round.number == 1_000_001
    assert world.incidents() == [("PeerLost", None, 1)]


def test_a_broken_round_whose_members_are_all_back_continues_immediately() -> None:
    world = second(2)
    first = world.resume(0, 7, 0, 2, "Ready")
    other = world.resume(1, 7, 1, 2, "Ready")
    world.ready(first, other)
    assert world.round.number == 1_000_001 and world.ranks() == [0, 1] and world.now == 1000.0
    assert len(world.incidents()) == 1


@pytest.mark.parametrize("first", ["Ready", "Running"])
def test_members_that_save_for_a_planned_restart_keep_their_time(first: str) -> None:
    """The earlier coordinator has asked them to stop. One of them has saved already, or saves
    before the other.
    """
    world = second()
    members = []
    for i, state in enumerate([first, "Running"]):
        resume = {"round": 7, "rank": i, "world": 2, "state": state, "planned": True}
        members.append(world.hello(i, resume=resume))
    world.ready(members[0])
    world.pass_time(20)
    restarts = [fields["planned"] for verb, fields in world.heard[members[1].pod] if verb == "restart"]
    assert restarts and all(restarts) and "stop" not in world.verbs(members[1])
    world.ready(members[1])
    assert world.report()["round"] > 7 and world.ranks() == [0, 1]


def test_a_late_member_does_not_shorten_others_time_to_save() -> None:
    """The late member's name server may return the address of the earlier coordinator for half a
    minute.
    """
    world = second(3)
    members = []
    for i, seconds in ((0, 0), (1, 25), (2, 0)):
        world.pass_time(seconds)
        resume = {"round": 7, "rank": i, "world": 3, "state": "Running", "planned": True}
        members.append(world.hello(i, resume=resume, grace=100.0))
    world.ready(*members[1:])
    world.pass_time(50)
    assert not any(fields["planned"] is False for _, fields in world.heard[members[0].pod] if "planned" in fields)
    world.ready(members[0])
    assert world.round.number == 1_000_001 and world.ranks() == [0, 1, 2]


def test_a_missing_member_ends_a_planned_restart_of_an_earlier_coordinator() -> None:
    """Saving members may be waiting for the missing member."""
    world = second(2)
    resume = {"round": 7, "rank": 0, "world": 2, "state": "Running", "planned": True}
    first = world.hello(0, resume=resume, grace=100.0)
    world.coordinator.gone("job-1-0", "its Kubernetes node is lost")
    world.pass_time(5.1)
    assert [fields["planned"] for verb, fields in world.heard[first.pod] if verb == "restart"] == [True, False]


def test_the_newest_round_is_adopted() -> None:
    world = second(2)
    stale = world.resume(0, 6, 0, 2)
    world.resume(1, 7, 0, 2)
    assert world.last(stale)[0] == "restart" and world.last(stale)[1]["round"] == 6
    world.ready(stale)
    world.resume(2, 7, 1, 2)
    assert world.report()["state"] == "Running" and world.round.number == 7 and stale.state == "Ready"


def test_finished_members_are_counted() -> None:
    world = second(2)
    world.resume(0, 7, 0, 2, "Finished")
    assert world.report()["state"] == "Forming"
    world.resume(1, 7, 1, 2, "Finished")
    assert world.report()["state"] == "Succeeded"


def test_an_adopted_round_is_watched_for_hangs() -> None:
    world = World(2, attempt=3, hang_after=60.0)
    members = [world.resume(i, 7, i, 2) for i in range(2)]
    world.pass_time(61)
    assert world.verbs(members[0])[-1] == "dump"


@pytest.mark.parametrize(
    ("resume", "why"),
    [
        ([], "resume: must be an object"),
        ({"round": -1, "rank": 0, "world": 1, "state": "Running"}, "resume.round"),
        ({"round": 1, "rank": True, "world": 1, "state": "Running"}, "resume.rank"),
        ({"round": 1, "rank": 1, "world": 1, "state": "Running"}, "resume.rank: must be less than"),
        ({"round": 1, "rank": 0, "world": 1, "state": "Dancing"}, "resume.state"),
        ({"round": 1, "rank": 0, "world": 10**15, "state": "Running"}, "resume.world: must be at most 1124"),
    ],
)
def test_the_error_about_a_malformed_resume_names_the_field(resume: object, why: str) -> None:
    world = World(2)
    with pytest.raises(ValueError, match=why):
        world.try_hello(0, resume=resume)
    assert world.report()["members"] == []


def test_a_member_of_a_superseded_coordinator_is_notified_and_not_stopped() -> None:
    """The member's launcher looks for the later coordinator and keeps its workers. Its lines cause
    no illegal transitions.
    """
    world = World(2)
    world.form(2)
    world.coordinator.replaced(0, 1)
    resume = {"round": 7, "rank": 0, "world": 2, "state": "Running"}
    for said in (None, resume):
        assert world.try_hello(0, attempt=1, resume=said) is None
        why = "this coordinator has stopped: a later coordinator (generation 0, attempt 1) has taken over"
        assert world.heard["job-0-1"][-1] == ("error", {"why": why})


def test_a_first_coordinator_does_not_wait_for_members_to_return() -> None:
    world = World(2, mode=FAST)
    world.restart_coordinator(CoordinatorSettings(2, 2, mode=FAST))
    world.ready(world.hello(0), world.hello(1))
    assert world.round.number == 1


def test_a_newer_round_replaces_an_older_round_that_was_adopted_first() -> None:
    world = second(2)
    older = [world.resume(i, 6, i, 2) for i in range(2)]
    assert world.report()["state"] == "Running"
    newer = [world.resume(2 + i, 7, i, 2) for i in range(2)]
    assert [world.last(m)[0] for m in older] == ["restart"] * 2 and [world.last(m)[0] for m in newer] == ["welcome"] * 2
    assert (world.report()["state"], world.round.number) == ("Running", 7) and world.incidents() == []
