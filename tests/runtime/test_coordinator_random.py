"""Random histories of a group: members join, fail, die and lose connections with undelivered lines,
and coordinators restart.

In each history there is at most one round at a time, it has the announced members and ranks, and
each break has one incident. The group trains again when the faults end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from coordinator_world import FAST, RESET, STANDARD, CoordinatorSettings, WorkerFailure, World

pytest.importorskip("hypothesis", reason="only this file of tests/runtime needs it")
from hypothesis import given, settings
from hypothesis import strategies as st

PLACES = 5


class Node:
    """A launcher that follows the protocol. A line arrives when `read` is called, or never."""

    def __init__(self, life: Life, index: int, attempt: int) -> None:
        self.life, self.index, self.attempt, self.pod = life, index, attempt, f"job-{index}-{attempt}"
        self.alive, self.booted, self.leaving, self.stuck = True, False, False, False
        self.member: Any = None
        self.send: Any = None
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.words: list[Callable[[], None]] = []  # on their way to the coordinator
        self.place: dict[str, Any] = {}  # round, rank, world, state
        self.said_ready, self.joined, self.notified = False, False, False
        self.connect()

    @property
    def working(self) -> bool:
        """Whether the node's workers may be alive."""
        return self.alive and self.place.get("state") in ("Running", "Finished")

    def connect(self) -> None:
        """Send hello over a new connection. Lines on the old one are lost."""
        lines: list[tuple[str, dict[str, Any]]] = []
        self.lines, self.words, coordinator = lines, [], self.life.world.coordinator

        def send(verb: str, fields: dict[str, Any]) -> None:
            lines.append((verb, fields))
            self.life.sent(self, verb, fields)

        self.send = send
        resume = dict(self.place) or None
        self.member = coordinator.hello(self.pod, self.index, self.attempt, 1, send, 20.0, resume)

    def disconnect(self) -> None:
        """Let the coordinator see the end of the connection."""
        member, self.member = self.member, None
        if member is not None and member.send is self.send:
            self.life.world.coordinator.lost(member, "its connection ended")

    def die(self) -> None:
        """Remove the pod. Its last lines arrive before the end of its connection."""
        self.alive = False
        while self.words:
            self.deliver()
        self.disconnect()

    def deliver(self) -> None:
        """Deliver one of the node's lines to the coordinator."""
        if self.words:
            word = self.words.pop(0)
            if self.member is not None:
                word()

    def read(self) -> None:
        """Read one line from the coordinator."""
        if not self.lines or not self.alive:
            return
        verb, fields = self.lines.pop(0)
        if verb in ("stop", "refused"):
            self.die()
        elif verb == "welcome" and self.said_ready:
            self._say_ready()
        elif verb == "go" and self.said_ready and fields["round"] > self.place.get("round", 0):
            self.place = {
                "round": fields["round"],
                "rank": fields["rank"],
                "world": fields["world"],
                "state": "Running",
            }
            self.said_ready = self.joined = self.notified = False
        elif verb == "restart" and self.working and fields["round"] >= self.place["round"]:
            self.notified = True
        elif verb == "dump" and self.member is not None:
            member, number = self.member, fields["round"]
            self.words.append(lambda: self.life.world.coordinator.stacks(member, number, 0, "stack"))

    def work(self) -> None:
        """Do the next thing that the protocol requires."""
        if not self.alive or self.member is None or self.leaving or self.stuck:
            return
        coordinator = self.life.world.coordinator
        if not self.booted:
            self.booted = True
            self._be_ready()
        elif self.working and self.notified:
            self._be_ready()
        elif self.working and not self.joined:
            self.joined = True
            member, number = self.member, self.place["round"]
            self.words.append(lambda: coordinator.joined(member, number))

    def _be_ready(self) -> None:
        if self.place:
            self.place["state"] = "Ready"
        self.said_ready = True
        self._say_ready()

    def _say_ready(self) -> None:
        member, after, coordinator = self.member, self.place.get("round", 0), self.life.world.coordinator
        if member is not None:
            self.words.append(lambda: coordinator.ready(member, after, "10.0.0.1", 4000 + self.index))

    def fail(self, message: str, code: int = 1) -> None:
        """Make a worker fail. The launcher stops the others."""
        if self.working and self.member is not None and self.place["state"] == "Running" and not self.leaving:
            member, number, world = self.member, self.place["round"], self.life.world
            failure = WorkerFailure(member.source, 0, 0, code, None, message, "", world.now)
            self.words.append(lambda: world.coordinator.failure(member, number, failure))
            self.notified = True

    def end_with_0(self) -> None:
        """Let one of its workers exit with 0. The exit is reported together with other workers'
        errors, but is not an error itself.
        """
        if self.working and self.member is not None:
            member, number, world = self.member, self.place["round"], self.life.world
            failure = WorkerFailure(member.source, 0, 0, 0, None, "ended with exit code 0", "", world.now)
            self.words.append(lambda: world.coordinator.failure(member, number, failure))

    def leave(self) -> None:
        """Ask the pod to stop."""
        if self.alive and self.member is not None and not self.leaving:
            self.leaving = True
            member, coordinator = self.member, self.life.world.coordinator
            self.words.append(lambda: coordinator.leaving(member, "ended by SIGTERM"))


