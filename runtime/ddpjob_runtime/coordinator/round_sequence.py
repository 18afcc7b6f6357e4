"""The sequence of rounds: after a round breaks, the cause is determined and the next round forms.

This module opens no sockets, and its clock is passed in. After each event, `advance` does whatever
is due and sets an alarm for whatever will be due later.

Two rounds must never run at the same time, because both would write checkpoints, and an old worker
may still hold the GPU that a new worker needs. So a round forms only when no member of the last
round can have workers. A member that does not stop its workers in time is fenced: it is dismissed
permanently, and the group continues without it. Without this rule, one frozen node would stop the
job forever.

Round numbers only grow. A reconnecting member compares its round's number with the latest number to
learn whether the round is over. Coordinators of different attempts use different ranges of numbers.

Example with three nodes, in which node 2's machine loses power:

     0.0  node 2 has been silent for too long, or the operator knows that its pod is gone: `lose`.
          Round 7 breaks, nodes 0 and 1 get `restart`
     0.1  node 0 has ended its workers: `ready`. Node 1 hangs in the driver
    30.0  node 1 is fenced. Node 0 is the only remaining member of round 7
    38.0  the replacements of nodes 1 and 2 are ready: round 8 begins with three nodes

A change in the group's size also breaks a running round, but in a planned way. `formation` decides
when that is worthwhile. After repeated failures of the job itself, the next round begins only after
a delay (`backoff`). A coordinator that replaces an earlier coordinator first waits for the earlier
coordinator's members. During this wait, no round begins or is judged (`takeover`).

See docs/decisions/0001 for why the coordinator forms rounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ddpjob_runtime.coordinator import formation
from ddpjob_runtime.coordinator.backoff import RoundBackoff
from ddpjob_runtime.coordinator.downtime import Downtime
from ddpjob_runtime.coordinator.drain import Drains
from ddpjob_runtime.coordinator.first_cause import Verdict, WorkerFailure
from ddpjob_runtime.coordinator.formation import RankOrder, Size
from ddpjob_runtime.coordinator.hang import HangDump, HangWatch
from ddpjob_runtime.coordinator.incidents import Incidents
from ddpjob_runtime.coordinator.loop import Alarm, Loop
from ddpjob_runtime.coordinator.members import Member, Members
from ddpjob_runtime.coordinator.progress import MergedProgress
from ddpjob_runtime.coordinator.round import Round
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.coordinator.standstill import Look, Stacks
from ddpjob_runtime.coordinator.states import COORDINATOR_TRANSITIONS, RoundState, State
from ddpjob_runtime.protocol import (
    MAX_LINE,
    MAX_RECORDED,
    NUMBERS_PER_ATTEMPT,
    UNCOUNTABLE,
    CoordinatorState,
    Hangs,
    MemberState,
    Overdue,
    RankLook,
    ToMember,
    encode,
    iso,
    time_of,
)


class Rounds:
    """Decides when a round begins and when it ends.

    `progress` holds the latest figures that the script has reported.
    """

    def __init__(self, settings: CoordinatorSettings, members: Members, loop: Loop, progress: MergedProgress) -> None:
        self._members, self._loop, self._mode, self._progress = members, loop, settings.mode, progress
        self._state = State(CoordinatorState.FORMING, COORDINATOR_TRANSITIONS)
        self.size = Size(settings.nodes, settings.min_nodes)
        self.order = RankOrder(expected=settings.ordered)
        self.current: Round | None = None
        self.last_number = 0
        """The highest known round number, including rounds that an earlier coordinator began."""
        self._least_number = settings.attempt * NUMBERS_PER_ATTEMPT
        self.incidents = Incidents(settings.attempt)
        self.backoff = RoundBackoff(
            settings.backoff_initial, settings.backoff_maximum, no_restarts=settings.no_restarts
        )
        self.watch = HangWatch(settings.hang_after, settings.hangs)
        self.overdue: Overdue | None = None
        """The overdue step of the current round; None if no step is overdue."""
        # the value of `watch.since` when all ranks were last asked for their stacks
        self._looked_at: float | None = None
        self.downtime = Downtime()
        self._recorded = 0  # number of the latest incident that a member has recorded
        self.held = False
        """Whether an earlier coordinator's round may still be running. While this is true, no round
        begins or is judged.
        """
        self._enough_since: float | None = None
        self._alarm = Alarm(loop, self.advance)
        self._drains = Drains(members, loop, self._fence_late)

    @property
    def state(self) -> CoordinatorState:
        return self._state.now

    @property
    def over(self) -> bool:
        """Whether no further round will begin, because the job has succeeded or was stopped."""
        return self.state in (CoordinatorState.SUCCEEDED, CoordinatorState.STOPPED)

    def _now(self) -> float:
        return self._loop.now()

    # ---- what is due

    def advance(self) -> None:
        """Do whatever is due now, and set the alarm for whatever is due later."""
        if self.over or self.held:
            return
        if self.current is None or self.current.broken:
            self._form(self.current)
        else:
            self._resize(self.current)
            self._check_hang(self.current)
            self._check_standstill(self.current)

    def _form(self, last: Round | None) -> None:
        if last is not None:
            if last.drains:
                return
            last.judge()
        now = self._now()
        if self.backoff.until is not None and now < self.backoff.until:
            self._alarm.set(self.backoff.until)
            return
        ready = self._members.ready_count
        if ready < self.size.min_nodes:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        first, before = self.last_number == 0, None if last is None else last.world
        when = formation.begins_at(ready, self.size, self._enough_since, first, before, self._mode)
        if when is not None and now < when:
            self._alarm.set(when)
        elif when is not None:
            self._begin_in_order(formation.choose(self._members.ready(), self.size.nodes, self.last_number))

    def _begin_in_order(self, chosen: list[Member]) -> None:
        known_at = self.order.known_at(chosen)
        if self._now() < known_at:
            self._alarm.set(known_at)
        else:
            self._begin(self.order.ranked(chosen))

    def _begin(self, chosen: list[Member]) -> None:
        last = self.current
        assert last is None or (last.judged and not last.drains), f"round {last.number} would overlap the next one"
        self.last_number = max(self.last_number, self._least_number) + 1
        self.current = Round(self.last_number, len(chosen), dict(enumerate(chosen)), self, self._loop)
        self._enough_since = None
        self.backoff.clear()
        self._progress.forget_ranks()
        self.record("round", world=self.current.world)
        self.current.begin()
        self._loop.changed()

    def record(self, event: str, **fields: Any) -> None:
        """Ask one member, rank 0 if possible, to record a line that outlives the job's pods.

        The coordinator cannot record the line itself, because it has no volume and exits soon after
        the job ends.
        """
        writer = self._writer()
        if writer is None:
            return
        new = [i for i in self.incidents.recent if i.id > self._recorded]
        line = {"event": event, "time": iso(time_of(self._now())), "round": self.last_number, **fields}
        line["incidents"] = [i.short().write() for i in new[-MAX_RECORDED:]]
        line["progress"] = self._progress.report()
        # A script may report strings of any length, so the line may be too long for one message.
        if len(encode(ToMember.RECORD, **line)) > MAX_LINE // 2:
            line["incidents"] = [i.short(traceback=0).write() for i in new[-MAX_RECORDED:]]
            line["progress"] = {}
        writer.send(ToMember.RECORD, line)
        self._recorded = new[-1].id if new else self._recorded

    def record_start(self, start: dict[str, Any]) -> None:
        """Ask one member to record the step from which the round continued and the steps that it
        repeated.
        """
        if (writer := self._writer()) is not None:
            line = {"event": "start", "time": iso(time_of(self._now())), "round": self.last_number, "start": start}
            writer.send(ToMember.RECORD, line)

    def _writer(self) -> Member | None:
        connected = list(self._members)
        ranked = list(self.current.members.values()) if self.current is not None else []
        return next((m for m in [*ranked, *connected] if m in connected), None)

    def _resize(self, current: Round) -> None:
        ready = self._members.ready_count
        when = formation.resizes_at(current.world, current.resizable_since, ready, self.size)
        if when is None:
            return
        if self._now() < when:
            self._alarm.set(when)
            return
        world = min(self.size.nodes, current.world + ready)
        current.restart_with(world, self._members.ready()[0] if world > current.world else None)

    def _check_hang(self, current: Round) -> None:
        due = self.watch.due()
        if due is None or not current.can_hang:
            return
        since = self.watch.since
        if self._now() < due:
            self._alarm.set(due)
        elif self.watch.hang_after is not None and not self._counts_steps():
            if since is not None and self._looked_at != since:
                self._looked_at = since
                current.look(partial(self._on_look_without_steps, since))
        elif self.watch.hang_after is not None:
            current.hang(self._without_step())
        elif since is not None and self._looked_at != since:
            self._looked_at = since
            current.look(partial(self._on_look, since))

    def _check_standstill(self, current: Round) -> None:
        """If a check is due, ask all ranks what they are doing. If the checks prove a hang, end the
        round.
        """
        due, since = self.watch.looks_at(), self.watch.since
        if due is None or since is None or not current.can_hang or current.looks_closely:
            return
        if self._now() < due:
            self._alarm.set(due)
        else:
            record = self.watch.suspect().ask(self._now())
            current.look_closely(record, partial(self._on_close_look, since))

    def _on_close_look(self, since: float, look: Look | None) -> None:
        current = self.current
        if self.watch.since == since and current is not None and current.can_hang:
            suspicion = self.watch.suspect()
            suspicion.add(self._now(), look)
            standstill, may_end = suspicion.standstill, self.watch.may_end(self._now())
            if self.watch.hangs is Hangs.END and may_end and standstill.is_proved(self._now()):
                current.hung(self._without_step(), standstill.stacks())
            elif standstill.looks and self.overdue is None and (may_end or standstill.has_waiting_rank):
                self._report_overdue(since, standstill.stacks())
            elif not standstill.looks and not self._is_overdue():
                self._withdraw_overdue()
        self.advance()

    def _is_overdue(self) -> bool:
        due = self.watch.due()
        return due is not None and self._now() >= due

    def _withdraw_overdue(self) -> None:
        if self.overdue is not None:
            self.overdue = None
            self._loop.changed()

    def _without_step(self) -> str:
        said = f" (the script reports: {self.watch.activity})" if self.watch.activity else ""
        return f"no step for {self._now() - (self.watch.since or 0.0):.0f} s{said}"

    def _counts_steps(self) -> bool:
        """Whether a lack of reported steps means that the job completes no steps.

        This is true once steps have been counted, and false once the step counter has reported that
        it can no longer count them.
        """
        return self.watch.steps_known and not self._progress.values.get(UNCOUNTABLE)

    def _on_look_without_steps(self, since: float, dump: HangDump) -> None:
        """Decide whether a round whose steps are not counted is hung.

        `dump` holds the stacks of all ranks. If all ranks are idle, the round is hung. If a rank is
        working, the time limit for hangs starts again. The same applies if the ranks' activity is
        unknown, as after the first check.
        """
        current = self.current
        if self.watch.since != since or current is None or current.broken or self.watch.hang_after is None:
            return
        if dump.idle:
            current.hung(self._without_step(), dump.stacks)
            return
        if dump.idle is False:
            self._progress.values[UNCOUNTABLE] = True
        self.watch.look_again(self._now())
        self._loop.changed()
        self.advance()

    def _on_look(self, since: float, dump: HangDump) -> None:
        if self.watch.since == since and self.overdue is None:
            self._report_overdue(since, dump.stacks)

    def _report_overdue(self, since: float, stacks: Stacks) -> None:
        where, traceback = stacks.describe()
        self.overdue = Overdue(time_of(since), where, traceback, self.watch.activity)
        self._loop.log(f"the next step is overdue: {where}")
        self._loop.changed()

    def _end_watch(self) -> None:
        self.watch.end()
        self.overdue = None

    # ---- what members report

    def ready(self, member: Member, after: int, host: str, port: int, check: int = 0, watch: int = 0) -> None:
        """Record that the member has no workers and can take part in a round.

        `after` is the number of the last round that the member knows of. `check` is the maximum
        number of seconds that the next round may spend on checking links. `watch` is the port
        through which the member's neighbours watch its host.
        """
        if member.state in (MemberState.LEAVING, MemberState.LOST):
            return
        if member.has_workers and member.round is not None and member.round > after:
            # The member sent this `ready` before it received `go`, so the line is outdated.
            return
        self.last_number = max(self.last_number, after)
        current = self.current
        left = current is not None and current.holds(member) and not current.broken
        member.become_ready(host, port, self._now(), check, watch)
        if left and current is not None and not self.over:
            current.come_apart(member)
        self._loop.changed()
        self.advance()

    def joined(self, member: Member, number: int) -> None:
        """Record that the member has started its workers for round `number`."""
        current = self.current
        if current is None or number != current.number or not current.holds(member) or current.broken or self.over:
            return
        current.join(member)
        if not self.held:
            self._run(current)
        self._loop.changed()
        self.advance()

    def _run(self, current: Round) -> None:
        if current.run():
            self._state.become(CoordinatorState.RUNNING)
            self.watch.begin(self._now())
            self.downtime.round_runs(self._now())

    def finished(self, member: Member, number: int) -> None:
        """Record that all workers of the member have ended with exit code 0.

        If the round has broken in the meantime, ask the member to report `ready` instead, because
        its workers have to run again.
        """
        current = self.current
        if self.over:
            return
        if current is None or number != current.number or current.broken or not current.holds(member):
            if member.has_workers and member.drain_by is None:
                self.drain(member, f"round {number} lost a node before all of its nodes had finished")
            return
        current.finish(member)
        if current.state is RoundState.SUCCEEDED:
            self.record("end", ok=True, why="every node has finished")
            self.end(CoordinatorState.SUCCEEDED)
            for other in self._members:
                other.send(ToMember.DONE, {})
        self._loop.changed()

    def failed(self, member: Member, number: int | None, failure: WorkerFailure) -> None:
        """Record that a worker of the member has exited on its own, with or without an error."""
        current = self.current
        if current is None or number != current.number or current.judged or self.over:
            return
        current.fail(member, failure)
        self._loop.changed()

    def leaving(self, member: Member, why: str) -> None:
        """Record that the member was asked to leave the group, for example because its pod is being
        deleted.
        """
        if member.state == MemberState.LOST:
            return
        if self.current is not None and self.current.holds(member) and not self.over:
            self.current.leave(member, why)
        member.leave()
        self._loop.changed()
        self.advance()

    def stacks(self, member: Member, number: int, rank: int, text: str, idle: bool | None) -> None:
        """Add the stacks of one rank, which were requested because the round may be hung."""
        if self.current is not None and number == self.current.number:
            self.current.stacks(member, rank, text, idle)

    def looked(self, member: Member, number: int, ranks: list[RankLook]) -> None:
        """Add a member's report on what its ranks have done since the last check."""
        if self.current is not None and number == self.current.number:
            self.current.looked(member, ranks)

    # ---- ends

    def drain(self, member: Member, why: str, planned: bool = False) -> None:
        """Ask a member to stop its workers and to report `ready`. A member that does not report
        `ready` in time is fenced.
        """
        self._drains.ask(member, why, planned)

    def _fence_late(self, late: list[Member]) -> None:
        if not self.over:
            self.fence(late, "it did not stop its workers in time")

    def fence(self, late: list[Member], why: str) -> None:
        """Fence these late members, whose workers may still be alive, and continue without them."""
        for member in late:
            self._members.dismiss(member.pod, why)
            self._loop.log(f"fencing {member.pod}: {why}")
            member.dismiss(f"the group continues without this node: {why}")
        # This needs a second loop, because no round may form until all of these members have been
        # dismissed.
        for member in late:
            self.lose(member, why)
        self.advance()

    def lose(self, member: Member, why: str) -> None:
        """Remove a member that has disappeared without notice, and list it as missing.

        Once all lost members have been removed, the caller must call `advance`.
        """
        if not self.over:
            self._members.miss(member, why)
        self.remove(member, why)

    def remove(self, member: Member, why: str) -> None:
        """Remove a member that is gone. If the member belonged to the current round, the round
        breaks.

        Once all members that are gone have been removed, the caller must call `advance`.
        """
        current, was = self.current, member.state
        held = current is not None and current.holds(member)
        self._members.remove(member)
        if current is not None and held and not self.over:
            current.lose(member, was, why)

    def end(self, state: CoordinatorState) -> None:
        """End the sequence of rounds in the final state `state`. No more rounds begin."""
        self._state.become(state)
        self._end_watch()
        self._loop.changed()

    def on_break(self, broken: Round) -> None:
        """Prepare for a restart, because the round `broken` can no longer succeed."""
        self._state.become(CoordinatorState.RESTARTING)
        self._progress.forget_ranks()
        self.downtime.begin(self._now())
        self._end_watch()
        self._loop.changed()

    def on_verdict(self, judged: Round, verdict: Verdict, own: bool, ran: float) -> None:
        """Record the first cause of a round's break.

        `own` indicates whether the cause is a failure of the job itself. Such a failure delays the
        next round. `ran` is the number of seconds that the round ran.
        """
        wait = self.backoff.fail(self._now(), ran) if own else 0.0
        pod, message = verdict.details.get("pod") or "no pod", verdict.details["message"]
        text = f"round {judged.number} was broken by {verdict.kind}: {pod} ({message[:300]})"
        self._loop.log(f"{text}, {verdict.consequences} consequences" + (f"; waits {wait:g} s" if wait else ""))
        self.incidents.add(verdict.kind, verdict.time, verdict.details, verdict.consequences, wait)
        self._loop.changed()

    # ---- takeover from an earlier coordinator, changes by the operator, progress

    def hold(self) -> None:
        """Neither begin nor judge a round until `release` is called.

        This is necessary while an earlier coordinator's round may still be running.
        """
        self.held = True

    def release(self) -> None:
        """Allow rounds to begin and to be judged again.

        If all members of a round that was taken over have reconnected, the round now runs. If some
        have not reconnected, the round breaks.
        """
        self.held = False
        if self.current is not None and not self.over:
            if not self.current.complete:
                self.current.give_up_absent()
            elif not self.current.broken:
                self._run(self.current)
        self.advance()

    def take_over(self, number: int, world: int) -> None:
        """Take over round `number` from an earlier coordinator. Called when the first member of
        that round reconnects.
        """
        if self.current is not None:
            self.current.supersede()
            self._state.become(CoordinatorState.FORMING)
            self._progress.forget_ranks()
            self.downtime.forget()
            self._end_watch()
        self.current = Round(number, world, {}, self, self._loop)
        self.last_number = max(self.last_number, number)
        for other in self._members:
            if other.has_workers and other.round is not None and other.round < number:
                self.drain(other, f"round {number} started without this node")

    def resize(self, size: Size) -> bool:
        """Set the desired and the minimum number of nodes. Return whether these numbers have
        changed.
        """
        changed, self.size = size != self.size, size
        return changed

    def reorder(self, order: RankOrder) -> bool:
        """Set the order of the ranks, which applies from the next round on. Return whether it
        differs from the previous order.
        """
        changed, self.order = order != self.order, order
        return changed

    def progress(self, alive: bool, activity: str, step: bool) -> None:
        """Process a progress report.

        `alive` indicates whether the report shows that the job is alive. `activity` is the script's
        activity between steps. `step` indicates whether the report contains figures about a step.
        """
        if step:
            self.downtime.step(self._now(), self.state == CoordinatorState.RUNNING)
        if alive:
            # The time since the last step was spent on the previous activity, so count that time
            # before `activity` is set.
            self.watch.step(self._now())
        self.watch.note(activity)
        if alive:
            self._withdraw_overdue()
            self.advance()
