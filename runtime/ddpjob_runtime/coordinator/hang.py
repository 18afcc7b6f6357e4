"""Detects that the job no longer makes steps, and collects the stacks of a hang.

If one rank stops, all others wait for it in a collective, and nothing fails: the job holds its GPUs
but does nothing. From outside, that looks like a long evaluation or a slow checkpoint. So the
coordinator measures the time since the last step, and reacts as the user has configured.

- With `hang_after`, the round ends after that limit. If the script's steps are not counted, silence
  proves nothing. The ranks are then asked for their stacks, and the round ends only if none of them
  has moved since the last look.
- Without it, the round is not ended. After LEAST_REPORTS steps the pace is known, and a step that
  takes PACE_FACTOR times the longest gap so far is reported as overdue, with the stacks. The time
  from a round's beginning to its first step has a separate pace, because loading data may take
  longer than any step.

Example, with steps of 2 s, an occasional checkpoint of 30 s, and without `hang_after`: the next
step is overdue after max(300, 20 x 30) = 600 s. With hang_after=120 the round ends after 120 s.

A `HangDump` asks every member for the stacks of its ranks and waits DUMP_SECONDS for them. It names
a culprit if possible: the only member with a failed rank, or the only member whose ranks are in a
different place from all others. If three of four nodes are in `all_reduce` and the fourth is in
`read`, the fourth is the culprit. With fewer than LEAST_MEMBERS members, it is impossible to
determine which one waits for which.

A hang counts as a first cause, like any other: docs/decisions/0010.
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
    report has a separate pace, because loading data may take longer than any step.
    """

    def __init__(self, hang_after: float | None) -> None:
        self.hang_after = hang_after
        self._reports, self._longest_gap, self._longest_start = 0, 0.0, 0.0
        self.since: float | None = None
        """When the last step was made, or the round began to run; None while no round runs."""
        self.activity = ""
        """What the script reports doing between steps, such as evaluating."""
        self._in_round = 0

    def configure(self, hang_after: float | None) -> None:
        """Replace the limit."""
        self.hang_after = hang_after

    def begin(self, now: float) -> None:
        """Start measuring, because a round runs."""
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
        """Restart the time limit without counting a step, because the ranks may be at work."""
        if self.since is not None:
            self.since = now

    def forgive(self, seconds: float) -> None:
        """Ignore `seconds` of the time since the last step."""
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

    Calls `done` when all stacks have arrived or time is up.
    """

    def __init__(self, loop: Loop, done: Callable[[], None]) -> None:
        self._loop, self._done = loop, done
        self._stacks: dict[int, str] = {}  # rank -> text
        self._idle: dict[int, bool | None] = {}  # rank -> whether it has not moved; None: unknown
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

        `expected` returns the members that were asked and are still connected.
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

        The culprit is the only member with a failed rank, or the only member whose ranks are in
        different places from all others'. Two members in two places do not show which one waits.
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
        """Whether no rank has moved since the ranks were last asked; None if unknown."""
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

    The workers' faulthandler dumps only the main thread, headed "Stack". A script's own handler
    dumps all threads, and calls the one that received the signal "Current thread". In a dump from
    outside, the main thread comes last.
    """
    blocks = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.M)
    current = [block for block in blocks if block.startswith("Current thread")]
    return current[0] if current else blocks[-1]