class Life:
    """A job's nodes and its coordinators."""

    def __init__(self, mode: str, ordered: bool) -> None:
        self.attempt, self.mode, self.ordered = 0, mode, ordered
        self.world = World(3, 2, mode=mode, hang_after=50.0, ordered=ordered)
        self.nodes: list[Node] = []
        self.attempts = dict.fromkeys(range(PLACES), 0)
        self.going: dict[str, Any] = {}  # the round whose `go` is being sent, and the pods notified so far
        self.highest, self.restarted_at = 0, 0.0
        self.expected: set[str] = set()  # members of a round that the last coordinator did not break
        self.rounds: list[Any] = []
        self.listen()
        self.nodes.extend(Node(self, i, 0) for i in range(PLACES))
        if ordered:
            self.world.coordinator.set_order([node.pod for node in self.nodes])

    def listen(self) -> None:
        """Record every broken round, including rounds that begin and break between two checks."""
        course = self.world.coordinator.rounds
        breaks = course.on_break

        def broken(current: Any) -> None:
            self.rounds.append(current)
            breaks(current)

        course.on_break = broken  # type: ignore[method-assign]

    def sent(self, node: Node, verb: str, fields: dict[str, Any]) -> None:
        """Check each `go` as it is sent."""
        if verb != "go":
            return
        coordinator = self.world.coordinator
        if self.going.get("round") != fields["round"]:
            self.all_notified()
            assert fields["round"] > self.highest, "a round's number was used twice"
            last, self.highest = self.highest, fields["round"]
            chosen = {member.pod: rank for rank, member in coordinator.rounds.current.members.items()}
            assert sorted(chosen.values()) == list(range(fields["world"]))
            self.check_order(chosen)
            self.going = {"round": fields["round"], "members": fields["members"], "notified": {}, "chosen": chosen}
            assert coordinator.rounds.size.min_nodes <= fields["world"] <= coordinator.rounds.size.nodes
            for other in self.nodes:
                held = other.working and not other.leaving and (other.member is not None or self.expects(other))
                assert not held or any(v == "stop" for v, _ in other.lines) or self.given_up(other, last), (
                    f"{other.pod} still has workers"
                )
        assert node.said_ready, f"{node.pod} has not sent ready"
        assert fields["members"] == self.going["members"] and len(fields["members"]) == 1
        self.going["notified"][node.pod] = fields["rank"]

    def check_order(self, ranks: dict[str, int]) -> None:
        """Check that index 0 has rank 0, and that the others follow the latest order, or their
        indices without an order.
        """
        places, indices = self.world.coordinator.rounds.order.places, {n.pod: n.index for n in self.nodes}
        ranked = sorted((pod for pod in ranks if indices[pod]), key=lambda pod: ranks[pod])
        assert ranked == sorted(ranked, key=lambda pod: (places.get(pod, 99), indices[pod]))
        assert all(ranks[pod] == 0 for pod in ranks if indices[pod] == 0)

    def expects(self, node: Node) -> bool:
        """Whether the coordinator has just started and may still learn of the node's round."""
        return node.pod in self.expected and self.world.now < self.restarted_at + 4.0

    def given_up(self, node: Node, last: int) -> bool:
        """Whether the group has continued without the node and has notified it."""
        notified = node.notified or any(verb == "restart" for verb, _ in node.lines)
        return notified and node.place["round"] < last

    def all_notified(self) -> None:
        """Check that the last `go` reached exactly the members of its round, with the address of
        its rank 0.
        """
        if self.going:
            assert self.going["chosen"] == self.going["notified"]
            [first] = self.going["members"]
            assert (first["rank"], self.going["notified"][first["pod"]]) == (0, 0)

    def check(self) -> None:
        """Check the invariants, after each step."""
        self.all_notified()
        current = self.world.coordinator.rounds.current
        if current is not None and (not self.rounds or self.rounds[-1] is not current):
            self.rounds.append(current)
        over = all(r.judged for r in self.rounds if r is not current)
        assert over, "a round began before the previous one was over"
        judged = len({id(r) for r in self.rounds if r.broken and r.judged})
        reported = sum(self.world.coordinator.rounds.incidents.counts.values())
        assert reported == judged, f"{reported} incidents for {judged} breaks"

    def restart_coordinator(self) -> None:
        """Close all connections. The next coordinator starts with no state except its attempt
        number.
        """
        self.attempt += 1
        last = self.world.coordinator.rounds.current
        whole = last is not None and not last.broken and not self.world.coordinator.rounds.held
        self.expected = {
            n.pod for n in self.nodes if whole and last is not None and n.place.get("round") == last.number
        }
        self.restarted_at = self.world.now
        size = self.world.coordinator.rounds.size
        more = {"mode": self.mode, "attempt": self.attempt, "hang_after": 50.0, "ordered": self.ordered}
        self.world.restart_coordinator(CoordinatorSettings(size.nodes, size.min_nodes, **more))
        self.rounds = []
        self.listen()
        for node in self.nodes:
            node.member = None

    def replace(self, index: int) -> None:
        """Start another attempt at an index whose last pod is dead."""
        if any(n.alive for n in self.nodes if n.index == index):
            return
        self.attempts[index] += 1
        self.nodes = [n for n in self.nodes if n.index != index]
        self.nodes.append(Node(self, index, self.attempts[index]))

    def act(self, what: str, which: int) -> None:
        """Play one random event."""
        node = self.nodes[which % len(self.nodes)]
        connected = node.alive and node.member is not None
        if what == "read":
            node.read()
        elif what == "deliver":
            node.deliver()
        elif what == "work":
            node.work()
        elif what == "all":
            self.settle()
        elif what == "pass":
            self.world.pass_time([0.05, 0.6, 6.0, 61.0][which % 4])
        elif what == "fail":
            node.fail(["ValueError: bug", RESET][which % 2])
        elif what == "aside":
            node.fail("SystemExit: 75", 75)
        elif what == "zero":
            node.end_with_0()
        elif what == "die":
            node.die()
        elif what == "gone" and not node.alive:
            self.world.coordinator.gone(node.pod, "the pod was deleted")
        elif what == "cut" and connected:
            node.disconnect()
        elif what == "reconnect" and node.alive:
            node.connect()  # an abandoned connection is half open
        elif what == "stuck" and node.booted:
            node.stuck = True  # it sends and receives heartbeats but does nothing, so it must be fenced
        elif what == "leave":
            node.leave()
        elif what == "replace":
            self.replace(which % PLACES)
        elif what == "size":
            self.world.coordinator.resize([3, 2, 4][which % 3], [2, 1][which % 2])
        elif what == "order":
            order = [node.pod for node in self.nodes if node.alive]
            turn = which % PLACES  # Some are left out, because the operator has not seen them yet.
            self.world.coordinator.set_order([*order[turn:], *order[:turn]][which % 3 :])
        elif what == "coordinator":
            self.restart_coordinator()
        elif what == "step":
            self.world.coordinator.report_progress({"step": which})

    def settle(self) -> None:
        """Deliver all lines, and let every member take its next step."""
        for node in list(self.nodes):
            while node.alive and node.lines:
                node.read()
            node.work()
            while node.words:
                node.deliver()

    def calm(self) -> None:
        """Continue without faults, and replace pods as the operator would. In the end, the whole
        group must run.
        """
        self.world.coordinator.resize(3, 2)
        for seconds in range(400):
            for node in list(self.nodes):
                if node.alive and node.leaving:
                    node.die()
                if node.alive and node.member is None:
                    node.connect()
                self.replace(node.index)
            self.settle()
            self.world.pass_time(1.0)
            self.world.coordinator.report_progress({"step": 1000 + seconds})
            self.check()
            course = self.world.coordinator.rounds
            if course.state == "Running" and course.current is not None and course.current.world == 3:
                break
        course = self.world.coordinator.rounds
        assert course.state == "Running" and course.current is not None and course.current.world == 3, (
            self.world.report()
        )
        inside = [n for n in self.nodes if n.working and n.place["round"] == course.current.number]
        assert sorted(n.place["rank"] for n in inside) == [0, 1, 2]
        assert all(n in inside or self.given_up(n, self.highest) for n in self.nodes if n.working)


EVENTS = [
    "read", "deliver", "work", "all", "all", "all", "pass", "pass", "fail", "aside", "zero", "die",
    "gone", "cut", "reconnect", "leave", "stuck",
    "replace", "size", "coordinator", "step", "order",
]  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(
    mode=st.sampled_from([FAST, STANDARD]),
    ordered=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), min_size=3, max_size=60),
)
def test_a_group_trains_again_after_any_random_history(mode: str, ordered: bool, events: list[tuple[str, int]]) -> None:
    life = Life(mode, ordered)
    for _ in range(3):
        life.settle()
    assert life.world.report()["state"] == "Running"
    for what, which in events:
        life.act(what, which)
        life.check()
    life.calm()
