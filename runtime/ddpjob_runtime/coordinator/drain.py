"""The end of a member's workers: asked for, and enforced when its time is over."""

from __future__ import annotations

from collections.abc import Callable

from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member, Members
from ddpjob_runtime.protocol import ToMember

DRAIN_SECONDS = 30.0
"""From `restart` to `ready`: a killed worker with much memory, or on a device, is gone after many seconds."""
PLANNED_SLACK = 5.0
"""The same beyond the member's grace, when it may save."""


class Drains:
    """Asks members to end their workers; `fence(late)` is called for those that have not in time."""

    def __init__(self, members: Members, loop: Loop, fence: Callable[[list[Member]], None]) -> None:
        self._members, self._loop, self._fence = members, loop, fence

    def ask(self, member: Member, why: str, planned: bool) -> None:
        """End the workers and say `ready`; `planned`: they may take the pod's grace to save."""
        seconds = member.grace + PLANNED_SLACK if planned else DRAIN_SECONDS
        if member.drain(self._loop.now() + seconds, planned):
            self._loop.later(seconds + 0.001, self._check)
        member.send(ToMember.RESTART, {"round": member.round, "why": why, "planned": planned})

    def _check(self) -> None:
        now = self._loop.now()
        late = [m for m in self._members if m.has_workers and m.drain_by is not None and m.drain_by <= now]
        if late:
            self._fence(late)
