"""Decides which of the failures that are seen together is the cause, and which are consequences: one break counts once.

Pods' ends are seen at once, the coordinator's incidents (one for each break of the group) a second later, and either may
come first. A pod that was made after a break had no part in it: what befalls it is a break of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob.api.types import ConditionType, JobStatus, Restart
from ddpjob.core.classify import Cause

SAME_BREAK = timedelta(seconds=5)
"""A pod's end and an incident no further apart are one break."""
CLEARLY_BEFORE = timedelta(seconds=2)
"""Beyond what clocks differ by, and kubelets round."""

_HARD = frozenset({Cause.OOM_KILLED})
"""Ends of pods that explain a failed worker, not the other way round; so do all that do not count."""
_NO_BREAKS = frozenset({Cause.JOINED, Cause.SCALED})


@dataclass(frozen=True)
class Finding:
    """Something that has gone wrong, not yet attributed."""

    restart: Restart
    """As it is recorded if it is a cause."""
    made_in: int | None = None
    """The round in which the pod was made; None for incidents and the coordinator's own end."""
    fails: str = ""
    """Reason of the condition Failed, if it is a cause."""
    why: str = ""
    exit_code: int | None = None

    @property
    def contestable(self) -> bool:
        """Whether it matters that it may be a consequence. A program that cannot start is nobody's consequence."""
        return self.restart.counted or bool(self.fails and self.fails != Cause.INIT_FAILURE)


@dataclass(frozen=True)
class Attributed:
    """`causes` are the findings that stand for breaks of their own."""

    restarts: tuple[Restart, ...]
    causes: tuple[Finding, ...]
    seen_round: int


@dataclass
class _Break:
    """One that opens in this look: the first finding is its cause."""

    findings: list[Finding]
    incident: bool


def attribute(status: JobStatus, ends: list[Finding], incidents: list[Finding], lost: list[tuple[str, datetime]]) -> Attributed:
    """`lost`: pod and time of the coordinator's incidents that pods' ends explain."""
    last = _last_break(status)
    absorbed = [end for end in ends if last is not None and end.contestable and _belongs(end, last, status)]
    own = sorted((end for end in ends if end not in absorbed), key=lambda f: (f.contestable, f.restart.time))
    here = _Break(own, incident=False) if own else None
    seen = status.restarts.seen_round
    late: list[Finding] = []
    breaks: list[_Break] = []
    for pod, time in lost:
        if here is not None and _told(here, pod, time):
            here.incident = True
        elif last is not None and (last.pod == pod or abs(time - last.time) <= SAME_BREAK):
            seen = max(seen, last.round)
    for incident in incidents:
        if here is not None and not here.incident and _close(incident, here):
            here.incident = True
            if not _join(incident, here):
                breaks.append(_Break([incident], incident=True))
        elif last is not None and seen < last.round and incident.contestable and abs(incident.restart.time - last.time) <= SAME_BREAK:
            seen = last.round
            late.append(incident)
        else:
            breaks.append(_Break([incident], incident=True))
    if here is not None:
        breaks.append(here)
    return _recorded(status, last, [*absorbed, *late], breaks, seen)


def _last_break(status: JobStatus) -> Restart | None:
    breaks = (r for r in reversed(status.restarts.recent) if r.round and not r.consequence and r.reason not in _NO_BREAKS)
    return next(breaks, None)


def _belongs(end: Finding, last: Restart, status: JobStatus) -> bool:
    if end.made_in is None or end.made_in >= last.round:
        return False
    still_broken = last.seconds is None and status.holds(ConditionType.RESTARTING)
    return still_broken or abs(end.restart.time - last.time) <= SAME_BREAK


def _told(here: _Break, pod: str, time: datetime) -> bool:
    return any(f.restart.pod == pod or abs(time - f.restart.time) <= SAME_BREAK for f in here.findings)


def _close(incident: Finding, here: _Break) -> bool:
    return any(abs(incident.restart.time - f.restart.time) <= SAME_BREAK for f in here.findings)


def _join(incident: Finding, here: _Break) -> bool:
    """Puts an incident into the break that pods' ends told of, as its cause or not. False: it was a break before that one."""
    first = here.findings[0]
    if incident.restart.reason == Cause.JOINED:
        return False
    if first.contestable and first.restart.reason not in _HARD:
        here.findings.insert(0, incident)
        return True
    if incident.restart.time < first.restart.time - CLEARLY_BEFORE:
        return False
    here.findings.append(incident)
    return True


def _recorded(status: JobStatus, last: Restart | None, late: list[Finding], breaks: list[_Break], seen: int) -> Attributed:
    restarts = [_consequence(f, last) for f in late if last is not None]
    causes = []
    for number, broken in enumerate(breaks, start=status.round + 1):
        cause = replace(broken.findings[0].restart, round=number)
        causes.append(broken.findings[0])
        restarts.append(cause)
        for finding in broken.findings[1:]:
            restarts.append(_consequence(finding, cause) if finding.contestable else replace(finding.restart, round=number))
            causes += [] if finding.contestable else [finding]
        seen = number if broken.incident else seen
    return Attributed(tuple(restarts), tuple(causes), seen)


def _consequence(finding: Finding, cause: Restart) -> Restart:
    first, newline, rest = finding.restart.message.partition("\n")
    where = f" of pod {cause.pod}" if cause.pod != finding.restart.pod else ""
    message = f"{first} (a consequence of {cause.reason}{where}){newline}{rest}"
    return replace(finding.restart, counted=False, consequence=True, round=cause.round, message=message)
