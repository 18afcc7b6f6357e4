"""The group of a job's nodes: who is let in, what members and the operator say, what the operator reads. No sockets here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wire
from adoption import Adoption, Resume
from attribution import Failure
from course import Course, Settings
from formation import Size
from membership import FINISHED, READY, STARTING, Member, Send
from progress import Progress

__all__ = ["Group", "Member", "Settings"]


class Group:
    """All decisions of the coordinator.

    `clock()` gives Unix seconds and never goes back; `later(seconds, function)` calls the function then;
    `changed()` is called after every change of the report; `log(text)` gets a line for each event.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Any],
        changed: Callable[[], None],
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings = settings
        self._clock, self._notify = clock, changed
        self.members: dict[int, Member] = {}  # by place
        self.course = Course(settings, self.members, clock, later, self._bump, log)
        self._adoption = Adoption(self.course, settings.attempt, clock, later)
        self.version = 0
        self.started_at = clock()
        self.progress = Progress()
        self.notes: dict[tuple[str, str], str] = {}  # (pod, kind) -> why
        self._stop: dict[str, Any] | None = None
        self.exit_why: str | None = None  # set: the coordinator is no longer needed

    # ---- members come and go

    def hello(self, pod: str, index: int, attempt: int, pid: int, send: Send, grace: float = 30.0, resume: Any = None) -> Member | None:
        """Take in a launcher. None: it was told to go.

        Raises:
            ValueError: `resume` is malformed; names the field.
        """
        told = Resume.read(resume)
        refusal = self._refusal(pod, index, attempt)
        if refusal is not None:
            send(*refusal)
            return None
        self._adoption.arrive()
        self.course.missing.pop(index, None)
        old = self.members.get(index)
        if old is not None and (old.pod, old.attempt, old.pid) == (pod, attempt, pid) and self._same_workers(old, told):
            self._reconnect(old, send, told)
            return old
        if old is not None:
            self._replace(old, pod)
        member = self.members[index] = Member(pod, index, attempt, pid, send, grace, self._clock())
        send("welcome", {"generation": self.settings.generation})
        if told is not None:
            self._adoption.resume(member, told)
        self._bump()
        self._advance()
        return member

    def _refusal(self, pod: str, index: int, attempt: int) -> tuple[str, dict[str, Any]] | None:
        if self.course.state == "Succeeded":
            return "done", {}
        if self._stop is not None:
            return "stop", self._stop
        old = self.members.get(index)
        why = self.course.dismissed.get(pod)
        if why is None and old is not None and old.attempt > attempt:
            why = f"place {index} belongs to {old.pod} (attempt {old.attempt})"
        return None if why is None else ("stop", {"ok": False, "why": why, "fenced": True})

    def _same_workers(self, old: Member, told: Resume | None) -> bool:
        """Whether both sides still mean the same round; else a line between them was lost with the old connection."""
        if not old.has_workers:
            return told is None or told.state == READY
        return told is not None and told.round == old.round and told.state != READY

    def _reconnect(self, old: Member, send: Send, told: Resume | None) -> None:
        """The same process over a new connection. What it said last may have been lost with the old one."""
        old.send, old.heard = send, self._clock()
        send("welcome", {"generation": self.settings.generation})
        if old.has_workers and told is not None:
            self.course.joined(old, told.round)
            if told.state == FINISHED:
                self.course.finished(old, told.round)
            if old.drain_by is not None:
                self.course.tell(old, "the round is over")
        self._bump()
        self._advance()

    def _replace(self, old: Member, pod: str) -> None:
        if old.pod != pod:
            self.course.dismissed[old.pod] = why = f"{pod} takes this place"
            old.send("stop", {"ok": False, "why": why, "fenced": True})
        self.course.depart(old, f"replaced by {pod}" if old.pod != pod else "it came back without the workers of its round")

    def lost(self, member: Member, why: str) -> None:
        """The member's connection ended."""
        self.course.miss(member, why)
        self._advance()

    def gone(self, pod: str, why: str) -> None:
        """The operator knows that a pod is gone: nobody waits for its connection to end."""
        self.course.dismissed[pod] = why
        for index in [index for index, entry in self.course.missing.items() if entry["pod"] == pod]:
            del self.course.missing[index]
        self.notes = {key: text for key, text in self.notes.items() if key[0] != pod}
        for member in list(self.members.values()):
            if member.pod == pod:
                member.send("stop", {"ok": False, "why": why, "fenced": True})
                self.course.depart(member, why)
        self._bump()
        self._advance()

    def _advance(self) -> None:
        self._adoption.check()
        self.course.advance()

    # ---- members' words

    def ready(self, member: Member, after: int, host: str, port: int) -> None:
        """The member has no workers and could begin a round; `after` is the last one it knows of."""
        self.course.ready(member, after, host, port)
        self._advance()

    def joined(self, member: Member, number: int) -> None:
        """The member has started its workers of this round."""
        self.course.joined(member, number)
        self._advance()

    def finished(self, member: Member, number: int) -> None:
        """All workers of the member have ended with 0."""
        self.course.finished(member, number)

    def failure(self, member: Member, number: int | None, failure: Failure) -> None:
        """A worker of the member ended by itself."""
        self.course.failure(member, number, failure)
        self._advance()

    def leaving(self, member: Member, why: str) -> None:
        """The member was told to end."""
        self.course.leaving(member, why)
        self._advance()

    def stacks(self, member: Member, number: int, rank: int, text: str) -> None:
        """What one rank does while the group hangs."""
        self.course.stacks(member, number, rank, text)

    def note(self, member: Member, kind: str, why: str) -> None:
        """Something the operator should know of a pod."""
        self.notes[(member.pod, kind)] = why
        self._bump()

    def init_failure(self, member: Member, message: str) -> None:
        """The entry point of the member cannot start; said once of what is wrong with all of them."""
        incidents = self.course.ledger.incidents
        last = incidents[-1] if incidents else None
        if last is not None and last["kind"] == "InitFailure" and last["message"] == message:
            last["consequences"] += 1
        else:
            fields = {"pod": member.pod, "index": member.index, "message": message, "traceback": ""}
            self.course.ledger.add("InitFailure", self._clock(), fields, 0)
        self._bump()

    # ---- the operator's words, the job's progress

    def resize(self, nodes: int, minimum: int) -> None:
        """Another number of nodes is wanted, or enough.

        Raises:
            ValueError: names the field and what it must be.
        """
        if not 1 <= minimum <= nodes:
            raise ValueError(f"minNodes: must be from 1 to nodes ({nodes}), not {minimum}")
        size = Size(nodes, minimum)
        if size != self.course.size:
            self.course.size = size
            self._bump()
            self._advance()

    def set_patience(self, hang_after: float | None, initial: float, maximum: float) -> None:
        """Another idea of what a hang is, and of how a crash loop slows down.

        Raises:
            ValueError: names the field and what it must be.
        """
        if hang_after is not None and hang_after <= 0:
            raise ValueError(f"hangAfter: must be above 0 seconds, or null, not {hang_after}")
        if not 0 < initial <= maximum:
            raise ValueError(f"backoff: must be [INITIAL, MAXIMUM] in seconds, 0 < INITIAL <= MAXIMUM, not {[initial, maximum]}")
        self.course.watch.hang_after = hang_after
        self.course.backoff.initial, self.course.backoff.maximum = initial, maximum
        self._bump()
        self._advance()

    def stop(self, ok: bool, why: str) -> None:
        """End every member's workers; terminal."""
        if self.course.over:
            return
        self._stop = {"ok": ok, "why": why}
        self.course.end("Stopped")
        for member in self.members.values():
            member.send("stop", self._stop)

    def exit(self, why: str) -> None:
        """The job has ended and nobody will ask again."""
        self.exit_why = why
        self._notify()

    def report_progress(self, report: dict[str, Any]) -> None:
        """A checked progress report; the first one after a restart ends the time that counts as down."""
        course = self.course
        course.steps_are_seen = True
        if course.state == "Running":
            course.recovered()
        if self.progress.shows_life(report):
            course.watch.step(self._clock())
            course.advance()
        if self.progress.merge(report, self._clock()):
            if self.progress.position is not None:
                course.backoff.step(self.progress.position)
            self._bump()

    # ---- what the operator reads

    def _bump(self) -> None:
        self.version += 1
        self._notify()

    def report(self) -> dict[str, Any]:
        """The body of `GET /status`."""
        course, settings, now = self.course, self.settings, self._clock()
        members = [
            {"pod": m.pod, "index": m.index, "attempt": m.attempt, "state": m.state, "rank": self._rank(m), "round": m.round}
            for m in sorted(self.members.values(), key=lambda m: m.index)
        ]
        until = course.backoff_until
        return {
            "version": self.version,
            "generation": settings.generation,
            "mode": settings.mode,
            "attempt": settings.attempt,
            "state": course.state,
            "nodes": course.size.nodes,
            "wanted": course.size.nodes,
            "minimum": course.size.minimum,
            "hangAfter": course.watch.hang_after,
            "backoff": [course.backoff.initial, course.backoff.maximum],
            "world": course.round.world if course.round is not None and not course.round.broken else None,
            "round": course.last_number,
            "startedAt": wire.iso(self.started_at),
            "members": members,
            "lost": sorted(course.missing.values(), key=lambda entry: entry["index"]),
            "incidents": course.ledger.incidents,
            "backoffUntil": wire.iso(until) if until is not None and until > now else None,
            "notes": [{"pod": pod, "kind": kind, "why": why} for (pod, kind), why in sorted(self.notes.items())],
            "progress": dict(self.progress.values, updatedAt=wire.iso(self.progress.updated_at)),
            "recovery": {"lastSeconds": course.last_recovery, "downSince": wire.iso(course.down_since)},
        }

    def _rank(self, member: Member) -> int | None:
        """Of the node in its round, while it is in one."""
        return None if member.state in (STARTING, READY) else member.rank
