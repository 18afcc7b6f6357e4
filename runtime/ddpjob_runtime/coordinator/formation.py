"""When a round may begin, who is in it, and when a running one is restarted for another size. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Size:
    """How many nodes a round shall have; `min_nodes` are enough."""

    nodes: int
    min_nodes: int


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
    """The members of the next round in the order of their ranks, which is that of their indices.

    Survivors of round `last` come first; if there are too many of them, those with the highest indices stay out, since
    a job that is made smaller loses these slots. Then who has waited longest.
    """
    survivors = sorted((m for m in ready if last and m.round == last), key=lambda m: m.index)
    others = sorted((m for m in ready if m not in survivors), key=lambda m: (m.ready_at, m.index))
    return sorted((survivors + others)[:nodes], key=lambda m: m.index)


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
