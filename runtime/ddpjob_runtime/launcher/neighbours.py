"""Watches the nodes before and after this one in rank order, so that an unreachable host is noticed
early.

A host without power or network sends nothing, but neither does a process that is paused for a few
seconds. All other nodes have to wait until it is clear which of the two has happened.
Acknowledgements distinguish these cases, because the kernel of a live host acknowledges bytes even
for a paused process (`acknowledgements`).

So the nodes of a round form a ring, in which each node connects to the next one. Each end of a
connection sends a byte every TICK_SECONDS, as long as its previous byte has been acknowledged. An
end whose byte is not acknowledged for SILENT_SECONDS reports this to the coordinator, and reports
again when the byte is acknowledged. In a job of any size, a node has only two such connections, and
these cost the coordinator nothing.

A single connection may also break although both hosts are alive. So the coordinator also checks its
own connection to the silent member before it declares the member lost (`coordinator/witnesses.py`).

Example with 8 nodes, when the host of rank 3 loses its network:

    0.06  ranks 2 and 4 have sent the next byte
    0.60  both report to the coordinator that rank 3 is silent
    0.95  the coordinator's own byte is not acknowledged either: rank 3 is lost

A connection begins with one line from each side. Each line proves that its sender knows the job's
token and is in the same round. By copying such a line, an attacker could forge only one of the two
observations that are needed to declare a loss.

If POD_IP is not set, as under `ddpjob run`, all nodes are on the same host, and nothing is watched.
Why: docs/decisions/0025.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.acknowledgements import is_acknowledged, resend_often, shows_acknowledgements
from ddpjob_runtime.launcher.shutdown import log

TICK_SECONDS = 0.1
SILENT_SECONDS = 0.5
"""Number of seconds without an acknowledgement from its host's kernel after which a neighbour is
reported as silent.
"""
REPEAT_SECONDS = 1.0
"""Seconds between reports of the same silent neighbour, in case a report is lost."""
STALL_SECONDS = 0.5
"""If two ticks are more than this many seconds apart, this process or its host was paused. The
neighbours' silence is then measured from zero again.
"""
GREETING_SECONDS = 2.0
"""How many seconds both sides of a new connection get to prove that they know the token."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""The first and the longest pause between attempts to connect, in seconds."""
GIVEN_UP_SECONDS = 30.0
"""Number of seconds without an acknowledgement after which the kernel gives up a connection."""
MAX_GREETING = 512
MAX_STRANGERS = 8
"""Maximum number of connections whose other side has not proved yet that it knows the token."""
BEAT = b"."
GREETING = "neighbour"
"""Verb of the first line that each side of a connection sends."""


@dataclass(frozen=True)
class RingPlace:
    """This node's place in the ring of a round.

    `next` is the address of the next node; None if the address is unknown.
    """

    generation: int
    round: int
    rank: int
    world: int
    next: tuple[str, int] | None

    @property
    def before(self) -> int:
        """The group rank of the node that connects to this node."""
        return (self.rank - 1) % self.world

    @property
    def after(self) -> int:
        """The group rank of the node that this node connects to."""
        return (self.rank + 1) % self.world

    @property
    def connects(self) -> bool:
        """Whether this node connects to the next one.

        In a ring of two nodes, only rank 0 connects.
        """
        return self.next is not None and (self.world > 2 or self.rank == 0)

    @classmethod
    def read(cls, generation: int, go: dict[str, Any]) -> RingPlace | None:
        """Read the place from the coordinator's `go`; return None if this node has no neighbours.

        Raises: ValueError: a field is invalid; the message names the field.
        """
        number = protocol.whole_number(go.get("round"), "round")
        world = protocol.whole_number(go.get("world"), "world", 1, protocol.MAX_PODS)
        rank = protocol.whole_number(go.get("rank"), "rank", 0, world - 1)
        return cls(generation, number, rank, world, _read_address(go.get("next"))) if world > 1 else None

    def seal(self, token: str, side: str, rank: int, nonce: str) -> str:
        """Return a proof that the node with group rank `rank` knows the token.

        `side` says whether that node opened or accepted the connection.
        """
        return protocol.seal(token, *self._parts(side, rank, nonce))

    def is_sealed(self, proof: Any, token: str, side: str, rank: int, nonce: str) -> bool:
        """Whether `proof` is what `seal` returns for the same arguments."""
        return protocol.is_sealed(proof, token, *self._parts(side, rank, nonce))

    def _parts(self, side: str, rank: int, nonce: str) -> tuple[str, ...]:
        return GREETING, side, f"{self.generation}.{self.round}", f"{rank}/{self.world}", nonce


