"""Connections between launchers and coordinators, names, and partitions."""

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
    """Ranges of durations: (least, most) seconds."""

    message: tuple[float, float] = (0.005, 0.005)
    """Delay of one line or one request."""
    schedule: tuple[float, float] = (0.0, 0.0)
    start: tuple[float, float] = (1.0, 1.0)
    """The time from the scheduler's choice to running containers."""
    boot: tuple[float, float] = (0.1, 0.1)
    """The time from a launcher's start to its first rendezvous."""
    listen: tuple[float, float] = (0.05, 0.05)
    """The time from a coordinator's start to its first connection."""
    join: tuple[float, float] = (0.1, 0.1)
    """The time from a complete rendezvous to running workers."""
    drain: tuple[float, float] = (0.1, 0.1)
    """The time that workers need to end when asked."""
    notice: tuple[float, float] = (0.05, 0.05)
    """The time until workers see that a peer is gone."""
    update: tuple[float, float] = (0.0, 0.0)
    """The time until the API server learns of a change on a host."""


class Network:
    """Connectivity between hosts, pods and the operator. Each of them can be partitioned from the
    others.
    """

    def __init__(self, clock: Clock, chance: random.Random, pace: Pace) -> None:
        self.clock, self.random, self.pace = clock, chance, pace
        self.coordinators: list[CoordinatorProcess] = []
        self.connections: list[Connection] = []
        self.operator_cut = False
        self.log: Callable[[str], None] | None = None

    def draw(self, what: str) -> float:
        """Draw a duration."""
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
        """Return the coordinator to which the launcher's DDPJOB_COORDINATOR resolves.

        If the name has several addresses, this is the newest.
        """
        host = launcher.coordinator_name
        found = [c for c in self.coordinators if c.name == host and c.listening]
        return found[-1] if found else None

    def at(self, endpoint: str) -> CoordinatorProcess | None:
        """Return the coordinator that listens at `address:port`, as seen by the operator."""
        address = endpoint.partition(":")[0]
        for process in self.coordinators:
            if process.pod.address == address and process.listening and self.reaches_operator(process.pod):
                return process
        return None

    def changed(self) -> None:
        """Apply a cut or its repair to all connections: hold their lines back, or deliver the lines
        held back so far.
        """
        for connection in list(self.connections):
            connection.check()
        self.clock.later(production.REPORTED_SECONDS, self._report_neighbours)

    def _report_neighbours(self) -> None:
        for connection in list(self.connections):
            if connection.open:
                connection.launcher.watch_neighbours()

    def say(self, text: str) -> None:
        """Add one line to the story."""
        if self.log is not None:
            self.log(text)


class Connection:
    """One TCP connection of a launcher. Its lines arrive in order, but may be late or lost.

    While the network is cut, lines wait, and TCP delivers them after the repair. A side that
    receives nothing for long enough closes the connection.
    """

    def __init__(self, network: Network, launcher: Launcher, coordinator: CoordinatorProcess) -> None:
        self.network, self.launcher, self.coordinator = network, launcher, coordinator
        self.member: Any = None
        self.up_open, self.down_open = True, True  # whether the coordinator and the launcher still read
        self.frozen_since: float | None = None
        self._held: list[tuple[bool, bytes | None]] = []
        self._last = {True: 0.0, False: 0.0}
        self.nonces: tuple[str, str] | None = None
        self.send = self._from_coordinator  # kept as one object, because the coordinator compares its identity
        network.connections.append(self)
        coordinator.connections.append(self)

    @property
    def open(self) -> bool:
        """Whether both ends are still open."""
        return self.up_open and self.down_open

    # ---- sending; None is the end of the stream

    def to_coordinator(self, line: bytes | None) -> None:
        """Send a line from the launcher."""
        self._send(True, line)

    def to_launcher(self, line: bytes | None) -> None:
        """Send a line from the coordinator."""
        self._send(False, line)

    def _from_coordinator(self, verb: str, fields: dict[str, Any]) -> None:
        """Send a line from the coordinator, which calls this as the member's `send`."""
        if self.up_open:
            line = self.coordinator.encode(verb, fields)
            # Volumes are not simulated, so such a line is dropped. Sending it would change the
            # random delays of all later lines.
            if verb != ToMember.RECORD:
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
        """Close the coordinator's end."""
        if not self.up_open:
            return
        self.up_open = False
        self.coordinator.lost(self, why)
        self.to_launcher(None)
        self._forget()

    def close_down(self, why: str) -> None:
        """Close the launcher's end."""
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
        """Handle the death of the process at one end. Its kernel closes the stream, if packets
        still pass.
        """
        if launcher:
            self.down_open = False
            self.to_coordinator(None)
        else:
            self.up_open = False
            self.to_launcher(None)
        self._forget()

    # ---- cuts

    def check(self) -> None:
        """Check again whether packets pass, after a change."""
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
        """Disconnect a member whose heartbeat arrives after the coordinator has declared it
        lost.
        """
        if self.frozen_since is None and self.member is not None and self.member.given_up:
            self.close_up("it responds again and must reconnect")

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
