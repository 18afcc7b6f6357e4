"""A fake launcher. It sends what the production launcher and torchrun would send, without
processes.

It is a single model of the runtime's client (connections, resends, patience), agent (states of
workers) and rendezvous (how a group meets). tests/runtime runs the real ones against the same
coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import production
from .clock import EPOCH_SECONDS
from .network import Connection, Network

if TYPE_CHECKING:
    from .kubelet import Pod
    from .training import Training, WorkerRound

PEER_GONE = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.9]:4711"
)
DRAIN_GRACE = {production.STANDARD: 2.0, production.FAST: 0.3}
JOIN_SECONDS = 600.0
RENDEZVOUS_SECONDS = 60.0
"""Seconds after which an incomplete rendezvous is abandoned."""


class Launcher:
    """The trainer container's main process. `ended(exit_code, message)` is called when it ends."""

    def __init__(
        self,
        network: Network,
        training: Training,
        pod: Pod,
        container: dict[str, Any],
        ended: Callable[[int, str], None],
    ) -> None:
        self.network, self.training, self.pod, self._ended = network, training, pod, ended
        env = {e["name"]: e.get("value", "") for e in container["env"]}
        self.index, self.attempt = int(env["DDPJOB_INDEX"]), int(env["DDPJOB_ATTEMPT"])
        self.generation, self.token = int(env["DDPJOB_GENERATION"]), env["DDPJOB_TOKEN"]
        self.mode = production.Mode(env["DDPJOB_RECOVERY"])
        self.coordinator_name = env["DDPJOB_COORDINATOR"].rpartition(":")[0]
        self.grace = float(env["DDPJOB_GRACE_SECONDS"])
        self.alive, self.leaving, self.stuck, self.done = True, False, False, False
        self.workers = "none"
        """none, meeting (in a rendezvous), starting, running, finished, ending"""
        self.round: WorkerRound | None = None
        self.place: dict[str, Any] = {}
        self.restart_round, self.planned = -1, False
        self.silence = production.SILENCE_SECONDS
        self._connection: Connection | None = None
        self._welcomed = self._reached = self._booted = False
        self._ready: dict[str, Any] | None = None
        self._unsent: list[tuple[str, dict[str, Any]]] = []
        self._notes: dict[str, str] = {}
        self._missed_since, self._idle_since = network.clock.now, network.clock.now  # type: float, float | None
        self._place = (-1, -1)
        self._outdated = False
        self._pause = 0.05
        self._silent_neighbours = set[tuple[int, int]]()
        self._acts = 0  # planned calls for an earlier state of the workers are ignored
        self.init_error = ""
        self.note_cold = self.unfit = ""
        self.stands_in = "step"
        """The function that its ranks' stacks show."""
        self.stands_still = False
        """Whether its ranks use no CPU time at all."""
        self._later(0.01, self._dial)
        if self.mode == production.FAST:
            self._later(production.LOOKUP_SECONDS, self._look)
        self._later(network.draw("boot"), self._boot)

    # ---- time

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        self.network.clock.later(seconds, lambda: function() if self.alive else None)

    def _then(self, seconds: float, function: Callable[[], None]) -> None:
        """Call `function` later, unless the state of the workers has changed in the meantime."""
        self._acts += 1
        act = self._acts
        self._later(seconds, lambda: function() if self._acts == act else None)

    def _unix(self) -> float:
        return EPOCH_SECONDS + self.network.clock.now

    @property
    def working(self) -> bool:
        """Whether workers of the launcher's round may be alive."""
        return self.alive and self.workers in ("starting", "running", "finished", "ending")

    @property
    def obeys(self) -> bool:
        """Whether the coordinator reaches the launcher and has not asked it to stop, and the
        launcher is not stuck.

        A stuck launcher may return from a partition and keep training until the coordinator gives
        up on it.
        """
        reached = self._welcomed and self._connection is not None and self._connection.frozen_since is None
        return reached and not self.leaving and not self.stuck

    @property
    def has_been_ready(self) -> bool:
        """Whether the launcher has ever asked for a round."""
        return self._ready is not None or bool(self.place)

    # ---- the link

    def _dial(self) -> None:
        if self._connection is not None or self.done:
            return
        if self._gives_up():
            self.leave(production.EXIT_RENDEZVOUS_LOST, "RendezvousLost", "no coordinator")
            return
        process = self.network.resolve(self)
        if process is None or not self.network.reachable(self.pod, process.pod):
            self._later(self._pause, self._dial)
            self._pause = min(1.0, self._pause * 1.5)
            return
        self._connection = Connection(self.network, self, process)
        self._connection.to_coordinator(production.encode("challenge", nonce=self.pod.name))

    def _gives_up(self) -> bool:
        now = self.network.clock.now
        if self._reached and self.mode == production.STANDARD:
            return now >= self._missed_since + production.RECONNECT_SECONDS
        return self._idle_since is not None and now >= max(self._missed_since, self._idle_since) + JOIN_SECONDS

    def _look(self) -> None:
        """Look up the coordinator's name, and move to a later coordinator if there is one."""
        self._later(production.LOOKUP_SECONDS, self._look)
        process, connection = self.network.resolve(self), self._connection
        if not self._welcomed or connection is None or process is None or process is connection.coordinator:
            return
        place = process.generation, process.attempt
        if not self.network.reachable(self.pod, process.pod) or process.token != self.token or self.leaving:
            return
        if place[0] > self.generation:
            if self._outdated:
                self.leave(production.EXIT_STOPPED, "Stopped", "another generation trains")
            self._outdated = True
        elif place > self._place:
            self._place = place
            self.send("replaced", generation=place[0], attempt=place[1])
            connection.close_down("it has been replaced")

    def _on_proof(self, message: dict[str, Any]) -> None:
        """Send hello if this is the job's coordinator. Otherwise, close the connection and look the
        name up again.
        """
        assert self._connection is not None
        nonces = self.pod.name, message["nonce"]
        place = message["generation"], message["attempt"]
        if not production.is_sealed(message["proof"], self.token, "coordinator", *nonces, *map(str, place)):
            self._connection.close_down("it does not know this job's token")
            return
        if place < self._place:
            self._connection.close_down("it has been replaced")
            return
        self._place = place
        hello: dict[str, Any] = {
            "proof": production.seal(self.token, "member", *nonces),
            "pod": self.pod.name,
            "pid": 1,
            "grace": self.grace,
            "index": self.index,
            "attempt": self.attempt,
            "generation": self.generation,
        }
        if self.place:
            planned = self.planned and self.restart_round >= self.place["round"]
            hello["resume"] = {**self.place, "planned": planned}
        if self._notes:
            hello["notes"] = self._notes
        self._connection.to_coordinator(production.encode("hello", **hello))

    def disconnected(self, connection: Connection, why: str) -> None:
        """Handle the end of the connection: reconnect, for as long as the mode allows."""
        if connection is not self._connection or not self.alive:
            return
        welcomed, self._connection, self._welcomed = self._welcomed, None, False
        if self.done or self.leaving:
            return
        if welcomed:
            self._missed_since, self._pause = self.network.clock.now, 0.05
        self._later(self._pause, self._dial)
        self._pause = min(1.0, self._pause * 1.5)

    def send(self, verb: str, **fields: Any) -> None:
        """Send now, or after the next welcome."""
        if self._connection is not None and self._welcomed:
            self._connection.to_coordinator(production.encode(verb, **fields))
        else:
            self._unsent.append((verb, fields))

    def receive(self, connection: Connection, line: bytes) -> None:
        """Handle a line from the coordinator."""
        if connection is not self._connection or not self.alive:
            return
        message = production.decode(line)
        verb = message["t"]
        if verb == "proof":
            self._on_proof(message)
        elif verb == "welcome":
            self._on_welcome(message)
        elif verb == "go":
            self._on_go(message)
        elif verb == "restart":
            self._on_restart(int(message["round"]), bool(message.get("planned")))
        elif verb == "dump":
            self._on_dump(int(message["round"]))
        elif verb == "look":
            self._on_look(int(message["round"]))
        elif verb == "done":
            self.done = True
            if self.workers in ("none", "finished", "meeting") and self._booted:
                self._later(self.network.draw("drain"), lambda: self.leave(0, "Done", ""))
        elif verb == "refused":
            self.leave(
                production.EXIT_INIT_FAILURE, "InitFailure", f"the coordinator refused this node: {message.get('why')}"
            )
        elif verb == "stop":
            fenced = bool(message.get("fenced"))
            code = production.EXIT_FENCED if fenced else production.EXIT_STOPPED
            self.leave(code, "Fenced" if fenced else "Stopped", str(message.get("why", "")))

    def _on_welcome(self, message: dict[str, Any]) -> None:
        if message["generation"] < self.generation:
            return  # it is about to exit, and its successor takes over its name
        if message["generation"] != self.generation:
            self.leave(production.EXIT_RENDEZVOUS_LOST, "RendezvousLost", "another generation")
            return
        assert self._connection is not None
        first = not self._reached
        self._welcomed = self._reached = True
        unsent, self._unsent = self._unsent, []
        for verb, fields in unsent:
            late = {"sent": self._unix()} if "sent" in fields else {}
            self._connection.to_coordinator(production.encode(verb, **{**fields, **late}))
        if self._ready is not None:
            self._connection.to_coordinator(production.encode("ready", **self._ready))
        if first and self._booted:
            self._begin()

    # ---- the agent

    def _boot(self) -> None:
        self._booted = True
        if self._reached or self.done:
            self._begin()

    def _begin(self) -> None:
        if self.done:
            self.leave(0, "Done", "")
            return
        if self.init_error:
            self.send("init_failure", message=self.init_error)
            self.leave(production.EXIT_INIT_FAILURE, "InitFailure", self.init_error)
            return
        if self.unfit:
            self.leave(production.EXIT_UNFIT, "PreflightFailed", self.unfit)
            return
        if self.note_cold:
            self._notes["ColdWorkers"] = self.note_cold
            self.send("note", kind="ColdWorkers", why=self.note_cold)
        self._wait_go()

    def _wait_go(self) -> None:
        """Start waiting for `go`, unless the launcher is leaving or stuck."""
        if self.leaving or self.stuck:
            return
        if self.done:
            self.leave(0, "Done", "")
            return
        self._drop_round("ended")
        self.workers, self._idle_since = "none", self.network.clock.now
        self._ready = {"after": self.place.get("round", 0), "host": "10.0.0.1", "port": 4000 + self.index}
        if self.place:
            self.place["state"] = "Ready"
        if self._connection is not None and self._welcomed:
            self._connection.to_coordinator(production.encode("ready", **self._ready))

    def _on_go(self, message: dict[str, Any]) -> None:
        if self._ready is None or message["round"] <= self._ready["after"]:
            return
        self._ready = self._idle_since = None
        self.place = {name: message[name] for name in ("round", "rank", "world")} | {"state": "Running"}
        if self.leaving or self.stuck:
            return
        self.workers = "meeting"
        self.round = self.training.meet(self, message)
        number = message["round"]
        self._then(RENDEZVOUS_SECONDS, lambda: self._came_apart(number))

    def watch_neighbours(self) -> None:
        """Some time after a link was cut or healed, report the neighbours that are silent, or no
        longer silent.
        """
        current = self.round
        if current is None or not self.working or not self.place or self.stuck:
            return
        number, rank, world = (self.place[name] for name in ("round", "rank", "world"))
        for other in {(rank - 1) % world, (rank + 1) % world} - {rank}:
            peer = current.arrived.get(other)
            silent = peer is not None and not self.network.reachable(self.pod, peer.pod)
            if silent != ((number, other) in self._silent_neighbours):
                self._silent_neighbours ^= {(number, other)}
                self.send("neighbour", round=number, rank=other, silent=silent)

    def _came_apart(self, number: int) -> None:
        if self.workers == "meeting" and self.place["round"] == number:
            self._wait_go()

    def met(self) -> None:
        """Start the workers, because every member of the round has arrived."""
        self.workers = "starting"
        self._then(self.network.draw("join"), self._started)

    def _started(self) -> None:
        if self.stuck or self.leaving:
            return
        self.workers = "running"
        self.send("joined", round=self.place["round"])
        if self.restart_round >= self.place["round"]:
            self._end_workers()
            return
        assert self.round is not None
        self.training.started(self, self.round)

    def _on_restart(self, number: int, planned: bool) -> None:
        hurry = number == self.restart_round and self.planned and not planned
        if number <= self.restart_round and not hurry:
            return
        self.restart_round, self.planned = number, planned
        if self.place.get("round", 0) > number or self.leaving or self.stuck:
            return
        if self.workers == "meeting":
            self._then(self.network.draw("drain"), self._wait_go)
        elif self.workers in ("running", "finished") or (hurry and self.workers == "ending"):
            self._end_workers()

    def _end_workers(self) -> None:
        """Stop the workers: SIGTERM, then SIGKILL after the grace period. Afterwards, this node is
        ready for a round.
        """
        grace = self.grace if self.planned else DRAIN_GRACE[self.mode]
        seconds = 0.05 if self.workers == "finished" else min(grace, self.network.draw("drain"))
        self.workers = "ending"
        self._drop_round("ended")
        self._then(seconds, self._wait_go)

    def _drop_round(self, how: str) -> None:
        """Remove the launcher's processes from the round."""
        if self.round is not None:
            current, self.round = self.round, None
            self.training.left(self, current, how)

    def _on_dump(self, number: int) -> None:
        if self.working and self.place.get("round") == number:
            text = 'Current thread 0x1 (most recent call first):\n  File "train.py", line 7 in ' + f"{self.stands_in}\n"
            place = {"round": number, "rank": self.place["rank"], "localRank": 0}
            idle = self.network.clock.now - self.training.last_step > 2.0
            self._later(0.1, lambda: self.send("stacks", **place, text=text, idle=idle))

    def _on_look(self, number: int) -> None:
        """Answer the coordinator's check: the rank has worked since the last check, unless it
        `stands_still`.
        """
        if self.working and self.place.get("round") == number:
            where = f'  File "train.py", line 7 in {self.stands_in}\n'
            look = {"rank": self.place["rank"], "text": where, "digest": self.stands_in, "seconds": 5.0, "bytes": 0}
            look["cpu"] = 0.0 if self.stands_still else 4.0
            self._later(0.1, lambda: self.send("looked", round=number, ranks=[look]))

    # ---- faults of its workers

    def worker_ends(self, message: str, code: int = 1, *, oom: bool = False, init: bool = False) -> bool:
        """Let a worker exit on its own. Return False if there is no worker."""
        if self.workers != "running" or self.stuck or self.leaving:
            return False
        now = self._unix()
        signal = {-9: "SIGKILL", -11: "SIGSEGV", -6: "SIGABRT"}.get(code)
        self.workers = "ending"
        self._drop_round("ended")

        def report() -> None:
            self.send(
                "failure",
                round=self.place["round"],
                rank=self.place["rank"],
                localRank=0,
                pid=7,
                exitCode=code,
                signal=signal,
                message=message,
                traceback=f"Traceback (most recent call last):\n{message}",
                time=now,
                sent=self._unix(),
                oom=oom,
                init=init,
            )
            self._then(min(DRAIN_GRACE[self.mode], self.network.draw("drain")), self._wait_go)

        self._then(0.02, report)
        return True

    def finished(self) -> None:
        """Let all its workers exit with code 0."""
        if self.workers != "running" or self.stuck or self.leaving:
            return
        self.workers, self._idle_since = "finished", self.network.clock.now
        self.round = None
        self.place["state"] = "Finished"
        self.send("finished", round=self.place["round"])
        if self.done:
            self.leave(0, "Done", "")

    # ---- its end

    def terminate(self, saves: bool) -> None:
        """Handle SIGTERM to the container. A script that saves makes its peers save too. Then all
        of them leave the round.
        """
        if not self.alive or self.leaving:
            return
        self.leaving = True
        self.send("leaving", why="ended by SIGTERM")
        if saves and self.workers == "running" and self.round is not None:
            self.training.save_and_leave(self.round)
        self._acts += 1
        self._later(self.network.draw("drain") + 0.3, lambda: self._exit(143, "Signal", "ended by SIGTERM"))

    def leave(self, code: int, kind: str, message: str) -> None:
        """Exit on its own, together with its workers."""
        if not self.alive or self.leaving:
            return
        self.leaving = True
        self._acts += 1
        self._later(self.network.draw("drain"), lambda: self._exit(code, kind, message))

    def crash(self, code: int, reason: str, message: str = "") -> None:
        """Kill the process immediately."""
        if self.alive:
            self.kill()
            self._ended(code, message if message else reason)

    def _exit(self, code: int, kind: str, message: str) -> None:
        self.kill()
        self._ended(code, json.dumps({"kind": kind, "message": message, "traceback": ""}) if code else "")

    def kill(self) -> None:
        """Remove the process and its workers."""
        if not self.alive:
            return
        self.alive = False
        self._drop_round("died")
        if self._connection is not None:
            self._connection.vanish(launcher=True)
