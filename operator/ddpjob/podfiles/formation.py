"""When a round may begin and who is in it, when a running one makes room for others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import wire
from membership import Member, Round

FIRST_GRACE = 30.0  # for the rest of the nodes, once the least number is ready
SHRINK_GRACE = {wire.STANDARD: 10.0, wire.FAST: 0.0}
FILL_SECONDS = 10.0  # a round runs for so long before joiners that make it whole interrupt it
GROW_SECONDS = 60.0  # the same for joiners that do not


@dataclass(frozen=True)
class Size:
    """How many nodes a round has: `nodes` are wanted, `minimum` are enough."""

    nodes: int
    minimum: int


def begins_at(ready: int, size: Size, enough_since: float | None, first: bool, before: int | None, mode: str) -> float | None:
    """When a round of the members that are ready may begin; 0: now. None: not with so few.

    `before`: how many were in the last round. Where nobody of them is missing, nobody is waited for.
    """
    if ready >= size.nodes:
        return 0.0
    if ready < size.minimum or enough_since is None:
        return None
    if before is not None and ready >= before:
        return 0.0
    return enough_since + (FIRST_GRACE if first else SHRINK_GRACE[mode])


def choose(ready: list[Member], nodes: int, last: int) -> list[Member]:
    """The members of the next round in the order of their ranks.

    Survivors of round `last` come first and keep their ranks where they can; among too many of them the highest places step back, since
    a job that is made smaller loses those. Then who has been ready for the longest time.
    """
    survivors = sorted((m for m in ready if last and m.round == last), key=lambda m: m.index)
    others = sorted((m for m in ready if m not in survivors), key=lambda m: (m.ready_at, m.index))
    chosen = (survivors + others)[:nodes]
    by_rank: dict[int, Member] = {}
    for member in chosen:
        if member in survivors and member.rank is not None and member.rank < len(chosen):
            by_rank.setdefault(member.rank, member)
    placed = set(map(id, by_rank.values()))
    rest = iter([m for m in chosen if id(m) not in placed])
    return [by_rank.get(rank) or next(rest) for rank in range(len(chosen))]


def resizes_at(current: Round, ready: int, size: Size) -> float | None:
    """When a running round is to be restarted for another number of nodes; None: not with these members."""
    if current.running_since is None or current.finished or current.somebody_leaves:
        return None
    if current.world > size.nodes:
        return 0.0
    reached = min(size.nodes, current.world + ready)
    if reached <= current.world:
        return None
    return current.running_since + (FILL_SECONDS if reached == size.nodes else GROW_SECONDS)
