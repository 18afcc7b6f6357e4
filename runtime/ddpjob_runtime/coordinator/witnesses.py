"""Declares a silent member lost before its timeout, if two witnesses agree and a spare is ready.

The server waits 6 s for a silent member, because a network may fail briefly and restarts cost work.
If a spare is ready, an early decision risks little: the spare takes over, and the silent member
becomes the spare when it reconnects. So a member is declared lost within a second if two witnesses
have seen that it is unreachable:

- a neighbour in the round's ring (`launcher/neighbours.py`) has reported that the member did not
  acknowledge a byte for 0.5 s, and has not withdrawn that report;
- a heartbeat on this coordinator's own connection is not acknowledged within CONFIRM_SECONDS.

After a neighbour's report, the coordinator checks all members, not only the reported one. If most
of them are silent, this coordinator is the one that is partitioned, and no member is declared lost.
A spare counts only if it also acknowledges the heartbeat. If there are fewer spares than lost
members, only the time limits of `server` apply.

If a link is down for less than 0.5 s, no member is declared lost. Both kernels resend every 0.2 s
(`resend_often`), so the heartbeat is acknowledged at most 0.7 s after the outage began. The
coordinator judges after 0.85 s at the earliest.

Example with 8 nodes and a spare. The host of rank 3 loses its network at 0.0 s:

    0.60  ranks 2 and 4 report rank 3; this coordinator sends all 9 members a heartbeat
    0.95  only rank 3 has not acknowledged it: rank 3 is lost, and the spare takes its place
    5.00  the network is back. The member reports its old round, stops its workers, and is ready

See docs/decisions/0025.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member, Members
from ddpjob_runtime.coordinator.round_sequence import Rounds
from ddpjob_runtime.protocol import MemberState, ToMember

CONFIRM_SECONDS = 0.35
"""Number of seconds within which the kernels of the members' hosts must acknowledge a heartbeat."""
LATE_SECONDS = 0.3
"""Maximum number of seconds by which a check may be late. If a check is later than that, this
process or its host was paused. The check then proves nothing and is repeated.
"""
FRESH_SECONDS = 2.0
"""Number of seconds for which a neighbour's report is valid. Neighbours repeat a report every
second while the reported member is silent. Reports expire because the line that withdraws a report
may be lost.
"""
PAUSE_SECONDS = 1.0
"""Minimum number of seconds between a check that finds no loss and the next check."""


class Witnesses:
    """Compares the neighbours' reports with what this coordinator sees on its own connections.

    `acknowledges(member)` returns whether the kernel of the member's host has acknowledged all data
    that was sent to it.
    """

    def __init__(self, rounds: Rounds, members: Members, loop: Loop, acknowledges: Callable[[Member], bool]) -> None:
        self._rounds, self._members, self._loop = rounds, members, loop
        self._acknowledges = acknowledges
        self._number = 0
        self._reports: dict[tuple[int, int], float] = {}  # (reporting rank, silent rank) -> time of the report
        self._looked_at: float | None = None  # when the current check began
        self._rests_until = 0.0

    def report(self, member: Member, number: int, rank: int, silent: bool) -> None:
        """Record a member's report that a neighbour has fallen silent or can be heard again.

        Raises:
            ValueError: `rank` is not a neighbour of the member.
        """
        current = self._rounds.current
        if current is None or number != current.number or not current.holds(member) or member.rank is None:
            return
        if (rank - member.rank) % current.world not in (1, current.world - 1):
            raise ValueError(f"rank: must be a neighbour of rank {member.rank} of {current.world}, not {rank}")
        if number != self._number:
            self._number, self._reports = number, {}
        if silent:
            self._reports[member.rank, rank] = self._loop.now()
        else:
            self._reports.pop((member.rank, rank), None)
        self._look()

    def _look(self) -> None:
        """Begin a check if a neighbour has reported a member and a spare is ready.

        A check sends a heartbeat to all members. `_judge` then checks which kernels have
        acknowledged the heartbeat.
        """
        now = self._loop.now()
        if self._looked_at is not None or now < self._rests_until:
            return
        if self._reported() and self._members.ready_count:
            self._looked_at = now
            for member in self._members:
                member.send(ToMember.HEARTBEAT, {})
            self._loop.later(CONFIRM_SECONDS, self._judge)

    def _reported(self) -> list[Member]:
        """Return the training members whose neighbours report them as silent."""
        current = self._rounds.current
        if current is None or current.number != self._number or current.broken or self._rounds.over:
            return []
        if self._rounds.held:
            return []
        now = self._loop.now()
        ranks = {rank for (_, rank), when in self._reports.items() if now <= when + FRESH_SECONDS}
        found = (current.members[rank] for rank in ranks if rank in current.members)
        return [m for m in found if current.holds(m) and m.state == MemberState.RUNNING]

    def _judge(self) -> None:
        began, now, current = self._looked_at or 0.0, self._loop.now(), self._rounds.current
        self._looked_at = None
        if now > began + CONFIRM_SECONDS + LATE_SECONDS:
            self._look()
            return
        silent = [m for m in self._members if m.heard <= began and not self._acknowledges(m)]
        lost = [m for m in self._reported() if m in silent]
        spares = [m for m in self._members if m.state == MemberState.READY and m not in silent]
        if not lost or 2 * len(silent) > len(list(self._members)) or len(spares) < len(lost):
            self._rests_until = now + PAUSE_SECONDS
            return
        pods = {rank: member.pod for rank, member in current.members.items()} if current is not None else {}
        for member in lost:
            member.give_up()
        for member in lost:
            by = pods[min(by for by, rank in self._reports if rank == member.rank)]
            why = f"its host does not acknowledge bytes from {by} or from the coordinator"
            self._loop.log(f"node {member.pod} ({member.state}): {why}; a spare is ready")
            self._rounds.lose(member, why)
        self._rounds.advance()
