"""The production code that the simulation runs, under stable names. No other module imports the
coordinator.

The operator's port, views and `reconcile` are imported where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator import __main__ as program
from ddpjob_runtime.coordinator import http_api
from ddpjob_runtime.coordinator import server as sockets
from ddpjob_runtime.coordinator.coordinator import Coordinator
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.launcher import client, neighbours
from ddpjob_runtime.protocol import Command, Mode

Json = dict[str, Any]
Send = Callable[[str, Json], None]
FAST, STANDARD = Mode.FAST, Mode.STANDARD
SILENCE_SECONDS: float = protocol.SILENCE_SECONDS
REPORTED_SECONDS: float = neighbours.SILENT_SECONDS + neighbours.TICK_SECONDS
"""Seconds after which a partitioned neighbour is reported."""
STARTING_SECONDS: float = sockets.STARTING_SECONDS
RECONNECT_SECONDS: float = protocol.RECONNECT_SECONDS
LOOKUP_SECONDS: float = client.LOOKUP_SECONDS
EXIT_STEPPED_ASIDE, EXIT_RENDEZVOUS_LOST = protocol.EXIT_STEPPED_ASIDE, protocol.EXIT_RENDEZVOUS_LOST
EXIT_STOPPED, EXIT_INIT_FAILURE, EXIT_FENCED, EXIT_UNFIT = (
    protocol.EXIT_STOPPED,
    protocol.EXIT_INIT_FAILURE,
    protocol.EXIT_FENCED,
    protocol.EXIT_UNFIT,
)
encode, decode = protocol.encode, protocol.decode
seal, is_sealed = protocol.seal, protocol.is_sealed


class RealCoordinator:
    """The coordinator's program without its sockets. Tests pass in lines and requests, and receive
    lines and responses.

    `clock()` returns Unix seconds, `later` schedules a call, `log` receives the log lines, and
    `changed()` is called when the report changes. `acknowledges` tells whether a member's kernel
    would acknowledge packets.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: Json,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Any],
        log: Callable[[str], None],
        changed: Callable[[], None],
        acknowledges: Callable[[Member], bool],
    ) -> None:
        self._clock, self._log = clock, log
        server = object.__new__(sockets.Server)  # its __init__ needs an event loop
        server.token, server.store_ready = environment["DDPJOB_TOKEN"], True
        server.renew()
        server.strangers = sockets.Strangers()
        self.coordinator = server.coordinator = Coordinator(
            _settings(arguments, environment), clock, later, changed, log, acknowledges
        )
        self._server = server

    @property
    def server(self) -> Any:
        """The object that `http_api.serve` expects."""
        return self._server

    @property
    def state(self) -> str:
        """The state of the members in the report."""
        return str(self.coordinator.report().state)

    @property
    def rounds(self) -> int:
        """The number of the newest round."""
        return int(self.coordinator.report().round)

    @property
    def exits(self) -> bool:
        """Whether the coordinator was asked to exit."""
        return self.coordinator.exit_why is not None

    def prove(self, line: bytes, send: Send) -> tuple[str, str] | None:
        """Answer the first line of a connection, and return the nonces of both sides. None means
        that the connection must be closed.
        """
        self._enter()
        nonces: tuple[str, str] | None = self._server._prove(line, send)
        return nonces

    def admit(self, line: bytes, nonces: tuple[str, str], send: Send) -> Member | None:
        """Handle the second line. None means that the connection must be closed."""
        self._enter()
        member: Member | None = self._server._admit(line, nonces, send)
        return member

    def receive(self, member: Member, line: bytes, send: Send) -> None:
        """Handle a later line."""
        self._enter()
        self.hear(member)
        try:
            self._server._on_message(member, protocol.decode(line), send)
        except ValueError as error:
            send("error", {"why": str(error)})

    def hear(self, member: Member) -> None:
        """Note that a heartbeat has arrived."""
        member.hear(self._clock())

    def lost(self, member: Member, send: Send, why: str) -> None:
        """Handle the end of the connection."""
        self._enter()
        if member.send is send and member.state != protocol.MemberState.LOST:
            self.coordinator.lost(member, why)

    def status(self) -> bytes:
        """Return the body of `GET /status`."""
        return json.dumps(self.coordinator.report().write()).encode()

    def post(self, verb: str, token: str, body: bytes) -> int:
        """Handle `POST /v1/VERB` and return the HTTP status."""
        self._enter()
        try:
            change = http_api.ROUTES[Command(verb).path][1]
            if not http_api._has_token(self._server, {"authorization": f"Bearer {token}"}):
                raise http_api.BadRequest(401, "another token")
            return int(http_api._change(self._server, change, body)[0])
        except http_api.BadRequest as refused:
            self._log(f"refuses {verb}: {refused}")
            return refused.status

    def _enter(self) -> None:
        sockets.now, sockets.log = self._clock, self._log


def _settings(arguments: list[str], environment: Json) -> CoordinatorSettings:
    named = dict(a.removeprefix("--").split("=", 1) for a in arguments)
    initial, maximum = program.backoff(named["backoff"])
    return CoordinatorSettings(
        int(named["nodes"]),
        int(named["min-nodes"]),
        int(environment["DDPJOB_GENERATION"]),
        Mode(named["mode"]),
        int(named["attempt"]),
        float(named["hang-after"]) if "hang-after" in named else None,
        initial,
        maximum,
        environment.get("DDPJOB_RANK_ORDER") == "1",
        environment.get("DDPJOB_NO_RESTARTS") == "1",
    )
