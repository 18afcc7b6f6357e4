"""The coordinator's decisions, rule by rule, without sockets."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from coordinator_world import FAST, RESET, STANDARD, World, formed, formed_by
from ddpjob_runtime.coordinator import progress
from ddpjob_runtime.coordinator.drain import DRAIN_SECONDS
from ddpjob_runtime.coordinator.loop import within
from ddpjob_runtime.coordinator.members import Member


def test_the_first_round_begins_when_all_nodes_are_ready() -> None:
    world = World(3)
    members = [world.hello(i) for i in range(3)]
    world.ready(members[2], members[0])
    world.pass_time(500)
    assert world.coordinator.rounds.current is None and world.report()["state"] == "Forming"
    world.ready(members[1])
    sent = [world.last(m) for m in members]
    assert [verb for verb, _ in sent] == ["go"] * 3
    assert [fields["rank"] for _, fields in sent] == [0, 1, 2], (
        "ranks follow the index, not the order in which members became ready"
    )
    assert all(fields["world"] == 3 and fields["round"] == 1 for _, fields in sent)
    first = {"rank": 0, "pod": "job-0-0", "host": "10.0.0.1", "port": 4000}
    assert all(fields["members"] == [first] for _, fields in sent), "members need only rank 0's address"
    assert world.report()["state"] == "Forming"  # no workers yet
    world.join(*members)
    report = world.report()
    assert (report["state"], report["world"], report["round"]) == ("Running", 3, 1)


@pytest.mark.parametrize("mode", [STANDARD, FAST])
def test_the_first_round_begins_with_fewer_members_after_half_a_minute(mode: str) -> None:
    world = World(3, 2, mode)
    members = [world.hello(i) for i in range(3)]
    world.ready(members[0])
    world.pass_time(100)
    world.ready(members[1])
    world.pass_time(29)
    assert world.coordinator.rounds.current is None
    world.pass_time(1.1)
    assert world.round.world == 2 and world.verbs(members[2]) == ["welcome"]


def test_the_first_wait_starts_again_when_a_member_is_lost() -> None:
    world = World(3, 2)
    members = [world.hello(i) for i in range(2)]
    world.ready(*members)
    world.pass_time(20)
    world.lose(members[0])
    world.pass_time(5)
    world.ready(world.hello(0, attempt=1))
    world.pass_time(29)
    assert world.coordinator.rounds.current is None
    world.pass_time(2)
    assert world.round.world == 2


def test_the_spare_that_was_ready_first_fills_the_gap_and_ranks_follow_indices() -> None:
    world, *members = formed(3, spares=1)
    world.pass_time(5)
    world.ready(world.hello(4))  # ready after job-3
    world.lose(members[1])
    assert world.last(members[0])[0] == "restart"
    world.ready(members[2])
    assert world.round.number == 1  # job-0 has not ended its workers yet
    world.ready(members[0])
    assert world.round.number == 2 and world.ranks() == [0, 2, 3]


@pytest.mark.parametrize(("mode", "wait"), [(FAST, 0.0), (STANDARD, 10.0)])
def test_a_group_continues_with_fewer_members_after_the_shrink_grace(mode: str, wait: float) -> None:
    world, *members = formed(3, 2, mode)
    world.lose(members[0])
    world.ready(members[1], members[2])
    if wait:
        world.pass_time(wait - 0.5)
        assert world.round.number == 1
        world.pass_time(0.6)
    assert world.round.number == 2 and world.ranks() == [1, 2]


def test_node_0_has_rank_0_in_every_round_that_includes_it() -> None:
    world, *members = formed(3, 2, FAST)
    world.lose(members[0])
    world.ready(members[1], members[2])
    assert world.ranks() == [1, 2]
    world.join(members[1], members[2])
    world.ready(world.hello(0, attempt=1))
    world.pass_time(11)
    world.ready(members[1], members[2])
    assert world.ranks() == [0, 1, 2]


def test_a_reduced_group_that_breaks_does_not_wait_for_absent_members() -> None:
    world, *members = formed_by(2, 3, 2, STANDARD)
    world.fail(members[0])
    world.ready(*members)
    assert world.round.number == 2


def test_a_group_below_its_minimum_size_waits() -> None:
    world, *members = formed(3, 2)
    world.lose(members[0])
    world.lose(members[1])
    world.ready(members[2])
    world.pass_time(1000)
    assert world.round.number == 1 and world.report()["world"] is None
    world.ready(world.hello(1, attempt=1))
    assert world.round.number == 2 and world.ranks() == [1, 2]


def test_a_round_whose_workers_do_not_start_is_abandoned() -> None:
    world = World(2)
    members = [world.hello(i) for i in range(2)]
    world.ready(*members)
    world.join(members[0])
    world.pass_time(121)
    verb, fields = world.last(members[1])
    assert verb == "stop" and fields["fenced"] is True
    assert world.last(members[0])[0] == "restart"
    world.pass_time(1)
    assert world.incidents() == [("PeerLost", "job-1-0", 0)]


# ---- draining and fencing


def test_a_member_that_does_not_drain_is_fenced_before_the_next_round() -> None:
    world, *members = formed(3, 2)
    world.lose(members[0])
    world.ready(members[1])
    world.pass_time(DRAIN_SECONDS - 0.1)
    assert world.verbs(members[2])[-1] == "restart" and world.round.number == 1
    world.ready(world.hello(0, attempt=1))
    world.pass_time(0.2)
    verb, fields = world.last(members[2])
    assert (verb, fields["fenced"], fields["ok"]) == ("stop", True, False) and "in time" in fields["why"]
    assert world.round.number == 2 and world.ranks() == [0, 1]
    again = world.try_hello(2)
    assert again is None and world.last(members[2])[1]["fenced"] is True
    assert [entry["pod"] for entry in world.report()["lost"]] == ["job-2-0"]


def test_two_members_that_do_not_drain_are_both_notified_before_a_round_forms() -> None:
    world, *members = formed(3, 1)
    world.lose(members[0])
    world.ready(world.hello(0, attempt=1))
    order: list[str] = []
    for member in members[1:]:
        lines = world.heard[member.pod]
        member.send = lambda verb, fields, pod=member.pod, lines=lines: (
            order.append(f"{pod} {verb}"),
            lines.append((verb, fields)),
        )
    new = world.coordinator.members.by_index[0]
    new.send = lambda verb, fields: order.append(f"new {verb}")
    world.pass_time(DRAIN_SECONDS + 1)
    assert order == ["job-1-0 stop", "job-2-0 stop", "new record", "new go"]


def test_members_get_their_grace_period_in_a_planned_restart() -> None:
    world = World(3, 2)
    members = [world.hello(i, grace=40.0) for i in range(2)]
    world.ready(*members)
    world.pass_time(31)
    world.join(*members)
    world.ready(world.hello(2))
    world.pass_time(11)
    assert world.last(members[0]) == (
        "restart",
        {"round": 1, "why": "the group continues with 3 nodes instead of 2", "planned": True},
    )
    world.ready(members[1])
    world.pass_time(44)
    assert "stop" not in world.verbs(members[0])
    world.pass_time(1.1)
    assert world.last(members[0])[0] == "stop"


def growing(grace: float) -> tuple[World, list[Member]]:
    """Return two members of a round that were just asked to make room for a third one."""
    world = World(3, 1)
    members = [world.hello(i, grace=grace) for i in range(2)]
    world.ready(*members)
    world.pass_time(31)
    world.join(*members)
    world.ready(world.hello(2))
    world.pass_time(10.1)
    assert world.last(members[0])[1]["planned"] is True
    return world, members


def test_a_reconnection_does_not_shorten_the_time_to_save_in_a_planned_restart() -> None:
    """A launcher that is notified of an unplanned restart kills its workers, even while they
    save.
    """
    world, members = growing(grace=100.0)
    position = {"round": 1, "rank": 0, "world": 2, "state": "Running"}
    for seconds in (50, 50):
        assert world.hello(0, resume=position) is members[0]
        assert world.last(members[0])[1]["planned"] is True
        world.pass_time(seconds)
    assert "stop" not in world.verbs(members[0])
    world.pass_time(5)
    assert world.last(members[0])[0] == "stop", "the reconnection does not extend the grace period"


@pytest.mark.parametrize("later", [0, 5])
def test_a_member_that_has_saved_and_reconnects_leaves_others_time_to_save(later: float) -> None:
    """The member's `ready` was lost with the connection. If that counted as a loss, the others
    would be killed while they save.
    """
    world, members = growing(grace=30.0)
    world.pass_time(later)
    assert world.resume(1, 1, 1, 2, "Ready") is members[1]
    world.ready(members[1])
    assert [fields["planned"] for verb, fields in world.heard[members[0].pod] if verb == "restart"] == [True]
    world.ready(members[0])
    assert world.round.world == 3 and world.incidents() == [("Joined", "job-2-0", 0)]


def test_a_rank_that_saves_before_its_launcher_is_asked_leaves_others_time_to_save() -> None:
    """Ranks agree among themselves, so a rank that has nothing to write leaves while its launcher
    still sleeps.
    """
    world, members = growing(grace=100.0)
    world.fail(members[1], "ended with exit code 75", code=75)
    world.ready(members[1])
    world.pass_time(100)
    assert [fields["planned"] for verb, fields in world.heard[members[0].pod] if verb == "restart"] == [True]
    world.ready(members[0])
    assert world.round.world == 3 and world.incidents() == [("Joined", "job-2-0", 0)]


@pytest.mark.parametrize("error", ["Interrupted: SIGTERM", RESET])
@pytest.mark.parametrize("later", [0.2, 5.0])
def test_a_script_that_fails_on_sigterm_leaves_others_time_to_save(error: str, later: float) -> None:
    """Such a script fails because its SIGTERM handler raises an exception, or because its peers
    fail.
    """
    world, members = growing(grace=100.0)
    world.pass_time(later)
    world.fail(members[1], error)
    world.ready(members[1])
    world.pass_time(50)
    assert [fields["planned"] for verb, fields in world.heard[members[0].pod] if verb == "restart"] == [True]
    world.ready(members[0])
    assert world.round.world == 3 and world.incidents() == [("Joined", "job-2-0", 0)]


@pytest.mark.parametrize("grace", [600.0, 10.0])
def test_a_loss_during_a_planned_restart_ends_the_time_to_save(grace: float) -> None:
    """This includes a member that cannot end its workers. Regression: the others waited for that
    member's grace period.
    """
    world, members = growing(grace=grace)
    world.lose(members[1])
    assert world.resume(0, 1, 0, 2, "Running") is members[0] and world.last(members[0])[1]["planned"] is False
    world.pass_time(DRAIN_SECONDS + 1)
    assert world.last(members[0])[0] == "stop" and world.round.number == 2


@pytest.mark.parametrize("later", [0, 5])
def test_a_loss_during_a_planned_restart_is_reported_immediately(later: float) -> None:
    """It is reported even if the cause of the break has been decided, because saving members may be
    waiting for the lost one.
    """
    world, members = growing(grace=30.0)
    world.pass_time(later)
    world.lose(members[1])
    assert [fields["planned"] for verb, fields in world.heard[members[0].pod] if verb == "restart"] == [True, False]
    world.ready(members[0])
    assert world.round.number == 2
    assert world.incidents() == [("Joined", "job-2-0", 0)]


def test_a_ready_that_was_sent_before_go_arrived_changes_nothing() -> None:
    world, first, _ = formed(2)
    world.coordinator.ready(first, 0, "h", 1)
    assert world.report()["state"] == "Running" and first.state == "Running"


def test_a_member_that_sends_ready_while_its_round_runs_breaks_the_round() -> None:
    world, first, second = formed(2)
    world.coordinator.ready(first, 1, "h", 1)
    assert world.verbs(second)[-1] == "restart" and world.report()["state"] == "Restarting"
    world.ready(second)
    assert world.round.number == 2
    assert world.incidents() == [("PeerLost", "job-0-0", 0)]


def test_a_group_whose_rounds_break_repeatedly_backs_off() -> None:
    world, *members = formed(2)
    for _ in range(3):
        number = world.round.number
        world.coordinator.ready(members[0], number, "h", 1)
        world.ready(members[1])
        world.pass_time(5)
        world.join(*members)
    assert [i["backoffSeconds"] for i in world.report()["incidents"]] == [0.0, 1.0, 2.0]


# ---- leaving


def test_leaving_is_not_a_failure_and_no_worker_is_killed_while_it_saves() -> None:
    world, first, second = formed()
    world.coordinator.leaving(second, "ended by SIGTERM")
    world.fail(first, "SystemExit: 75", code=75)
    world.pass_time(0.6)
    assert world.last(first)[1]["planned"] is True  # other ranks of its node may still be saving
    assert world.incidents() == [("Left", "job-1-0", 1)]
    world.lose(second)
    world.pass_time(5)
    assert world.incidents() == [("Left", "job-1-0", 1)] and world.report()["lost"] == []


def test_a_leaving_member_delays_nothing_once_its_round_is_broken() -> None:
    world, first, second, _ = formed(2, spares=1)
    world.coordinator.leaving(second, "ended by SIGTERM")
    world.pass_time(1)
    assert "restart" not in world.verbs(first) and world.report()["state"] == "Running"
    world.fail(first, RESET)
    world.ready(first)
    assert world.round.number == 2 and world.ranks() == [0, 2] and second.state == "Leaving"
    assert world.incidents() == [("Left", "job-1-0", 1)]


def test_peers_that_hang_after_a_member_has_left_are_restarted() -> None:
    world, first, second = formed()
    world.coordinator.leaving(second, "ended by SIGTERM")
    world.pass_time(3)
    world.lose(second)
    assert world.last(first)[0] == "restart" and world.last(first)[1]["planned"] is False
    world.ready(first)
    assert world.incidents() == [("Left", "job-1-0", 0)]


def test_peers_that_have_agreed_to_save_finish_after_the_leaving_node() -> None:
    world, first, second, third = formed(3)
    world.coordinator.leaving(second, "ended by SIGTERM")
    world.fail(first, "SystemExit: 75", code=75)
    world.lose(second)
    assert [f["planned"] for verb, f in world.heard[third.pod] if verb == "restart"] == [True]


def test_a_leaving_member_that_reconnects_is_still_leaving() -> None:
    """Regression: the leaving member was considered gone, and its peers' workers were killed in the
    step before their save.
    """
    world, first, second = formed()
    world.coordinator.leaving(second, "ended by SIGTERM")
    assert world.resume(1, 1, 1, 2, "Running") is second and second.state == "Leaving"
    assert "restart" not in world.verbs(first) and world.report()["state"] == "Running"
    world.fail(second, "SystemExit: 75", code=75)
    world.lose(second)
    assert world.last(first)[1]["planned"] is True
    world.ready(first)
    assert world.incidents() == [("Left", "job-1-0", 1)]


def test_a_ready_member_that_leaves_is_not_chosen_for_a_round() -> None:
    world = World(2)
    members = [world.hello(i) for i in range(3)]
    world.ready(members[0])
    world.coordinator.leaving(members[0], "ended by SIGTERM")
    world.ready(members[1], members[0])
    assert world.coordinator.rounds.current is None
    world.ready(members[2])
    assert world.ranks() == [1, 2]


# ---- members come back


def test_the_same_process_over_a_new_connection_continues() -> None:
    world, *members = formed(2)
    again = world.resume(0, 1, 0, 2)
    assert again is members[0] and world.report()["state"] == "Running"
    assert world.verbs(members[0])[-1] == "welcome"


def test_a_go_lost_with_the_old_connection_is_sent_again() -> None:
    world = World(2)
    members = [world.hello(i) for i in range(2)]
    world.ready(*members)
    again = world.hello(0)  # it has not received `go` for round 1
    assert again is not members[0] and world.verbs(members[1])[-1] == "restart"
    world.coordinator.ready(again, 0, "h", 1)
    world.ready(members[1])
    assert world.round.number == 2 and sorted(world.ranks()) == [0, 1]


def test_lines_lost_with_the_old_connection_are_sent_again() -> None:
    world = World(2)
    members = [world.hello(i) for i in range(2)]
    world.ready(*members)
    world.join(members[1])
    world.coordinator.finished(members[1], 1)
    world.resume(0, 1, 0, 2, "Finished")
    assert world.report()["state"] == "Succeeded"


def test_a_member_that_returns_while_its_round_drains_is_a_survivor() -> None:
    world, first, second, third = formed(3)
    world.lose(second)
    assert [entry["pod"] for entry in world.report()["lost"]] == ["job-1-0"]
    world.ready(first)
    again = world.resume(1, 1, 1, 3)
    assert world.last(again)[0] == "restart" and world.report()["lost"] == []
    world.ready(third)
    assert world.round.number == 1  # its workers may be alive
    world.ready(again)
    assert world.ranks() == [0, 1, 2]


def test_a_member_that_returns_after_the_group_continued_stops_its_workers() -> None:
    world, first, second, _ = formed(2, spares=1)
    world.lose(second)
    world.ready(first)
    world.join(first, world.coordinator.members.by_index[2])
    again = world.resume(1, 1, 1, 2)
    assert world.last(again)[0] == "restart" and world.last(again)[1]["round"] == 1
    assert world.report()["state"] == "Running"
    world.coordinator.ready(again, 1, "h", 1)
    assert again.state == "Ready" and world.round.number == 2


def test_an_index_belongs_to_its_pod_with_the_highest_attempt() -> None:
    world, *members = formed(2)
    new = world.hello(1, attempt=1)
    assert world.last(members[1])[0] == "stop" and world.last(members[1])[1]["fenced"] is True
    assert world.try_hello(1) is None and world.last(members[1])[1]["fenced"] is True
    world.ready(members[0], new)
    assert world.ranks() == [0, 1] and world.round.number == 2
    assert world.incidents() == [("PeerLost", "job-1-0", 0)]


def test_a_pod_that_the_operator_calls_lost_is_fenced_before_its_connection_ends() -> None:
    world, *members = formed(2)
    world.coordinator.note(members[1], "ColdWorkers", "torch is too old")
    assert world.report()["notes"] == [{"pod": "job-1-0", "kind": "ColdWorkers", "why": "torch is too old"}]
    world.coordinator.gone("job-1-0", "node n2 is lost")
    assert world.last(members[1]) == ("stop", {"ok": False, "why": "node n2 is lost", "fenced": True})
    assert world.last(members[0])[0] == "restart" and world.report()["lost"] == [] and world.report()["notes"] == []
    assert world.try_hello(1) is None


def test_a_deleted_pod_that_does_not_train_is_asked_to_exit() -> None:
    """The pod's launcher has not been notified of the deletion. The launcher of a training pod has,
    and may be saving.
    """
    world, *members = formed(2)
    spare = world.hello(2)
    for pod in ("job-0-0", "job-2-0", "job-3-0"):
        world.coordinator.send_away(pod, "deleted")
    assert world.last(spare) == ("stop", {"ok": False, "why": "deleted", "fenced": True})
    assert all(world.last(member)[0] != "stop" for member in members) and world.ranks() == [0, 1]
    assert world.try_hello(3) is None, "the pod connects after the message"


def test_an_empty_note_withdraws_the_previous_note() -> None:
    """The report contains at most a hundred notes. Regression: notes of pods that had fetched their
    data hid others.
    """
    world, first, second = formed(2)
    world.coordinator.note(first, "Data", "1 of 2 files")
    world.coordinator.note(second, "ColdWorkers", "torch is too old")
    world.coordinator.note(first, "Data", "")
    assert world.report()["notes"] == [{"pod": "job-1-0", "kind": "ColdWorkers", "why": "torch is too old"}]


def test_the_report_dates_a_loss_to_the_members_last_line() -> None:
    world, _, second = formed(2)
    world.silent.add(second.pod)
    world.pass_time(6)
    world.lose(second, "silent for 6 s")
    assert world.report()["lost"] == [
        {"pod": "job-1-0", "index": 1, "since": "1970-01-01T00:16:40.000Z", "why": "silent for 6 s"}
    ]
    world.hello(1, attempt=1)
    assert world.report()["lost"] == []


# ---- the end


def test_spares_are_notified_of_success_when_all_members_have_finished() -> None:
    world, *members = formed(2, spares=1)
    for member in members[:2]:
        world.coordinator.finished(member, 1)
    assert [world.last(m) for m in members] == [("done", {})] * 3
    assert world.try_hello(3) is None and world.heard["job-3-0"] == [("done", {})]


def test_a_finished_node_may_disconnect_before_its_peers_finish() -> None:
    world, first, second = formed(2)
    world.coordinator.finished(second, 1)
    world.lose(second)
    assert world.report()["state"] == "Running"
    world.coordinator.finished(first, 1)
    assert world.report()["state"] == "Succeeded"
    world.pass_time(5)
    assert world.incidents() == []


def test_a_finished_node_that_reconnects_is_still_finished() -> None:
    world, first, second = formed(2)
    world.coordinator.finished(second, 1)
    world.lose(second)
    world.resume(1, 1, 1, 2, "Finished")
    world.fail(first)
    assert world.last(world.coordinator.members.by_index[1])[0] == "restart"  # its work must be repeated


def test_a_member_that_finished_in_a_broken_round_runs_again() -> None:
    world, first, second = formed(2)
    world.lose(second)
    world.coordinator.finished(first, 1)
    assert world.report()["state"] == "Restarting" and world.verbs(first)[-1] == "restart"
    world.ready(first, world.hello(1, attempt=1))
    assert world.round.number == 2


def test_no_round_forms_after_stop() -> None:
    world, *members = formed(2, spares=1)
    world.coordinator.stop(False, "suspended")
    assert [world.last(m) for m in members] == [("stop", {"ok": False, "why": "suspended"})] * 3
    world.lose(members[0])
    world.ready(members[1])
    world.pass_time(100)
    assert world.round.number == 1 and world.report()["state"] == "Stopped" and world.report()["lost"] == []


def test_recovery_is_measured_to_the_next_step() -> None:
    world, first, second = formed(2)
    world.coordinator.report_progress({"step": 1, "automatic": True})
    world.lose(second)
    world.pass_time(3)
    second = world.hello(1, attempt=1)
    world.ready(first, second)
    world.join(first, second)
    assert world.report()["recovery"]["downSince"] is not None  # formed, but no step yet
    world.pass_time(2)
    world.coordinator.report_progress({"step": 1, "automatic": True})
    assert world.report()["recovery"] == {"lastSeconds": pytest.approx(5), "downSince": None}


def test_lagging_ranks_are_forgotten_with_their_round() -> None:
    """The next round numbers its ranks again, so a rank's lag must not pass to a different pod."""
    world, first, second = formed(2)
    world.coordinator.report_progress({"step": 1})
    world.coordinator.report_progress({"stragglers": [{"rank": 1, "slowdown": 2.0}]})
    assert world.report()["progress"]["stragglers"] == [{"rank": 1, "slowdown": 2.0}]
    world.lose(second)
    assert "stragglers" not in world.report()["progress"] and world.report()["progress"]["step"] == 1
    world.coordinator.report_progress({"stragglers": [{"rank": 1, "slowdown": 2.0}]})  # Rank 0 has not ended yet.
    second = world.hello(1, attempt=1)
    world.ready(first, second)
    world.join(first, second)
    assert "stragglers" not in world.report()["progress"] and world.report()["progress"]["step"] == 1


