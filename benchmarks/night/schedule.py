"""Draws the contents of a night from a seed: jobs of all shapes, their arrivals, and faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from ddpjob.api.job_spec import Json

HOSTS, GPUS = 8, 8
"""Number of Kubernetes nodes, and number of GPUs of each."""
PRIORITIES = {"low": -100, "normal": 0, "high": 100}
"""PriorityClass values by name."""
BATCH = 64
"""Number of samples per step."""
NODES = (1, 1, 1, 2, 2, 2, 3, 4, 4, 6, 8)
GPUS_OF_A_NODE = (1, 2, 2, 4, 4, 8, 8)
POD_EVERY, COORDINATOR_EVERY, HOST_EVERY = 25.0, 90.0, 80.0
"""Mean time in seconds between two faults of the same kind."""
AWAY = (20.0, 50.0)
"""Shortest and longest time for which a Kubernetes node is gone, in seconds."""


@dataclass(frozen=True)
class Job:
    """One job, with `steps` of one second each while it has all its nodes.

    `at` is in seconds after the beginning.
    """

    name: str
    at: float
    nodes: int
    gpus: int
    steps_per_epoch: int
    epochs: int
    priority: str
    mode: str
    minimum: int
    spares: int

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    @property
    def samples(self) -> int:
        """Number of samples in an epoch. The last step of an epoch has fewer samples than the
        others.
        """
        return self.steps_per_epoch * BATCH - BATCH // 3

    @property
    def gpu_seconds(self) -> int:
        """The GPU-seconds that the job needs if undisturbed."""
        return self.nodes * self.gpus * self.steps

    def spec(self, classes: dict[str, str]) -> Json:
        """Return the DDPJob's spec. `classes` contains the names of the PriorityClasses."""
        elastic = {"elastic": {"minNodes": self.minimum}} if self.minimum < self.nodes else {}
        return {
            "image": "simulated", "script": "train.py", "nodes": self.nodes, "spares": self.spares,
            "gpusPerNode": self.gpus, **elastic, "recovery": {"mode": self.mode, "nodeLostAfterSeconds": 10},
            "scheduling": {"priorityClassName": classes[self.priority]},
        }  # fmt: skip


class FaultKind(StrEnum):
    POD = "a pod is killed"
    COORDINATOR = "a coordinator is killed"
    POWER = "a Kubernetes node is off"
    CABLE = "a Kubernetes node has no network"


@dataclass(frozen=True)
class Fault:
    """A fault.

    `choice` (0 to 1) chooses the victim, and `seconds` is how long a Kubernetes node is gone.
    """

    at: float
    kind: FaultKind
    choice: float
    seconds: float = 0.0


def draw_jobs(seed: int, count: int, minutes: float) -> list[Job]:
    """Draw `count` jobs that arrive within `minutes`, a few of them at the beginning."""
    chance = random.Random(f"jobs {seed}")
    moments = sorted(max(0.0, chance.uniform(-0.1, 1.0)) * minutes * 60 for _ in range(count))
    return [_draw(chance, number, at) for number, at in enumerate(moments)]


def _draw(chance: random.Random, number: int, at: float) -> Job:
    nodes = chance.choice(NODES)
    spare = nodes in (2, 3, 4, 6) and chance.random() < 0.3
    return Job(
        name=f"night-{number:02}",
        at=at,
        nodes=nodes,
        gpus=chance.choice(GPUS_OF_A_NODE),
        steps_per_epoch=chance.randint(8, 14),
        epochs=chance.randint(2, 7),
        priority=chance.choices(tuple(PRIORITIES), (5, 4, 2))[0],
        mode=chance.choice(("Fast", "Standard")),
        minimum=chance.randint(nodes // 2, nodes - 1) if nodes > 2 and chance.random() < 0.5 else nodes,
        spares=int(spare),
    )


def draw_faults(seed: int, minutes: float) -> list[Fault]:
    """Draw faults in order of time. A lost Kubernetes node returns before the next one is lost."""
    found = []
    for every, kinds in (
        (POD_EVERY, (FaultKind.POD,)),
        (COORDINATOR_EVERY, (FaultKind.COORDINATOR,)),
        (HOST_EVERY, (FaultKind.POWER, FaultKind.CABLE)),
    ):
        chance = random.Random(f"{kinds[0]} {seed}")
        at, number = chance.uniform(0.3, 1.0) * every, 0
        while at < minutes * 60:
            kind = kinds[number % len(kinds)]
            seconds = chance.uniform(*AWAY) if every == HOST_EVERY else 0.0
            found.append(Fault(at, kind, chance.random(), seconds))
            at, number = at + seconds + chance.uniform(0.5, 1.5) * every, number + 1
    return sorted(found, key=lambda fault: fault.at)
