"""The measured cases. Each starts a group, breaks it, and times the next step of all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from benchmarks.recovery.groups import Fast, Group, NotRecovered, Shape, Standard, Stock, training
from benchmarks.recovery.phases import phases
from benchmarks.recovery.slow_rank import SlowRankJob
from benchmarks.recovery.tables import FLOOR, Sample

KILLS_IN_A_ROW = 10
WHOLE, ELASTIC, SPARE, ALONE = Shape(), Shape(minimum=1), Shape(spares=1), Shape(nodes=1, minimum=1)
IMPORTS = "import time, torch; print(time.time())"
"""The program of the case `floor`: the work that every worker must do before it can train."""
ON_CUDA = "import time, torch; torch.ones(1, device='cuda').item(); print(time.time())"
"""Like IMPORTS, but for training on a GPU."""
TICK_SECONDS = 0.01
"""The resolution of a process's start time."""
PACE_SECONDS = 15.0
"""How long a group trains before a hang, so that its coordinator has learned its pace."""
WATCH_SECONDS = 6.0
"""How long a group is watched after its members have reconnected to the new coordinator."""


class System(StrEnum):
    """The system that restarts the group."""

    STOCK = "stock"
    STANDARD = "Standard"
    FAST = "Fast"


KINDS: dict[System, type[Group]] = {System.STOCK: Stock, System.STANDARD: Standard, System.FAST: Fast}


class Backend(Protocol):
    """Runs groups: processes, or pods on a cluster."""

    name: str
    patience: float
    """Seconds after which a group counts as not recovered."""

    def group(self, system: System, shape: Shape, options: tuple[str, ...] = ()) -> AbstractContextManager[Group]:
        """Provide a group that trains, and stop it on exit. `options` are passed to steps.py."""

    def floor(self) -> float:
        """Return the seconds that a node takes to start and import torch, without this project."""


@dataclass(frozen=True)
class Case:
    """A measured case.

    `target` is the upper limit of the median in seconds, or None. If `slow`, a run may take as long
    as the backend's patience.
    """

    name: str
    target: float | None
    run: Callable[[Case, Backend, int], Iterator[Sample]]
    system: System
    shape: Shape = WHOLE
    slow: bool = False

    def sample(
        self,
        backend: Backend,
        victim: str,
        round_: int,
        seconds: float | None,
        kill: int = 1,
        outcome: str = "recovered",
        phases: dict[str, float] | None = None,
    ) -> Sample:
        load = os.getloadavg()[0]
        return Sample(self.name, backend.name, victim, round_, kill, seconds, outcome, load, phases or {})


class Loopback:
    """Runs nodes as processes on 127.0.0.1.

    The replacement for a killed node starts at the time of the kill. With `cuda`, the nodes share
    the machine's GPUs.
    """

    def __init__(self, patience: float, *, cuda: bool = False) -> None:
        self.name = "gpu" if cuda else "loopback"
        self.patience, self._cuda = patience, cuda

    def group(self, system: System, shape: Shape, options: tuple[str, ...] = ()) -> AbstractContextManager[Group]:
        """Provide a group in a temporary folder, once it trains."""
        return training(lambda folder: KINDS[system](folder, shape, (*options, *["--cuda"] * self._cuda)))

    def floor(self) -> float:
        """Time a process that imports torch, computes a number on a GPU if requested, and ends."""
        began, code = time.time(), ON_CUDA if self._cuda else IMPORTS
        printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        return float(printed) - began


def recovery(group: Group, moment: float, world: int, patience: float) -> tuple[float, dict[str, float]]:
    """Return the seconds from `moment` until `world` ranks had taken a step, and their phases.

    Raises NotRecovered.
    """
    found = group.wait("a step of all ranks", lambda: group.log.refresh().first_after(moment, world), patience)
    return found.formed - moment, phases(found, moment, group.created)


def kill_one(case: Case, backend: Backend, round_: int, *, replaced: bool, world: int) -> Iterator[Sample]:
    """Kill a node, and replace it immediately if `replaced`."""
    with backend.group(case.system, case.shape) as group:
        node, victim = group.pick(group.settle(), round_)
        moment = group.kill(node)
        if replaced:
            group.replace()
        try:
            seconds, where = recovery(group, moment, world, backend.patience)
            yield case.sample(backend, victim, round_, seconds, phases=where)
        except NotRecovered as error:
            yield case.sample(backend, victim, round_, None, outcome=str(error))


