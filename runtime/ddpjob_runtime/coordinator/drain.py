"""Asks members to stop their workers, and fences the members that do not do so in time."""

from __future__ import annotations

from collections.abc import Callable

from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member, Members
from ddpjob_runtime.protocol import ToMember

DRAIN_SECONDS = 30.0
"""Maximum number of seconds from `restart` to `ready`. The limit is high because a killed worker
that holds a device or a lot of memory may take many seconds to exit.
"""
PLANNED_SLACK = 5.0
"""Number of seconds that a member has after its grace period to report `ready`. In a planned
restart, the member's workers can save during the grace period.
"""


class Drains:
    """Asks members to stop their workers, and passes those that are late to `fence`."""

    def __init__(self, members: Members, loop: Loop, fence: Callable[[list[Member]], None]) -> None:
        self._members, self._loop, self._fence = members, loop, fence

    def ask(self, member: Member, why: str, planned: bool) -> None:
        """Ask `member` to stop its workers. If the stop is `planned`, the workers can save during
        the member's grace period.
        """
        seconds = member.grace + PLANNED_SLACK if planned else DRAIN_SECONDS
        if member.drain(self._loop.now() + seconds, planned):
            self._loop.later(seconds + 0.001, self._check)
        member.send(ToMember.RESTART, {"round": member.round, "why": why, "planned": planned})

    def _check(self) -> None:
        now = self._loop.now()
        late = [m for m in self._members if m.has_workers and m.drain_by is not None and m.drain_by <= now]
        if late:
            self._fence(late)
