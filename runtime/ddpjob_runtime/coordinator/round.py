"""One round: a fixed group of members from `go` to success or break.

A round ends in one of two ways. It succeeds when the last member's workers have all ended with exit
code 0. Otherwise it breaks, once, at the first of these events: a worker's failure, the loss or
departure of a member, a hang, or a change in the group's size. torchrun cannot replace one rank of
a running group, so a break stops all workers, and the next round starts new ones. After a break,
two things happen at the same time, so that finding the cause does not delay the restart:

- The workers are stopped. Members get `restart`, and reply `ready` when their workers are gone. If
  the end of the round is planned (a resize, or a node that leaves), workers can save first. A
  planned end can become unplanned, but not the reverse.
- The coordinator judges the round, once: it determines the first cause of the break. SETTLE_SECONDS
  after the break, the verdict is final if it is sure and no member is silent. If the verdict is not
  sure, or if a member is silent, the coordinator judges when every worker has ended.

Example: the script on one of four nodes raises an error.

    0.00  node 2 reports `failure` with a ValueError: the round is BROKEN, all nodes get `restart`
    0.03  nodes 0, 1 and 3 report connection errors, which are only evidence
    0.50  the verdict is sure: the round is JUDGED, and the operator's next reconcile finds the
          incident
    0.90  the last `ready` arrives: the next round can form (`round_sequence`)

If the first reported failure is a connection error, `restart` is sent only SETTLE_SECONDS later.
The real cause may still arrive within that time, and workers that are asked to stop would fail with
misleading errors.

`states` has a table of the states and their transitions. See docs/decisions/0010 for why the
coordinator determines causes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ddpjob_runtime.coordinator.evidence import Evidence
from ddpjob_runtime.coordinator.first_cause import ORDER_SECONDS, Finish, MemberLoss, Verdict, WorkerFailure
from ddpjob_runtime.coordinator.hang import HangDump
from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.standstill import Look, Stacks
from ddpjob_runtime.coordinator.states import ROUND_TRANSITIONS, RoundState, State
from ddpjob_runtime.protocol import EXIT_STEPPED_ASIDE, HEARTBEAT_SECONDS, MemberState, RankLook, ToMember

SETTLE_SECONDS = 0.5
"""The consequences of a cause arrive within this many seconds after the break."""
BUILD_SECONDS = 120.0
"""Maximum number of seconds from `go` until every member has sent `joined`."""
QUIET_SECONDS = 2.5 * HEARTBEAT_SECONDS
"""A member that has been silent for this many seconds may be dead."""


class RoundOwner(Protocol):
    """The methods that a round calls on its sequence of rounds."""

    @property
    def over(self) -> bool: ...
    @property
    def held(self) -> bool: ...
    def on_break(self, broken: Round) -> None: ...
    def on_verdict(self, judged: Round, verdict: Verdict, own: bool, ran: float) -> None: ...
    def drain(self, member: Member, why: str, planned: bool = False) -> None: ...
    def fence(self, late: list[Member], why: str) -> None: ...
    def advance(self) -> None: ...


class Round:
    """A group of `world` members with group ranks from 0.

    `members` maps group ranks to members. After a takeover, it contains only members that have
    reconnected.
    """

    def __init__(self, number: int, world: int, members: Mapping[int, Member], owner: RoundOwner, loop: Loop) -> None:
        self.number, self.world = number, world
        self.members = dict(members)
        self._owner, self._loop = owner, loop
        self._state = State(RoundState.BUILDING, ROUND_TRANSITIONS)
        self._joined: set[int] = set()
        self._finished: dict[int, float] = {}  # group rank -> time at which the last of its workers exited with code 0
        self._evidence = Evidence()
        self._running_since: float | None = None
        self.broken_at: float | None = None
        self._ended_at: float | None = None  # when the members were first asked to stop their workers
        self.ended_planned = False
        """Whether the members know that the end of the round is planned. If they do, their workers
        can save first.
        """
        self._dump: HangDump | None = None
        self._hangs = ""
        self._look: HangDump | None = None
        self._close_look: Look | None = None
        self._drains: Member | None = None

    # ---- state

    @property
    def state(self) -> RoundState:
        return self._state.now

    @property
    def broken(self) -> bool:
        """Whether the round can no longer succeed."""
        return self.state in (RoundState.BROKEN, RoundState.JUDGED)

    @property
    def judged(self) -> bool:
        """Whether nothing remains to be decided about the round."""
        return self.state in (RoundState.JUDGED, RoundState.SUCCEEDED, RoundState.SUPERSEDED)

    @property
    def complete(self) -> bool:
        """Whether every member has started its workers."""
        return len(self._joined) == self.world

    @property
    def resizable_since(self) -> float | None:
        """Time at which the round began to run; None while the size of the group must not change.

        The size must not change before the round runs, or once a member has finished or is leaving.
        """
        return None if self._finished or self._evidence.somebody_leaves else self._running_since

    @property
    def can_hang(self) -> bool:
        """Whether all members should be completing steps, so a lack of steps would be a hang.

        While a member leaves, its ranks may be saving, and the other ranks wait for them.
        """
        return not (self.broken or self._finished or self._evidence.somebody_leaves)

    def holds(self, member: Member) -> bool:
        """Whether the member was sent into this round and is still part of it."""
        inside = (MemberState.RUNNING, MemberState.FINISHED, MemberState.LEAVING)
        return member.round == self.number and member.state in inside

    def draining(self) -> list[Member]:
        """Return the members of this round whose workers may still be alive."""
        return [m for m in self.members.values() if self._may_have_workers(m)]

    @property
    def drains(self) -> bool:
        """Whether any member's workers may still be alive.

        This is computed for every line from a member. The member that was found last time is
        checked first, because it is likely to be found again.
        """
        known = self._drains
        if known is None or not self._has(known) or not self._may_have_workers(known):
            # Members mostly end in the order of their ranks, so a search from the highest rank
            # finds a member with workers sooner.
            self._drains = next(filter(self._may_have_workers, reversed(self.members.values())), None)
        return self._drains is not None

    def _has(self, member: Member) -> bool:
        """Whether the member still has its rank in this round. Another member may have taken the
        rank.
        """
        return member.rank is not None and self.members.get(member.rank) is member

    def _may_have_workers(self, member: Member) -> bool:
        return member.round == self.number and member.has_workers

    @property
    def absent(self) -> int:
        """The number of ranks that `absent_ranks` would return.

        This number is needed for every hello, so it is computed without building the list.
        """
        return self.world - len(self._joined)

    def absent_ranks(self) -> list[int]:
        """Return the group ranks that have not started their workers or, after a takeover, have not
        reconnected.
        """
        return [rank for rank in range(self.world) if rank not in self._joined]

    # ---- begin, join, run, finish

    def begin(self) -> None:
        """Send `go` to all members."""
        assert len(self.members) == self.world, "only a round that was taken over can lack members"
        for rank, member in self.members.items():
            member.enter(self.number, rank)
        first = self.members[0]
        # Only the address of rank 0 is sent. With 1,024 nodes, a list of all addresses took a
        # megabyte for each member.
        host = [{"rank": 0, "host": first.host, "port": first.port, "pod": first.pod}]
        # A member asks for a link check when it has new links. If any member asks, all members
        # check.
        check = max(member.check for member in self.members.values())
        common = {"round": self.number, "world": self.world, "members": host, **({"check": True} if check else {})}
        for rank, member in self.members.items():
            after = self.members[(rank + 1) % self.world]
            watch = {"next": {"host": after.host, "port": after.watch}} if after.watch and self.world > 1 else {}
            member.send(ToMember.GO, {**common, "rank": rank, **watch})
        pods = ", ".join(m.pod for m in self.members.values())
        self._loop.log(f"round {self.number} begins with {self.world} nodes: {pods}")
        self._loop.later(BUILD_SECONDS + check, lambda: self._check_built(BUILD_SECONDS + check))

    def _check_built(self, seconds: float) -> None:
        if self.state is RoundState.BUILDING and not self.complete and not self._owner.held:
            late = [m for rank, m in self.members.items() if rank not in self._joined]
            self._owner.fence(late, f"it did not start its workers within {seconds:.0f} s")

    def join(self, member: Member) -> None:
        """Record that the member has started its workers."""
        assert member.rank is not None
        self._joined.add(member.rank)

    def readmit(self, member: Member, rank: int, joined: bool) -> None:
        """Take back a member that took part in this round under an earlier coordinator.

        `joined` indicates whether the member had already started its workers in the round.
        """
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        self.members[rank] = member
        if joined:
            self._joined.add(rank)

    def run(self) -> bool:
        """Mark the round as running if every member has started its workers. Return whether this
        call has marked it.
        """
        if self.state is not RoundState.BUILDING or not self.complete:
            return False
        self._state.become(RoundState.RUNNING)
        self._running_since = self._loop.now()
        self._loop.log(f"round {self.number} runs")
        return True

    def finish(self, member: Member) -> None:
        """Record that all workers of the member have ended with exit code 0.

        If this was the last member, the round succeeds.
        """
        assert member.rank is not None
        self._finished[member.rank] = self._loop.now()
        member.finish()
        if len(self._finished) == self.world:
            self._state.become(RoundState.SUCCEEDED)

    def supersede(self) -> None:
        """End the round without judging it, because a newer round of an earlier coordinator is
        taken over.
        """
        if not self.judged:
            self._state.become(RoundState.SUPERSEDED)

    # ---- break

    def fail(self, member: Member, failure: WorkerFailure) -> None:
        """Handle a worker that has exited on its own. The member stops its other workers by itself.

        Exit code 0 is not a failure, but such an exit may be the cause of other workers' failures.
        """
        if failure.exit_code == 0:
            self._evidence.add_finish(Finish(failure.source, failure.time, failure.rank, failure.local_rank))
            return
        if self._evidence.knows(failure):
            return
        self._evidence.add_failure(failure)
        if member.state == MemberState.LEAVING:
            # The member was asked to leave, so the round breaks only when the member is gone. Until
            # then, other members may still be saving.
            return
        if self.ended_planned and self._ended_at is not None and failure.time > self._ended_at + ORDER_SECONDS:
            # A script can fail late because it was asked to stop. Workers on other nodes may still
            # be saving.
            return
        self._break_up()
        asked = self._evidence.somebody_leaves or self.ended_planned
        if asked and failure.exit_code == EXIT_STEPPED_ASIDE:
            self._end_workers("a node is leaving the group", planned=True)
        elif failure.communication or self._evidence.somebody_leaves:
            # Wait, because the cause might not have been reported yet, and because other workers
            # might still be saving.
            why = f"a worker in {member.pod} lost contact with its peers"
            self._loop.later(SETTLE_SECONDS, lambda: self._end_workers(why, planned=self._evidence.saving))
        else:
            self._end_workers(f"a worker in {member.pod} failed: {failure.message[:200]}")

    def leave(self, member: Member, why: str) -> None:
        """Record that the member was asked to leave, and that its workers are stopping.

        The round breaks only when the member is gone.
        """
        if member.state == MemberState.RUNNING and not self.judged:
            self._evidence.add_loss(MemberLoss(member.source, member.rank, why, self._loop.now(), leaving=True))

    def lose(self, member: Member, was: MemberState, why: str) -> None:
        """Handle the loss of a member. `was` is the state of the member before it was lost."""
        if member.rank in self._finished:
            return
        if self.judged:
            # If the round has a planned end, members that are saving may be waiting for the lost
            # member.
            if was == MemberState.RUNNING:
                self._end_workers(f"node {member.pod} was lost: {why}")
            return
        if was == MemberState.RUNNING:
            now = self._loop.now()
            when = member.heard if now - member.heard > QUIET_SECONDS else now
            self._evidence.add_loss(MemberLoss(member.source, member.rank, why, when, leaving=False))
        self._break_up()
        left = was == MemberState.LEAVING
        what = "left" if left else "was lost"
        self._end_workers(f"node {member.pod} {what}: {why}", planned=left and self._evidence.saving)

    def come_apart(self, member: Member, planned: bool = False) -> None:
        """Break the round because a member has left or is about to leave, for an unknown reason.

        `planned` means that an earlier coordinator had already begun a planned end of the round, in
        which workers can save.
        """
        why = f"node {member.pod} left the round on its own"
        self._evidence.came_apart(self._loop.now(), {"pod": member.pod, "index": member.index, "message": why})
        self._break_up()
        self._end_workers(why, planned)

    def give_up_absent(self) -> None:
        """Break the round because members did not reconnect to a new coordinator."""
        ranks = ", ".join(map(str, self.absent_ranks()))
        why = f"group rank(s) {ranks} of round {self.number} did not reconnect to the restarted coordinator"
        self._evidence.absent(self._loop.now(), {"message": why})
        self._break_up()
        self._end_workers(why)

    def restart_with(self, world: int, joiner: Member | None) -> None:
        """End the round in a planned way, so that the next one has `world` nodes.

        If the group grows, `joiner` is the first of the new members. If the group shrinks, `joiner`
        is None.
        """
        why = f"the group continues with {world} nodes instead of {self.world}"
        who = {} if joiner is None else {"pod": joiner.pod, "index": joiner.index}
        self._evidence.resized(self._loop.now(), {"message": why, **who})
        self._break_up()
        self._end_workers(why, planned=True)

    def hang(self, why: str) -> None:
        """Break a hung round: ask for the stacks of all ranks, and stop the workers once the stacks
        have arrived.

        `why` begins the incident's message, and includes the time since the last step.
        """
        self._dump, self._hangs = HangDump(self._loop, self._end_dump), why
        self._break_up()
        self._dump.request(self.number, self.draining())

    def look(self, done: Callable[[HangDump], None]) -> None:
        """Ask for the stacks of all ranks without breaking the round.

        `done` is called with the result, unless the round breaks in the meantime.
        """

        def end() -> None:
            if self._look is dump and not self.broken:
                self._look = None
                done(dump)

        dump = self._look = HangDump(self._loop, end)
        dump.request(self.number, self.draining())

    def look_closely(self, record: bool, done: Callable[[Look | None], None]) -> None:
        """Ask all members what their ranks are doing, without breaking the round.

        `done` is called with the result, or with None if a member does not respond. If `record` is
        set, the members write the stacks of this check to their logs.
        """

        def end(look: Look | None) -> None:
            self._close_look = None
            if not self.broken:
                done(look)

        self._close_look = Look(self._loop, self.draining(), end)
        self._close_look.request(self.number, self.draining(), record)

    @property
    def looks_closely(self) -> bool:
        """Whether responses to `look_closely` are still outstanding."""
        return self._close_look is not None

    def looked(self, member: Member, ranks: list[RankLook]) -> None:
        """Add a member's response to `look_closely`."""
        if self._close_look is not None:
            self._close_look.add(member, ranks)

    def hung(self, why: str, stacks: Stacks) -> None:
        """Break a hung round whose stacks have been collected already.

        `why` begins the incident's message.
        """
        self._dump, self._hangs = HangDump(self._loop, self._end_dump, stacks), why
        self._break_up()
        self._end_dump()

    def stacks(self, member: Member, rank: int, text: str, idle: bool | None) -> None:
        """Pass the stacks of one rank to the method that asked for them (`hang` or `look`)."""
        for dump in (self._dump, self._look):
            if dump is not None:
                dump.add(member, rank, text, idle, self.draining)

    def _end_dump(self) -> None:
        if self._dump is None or self.state is RoundState.SUPERSEDED:
            return
        self._name_hang()
        self._end_workers("the group hangs")
        self.judge()
        self._owner.advance()

    def _name_hang(self) -> None:
        assert self._dump is not None
        stacks = self._dump.stacks
        (where, traceback), culprit = stacks.describe(), stacks.culprit()
        self._dump = None
        who = {} if culprit is None else {"pod": culprit.pod, "index": culprit.index}
        details = {"message": f"{self._hangs}: {where}", "traceback": traceback, **who}
        self._evidence.hangs(self.broken_at or self._loop.now(), details)

    def _break_up(self) -> None:
        """Mark the round as broken. A broken round can no longer succeed. Only the first call has
        an effect.
        """
        if self.broken:
            return
        self._state.become(RoundState.BROKEN)
        self.broken_at = self._loop.now()
        self._owner.on_break(self)
        self._loop.later(SETTLE_SECONDS, self._judge_if_clear)

    def _end_workers(self, why: str, planned: bool = False) -> None:
        """Ask all members to stop their workers, unless an earlier request was at least as urgent.

        An unplanned end is more urgent than a planned one.
        """
        if self._owner.over or (self._ended_at is not None and (planned or not self.ended_planned)):
            return
        self._ended_at = self._loop.now() if self._ended_at is None else self._ended_at
        self.ended_planned = planned
        self._loop.log(f"round {self.number} ends: {why}")
        for member in self.draining():
            self._owner.drain(member, why, planned)

    # ---- judge

    def _judge_if_clear(self) -> None:
        """If the verdict is sure and no member is silent, judge the round although some workers
        have not ended.
        """
        if self.judged or self._dump is not None or self._owner.held:
            return
        verdict, now = self._verdict(), self._loop.now()
        waits = self.draining()
        if waits and (verdict is None or not verdict.sure or any(now - m.heard > QUIET_SECONDS for m in waits)):
            return
        self.judge()

    def judge(self) -> None:
        """Determine the first cause of the break, and report it to the owner of the round. Only the
        first call has an effect.
        """
        if self.judged:
            return
        if self._dump is not None:
            self._name_hang()
        self._state.become(RoundState.JUDGED)
        verdict = self._verdict()
        if verdict is None:
            return
        began, broke = self._running_since, self.broken_at
        ran = 0.0 if began is None or broke is None else broke - began
        self._owner.on_verdict(self, verdict, self._evidence.is_own(verdict), ran)

    def _verdict(self) -> Verdict | None:
        came_back = [(rank, when) for rank, when in self._finished.items() if rank in self.members]
        finishes = [Finish(self.members[rank].source, when, node=rank) for rank, when in came_back]
        return self._evidence.verdict(finishes, self._ended_at)
