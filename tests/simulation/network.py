"""Connections between launchers and coordinators, names, and what cuts them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpjob_runtime.protocol import ToMember

from . import production
from .clock import Clock

if TYPE_CHECKING:
    from .coordinator import CoordinatorProcess
    from .kubelet import Pod
    from .launcher import Launcher


@dataclass(frozen=True)
class Pace:
    """How long things take: (least, most) seconds."""

    message: tuple[float, float] = (0.005, 0.005)
    """One line on its way, or one request."""
    schedule: tuple[float, float] = (0.0, 0.0)
    start: tuple[float, float] = (1.0, 1.0)
    """From the scheduler's choice to running containers."""
    boot: tuple[float, float] = (0.1, 0.1)
    """Of a launcher, from its start to its first rendezvous."""
    listen: tuple[float, float] = (0.05, 0.05)
    """Of a coordinator, from its start to its first connection."""
    join: tuple[float, float] = (0.1, 0.1)
    """From a complete rendezvous to running workers."""
    drain: tuple[float, float] = (0.1, 0.1)
    """For workers that are asked to end."""
    notice: tuple[float, float] = (0.05, 0.05)
    """Until workers see that a peer is gone."""
    update: tuple[float, float] = (0.0, 0.0)
    """From a change on a host to the API server's knowledge of it."""


class Network:
    """Who reaches whom. Hosts, single pods and the operator can be cut off."""

    def __init__(self, clock: Clock, chance: random.Random, pace: Pace) -> None:
        self.clock, self.random, self.pace = clock, chance, pace
        self.coordinators: list[CoordinatorProcess] = []
        self.connections: list[Connection] = []
        self.operator_cut = False
        self.log: Callable[[str], None] | None = None

    def draw(self, what: str) -> float:
        """A duration."""
        least, most = getattr(self.pace, what)
        return least if least == most else self.random.uniform(least, most)

    def reachable(self, one: Pod, other: Pod) -> bool:
        """Whether packets pass between two pods."""
        if one is other:
            return True
        if one.isolated or other.isolated or one.deaf or other.deaf:
            return False
        return one.host is other.host or not (one.host.cut or other.host.cut)

    def reaches_operator(self, pod: Pod) -> bool:
        """Whether packets pass between a pod and the operator."""
        return not (self.operator_cut or pod.isolated or pod.host.cut)

    def resolve(self, launcher: Launcher) -> CoordinatorProcess | None:
        """The coordinator that the launcher's DDPJOB_COORDINATOR names.

        The newest, where a name has several addresses.
        """
        host = launcher.coordinator_name
        found = [c for c in self.coordinators if c.name == host and c.listening]
        return found[-1] if found else None

    def at(self, endpoint: str) -> CoordinatorProcess | None:
        """The coordinator that listens at `address:port`, as the operator reaches it."""
        address = endpoint.partition(":")[0]
        for process in self.coordinators:
            if process.pod.address == address and process.listening and self.reaches_operator(process.pod):
                return process
        return None

    def changed(self) -> None:
        """After something was cut or healed: connections stop, or what they hold is sent again."""
        for connection in list(self.connections):
            connection.check()
        self.clock.later(production.REPORTED_SECONDS, self._report_neighbours)

    def _report_neighbours(self) -> None:
        for connection in list(self.connections):
            if connection.open:
                connection.launcher.watch_neighbours()

    def say(self, text: str) -> None:
        """One line of the story."""
        if self.log is not None:
            self.log(text)


