"""How the coordinator finds hangs and reports them."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_world import World, formed
from ddpjob_runtime.protocol import RANK_ENDED, RANK_FAILED, iso, time_of

DUMP = """Thread 0x00007f4a12345640 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait

Current thread 0x00007f4a99999740 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "train.py", line 30 in <module>
"""


def test_hang_and_back_off_limits_can_change_while_the_group_runs() -> None:
    world, *members = formed(2)
    world.coordinator.report_progress({"step": 1})
    world.pass_time(100)
    world.coordinator.set_patience(120, 3, 9)
    assert (world.report()["hangAfter"], world.report()["backoff"]) == (120, [3, 9])
    world.pass_time(19)
    assert "dump" not in world.verbs(members[0])
    world.pass_time(1.1)
    assert world.last(members[0]) == ("dump", {"round": 1})


def test_a_hang_is_reported_with_stacks_and_resolved_by_a_restart() -> None:
    world, *members = formed(2, hang_after=60.0)
    for step in range(3):
        world.pass_time(50)
        world.coordinator.report_progress({"step": step})
    world.pass_time(59)
    assert world.report()["state"] == "Running"
    world.pass_time(1.1)
    assert [world.last(m) for m in members] == [("dump", {"round": 1})] * 2
    world.coordinator.stacks(members[0], 1, 0, DUMP)
    world.coordinator.stacks(members[0], 1, 1, DUMP.replace("2810 in all_reduce", "99 in barrier"))
    world.pass_time(1)
    assert "restart" not in world.verbs(members[0])
    world.coordinator.stacks(members[1], 1, 2, DUMP)
    world.pass_time(0.4)
    assert world.last(members[1]) == ("restart", {"round": 1, "why": "the group hangs", "planned": False})
    incident = world.report()["incidents"][0]
    assert incident["kind"] == "Hang" and incident["pod"] is None
    where = "all_reduce (/venv/torch/distributed/distributed_c10d.py:2810)"
    assert incident["message"].startswith(f"no step for 60 s: rank 0 in {where}; rank 1 in barrier (")
    assert "rank 2:\n" in incident["traceback"] and "train.py" in incident["traceback"]
    world.fail(members[0], "killed by signal SIGKILL", code=-9)
    world.ready(*members)
    assert world.round.number == 2 and len(world.incidents()) == 1


def test_ranks_that_have_exited_or_failed_are_listed_first_in_a_hang() -> None:
    """The others wait for these ranks, and only eight are listed."""
    world, only = formed(1, hang_after=60.0)
    world.pass_time(60.1)
    texts = {10: f"{RANK_FAILED}ValueError: bug\n{DUMP}", 11: RANK_ENDED}
    for rank in range(12):
        world.coordinator.stacks(only, 1, rank, texts.get(rank, DUMP))
    world.pass_time(4)
    message = world.report()["incidents"][0]["message"]
    first = "rank 10 has failed, and its process has not ended (ValueError: bug); rank 11 has ended"
    assert message.startswith(f"no step for 60 s: {first}; rank 0 in all_reduce (") and "4 more" in message


ELSEWHERE = DUMP.replace("2810 in all_reduce", "12 in read_sample")
BARRIER = DUMP.replace("2810 in all_reduce", "99 in barrier")


@pytest.mark.parametrize(
    ("stacks", "named"),
    [
        ([DUMP, ELSEWHERE, DUMP], "job-1-0"),
        ([DUMP], None),
        ([DUMP, ELSEWHERE], None),
        ([DUMP, DUMP, DUMP], None),
        ([DUMP, ELSEWHERE, BARRIER], None),
        ([DUMP, f"{RANK_FAILED}ValueError: bug\n{DUMP}"], "job-1-0"),
        ([DUMP, f"{RANK_FAILED}ValueError: bug\n{DUMP}", f"{RANK_FAILED}ValueError: bug\n{DUMP}"], None),
    ],
)
def test_a_hang_is_attributed_to_the_pod_that_the_others_wait_for(stacks: list[str], named: str | None) -> None:
    world = World(len(stacks), hang_after=60.0)
    members = world.form(len(stacks))
    world.pass_time(60.1)
    for rank, (member, text) in enumerate(zip(members, stacks)):
        world.coordinator.stacks(member, 1, rank, text)
    world.pass_time(4)
    [incident] = world.report()["incidents"]
    assert (incident["kind"], incident["pod"]) == ("Hang", named)


def test_a_pause_of_the_coordinator_is_not_a_hang() -> None:
    """All processes of a machine stop together if a container or virtual machine is paused."""
    world, *members = formed(2, hang_after=60.0)
    world.pass_time(50)
    world.coordinator.stood_still(45.0)
    world.pass_time(54)
    assert "dump" not in world.verbs(members[0])
    world.pass_time(1.1)
    assert world.last(members[0]) == ("dump", {"round": 1})


def looked_at(world: World, members: list[Any], *idle: bool | None) -> str:
    """Let the limit pass, answer the coordinator's check with each rank's activity, and return the
    state.
    """
    dumps = world.verbs(members[0]).count("dump")
    world.pass_time(60.1)
    assert world.verbs(members[0]).count("dump") == dumps + 1
    for rank, (member, still) in enumerate(zip(members, idle)):
        world.coordinator.stacks(member, 1, rank, DUMP, still)
    world.pass_time(0.5)
    return str(world.report()["state"])


@pytest.mark.parametrize("counted", [False, True], ids=["no step was ever counted", "the optimizer was compiled"])
def test_a_group_whose_steps_cannot_be_counted_does_not_hang_while_a_rank_works(counted: bool) -> None:
    world, *members = formed(2, hang_after=60.0)
    if counted:
        world.coordinator.report_progress({"step": 9, "automatic": True})
        world.coordinator.report_progress({"step": 9, "automatic": True, "uncountable": True})
    assert looked_at(world, members, None, None) == "Running", "the first check has nothing to compare with"
    assert bool(world.report()["progress"].get("uncountable")) is counted, (
        "ranks whose activity is unknown prove nothing"
    )
    assert looked_at(world, members, True, False) == "Running"
    assert world.report()["progress"]["uncountable"] is True
    assert looked_at(world, members, True, None) == "Running"
    assert looked_at(world, members, True, True) == "Restarting"
    [incident] = world.report()["incidents"]
    assert incident["kind"] == "Hang" and ": rank 0 in all_reduce (" in incident["message"]


def test_a_member_that_does_not_answer_is_not_known_to_be_idle() -> None:
    """Its rank may be working, on a host that is busy."""
    world, *members = formed(2, hang_after=60.0)
    looked_at(world, members, None, None)
    assert looked_at(world, members, True) == "Running"
    world.pass_time(5)
    assert world.report()["state"] == "Running"
    assert looked_at(world, members, True, True) == "Restarting"


def test_ranks_that_wait_for_a_leaving_member_do_not_hang() -> None:
    """The leaving member may use its whole grace period to save."""
    world, *members = formed(2, hang_after=60.0)
    world.coordinator.report_progress({"step": 9})
    world.coordinator.leaving(members[0], "ended by SIGTERM")
    world.pass_time(100)
    assert "dump" not in world.verbs(members[1]) and world.report()["state"] == "Running"


def test_a_script_that_reports_its_steps_is_countable_even_if_compiled() -> None:
    world, *members = formed(2, hang_after=60.0)
    world.coordinator.report_progress({"step": 9, "automatic": True, "uncountable": True})
    world.coordinator.report_progress({"step": 1})
    world.coordinator.report_progress({"step": 10, "automatic": True, "uncountable": True})
    assert "uncountable" not in world.report()["progress"]
    world.pass_time(60.1)
    assert world.report()["state"] == "Restarting" and world.last(members[0])[0] == "dump"


def test_a_hang_whose_ranks_send_no_stack_is_still_reported() -> None:
    world, *members = formed(2, hang_after=60.0)
    world.coordinator.report_progress({"step": 1})
    world.pass_time(60.1)
    world.pass_time(3.1)
    assert world.last(members[0])[0] == "restart"
    assert world.report()["incidents"][0]["message"] == "no step for 60 s: no rank reported its stack"


def overdue(seconds: float = 30) -> tuple[World, list[Any]]:
    """Return a group without a step limit whose next step takes far longer than the usual
    `seconds`. Its ranks have sent their stacks.
    """
    world, *members = formed(2)
    for step in range(20):
        assert "dump" not in world.verbs(members[0])
        world.pass_time(seconds)
        world.coordinator.report_progress({"step": step})
    world.pass_time(max(300, 20 * seconds) - 1)
    assert "dump" not in world.verbs(members[0])
    world.pass_time(2)
    assert "dump" in world.verbs(members[0])
    for rank, member in enumerate(members):
        world.coordinator.stacks(member, 1, rank, DUMP)
    world.pass_time(3)
    return world, members


@pytest.mark.parametrize("seconds", [0.5, 30])
def test_without_a_limit_a_step_far_slower_than_usual_is_only_reported(seconds: float) -> None:
    world, members = overdue(seconds)
    said = world.report()["overdue"]
    assert said["where"].startswith("rank 0 in all_reduce (") and "rank 1 in all_reduce (" in said["where"]
    assert "rank 1:\n" in said["traceback"] and said["activity"] == ""
    assert said["since"] == iso(time_of(1000 + 20 * seconds))
    world.pass_time(100_000)
    assert world.report()["state"] == "Running" and world.incidents() == []
    assert [world.verbs(m).count("dump") for m in members] == [1, 1], "once"
    news = world.report()["news"]
    world.coordinator.report_progress({"step": 20})
    assert world.report()["overdue"] is None and world.report()["news"] > news
    world.pass_time(100_000)
    assert world.report()["overdue"] is None, "by now, gaps of this length are usual for the group"


def test_setting_a_limit_while_a_step_is_overdue_ends_the_round() -> None:
    world, members = overdue()
    world.coordinator.set_patience(60, 1, 60)
    world.pass_time(4)
    assert world.last(members[0])[0] == "restart" and world.report()["overdue"] is None
    assert world.report()["incidents"][0]["message"].startswith("no step for 604 s: no rank reported its stack")


def test_setting_a_limit_above_the_waiting_time_withdraws_the_overdue_step() -> None:
    """Otherwise the overdue step would be shown as if the group had no limit. It is reported again
    once the limit is removed.
    """
    world, _ = overdue()
    world.coordinator.set_patience(3600, 1, 60)
    assert (world.report()["overdue"], world.report()["hangAfter"]) == (None, 3600)
    world.coordinator.set_patience(None, 1, 60)
    assert world.report()["overdue"] is not None


def test_the_activity_that_the_script_reports_is_shown_with_the_overdue_step() -> None:
    world = World(2)
    world.form()
    for step in range(20):
        world.coordinator.report_progress({"step": step})
        world.pass_time(1)
    world.coordinator.report_progress({"activity": "evaluating"})
    assert world.report()["progress"]["activity"] == "evaluating" and world.report()["progress"]["step"] == 19
    world.pass_time(299)
    assert world.report()["overdue"] is None
    world.pass_time(5)
    assert world.report()["overdue"]["activity"] == "evaluating"
    world.coordinator.report_progress({"activity": "evaluating"})
    assert world.report()["overdue"] is None, "it has made progress"
    world.coordinator.report_progress({"step": 20})
    assert "activity" not in world.report()["progress"]


def test_a_reported_activity_does_not_end_a_downtime_or_replace_the_step_counter() -> None:
    world, *members = formed(2)
    world.coordinator.report_progress({"automatic": True, "step": 1})
    world.fail(members[0])
    world.ready(*members)
    world.join(*members)
    down = world.report()["recovery"]["downSince"]
    world.coordinator.report_progress({"activity": "evaluating"})
    assert down is not None and world.report()["recovery"]["downSince"] == down
    world.coordinator.report_progress({"automatic": True, "step": 2})
    assert world.report()["progress"]["step"] == 2 and world.report()["recovery"]["downSince"] is None


def test_the_first_step_of_the_job_is_awaited_although_it_follows_a_break() -> None:
    world, *members = formed(2)
    world.fail(members[0])
    world.ready(*members)
    world.join(*members)
    assert world.report()["recovery"]["lastSeconds"] < 5
    world.pass_time(9)
    world.coordinator.report_progress({"automatic": True, "step": 1})
    assert 9 <= world.report()["recovery"]["lastSeconds"] < 14


def test_a_reported_upload_is_shown_but_does_not_count_as_progress() -> None:
    world, *members = formed(2, hang_after=60.0)
    world.coordinator.report_progress({"step": 1})
    world.fail(members[0])
    world.ready(*members)
    world.join(*members)
    world.coordinator.report_progress({"activity": "evaluating"})
    before = world.report()
    world.pass_time(55)
    copied = {"copyStep": 1, "copyTime": 1000, "copyBehind": 0.0}
    world.coordinator.report_progress({"metrics": copied})
    after = world.report()
    assert after["progress"] == {**before["progress"], "metrics": copied} and after["recovery"] == before["recovery"]
    assert before["recovery"]["downSince"] is not None and after["progress"]["activity"] == "evaluating"
    world.pass_time(6)
    assert world.last(members[0])[0] == "dump", "no step for 60 s"


def test_the_users_limit_applies_during_an_activity_and_the_incident_names_it() -> None:
    world = World(2, hang_after=60.0)
    world.form()
    world.coordinator.report_progress({"activity": "saving a checkpoint"})
    world.pass_time(64)
    assert "no step for 60 s (the script reports: saving a checkpoint): " in world.report()["incidents"][0]["message"]


def test_without_a_limit_and_with_few_reports_no_hang_is_reported() -> None:
    world, *members = formed(2)
    for step in range(19):
        world.coordinator.report_progress({"step": step})
    world.pass_time(100_000)
    assert "dump" not in world.verbs(members[0])


def test_a_group_that_finishes_is_not_a_hang() -> None:
    world, *members = formed(2, hang_after=60.0)
    world.coordinator.finished(members[0], 1)
    world.pass_time(1000)
    assert "dump" not in world.verbs(members[1])
