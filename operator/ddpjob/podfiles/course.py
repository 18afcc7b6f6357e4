"""The course of the group's rounds: they form, run, break, are judged, and the next one forms. No sockets; time and sending are handed in.

A round breaks once: at the first failure of a worker, loss of a member or departure of one, at a hang, or for a change of the group's size.
Its members are told to end their workers and say `ready`; who does not in time is fenced. The next round forms when nobody drains any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import formation
import hang
import wire
from attribution import Failure, Finish, Loss, Verdict, judge
from backoff import Backoff
from formation import Size
from ledger import IDS_PER_ATTEMPT, OWN, Ledger
from membership import FINISHED, LEAVING, LOST, READY, RUNNING, Member, Round

DRAIN_SECONDS = 15.0  # from `restart` to `ready`
PLANNED_SLACK = 5.0  # the same beyond the member's grace, when it may save
BUILD_SECONDS = 120.0  # from `go` to `joined` of everyone
DUMP_SECONDS = 3.0  # for the stacks of a hang
LAST_STACKS_SECONDS = 0.3  # a member's stacks arrive together
QUIET_SECONDS = 2.5 * wire.HEARTBEAT_SECONDS  # a member that is silent for so long may be dead


@dataclass(frozen=True)
class Settings:
    """What a coordinator is started with."""

    nodes: int
    minimum: int
    generation: int = 0
    mode: str = wire.STANDARD
    attempt: int = 0
    hang_after: float | None = None
    backoff_initial: float = 1.0
    backoff_maximum: float = 60.0


class Course:
    """Decides when a round begins and ends. `members` is shared with the `Group`, which lets members in."""

    def __init__(
        self,
        settings: Settings,
        members: dict[int, Member],
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Any],
        changed: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self.mode, self.members = settings.mode, members
        self.size = Size(settings.nodes, settings.minimum)
        self._clock, self._later, self._changed, self._log = clock, later, changed, log
        self.state = "Forming"  # Forming, Running, Restarting, Succeeded, Stopped
        self.round: Round | None = None
        self.last_number = 0  # of the newest round that is known of
        self._least_number = settings.attempt * IDS_PER_ATTEMPT
        self.ledger = Ledger(settings.attempt)
        self.backoff = Backoff(settings.backoff_initial, settings.backoff_maximum)
        self.backoff_until: float | None = None
        self.watch = hang.HangWatch(settings.hang_after)
        self.down_since: float | None = None
        self.last_recovery: float | None = None
        self.steps_are_seen = False
        self.missing: dict[int, dict[str, Any]] = {}  # by place: members that went without a word, as the operator reads it
        self.dismissed: dict[str, str] = {}  # pod -> why it has no place here any more
        self.hold_until: float | None = None  # an earlier coordinator's round may be running: none is begun before
        self._stacks: dict[int, str] | None = None  # of a hang, while they arrive
        self._dumped: set[int] = set()
        self._hang_seconds = 0.0
        self._enough_since: float | None = None
        self._wake_at: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing will run any more."""
        return self.state in ("Succeeded", "Stopped")

    # ---- what is due

    def advance(self) -> None:
        """Do whatever is due now, and wake up for what will be."""
        if self.over or self.hold_until is not None:
            return
        current = self.round
        if current is None or current.broken:
            self._form(current)
        else:
            self._resize(current)
            self._look_for_a_hang(current)

    def _wake(self, when: float) -> None:
        if self._wake_at is not None and self._wake_at <= when:
            return
        self._wake_at = when
        self._later(max(0.0, when - self._clock()) + 0.001, lambda: self._woken(when))

    def _woken(self, when: float) -> None:
        if self._wake_at == when:
            self._wake_at = None
        self.advance()

    # ---- forming

    def _form(self, current: Round | None) -> None:
        if current is not None:
            if current.draining():
                return
            self._judge(current)
        now = self._clock()
        if self.backoff_until is not None and now < self.backoff_until:
            self._wake(self.backoff_until)
            return
        ready = [m for m in self.members.values() if m.state == READY]
        if len(ready) < self.size.minimum:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        first = self.last_number == 0
        before = current.world if current is not None else None
        when = formation.begins_at(len(ready), self.size, self._enough_since, first, before, self.mode)
        if when is not None and now < when:
            self._wake(when)
        elif when is not None:
            self._go(formation.choose(ready, self.size.nodes, self.last_number))

    def _go(self, chosen: list[Member]) -> None:
        self.last_number = max(self.last_number, self._least_number) + 1
        current = self.round = Round(self.last_number, len(chosen), dict(enumerate(chosen)))
        self._enough_since = self.backoff_until = None
        for rank, member in enumerate(chosen):
            member.state, member.rank, member.round, member.drain_by = RUNNING, rank, current.number, None
        table = [{"rank": rank, "host": m.host, "port": m.port, "pod": m.pod} for rank, m in enumerate(chosen)]
        for rank, member in enumerate(chosen):
            member.send("go", {"round": current.number, "rank": rank, "world": current.world, "members": table})
        self._log(f"round {current.number} begins with {current.world} nodes: {', '.join(m.pod for m in chosen)}")
        self._later(BUILD_SECONDS, lambda: self._check_built(current))
        self._changed()

    def _check_built(self, current: Round) -> None:
        if self.round is current and not current.broken and not current.complete and self.hold_until is None:
            late = [m for rank, m in current.members.items() if rank not in current.joined]
            self.fence(late, f"it did not start its workers within {BUILD_SECONDS:.0f} s")

    def joined(self, member: Member, number: int) -> None:
        """The member has started its workers."""
        current = self.round
        if current is None or number != current.number or not current.holds(member) or current.broken:
            return
        assert member.rank is not None
        current.joined.add(member.rank)
        if current.complete and current.running_since is None and self.hold_until is None:
            self.runs(current)
        self._changed()
        self.advance()

    def runs(self, current: Round) -> None:
        """Every member's workers are there."""
        current.running_since = self._clock()
        self.state = "Running"
        self.watch.begin(self._clock())
        self._log(f"round {current.number} runs")
        if not self.steps_are_seen:
            self.recovered()  # nobody counts steps: the formed group is all that can be seen

    def recovered(self) -> None:
        """The group trains again, if it did not."""
        if self.down_since is not None:
            self.last_recovery, self.down_since = self._clock() - self.down_since, None

    def _resize(self, current: Round) -> None:
        ready = sorted((m for m in self.members.values() if m.state == READY), key=lambda m: (m.ready_at, m.index))
        when = formation.resizes_at(current, len(ready), self.size)
        if when is None:
            return
        if self._clock() < when:
            self._wake(when)
            return
        world = min(self.size.nodes, current.world + len(ready))
        why = f"the group goes on with {world} instead of {current.world} nodes"
        fields: dict[str, Any] = {"message": why, "traceback": ""}
        if world > current.world:
            fields.update(pod=ready[0].pod, index=ready[0].index)
        current.cause = Verdict("Joined", self._clock(), fields, 0)
        self.broken(current)
        self.tell_all(current, why, planned=True)

    # ---- members' words

    def ready(self, member: Member, after: int, host: str, port: int) -> None:
        """The member has no workers and could begin a round. `after`: the last one it knows of."""
        if member.state == LEAVING or (member.has_workers and member.round is not None and member.round > after):
            return  # it has crossed our `go`
        self.last_number = max(self.last_number, after)
        if member.state != READY:
            member.ready_at = self._clock()
        current = self.round
        ended = current is not None and current.holds(member) and not current.broken
        member.state, member.host, member.port, member.drain_by = READY, host, port, None
        if ended and current is not None and not self.over:
            self.came_apart(current, member)
        self._changed()
        self.advance()

    def came_apart(self, current: Round, member: Member) -> None:
        """A member has left the running round and nobody has said why."""
        why = f"node {member.pod} left the round by itself"
        fields = {"pod": member.pod, "index": member.index, "message": why, "traceback": ""}
        current.fallback = Verdict("PeerLost", self._clock(), fields, 0, sure=False)
        self.broken(current)
        self.tell_all(current, why)

    def finished(self, member: Member, number: int) -> None:
        """All workers of the member have ended with 0."""
        current = self.round
        if self.over:
            return
        if current is None or number != current.number or current.broken or not current.holds(member):
            if member.has_workers and member.drain_by is None:
                self.tell(member, f"a node of round {number} was lost before it had finished")
            return
        assert member.rank is not None
        current.finished[member.rank] = self._clock()
        if member.state == RUNNING:
            member.state = FINISHED
        if len(current.finished) == current.world:
            current.judged = True
            self.end("Succeeded")
            for other in self.members.values():
                other.send("done", {})
        self._changed()

    def failure(self, member: Member, number: int | None, failure: Failure) -> None:
        """A worker of the member ended by itself; the member ends the others and says `ready`."""
        current = self.round
        if current is None or number != current.number or current.judged or self.over:
            return
        current.failures.append(failure)
        if member.state == LEAVING:
            return  # as it was told; its peers may still save
        self.broken(current)
        stepped_aside = failure.exit_code == wire.EXIT_STEPPED_ASIDE
        if current.somebody_leaves and stepped_aside:
            self.tell_all(current, "a node leaves the group", planned=True)
        elif failure.communication or current.somebody_leaves:
            # The cause may be on its way, or others may still be saving: tell them when that has had its time.
            why = f"a worker of {member.pod} lost its peers"
            self._later(wire.SETTLE_SECONDS, lambda: self.tell_all(current, why, planned=self._saving(current)))
        else:
            self.tell_all(current, f"a worker of {member.pod} failed: {failure.message[:200]}")
        self._changed()

    def _saving(self, current: Round) -> bool:
        """Whether the members have agreed to save and leave."""
        return current.somebody_leaves and any(f.exit_code == wire.EXIT_STEPPED_ASIDE for f in current.failures)

    def leaving(self, member: Member, why: str) -> None:
        """The member was told to end; it passes that on to its workers and will be gone."""
        current = self.round
        if current is not None and current.holds(member) and member.state == RUNNING and not current.judged and not self.over:
            current.losses.append(Loss(member.place, member.rank, why, self._clock(), leaving=True))
        member.state, member.drain_by = LEAVING, None
        self._changed()
        self.advance()

    # ---- breaks

    def miss(self, member: Member, why: str) -> None:
        """The member has gone without a word; the operator will want to know whether its pod is still there."""
        if self.members.get(member.index) is member and member.state != LEAVING and not self.over:
            entry = {"pod": member.pod, "index": member.index, "since": wire.iso(member.heard), "why": why}
            self.missing[member.index] = entry
        self.depart(member, why)

    def depart(self, member: Member, why: str) -> None:
        """The member is gone. The caller goes on with `advance`, when everyone who is gone has departed."""
        current, was = self.round, member.state
        held = current is not None and current.holds(member)
        if self.members.get(member.index) is member:
            del self.members[member.index]
        member.state = LOST
        self._changed()
        if current is None or not held or self.over or current.judged or member.rank in current.finished:
            return
        if was == RUNNING:
            now = self._clock()
            when = member.heard if now - member.heard > QUIET_SECONDS else now
            current.losses.append(Loss(member.place, member.rank, why, when, leaving=False))
        self.broken(current)
        what = "left" if was == LEAVING else "was lost"
        self.tell_all(current, f"node {member.pod} {what}: {why}", planned=was == LEAVING and self._saving(current))

    def broken(self, current: Round) -> None:
        """This round cannot end well any more."""
        if current.broken:
            return
        now = self._clock()
        current.broken_at = now
        self.state = "Restarting"
        self.down_since = self.down_since or now
        self.watch.end()
        self._later(wire.SETTLE_SECONDS, lambda: self._judge_if_clear(current))
        self._changed()

    def tell_all(self, current: Round, why: str, planned: bool = False) -> None:
        """Tell the members of a broken round to end their workers, unless they have been told at least as urgently."""
        if self.over or (current.told_at is not None and (planned or not current.told_planned)):
            return
        current.told_at = self._clock() if current.told_at is None else current.told_at
        current.told_planned = planned
        self._log(f"round {current.number} ends: {why}")
        for member in current.draining():
            self.tell(member, why, planned)

    def tell(self, member: Member, why: str, planned: bool = False) -> None:
        """End your workers and say `ready`. Who does not in time is fenced."""
        seconds = member.grace + PLANNED_SLACK if planned else DRAIN_SECONDS
        if member.drain_by is None:
            member.drain_by = self._clock() + seconds
            self._later(seconds + 0.001, self._fence_late)
        member.send("restart", {"round": member.round, "why": why, "planned": planned})

    def _fence_late(self) -> None:
        now = self._clock()
        late = [m for m in self.members.values() if m.has_workers and m.drain_by is not None and m.drain_by <= now]
        if late and not self.over:
            self.fence(late, "it did not end its workers in time")

    def fence(self, late: list[Member], why: str) -> None:
        """The group goes on without these members, whatever they still do."""
        for member in late:
            self.dismissed[member.pod] = why
            self._log(f"fences {member.pod}: {why}")
            member.send("stop", {"ok": False, "why": f"the group goes on without this node: {why}", "fenced": True})
        for member in late:  # only now: nobody may form a round while one of them has not been told
            self.miss(member, why)
        self.advance()

    def _judge_if_clear(self, current: Round) -> None:
        """Judge a round that may still drain, unless who has not spoken yet could turn out to be the cause."""
        if current.judged or self._stacks is not None or self.hold_until is not None:
            return
        verdict, now = self._verdict(current), self._clock()
        waits = current.draining()
        if waits and (verdict is None or not verdict.sure or any(now - m.heard > QUIET_SECONDS for m in waits)):
            return
        self._judge(current)

    def _verdict(self, current: Round) -> Verdict | None:
        if current.cause is not None:
            return current.cause
        finishes = [Finish(current.members[rank].place, when) for rank, when in current.finished.items() if rank in current.members]
        verdict = judge(current.failures, current.losses, finishes, current.told_at)
        if current.absent is not None and (verdict is None or not verdict.sure):
            return current.absent
        return verdict or current.fallback

    def _judge(self, current: Round) -> None:
        if current.judged:
            return
        if self._stacks is not None:
            self._name_hang(current)
        current.judged = True
        verdict = self._verdict(current)
        if verdict is None:
            return
        wait = 0.0
        if verdict.kind in OWN or verdict is current.fallback:
            now = self._clock()
            began = current.running_since
            wait = self.backoff.failed(0.0 if began is None or current.broken_at is None else current.broken_at - began)
            self.backoff_until = now + wait if wait else None
        then = f"; waits {wait:g} s" if wait else ""
        cause = "{} ({})".format(verdict.fields.get("pod") or "no pod", verdict.fields["message"][:300])
        self._log(f"round {current.number} was broken by {verdict.kind}: {cause}, {verdict.consequences} consequences{then}")
        self.ledger.add(verdict.kind, verdict.time, verdict.fields, verdict.consequences, wait)
        self._changed()

    # ---- hangs

    def _look_for_a_hang(self, current: Round) -> None:
        due = self.watch.due()
        if due is None or current.broken or current.finished:
            return
        if self._clock() < due:
            self._wake(due)
            return
        self._hang_seconds = self.watch.limit or 0.0
        self._stacks, self._dumped = {}, set()
        self.broken(current)
        for member in current.draining():
            member.send("dump", {"round": current.number})
        self._later(DUMP_SECONDS, lambda: self._end_dump(current))

    def stacks(self, member: Member, number: int, rank: int, text: str) -> None:
        """What one rank of a hanging round does."""
        current = self.round
        if current is None or number != current.number or self._stacks is None:
            return
        self._stacks[rank] = text
        self._dumped.add(member.index)
        if all(m.index in self._dumped for m in current.draining()):
            self._later(LAST_STACKS_SECONDS, lambda: self._end_dump(current))

    def _end_dump(self, current: Round) -> None:
        if self._stacks is None or self.round is not current:
            return
        self._name_hang(current)
        self.tell_all(current, "the group hangs")
        self._judge(current)
        self.advance()

    def _name_hang(self, current: Round) -> None:
        message, traceback = hang.describe(self._stacks or {}, self._hang_seconds)
        self._stacks = None
        count = len(current.failures) + len(current.losses)
        current.cause = Verdict("Hang", current.broken_at or self._clock(), {"message": message, "traceback": traceback}, count)

    def end(self, state: str) -> None:
        """Terminal."""
        self.state = state
        self.watch.end()
        self._changed()
