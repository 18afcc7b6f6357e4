"""Who is in the group: members (launchers that have said hello) and the rounds they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attribution import Failure, Loss, Place, Verdict

Send = Callable[[str, "dict[str, Any]"], None]  # (verb, fields) -> one line to the member

STARTING, READY, RUNNING, FINISHED, LEAVING = "Starting", "Ready", "Running", "Finished", "Leaving"
MEMBER_STATES = (STARTING, READY, RUNNING, FINISHED, LEAVING)
LOST = "Lost"  # of a member that is none any more; a round may still name it


@dataclass(eq=False)
class Member:
    """A launcher with a connection. Times are on the coordinator's clock, in seconds."""

    pod: str
    index: int
    attempt: int
    pid: int
    send: Send
    grace: float
    heard: float
    state: str = STARTING
    rank: int | None = None  # of the node in `round`
    round: int | None = None  # the last one it was sent into
    ready_at: float = 0.0
    host: str = ""
    port: int = 0
    drain_by: float | None = None  # told to end its workers: not later than this

    @property
    def place(self) -> Place:
        """Where its events happen."""
        return Place(self.pod, self.index)

    @property
    def has_workers(self) -> bool:
        """Whether workers of its round may be alive, and it has not said that it leaves."""
        return self.state in (RUNNING, FINISHED)


@dataclass(eq=False)
class Round:
    """One group: `world` members with the ranks 0..world-1. Broken once, judged once."""

    number: int
    world: int
    members: dict[int, Member] = field(default_factory=dict)  # rank -> member; after an adoption only those that came back
    joined: set[int] = field(default_factory=set)
    finished: dict[int, float] = field(default_factory=dict)  # rank -> when
    failures: list[Failure] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    running_since: float | None = None
    broken_at: float | None = None
    told_at: float | None = None
    told_planned: bool = False
    cause: Verdict | None = None  # known from the beginning: a hang, a planned restart
    absent: Verdict | None = None  # somebody was never heard of again: explains all but a failure that is sure
    fallback: Verdict | None = None  # where nothing better is heard of
    judged: bool = False

    @property
    def broken(self) -> bool:
        """Whether it can no longer end well."""
        return self.broken_at is not None

    @property
    def complete(self) -> bool:
        """Whether every member's workers have been started."""
        return len(self.joined) == self.world

    @property
    def somebody_leaves(self) -> bool:
        """Whether a member was told to end: others may be saving with it."""
        return any(loss.leaving for loss in self.losses)

    def holds(self, member: Member) -> bool:
        """Whether the member was sent into this round and has not come out of it."""
        return member.round == self.number and member.state in (RUNNING, FINISHED, LEAVING)

    def draining(self) -> list[Member]:
        """Connected members whose workers may still be alive."""
        return [m for m in self.members.values() if m.round == self.number and m.has_workers]
