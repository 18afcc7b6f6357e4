"""A coordinator and its group, with a manual clock. The lines for each member are collected in
lists.
"""

from __future__ import annotations

from typing import Any

from ddpjob_runtime.coordinator.coordinator import Coordinator
from ddpjob_runtime.coordinator.first_cause import WorkerFailure
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.settings import CoordinatorSettings

FAST, STANDARD = "Fast", "Standard"
RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


class World:
    """The clock and the outgoing lines of one group. Members send heartbeats unless they are in
    `silent`.
    """

    def __init__(self, nodes: int = 2, min_nodes: int | None = None, mode: str = FAST, **more: Any) -> None:
        self.now, self.pending = 1000.0, []  # type: float, list[tuple[float, Any]]
        self.heard: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.silent: set[str] = set()
        self.cut: set[str] = set()
        """Pods whose hosts acknowledge nothing."""
        self.restart_coordinator(
            CoordinatorSettings(nodes, nodes if min_nodes is None else min_nodes, mode=mode, **more)
        )

    def restart_coordinator(self, settings: CoordinatorSettings) -> None:
        """Replace the group with an empty one, and drop the earlier group's planned calls."""
        pending: list[tuple[float, Any]] = []
        self.pending = pending
        self.coordinator = Coordinator(
            settings,
            lambda: self.now,
            lambda s, f: pending.append((self.now + s, f)),
            lambda: None,
            acknowledges=lambda member: member.pod not in self.cut,
        )

    def pass_time(self, seconds: float) -> None:
        """Run every planned call that is due, in order."""
        until, pending = self.now + seconds, self.pending
        while due := sorted((p for p in pending if p[0] <= until), key=lambda p: p[0]):
            pending.remove(due[0])
            self._turn_to(due[0][0])
            due[0][1]()
        self._turn_to(until)

    def _turn_to(self, when: float) -> None:
        self.now = max(self.now, when)
        for member in self.coordinator.members:
            if member.pod not in self.silent:
                member.heard = self.now

    def hello(self, index: int, attempt: int = 0, pid: int = 1, resume: Any = None, grace: float = 30.0) -> Member:
        """Send hello for a pod that must be admitted, and return the member."""
        member = self.try_hello(index, attempt, pid, resume, grace)
        assert member is not None
        return member

    def try_hello(
        self, index: int, attempt: int = 0, pid: int = 1, resume: Any = None, grace: float = 30.0
    ) -> Member | None:
        """Send hello for a pod on a new connection. Return None if it is rejected."""
        pod = f"job-{index}-{attempt}"
        lines = self.heard.setdefault(pod, [])
        return self.coordinator.hello(
            pod, index, attempt, pid, lambda verb, fields: lines.append((verb, fields)), grace, resume
        )

    def resume(
        self, index: int, number: int, rank: int, world: int, state: str = "Running", attempt: int = 0
    ) -> Member:
        """Reconnect a member that is still in a round, and return it."""
        return self.hello(index, attempt, resume={"round": number, "rank": rank, "world": world, "state": state})

    def ready(self, *members: Member) -> None:
        """Send `ready` from the members: they have no workers and have seen their latest round."""
        for member in members:
            self.coordinator.ready(member, member.round or 0, "10.0.0.1", 4000 + member.index)

    def join(self, *members: Member) -> None:
        """Send `joined` from the members: their workers have started."""
        for member in members:
            assert member.round is not None
            self.coordinator.joined(member, member.round)

    def form(self, nodes: int = 2, spares: int = 0) -> list[Member]:
        """Form a round, and return its members and the spares, which are ready as well."""
        members = [self.hello(i) for i in range(nodes + spares)]
        self.ready(*members)
        self.join(*members[:nodes])
        assert self.coordinator.rounds.state == "Running" and self.round.world == nodes
        return members

    def lose(self, member: Member, why: str = "its connection ended") -> None:
        """Close the member's connection."""
        self.coordinator.lost(member, why)

    @property
    def round(self) -> Any:
        """The newest round."""
        assert self.coordinator.rounds.current is not None
        return self.coordinator.rounds.current

    def ranks(self) -> list[int]:
        """Return the indices of the newest round's members, in rank order."""
        return [member.index for _, member in sorted(self.round.members.items())]

    def verbs(self, member: Member) -> list[str]:
        """Return the kinds of the lines sent to the member."""
        return [verb for verb, _ in self.heard[member.pod]]

    def last(self, member: Member) -> tuple[str, dict[str, Any]]:
        """Return the last line sent to the member."""
        return self.heard[member.pod][-1]

    def fail(
        self, member: Member, message: str = "ValueError: bug", code: int = 1, ago: float = 0.0, **more: Any
    ) -> None:
        """Report that a worker of the member exited on its own in the member's current round."""
        signal = None if code > 0 else "SIGKILL"
        failure = WorkerFailure(
            member.source, member.rank, 0, code, signal, message, "Traceback ...", self.now - ago, **more
        )
        self.coordinator.failure(member, member.round, failure)

    def incidents(self) -> list[tuple[str, str, int]]:
        """Return (kind, pod, consequences) of each incident."""
        return [(i.kind, i.pod, i.consequences) for i in self.coordinator.rounds.incidents.recent]

    def report(self) -> dict[str, Any]:
        """Return the report that the operator reads."""
        return self.coordinator.report().write()


def formed(nodes: int = 2, *settings: Any, spares: int = 0, **more: Any) -> tuple[Any, ...]:
    """Return the world of a running round, its members, and spares, which are ready as well."""
    world = World(nodes, *settings, **more)
    return (world, *world.form(nodes, spares))


def formed_by(fewer: int, *settings: Any, **more: Any) -> tuple[Any, ...]:
    """Return the world and the members of a running round that waited for more members until its
    timeout.
    """
    world = World(*settings, **more)
    members = [world.hello(i) for i in range(fewer)]
    world.ready(*members)
    world.pass_time(31)
    world.join(*members)
    return (world, *members)
