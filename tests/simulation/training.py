"""The training script: rounds of workers that meet, take steps together, and fail when a peer is
gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .launcher import PEER_GONE

if TYPE_CHECKING:
    from .launcher import Launcher
    from .network import Network

STEP_SECONDS = 1.0


class WorkerRound:
    """The workers of one round."""

    def __init__(self, generation: int, number: int, world: int, table: list[dict[str, Any]]) -> None:
        self.generation, self.number, self.world, self.table = generation, number, world, table
        self.arrived: dict[int, Launcher] = {}
        self.working: dict[int, Launcher] = {}
        self.broken = self.hung = self.whole = False
        self.silent_peer = False
        """Whether a member vanished without notice, so that the others wait in a collective."""

    def __repr__(self) -> str:
        return f"round {self.generation}.{self.number}"


class Training:
    """The script takes `steps` steps. A step takes a second and needs all ranks of a round.

    `check(round)` is called at each step. `progress` determines whether rank 0 reports to the
    coordinator.
    """

    def __init__(self, network: Network, steps: int) -> None:
        self.network, self.steps, self.made = network, steps, 0
        self.rounds: dict[tuple[int, int], WorkerRound] = {}
        self.check: Callable[[WorkerRound], None] = lambda current: None
        self.progress = True
        self.slow_pods: dict[str, dict[str, Any]] = {}
        """Reports about pods with a slow rank, by pod, while these pods train."""
        self.last_step = self.last_start = -1e9
        """Times of the last step of a group, and of the last start of a launcher's workers."""

    def meet(self, launcher: Launcher, go: dict[str, Any]) -> WorkerRound:
        """Let a launcher arrive at the rendezvous of its round."""
        key = launcher.generation, go["round"]
        current = self.rounds.get(key)
        if current is None:
            current = self.rounds[key] = WorkerRound(*key, go["world"], go["members"])
        assert (current.world, current.table) == (go["world"], go["members"]), (
            f"{current} was announced with different contents"
        )
        assert go["rank"] not in current.arrived, f"rank {go['rank']} of {current} was assigned twice"
        [first] = current.table
        assert first["rank"] == 0 and (go["rank"] == 0) == (first["pod"] == launcher.pod.name), (
            f"{current} has a different rank 0 than {first['pod']}"
        )
        current.arrived[go["rank"]] = launcher
        if len(current.arrived) == current.world and not current.broken:
            for member in list(current.arrived.values()):
                self.network.clock.later(
                    0.0, lambda member=member: member.met() if member.workers == "meeting" else None
                )  # type: ignore[misc]
        return current

    def started(self, launcher: Launcher, current: WorkerRound) -> None:
        """Mark a launcher's workers as running."""
        self.last_start = self.network.clock.now
        if current.broken:
            self._peers_notice(current, only=launcher)
        current.working[launcher.place["rank"]] = launcher
        if len(current.working) == current.world and not current.broken:
            current.whole = True
            self.last_step = self.network.clock.now
            self._tick(current)

    def runs(self, current: WorkerRound) -> bool:
        """Return whether the round can take a step now."""
        if current.broken or current.hung or len(current.working) < current.world:
            return False
        pods = [launcher.pod for launcher in current.working.values()]
        return all(self.network.reachable(pods[0], pod) for pod in pods[1:])

    def _tick(self, current: WorkerRound) -> None:
        self.network.clock.later(STEP_SECONDS, lambda: self._step(current))

    def _step(self, current: WorkerRound) -> None:
        if current.broken or not current.working:
            return
        if self.runs(current):
            self.check(current)
            self.made += 1
            self.last_step = self.network.clock.now
            if self.made >= self.steps:
                for member in list(current.working.values()):
                    self.network.clock.later(self.network.draw("notice"), member.finished)
                return
            if self.progress:
                self._report(current.working[0])
        self._tick(current)

    def _report(self, first: Launcher) -> None:
        process = self.network.resolve(first)
        if process is not None and self.network.reachable(first.pod, process.pod):
            process.post("progress", first.token, json.dumps({"step": self.made, "steps": self.steps}).encode())
            if self.slow_pods:
                ranks = {member.pod.name: rank for rank, member in first.round.working.items()} if first.round else {}
                lags = [{"rank": ranks[pod], **said} for pod, said in self.slow_pods.items() if pod in ranks]
                process.post("progress", first.token, json.dumps({"stragglers": lags}).encode())

    def left(self, launcher: Launcher, current: WorkerRound, how: str) -> None:
        """Remove a launcher's processes from its round."""
        rank = next((r for r, member in current.arrived.items() if member is launcher), None)
        if rank is None:
            return
        was_working = current.working.pop(rank, None) is not None
        current.broken = True
        if was_working:
            self._peers_notice(current, gone=launcher)

    def _peers_notice(self, current: WorkerRound, gone: Launcher | None = None, only: Launcher | None = None) -> None:
        """Notice a lost peer: immediately if the kernel closes the connection, never if the link is
        cut.
        """
        for member in [only] if only is not None else list(current.working.values()):
            if gone is not None and not self.network.reachable(member.pod, gone.pod):
                continue

            def notice(member: Launcher = member) -> None:
                if member.round is current:
                    member.worker_ends(PEER_GONE)

            self.network.clock.later(self.network.draw("notice"), notice)

    def save_and_leave(self, current: WorkerRound) -> None:
        """Ask one member of the round to stop. At the next step, all members agree to stop, save,
        and leave the round.
        """

        def step_aside() -> None:
            for member in list(current.working.values()):
                if member.round is current:
                    member.worker_ends("SystemExit: 75", 75)

        if self.runs(current):
            self.network.clock.later(self.network.draw("notice"), step_aside)
