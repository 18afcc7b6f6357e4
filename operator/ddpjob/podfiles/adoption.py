"""What a coordinator does that was started after another: the members' round goes on as if nothing had been.

Members come back within seconds of each other, or later, where an old address of the coordinator is still in a name server's cache.
Until all of a round are back, or the time for that is over, no round is begun: a second one would run beside the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attribution import Verdict
from course import Course
from membership import FINISHED, READY, RUNNING, STARTING, Member, Round

ADOPT_SECONDS = 30.0  # for the members of a round that runs undisturbed
BROKEN_SECONDS = 5.0  # the same, when it is known that the round is over


@dataclass(frozen=True)
class Resume:
    """What a member says of itself when it comes back."""

    round: int
    rank: int
    world: int
    state: str

    @classmethod
    def read(cls, body: Any) -> Resume | None:
        """From `hello`; None where the member was in no round.

        Raises:
            ValueError: names the field.
        """
        if body is None:
            return None
        if not isinstance(body, dict):
            raise ValueError("resume: must be an object")
        for name in ("round", "rank", "world"):
            if not isinstance(body.get(name), int) or isinstance(body[name], bool) or body[name] < 0:
                raise ValueError(f"resume.{name}: must be a whole number from 0, not {body.get(name)!r}")
        if body.get("state") not in (RUNNING, FINISHED, READY):
            raise ValueError("resume.state: must be {}, {} or {}, not {!r}".format(RUNNING, FINISHED, READY, body.get("state")))
        if body["rank"] >= body["world"]:
            raise ValueError("resume.rank: must be below resume.world, {}, not {}".format(body["world"], body["rank"]))
        return cls(body["round"], body["rank"], body["world"], body["state"])


class Adoption:
    """Takes members back into the rounds they come from."""

    def __init__(self, course: Course, attempt: int, clock: Callable[[], float], later: Callable[[float, Callable[[], None]], Any]) -> None:
        self._course, self._attempt, self._clock, self._later = course, attempt, clock, later
        self._opened = False

    def arrive(self) -> None:
        """Somebody says hello to a coordinator that may not be the first."""
        if self._attempt and not self._opened:
            self._hold(ADOPT_SECONDS)

    def _hold(self, seconds: float) -> None:
        self._opened = True
        until, now = self._clock() + seconds, self._course.hold_until
        self._course.hold_until = until if now is None else min(until, now)
        self._later(seconds + 0.001, self._end_if_due)

    def _end_if_due(self) -> None:
        until = self._course.hold_until
        if until is not None and self._clock() >= until:
            self._end()

    def resume(self, member: Member, told: Resume) -> None:
        """Put the member where it says that it is, and tell it when that place is no more."""
        course = self._course
        if course.round is None or told.round > course.round.number:  # none that this coordinator began has such a number
            self._begin(told)
        current = course.round
        member.round, member.rank = told.round, told.rank
        member.state = STARTING if told.state == READY else RUNNING
        if current is None or current.number != told.round or current.world != told.world:
            if told.state != READY:
                course.tell(member, f"the group went on without this node after round {told.round}")
            return
        current.members[told.rank] = member
        if course.hold_until is not None:
            current.joined.add(told.rank)
        if told.state == READY:
            if not current.broken:
                course.came_apart(current, member)
        elif current.broken:
            course.tell(member, f"a node of round {told.round} is gone")
        elif told.state == FINISHED:
            course.finished(member, told.round)
        self.check()

    def _begin(self, told: Resume) -> None:
        course = self._course
        if course.round is not None:  # it was over before this coordinator began, and not this one's to judge
            if not course.round.judged:
                course.round.judged, course.round.broken_at = True, None
            course.state, course.down_since = "Forming", None
            course.watch.end()
        if course.hold_until is None:
            self._hold(ADOPT_SECONDS)
        course.round = Round(told.round, told.world)
        course.last_number = max(course.last_number, told.round)
        for other in course.members.values():
            if other.has_workers and other.round is not None and other.round < told.round:
                course.tell(other, f"round {told.round} began without this node")

    def check(self) -> None:
        """After every event: whether enough is known."""
        course = self._course
        if course.hold_until is None:
            return
        current = course.round
        if current is not None and current.complete:
            self._end()
            return
        ready = sum(m.state == READY for m in course.members.values())
        known = ready >= course.size.nodes if current is None else current.broken
        if known and course.hold_until > self._clock() + BROKEN_SECONDS:
            self._hold(BROKEN_SECONDS)

    def _end(self) -> None:
        course, current = self._course, self._course.round
        course.hold_until = None
        if current is not None and not course.over:
            if not current.complete:
                self._miss(current)
            elif not current.broken:
                course.runs(current)
        course.advance()

    def _miss(self, current: Round) -> None:
        missing = ", ".join(str(rank) for rank in range(current.world) if rank not in current.joined)
        why = f"node rank(s) {missing} of round {current.number} did not come back to the coordinator that was started anew"
        fields = {"message": why, "traceback": ""}
        current.absent = Verdict("PeerLost", self._clock(), fields, len(current.failures) + len(current.losses), sure=False)
        self._course.broken(current)
        self._course.tell_all(current, why)
