"""Whether the job still makes steps, and what a hang looks like from inside.

If one rank stops, all others wait for it in a collective, and nothing fails: the job holds its GPUs
and does nothing. From outside that looks like a long evaluation or a slow checkpoint. So the
coordinator measures the time since the last step, and what follows depends on what the user said.

- With `hang_after` the user has named a limit: the round ends after it. If nobody counts the
  script's steps, silence proves nothing. The ranks are then asked for their stacks, and the round
  ends only if all of them have stood still since the last look.
- Without it nothing is ended. After LEAST_REPORTS steps the pace is known, and a step that takes
  PACE_FACTOR times the longest gap so far is reported as overdue, with the stacks. The time from a
  round's beginning to its first step is a pace of its own, since loading data may take longer than
  any step.

Example, steps of 2 s and a checkpoint of 30 s now and then, without `hang_after`: the next step is
overdue after max(300, 20 x 30) = 600 s. With hang_after=120 the round ends after 120 s.

A `HangDump` asks every member for the stacks of its ranks and waits DUMP_SECONDS for them. It names
a culprit where it can: the only member with a rank that has failed, or the only one whose ranks
stand elsewhere than all others. In a hang of four nodes of which three stand in `all_reduce` and
one in `read`, that is the fourth. With fewer than LEAST_MEMBERS members nobody can say who waits
for whom.

A hang is a first cause like any other, and counts: docs/decisions/0010.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.protocol import ToMember

LEAST_SECONDS = 300.0
PACE_FACTOR = 20.0
LEAST_REPORTS = 20
NAMED_RANKS = 8
DUMP_SECONDS = 3.0
"""How long a dump waits for the stacks of all ranks."""
LAST_STACKS_SECONDS = 0.3
"""The stacks of one member arrive together within this time."""

LEAST_MEMBERS = 3
"""The stacks of fewer members do not show which one waits for the other."""

FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.M)
FIRST_CALL_FIRST = "(most recent call last)"


class HangWatch:
    """Knows when the next step is overdue.

    `hang_after`: seconds without a step after which the round ends as a hang. None: no round is
    ended, because an evaluation, a checkpoint or an export may take any time; a step far beyond the
    job's own pace is only reported as overdue. The time from a round's beginning to its first
    report has a pace of its own, because loading data may take longer than any step.
    """

    def __init__(self, hang_after: float | None) -> None:
        self.hang_after = hang_after
        self._reports, self._longest_gap, self._longest_start = 0, 0.0, 0.0
        self.since: float | None = None
        """When the last step was made, or the round began to run; None while none runs."""
        self.activity = ""
        """What the script reports that it does between steps, such as evaluating."""
        self._in_round = 0

    def configure(self, hang_after: float | None) -> None:
        """Replace the limit."""
        self.hang_after = hang_after

    def begin(self, now: float) -> None:
        """Begin to measure, because a round runs."""
        self.since, self._in_round = now, 0

    def end(self) -> None:
        """Stop measuring, because no round runs."""
        self.since = None

    def step(self, now: float) -> None:
        """Record that the job has made a step or reported some other activity."""
        if self.since is None:
            return
        gap = now - self.since
        if self._in_round:
            self._longest_gap = max(self._longest_gap, gap)
        else:
            self._longest_start = max(self._longest_start, gap)
        self._reports += 1
        self._in_round += 1
        self.since = now

    @property
    def steps_known(self) -> bool:
        """Whether any step of the job was ever reported."""
        return self._reports > 0

    def look_again(self, now: float) -> None:
        """Begin the limit again without counting a step: the ranks are at work, or may be."""
        if self.since is not None:
            self.since = now

    def forgive(self, seconds: float) -> None:
        """Leave `seconds` of the time since the last step out of account."""
        if self.since is not None:
            self.since += seconds

    def note(self, activity: str) -> None:
        """Record the activity that the script reports; empty if it reports none."""
        self.activity = activity

    @property
    def limit(self) -> float | None:
        """Seconds after which the next step is overdue; None while the pace is unknown."""
        if self.hang_after is not None:
            return self.hang_after
        if self._reports < LEAST_REPORTS:
            return None
        pace = self._longest_gap if self._in_round else max(self._longest_gap, self._longest_start)
        return max(LEAST_SECONDS, PACE_FACTOR * pace)

    def due(self) -> float | None:
        """Return the time at which the next step is overdue; None if that is not known."""
        return None if self.since is None or self.limit is None else self.since + self.limit


class HangDump:
    """Collects the stacks of a round without steps.

    Calls `done` when all are there or time is up.
    """

    def __init__(self, loop: Loop, done: Callable[[], None]) -> None:
        self._loop, self._done = loop, done
        self._stacks: dict[int, str] = {}  # rank -> text
        self._idle: dict[int, bool | None] = {}  # rank -> whether it stands still; None: not known
        self._members: dict[int, Member] = {}  # rank -> member that runs it
        self._answered: set[int] = set()  # the members' indices

    def request(self, number: int, members: list[Member]) -> None:
        """Ask the members of round `number` for the stacks of their ranks."""
        for member in members:
            member.send(ToMember.DUMP, {"round": number})
        self._loop.later(DUMP_SECONDS, self._done)

    def add(
        self, member: Member, rank: int, text: str, idle: bool | None, expected: Callable[[], list[Member]]
    ) -> None:
        """Add the stacks of one rank.

        `expected` returns the members that were asked and are still there.
        """
        self._stacks[rank], self._idle[rank] = text, idle
        self._members[rank] = member
        if member.index in self._answered:
            return
        self._answered.add(member.index)
        if all(m.index in self._answered for m in expected()):
            self._loop.later(LAST_STACKS_SECONDS, self._done)

    def culprit(self) -> Member | None:
        """Return the member that the others wait for; None if the stacks do not show it.

        That is the only member with a failed rank, or the only one whose ranks are in different
        places than all others'. Two members in two places do not show which one waits.
        """
        failed = {m.index: m for r, m in self._members.items() if self._stacks[r].startswith(protocol.RANK_FAILED)}
        if failed:
            return next(iter(failed.values())) if len(failed) == 1 else None
        places: dict[int, set[str]] = {}
        for rank, member in self._members.items():
            places.setdefault(member.index, set()).add(_describe_place(self._stacks[rank]))
        apart = [i for i, own in places.items() if all(own.isdisjoint(p) for j, p in places.items() if j != i)]
        if len(places) < LEAST_MEMBERS or len(apart) != 1:
            return None
        if not set.intersection(*(own for i, own in places.items() if i not in apart)):
            return None
        return next(m for m in self._members.values() if m.index == apart[0])

    @property
    def idle(self) -> bool | None:
        """Whether no rank has moved since they were last asked; None if that is not known."""
        states = self._idle.values()
        if any(state is False for state in states):
            return False
        return True if states and all(states) else None

    def describe(self) -> tuple[str, str]:
        """Return (where each rank is, all stacks within the traceback's limit).

        Ranks that have ended or failed are named first, because the others may be waiting for them.
        """
        over = protocol.RANK_ENDED, protocol.RANK_FAILED
        ranks = sorted(self._stacks, key=lambda rank: (not self._stacks[rank].startswith(over), rank))
        if not ranks:
            return "no rank gave its stack", ""
        named = [f"rank {rank} {_describe_place(self._stacks[rank])}" for rank in ranks[:NAMED_RANKS]]
        more = f" and {len(ranks) - NAMED_RANKS} more ranks" if len(ranks) > NAMED_RANKS else ""
        share = max(200, protocol.MAX_TRACEBACK // len(ranks) - 20)
        texts = [f"rank {rank}:\n{protocol.clip(self._stacks[rank].strip(), share)}\n" for rank in ranks]
        return f"{'; '.join(named)}{more}", protocol.clip("\n".join(texts), protocol.MAX_TRACEBACK)


def _describe_place(text: str) -> str:
    if text == protocol.RANK_ENDED:
        return "has ended"
    if text.startswith(protocol.RANK_FAILED):
        error = text.partition("\n")[0].removeprefix(protocol.RANK_FAILED)
        return f"has failed, and its process has not ended ({protocol.clip(error, 200)})"
    return f"in {find_innermost(text) or 'no Python frame'}"


def find_innermost(text: str) -> str:
    """Return where the main thread is, as `FUNCTION (FILE:LINE)`; empty without a frame."""
    frames = list(FRAME.finditer(_main_thread(text)))
    if not frames:
        return ""
    frame = frames[-1] if FIRST_CALL_FIRST in text else frames[0]
    return "{} ({}:{})".format(frame["name"].strip(), frame["file"], frame["line"])


def _main_thread(text: str) -> str:
    """Return the main thread's part of a dump.

    The workers' faulthandler dumps only the main thread, headed "Stack". A script's own dumps all
    threads: the one that received the signal is the "Current thread". In a dump from outside, the
    main thread comes last.
    """
    blocks = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.M)
    current = [block for block in blocks if block.startswith("Current thread")]
    return current[0] if current else blocks[-1]
