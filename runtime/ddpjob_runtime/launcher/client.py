"""The launcher's connection to the coordinator, kept alive and renewed by threads.

A round continues without its coordinator, so a broken connection must neither stop the workers nor
lose information for the coordinator.

- The coordinator's name is resolved at each attempt, because a new coordinator has a new address.
  Before a hello, the coordinator proves that it knows the job's token.
- Lines that cannot be sent wait for the next welcome. Notes are part of every hello. If this node
  reconnects to the same coordinator, it resends the current round's failures, because the broken
  connection may have lost them.
- In Standard mode, a node gives up after RECONNECT_SECONDS. In Fast mode, a node with workers never
  gives up; a node without workers gives up after torchrun's join timeout.
- In Fast mode, a coordinator that was replaced may still be running. So `_look` checks whether the
  name leads to a later coordinator, and `_place` never goes back to an earlier one.

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
"""Seconds between checks whether the coordinator's name leads to a later coordinator. They are
needed because a coordinator that was replaced when its host was unreachable may still be running.
"""
FIRST_SECONDS = 60.0
"""Seconds without a coordinator after which attempts to connect become less frequent."""
MAX_UNSENT = 1000
"""Maximum number of lines that wait for a connection. There may be many, because a node reports the
failure of each of its ranks, and any of them may be the cause."""
SHORT_MESSAGE = 300
"""Number of characters of a failure message that fit into one packet on any link."""
GOODBYE_SECONDS = 1.0


class MemberClient:
    """The launcher's connection, which reconnects when it breaks.

    `on_end(exit_code, kind, message)` is called on the client's thread when this process has to
    end, because it was refused or stopped, or has no coordinator.
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
        """When this node began to need a coordinator (monotonic seconds); None while its workers
        run.
        """
        self._place, self._outdated = (-1, -1), False
        """Generation and attempt of the latest known coordinator. They never go back to an earlier
        one.
        """
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._unsent: list[tuple[str, dict[str, Any]]] = []
        self._notes: dict[str, str] = {}
        """The last note of each kind. Every hello contains them, because a later coordinator does
        not have them and a link may lose a note."""
        self._failures: list[tuple[tuple[int, int], dict[str, Any]]] = []
        """This node's failures in the current round, with the generation and attempt of the
        coordinator that they were sent to."""
        self._thread = threading.Thread(target=self._guard, args=(self._keep,), name="ddpjob-client", daemon=True)
        self._closing = False
        self._refusal = ""  # why the connected coordinator is not this pod's
        self._position: dict[str, Any] = {}  # round, rank, world and state; set from the first round on
        self._ready: dict[str, Any] | None = None  # the last `ready` sent, until its round begins
        self._go: dict[str, Any] | None = None
        self.changed = threading.Condition()
        self.welcomed = False
        self.done = False
        self._restart_round, self._planned = -1, False
        self.why = ""
        self.on_hurry: Callable[[int], None] = lambda number: (
            None
        )  # a member was lost in a planned restart, so ranks cannot save
        self.on_dump: Callable[[int], None] = lambda number: None
        self.on_look: Callable[[int, bool], None] = lambda number, record: None
        self.neighbours: Neighbours | None = None
        self.on_record: Callable[[dict[str, Any]], None] = lambda line: None

    def start(self) -> None:
        """Begin to connect, and return immediately."""
        with contextlib.suppress(OSError):
            # glibc reads the environment at the first lookup. In a thread, that could crash if a
            # variable is being set at the same time.
            socket.getaddrinfo("localhost", None)
        self._thread.start()
        threading.Thread(target=self._guard, args=(self._beat,), name="ddpjob-heartbeat", daemon=True).start()
        if self._mode == Mode.FAST:  # In Standard mode, the name differs in each generation.
            threading.Thread(target=self._guard, args=(self._look,), name="ddpjob-lookup", daemon=True).start()

    # ---- for the agent

    def wait_welcome(self, seconds: float | None = None) -> bool:
        """Wait until this node is admitted or the coordinator reports that the job is done."""
        with self.changed:
            return self.changed.wait_for(lambda: self.welcomed or self.done, seconds)

    def must_restart(self, number: int | None) -> bool:
        """Whether round `number` is over."""
        return number is not None and self._restart_round >= number

    def is_planned(self, number: int | None) -> bool:
        """Whether round `number` ends without a loss, so that workers can still agree and save."""
        return self.must_restart(number) and self._planned

    def ran_out_of_memory(self, why: str) -> None:
        """Report that this node's workers ended because the kernel killed their parent process."""
        if self._position:
            self.send(FromMember.FAILURE, round=self._position["round"], message=why, oom=True)

    def wait_verdict(self, number: int) -> bool:
        """Report `finished` and wait.

        Return True when every node has finished, or False if the round must be run again.
        """
        with self.changed:
            self._position["state"] = MemberState.FINISHED
            self._idle_since = time.monotonic()
        self.send(FromMember.FINISHED, round=number)
        with self.changed:
            self.changed.wait_for(lambda: self.done or self.must_restart(number))
            return self.done

    def wait_go(self, host: str, port: int, check: int = 0) -> dict[str, Any] | None:
        """Report that this node can begin a round, and return the coordinator's `go`.

        Return None if the job is done. `port` is the port of the store that this node would host as
        rank 0; 0 without a store. `check` is the maximum number of seconds that the round spends on
        checking its links before it trains; 0 if this node does not request a check.
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
        """Report that the workers of round `number` have been started."""
        self.send(FromMember.JOINED, round=number)

    def note(self, kind: str, why: str) -> None:
        """Give the operator a note about this pod.

        The note replaces the previous note of its kind. If `why` is empty, that note is removed.
        """
        why = protocol.clip(why, protocol.MAX_NOTE)
        with self._lock:
            self._notes[kind] = why
        self.send(FromMember.NOTE, kind=kind, why=why)

    def report_neighbour(self, number: int, rank: int, silent: bool) -> None:
        """Report that a neighbour's host no longer acknowledges bytes, or does so again."""
        log(f"the host of node rank {rank} " + ("does not acknowledge bytes" if silent else "acknowledges bytes again"))
        self.send_now(FromMember.NEIGHBOUR, round=number, rank=rank, silent=silent)

    def send_now(self, verb: str, **fields: Any) -> None:
        """Send a line if connected. Use this only for lines that are sent again after a welcome."""
        with self._lock:
            if self._socket is not None and self.welcomed:
                self._write(protocol.encode(verb, **fields))

    def send(self, verb: str, **fields: Any) -> None:
        """Send a line now, or after the next welcome if there is no connection."""
        data = protocol.encode(verb, **fields)
        with self._lock:
            if self._socket is not None and self.welcomed and self._write(data):
                self._keep_failure(verb, fields)
                return
            self._unsent.append((verb, fields))
            del self._unsent[:-MAX_UNSENT]

    def _keep_failure(self, verb: str, fields: dict[str, Any]) -> None:
        """Keep a failure that was sent, because a broken link accepts lines that never arrive.

        If the report of this failure were lost, errors on other nodes would be blamed.
        """
        if verb == FromMember.FAILURE:
            self._failures.append((self._place, fields))
            del self._failures[:-MAX_UNSENT]

    def _write_kept(self, verb: str, fields: dict[str, Any]) -> bool:
        if "sent" in fields:
            fields["sent"] = time.time()  # The coordinator computes the failure's age from it.
        return self._write(protocol.encode(verb, **fields))

    def _write_all_kept(self) -> None:
        """Send the waiting lines, and resend failures that this coordinator may have missed.

        The coordinator recognizes failures that it already knows. A different coordinator does not
        get them, because it could count the same break again. Failures are resent once in full and
        once without their long parts, because a link may lose only large packets.
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
            return False  # the reader notices the end of this connection and opens a new one

    def close(self) -> None:
        """Close the connection cleanly.

        Exiting with unread data in the socket would reset the connection and might lose the last
        line.
        """
        self._closing = True
        with self._lock:
            stream = self._socket
        if stream is None or threading.current_thread() is self._thread:
            return
        try:
            stream.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the connection has already ended
        self._thread.join(GOODBYE_SECONDS)

    # ---- threads

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work, and end the launcher if the work fails.

        Otherwise, an unreachable launcher would train or wait forever.
        """
        try:
            work()
        except Exception as error:
            log(f"the connection to the coordinator has failed:\n{traceback.format_exc()}")
            self._on_end(1, "Error", f"the connection to the coordinator has failed: {type(error).__name__}: {error}")

    def _keep(self) -> None:
        missed_since, known = time.monotonic(), False
        pause, why = 0.05, "no attempt yet"
        chance = random.Random()  # Spreads out the reconnections of members that lost a coordinator together.
        while not self._gives_up(missed_since, known):
            try:
                stream = self._connect()
            except OSError as error:  # including NXDOMAIN, because the name is resolved each time
                why = str(error)
            else:
                over, why, welcomed = self._read(stream)
                if over or self._closing:
                    return
                if welcomed:  # otherwise, the time limit still applies
                    missed_since, known, pause = time.monotonic(), True, 0.05
            time.sleep(pause * chance.uniform(0.5, 1.5))
            pause = min(pause * 1.5, 1.0 if time.monotonic() < missed_since + FIRST_SECONDS else 5.0)
        self._on_end(
            protocol.EXIT_RENDEZVOUS_LOST, "RendezvousLost", "no coordinator at {}:{}: {}".format(*self._address, why)
        )

    def _gives_up(self, missed_since: float, known: bool) -> bool:
        """Whether to stop waiting for a coordinator.

        `known` indicates whether a coordinator has ever admitted this node.
        """
        if known and self._mode == Mode.STANDARD:
            return time.monotonic() >= missed_since + self._reconnect_seconds
        idle_since = self._idle_since
        return idle_since is not None and time.monotonic() >= max(missed_since, idle_since) + self._join_seconds

    def _connect(self) -> socket.socket:
        """Connect to the first of the name's addresses at which this job's coordinator responds.

        Raises OSError.
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
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that vanished sends no FIN
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
            raise ConnectionError("the coordinator there has been replaced")
        hello = dict(self._identity, proof=protocol.seal(self._token, "member", *nonces))
        with self.changed:
            if self._position:
                hello["resume"] = {**self._position, "planned": self.is_planned(self._position["round"])}
        with self._lock:
            hello["notes"] = dict(self._notes)
        stream.sendall(protocol.encode(FromMember.HELLO, **hello))
        self._place = place

    def _challenge(self, stream: socket.socket) -> tuple[tuple[str, str], tuple[int, int]]:
        """Make the coordinator prove that it knows the job's token.

        Return both nonces, and (generation, attempt). The name or address may currently belong to a
        different job, or to this job with an older token. The proof also covers the generation and
        attempt, because otherwise a relay could claim any numbers. Raises OSError.
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
            raise ConnectionError("the coordinator there does not know this job's token (DDPJOB_TOKEN)")
        if not isinstance(generation, int) or not isinstance(attempt, int):  # a relay may have made them strings
            raise ConnectionError("its generation or its attempt is not a number")
        return nonces, (generation, attempt)

    def _look(self) -> None:
        """Check regularly whether the name leads to a later coordinator than the connected one."""
        chance = random.Random()  # The global generator is left to the script, which may have seeded it.
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
                continue  # not a coordinator of this job
            if place[0] > self._identity.get("generation", place[0]):
                self._leave_generation(place[0])
                return  # another address of the same coordinator must not count as the second time
            if place > self._place:
                self._move(stream, place)
                return

    def _leave_generation(self, found: int) -> None:
        """End when a later generation is found for the second time.

        By then, this host's kubelet would have asked this pod to end, if it were alive.
        """
        if self._outdated:
            expected = self._identity["generation"]
            text = f"this pod belongs to generation {expected}, and the group continues as generation {found}"
            self._on_end(protocol.EXIT_STOPPED, "Stopped", text)
        self._outdated = True

    def _move(self, stream: socket.socket, place: tuple[int, int]) -> None:
        """Leave the current coordinator, which then exits so that the other members leave too."""
        log("the coordinator of generation {}, attempt {}, has taken over; connecting to it".format(*place))
        self._place = place
        self.send_now(FromMember.REPLACED, generation=place[0], attempt=place[1])
        with contextlib.suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)

    def _read(self, stream: socket.socket) -> tuple[bool, str, bool]:
        """Handle lines until the connection ends.

        Return (whether the coordinator has sent its last line, why the connection ended, whether
        this node was welcomed).
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
            log("the coordinator does not understand this node: {}".format(message.get("why")))
        return verb in (ToMember.REFUSED, ToMember.STOP, ToMember.DONE)

    def _on_go(self, message: dict[str, Any]) -> None:
        with self.changed:
            if self._ready is None or message["round"] <= self._ready["after"]:
                return  # stale: sent before the coordinator got this node's latest line
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
            text = f"this pod belongs to generation {expected}, the coordinator to {found}"
            if isinstance(found, int) and found < expected:
                # That coordinator is about to end, and its name will belong to a new one.
                self._refusal = text
                return False
            self._on_end(protocol.EXIT_RENDEZVOUS_LOST, "RendezvousLost", text)
            return True
        with self._lock:
            self.welcomed = True
            self._write_all_kept()
            # Read `_ready` only after setting `welcomed`. `wait_go` sets `_ready` and then sends it
            # only if this node is welcomed, so one of the two threads sends it.
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
