"""The launcher's connection to the coordinator: kept alive and renewed by threads, read by the agent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import wire

CONNECT_SECONDS = 2.0
MAX_UNSENT = 100
GOODBYE_SECONDS = 1.0


class Link:
    """One member's side of the wire.

    `on_end(exit_code, kind, message)` is called on the link's thread when this process has to end: refused, stopped, no coordinator.
    """

    def __init__(self, address: str, identity: dict[str, Any], join_seconds: float, on_end: Callable[[int, str, str], None]) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"DDPJOB_COORDINATOR must be host:port, not {address!r}")
        self._address, self._identity, self._on_end = (host.strip("[]"), int(port)), identity, on_end
        self._join_seconds = join_seconds
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []
        self._thread = threading.Thread(target=self._keep, name="ddpjob-link", daemon=True)
        self._closing = False
        self._round: dict[str, Any] | None = None  # this node's place in the rendezvous, while it has one
        self.news = threading.Condition()
        self.welcomed = False
        self.done = False
        self._restart_round = -1
        self.why = ""

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._thread.start()
        threading.Thread(target=self._beat, name="ddpjob-heartbeat", daemon=True).start()

    # ---- for the agent

    def wait_welcome(self, seconds: float | None = None) -> bool:
        """Until the coordinator has let this node in, or says that there is nothing left to do."""
        with self.news:
            return self.news.wait_for(lambda: self.welcomed or self.done, seconds)

    def must_restart(self, number: int | None) -> bool:
        """Whether a peer of rendezvous round `number` is gone."""
        return number is not None and self._restart_round >= number

    def wait_verdict(self, number: int) -> bool:
        """After `finished`: True when every node has finished, False when the round must be run again."""
        with self.news:
            self.news.wait_for(lambda: self.done or self.must_restart(number))
            return self.done

    def joining(self) -> None:
        """This node has left its round and goes to the rendezvous."""
        self._round = None
        self.send("joining")

    def joined(self, number: int, rank: int, world: int) -> None:
        """The rendezvous is complete: its round, this node's rank, number of nodes."""
        self._round = {"round": number, "rank": rank, "world": world}
        self.send("joined", **self._round)

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

    def _keep(self) -> None:
        deadline, reached = time.monotonic() + self._join_seconds, False
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
            if self.welcomed and not reached:
                reached = True
            if reached:
                deadline, pause = time.monotonic() + wire.RECONNECT_SECONDS, 0.05
            time.sleep(pause)
        self._on_end(wire.EXIT_RENDEZVOUS_LOST, "RendezvousLost", "no coordinator at {}:{}: {}".format(*self._address, why))

    def _connect(self) -> socket.socket:
        stream = socket.create_connection(self._address, timeout=CONNECT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that vanished sends no FIN
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(wire.SILENCE_SECONDS * 1000))
        stream.settimeout(wire.SILENCE_SECONDS)
        hello = dict(self._identity)
        if self._round is not None:
            hello["resume"] = self._round
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
            self._socket = None
        stream.close()
        return False, why

    def _on_message(self, message: dict[str, Any]) -> bool:
        verb = message["t"]
        if verb == "welcome":
            return self._on_welcome(message)
        with self.news:
            if verb == "restart" and isinstance(message.get("round"), int):
                self._restart_round, self.why = max(self._restart_round, message["round"]), str(message.get("why", ""))
            elif verb == "done":
                self.done = True
            self.news.notify_all()
        if verb == "refused":
            self._on_end(wire.EXIT_INIT_FAILURE, "InitFailure", "the coordinator refused this node: {}".format(message.get("why")))
        elif verb == "stop":
            self._on_end(wire.EXIT_STOPPED, "Stopped", str(message.get("why", "")))
        return verb in ("refused", "stop", "done")

    def _on_welcome(self, message: dict[str, Any]) -> bool:
        expected = self._identity.get("generation")
        if expected is not None and message.get("generation") != expected:
            text = "this pod belongs to generation {}, the coordinator to {}".format(expected, message.get("generation"))
            self._on_end(wire.EXIT_RENDEZVOUS_LOST, "RendezvousLost", text)
            return True
        with self._lock:
            self.welcomed = True
            unsent, self._unsent = self._unsent, []
            for data in unsent:
                self._write(data)
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