def test_a_report_from_a_fenced_rank_0_does_not_affect_the_next_round() -> None:
    world, first, second = formed(2)
    world.coordinator.report_progress({"step": 1})
    world.lose(second)
    second = world.hello(1, attempt=1)
    world.ready(first, second)
    world.join(first, second)
    lag, number = [{"rank": 1, "slowdown": 2.0}], world.report()["round"]
    before = world.report()
    for fenced in (f"{before['generation']}.{number - 1}", f"{before['generation'] + 1}.{number}"):
        world.coordinator.report_progress(progress.check({"stragglers": lag, "round": fenced}))
        assert world.report() == before
    world.coordinator.report_progress(progress.check({"stragglers": lag, "round": f"{before['generation']}.{number}"}))
    assert world.report()["progress"]["stragglers"] == lag and "round" not in world.report()["progress"]
    world.coordinator.report_progress(progress.check({"stragglers": [], "round": f"{before['generation']}.1"}))
    assert world.report()["progress"]["stragglers"] == lag, "nor does it withdraw the reported ranks"


def test_a_stopped_group_stays_stopped_when_the_last_node_joins() -> None:
    world = World()
    first, second = (world.hello(i) for i in range(2))
    world.ready(first, second)
    world.join(first)
    world.coordinator.stop(False, "suspended")
    world.join(second)
    assert world.report()["state"] == "Stopped"


