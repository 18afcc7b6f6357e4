"""Decides when to check a job that completes no steps, when to report it, and when to stop it.

If one rank stops, all others wait for it in a collective, and nothing fails: the job holds its GPUs
but does nothing. From outside, that looks like a long evaluation or a slow checkpoint. Time alone
therefore only raises a suspicion, and the ranks' activity decides:

- **Suspicion.** `UsualGaps` learns the usual length of the gaps between reports, separately for
  each activity: the start of a round, training, and whatever the script reports, such as
  evaluating. The coordinator checks the ranks if no report arrives for FACTOR times the 99th
  percentile of these gaps, and for at least LEAST_SECONDS. Until LEAST_GAPS gaps are known, this
  minimum is higher, especially at the start of a round (UNKNOWN). If a round has reported nothing
  after EARLY_LOOK seconds, the checks begin early. Until the minimum has passed, checks cannot end
  the round. They only report ranks that wait for other ranks, for example because of a wrong
  MASTER_ADDR.
- **Proof.** If two more checks, LOOK_EVERY seconds apart, show a standstill (`standstill`), the
  round ends as a hang, unless recovery.hangs is Report. From the first of these two checks on, the
  coordinator's report shows the step as overdue. If a check shows that a rank has moved, the pause
  before the next check grows.
- **hangAfterSeconds** ends the round after that many seconds without a step, even if no hang was
  proved. If the script's steps are not counted, silence proves nothing. In that case, the ranks'
  stacks are compared, and the round ends only if all ranks have been idle for hangAfterSeconds.
- A group that is active but completes no steps is reported as overdue after max(300 s, 20 times the
  longest gap). Without hangAfterSeconds, its round is never ended.

Example, with steps of 0.5 s: rank 1 deadlocks in its data loader. The first check comes after 15 s,
the step is reported as overdue at 20 s, and the round ends at 25 s: "no step for 25 s: rank 1 in
wait (FILE:LINE) (the other ranks are waiting for it); rank 0 in ...". An evaluation of 60 s gets
four checks. Each shows CPU time or transferred bytes, so nothing is reported.

A hang is a first cause like any other (docs/decisions/0010). See docs/decisions/0024 for why hung
rounds are stopped automatically.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.standstill import Look, Stacks, Standstill
from ddpjob_runtime.protocol import Hangs, ToMember

FACTOR, PERCENTILE = 10.0, 0.99
LEAST_SECONDS = 15.0
LEAST_GAPS, KEPT_GAPS, MOST_ACTIVITIES = 20, 1000, 20
START, TRAINING = "start of a round", ""
UNKNOWN = {START: 600.0, TRAINING: 60.0}
UNKNOWN_ACTIVITY = 120.0
"""Minimum number of seconds without a report before the ranks are checked, as long as too few gaps
are known for the script's activity.
"""
LEAST_AT_START = 60.0
"""Minimum number of seconds without a report before the ranks are checked at the start of a round.
This minimum applies once an earlier round has completed a step.
"""
EARLY_LOOK = 45.0
"""Number of seconds from the start of a round to its first check. This check can report a problem,
but cannot end the round. Without this check, ranks that cannot form their group would be noticed
only after torch's own timeout, which takes minutes.
"""
LOOK_EVERY, MOST_BETWEEN_LOOKS = 5.0, 30.0

OVERDUE_SECONDS = 300.0
PACE_FACTOR = 20.0
LEAST_REPORTS = 20
DUMP_SECONDS = 3.0
"""Maximum number of seconds to wait for the stacks of all ranks."""
LAST_STACKS_SECONDS = 0.3
"""Once the stacks of a member's first rank have arrived, those of its other ranks follow within
this many seconds.
"""


class UsualGaps:
    """Learns the usual length of the gaps between reports, separately for each activity."""

    def __init__(self) -> None:
        self._gaps: dict[str, deque[float]] = {}
        self._limits: dict[str, float] = {}

    def add(self, activity: str, gap: float) -> None:
        """Learn the length of one gap in this activity.

        Once MOST_ACTIVITIES activities are known, the gaps of any other activity are ignored.
        """
        if activity in self._gaps or len(self._gaps) < MOST_ACTIVITIES:
            self._gaps.setdefault(activity, deque(maxlen=KEPT_GAPS)).append(gap)
            self._limits.pop(activity, None)

    def limit(self, activity: str) -> float:
        """Return the number of seconds without a report after which the ranks are checked."""
        if activity not in self._limits:
            self._limits[activity] = self._compute(activity)
        return self._limits[activity]

    def _compute(self, activity: str) -> float:
        gaps = sorted(self._gaps.get(activity, ()))
        usual = FACTOR * gaps[max(0, round(PERCENTILE * len(gaps)) - 1)] if gaps else 0.0
        if activity == START and gaps:
            return max(LEAST_AT_START, FACTOR * gaps[-1])
        if len(gaps) < LEAST_GAPS:
            return max(UNKNOWN.get(activity, UNKNOWN_ACTIVITY), FACTOR * gaps[-1] if gaps else 0.0)
        return max(LEAST_SECONDS, usual)


class HangWatch:
    """Tracks when the next step is overdue, and when to check the ranks.

    `hang_after` is the number of seconds without a step after which the round ends as a hang; None
    means no limit. The time to a round's first report is tracked separately, because loading data
    may take longer than any step.
    """

    def __init__(self, hang_after: float | None, hangs: Hangs) -> None:
        self.hang_after, self.hangs = hang_after, hangs
        self._usual = UsualGaps()
        self._reports, self._longest_gap, self._longest_start = 0, 0.0, 0.0
        self.since: float | None = None
        """Time of the last step. Until the round completes a step, this is the time at which the
        round began to run. None between rounds.
        """
        self.activity = TRAINING
        """The activity that the script reports between steps, such as evaluating."""
        self._in_round = 0
        self._suspicion: Suspicion | None = None

    def configure(self, hang_after: float | None, hangs: Hangs) -> None:
        """Set the time limit for hangs, and whether hung rounds are ended."""
        self.hang_after, self.hangs = hang_after, hangs

    def begin(self, now: float) -> None:
        """Start measuring the time without steps, because a round begins to run."""
        self.since, self._in_round, self.activity, self._suspicion = now, 0, TRAINING, None

    def end(self) -> None:
        """Stop measuring, because no round runs."""
        self.since = self._suspicion = None

    def step(self, now: float) -> None:
        """Record that the job has completed a step or has otherwise shown that it is alive."""
        if self.since is None:
            return
        gap = now - self.since
        if self._in_round:
            self._longest_gap = max(self._longest_gap, gap)
        else:
            self._longest_start = max(self._longest_start, gap)
        self._usual.add(self._phase, gap)
        self._reports += 1
        self._in_round += 1
        self.since, self._suspicion = now, None

    @property
    def _phase(self) -> str:
        return self.activity if self._in_round else START

    @property
    def steps_known(self) -> bool:
        """Whether the job has ever reported a step or another activity."""
        return self._reports > 0

    def look_again(self, now: float) -> None:
        """Restart the time limit without counting a step, because the ranks may be working."""
        if self.since is not None:
            self.since = now

    def forgive(self, seconds: float) -> None:
        """Subtract `seconds` from the time since the last step, and forget all checks since that
        step.
        """
        if self.since is not None:
            self.since += seconds
            self._suspicion = None

    def note(self, activity: str) -> None:
        """Record the activity that the script reports; empty if it reports none."""
        self.activity = activity

    @property
    def limit(self) -> float | None:
        """Number of seconds after which the next step is overdue; None while the job's usual pace
        is unknown.
        """
        if self.hang_after is not None:
            return self.hang_after
        if self._reports < LEAST_REPORTS:
            return None
        pace = self._longest_gap if self._in_round else max(self._longest_gap, self._longest_start)
        return max(OVERDUE_SECONDS, PACE_FACTOR * pace)

    def due(self) -> float | None:
        """Return the time at which the next step becomes overdue; None if that is unknown."""
        return None if self.since is None or self.limit is None else self.since + self.limit

    def looks_at(self) -> float | None:
        """Return the time of the next check of the ranks; None while no round runs."""
        if self.since is None:
            return None
        if self._suspicion is not None:
            return self._suspicion.next_at
        limit = self._usual.limit(self._phase)
        return self.since + (limit if self._in_round else min(limit, EARLY_LOOK))

    def may_end(self, now: float) -> bool:
        """Whether no report has arrived for so long that a proven hang may end the round."""
        return self.since is not None and now >= self.since + self._usual.limit(self._phase)

    def suspect(self) -> Suspicion:
        """Return the results of the checks since the last step. Before the first check, these are
        empty.
        """
        if self._suspicion is None:
            self._suspicion = Suspicion()
        return self._suspicion


class Suspicion:
    """The results of the checks since the last step, and the time of the next check."""

    def __init__(self) -> None:
        self.standstill = Standstill()
        self.next_at = self._asked = 0.0
        self._pause = LOOK_EVERY

    def ask(self, now: float) -> bool:
        """Begin a check, and return whether it could prove a hang.

        If it could, members should keep the stacks from this check in their logs.
        """
        self._asked = now
        return self.standstill.looks == 1

    def add(self, now: float, look: Look | None) -> None:
        """Add the result of a check; None means that a member did not respond.

        If ranks have moved, or if that is unknown, the pause before the next check grows.
        """
        if look is None:
            self.standstill = Standstill()
        moved = look is None or not self.standstill.add(now, look)
        self._pause = min(2 * self._pause, MOST_BETWEEN_LOOKS) if moved else LOOK_EVERY
        self.next_at = max(now, self._asked + self._pause)


class HangDump:
    """Collects the stacks of all ranks in a round that completes no steps.

    `done` is called when all stacks have arrived, or after DUMP_SECONDS.
    """

    def __init__(self, loop: Loop, done: Callable[[], None], stacks: Stacks | None = None) -> None:
        self._loop, self._done = loop, done
        self.stacks = Stacks({}, {}) if stacks is None else stacks
        self._idle: dict[int, bool | None] = {}  # rank -> whether it has been idle; None if that is unknown
        self._asked: set[int] = set()  # indices of the members that were asked
        self._answered: set[int] = set()  # indices of the members that have responded

    def request(self, number: int, members: list[Member]) -> None:
        """Ask these members of round `number` for the stacks of their ranks."""
        self._asked = {member.index for member in members}
        for member in members:
            member.send(ToMember.DUMP, {"round": number})
        self._loop.later(DUMP_SECONDS, self._done)

    def add(
        self, member: Member, rank: int, text: str, idle: bool | None, expected: Callable[[], list[Member]]
    ) -> None:
        """Add the stacks of one rank.

        `expected` returns the members that were asked and are still connected.
        """
        self.stacks.texts[rank], self._idle[rank] = text, idle
        self.stacks.members[rank] = member
        if member.index in self._answered:
            return
        self._answered.add(member.index)
        if all(m.index in self._answered for m in expected()):
            self._loop.later(LAST_STACKS_SECONDS, self._done)

    @property
    def idle(self) -> bool | None:
        """Whether all ranks have been idle since they were last asked.

        The result is None if that is unknown, for example because a member has not responded.
        """
        states = self._idle.values()
        if any(state is False for state in states):
            return False
        return True if states and all(states) and self._asked <= self._answered else None
