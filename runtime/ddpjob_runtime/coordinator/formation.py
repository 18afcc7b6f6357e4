"""Decides when a round begins, with which members, and when it restarts with a different size.

If a round begins with too few nodes, the nodes that come later are wasted until the next round. If
it waits for them, it wastes the nodes that are ready. The rules compare these costs, using what is
known about the missing nodes:

- A round of `nodes` nodes begins immediately; a round of fewer than `min_nodes` never begins.
- If the number of ready nodes is in between, the first round waits FIRST_GRACE for more nodes,
  because pods start at different times.
- A later round begins immediately if as many nodes are ready as the last round had. If fewer nodes
  are ready, the round waits SHRINK_GRACE for more nodes. SHRINK_GRACE is 10 s in Standard mode. It
  is 0 in Fast mode, where a restart is cheap.
- If new nodes could join a running round, the round is restarted with the new nodes. If the new
  nodes complete the group, the round must have run for FILL_SECONDS. If the group is still
  incomplete with the new nodes, the round must have run for GROW_SECONDS, because every restart
  costs steps.

Example, nodes=8 and min_nodes=6:

    t=0    6 nodes are ready: the first round may begin at t=30
    t=12   all 8 are ready: round 1 begins
    t=900  a node is lost, 7 are ready: Fast begins round 2 immediately, Standard at t=910
    t=960  the replacement is ready, and makes the group whole. Round 2 has run for longer than
           FILL_SECONDS, so it is restarted immediately, and round 3 has 8 nodes

Survivors of the last round are chosen first (`choose`), then the members that have waited longest.
If there are too many survivors, those with the highest indices are excluded, because a smaller job
loses those slots. The operator sends the order of the ranks, because only the operator knows which
hosts the pods run on: docs/decisions/0019.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.protocol import Mode

FIRST_GRACE = 30.0
"""How many seconds the first round waits for more nodes after `min_nodes` nodes are ready."""
SHRINK_GRACE = {Mode.STANDARD: 10.0, Mode.FAST: 0.0}
"""How many seconds a later round waits for more nodes if fewer are ready than the last round had.
"""
FILL_SECONDS = 10.0
"""Minimum number of seconds that a round runs before it is restarted, if the new nodes complete the
group.
"""
GROW_SECONDS = 60.0
"""Minimum number of seconds that a round runs before it is restarted, if the new nodes do not
complete the group.
"""
ORDER_SECONDS = 10.0
"""Maximum number of seconds that a round waits for the operator to send a new member's position in
the order. A round rarely has to wait, because the operator knows the position before the pod
starts.
"""


@dataclass(frozen=True)
class Size:
    """How many nodes a round should have (`nodes`), and how many it needs at
    least (`min_nodes`).
    """

    nodes: int
    min_nodes: int


@dataclass(frozen=True)
class RankOrder:
    """The order in which pods get their ranks.

    The operator sets the order, because the operator knows which hosts the pods run on.
    """

    expected: bool = False
    """Whether the operator sends an order in which each member has a position."""
    places: dict[str, int] = field(default_factory=dict)
    """{pod: its position in the order}. If the mapping is empty, ranks follow the indices."""

    def ranked(self, chosen: Iterable[Member]) -> list[Member]:
        """Return the members in the order of their ranks.

        The member with index 0 always comes first, so it gets rank 0. Members without a position
        come last.
        """
        last = len(self.places)
        return sorted(chosen, key=lambda m: (m.index != 0, self.places.get(m.pod, last), m.index))

    def known_at(self, chosen: Iterable[Member]) -> float:
        """Return when the round should stop waiting for these members' positions; 0 if the round
        need not wait.
        """
        if not self.expected:
            return 0.0
        return max((m.since + ORDER_SECONDS for m in chosen if m.pod not in self.places), default=0.0)


def begins_at(
    ready: int, size: Size, enough_since: float | None, first: bool, before: int | None, mode: Mode
) -> float | None:
    """Return when a round with the ready members begins: 0 for now, None if there are too few
    members.

    `enough_since` is when the number of ready members reached `min_nodes`, and `before` is the size
    of the last round. If at least `before` members are ready, the round does not wait for more.
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

    Survivors of round `last` come first, in the order of their indices. The members that have
    waited longest come next.
    """
    survivors = sorted((m for m in ready if last and m.round == last), key=lambda m: m.index)
    others = sorted((m for m in ready if m not in survivors), key=lambda m: (m.ready_at, m.index))
    return (survivors + others)[:nodes]


def resizes_at(world: int, since: float | None, ready: int, size: Size) -> float | None:
    """Return when a round with `world` nodes should be restarted to change its size; None to keep
    its size.

    `since` is when the round began to run, and `ready` is the number of nodes that could join it.
    """
    if since is None:
        return None
    if world > size.nodes:
        return 0.0
    reached = min(size.nodes, world + ready)
    if reached <= world:
        return None
    return since + (FILL_SECONDS if reached == size.nodes else GROW_SECONDS)