def _read_address(given: Any) -> tuple[str, int] | None:
    """Return the IP address and port to connect to; None if they are invalid.

    A host name is invalid, too, because looking it up could take a long time.
    """
    if not isinstance(given, dict):
        return None
    try:
        host = str(ipaddress.ip_address(str(given.get("host"))))
        return host, protocol.whole_number(given.get("port"), "port", 1, 2**16 - 1)
    except ValueError:
        return None


class _Link:
    """A connection to a neighbour.

    `rank` is None until the neighbour has proved who it is. If this node opened the connection,
    `nonce` is part of the first line that it sends; otherwise, `nonce` is empty.
    """

    def __init__(self, stream: socket.socket, until: float, nonce: str = "") -> None:
        self.stream, self.until, self.nonce = stream, until, nonce
        self.rank: int | None = None
        self.has_greeted = not nonce
        self.received = b""
        self.sent_at: float | None = None


class Neighbours:
    """Watches the neighbours of this node, in one round after another.

    `report(round, rank, silent)` is called with `silent=True` when a neighbour becomes silent, and
    again every REPEAT_SECONDS. It is called with `silent=False` when the neighbour is heard from
    again. `host` is the address to listen on. Raises OSError if this node cannot listen on it.
    """

    def __init__(self, host: str, token: str, report: Callable[[int, int, bool], None]) -> None:
        self._token, self._report = token, report
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=16)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        # The place that another thread has set. It takes effect at the next tick.
        self._wanted: RingPlace | None = None
        self._place: RingPlace | None = None
        self._links: list[_Link] = []
        # Maps the rank of each silent neighbour to the time of the last report about it.
        self._reported: dict[int, float] = {}
        self._connect_at, self._pause = 0.0, FIRST_PAUSE
        self._ticked: float | None = None

    def enter(self, place: RingPlace | None) -> None:
        """Watch the neighbours in this round, beginning with the next tick.

        Any thread can call this.
        """
        self._wanted = place

    def run(self) -> None:
        """Call `tick` regularly until this process ends.

        An exception ends only this method, not the launcher.
        """
        try:
            while True:
                time.sleep(TICK_SECONDS)
                self.tick(time.monotonic())
        except Exception:
            log(f"this node no longer watches its neighbours:\n{traceback.format_exc()}")
            self.close()

    def close(self) -> None:
        """Close the listener and all connections."""
        self._listener.close()
        for link in self._links:
            link.stream.close()
        self._links = []

    def tick(self, now: float) -> None:
        """Do everything that is due at the monotonic time `now`, without waiting for anything."""
        place = self._wanted
        if place != self._place:
            for link in self._links:
                link.stream.close()
            self._place, self._links, self._reported = place, [], {}
            self._connect_at, self._pause = now, FIRST_PAUSE
        stalled, self._ticked = self._ticked is None or now - self._ticked > STALL_SECONDS, now
        self._accept(now)
        if place is None:
            return
        with contextlib.suppress(OSError):  # There may be too many open files, for example.
            self._connect(place, now)
        for link in list(self._links):
            if link in self._links:  # An earlier step may have dropped this link.
                self._attend(link, place, now, stalled)

    def _attend(self, link: _Link, place: RingPlace, now: float, stalled: bool) -> None:
        """Serve a connection, and close it if it is no longer usable."""
        try:
            if self._serve(link, place, now, stalled):
                return
        except BlockingIOError:
            return
        except (ConnectionResetError, BrokenPipeError):
            pass
        # The kernel has given up this connection. The last report about the neighbour remains
        # valid.
        except OSError:
            self._drop(link)
            return
        self._drop(link)
        if link.rank is not None:  # The other side has closed the connection, so its host is alive.
            self._withdraw(place, link.rank)

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                if self._place is None or sum(link.rank is None for link in self._links) >= MAX_STRANGERS:
                    stream.close()
                else:
                    self._links.append(_Link(_prepared(stream), now + GREETING_SECONDS))

    def _connect(self, place: RingPlace, now: float) -> None:
        if not place.connects or place.next is None or now < self._connect_at or any(x.nonce for x in self._links):
            return
        self._connect_at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        stream = _prepared(socket.socket(_family(place.next[0])))
        # A failure to connect is noticed later, when the greeting is sent.
        stream.connect_ex(place.next)
        self._links.append(_Link(stream, now + GREETING_SECONDS, secrets.token_hex(16)))

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        link.stream.close()

    def _withdraw(self, place: RingPlace, rank: int) -> None:
        if self._reported.pop(rank, None) is not None:
            self._report(place.round, rank, False)

    # ---- one connection

    def _serve(self, link: _Link, place: RingPlace, now: float, stalled: bool) -> bool:
        """Do whatever is due on a connection: greet, read, or send a byte.

        Return False if the connection is no longer usable. Raises OSError if the connection is
        broken.
        """
        if not link.has_greeted:
            return self._greet(link, place) or now < link.until
        with contextlib.suppress(BlockingIOError):
            data = link.stream.recv(4096)
            if not data:
                return False
            if link.rank is None:
                link.received += data
        if link.rank is None:
            return self._read_greeting(link, place) and now < link.until
        self._beat(link, place, link.rank, now, stalled)
        return True

    def _greet(self, link: _Link, place: RingPlace) -> bool:
        """Send the first line on a connection that this node has opened.

        Return False if the connection is not established yet. Raises OSError if it cannot be
        established.
        """
        problem = link.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, "cannot connect")
        try:
            link.stream.getpeername()
        except OSError:
            return False
        proof = place.seal(self._token, "connects", place.rank, link.nonce)
        link.stream.send(protocol.encode(GREETING, rank=place.rank, nonce=link.nonce, proof=proof))
        link.has_greeted = True
        return True

    def _read_greeting(self, link: _Link, place: RingPlace) -> bool:
        """Check the other side's line, if it is complete. Return False if the line is wrong."""
        line, newline, _ = link.received.partition(b"\n")
        if len(line) > MAX_GREETING:
            return False
        if not newline:
            return True
        try:
            said = protocol.decode(line)
        except ValueError:
            return False
        if link.nonce:
            rank = place.after
            if not place.is_sealed(said.get("proof"), self._token, "accepts", rank, link.nonce):
                return False
            self._pause = FIRST_PAUSE
        else:
            rank, nonce = place.before, said.get("nonce")
            if not isinstance(nonce, str) or len(nonce) > protocol.MAX_NONCE:
                return False
            if not place.is_sealed(said.get("proof"), self._token, "connects", rank, nonce):
                return False
            proof = place.seal(self._token, "accepts", place.rank, nonce)
            link.stream.send(protocol.encode(GREETING, proof=proof))
            for other in [o for o in self._links if not o.nonce and o.rank == rank]:
                self._drop(other)  # The neighbour has connected again.
        link.rank = rank
        return True

    def _beat(self, link: _Link, place: RingPlace, rank: int, now: float, stalled: bool) -> None:
        """Send the next byte, or report that the neighbour has not acknowledged the last one."""
        if is_acknowledged(link.stream):
            self._withdraw(place, rank)
            link.stream.send(BEAT)
            link.sent_at = now
        elif stalled or link.sent_at is None:
            link.sent_at = now
        elif now >= link.sent_at + SILENT_SECONDS and now >= self._reported.get(rank, 0.0) + REPEAT_SECONDS:
            self._reported[rank] = now
            self._report(place.round, rank, True)


def watch_neighbours(host: str, token: str, report: Callable[[int, int, bool], None]) -> Neighbours | None:
    """Watch the neighbours of this node in a thread; return None if they cannot be watched."""
    if not host or not shows_acknowledgements():
        return None
    try:
        neighbours = Neighbours(host, token, report)
    except OSError as error:
        log(f"this node does not watch its neighbours, because it cannot listen on {host}: {error}")
        return None
    threading.Thread(target=neighbours.run, name="ddpjob-neighbours", daemon=True).start()
    return neighbours


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _prepared(stream: socket.socket) -> socket.socket:
    """Set the options of a connection between neighbours, and return the connection.

    Raises OSError.
    """
    stream.setblocking(False)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVEN_UP_SECONDS * 1000))
    resend_often(stream)
    return stream
