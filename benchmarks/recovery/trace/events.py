"""A trace of failures, the same for every system of a round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

JITTER = 0.25
"""Maximum shift of a failure, earlier or later, as a share of the interval."""
ONE_IN = 4
"""One in this many failures hits the node of rank 0."""


class Kind(StrEnum):
    """A kind of failure of a node."""

    KILL = "kill"
    """All processes of a node are killed, as with `kubectl delete pod --force`. A replacement
    starts immediately.
    """
    CRASH = "crash"
    """A worker is killed (SIGKILL), and its node is healthy."""
    SILENT = "silent"
    """A host stops responding: all processes of a node are suspended (SIGSTOP) forever."""
    JOIN = "join"
    """An additional node arrives."""


@dataclass(frozen=True)
class Event:
    """A failure. `at` is in seconds, and `number` chooses the node, as in `Group.pick`."""

    at: float
    kind: Kind
    number: int = 2


@dataclass(frozen=True)
class Trace:
    """Failures in `seconds` of training."""

    seconds: float
    events: tuple[Event, ...]

    @property
    def joins(self) -> int:
        """The number of nodes that join."""
        return sum(event.kind is Kind.JOIN for event in self.events)


def make_trace(count: int, every: float, kinds: Sequence[Kind], seed: int) -> Trace:
    """Return `count` failures, one every `every` seconds on average.

    Their times vary by a quarter of the interval, so each failure ends before the next one. The
    kinds take turns in a random order. More than one join would leave no cores for the other nodes,
    so later joins are replaced with kills.
    """
    random_ = random.Random(seed)
    events, turn = list[Event](), list[Kind]()
    for number in range(count):
        turn = turn or random_.sample(list(kinds), len(kinds))
        kind = turn.pop()
        if kind is Kind.JOIN and any(event.kind is Kind.JOIN for event in events):
            kind = Kind.KILL
        at = (number + 0.5 + random_.uniform(-JITTER, JITTER)) * every
        events.append(Event(round(at, 3), kind, 1 if number % ONE_IN == ONE_IN - 1 else 2))
    return Trace(count * every, tuple(events))
