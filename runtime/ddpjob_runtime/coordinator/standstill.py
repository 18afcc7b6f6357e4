"""Checks, if a round completes no steps, whether any rank is still working and which rank blocks
the others.

A check (`Look`) asks every launcher for the stacks of its workers, and for what they have done
since the last check (`worker_vitals`). One check proves nothing, so a `Standstill` compares each
check with the previous one. The round stands still between two checks if the stack of every rank is
the same, and one of these is true:

- Some ranks are outside a collective, and have not read, written, received or computed anything.
  The other ranks wait for them, so they are the culprits.
- Every rank is in a collective, and no rank has transferred anything.

A rank that uses a GPU may spend CPU time while its stack stays the same, because it spins while it
waits for the GPU. A long computation on the GPU looks the same, so such a rank is not treated as a
culprit. While there is such a rank, a hang is proved only after the other ranks have stood still
for SPIN_LOOKS checks. In all other cases, LEAST_LOOKS checks are enough. Some waits often end by
themselves: waits for a stopped process, for storage or for a server, and sleeps. Such a wait proves
a hang only if it lasts longer (PATIENCE). After any movement, the comparison starts again.

Example, 5 s between checks:

     0  rank 0 in all_reduce; rank 1 in get (queue.py:180), no CPU time known yet
     5  the same places; rank 1 used 0.00 s of CPU time and moved 0 bytes: a standstill, in which
        rank 0 waits for rank 1
    10  the same again: the hang is proved. If rank 1 were in fsync, the proof would take 120 s

If any member does not respond, the check is dropped. See docs/decisions/0024.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator.loop import Loop
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.protocol import RankLook, ToMember, WaitKind

LEAST_MEMBERS = 3
"""Minimum number of members in a comparison of stacks. In such a comparison, the culprit is the
member whose stacks differ from all others. With only two members, the comparison does not show
which member waits for the other.
"""
NAMED_RANKS = 8

LOOK_SECONDS = 4.0
"""Maximum number of seconds that a check waits for all members' responses."""
LEAST_LOOKS, SPIN_LOOKS = 2, 6
"""Number of checks, not counting the first one, that must show a standstill before a hang is
proved. LEAST_LOOKS is the usual number. SPIN_LOOKS applies if a rank spins while it uses a GPU.
"""
LEAST_GAP = 2.0
"""Minimum number of seconds between two checks. Checks that are closer together prove nothing."""
IDLE_SHARE, IDLE_BYTES = 0.02, 8192
"""A rank counts as idle if, between two checks, it uses at most this share of a core and transfers
at most this many bytes. Threads that only watch, such as NCCL's, stay below these limits.
"""
PATIENCE = {
    WaitKind.STOPPED: 60.0, WaitKind.STORAGE: 120.0, WaitKind.SERVER: 120.0, WaitKind.ASLEEP: 120.0,
    WaitKind.TRACED: float("inf"),
}  # fmt: skip
"""Kinds of waits that often end by themselves, each with the number of seconds after which a
standstill in such a wait proves a hang. A process under a debugger never proves a hang, because it
waits for the debugger.
"""

