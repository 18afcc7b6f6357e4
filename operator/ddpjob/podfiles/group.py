"""The group of a job's nodes: members, rendezvous rounds, breaks and their causes. No sockets here; time and sending are handed in.

A round breaks once: at the first failure of a worker, loss of a member, or departure of one. The others are told `restart`, and after a
settling time the break gets its one incident.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import wire
from attribution import Failure, Loss, Place, Verdict, judge
from progress import Progress

Send = Callable[[str, dict[str, Any]], None]  # (verb, fields) -> one line to the member
KEPT_INCIDENTS = 50


@dataclass
class Member:
    """A launcher that has said hello. `send` is None while its connection is gone."""

    pod: str
    index: int
    attempt: int
    pid: int
    send: Send
    state: str = "Starting"  # Starting, Joining, Running, Finished, Leaving
    rank: int | None = None  # of the node in its round
    round: int | None = None
    held: bool = False  # its place has finished already: it waits for the end of the round

    @property
    def place(self) -> Place:
        return Place(self.pod, self.index)


@dataclass
class Round:
    """One rendezvous that c10d completed."""

    number: int
    world: int
    joined: dict[int, Member] = field(default_factory=dict)  # rank of the node -> member
    finished: dict[int, Member] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    broken: bool = False
    told: bool = False
    judged: bool = False

    @property
    def complete(self) -> bool:
        return len(self.joined) == self.world


class Group:
    """All decisions of the coordinator.

    `clock()` gives Unix seconds; `later(seconds, function)` calls the function then;
    `changed()` is called after every change of the report.
    """

    def __init__(
        self,
        nodes: int,
        generation: int,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Any],
        changed: Callable[[], None],
    ) -> None:
        self.nodes, self.generation = nodes, generation
        self._clock, self._later, self._changed = clock, later, changed
        self.members: dict[int, Member] = {}
        self.round: Round | None = None
        self.state = "Forming"  # Forming, Running, Restarting, Succeeded, Stopped
        self.version = 0
        self.started_at = clock()
        self.incidents: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.progress = Progress()
        self.down_since: float | None = None
        self.last_recovery: float | None = None
        self._gone: set[str] = set()
        self._stop: dict[str, Any] | None = None
        self.exit_why: str | None = None  # set: the coordinator is no longer needed

    # ---- members come and go

    def hello(self, pod: str, index: int, attempt: int, pid: int, send: Send, resume: Any = None) -> Member | None:
        """Take in a launcher. None: it was told to stop."""
        refusal = self._refusal(pod, index, attempt)
        if refusal is not None:
            send(*refusal)
            return None
        old = self.members.get(index)
        if old is not None and (old.pod, old.attempt, old.pid) == (pod, attempt, pid):
            old.send = send  # the same process over a new connection
            send("welcome", {"generation": self.generation})
            if old.round is not None and self.round is not None and (old.round != self.round.number or self.round.told):
                self._tell_restart(old, "the round went on without this node while it was away")
            self._bump()
            return old
        if old is not None:
            old.send("stop", {"ok": False, "why": f"{pod} takes this place"})
            self.lost(old, f"replaced by {pod}")
        member = Member(pod, index, attempt, pid, send)
        self.members[index] = member
        self._welcome_or_hold(member, resume)
        self._bump()
        return member

    def _refusal(self, pod: str, index: int, attempt: int) -> tuple[str, dict[str, Any]] | None:
        if self.state == "Succeeded":
            return "done", {}
        if self._stop is not None:
            return "stop", self._stop
        if pod in self._gone:
            return "stop", {"ok": False, "why": f"the operator gave pod {pod} up"}
        old = self.members.get(index)
        if old is not None and old.attempt > attempt:
            return "stop", {"ok": False, "why": f"place {index} belongs to {old.pod} (attempt {old.attempt})"}
        return None

    def _welcome_or_hold(self, member: Member, resume: Any) -> None:
        current = self.round
        if current is not None and not current.broken and any(m.index == member.index for m in current.finished.values()):
            member.held = True  # a joiner would make torchrun restart the nodes that still work
            return
        member.send("welcome", {"generation": self.generation})
        if isinstance(resume, dict) and isinstance(resume.get("round"), int):
            member.round, member.state = resume["round"], "Running"
            self._tell_restart(member, "this node was given up while its connection was gone")

    def lost(self, member: Member, why: str) -> None:
        """The member's connection ended, or the operator says that its pod is gone."""
        if self.members.get(member.index) is member:
            del self.members[member.index]
        current = self.round
        if current is not None and not self._over() and member not in current.finished.values():
            if member.state == "Leaving":
                if member.round == current.number:
                    self._break(current)
                    self._tell_all(current, f"node {member.pod} left: {why}")
            elif self._was_in(member, current):
                current.losses.append(Loss(member.place, member.rank, why, self._clock(), leaving=False))
                self._break(current)
                self._tell_all(current, f"node {member.pod} was lost: {why}")
        self._bump()

    def _was_in(self, member: Member, current: Round) -> bool:
        if member.round == current.number:
            return not current.judged
        # It may have completed the rendezvous and died before it could say so.
        return not current.complete and not current.broken and member.state != "Starting"

    def gone(self, pod: str, why: str) -> None:
        """The operator knows that a pod is gone: nobody waits for its connection to end."""
        self._gone.add(pod)
        for member in list(self.members.values()):
            if member.pod == pod:
                member.send("stop", {"ok": False, "why": why})
                self.lost(member, why)

    def leaving(self, member: Member, why: str) -> None:
        """A member was told to end: it passes the signal on to its workers and will be gone."""
        current = self.round
        if current is not None and member.round == current.number and member.state == "Running" and not self._over():
            current.losses.append(Loss(member.place, member.rank, why, self._clock(), leaving=True))
        member.state = "Leaving"
        self._bump()

    # ---- rounds

    def joining(self, member: Member) -> None:
        """The member has ended its workers, if any, and waits in the rendezvous."""
        current = self.round
        if current is not None and member.round == current.number and member.state in ("Running", "Finished") and not current.told:
            self._break(current)
            self._tell_all(current, f"node {member.pod} forms the group anew")
        member.state, member.rank, member.round = "Joining", None, None
        self._bump()

    def joined(self, member: Member, number: int, rank: int, world: int) -> None:
        """The rendezvous is complete for this member: rank of the node, number of nodes."""
        current = self.round
        if current is None or number > current.number:
            current = self._begin(number, world)
        member.round, member.rank, member.state = number, rank, "Running"
        if number < current.number or current.broken:
            self._tell_restart(member, f"a node of round {number} is gone already")
        else:
            current.joined[rank] = member
            if current.complete:
                self._resumed(current)
        self._bump()

    def _begin(self, number: int, world: int) -> Round:
        if self.round is not None and not self.round.judged:
            self._judge(self.round)
        for member in self.members.values():
            if member.round is not None and member.round < number and member.state in ("Running", "Finished"):
                self._tell_restart(member, f"round {number} formed without this node")
        self.round = Round(number, world)
        return self.round

    def _resumed(self, current: Round) -> None:
        self.state = "Running"
        if self.down_since is not None and self.progress.updated_at is None:
            self._recovered()  # nobody counts steps: the formed group is all that can be seen

    def _recovered(self) -> None:
        if self.down_since is not None:
            self.last_recovery, self.down_since = self._clock() - self.down_since, None

    def finished(self, member: Member, number: int) -> None:
        """All workers of the member have ended with 0."""
        current = self.round
        if current is None or number != current.number or current.broken:
            self._tell_restart(member, f"a node of round {number} was lost before it had finished")
            return
        if member.rank is None:
            return
        member.state = "Finished"
        current.finished[member.rank] = member
        if len(current.finished) == current.world:
            current.judged = True
            self.state = "Succeeded"
            for other in self.members.values():
                other.send("done", {})
        self._bump()

    # ---- breaks

    def failure(self, member: Member, number: int | None, failure: Failure) -> None:
        """A worker of the member ended by itself; the member restarts in place."""
        current = self.round
        member.state = "Joining" if member.state in ("Running", "Finished") else member.state
        if current is None or number != current.number or current.judged or self._over():
            self._bump()
            return
        current.failures.append(failure)
        self._break(current)
        someone_leaves = any(loss.leaving for loss in current.losses)
        if failure.communication or (someone_leaves and failure.exit_code == wire.EXIT_STEPPED_ASIDE):
            # The cause may be on its way, or others may still be saving: tell them when that has had its time.
            if not someone_leaves:
                self._later(wire.SETTLE_SECONDS, lambda: self._tell_all(current, f"a worker of {member.pod} lost its peers"))
        else:
            self._tell_all(current, f"a worker of {member.pod} failed: {failure.message[:200]}")
        self._bump()

    def init_failure(self, member: Member, message: str) -> None:
        """The entry point of the member cannot start."""
        fields = {"pod": member.pod, "index": member.index, "message": message, "traceback": ""}
        self._incident("InitFailure", self._clock(), fields, 0)

    def _break(self, current: Round) -> None:
        if current.broken:
            return
        current.broken = True
        self.state = "Restarting"
        self.down_since = self.down_since or self._clock()
        for member in self.members.values():
            if member.held:
                member.held = False
                member.send("welcome", {"generation": self.generation})
        self._later(wire.SETTLE_SECONDS, lambda: self._judge(current))

    def _judge(self, current: Round) -> None:
        if current.judged:
            return
        current.judged = True
        verdict: Verdict | None = judge(current.failures, current.losses)
        if verdict is not None:
            self._incident(verdict.kind, verdict.time, verdict.fields, verdict.consequences)

    def _incident(self, kind: str, when: float, fields: dict[str, Any], consequences: int) -> None:
        blank = dict.fromkeys(("pod", "index", "rank", "localRank", "exitCode", "signal", "message", "traceback"))
        number = sum(self.counts.values()) + 1
        self.incidents.append(dict(blank, id=number, time=wire.iso(when), kind=kind, consequences=consequences, **fields))
        del self.incidents[:-KEPT_INCIDENTS]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._bump()

    def _tell_all(self, current: Round, why: str) -> None:
        if current.told or self._over():
            return
        current.told = True
        for member in self.members.values():
            if member.round == current.number and member.state in ("Running", "Finished"):
                self._tell_restart(member, why)

    def _tell_restart(self, member: Member, why: str) -> None:
        member.send("restart", {"round": member.round, "why": why})

    # ---- the operator's words, the job's progress

    def stop(self, ok: bool, why: str) -> None:
        """End every member's workers; terminal."""
        if self._over():
            return
        self._stop = {"ok": ok, "why": why}
        self.state = "Stopped"
        for member in self.members.values():
            member.send("stop", self._stop)
        self._bump()

    def exit(self, why: str) -> None:
        """The job has ended and nobody will ask again."""
        self.exit_why = why
        self._changed()

    def report_progress(self, report: dict[str, Any]) -> None:
        """A checked progress report; the first one after a restart ends the time that counts as down."""
        if self.state == "Running":
            self._recovered()
        if self.progress.merge(report, self._clock()):
            self._bump()

    def _over(self) -> bool:
        return self.state in ("Succeeded", "Stopped")

    def _bump(self) -> None:
        self.version += 1
        self._changed()

    def report(self) -> dict[str, Any]:
        """What the operator reads."""
        members = [
            {"pod": m.pod, "index": m.index, "attempt": m.attempt, "state": m.state, "rank": m.rank, "round": m.round}
            for m in sorted(self.members.values(), key=lambda m: m.index)
        ]
        return {
            "version": self.version,
            "generation": self.generation,
            "state": self.state,
            "nodes": self.nodes,
            "startedAt": wire.iso(self.started_at),
            "members": members,
            "incidents": self.incidents,
            "progress": dict(self.progress.values, updatedAt=wire.iso(self.progress.updated_at)),
            "recovery": {"lastSeconds": self.last_recovery, "downSince": wire.iso(self.down_since)},
        }
