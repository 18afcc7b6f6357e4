"""What is measured: a case starts a group, breaks it, and says how long all ranks were without a step."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from digits import write_digits
from groups import Fast, Group, NotRecovered, Shape, Standard, Stock

KILLS_IN_A_ROW = 10
WHOLE, ELASTIC, SPARE = Shape(), Shape(minimum=1), Shape(spares=1)
WATCH_SECONDS = 6.0
"""How long a group is watched after its new coordinator has found it."""


class System(StrEnum):
    """What keeps the group together."""

    STOCK = "stock"
    STANDARD = "Standard"
    FAST = "Fast"


KINDS: dict[System, type[Group]] = {System.STOCK: Stock, System.STANDARD: Standard, System.FAST: Fast}


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


class Place(Protocol):
    """Where groups run."""

    name: str
    patience: float
    """Seconds after which a group counts as not recovered."""

    def group(self, system: System, shape: Shape, options: tuple[str, ...] = ()) -> AbstractContextManager[Group]:
        """A group that trains; `options` go to steps.py."""


@dataclass(frozen=True)
class Case:
    """`aim`: seconds that the median should keep to; None: there is none. `slow`: a run takes most of the patience."""

    name: str
    aim: float | None
    run: Callable[[Case, Place, int], Iterator[Sample]]
    system: System
    shape: Shape = WHOLE
    slow: bool = False

    def sample(self, place: Place, victim: str, round_: int, seconds: float | None, kill: int = 1, outcome: str = "recovered") -> Sample:
        return Sample(self.name, place.name, victim, round_, kill, seconds, outcome, os.getloadavg()[0])


class Loopback:
    """Nodes are processes on 127.0.0.1; a killed node's successor is started at the moment of the kill."""

    name = "loopback"

    def __init__(self, patience: float) -> None:
        self.patience = patience

    @contextmanager
    def group(self, system: System, shape: Shape, options: tuple[str, ...] = ()) -> Iterator[Group]:
        """In a folder of its own."""
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            write_digits(Path(folder))
            group = KINDS[system](Path(folder), shape, options)
            try:
                group.start()
                group.settle()
                yield group
            finally:
                group.close()


def recovery(group: Group, moment: float, world: int, patience: float) -> float:
    """Seconds from the moment until all ranks had made a step. Raises NotRecovered."""
    step = group.wait("a step of all ranks", lambda: group.log.refresh().first_step_after(moment, world), patience)
    return float(step) - moment


def kill_one(case: Case, place: Place, round_: int, *, replaced: bool, world: int) -> Iterator[Sample]:
    """A node is killed; it is replaced at once, or not."""
    with place.group(case.system, case.shape) as group:
        node, victim = group.pick(group.settle(), round_)
        moment = group.kill(node)
        if replaced:
            group.replace()
        try:
            yield case.sample(place, victim, round_, recovery(group, moment, world, place.patience))
        except NotRecovered as error:
            yield case.sample(place, victim, round_, None, outcome=str(error))


def replaced(case: Case, place: Place, round_: int) -> Iterator[Sample]:
    """A node is killed and started anew."""
    yield from kill_one(case, place, round_, replaced=True, world=case.shape.nodes)


def spare(case: Case, place: Place, round_: int) -> Iterator[Sample]:
    """A node is killed, a spare takes its place."""
    yield from kill_one(case, place, round_, replaced=False, world=case.shape.nodes)


def shrink(case: Case, place: Place, round_: int) -> Iterator[Sample]:
    """A node is killed, and the others go on without it."""
    yield from kill_one(case, place, round_, replaced=False, world=case.shape.minimum)


def in_a_row(case: Case, place: Place, round_: int) -> Iterator[Sample]:
    """One job, ten kills, each when the group is whole again."""
    with place.group(case.system, case.shape) as group:
        for kill in range(1, KILLS_IN_A_ROW + 1):
            node, victim = group.pick(group.settle(), kill)
            moment = group.kill(node)
            group.replace()
            yield case.sample(place, victim, round_, recovery(group, moment, case.shape.nodes, place.patience), kill)


def coordinator_unnoticed(case: Case, place: Place, round_: int) -> Iterator[Sample]:
    """The coordinator is killed and replaced: the longest gap between two steps of a rank, which goes on in the same life."""
    with place.group(case.system, case.shape) as group:
        group.settle()
        before = set(group.log.lives)
        moment = group.kill_coordinator()
        group.wait(
            "a new coordinator", lambda: group.report().get("attempt", 0) > 0 and group.report()["state"] == "Running", place.patience
        )
        time.sleep(WATCH_SECONDS)
        gap = group.log.refresh().longest_gap(moment, time.time())
        undisturbed = set(group.log.lives) == before and group.report().get("state") == "Running"
        yield case.sample(
            place, "coordinator", round_, gap if undisturbed else None, outcome="no step lost" if undisturbed else "restarted"
        )


def coordinator_anew(case: Case, place: Place, round_: int) -> Iterator[Sample]:
    """The coordinator is killed: a new generation."""
    with place.group(case.system, case.shape) as group:
        moment = group.kill_coordinator()
        yield case.sample(place, "coordinator", round_, recovery(group, moment, case.shape.nodes, place.patience))


CASES = (
    Case("fast-spare", 0.5, spare, System.FAST, SPARE),
    Case("fast-replaced", 3.5, replaced, System.FAST),
    Case("fast-shrink", 0.3, shrink, System.FAST, ELASTIC),
    Case("fast-coordinator", None, coordinator_unnoticed, System.FAST),
    Case("fast-row", None, in_a_row, System.FAST, SPARE, slow=True),
    Case("standard-replaced", 7.0, replaced, System.STANDARD),
    Case("standard-spare", None, spare, System.STANDARD, SPARE),
    Case("standard-shrink", None, shrink, System.STANDARD, ELASTIC),
    Case("standard-coordinator", 12.0, coordinator_anew, System.STANDARD),
    Case("stock-shrink", None, shrink, System.STOCK, ELASTIC, slow=True),
    Case("stock-replaced", None, replaced, System.STOCK, slow=True),
)
