"""Jobs under random faults, each seed a world of its own: every job completes, every failure is counted once.

A failing seed is replayed by `pytest tests/simulation/test_random_faults.py -k SEED`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from ddpjob.core.world import Role
from simulated import Simulation, conditions

SEEDS = range(150)
SECONDS_OF_FAULTS = 120
APART = 12.0
"""Seconds after which two faults are certainly two breaks, if the job has recovered in between."""


class Faults:
    """What was done to the job, as the status should count it.

    `certain` struck a job that ran and had nothing suffered for a while: each counts. Of the other `possible` ones
    some are consequences, and nobody can tell which.
    """

    def __init__(self, simulation: Simulation, chance: random.Random, often: int) -> None:
        self.s, self.random, self.often = simulation, chance, often
        self.certain = self.possible = self.deleted = 0
        self.last = -APART
        self.cut: dict[str, float] = {}

    def strike(self) -> None:
        """One fault or none. Only pods of the present generation that the operator has seen run are hit: of others nobody can tell."""
        self._heal()
        current = self._current()
        kinds: list[tuple[Callable[[str], bool], int]] = [
            (self._force, 1), (self._delete, 1), (self._worker, 1), (self._exit, 1), (self._coordinator, 1),
            (self._cut_node, 1), (self._scale, 1), (self._operator, 2), (self._nothing, self.often),
        ]  # fmt: skip
        strike = self.random.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        if current and strike(self.random.choice(current)):
            self.last = self.s.now

    def _heal(self) -> None:
        for node, until in list(self.cut.items()):
            if self.s.now >= until:
                self.s.heal(node)
                del self.cut[node]

    def _count(self) -> None:
        running = conditions(self.s)["Running"]["status"] == "True" and conditions(self.s).get("Restarting", {}).get("status") != "True"
        self.possible += 1
        self.certain += running and self.s.now - self.last >= APART and not self.cut

    def _force(self, pod: str) -> bool:
        self.s.force_delete(pod)
        self.deleted += 1
        return True

    def _delete(self, pod: str) -> bool:
        self.s.delete(pod)
        self.deleted += 1
        return True

    def _worker(self, pod: str) -> bool:
        if self.s.worker_fails(pod):
            self._count()
            return True
        return False

    def _exit(self, pod: str) -> bool:
        if self.s.pods[pod].node in self.cut:
            return False
        self._count()
        self.s.end(pod, 1)
        return True

    def _operator(self, pod: str) -> bool:
        self.s.die_at = {self.s.points + self.random.randint(1, 8)}
        self.s.conflict_next = self.random.random() < 0.5
        return False

    def _nothing(self, pod: str) -> bool:
        return False

    def _coordinator(self, pod: str) -> bool:
        names = [p.name for p in self.s.pods.values() if p.role is Role.COORDINATOR and p.running and p.deleted_at is None]
        if self.s.status["rendezvous"]["state"] != "Running" or not names:
            return False
        self.s.force_delete(max(names))
        return True

    def _cut_node(self, pod: str) -> bool:
        node = self.s.pods[pod].node
        if len(self.cut) >= 2 or node in self.cut:
            return False
        self.s.cut(node)
        self.cut[node] = self.s.now + self.random.choice((3, 20, 60, 1000))
        return True

    def _scale(self, pod: str) -> bool:
        low, high = self.s.bounds
        self.s.change_spec({"nodes": self.random.randint(low, high), "spares": self.random.randint(0, 2)})
        return True

    def _current(self) -> list[str]:
        slots = self.s.status.get("slots", ())
        names = [f"job-{i}-{slot['attempt']}" for i, slot in enumerate(slots) if slot["state"] == "Running"]
        return [n for n in names if n in self.s.pods and self.s.pods[n].running and self.s.pods[n].deleted_at is None]


class Job(Simulation):
    bounds = (1, 1)


def random_job(chance: random.Random) -> Job:
    nodes = chance.choice((1, 2, 3, 5))
    fast = chance.random() < 0.5
    spec = {
        "nodes": nodes,
        "spares": chance.choice((0, 0, 1, 2)),
        "recovery": {"maxRestarts": 1000, "mode": "Fast" if fast else "Standard", "nodeLostAfterSeconds": 15},
        "runPolicy": {"failedPodsKept": chance.choice((0, 1, 3))},
        "rendezvous": {"placement": "Dedicated" if fast else chance.choice(("Dedicated", "Dedicated", "Master"))},
    }
    low = nodes
    if chance.random() < 0.5:
        low = chance.randint(1, nodes)
        spec["elastic"] = {"minNodes": low, "maxNodes": nodes + 2}
    job = Job(spec, steps=SECONDS_OF_FAULTS + 30)
    job.bounds = (low, nodes + 2) if "elastic" in spec else (nodes, nodes)
    job.knows_hosts = chance.random() < 0.8
    return job


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_faults(seed: int) -> None:
    chance = random.Random(seed)
    simulation = random_job(chance)
    faults = Faults(simulation, chance, often=chance.choice((15, 60, 200)))
    for _ in range(SECONDS_OF_FAULTS):
        await simulation.one_pass()
        faults.strike()
        # Seen before the next fault: two faults in one pod between two looks are one end.
        while not await simulation.one_pass():
            pass
        check_always(simulation)
        simulation.advance(chance.choice((0.5, 1, 2)))
    simulation.die_at = set()
    for node in list(faults.cut):
        simulation.heal(node)
    await simulation.until_phase("Complete", limit=1500)
    check_truth(simulation, faults)
    await simulation.until(lambda: not any(p.running for p in simulation.pods.values()))


def check_always(s: Simulation) -> None:
    """What the status says between two faults is so."""
    told, nodes = conditions(s), s.status["nodes"]
    group = s.groups.get(s.status["rendezvous"]["generation"])
    if told["Running"]["status"] == "True" and told["Running"]["reason"].startswith("GroupRuns") and group is not None:
        assert nodes["ready"] <= max(group.worlds, default=0)
    assert nodes["active"] <= s.spec["nodes"]
    for group in s.groups.values():
        assert all(world <= max(s.spec["nodes"], group.wanted, *group.worlds) for world in group.worlds)


def check_truth(simulation: Job, faults: Faults) -> None:
    restarts = simulation.status["restarts"]
    told = conditions(simulation)
    assert told["Complete"]["status"] == "True"
    assert told["Running"]["status"] == "False"
    assert told.get("Restarting", {}).get("status", "False") == "False"
    assert faults.certain <= restarts["counted"] <= faults.possible
    assert restarts["counted"] + restarts["uncounted"] == restarts["total"]
    reasons = Counter(r["reason"] for r in restarts.get("recent", ()))
    known = {"Deleted", "NodeLost", "WorkerFailed", "ExitCode", "CoordinatorLost", "RendezvousLost", "Joined", "Scaled"}
    assert set(reasons) <= known
    low, high = simulation.bounds
    worlds = [world for group in simulation.groups.values() for world in group.worlds]
    assert all(low <= world <= high for world in worlds)