def replaced(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Kill a node and replace it."""
    yield from kill_one(case, backend, round_, replaced=True, world=case.shape.nodes)


def spare(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Kill a node; a spare takes over."""
    yield from kill_one(case, backend, round_, replaced=False, world=case.shape.nodes)


def shrink(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Kill a node; the remaining nodes continue without it."""
    yield from kill_one(case, backend, round_, replaced=False, world=case.shape.minimum)


def hang(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Make the last rank hang, in a job with default settings."""
    with backend.group(case.system, case.shape) as group:
        group.settle()
        time.sleep(PACE_SECONDS)
        moment = time.time()
        (group.folder / "hang").touch()  # steps.py looks for it
        seconds, where = recovery(group, moment, case.shape.nodes, backend.patience)
        yield case.sample(backend, "a rank that hangs", round_, seconds, phases=where)


def in_a_row(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Kill ten times in one job, each time once the group is complete again."""
    with backend.group(case.system, case.shape) as group:
        for kill in range(1, KILLS_IN_A_ROW + 1):
            node, victim = group.pick(group.settle(), kill)
            moment = group.kill(node)
            group.replace()
            seconds, where = recovery(group, moment, case.shape.nodes, backend.patience)
            yield case.sample(backend, victim, round_, seconds, kill, phases=where)


def coordinator_unnoticed(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Kill and replace the coordinator, and yield a rank's longest gap between two steps of one
    incarnation.
    """
    with backend.group(case.system, case.shape) as group:
        group.settle()
        before = set(group.log.incarnations)
        moment = group.kill_coordinator()
        group.wait("a new coordinator", group.follows_another, backend.patience)
        time.sleep(WATCH_SECONDS)
        gap = group.log.refresh().longest_gap(moment, time.time())
        undisturbed = set(group.log.incarnations) == before and group.follows_another()
        yield case.sample(
            backend,
            "coordinator",
            round_,
            gap if undisturbed else None,
            outcome="no step lost" if undisturbed else "restarted",
        )


def coordinator_new_generation(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Kill the coordinator, so that a new generation starts."""
    with backend.group(case.system, case.shape) as group:
        moment = group.kill_coordinator()
        seconds, where = recovery(group, moment, case.shape.nodes, backend.patience)
        yield case.sample(backend, "coordinator", round_, seconds, phases=where)


def slow_rank(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Make a rank twice as slow, and yield the time until the job has its pace again.

    With every backend, the job runs under `ddpjob run`, because the operator moves the rank.
    """
    with training(lambda folder: SlowRankJob(folder, case.shape)) as job:
        try:
            seconds, repeated = job.cure()
            yield case.sample(backend, "nothing", round_, seconds, outcome=f"{repeated} steps repeated")
        except NotRecovered as error:
            yield case.sample(backend, "nothing", round_, None, outcome=str(error))


def floor(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Start a node that only imports torch, without a kill."""
    yield case.sample(backend, "nothing", round_, backend.floor(), outcome="torch imported")


def stock_start(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Start a node under plain torchrun, and wait for its first step, without a kill.

    Standard, which is torchrun, cannot be faster.
    """
    with backend.group(case.system, case.shape) as group:
        found = group.settle()
        moment = found.moments[0]["launcher"] - TICK_SECONDS
        where = phases(found, moment, group.created)
        assert found.formed is not None
        yield case.sample(backend, "nothing", round_, found.formed - moment, outcome="first step", phases=where)


CASES = (
    Case(FLOOR, None, floor, System.STOCK),
    Case("stock-start", None, stock_start, System.STOCK, ALONE),
    Case("fast-spare", 0.5, spare, System.FAST, SPARE),
    Case("fast-replaced", 3.5, replaced, System.FAST),
    Case("fast-shrink", 0.3, shrink, System.FAST, ELASTIC),
    Case("fast-coordinator", None, coordinator_unnoticed, System.FAST),
    Case("fast-hang", None, hang, System.FAST, slow=True),
    Case("fast-row", None, in_a_row, System.FAST, SPARE, slow=True),
    Case("fast-slow-rank", 90.0, slow_rank, System.FAST, Shape(nodes=4, spares=1), slow=True),
    Case("standard-replaced", 7.0, replaced, System.STANDARD),
    Case("standard-spare", None, spare, System.STANDARD, SPARE),
    Case("standard-shrink", None, shrink, System.STANDARD, ELASTIC),
    Case("standard-coordinator", 12.0, coordinator_new_generation, System.STANDARD),
    Case("stock-shrink", None, shrink, System.STOCK, ELASTIC, slow=True),
    Case("stock-replaced", None, replaced, System.STOCK, slow=True),
)
