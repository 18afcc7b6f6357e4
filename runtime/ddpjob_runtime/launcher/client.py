"""The launcher's connection to the coordinator, kept alive and renewed by threads.

A round continues without its coordinator, so a broken connection must neither stop the workers nor
lose information for the coordinator.

- The coordinator's name is resolved for each attempt to connect, because a new coordinator has a
  new address. Before this node says hello, the coordinator proves that it knows the job's token.
- Lines that cannot be sent wait for the next welcome. Every hello includes the notes. If this node
  reconnects to the same coordinator, it sends the current round's failures again, because the
  broken connection may have lost them.
- In Standard mode, a node gives up after RECONNECT_SECONDS. In Fast mode, a node with workers never
  gives up, and a node without workers gives up after torchrun's join timeout.
- In Fast mode, a coordinator that was replaced may still be running. Therefore, `_look` checks
  whether the coordinator's name leads to a later coordinator, and `_place` never goes back to an
  earlier one.

Example, in Fast mode: the coordinator's pod is replaced. The connection breaks, attempts fail for 8
s, and the hello to the new pod reports round 7, rank 2, Running. The workers have not noticed
anything.

Why: docs/decisions/0008.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (encodes names; imported here, so that two threads never import it at once)
import random
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.neighbours import Neighbours, RingPlace
from ddpjob_runtime.launcher.shutdown import log
from ddpjob_runtime.protocol import FromMember, MemberState, Mode, ToMember

CONNECT_SECONDS = 2.0
LOOKUP_SECONDS = 10.0
"""Seconds between checks of whether the coordinator's name leads to a later coordinator. A
coordinator on an unreachable host may have been replaced while it is still running.
"""
FIRST_SECONDS = 60.0
"""Number of seconds without a coordinator after which attempts to connect become less frequent."""
MAX_UNSENT = 1000
"""Maximum number of lines that wait for a connection. The limit is high because a node reports the
failure of each of its ranks, and any of these may be the first cause.
"""
SHORT_MESSAGE = 300
"""Maximum number of characters in a short failure message. Such a message fits into one packet on
every link.
"""
GOODBYE_SECONDS = 1.0


class MemberClient:
    """The launcher's connection to the coordinator, which is renewed whenever it breaks.

    This process must end if the coordinator refuses or stops this node, or if there is no
    coordinator. In these cases, the client's thread calls `on_end(exit_code, kind, message)`.
    """

    def __init__(
        self,
        address: str,
        token: str,
        identity: dict[str, Any],
        mode: Mode,
        join_seconds: float,
        on_end: Callable[[int, str, str], None],
    ) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"DDPJOB_COORDINATOR must be host:port, not {address!r}")
        self._address, self._identity, self._on_end = (host.strip("[]"), int(port)), identity, on_end
        self._token = token
        self._mode, self._join_seconds, self._reconnect_seconds = mode, join_seconds, protocol.RECONNECT_SECONDS
        self._idle_since: float | None = time.monotonic()
        """The monotonic time at which this node began to need a coordinator; None while the node's
        workers are running.
        """
        self._place, self._outdated = (-1, -1), False
        """Generation and attempt of the latest coordinator that this node knows. The client never
        connects to an earlier one.
        """
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._unsent: list[tuple[str, dict[str, Any]]] = []
        self._notes: dict[str, str] = {}
        """The latest note of each kind. Every hello includes all of them, because a later
        coordinator does not know them and a broken link may have lost some.
        """
        self._failures: list[tuple[tuple[int, int], dict[str, Any]]] = []
        """This node's failures in the current round, each with the generation and attempt of the
        coordinator to which it was sent.
        """
        self._thread = threading.Thread(target=self._guard, args=(self._keep,), name="ddpjob-client", daemon=True)
        self._closing = False
        self._refusal = ""  # Why the connected coordinator is not this pod's; empty if it is.
        # The round, rank, world and state of this node; empty before its first round.
        self._position: dict[str, Any] = {}
        # The last `ready` that was sent; None once a round has begun.
        self._ready: dict[str, Any] | None = None
        self._go: dict[str, Any] | None = None
        self.changed = threading.Condition()
        self.welcomed = False
        self.done = False
        self._restart_round, self._planned = -1, False
        self.why = ""
        self.on_hurry: Callable[[int], None] = lambda number: (
            None
        )  # Called if a member is lost in a planned restart. The ranks can then no longer save.
        self.on_dump: Callable[[int], None] = lambda number: None
        self.on_look: Callable[[int, bool], None] = lambda number, record: None
        self.neighbours: Neighbours | None = None
        self.on_record: Callable[[dict[str, Any]], None] = lambda line: None

    def start(self) -> None:
        """Start the threads that maintain the connection, and return immediately."""
        with contextlib.suppress(OSError):
            # glibc reads the environment at the first lookup of a name. In a thread, that lookup
            # could crash the process, because another thread may set a variable at the same time.
            socket.getaddrinfo("localhost", None)
        self._thread.start()
        threading.Thread(target=self._guard, args=(self._beat,), name="ddpjob-heartbeat", daemon=True).start()
        # Only Fast mode needs this thread. In Standard mode, each generation's coordinator has a
        # different name.
        if self._mode == Mode.FAST:
            threading.Thread(target=self._guard, args=(self._look,), name="ddpjob-lookup", daemon=True).start()

    # ---- for the agent

    def wait_welcome(self, seconds: float | None = None) -> bool:
        """Wait until the coordinator has admitted this node, or has reported that the job is done.

        Return False if neither has happened within `seconds`.
        """
        with self.changed:
            return self.changed.wait_for(lambda: self.welcomed or self.done, seconds)

    def must_restart(self, number: int | None) -> bool:
        """Whether the coordinator has ended round `number`, which means that workers must be
        restarted.
        """
        return number is not None and self._restart_round >= number

    def is_planned(self, number: int | None) -> bool:
        """Whether round `number` was ended on purpose and without a loss, so that its workers can
        still save.
        """
        return self.must_restart(number) and self._planned

    def ran_out_of_memory(self, why: str) -> None:
        """Report that the kernel killed the fork server to free memory.

        This node's workers ended with it.
        """
        if self._position:
            self.send(FromMember.FAILURE, round=self._position["round"], message=why, oom=True)

    def wait_verdict(self, number: int) -> bool:
        """Report that this node's workers have finished, and wait for the other nodes.

        Return True once all nodes have finished, and False if the round must be run again.
        """
        with self.changed:
            self._position["state"] = MemberState.FINISHED
            self._idle_since = time.monotonic()
        self.send(FromMember.FINISHED, round=number)
        with self.changed:
            self.changed.wait_for(lambda: self.done or self.must_restart(number))
            return self.done

    def wait_go(self, host: str, port: int, check: int = 0) -> dict[str, Any] | None:
        """Report that this node is ready for a round, and wait for the coordinator's `go`.

        Return the `go`, or None if the job is done. `port` is the port of the store that
        this node would host as rank 0; 0 if it would not host one. `check` is how many seconds the
        link check may take before the round's training begins; 0 if this node does not request that
        check.
        """
        with self.changed:
            self._go, self._idle_since = None, time.monotonic()
            self._ready = {"after": self._position.get("round", 0), "host": host, "port": port}
            if check:
                self._ready["check"] = check
            if self.neighbours is not None:
                self.neighbours.enter(None)
                self._ready["watch"] = self.neighbours.port
            if self._position:
                self._position["state"] = MemberState.READY
        self.send_now(FromMember.READY, **self._ready)
        with self.changed:
            self.changed.wait_for(lambda: self.done or self._go is not None)
            return self._go

    def joined(self, number: int) -> None:
        """Report that this node has started the workers of round `number`."""
        self.send(FromMember.JOINED, round=number)

    def note(self, kind: str, why: str) -> None:
        """Send a note about this pod. The operator reads it in the coordinator's report.

        The note replaces the previous note of the same kind. If `why` is empty, the previous note
        is removed.
        """
        why = protocol.clip(why, protocol.MAX_NOTE)
        with self._lock:
            self._notes[kind] = why
        self.send(FromMember.NOTE, kind=kind, why=why)

    def report_neighbour(self, number: int, rank: int, silent: bool) -> None:
        """Report that a neighbour's host has stopped or resumed acknowledging bytes."""
        log(
            f"the host of group rank {rank} " + ("does not acknowledge bytes" if silent else "acknowledges bytes again")
        )
        self.send_now(FromMember.NEIGHBOUR, round=number, rank=rank, silent=silent)

    def send_now(self, verb: str, **fields: Any) -> None:
        """Send a line if there is a connection, and drop it otherwise.

        Use this only for lines that the next welcome sends again.
        """
        with self._lock:
            if self._socket is not None and self.welcomed:
                self._write(protocol.encode(verb, **fields))

    def send(self, verb: str, **fields: Any) -> None:
        """Send a line. If there is no connection, send it after the next welcome."""
        data = protocol.encode(verb, **fields)
        with self._lock:
            if self._socket is not None and self.welcomed and self._write(data):
                self._keep_failure(verb, fields)
                return
            self._unsent.append((verb, fields))
            del self._unsent[:-MAX_UNSENT]

    def _keep_failure(self, verb: str, fields: dict[str, Any]) -> None:
        """Keep a failure after sending it, because a broken link may lose it.

        If the coordinator missed the failure, it would take an error on another node for the first
        cause.
        """
        if verb == FromMember.FAILURE:
            self._failures.append((self._place, fields))
            del self._failures[:-MAX_UNSENT]

    def _write_kept(self, verb: str, fields: dict[str, Any]) -> bool:
        if "sent" in fields:
            # The coordinator subtracts this time from its own to compute the failure's age.
            fields["sent"] = time.time()
        return self._write(protocol.encode(verb, **fields))

    def _write_all_kept(self) -> None:
        """Send the waiting lines, and resend failures that this coordinator may have missed.

        The coordinator recognizes failures that it already knows. Failures that were sent to an
        earlier coordinator are not resent to a new one, because the new coordinator might count the
        same break again.

        Each failure is resent once in full. After the next welcome, it is resent without its long
        texts, because some broken links lose only large packets.
        """
        failures, self._failures = self._failures, []
        for place, fields in failures:
            if place == self._place:
                self._write_kept(FromMember.FAILURE, fields)
                if fields.get("traceback"):
                    short = {"message": protocol.clip(fields["message"], SHORT_MESSAGE), "traceback": ""}
                    self._failures.append((place, {**fields, **short}))
        waiting, self._unsent = self._unsent, []
        for verb, fields in waiting:
            if self._write_kept(verb, fields):
                self._keep_failure(verb, fields)
            else:
                self._unsent.append((verb, fields))

    def _write(self, data: bytes) -> bool:
        assert self._socket is not None
        try:
            self._socket.sendall(data)
            return True
        except OSError:
            # The thread that reads from this connection will notice the problem and open a new
            # connection.
            return False

    def close(self) -> None:
        """Close the connection in a way that delivers all lines to the coordinator.

        If the process exited while the socket held unread data, the kernel would reset the
        connection, and the last line might be lost.
        """
        self._closing = True
        with self._lock:
            stream = self._socket
        if stream is None or threading.current_thread() is self._thread:
            return
        try:
            stream.shutdown(socket.SHUT_WR)
        except OSError:
            return  # The other end has already closed the connection.
        self._thread.join(GOODBYE_SECONDS)

    # ---- threads

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's function, and end the launcher if that function fails.

        Without this thread, the launcher would train or wait forever, and the coordinator could not
        reach it.
        """
        try:
            work()
        except Exception as error:
            log(f"the connection to the coordinator has failed:\n{traceback.format_exc()}")
            self._on_end(1, "Error", f"the connection to the coordinator has failed: {type(error).__name__}: {error}")

    def _keep(self) -> None:
        missed_since, known = time.monotonic(), False
        pause, why = 0.05, "no attempt yet"
        # Pauses are random, so that members that lost the coordinator at the same moment do not
        # retry at the same moment.
        chance = random.Random()
        while not self._gives_up(missed_since, known):
            try:
                stream = self._connect()
            # OSError includes NXDOMAIN. That error is not final, because each attempt resolves the
            # name again.
            except OSError as error:
                why = str(error)
            else:
                over, why, welcomed = self._read(stream)
                if over or self._closing:
                    return
                if welcomed:  # If the node was not welcomed, the time limit is not extended.
                    missed_since, known, pause = time.monotonic(), True, 0.05
            time.sleep(pause * chance.uniform(0.5, 1.5))
            pause = min(pause * 1.5, 1.0 if time.monotonic() < missed_since + FIRST_SECONDS else 5.0)
        self._on_end(
            protocol.EXIT_RENDEZVOUS_LOST,
            "RendezvousLost",
            "the coordinator at {}:{} is unreachable: {}".format(*self._address, why),
        )

    def _gives_up(self, missed_since: float, known: bool) -> bool:
        """Whether this node has waited long enough for a coordinator.

        `known` indicates whether a coordinator has ever admitted this node. The node has been
        without a coordinator since `missed_since`.
        """
        if known and self._mode == Mode.STANDARD:
            return time.monotonic() >= missed_since + self._reconnect_seconds
        idle_since = self._idle_since
        return idle_since is not None and time.monotonic() >= max(missed_since, idle_since) + self._join_seconds

    def _connect(self) -> socket.socket:
        """Connect to the coordinator of this job.

        The coordinator's name may have several addresses. Try them in order until a coordinator
        responds. Raises OSError if none does.
        """
        problem = OSError(f"no address was found for {self._address[0]}")
        for host in self._resolve():
            try:
                return self._connect_to(host)
            except OSError as error:
                problem = error
        raise problem

    def _resolve(self) -> list[str]:
        return list(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(*self._address, 0, socket.SOCK_STREAM))
        )

    def _dial(self, host: str) -> socket.socket:
        stream = socket.create_connection((host, self._address[1]), timeout=CONNECT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # A host that has vanished does not send a FIN.
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(protocol.SILENCE_SECONDS * 1000))
        stream.settimeout(protocol.SILENCE_SECONDS)
        return stream

    def _connect_to(self, host: str) -> socket.socket:
        stream = self._dial(host)
        try:
            self._say_hello(stream)
        except OSError:
            stream.close()
            raise
        stream.settimeout(protocol.SILENCE_SECONDS)
        with self._lock:
            self._socket = stream
        return stream

    def _say_hello(self, stream: socket.socket) -> None:
        nonces, place = self._challenge(stream)
        if place < self._place:
            raise ConnectionError("the coordinator at this address has been replaced")
        hello = dict(self._identity, proof=protocol.seal(self._token, "member", *nonces))
        with self.changed:
            if self._position:
                hello["resume"] = {**self._position, "planned": self.is_planned(self._position["round"])}
        with self._lock:
            hello["notes"] = dict(self._notes)
        stream.sendall(protocol.encode(FromMember.HELLO, **hello))
        self._place = place

    def _challenge(self, stream: socket.socket) -> tuple[tuple[str, str], tuple[int, int]]:
        """Make the other end prove that it is a coordinator that knows the job's token.

        Return both nonces, and the coordinator's generation and attempt as a pair. Raises OSError
        if there is no valid proof.

        By now, the name or address may lead to a different job, or to an earlier coordinator of
        this job with an older token. The proof also covers the generation and attempt, because a
        relay could otherwise change these numbers.
        """
        nonce = secrets.token_hex(16)
        stream.sendall(protocol.encode(FromMember.CHALLENGE, nonce=nonce))
        line, deadline = b"", time.monotonic() + protocol.SILENCE_SECONDS
        while not line.endswith(b"\n") and len(line) < protocol.MAX_TEXT:
            stream.settimeout(max(0.01, deadline - time.monotonic()))
            part = stream.recv(protocol.MAX_TEXT)
            if not part:
                raise ConnectionError("it closed the connection")
            line += part
        try:
            answer = protocol.decode(line)
        except ValueError as error:
            raise ConnectionError(str(error)) from None
        nonces = nonce, str(answer.get("nonce"))
        generation, attempt = answer.get("generation"), answer.get("attempt")
        parts = "coordinator", *nonces, str(generation), str(attempt)
        if not protocol.is_sealed(answer.get("proof"), self._token, *parts):
            raise ConnectionError("the coordinator at this address does not know this job's token (DDPJOB_TOKEN)")
        # The proof covers only the text of these numbers, so a relay may have sent strings.
        if not isinstance(generation, int) or not isinstance(attempt, int):
            raise ConnectionError("the coordinator's generation or attempt is not a number")
        return nonces, (generation, attempt)

    def _look(self) -> None:
        """Check regularly whether the coordinator's name leads to a later coordinator."""
        # The script may have seeded the global generator, so do not use it.
        chance = random.Random()
        while not self._closing:
            time.sleep(LOOKUP_SECONDS * chance.uniform(0.75, 1.25))
            with self._lock:
                stream = self._socket if self.welcomed else None
            if stream is not None:
                with contextlib.suppress(OSError):
                    self._look_beside(stream)

    def _look_beside(self, stream: socket.socket) -> None:
        present = str(stream.getpeername()[0])
        for host in self._resolve():
            if host == present:
                continue
            try:
                with self._dial(host) as other:
                    _, place = self._challenge(other)
            except OSError:
                continue  # This address has no coordinator of this job.
            if place[0] > self._identity.get("generation", place[0]):
                self._leave_generation(place[0])
                # Skip the other addresses. They may lead to the same coordinator, which must not be
                # counted twice.
                return
            if place > self._place:
                self._move(stream, place)
                return

    def _leave_generation(self, found: int) -> None:
        """End this launcher when a later generation is found for the second time.

        The kubelet should have asked this pod to stop before then. It has not, so the pod's host is
        no longer connected to the cluster.
        """
        if self._outdated:
            expected = self._identity["generation"]
            text = f"this pod is from generation {expected}, but the group is now at generation {found}"
            self._on_end(protocol.EXIT_STOPPED, "Stopped", text)
        self._outdated = True

    def _move(self, stream: socket.socket, place: tuple[int, int]) -> None:
        """Leave the current coordinator and connect to the later one.

        The current coordinator is notified and exits, which makes the other members leave it, too.
        """
        log("a later coordinator (generation {}, attempt {}) has taken over; connecting to it".format(*place))
        self._place = place
        self.send_now(FromMember.REPLACED, generation=place[0], attempt=place[1])
        with contextlib.suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)

    def _read(self, stream: socket.socket) -> tuple[bool, str, bool]:
        """Handle lines from the coordinator until the connection ends.

        Return three values: whether the coordinator has sent its last line, why the connection
        ended, and whether this node was welcomed.
        """
        why, self._refusal = "it closed the connection", ""
        try:
            with stream.makefile("rb") as lines:
                while line := lines.readline(protocol.MAX_LINE):
                    if self._on_message(protocol.decode(line)):
                        return True, "", True
        except (OSError, ValueError) as error:
            why = str(error)
        with self._lock:
            welcomed, self._socket, self.welcomed = self.welcomed, None, False
        stream.close()
        return False, self._refusal or why, welcomed

    def _on_message(self, message: dict[str, Any]) -> bool:
        verb = message["t"]
        if verb == ToMember.WELCOME:
            return self._on_welcome(message)
        if verb == ToMember.GO:
            self._on_go(message)
        elif verb == ToMember.RESTART:
            self._on_restart(message)
        elif verb == ToMember.DUMP:
            self.on_dump(int(message["round"]))
        elif verb == ToMember.LOOK:
            self.on_look(int(message["round"]), bool(message.get("record")))
        elif verb == ToMember.RECORD:
            self.on_record(message)
        elif verb == ToMember.DONE:
            with self.changed:
                self.done = True
                self.changed.notify_all()
        if verb == ToMember.REFUSED:
            self._on_end(
                protocol.EXIT_INIT_FAILURE,
                "InitFailure",
                "the coordinator refused this node: {}".format(message.get("why")),
            )
        elif verb == ToMember.STOP:
            code, kind = (
                (protocol.EXIT_FENCED, "Fenced") if message.get("fenced") else (protocol.EXIT_STOPPED, "Stopped")
            )
            self._on_end(code, kind, str(message.get("why", "")))
        elif verb == ToMember.ERROR:
            log("the coordinator could not process a message from this node: {}".format(message.get("why")))
        return verb in (ToMember.REFUSED, ToMember.STOP, ToMember.DONE)

    def _on_go(self, message: dict[str, Any]) -> None:
        with self.changed:
            if self._ready is None or message["round"] <= self._ready["after"]:
                # This `go` is stale: the coordinator sent it before receiving this node's latest
                # `ready`.
                return
            self._ready, self._go, self._idle_since = None, message, None
            with self._lock:
                self._failures = []
            self._position = {
                "round": message["round"],
                "rank": message["rank"],
                "world": message["world"],
                "state": MemberState.RUNNING,
            }
            if self.neighbours is not None:
                self.neighbours.enter(RingPlace.read(self._identity.get("generation", 0), message))
            self.changed.notify_all()

    def _on_restart(self, message: dict[str, Any]) -> None:
        number, planned = int(message["round"]), bool(message.get("planned"))
        with self.changed:
            hurry = number == self._restart_round and self._planned and not planned
            if number <= self._restart_round and not hurry:
                return
            self._restart_round, self._planned = number, planned
            self.why = str(message.get("why", ""))
            self.changed.notify_all()
        if hurry:
            self.on_hurry(number)

    def _on_welcome(self, message: dict[str, Any]) -> bool:
        expected = self._identity.get("generation")
        found = message.get("generation")
        if expected is not None and found != expected:
            text = f"this pod is from generation {expected}, but the coordinator is from generation {found}"
            if isinstance(found, int) and found < expected:
                # That coordinator is about to end. Its name will then lead to a new coordinator.
                self._refusal = text
                return False
            self._on_end(protocol.EXIT_RENDEZVOUS_LOST, "RendezvousLost", text)
            return True
        with self._lock:
            self.welcomed = True
            self._write_all_kept()
            # Read `_ready` only after setting `welcomed`. On another thread, `wait_go` sets
            # `_ready` first, and then sends the `ready` if `welcomed` is set. In any order, at
            # least one of the two threads sends the `ready`.
            ready = self._ready
            if ready is not None:
                self._write(protocol.encode(FromMember.READY, **ready))
        with self.changed:
            self.changed.notify_all()
        return False

    def _beat(self) -> None:
        beat = protocol.encode(FromMember.HEARTBEAT)
        while True:
            time.sleep(protocol.HEARTBEAT_SECONDS)
            with self._lock:
                if self._socket is not None:
                    self._write(beat)
