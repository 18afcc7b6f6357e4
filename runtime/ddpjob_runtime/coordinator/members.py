"""The connected launchers, called members, and the lists of lost and dismissed members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator.first_cause import Source
from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.states import MEMBER_TRANSITIONS, State
from ddpjob_runtime.protocol import LostMember, MemberState, ToMember, time_of

Send = Callable[[str, "dict[str, Any]"], None]
"""A function that sends one line to the member, given the line's verb and fields."""


class Member:
    """A launcher that is connected to the coordinator. Times are in seconds on the coordinator's
    clock.
    """

    def __init__(self, pod: str, index: int, attempt: int, pid: int, send: Send, grace: float, heard: float) -> None:
        self.pod, self.index, self.attempt, self.pid = pod, index, attempt, pid
        self.send, self.grace, self.since, self.heard = send, grace, heard, heard
        self._state = State(MemberState.STARTING, MEMBER_TRANSITIONS)
        self._tally: Counter[MemberState] = Counter()
        self.round: int | None = None
        """Number of the last round that the member was sent into. `rank` is its group rank in that
        round.
        """
        self.rank: int | None = None
        self.host, self.port, self.ready_at = "", 0, 0.0
        self.watch = 0
        """Port through which the member's neighbours watch its host; 0 if they cannot watch it."""
        self.check = 0
        """Maximum number of seconds that the member's next round may spend on checking links; 0 if
        the member does not request a check.
        """
        self.drain_by: float | None = None
        """Deadline for the member to stop its workers; None if it was not asked to stop them."""
        self.drain_planned = False
        """Whether the member's workers can save before they stop."""
        self.given_up = False
        """Whether the member was declared lost although its connection is still open."""

    @property
    def state(self) -> MemberState:
        return self._state.now

    @property
    def source(self) -> Source:
        """The pod and index that this member's events come from."""
        return Source(self.pod, self.index)

    @property
    def has_workers(self) -> bool:
        """Whether the member may have workers. It may if it is in a round and is not leaving."""
        return self.state in (MemberState.RUNNING, MemberState.FINISHED)

    def count_in(self, tally: Counter[MemberState]) -> None:
        """Count this member's state in `tally`, which all members share."""
        self._tally = tally
        self._tally[self.state] += 1

    def _become(self, state: MemberState) -> None:
        self._tally[self.state] -= 1
        self._state.become(state)
        self._tally[self.state] += 1

    def hear(self, now: float) -> None:
        """Record that a line from the member arrived at `now`."""
        self.heard = now

    def give_up(self) -> None:
        """Mark the member as lost although its connection is still open.

        When the member sends its next line, the connection is closed.
        """
        self.given_up = True

    def reconnect(self, send: Send, now: float) -> None:
        """Use a new connection to the same launcher process from now on."""
        self.send, self.heard = send, now

    def become_ready(self, host: str, port: int, now: float, check: int = 0, watch: int = 0) -> None:
        """Record that the member can take part in a round.

        `host` and `port` are the address of the store that the member hosts if it gets rank 0.
        """
        if self.state != MemberState.READY:
            self.ready_at = now
        self._become(MemberState.READY)
        self.host, self.port, self.check, self.watch, self.drain_by = host, port, check, watch, None

    def enter(self, number: int, rank: int) -> None:
        """Record that the member is sent into a round."""
        self._become(MemberState.RUNNING)
        self.round, self.rank, self.drain_by = number, rank, None

    def resume(self, number: int, rank: int, has_workers: bool) -> None:
        """Record the round and the rank that the member had under an earlier coordinator."""
        self.round, self.rank = number, rank
        if has_workers:
            self._become(MemberState.RUNNING)

    def finish(self) -> None:
        """Record that all workers of the member have ended with exit code 0. A leaving member
        remains Leaving.
        """
        if self.state == MemberState.RUNNING:
            self._become(MemberState.FINISHED)

    def leave(self) -> None:
        """Record that the member was asked to leave and will soon be gone."""
        self._become(MemberState.LEAVING)
        self.drain_by = None

    def lose(self) -> None:
        """Record that this launcher is no longer a member. The round that the member was in may
        still refer to this object.
        """
        self._become(MemberState.LOST)

    def drain(self, until: float, planned: bool) -> bool:
        """Set the deadline for the member to stop its workers, and return whether it was set.

        If the member already has an earlier deadline, that one stays in force. The stop is still
        no longer planned if this request is unplanned. A round never requests the reverse.
        """
        self.drain_planned = planned
        if self.drain_by is not None and self.drain_by <= until:
            return False
        self.drain_by = until
        return True

    def dismiss(self, why: str) -> None:
        """Fence the member, so that it exits whatever it is doing."""
        self.send(ToMember.STOP, {"ok": False, "why": why, "fenced": True})


