"""Jobs under random faults, each seed a world of its own: every job completes, every failure is counted once.

A failing seed is replayed by `pytest tests/simulation/test_random_faults.py -k SEED`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from simulated import Simulation, conditions

SEEDS = range(120)
SECONDS_OF_FAULTS = 120


class Faults:
    """What was done to the job, as the status should count it."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.s, self.random = simulation, random.Random(seed)
        self.counted = 0
        self.deleted = 0

    def strike(self) -> None:
        """One fault or none. Only pods of the present generation that the operator has seen run are hit: of others nobody can tell."""
        current = self._current()
        if not current:
            return
        pod = self.random.choice(current)
        match self.random.choice(("force", "delete", "worker", "exit", "coordinator", "operator", "conflict", *["nothing"] * 15)):
            case "force":
                self.s.force_delete(pod)
                self.deleted += 1
            case "delete":
                self.s.delete(pod)
                self.deleted += 1
            case "worker":
                self.counted += self.s.worker_fails(pod)
            case "exit":
                self.s.end(pod, 1)
                self.counted += 1
            case "coordinator":
                self._lose_coordinator()
            case "operator":
                self.s.die_at = {self.s.points + self.random.randint(1, 6)}
            case "conflict":
                self.s.conflict_next = True

    def _current(self) -> list[str]:
        slots = self.s.status.get("slots", ())
        names = [f"job-{i}-{slot['attempt']}" for i, slot in enumerate(slots) if slot["state"] == "Running"]
        return [n for n in names if n in self.s.pods and self.s.pods[n].running and self.s.pods[n].deleted_at is None]

    def _lose_coordinator(self) -> None:
        rendezvous = self.s.status["rendezvous"]
        name = f"job-coordinator-{rendezvous['generation']}"
        if rendezvous["state"] == "Running" and name in self.s.pods:
            self.s.force_delete(name)


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_faults(seed: int) -> None:
    chance = random.Random(seed)
    spec = {
        "nodes": chance.choice((1, 2, 3, 5)),
        "recovery": {"maxRestarts": 1000},
        "runPolicy": {"failedPodsKept": chance.choice((0, 1, 3))},
        "rendezvous": {"placement": chance.choice(("Dedicated", "Dedicated", "Master"))},
    }
    simulation = Simulation(spec, steps=SECONDS_OF_FAULTS + 30)
    faults = Faults(simulation, seed)
    for _ in range(SECONDS_OF_FAULTS):
        await simulation.one_pass()
        faults.strike()
        # Seen before the next fault: two faults in one pod between two looks are one end.
        while not await simulation.one_pass():
            pass
        simulation.advance(chance.choice((0.5, 1, 2)))
    simulation.die_at = set()
    await simulation.until_phase("Complete", limit=1000)
    check_truth(simulation, faults)
    await simulation.until(lambda: not any(p.running for p in simulation.pods.values()))


def check_truth(simulation: Simulation, faults: Faults) -> None:
    restarts = simulation.status["restarts"]
    told = conditions(simulation)
    assert told["Complete"]["status"] == "True"
    assert told["Running"]["status"] == told["Restarting"]["status"] == "False"
    assert restarts["counted"] == faults.counted
    reasons = Counter(r["reason"] for r in restarts["recent"])
    assert set(reasons) <= {"Deleted", "WorkerFailed", "ExitCode", "CoordinatorLost", "RendezvousLost"}
    assert restarts["uncounted"] >= faults.deleted