def test_the_stacks_of_one_round_are_not_used_in_the_next() -> None:
    """A coordinator that is superseded while it collects stacks must not conclude from missing
    stacks that nothing had hung in the later round.
    """
    world = World(attempt=1, hang_after=10.0)
    for index in range(2):
        world.resume(index, 7, index, 2)
    world.coordinator.report_progress({"step": 1})
    world.pass_time(11)
    assert world.report()["state"] == "Restarting"
    again = [world.resume(index, 8, index, 2, attempt=1) for index in range(2)]
    assert world.report()["state"] == "Running" and world.round.number == 8
    world.fail(again[0])
    world.pass_time(5)
    assert [kind for kind, _, _ in world.incidents()] == ["WorkerFailed"]


def test_a_reconnection_does_not_extend_the_time_for_stopping_the_workers() -> None:
    world, first, second = formed()
    world.fail(first)
    world.pass_time(DRAIN_SECONDS - 1)
    assert world.resume(1, 1, second.rank or 0, 2) is second
    assert [verb for verb in world.verbs(second) if verb == "restart"] == ["restart"] * 2
    world.pass_time(2)
    assert world.last(second)[0] == "stop"


@pytest.mark.parametrize("peer_first", [True, False], ids=["its peer has reported", "no member has reported"])
def test_a_failure_whose_report_was_lost_with_a_link_is_still_the_cause(peer_first: bool) -> None:
    """Regression: the peer whose connection to the failed member was reset was blamed, or only a
    loss was known.
    """
    world, first, second = formed()
    world.silent.add(second.pod)
    world.pass_time(1)
    if peer_first:
        world.fail(first, RESET)
        world.ready(first)
    world.pass_time(5)
    assert world.resume(1, 1, 1, 2, "Ready") is second
    world.silent.clear()
    world.fail(second, "ValueError: bug", ago=5)
    world.ready(second)
    world.ready(first)
    world.pass_time(1)
    assert world.incidents() == [("WorkerFailed", second.pod, int(peer_first))]


