"""The launcher's connection to the coordinator: kept alive and renewed by threads, read by the agent."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (names are encoded by it; a thread that imports it first may meet the main thread in the middle of that)
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import wire
from departure import say

CONNECT_SECONDS = 2.0
MAX_UNSENT = 100
GOODBYE_SECONDS = 1.0


class Link:
    """One member's side of the wire.

    `on_end(exit_code, kind, message)` is called on the link's thread when this process has to end: refused, stopped, no coordinator.
    """

    def __init__(
        self, address: str, identity: dict[str, Any], mode: str, join_seconds: float, on_end: Callable[[int, str, str], None]
    ) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"DDPJOB_COORDINATOR must be host:port, not {address!r}")
        self._address, self._identity, self._on_end = (host.strip("[]"), int(port)), identity, on_end
        self._join_seconds, self._reconnect_seconds = join_seconds, wire.RECONNECT_SECONDS[mode]
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []
        self._thread = threading.Thread(target=self._guard, args=(self._keep,), name="ddpjob-link", daemon=True)
        self._closing = False
        self._place: dict[str, Any] = {}  # round, rank, world and state, from the first round on
        self._ready: dict[str, Any] | None = None  # what was last said, while no round has come of it
        self._go: dict[str, Any] | None = None
        self.news = threading.Condition()
        self.welcomed = False
        self._reached = False  # welcomed at least once
        self.done = False
        self._restart_round, self._planned = -1, False
        self.why = ""
        self.on_restart: Callable[[int], None] = lambda number: None
        self.on_hurry: Callable[[int], None] = lambda number: None  # a planned restart has lost a member: nobody can save any more
        self.on_dump: Callable[[int], None] = lambda number: None

    def start(self) -> None:
        """Begin to connect; returns at once."""
        with contextlib.suppress(OSError):
            # A process' first look-up makes glibc read the environment, which in a thread ends in a crash when a variable is set meanwhile.
            socket.getaddrinfo("localhost", None)
        self._thread.start()
        threading.Thread(target=self._guard, args=(self._beat,), name="ddpjob-heartbeat", daemon=True).start()

    # ---- for the agent

    def wait_welcome(self, seconds: float | None = None) -> bool:
        """Until the coordinator has let this node in, or says that there is nothing left to do."""
        with self.news:
            return self.news.wait_for(lambda: self.welcomed or self.done, seconds)

    def must_restart(self, number: int | None) -> bool:
        """Whether round `number` is over."""
        return number is not None and self._restart_round >= number

    def is_planned(self, number: int | None) -> bool:
        """Whether round `number` ends because of a change, not of a loss: workers can still agree and save."""
        return self.must_restart(number) and self._planned

    def wait_verdict(self, number: int) -> bool:
        """After `finished`: True when every node has finished, False when the round must be run again."""
        with self.news:
            self._place["state"] = "Finished"
        self.send("finished", round=number)
        with self.news:
            self.news.wait_for(lambda: self.done or self.must_restart(number))
            return self.done

    def wait_go(self, host: str, port: int) -> dict[str, Any] | None:
        """This node has no workers and can begin a round; returns the coordinator's `go`, None when there is nothing left to do.

        `port`: of the store that this node would host as rank 0; 0 where it would not.
        """
        with self.news:
            self._go = None
            self._ready = {"after": self._place.get("round", 0), "host": host, "port": port}
            if self._place:
                self._place["state"] = "Ready"
        self.send_now("ready", **self._ready)
        with self.news:
            self.news.wait_for(lambda: self.done or self._go is not None)
            return self._go

    def joined(self, number: int) -> None:
        """The workers of round `number` are started."""
        self.send("joined", round=number)

    def send_now(self, verb: str, **fields: Any) -> None:
        """Send if there is a connection; what a welcome says again need not be kept."""
        with self._lock:
            if self._socket is not None and self.welcomed:
                self._write(wire.encode(verb, **fields))

    def send(self, verb: str, **fields: Any) -> None:
        """Send now, or after the next welcome when there is no connection."""
        data = wire.encode(verb, **fields)
        with self._lock:
            if self._socket is not None and self.welcomed and self._write(data):
                return
            self._unsent.append(data)
            del self._unsent[:-MAX_UNSENT]

    def _write(self, data: bytes) -> bool:
        assert self._socket is not None
        try:
            self._socket.sendall(data)
            return True
        except OSError:
            return False  # the reader sees the end of this connection and makes a new one

    def close(self) -> None:
        """Say goodbye in order: an exit with unread data in the socket would reset the connection, and the last words could be lost."""
        self._closing = True
        with self._lock:
            stream = self._socket
        if stream is None or threading.current_thread() is self._thread:
            return
        try:
            stream.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has ended already
        self._thread.join(GOODBYE_SECONDS)

    # ---- threads

    def _guard(self, work: Callable[[], None]) -> None:
        """A launcher that nobody can reach any more would train, or wait, for ever."""
        try:
            work()
        except Exception as error:
            say(f"the link to the coordinator has failed:\n{traceback.format_exc()}")
            self._on_end(1, "Error", f"the link to the coordinator has failed: {type(error).__name__}: {error}")

    def _keep(self) -> None:
        deadline = time.monotonic() + self._join_seconds
        pause, why = 0.05, "no attempt yet"
        while time.monotonic() < deadline:
            try:
                stream = self._connect()
            except OSError as error:  # NXDOMAIN included: the name is resolved anew each time
                why = str(error)
                time.sleep(pause)
                pause = min(pause * 1.5, 1.0)
                continue
            over, why = self._read(stream)
            if over or self._closing:
                return
            if self._reached:
                deadline, pause = time.monotonic() + self._reconnect_seconds, 0.05
            time.sleep(pause)
        self._on_end(wire.EXIT_RENDEZVOUS_LOST, "RendezvousLost", "no coordinator at {}:{}: {}".format(*self._address, why))

    def _connect(self) -> socket.socket:
        stream = socket.create_connection(self._address, timeout=CONNECT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that vanished sends no FIN
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(wire.SILENCE_SECONDS * 1000))
        stream.settimeout(wire.SILENCE_SECONDS)
        hello = dict(self._identity)
        with self.news:
            if self._place:
                hello["resume"] = dict(self._place)
        stream.sendall(wire.encode("hello", **hello))
        with self._lock:
            self._socket = stream
        return stream

    def _read(self, stream: socket.socket) -> tuple[bool, str]:
        """Take in lines until the connection ends. (True, _): there is nothing left to hear."""
        why = "it closed the connection"
        try:
            with stream.makefile("rb") as lines:
                for line in lines:
                    if self._on_message(wire.decode(line)):
                        return True, ""
        except (OSError, ValueError) as error:
            why = str(error)
        with self._lock:
            self._socket, self.welcomed = None, False
        stream.close()
        return False, why

    def _on_message(self, message: dict[str, Any]) -> bool:
        verb = message["t"]
        if verb == "welcome":
            return self._on_welcome(message)
        if verb == "go":
            self._on_go(message)
        elif verb == "restart":
            self._on_told_to_restart(message)
        elif verb == "dump":
            self.on_dump(int(message["round"]))
        elif verb == "done":
            with self.news:
                self.done = True
                self.news.notify_all()
        if verb == "refused":
            self._on_end(wire.EXIT_INIT_FAILURE, "InitFailure", "the coordinator refused this node: {}".format(message.get("why")))
        elif verb == "stop":
            code, kind = (wire.EXIT_FENCED, "Fenced") if message.get("fenced") else (wire.EXIT_STOPPED, "Stopped")
            self._on_end(code, kind, str(message.get("why", "")))
        elif verb == "error":
            say("the coordinator does not understand this node: {}".format(message.get("why")))
        return verb in ("refused", "stop", "done")

    def _on_go(self, message: dict[str, Any]) -> None:
        with self.news:
            if self._ready is None or message["round"] <= self._ready["after"]:
                return  # it has crossed a later word of this node
            self._ready, self._go = None, message
            self._place = {"round": message["round"], "rank": message["rank"], "world": message["world"], "state": "Running"}
            self.news.notify_all()

    def _on_told_to_restart(self, message: dict[str, Any]) -> None:
        number, planned = int(message["round"]), bool(message.get("planned"))
        with self.news:
            hurry = number == self._restart_round and self._planned and not planned
            if number <= self._restart_round and not hurry:
                return
            self._restart_round, self._planned = number, planned
            self.why = str(message.get("why", ""))
            self.news.notify_all()
        if hurry:
            self.on_hurry(number)
        else:
            self.on_restart(number)

    def _on_welcome(self, message: dict[str, Any]) -> bool:
        expected = self._identity.get("generation")
        if expected is not None and message.get("generation") != expected:
            text = "this pod belongs to generation {}, the coordinator to {}".format(expected, message.get("generation"))
            self._on_end(wire.EXIT_RENDEZVOUS_LOST, "RendezvousLost", text)
            return True
        with self.news:
            ready = self._ready
        with self._lock:
            self.welcomed = self._reached = True
            unsent, self._unsent = self._unsent, []
            for data in unsent:
                self._write(data)
            if ready is not None:
                self._write(wire.encode("ready", **ready))
        with self.news:
            self.news.notify_all()
        return False

    def _beat(self) -> None:
        beat = wire.encode("hb")
        while True:
            time.sleep(wire.HEARTBEAT_SECONDS)
            with self._lock:
                if self._socket is not None:
                    self._write(beat)
