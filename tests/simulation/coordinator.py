"""A coordinator's container. It runs the production coordinator, with the simulated network in
place of its sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import production
from .clock import EPOCH_SECONDS
from .network import Connection, Network

if TYPE_CHECKING:
    from .kubelet import Pod


class CoordinatorProcess:
    """One coordinator process. `ended(exit_code, message)` is called when it exits on its own."""

    def __init__(
        self, network: Network, pod: Pod, container: dict[str, Any], ended: Callable[[int, str], None], skew: float
    ) -> None:
        self.network, self.pod, self._ended, self._skew = network, pod, ended, skew
        environment = {e["name"]: e.get("value", "") for e in container["env"]}
        arguments = container["args"]
        self.alive, self.listening, self.began = True, False, network.clock.now
        self.connections: list[Connection] = []
        self.generation, self.token = int(environment["DDPJOB_GENERATION"]), environment["DDPJOB_TOKEN"]
        self.attempt = next(int(a.partition("=")[2]) for a in arguments if a.startswith("--attempt="))
        spec = pod.body["spec"]
        self.name = f"{spec['hostname']}.{spec['subdomain']}"
        self.on_change: Callable[[], None] = lambda: None
        self.real = production.RealCoordinator(
            arguments, environment, self.clock, self._later, self._log, lambda: self.on_change(), self._acknowledges
        )
        network.coordinators.append(self)
        network.clock.later(network.draw("listen"), self._listen)

    def _listen(self) -> None:
        self.listening = self.alive

    def clock(self) -> float:
        """Unix seconds on this host."""
        return EPOCH_SECONDS + self.network.clock.now + self._skew

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        def due() -> None:
            if self.alive:
                self._hear()
                function()

        self.network.clock.later(seconds, due)

    def _log(self, text: str) -> None:
        self.network.say(f"{self.pod.name}: {text}")

    def encode(self, verb: str, fields: dict[str, Any]) -> bytes:
        """Encode a line for a launcher."""
        if verb != "hb":
            self._log(f"-> {verb} {fields if verb != 'go' else (fields['round'], fields['rank'], fields['world'])}")
        line: bytes = production.encode(verb, **fields)
        return line

    def _hear(self) -> None:
        """Note the heartbeats that have arrived so far on each working connection."""
        for connection in self.connections:
            if connection.member is not None and connection.frozen_since is None and connection.down_open:
                self.real.hear(connection.member)

    def _acknowledges(self, member: Any) -> bool:
        """Return whether the member's host can be reached."""
        return all(c.frozen_since is None for c in self.connections if c.member is member and c.send is member.send)

    def silence(self, connection: Connection) -> float:
        """Return the seconds of silence after which the coordinator drops a connection."""
        starting = connection.member is not None and connection.member.state == "Starting"
        return production.STARTING_SECONDS if starting else production.SILENCE_SECONDS

    # ---- connections

    def receive(self, connection: Connection, line: bytes) -> None:
        """Handle a line from a launcher."""
        self._hear()
        if connection.nonces is None:
            connection.nonces = self.real.prove(line, connection.send)
            if connection.nonces is None:
                connection.close_up("refused")
        elif connection.member is None:
            connection.member = self.real.admit(line, connection.nonces, connection.send)
            if connection.member is None:
                connection.close_up("refused")
        else:
            self.real.receive(connection.member, line, connection.send)
            if self.real.exits and self.alive:
                self.stop(0)

    def lost(self, connection: Connection, why: str) -> None:
        """Handle the end of a connection."""
        if connection.member is not None and self.alive:
            if connection.frozen_since is None:
                self._hear()
            self._log(f"{connection.member.pod} ({connection.member.state}): {why}")
            self.real.lost(connection.member, connection.send, why)

    # ---- requests

    def status(self) -> bytes:
        """Return the body of `GET /status`."""
        self._hear()
        return self.real.status()

    def post(self, verb: str, token: str, body: bytes) -> int:
        """Handle `POST /v1/VERB` and return the HTTP status."""
        self._hear()
        status = self.real.post(verb, token, body)
        if self.real.exits and self.alive:
            self.stop(0)
        return status

    # ---- ends

    def stop(self, exit_code: int) -> None:
        """Exit on its own, or on a signal that the process can handle."""
        if self.alive:
            self.kill()
            self._ended(exit_code, "")

    def kill(self) -> None:
        """Remove the process."""
        if not self.alive:
            return
        self.alive = self.listening = False
        self.network.coordinators.remove(self)
        for connection in list(self.connections):
            connection.vanish(launcher=False)