def test_a_failure_that_is_reported_again_counts_once() -> None:
    world = World(nodes=3)
    members = world.form(3)
    world.fail(members[0], RESET)
    for ago in (0.0, 0.1):
        world.fail(members[1], "ValueError: bug", ago=ago)
    world.pass_time(1)
    assert world.incidents() == [("WorkerFailed", members[1].pod, 1)]


# ---- time limits of waits


def test_a_read_that_times_out_returns_none_and_keeps_the_partial_line() -> None:
    async def hear() -> tuple[bytes | None, bytes | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"half a ")
        late = await within(0.01, reader.readline())
        reader.feed_data(b"line\n")
        return late, await within(60, reader.readline())

    assert asyncio.run(hear()) == (None, b"half a line\n")


def test_a_line_that_arrived_while_the_process_was_stopped_is_not_missed() -> None:
    async def hear() -> bytes | None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)

        def stand_still() -> None:
            theirs.sendall(b"a line\n")
            time.sleep(0.1)

        asyncio.get_running_loop().call_soon(stand_still)
        line = await within(0.05, reader.readline())
        writer.close()
        theirs.close()
        return line

    assert asyncio.run(hear()) == b"a line\n"


def test_a_cancelled_wait_ends_immediately() -> None:
    async def cancel() -> str:
        task = asyncio.ensure_future(within(60, asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        try:
            return str(await task)
        except asyncio.CancelledError:
            return "cancelled"

    assert asyncio.run(cancel()) == "cancelled"
