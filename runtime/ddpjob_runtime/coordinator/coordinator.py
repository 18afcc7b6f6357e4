"""The coordinator's decisions: how messages from members, operator and script change the report.

`Coordinator` only dispatches events and assembles the report. Other modules make the decisions:

- `round_sequence`, `formation` and `round`: when a round begins, breaks and ends;
- `evidence` and `first_cause`: which event broke a round;
- `hang` and `standstill`: whether a group that completes no steps is hung;
- `takeover`: how a new coordinator takes over the round of the previous one;
- `witnesses`: whether an unreachable host is declared lost early.

After each event, `_advance` does whatever is due. For example, when a member reports `failure`, the
method `failure` breaks the round. `_advance` then forms the next round as soon as no member has
workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpjob_runtime.coordinator.first_cause import WorkerFailure
from ddpjob_runtime.coordinator.formation import RankOrder, Size
from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member, Members, Send
from ddpjob_runtime.coordinator.progress import ACTIVITY, MergedProgress, is_of_copies
from ddpjob_runtime.coordinator.round_sequence import Rounds
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.coordinator.takeover import Resume, Takeover
from ddpjob_runtime.coordinator.witnesses import Witnesses
from ddpjob_runtime.protocol import (
    AT_RISK,
    ENVIRONMENT,
    MAX_NOTES,
    MAX_PODS,
    MAX_SECONDS,
    ROUND,
    SNAPSHOT_BYTES,
    START,
    STRAGGLERS,
    CoordinatorState,
    Hangs,
    MemberState,
    Note,
    RankLook,
    Recovery,
    Report,
    ToMember,
    clip,
    order_mark,
    progress_news,
    time_of,
)

_NO_STEP = frozenset({ACTIVITY, STRAGGLERS, ROUND, START, ENVIRONMENT, AT_RISK, SNAPSHOT_BYTES})
"""A progress report with only these keys does not show that the current round has completed a step.
"""


class Coordinator:
    """Makes all decisions about the group. It opens no sockets, and its clock is passed in.

    `clock()` returns Unix seconds and never goes back. `later(seconds, function)` calls `function`
    after `seconds`. `changed()` is called after every change to the report, and `log(text)` is
    called once for each event. `acknowledges(member)` returns whether the kernel of the member's
    host has acknowledged all data that was sent to it.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Any],
        changed: Callable[[], None],
        log: Callable[[str], None] = lambda text: None,
        acknowledges: Callable[[Member], bool] = lambda member: True,
    ) -> None:
        self.settings = settings
        self._now, self._notify = clock, changed
        loop = Loop(clock, later, self._bump, log)
        self.members = Members(loop)
        self._progress = MergedProgress()
        self.rounds = Rounds(settings, self.members, loop, self._progress)
        self._takeover = Takeover(self.rounds, self.members, loop, settings.attempt)
        self._witnesses = Witnesses(self.rounds, self.members, loop, acknowledges)
        self._notes: dict[tuple[str, str], str] = {}  # (pod, kind of note) -> text of the note
        self._stop: dict[str, Any] | None = None
        self.news = 0
        """The version of the report. It increases with every change, except for most changes to the
        progress.
        """
        self.exit_why: str | None = None
        """Why this coordinator exits; None until it decides to exit."""

    def _bump(self, news: bool = True) -> None:
        self.news += news
        self._notify()

    def _advance(self) -> None:
        self._takeover.check()
        self.rounds.advance()

    # ---- members come and go

    def hello(
        self, pod: str, index: int, attempt: int, pid: int, send: Send, grace: float = 30.0, resume: Any = None
    ) -> Member | None:
        """Admit a launcher and return its member. Return None if the launcher is refused.

        Raises:
            ValueError: `resume` is malformed; the message names the field.
        """
        resumed = Resume.read(resume)
        refusal = self._refusal(pod, index, attempt)
        if refusal is not None:
            send(*refusal)
            return None
        self._takeover.arrive()
        self.members.heard_of(index)
        old = self.members.by_index.get(index)
        if old is not None and (old.pod, old.attempt, old.pid) == (pod, attempt, pid) and _same_workers(old, resumed):
            self._reconnect(old, send, resumed)
            return old
        if old is not None:
            self._replace(old, pod)
        member = Member(pod, index, attempt, pid, send, grace, self._now())
        self.members.admit(member)
        send(ToMember.WELCOME, {"generation": self.settings.generation})
        if resumed is not None:
            self._takeover.resume(member, resumed)
        # A new member makes nothing due, so `_advance` is skipped. When a thousand members started,
        # calling it at every hello took a quarter of the CPU time.
        if old is not None or resumed is not None:
            self._advance()
        return member

    def _refusal(self, pod: str, index: int, attempt: int) -> tuple[str, dict[str, Any]] | None:
        if self.rounds.state == CoordinatorState.SUCCEEDED:
            return ToMember.DONE, {}
        if self._stop is not None:
            return ToMember.STOP, self._stop
        # Respond with an error instead of `stop`. After an error, the member keeps its workers and
        # looks for the next coordinator.
        if self.rounds.over:
            return ToMember.ERROR, {"why": f"this coordinator has stopped: {self.exit_why}"}
        why = self.members.why_refused(pod, index, attempt)
        return None if why is None else (ToMember.STOP, {"ok": False, "why": why, "fenced": True})

    def _reconnect(self, old: Member, send: Send, resumed: Resume | None) -> None:
        """Continue with the same launcher process over a new connection.

        Lines that were sent over the old connection may have been lost, so this method repeats
        their effects.
        """
        old.reconnect(send, self._now())
        send(ToMember.WELCOME, {"generation": self.settings.generation})
        if old.has_workers and resumed is not None:
            self.rounds.joined(old, resumed.round)
            if resumed.state == MemberState.FINISHED:
                self.rounds.finished(old, resumed.round)
            if old.drain_by is not None:
                self.rounds.drain(old, "the round is over", old.drain_planned)
        self._bump()
        self._advance()

    def _replace(self, old: Member, pod: str) -> None:
        if old.pod == pod:
            self.rounds.remove(old, "it reconnected without its workers")
            return
        why = f"pod {pod} has replaced this pod"
        self.members.dismiss(old.pod, why)
        old.dismiss(why)
        self.rounds.remove(old, f"replaced by {pod}")

    def lost(self, member: Member, why: str) -> None:
        """Handle the loss of a member that has disconnected or has been silent for too long."""
        self.rounds.lose(member, why)
        self._advance()

    def gone(self, pod: str, why: str) -> None:
        """Remove a pod that the operator reports as gone, even if the pod's connection is still
        open.
        """
        self.members.dismiss(pod, why)
        self.members.forget_missing(pod)
        self._notes = {key: text for key, text in self._notes.items() if key[0] != pod}
        for member in self.members:
            if member.pod == pod:
                member.dismiss(why)
                self.rounds.remove(member, why)
        self._takeover.gone(pod)
        self._bump()
        self._advance()

    def send_away(self, pod: str, why: str) -> None:
        """Remove a pod that is being deleted, and refuse it from now on.

        If the pod's workers may be saving, do nothing. A launcher that is starting or ready has
        nothing to save. It might not have noticed that its pod is being deleted.
        """
        members = (member for member in self.members if member.pod == pod)
        if all(member.state in (MemberState.STARTING, MemberState.READY) for member in members):
            self.gone(pod, why)

    # ---- what members report

    def ready(self, member: Member, after: int, host: str, port: int, check: int = 0, watch: int = 0) -> None:
        """Record that the member can take part in a round.

        `after` is the number of the last round that the member knows of. `check` is the maximum
        number of seconds that the next round may spend on checking links. `watch` is the port
        through which the member's neighbours watch its host.
        """
        self.rounds.ready(member, after, host, port, check, watch)
        self._advance()

    def joined(self, member: Member, number: int) -> None:
        """Record that the member has started its workers for round `number`."""
        self.rounds.joined(member, number)
        self._advance()

    def finished(self, member: Member, number: int) -> None:
        """Record that all workers of the member have ended with exit code 0."""
        self.rounds.finished(member, number)

    def failure(self, member: Member, number: int | None, failure: WorkerFailure) -> None:
        """Record that a worker of the member has exited on its own, with or without an error."""
        self.rounds.failed(member, number, failure)
        self._advance()

    def leaving(self, member: Member, why: str) -> None:
        """Record that the member was asked to leave the group."""
        self.rounds.leaving(member, why)
        self._advance()

    def neighbour(self, member: Member, number: int, rank: int, silent: bool) -> None:
        """Record a member's report that a neighbour has fallen silent or can be heard again.

        Raises:
            ValueError: `rank` is not a neighbour of the member.
        """
        self._witnesses.report(member, number, rank, silent)

    def stacks(self, member: Member, number: int, rank: int, text: str, idle: bool | None = True) -> None:
        """Add the stacks of one rank, which were requested because the group may be hung.

        `idle` indicates whether the rank has been idle since the last check; None means unknown.
        """
        self.rounds.stacks(member, number, rank, text, idle)

    def looked(self, member: Member, number: int, ranks: list[RankLook]) -> None:
        """Add a member's report on what its ranks have done since the last check."""
        self.rounds.looked(member, number, ranks)

    def note(self, member: Member, kind: str, why: str) -> None:
        """Set the note of this kind about the member's pod, for the operator to read.

        An empty `why` removes the note.
        """
        self._notes.pop((member.pod, kind), None)
        if why:
            self._notes[member.pod, kind] = why
        self._bump()

    def init_failure(self, member: Member, message: str) -> None:
        """Record that the member's entry point cannot start."""
        self.rounds.incidents.add_init_failure(self._now(), member.pod, member.index, message)
        self._bump()

    # ---- what the operator and the training script want

    def resize(self, nodes: int, min_nodes: int) -> None:
        """Change the desired and the minimum number of nodes.

        Raises:
            ValueError: the message names the field and states the rule.
        """
        if not 1 <= nodes <= MAX_PODS:
            raise ValueError(f"nodes: must be from 1 to {MAX_PODS}, not {nodes!r:.80}")
        if not 1 <= min_nodes <= nodes:
            raise ValueError(f"minNodes: must be from 1 to nodes ({nodes}), not {min_nodes!r:.80}")
        if self.rounds.resize(Size(nodes, min_nodes)):
            self._bump()
            self._advance()

    def set_patience(
        self, hang_after: float | None, initial: float, maximum: float, hangs: Hangs | None = None
    ) -> None:
        """Set the time limit for hangs, the back-off, and what to do about a proven hang (`hangs`).

        If `hangs` is None, keep the current setting for proven hangs.

        Raises:
            ValueError: the message names the field and states the rule.
        """
        if hang_after is not None and not 0 < hang_after <= MAX_SECONDS:
            raise ValueError(
                f"hangAfter: must be above 0 and at most {MAX_SECONDS} seconds, or null, not {hang_after!r:.80}"
            )
        if not 0 < initial <= maximum <= MAX_SECONDS:
            raise ValueError(
                "backoff: must be [INITIAL, MAXIMUM] in seconds, 0 < INITIAL <= MAXIMUM <= "
                f"{MAX_SECONDS}, not {[initial, maximum]!r:.80}"
            )
        self.rounds.watch.configure(hang_after, hangs or self.rounds.watch.hangs)
        self.rounds.backoff.configure(initial, maximum)
        self._bump()
        self._advance()

    def stood_still(self, seconds: float) -> None:
        """Extend the time limit for hangs, because this process was suspended for `seconds`.

        Other processes of the job may have been suspended at the same time.
        """
        self.rounds.watch.forgive(seconds)

    def set_order(self, pods: list[str]) -> None:
        """Assign ranks to pods in the order of this list, starting with the next round.

        If the list is empty, ranks follow the indices.

        Raises:
            ValueError: the message names the field and states the rule.
        """
        if len(pods) > MAX_PODS:
            raise ValueError(f"pods: must have at most {MAX_PODS} entries, not {len(pods)}")
        places = {pod: place for place, pod in enumerate(pods)}
        if len(places) < len(pods):
            twice = next(pod for place, pod in enumerate(pods) if places[pod] != place)
            raise ValueError(f"pods: {twice!r:.80} is listed twice")
        if self.rounds.reorder(RankOrder(bool(places), places)):
            self._bump()
            self._advance()

    def stop(self, ok: bool, why: str) -> None:
        """Make every member stop its workers, and begin no more rounds."""
        if self.rounds.over:
            return
        self._stop = {"ok": ok, "why": why}
        self.rounds.record("end", ok=ok, why=clip(why, 500))
        self.rounds.end(CoordinatorState.STOPPED)
        for member in self.members:
            member.send(ToMember.STOP, self._stop)

    def exit(self, why: str) -> None:
        """Let this process exit, for example because the job has ended and nobody will request the
        report again.
        """
        self.exit_why = why
        self._notify()

    def replaced(self, generation: int, attempt: int) -> None:
        """Exit if a later coordinator has taken over the job's name.

        Called when a member has found another coordinator under that name. Once this coordinator
        has exited, all members look up the name again and find the later one. Until then, this
        coordinator does not judge any round.
        """
        if (generation, attempt) <= (self.settings.generation, self.settings.attempt):
            return
        if not self.rounds.over:
            self.rounds.end(CoordinatorState.STOPPED)
        self.exit(f"a later coordinator (generation {generation}, attempt {attempt}) has taken over")

    def report_progress(self, report: dict[str, Any]) -> None:
        """Merge a progress report whose format has been checked. The first step after a restart
        ends the downtime.

        Ignore a report that names a different round than the current one, because it comes from a
        fenced rank.
        """
        current = self.rounds.current
        if current is not None and report.get(ROUND, now := f"{self.settings.generation}.{current.number}") != now:
            return
        down, before = self.rounds.downtime.since, progress_news(self._progress.values)
        alive = self._progress.shows_life(report)
        merged = self._progress.merge(report, self._now())
        step = bool(report.keys() - _NO_STEP) and not is_of_copies(report)
        self.rounds.progress(alive, self._progress.activity, step)
        if merged:
            if self._progress.position is not None:
                self.rounds.backoff.step(self._progress.position)
            news = progress_news(self._progress.values)
            start = self._progress.values.get(START)
            if start and any(name.startswith(START) for name in news - before):
                self.rounds.record_start(start)
            self._bump(news=news != before or self.rounds.downtime.since != down)

    def report(self) -> Report:
        """Return the response to `GET /status`."""
        rounds, settings = self.rounds, self.settings
        until, down = rounds.backoff.until, rounds.downtime.since
        return Report(
            generation=settings.generation,
            state=rounds.state,
            nodes=rounds.size.nodes,
            min_nodes=rounds.size.min_nodes,
            backoff=(rounds.backoff.initial, rounds.backoff.maximum),
            now=time_of(self._now()),
            news=self.news,
            mode=settings.mode,
            attempt=settings.attempt,
            hang_after=rounds.watch.hang_after,
            hangs=rounds.watch.hangs,
            overdue=rounds.overdue if rounds.watch.hang_after is None else None,
            world=rounds.current.world if rounds.current is not None and not rounds.current.broken else None,
            round=rounds.last_number,
            members=self.members.report(),
            lost=self.members.lost(),
            incidents=rounds.incidents.recent,
            backoff_until=time_of(until) if until is not None and until > self._now() else None,
            notes=tuple(Note(pod, kind, why) for (pod, kind), why in sorted(self._notes.items())[:MAX_NOTES]),
            progress=self._progress.report(),
            recovery=Recovery(rounds.downtime.last_seconds, None if down is None else time_of(down)),
            order=order_mark(rounds.order.places),
        )


def _same_workers(old: Member, resumed: Resume | None) -> bool:
    """Whether this coordinator and the reconnecting launcher agree on the round of its workers.

    If they disagree, a line was lost with the old connection.
    """
    if old.state == MemberState.LEAVING:
        # The member is leaving in any case, and the round breaks once the member is gone.
        return True
    if not old.has_workers:
        return resumed is None or not resumed.has_workers
    # If the member's workers have ended since the connection was lost, the member will report the
    # workers' failures and `ready` again. The member is not lost in that case, and other members
    # may still be saving.
    return resumed is not None and resumed.round == old.round
