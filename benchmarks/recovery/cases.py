"""What is measured on loopback: a case starts a group, breaks it, and says how long all ranks were without a step."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from digits import write_digits
from groups import Coordinated, Fast, Group, NotRecovered, Shape, Standard, Stock
from step_log import Life

KILLS_IN_A_ROW = 10
WHOLE, ELASTIC, SPARE = Shape(), Shape(minimum=1), Shape(spares=1)
WATCH_SECONDS = 6.0
"""How long a group is watched after its coordinator was killed: longer than a new coordinator waits for the members of the old one."""


@dataclass(frozen=True)
class Sample:
    """One kill. `seconds` is None when the group did not come back; `outcome` says what was seen."""

    case: str
    place: str
    victim: str
    round: int
    kill: int
    seconds: float | None
    outcome: str
    load: float


@dataclass(frozen=True)
class Case:
    """`aim`: seconds that the median should keep to; None: there is none. `slow`: a run takes most of the patience."""

    name: str
    aim: float | None
    run: Callable[[Case, int, float], Iterator[Sample]]
    kind: type[Group] = Fast
    shape: Shape = WHOLE
    slow: bool = False

    def sample(self, victim: str, round_: int, seconds: float | None, *, kill: int = 1, outcome: str = "recovered") -> Sample:
        return Sample(self.name, "loopback", victim, round_, kill, seconds, outcome, os.getloadavg()[0])


@contextmanager
def running(case: Case) -> Iterator[Group]:
    """A group that trains, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        write_digits(Path(folder))
        group = case.kind(Path(folder), case.shape)
        try:
            group.start()
            group.settle()
            yield group
        finally:
            group.close()


def pick(life: Life, number: int) -> tuple[str, str]:
    """(node, what it is): by turns the node of rank 0 and the last one."""
    return (life.nodes[0], "rank 0") if number % 2 else (life.nodes[max(life.nodes)], "other")


def recovery(group: Group, moment: float, world: int, patience: float) -> float:
    """Seconds until all ranks had made a step. Raises NotRecovered."""
    step = group.wait("a step of all ranks", lambda: group.log.refresh().first_step_after(moment, world), patience)
    return float(step) - moment


def kill_one(case: Case, round_: int, patience: float, *, replaced: bool, target: int | None = None) -> Iterator[Sample]:
    """A node is killed; it is replaced at once, or never."""
    with running(case) as group:
        node, victim = pick(group.settle(), round_)
        moment = group.kill(node)
        if replaced:
            group.add()
        try:
            yield case.sample(victim, round_, recovery(group, moment, target or case.shape.nodes, patience))
        except NotRecovered as error:
            yield case.sample(victim, round_, None, outcome=str(error))


def replaced(case: Case, round_: int, patience: float) -> Iterator[Sample]:
    """A node is killed and started anew at the same moment."""
    yield from kill_one(case, round_, patience, replaced=True)


def not_replaced(case: Case, round_: int, patience: float) -> Iterator[Sample]:
    """A node is killed, a spare takes its place."""
    yield from kill_one(case, round_, patience, replaced=False)


def shrink(case: Case, round_: int, patience: float) -> Iterator[Sample]:
    """A node is killed, and the others go on without it."""
    yield from kill_one(case, round_, patience, replaced=False, target=case.shape.minimum)


def in_a_row(case: Case, round_: int, patience: float) -> Iterator[Sample]:
    """One job, ten kills, each when the group is whole again."""
    with running(case) as group:
        for kill in range(1, KILLS_IN_A_ROW + 1):
            node, victim = pick(group.settle(), kill)
            moment = group.kill(node)
            group.add()
            yield case.sample(victim, round_, recovery(group, moment, case.shape.nodes, patience), kill=kill)


def coordinator_fast(case: Case, round_: int, patience: float) -> Iterator[Sample]:
    """The coordinator is killed and started anew after a second: the longest gap between two steps of a rank, in the same life."""
    with running(case) as group:
        assert isinstance(group, Coordinated)
        life = group.settle()
        before = set(group.log.lives)
        moment = group.kill_coordinator()
        time.sleep(1)
        group.start_coordinator()
        time.sleep(WATCH_SECONDS)
        gap = group.log.refresh().longest_gap(moment, time.time())
        adopted = group.report().get("state") == "Running"
        undisturbed = set(group.log.lives) == before and life is group.log.newest and adopted
        yield case.sample("coordinator", round_, gap if undisturbed else None, outcome="no step lost" if undisturbed else "restarted")


def coordinator_standard(case: Case, round_: int, patience: float) -> Iterator[Sample]:
    """The coordinator is killed: a new generation, begun at the same moment."""
    with running(case) as group:
        assert isinstance(group, Coordinated)
        moment = group.kill_coordinator()
        group.begin_generation()
        yield case.sample("coordinator", round_, recovery(group, moment, case.shape.nodes, patience))


CASES = (
    Case("fast-spare", 0.5, not_replaced, Fast, SPARE),
    Case("fast-replaced", 3.5, replaced),
    Case("fast-shrink", 0.3, shrink, Fast, ELASTIC),
    Case("fast-coordinator", None, coordinator_fast),
    Case("fast-row", None, in_a_row, Fast, SPARE, slow=True),
    Case("standard-replaced", 7.0, replaced, Standard),
    Case("standard-spare", None, not_replaced, Standard, SPARE),
    Case("standard-shrink", None, shrink, Standard, ELASTIC),
    Case("standard-coordinator", 12.0, coordinator_standard, Standard),
    Case("stock-shrink", None, shrink, Stock, ELASTIC, slow=True),
    Case("stock-replaced", None, replaced, Stock, slow=True),
)