class Members:
    """Keeps the members (one per index), the missing members, and the pods that are never admitted
    again.

    The number of ready members is needed for every line from a member, so a tally of the states is
    updated whenever a state changes. Without the tally, counting a thousand members took half of
    the CPU time before a round began.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.by_index: dict[int, Member] = {}
        self.missing: dict[int, LostMember] = {}
        """Members that were lost without notice, by index. Each stays listed until a pod with the
        same index connects, or until the operator reports that the member's pod is gone.
        """
        self._dismissed: dict[str, str] = {}
        self._tally: Counter[MemberState] = Counter()

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self.by_index.values()))

    def holds(self, member: Member) -> bool:
        """Whether this member still has its index; False if a newer member has taken the index."""
        return self.by_index.get(member.index) is member

    @property
    def ready_count(self) -> int:
        """Number of members that can take part in a new round."""
        return self._tally[MemberState.READY]

    def ready(self) -> list[Member]:
        """Return the members that can take part in a new round, in the order in which they became
        ready.
        """
        return sorted((m for m in self if m.state == MemberState.READY), key=lambda m: (m.ready_at, m.index))

    def admit(self, member: Member) -> None:
        """Add a new member under its index."""
        self.by_index[member.index] = member
        member.count_in(self._tally)
        self._loop.changed()

    def heard_of(self, index: int) -> None:
        """Record that a pod with this index exists. The index no longer counts as missing."""
        self.missing.pop(index, None)

    def why_refused(self, pod: str, index: int, attempt: int) -> str | None:
        """Return why this pod is refused, or None if it may join."""
        why = self._dismissed.get(pod)
        old = self.by_index.get(index)
        if why is None and old is not None and old.attempt > attempt:
            return f"pod {old.pod} (attempt {old.attempt}) has replaced this pod"
        return why

    def dismiss(self, pod: str, why: str) -> None:
        """Refuse connections from this pod from now on."""
        self._dismissed[pod] = why

    def forget_missing(self, pod: str) -> None:
        """Stop listing a pod as missing, because the operator knows that the pod is gone."""
        for index in [index for index, lost in self.missing.items() if lost.pod == pod]:
            del self.missing[index]

    def miss(self, member: Member, why: str) -> None:
        """List a member as lost without notice, so that the operator checks its pod."""
        if self.holds(member) and member.state != MemberState.LEAVING:
            why = protocol.clip(why, protocol.MAX_REASON)
            self.missing[member.index] = LostMember(member.pod, time_of(member.heard), member.index, why)

    def remove(self, member: Member) -> None:
        """Remove a member. A newer member that has already taken the same index stays."""
        if self.holds(member):
            del self.by_index[member.index]
        member.lose()
        self._loop.changed()

    def lost(self) -> tuple[LostMember, ...]:
        """Return the missing members in the form that the report uses."""
        return tuple(self.missing[index] for index in sorted(self.missing))

    def report(self) -> tuple[protocol.Member, ...]:
        """Return the members in the form that the report uses, ordered by index.

        Members that are starting or ready are listed without a rank.
        """
        idle = (MemberState.STARTING, MemberState.READY)
        return tuple(
            protocol.Member(m.pod, m.state, m.index, m.attempt, None if m.state in idle else m.rank, m.round)
            for m in sorted(self, key=lambda m: m.index)
        )
