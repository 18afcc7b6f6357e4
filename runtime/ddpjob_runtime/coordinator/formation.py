"""When a round may begin, who is in it, and when a running one is restarted for another size. Pure.

A round with too few nodes wastes the others, and a round that waits wastes the nodes that are
ready. The rules weigh one against the other, by what is known about the missing ones:

- `nodes` are ready: begin at once. Fewer than `min_nodes`: wait.
- In between, the first round waits FIRST_GRACE for the others, since pods start at different times.
- A later round begins at once with as many nodes as the last one had: nobody is missing. With fewer
  it waits SHRINK_GRACE, which is 10 s in Standard and nothing in Fast, where a restart is cheap.
- A running round that could have more nodes is restarted FILL_SECONDS after it began if the joiners
  make it whole, GROW_SECONDS if they do not: every restart costs steps.

Example, nodes=8 and min_nodes=6:

    t=0    6 nodes are ready: the first round may begin at t=30
    t=12   all 8 are ready: round 1 begins
    t=900  a node is lost, 7 are ready: Fast begins round 2 at once, Standard at t=910
    t=960  the replacement is ready, and makes the group whole. Round 2 has run for longer than
           FILL_SECONDS, so it is restarted at once, and round 3 has 8 nodes

Survivors of the last round come first (`choose`), then the members that have waited longest. If
there are too many survivors, the highest indices stay out: a smaller job loses those slots.

The order of the ranks comes from the operator, who knows where the pods are: docs/decisions/0019.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.protocol import Mode

FIRST_GRACE = 30.0
"""Seconds for the other nodes, once `min_nodes` are ready for the first round."""
SHRINK_GRACE = {Mode.STANDARD: 10.0, Mode.FAST: 0.0}
"""The same for later rounds."""
FILL_SECONDS = 10.0
"""How long a round runs before it is restarted for joiners that make it whole."""
GROW_SECONDS = 60.0
"""The same for joiners that do not."""
ORDER_SECONDS = 10.0
"""How long a new member's place in the order is waited for. The operator knows it before the pod starts."""


@dataclass(frozen=True)
class Size:
    """How many nodes a round shall have; `min_nodes` are enough."""

    nodes: int
    min_nodes: int


@dataclass(frozen=True)
class RankOrder:
    """The order of the job's pods in which ranks are numbered, by the operator, who knows where the pods are."""

    expected: bool = False
    """Whether each member gets a place in it sooner or later."""
    places: dict[str, int] = field(default_factory=dict)
    """By pod. Without any, ranks follow the indices."""

    def ranked(self, chosen: Iterable[Member]) -> list[Member]:
        """In the order of their ranks. Index 0 is the first, those without a place are the last."""
        last = len(self.places)
        return sorted(chosen, key=lambda m: (m.index != 0, self.places.get(m.pod, last), m.index))

    def known_at(self, chosen: Iterable[Member]) -> float:
        """Until when the places of these members are waited for; 0: they are known, or there will be none."""
        if not self.expected:
            return 0.0
        return max((m.since + ORDER_SECONDS for m in chosen if m.pod not in self.places), default=0.0)


def begins_at(
    ready: int, size: Size, enough_since: float | None, first: bool, before: int | None, mode: Mode
) -> float | None:
    """When a round of the members that are ready may begin; 0: now. None: not with so few.

    `before`: how many were in the last round. If as many are ready again, nobody is waited for.
    """
    if ready >= size.nodes:
        return 0.0
    if ready < size.min_nodes or enough_since is None:
        return None
    if before is not None and ready >= before:
        return 0.0
    return enough_since + (FIRST_GRACE if first else SHRINK_GRACE[mode])


def choose(ready: list[Member], nodes: int, last: int) -> list[Member]:
    """The members of the next round.

    Survivors of round `last` come first; if there are too many of them, those with the highest indices stay out, since
    a job that is made smaller loses these slots. Then who has waited longest.
    """
    survivors = sorted((m for m in ready if last and m.round == last), key=lambda m: m.index)
    others = sorted((m for m in ready if m not in survivors), key=lambda m: (m.ready_at, m.index))
    return (survivors + others)[:nodes]


def resizes_at(world: int, since: float | None, ready: int, size: Size) -> float | None:
    """When a round of `world` nodes that runs `since` is restarted for another size; None: not with these members."""
    if since is None:
        return None
    if world > size.nodes:
        return 0.0
    reached = min(size.nodes, world + ready)
    if reached <= world:
        return None
    return since + (FILL_SECONDS if reached == size.nodes else GROW_SECONDS)