FRAME = re.compile(r'^[ \t]*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.M)
FIRST_CALL_FIRST = "(most recent call last)"
COLLECTIVE_FILES = re.compile(
    r"/torch/distributed/(?!checkpoint/|elastic/|launcher/)|/torch/nn/parallel/distributed\.py$|/horovod/"
    r"|/ddpjob_pod/(own_work|rank_snapshots)\.py$"
)
"""Files with functions in which a rank waits for other ranks. `own_work` is included because it
wraps torch's functions.
"""
STORE_FILES = re.compile(r"/torch/distributed/rendezvous\.py$")
"""The file in which torch connects to the store."""
SERVER_FILES = re.compile(r"/(socket|ssl|ddpjob_bucket/stored)\.py$")
"""Files in which a process waits for a server, such as an object store. Launchers do not recognize
all of these waits, for example if a server stops in the middle of a response.
"""
DEBUGGERS = re.compile(r'File "[^"]*(/[pb]db\.py"|/pydevd|/debugpy/)')
BACKWARD = "_engine_run_backward"
"""Name of the function in which the backward pass runs. DDP exchanges gradients during it."""


class Look:
    """Collects the responses of all members to one check.

    Once all members have responded, `done` is called with this object. If a member has not
    responded after LOOK_SECONDS, `done` is called with None.
    """

    def __init__(self, loop: Loop, members: list[Member], done: Callable[[Look | None], None]) -> None:
        self._done, self._missing = done, {member.index for member in members}
        self.ranks: dict[int, RankLook] = {}
        self.members: dict[int, Member] = {}  # rank -> the member that runs it
        self._over = False
        loop.later(LOOK_SECONDS, lambda: self._end(None))

    def request(self, number: int, members: list[Member], record: bool) -> None:
        """Ask these members of round `number` what their ranks are doing.

        If `record` is set, the members keep the stacks of this check in their logs.
        """
        for member in members:
            member.send(ToMember.LOOK, {"round": number, "record": record})

    def add(self, member: Member, ranks: Iterable[RankLook]) -> None:
        """Add a member's response, unless the member has already responded."""
        if member.index not in self._missing:
            return
        self._missing.remove(member.index)
        for look in ranks:
            self.ranks[look.rank], self.members[look.rank] = look, member
        if not self._missing:
            self._end(self)

    def _end(self, result: Look | None) -> None:
        if not self._over:
            self._over = True
            self._done(result)


class Standstill:
    """Compares each check since the last step with the previous check."""

    def __init__(self) -> None:
        self._before: Look | None = None
        self._since, self._spins = 0.0, False
        self.looks = 0
        """Number of consecutive checks, up to the latest one, that have shown a standstill."""
        self.awaited: frozenset[int] = frozenset()
        """The ranks that the others wait for. If every rank is in a collective, this set contains
        all ranks.
        """

    def add(self, now: float, look: Look) -> bool:
        """Compare this check with the previous one, and return False if something has moved between
        them.
        """
        before, self._before = self._before, look
        found = None if before is None else _compare(before.ranks, look.ranks)
        if found is None:
            self._since, self.looks, self._spins, self.awaited = now, 0, False, frozenset()
            return before is None
        self.looks += 1
        self.awaited, spins = found
        self._spins = self._spins or spins
        return True

    def is_proved(self, now: float) -> bool:
        """Whether the checks since the last step prove that the ranks will not continue by
        themselves.
        """
        if self._before is None or self.looks < (SPIN_LOOKS if self._spins else LEAST_LOOKS):
            return False
        waits = [_wait_of(self._before.ranks[rank]) for rank in self.awaited]
        return now - self._since >= max((PATIENCE[wait] for wait in waits if wait), default=0.0)

    @property
    def has_waiting_rank(self) -> bool:
        """Whether the last check found a rank that waits for other ranks, in a collective or while
        the group forms.
        """
        return self._before is not None and any(is_in_collective(look.text) for look in self._before.ranks.values())

    def stacks(self) -> Stacks:
        """Return the stacks of the last check, with the ranks that the others wait for."""
        look = self._before
        if look is None:
            return Stacks({}, {})
        waits = {rank: _describe_wait(look.ranks[rank]) for rank in look.ranks}
        apart = self.awaited if len(self.awaited) < len(look.ranks) else frozenset()
        return Stacks({rank: r.text for rank, r in look.ranks.items()}, look.members, apart, waits)


def _compare(before: dict[int, RankLook], now: dict[int, RankLook]) -> tuple[frozenset[int], bool] | None:
    """Compare two checks. Return None if something has moved between them.

    If nothing has moved, return the ranks that the others wait for, and whether a rank spins while
    it uses a GPU.
    """
    if before.keys() != now.keys() or not now:
        return None
    still, spins, transfers = set(), False, False
    for rank, look in now.items():
        if look.digest != before[rank].digest or look.seconds < LEAST_GAP or DEBUGGERS.search(look.text):
            return None
        busy = look.cpu > IDLE_SHARE * look.seconds
        if busy and not look.gpu:
            return None
        active = look.bytes > IDLE_BYTES or look.forks > 0
        if is_in_collective(look.text):
            transfers = transfers or active
        elif active:
            return None
        elif busy:
            spins = True
        else:
            still.add(rank)
    if still:
        return frozenset(still), spins
    return None if spins or transfers else (frozenset(now), False)


def _wait_of(look: RankLook) -> WaitKind | None:
    """Return the kind of wait that a rank is in, as shown by the kernel or by the rank's stack;
    None if the kind is unknown.
    """
    if look.wait:
        return look.wait
    frame = _innermost(look.text)
    return WaitKind.SERVER if frame is not None and SERVER_FILES.search(frame["file"]) else None


def _describe_wait(look: RankLook) -> str:
    if look.wait is WaitKind.STOPPED:
        return "one of its processes is stopped (SIGSTOP)"
    if look.wait is WaitKind.STORAGE:
        return f"blocked on storage in {look.call or 'the kernel'}"
    if look.wait is WaitKind.SERVER:
        return f"waiting for a response from {look.call}"
    frame = _innermost(look.text)
    if frame is not None and STORE_FILES.search(frame["file"]):
        return "not all ranks have connected to the store at init_method, or at MASTER_ADDR:MASTER_PORT"
    return ""


class Stacks:
    """The stacks of all ranks in a round without steps.

    `texts` maps each rank to its stacks, and `members` to the member that runs it. `apart` contains
    the ranks that the others wait for. It is empty if these ranks are unknown. `waits` describes
    the known waits of ranks.
    """

    def __init__(
        self,
        texts: dict[int, str],
        members: dict[int, Member],
        apart: frozenset[int] = frozenset(),
        waits: dict[int, str] | None = None,
    ) -> None:
        self.texts, self.members, self._apart, self._waits = texts, members, apart, waits or {}

    def culprit(self) -> Member | None:
        """Return the member that the others wait for; None if the stacks do not show which one.

        If exactly one member has failed ranks, that member is the culprit. If several members have
        failed ranks, the culprit is unknown. If no rank has failed, the culprit is the only member
        outside the collective that the others are in. If there is no such member, the culprit is
        the only one whose stacks differ from those of all other members.
        """
        failed = {m.index: m for r, m in self.members.items() if self.texts[r].startswith(protocol.RANK_FAILED)}
        if failed:
            return next(iter(failed.values())) if len(failed) == 1 else None
        outside = self._apart or {rank for rank, text in self.texts.items() if not is_in_collective(text)}
        found = {self.members[rank].index: self.members[rank] for rank in outside}
        if len(found) == 1 and len({m.index for m in self.members.values()}) > 1:
            return next(iter(found.values()))
        places: dict[int, set[str]] = {}
        for rank, member in self.members.items():
            places.setdefault(member.index, set()).add(_describe_place(self.texts[rank]))
        apart = [i for i, own in places.items() if all(own.isdisjoint(p) for j, p in places.items() if j != i)]
        if len(places) < LEAST_MEMBERS or len(apart) != 1:
            return None
        if not set.intersection(*(own for i, own in places.items() if i not in apart)):
            return None
        return next(m for m in self.members.values() if m.index == apart[0])

    def describe(self) -> tuple[str, str]:
        """Return a summary of where each rank is, and the stacks of all ranks.

        The stacks are shortened to the limit for a traceback. Ranks that have ended or failed come
        first, followed by the ranks that the others wait for.
        """
        over = protocol.RANK_ENDED, protocol.RANK_FAILED
        ranks = sorted(
            self.texts, key=lambda rank: (not self.texts[rank].startswith(over), rank not in self._apart, rank)
        )
        if not ranks:
            return "no rank reported its stack", ""
        named = [self._describe_rank(rank) for rank in ranks[:NAMED_RANKS]]
        more = f" and {len(ranks) - NAMED_RANKS} more ranks" if len(ranks) > NAMED_RANKS else ""
        share = max(200, protocol.MAX_TRACEBACK // len(ranks) - 20)
        texts = [f"rank {rank}:\n{protocol.clip(self.texts[rank].strip(), share)}\n" for rank in ranks]
        return f"{'; '.join(named)}{more}", protocol.clip("\n".join(texts), protocol.MAX_TRACEBACK)

    def _describe_rank(self, rank: int) -> str:
        said = [self._waits.get(rank, ""), "the other ranks are waiting for it" if rank in self._apart else ""]
        notes = ", ".join(filter(None, said))
        return f"rank {rank} {_describe_place(self.texts[rank])}{f' ({notes})' if notes else ''}"


def _describe_place(text: str) -> str:
    if text == protocol.RANK_ENDED:
        return "has ended"
    if text.startswith(protocol.RANK_FAILED):
        error = text.partition("\n")[0].removeprefix(protocol.RANK_FAILED)
        return f"has failed, and its process has not ended ({protocol.clip(error, 200)})"
    return f"in {find_innermost(text) or 'no Python frame'}"


def is_in_collective(text: str) -> bool:
    """Whether the main thread is in a collective, or in a backward pass, which ends in a
    collective.
    """
    frame = _innermost(text)
    return frame is not None and (
        COLLECTIVE_FILES.search(frame["file"]) is not None or frame["name"].strip() == BACKWARD
    )


def find_innermost(text: str) -> str:
    """Return the innermost function of the main thread as `FUNCTION (FILE:LINE)`; empty if the
    stack has no frame.
    """
    frame = _innermost(text)
    return "" if frame is None else "{} ({}:{})".format(frame["name"].strip(), frame["file"], frame["line"])


def _innermost(text: str) -> re.Match[str] | None:
    frames = list(FRAME.finditer(_main_thread(text)))
    if not frames:
        return None
    return frames[-1] if FIRST_CALL_FIRST in text else frames[0]


def _main_thread(text: str) -> str:
    """Return the part of a stack dump that is about the main thread.

    The workers' faulthandler dumps only the main thread, under the heading "Stack". If a script has
    installed its own handler, that handler dumps all threads. In its dump, the heading of the
    thread that received the signal is "Current thread". In a dump that another process made, the
    main thread comes last.
    """
    blocks = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.M)
    current = [block for block in blocks if block.startswith("Current thread")]
    return current[0] if current else blocks[-1]
