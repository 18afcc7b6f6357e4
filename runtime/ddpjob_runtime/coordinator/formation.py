"""Decides when a round begins, with which members, and when it restarts with a different size.

If a round begins before all nodes are ready, the late nodes are idle until the next round. If the
round waits for them, the ready nodes are idle. The rules weigh these costs, based on what is known
about the missing nodes:

- A round of `nodes` nodes begins immediately. A round of fewer than `min_nodes` nodes never begins.
- With any number of ready nodes in between, the first round waits FIRST_GRACE for more nodes,
  because pods start at different times.
- A later round begins immediately if at least as many nodes are ready as the last round had.
  Otherwise, it waits SHRINK_GRACE for more nodes. SHRINK_GRACE is 10 s in Standard mode, and 0 in
  Fast mode, where a restart is cheap.
- If new nodes are ready, a running round is restarted to include them. Because every restart costs
  steps, the round must first have run for FILL_SECONDS if the new nodes complete the group, and for
  GROW_SECONDS if they do not.

Example with nodes=8 and min_nodes=6:

    t=0    6 nodes are ready: the first round may begin at t=30
    t=12   all 8 are ready: round 1 begins
    t=900  a node is lost, 7 are ready: Fast begins round 2 immediately, Standard at t=910
    t=960  the replacement is ready, and completes the group. Round 2 has run for longer than
           FILL_SECONDS, so it is restarted immediately, and round 3 has 8 nodes

Survivors of the last round are chosen first (`choose`), then the members that have waited longest.
If there are too many survivors, those with the highest indices are excluded, because a smaller job
loses those slots. The operator sends the order of the ranks, because only the operator knows which
hosts the pods run on (docs/decisions/0019).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.protocol import Mode

FIRST_GRACE = 30.0
"""Number of seconds that the first round waits for more nodes once `min_nodes` nodes are ready."""
SHRINK_GRACE = {Mode.STANDARD: 10.0, Mode.FAST: 0.0}
"""Number of seconds that a later round waits for more nodes if it has fewer than the last round."""
FILL_SECONDS = 10.0
"""Number of seconds that a round must have run before it is restarted with new nodes that complete
the group.
"""
GROW_SECONDS = 60.0
"""Number of seconds that a round must have run before it is restarted with new nodes that do not
complete the group.
"""
ORDER_SECONDS = 10.0
"""Maximum number of seconds that a round waits for the operator to send a new member's position in
the order of the ranks. This is rarely needed, because the operator usually knows the position
before the pod starts.
"""


@dataclass(frozen=True)
class Size:
    """The desired (`nodes`) and the minimum (`min_nodes`) number of nodes in a round."""

    nodes: int
    min_nodes: int


@dataclass(frozen=True)
class RankOrder:
    """The order in which pods get their ranks.

    The operator sets the order, because the operator knows which hosts the pods run on.
    """

    expected: bool = False
    """Whether the operator is expected to send an order that includes every member."""
    places: dict[str, int] = field(default_factory=dict)
    """Maps each pod to its position. If there are no positions, ranks follow the indices."""

    def ranked(self, chosen: Iterable[Member]) -> list[Member]:
        """Return the members in the order of their ranks.

        The member with index 0 always comes first, so it gets rank 0. Members without a position
        come last.
        """
        last = len(self.places)
        return sorted(chosen, key=lambda m: (m.index != 0, self.places.get(m.pod, last), m.index))

    def known_at(self, chosen: Iterable[Member]) -> float:
        """Return the time until which a round waits for these members' positions; 0 if it need not
        wait.
        """
        if not self.expected:
            return 0.0
        return max((m.since + ORDER_SECONDS for m in chosen if m.pod not in self.places), default=0.0)


def begins_at(
    ready: int, size: Size, enough_since: float | None, first: bool, before: int | None, mode: Mode
) -> float | None:
    """Return the time at which a round with the ready members begins: 0 means now, and None means
    that there are too few members.

    `enough_since` is the time at which the number of ready members reached `min_nodes`. `before` is
    the size of the last round. If at least that many members are ready, the round does not wait for
    more.
    """
    if ready >= size.nodes:
        return 0.0
    if ready < size.min_nodes or enough_since is None:
        return None
    if before is not None and ready >= before:
        return 0.0
    return enough_since + (FIRST_GRACE if first else SHRINK_GRACE[mode])


def choose(ready: list[Member], nodes: int, last: int) -> list[Member]:
    """Choose the members of the next round from the ready ones.

    Survivors of round `last` come first, in the order of their indices. They are followed by the
    other members, in the order in which they became ready.
    """
    survivors = sorted((m for m in ready if last and m.round == last), key=lambda m: m.index)
    others = sorted((m for m in ready if m not in survivors), key=lambda m: (m.ready_at, m.index))
    return (survivors + others)[:nodes]


def resizes_at(world: int, since: float | None, ready: int, size: Size) -> float | None:
    """Return the time at which a round of `world` nodes should be restarted with a different size;
    None to keep its size.

    `since` is the time at which the round began to run. `ready` is the number of nodes that could
    join it.
    """
    if since is None:
        return None
    if world > size.nodes:
        return 0.0
    reached = min(size.nodes, world + ready)
    if reached <= world:
        return None
    return since + (FILL_SECONDS if reached == size.nodes else GROW_SECONDS)