class Connection:
    """One TCP connection of a launcher: lines arrive in their order, late or never.

    While it is cut, lines wait; TCP sends them again when it is healed. A side that hears nothing
    for long enough closes it.
    """

    def __init__(self, network: Network, launcher: Launcher, coordinator: CoordinatorProcess) -> None:
        self.network, self.launcher, self.coordinator = network, launcher, coordinator
        self.member: Any = None
        self.up_open, self.down_open = True, True  # whether the coordinator, the launcher still reads
        self.frozen_since: float | None = None
        self._held: list[tuple[bool, bytes | None]] = []
        self._last = {True: 0.0, False: 0.0}
        self.nonces: tuple[str, str] | None = None
        self.send = self._from_coordinator  # one object: the coordinator compares it
        network.connections.append(self)
        coordinator.connections.append(self)

    @property
    def open(self) -> bool:
        """Whether both ends still use it."""
        return self.up_open and self.down_open

    # ---- sending; None is the end of the stream

    def to_coordinator(self, line: bytes | None) -> None:
        """From the launcher."""
        self._send(True, line)

    def to_launcher(self, line: bytes | None) -> None:
        """From the coordinator."""
        self._send(False, line)

    def _from_coordinator(self, verb: str, fields: dict[str, Any]) -> None:
        """What the coordinator calls as a member's `send`."""
        if self.up_open:
            line = self.coordinator.encode(verb, fields)
            if verb != ToMember.RECORD:  # No volume is simulated, and each line draws the delays of those after it.
                self.to_launcher(line)

    def _send(self, up: bool, line: bytes | None) -> None:
        if self.frozen_since is not None:
            self._held.append((up, line))
            return
        now = self.network.clock.now
        arrival = max(self._last[up], now + self.network.draw("message"))
        self._last[up] = arrival
        self.network.clock.later(arrival - now, lambda: self._arrive(up, line))

    def _arrive(self, up: bool, line: bytes | None) -> None:
        if self.frozen_since is not None:
            self._held.append((up, line))
        elif up:
            if not self.up_open:
                return
            if line is None:
                self.close_up("its connection ended")
            else:
                self.coordinator.receive(self, line)
        elif self.down_open:
            if line is None:
                self.close_down("it closed the connection")
            else:
                self.launcher.receive(self, line)

    # ---- ending

    def close_up(self, why: str) -> None:
        """The coordinator is done with it."""
        if not self.up_open:
            return
        self.up_open = False
        self.coordinator.lost(self, why)
        self.to_launcher(None)
        self._forget()

    def close_down(self, why: str) -> None:
        """The launcher is done with it."""
        if not self.down_open:
            return
        self.down_open = False
        self.launcher.disconnected(self, why)
        self.to_coordinator(None)
        self._forget()

    def _forget(self) -> None:
        if not self.up_open and not self.down_open:
            if self in self.network.connections:
                self.network.connections.remove(self)
            if self in self.coordinator.connections:
                self.coordinator.connections.remove(self)

    def vanish(self, *, launcher: bool) -> None:
        """A process at one end dies. The kernel ends the stream, where packets still pass."""
        if launcher:
            self.down_open = False
            self.to_coordinator(None)
        else:
            self.up_open = False
            self.to_launcher(None)
        self._forget()

    # ---- cuts

    def check(self) -> None:
        """Whether packets pass, now that something has changed."""
        passes = self.network.reachable(self.launcher.pod, self.coordinator.pod)
        if passes and self.frozen_since is not None:
            self.frozen_since = None
            held, self._held = self._held, []
            for up, line in held:
                self._send(up, line)
            self.network.clock.later(1.0, self._heard_again)
        elif not passes and self.frozen_since is None:
            since = self.frozen_since = self.network.clock.now
            self.network.clock.later(self.coordinator.silence(self), lambda: self._silent(since, up=True))
            self.network.clock.later(self.launcher.silence, lambda: self._silent(since, up=False))

    def _heard_again(self) -> None:
        """The next heartbeat of a member that was given up meanwhile."""
        if self.frozen_since is None and self.member is not None and self.member.given_up:
            self.close_up("it is heard again and has to reconnect")

    def _silent(self, since: float, *, up: bool) -> None:
        if self.frozen_since != since:
            return
        seconds = self.network.clock.now - since
        if up:
            self.close_up(f"silent for {seconds:.0f} s")
        else:
            self.close_down("timed out")

    @property
    def heard(self) -> bool:
        """Whether heartbeats arrive."""
        return self.frozen_since is None and self.down_open
