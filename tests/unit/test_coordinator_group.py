"""The coordinator's decisions, without sockets: time is a number, members' lines are collected in lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ddpjob.podfiles
import pytest

sys.path.insert(0, str(Path(ddpjob.podfiles.__file__).parent))  # as in a job pod: flat files

from attribution import COMMUNICATION_ERROR, Failure, Loss, Place, judge
from group import Group, Member

RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


class World:
    """A group with a clock that is turned by hand."""

    def __init__(self, nodes: int = 2) -> None:
        self.now, self.pending = 1000.0, []  # type: float, list[tuple[float, Any]]
        self.group = Group(nodes, 0, lambda: self.now, lambda s, f: self.pending.append((self.now + s, f)), lambda: None)
        self.heard: dict[str, list[tuple[str, dict[str, Any]]]] = {}

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while due := sorted((p for p in self.pending if p[0] <= until), key=lambda p: p[0]):
            self.pending.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
        self.now = until

    def hello(self, index: int, attempt: int = 0, pid: int = 1) -> Member:
        pod = f"job-{index}-{attempt}"
        lines = self.heard.setdefault(pod, [])
        member = self.group.hello(pod, index, attempt, pid, lambda verb, fields: lines.append((verb, fields)))
        assert member is not None
        return member

    def form(self, number: int = 0, nodes: int = 2) -> list[Member]:
        members = [self.group.members.get(i) or self.hello(i) for i in range(nodes)]
        for rank, member in enumerate(members):
            self.group.joining(member)
            self.group.joined(member, number, rank, nodes)
        assert self.group.state == "Running"
        return members

    def verbs(self, member: Member) -> list[str]:
        return [verb for verb, _ in self.heard[member.pod]]

    def fail(self, member: Member, message: str = "ValueError: bug", code: int = 1, number: int = 0, ago: float = 0.0) -> None:
        signal = None if code > 0 else "SIGKILL"
        self.group.failure(member, number, Failure(member.place, 0, 0, code, signal, message, "", self.now - ago))

    def incidents(self) -> list[tuple[str, str, int]]:
        return [(i["kind"], i["pod"], i["consequences"]) for i in self.group.incidents]


def test_the_first_exception_is_the_cause_even_when_its_consequence_is_heard_first() -> None:
    world = World()
    first, second = world.form()
    world.fail(first, RESET)
    assert world.verbs(second) == ["welcome"]  # it may be writing its own traceback: not disturbed yet
    world.pass_time(0.4)
    world.fail(second, "ValueError: bug", ago=0.6)
    world.pass_time(2)
    assert world.incidents() == [("WorkerFailed", "job-1-0", 1)]


def test_a_worker_that_hangs_is_told_although_only_connection_errors_are_known() -> None:
    world = World()
    first, second = world.form()
    world.fail(first, RESET)
    world.pass_time(1.01)
    assert world.verbs(second) == ["welcome", "restart"]
    assert world.incidents() == [("WorkerFailed", "job-0-0", 0)]  # nothing better is known


def test_a_failing_worker_restarts_the_others_at_once() -> None:
    world = World()
    first, second = world.form()
    world.fail(first)
    assert world.verbs(second)[-1] == "restart" and "restart" not in world.verbs(first)
    assert world.group.state == "Restarting"


def test_a_lost_peers_consequences_are_not_causes() -> None:
    world = World(3)
    _, second, third = world.form(nodes=3)
    world.group.lost(second, "its connection ended")
    world.fail(third, "RuntimeError: training step failed", ago=-0.2)  # the script wrapped the connection error
    world.pass_time(1.01)
    assert world.incidents() == [("PeerLost", "job-1-0", 1)]


def test_a_worker_killed_together_with_its_pod_is_the_pods_loss() -> None:
    world = World()
    first, _ = world.form()
    world.fail(first, "killed by signal SIGKILL", code=-9)
    world.group.lost(first, "its connection ended")
    world.pass_time(1.01)
    assert world.incidents() == [("PeerLost", "job-0-0", 1)]


def test_a_worker_killed_alone_is_a_failure() -> None:
    world = World()
    first, second = world.form()
    world.fail(first, "killed by signal SIGKILL", code=-9)
    world.fail(second, RESET)
    world.pass_time(1.01)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 1)]
    assert world.group.incidents[0]["signal"] == "SIGKILL"


def test_an_exception_before_the_pods_loss_is_the_cause() -> None:
    world = World()
    first, _ = world.form()
    world.fail(first, "ValueError: bug")
    world.pass_time(0.3)
    world.group.lost(first, "its connection ended")
    world.pass_time(1)
    assert [i[0] for i in world.incidents()] == ["WorkerFailed"]


def test_leaving_is_no_failure_and_nobody_is_hurried() -> None:
    world = World()
    first, second = world.form()
    world.group.leaving(second, "told to end by SIGTERM")
    world.fail(first, "SystemExit: 75", code=75)
    assert world.verbs(second) == ["welcome"]  # rank 0 may still be saving there
    world.pass_time(5)
    assert world.incidents() == [("Left", "job-1-0", 1)]
    world.group.lost(second, "its connection ended")
    world.pass_time(5)
    assert world.incidents() == [("Left", "job-1-0", 1)]


def test_a_left_member_frees_peers_that_hang() -> None:
    world = World()
    first, second = world.form()
    world.group.leaving(second, "told to end by SIGTERM")
    world.pass_time(3)
    world.group.lost(second, "its connection ended")
    assert world.verbs(first) == ["welcome", "restart"]
    world.pass_time(1.01)
    assert world.incidents() == [("Left", "job-1-0", 0)]


def test_a_member_that_dies_before_it_could_say_joined_breaks_the_round() -> None:
    world = World()
    first, second = world.hello(0), world.hello(1)
    world.group.joining(first)
    world.group.joining(second)
    world.group.joined(first, 0, 0, 2)
    world.group.lost(second, "its connection ended")
    assert world.verbs(first) == ["welcome", "restart"]
    world.pass_time(1.01)
    assert world.incidents() == [("PeerLost", "job-1-0", 0)]


def test_one_that_joins_a_broken_round_is_sent_back() -> None:
    world = World(3)
    members = [world.hello(i) for i in range(3)]
    for m in members:
        world.group.joining(m)
    world.group.joined(members[0], 0, 0, 3)
    world.group.lost(members[1], "its connection ended")
    world.group.joined(members[2], 0, 2, 3)
    assert world.verbs(members[2])[-1] == "restart"


def test_finished_in_a_broken_round_is_run_again() -> None:
    world = World()
    first, second = world.form()
    world.group.lost(second, "its connection ended")
    world.group.finished(first, 0)
    assert world.verbs(first).count("restart") == 2 and world.group.state == "Restarting"


def test_a_finished_node_may_go_before_its_peers() -> None:
    world = World()
    first, second = world.form()
    world.group.finished(second, 0)
    world.group.lost(second, "its connection ended")
    world.group.finished(first, 0)
    assert world.group.state == "Succeeded" and world.verbs(first)[-1] == "done"
    world.pass_time(5)
    assert world.incidents() == []


def test_a_finished_place_runs_again_when_the_round_breaks_after_all() -> None:
    world = World(3)
    first, second, _ = world.form(nodes=3)
    world.group.finished(second, 0)
    world.group.lost(second, "its connection ended")
    replacement = world.hello(1, attempt=1)
    assert world.verbs(replacement) == []
    world.fail(first)
    assert world.verbs(replacement) == ["welcome"]


def test_recovery_is_measured_to_the_next_step() -> None:
    world = World()
    world.form()
    world.group.report_progress({"step": 1, "automatic": True})
    world.group.lost(world.group.members[1], "its connection ended")
    world.pass_time(3)
    world.hello(1, attempt=1)
    world.form(number=1)
    assert world.group.report()["recovery"]["downSince"] is not None  # formed, but no step yet
    world.pass_time(2)
    world.group.report_progress({"step": 1, "automatic": True})
    assert world.group.report()["recovery"] == {"lastSeconds": pytest.approx(5), "downSince": None}


def test_each_round_has_its_own_incident() -> None:
    world = World()
    for number in range(60):
        first, _ = world.form(number)
        world.fail(first, f"ValueError: {number}", number=number)
        world.pass_time(1.01)
        world.group.joining(world.group.members[1])
    assert len(world.group.incidents) == 50 and world.group.incidents[-1]["id"] == 60
    assert world.group.counts == {"WorkerFailed": 60}


def test_a_late_report_of_an_old_round_changes_nothing() -> None:
    world = World()
    first, second = world.form()
    world.fail(first)
    world.group.joining(second)
    world.form(1)
    world.fail(second, RESET, number=0)
    world.pass_time(5)
    assert [i[0] for i in world.incidents()] == ["WorkerFailed"] and not world.group.round.broken  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RESET, True),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited", True),
        ("DistNetworkError: The client socket has timed out after 60000ms", True),
        ("RuntimeError: Socket Timeout", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("ValueError: unknown augmentation 'gloom'", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("AssertionError: loss is nan", False),
    ],
)
def test_which_errors_a_peers_death_brings(text: str, expected: bool) -> None:
    assert bool(COMMUNICATION_ERROR.search(text)) is expected


def test_an_abort_is_no_cause_where_a_bug_is() -> None:
    place = Place("p", 0)
    abort = Failure(place, 0, 0, -6, "SIGABRT", "killed by signal SIGABRT", "", 1.0)
    bug = Failure(place, 1, 1, 1, None, "KeyError: 'x'", "", 1.2)
    verdict = judge([abort, bug], [])
    assert verdict is not None and verdict.fields["rank"] == 1
    alone = judge([abort], [])
    assert alone is not None and alone.kind == "WorkerFailed"
    lost = judge([abort], [Loss(place, 0, "gone", 2.0, leaving=False)])
    assert lost is not None and lost.kind == "PeerLost"
    assert judge([], []) is None
