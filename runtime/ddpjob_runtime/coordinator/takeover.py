"""Lets a coordinator replace an earlier one while the members' round continues undisturbed.

The coordinator is a single process and does not keep anything on disk, so a new coordinator knows
nothing at first. Meanwhile, the members continue to train. They report everything that matters in
their hello: the number and size of their round, their rank, and whether their workers are running.
The danger is that a new coordinator begins a second, concurrent round with the members that have
reconnected so far, because it does not know about the others.

So from the first hello on, no round begins or is judged (`hold`) until one of these is true:

- Every rank of the round has reconnected. Then the round continues.
- ADOPT_SECONDS have passed. Then the round breaks because some ranks did not reconnect.
- The round is known to be over, or at least as many pods are known to be gone as ranks have not
  reconnected. In both cases, the hold ends after another BROKEN_SECONDS, in which the remaining
  members can reconnect.

Example with four nodes in round 7, in which the coordinator's pod is replaced:

    0.0  node 0: hello, resume={round 7, rank 0, of 4, Running}. Round 7 is taken over, 1 of 4 back
    0.3  nodes 1 and 2 are back
    9.8  node 3 is back: it had to look up the new address. Round 7 continues, and no step was lost

If node 3 had died together with the coordinator, the operator would report that node 3's pod is
gone. The hold would end 5 s later, and round 7 would break with the cause PeerLost.

If a member of a later round reconnects, the later round is adopted instead, and members of the
earlier round are drained. Rounds of different coordinators never have the same number
(NUMBERS_PER_ATTEMPT).

See docs/decisions/0008 for why losing the coordinator does not lose a step in Fast mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member, Members
from ddpjob_runtime.coordinator.round_sequence import Rounds
from ddpjob_runtime.protocol import MAX_PODS, MemberState, whole_number

ADOPT_SECONDS = 45.0
"""Maximum number of seconds that a new coordinator waits for all members of an undisturbed round to
reconnect. The limit is high because members look for a new coordinator only every 10 s while the
old one is still running, and a name server may return the old address for 30 s.
"""
BROKEN_SECONDS = 5.0
"""Number of seconds that members still have to reconnect once the round is known to be over."""


@dataclass(frozen=True)
class Resume:
    """What a member reports about its round when it reconnects."""

    round: int
    rank: int
    world: int
    state: MemberState
    planned: bool = False
    """Whether an earlier coordinator asked the member for a planned stop, in which the workers can
    save before they exit.
    """

    @property
    def has_workers(self) -> bool:
        return self.state != MemberState.READY

    @classmethod
    def read(cls, body: Any) -> Resume | None:
        """Read the `resume` field of a hello. Return None if the member was not in a round.

        Raises:
            ValueError: the message names the field.
        """
        if body is None:
            return None
        if not isinstance(body, dict):
            raise ValueError("resume: must be an object")
        for name in ("round", "rank", "world"):
            whole_number(body.get(name), f"resume.{name}")
        states = (MemberState.RUNNING, MemberState.FINISHED, MemberState.READY)
        if body.get("state") not in states:
            raise ValueError("resume.state: must be {}, {} or {}, not {!r:.80}".format(*states, body.get("state")))
        if body["rank"] >= body["world"]:
            raise ValueError(f"resume.rank: must be less than resume.world ({body['world']}), not {body['rank']}")
        if body["world"] > MAX_PODS:
            raise ValueError("resume.world: must be at most {}, not {}".format(MAX_PODS, body["world"]))
        return cls(body["round"], body["rank"], body["world"], MemberState(body["state"]), body.get("planned") is True)


class Takeover:
    """Puts reconnecting members back into the rounds that they were in under an earlier
    coordinator.
    """

    def __init__(self, rounds: Rounds, members: Members, loop: Loop, attempt: int) -> None:
        self._rounds, self._members, self._loop, self._attempt = rounds, members, loop, attempt
        self._opened = False
        self._gone: set[str] = set()
        self._until: float | None = None
        """Time at which rounds are no longer held for reconnecting members; None if rounds are not
        held.
        """

    def arrive(self) -> None:
        """Hold rounds from the first hello on, unless this is the first coordinator of the
        generation.
        """
        if self._attempt and not self._opened:
            self._hold(ADOPT_SECONDS)

    def _hold(self, seconds: float) -> None:
        self._opened = True
        until = self._loop.now() + seconds
        self._until = until if self._until is None else min(until, self._until)
        self._rounds.hold()
        self._loop.later(seconds + 0.001, self._end_if_due)

    def _end_if_due(self) -> None:
        if self._until is not None and self._loop.now() >= self._until:
            self._end()

    def resume(self, member: Member, resumed: Resume) -> None:
        """Put a member back into its round. If that round no longer exists, ask the member to stop
        its workers.
        """
        rounds = self._rounds
        if rounds.current is None or resumed.round > rounds.current.number:
            # This coordinator did not begin this round, so an earlier one did.
            if self._until is None:
                self._hold(ADOPT_SECONDS)
            rounds.take_over(resumed.round, resumed.world)
        current = rounds.current
        member.resume(resumed.round, resumed.rank, resumed.has_workers)
        if current is None or current.number != resumed.round or current.world != resumed.world:
            if resumed.has_workers:
                rounds.drain(member, f"the group continued without this node after round {resumed.round}")
            return
        current.readmit(member, resumed.rank, joined=self._until is not None)
        if not current.broken and (resumed.planned or not resumed.has_workers):
            current.come_apart(member, resumed.planned)
        elif current.broken and resumed.has_workers:
            rounds.drain(member, f"round {resumed.round} lost a node", current.ended_planned)
        elif resumed.state == MemberState.FINISHED:
            rounds.finished(member, resumed.round)
        self.check()

    def gone(self, pod: str) -> None:
        """Record that a pod is gone, even if this coordinator has never heard of the pod."""
        if self._until is not None:
            self._gone.add(pod)

    def check(self) -> None:
        """If enough is known, release the rounds or shorten their hold. Must be called after every
        event.
        """
        if self._until is None:
            return
        current = self._rounds.current
        if current is not None and current.complete:
            self._end()
            return
        if current is None:
            known = self._members.ready_count >= self._rounds.size.nodes
        else:
            # It is unknown which members have not reconnected. If at least as many pods are gone as
            # members are missing, assume that the missing members ran in those pods. After a
            # planned end, keep the long limit, because members may be saving before they look for
            # this coordinator.
            over = current.broken and not current.ended_planned
            known = over or len(self._gone) >= current.absent
        if known and self._until > self._loop.now() + BROKEN_SECONDS:
            self._hold(BROKEN_SECONDS)

    def _end(self) -> None:
        self._until = None
        self._rounds.release()
