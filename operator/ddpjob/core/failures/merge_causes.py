"""Decides which of several failures observed together is the cause, and which are its consequences.

Each break of the group must count only once, but the operator sees it twice. Kubernetes shows the
ends of pods immediately, and the coordinator reports an incident about a second later. A reconcile
may see both, only the ends, or only the incident. A pod that was created after a break was not part
of the break, so the pod's failure is a separate break.

Ends and incidents within SAME_BREAK of each other belong to one break, and an incident explains at
most one break. The docstring of `attribute` has the three rules. Example: round 3 is training when
a node is drained.

    10:00:00.0  pod train-1-0 is evicted, which does not count
    10:00:00.4  rank 0 fails with "Connection closed by peer", which would count
    10:00:01    reconcile: the eviction opens break 4 and is its cause (rule 1)
    10:00:02    reconcile: rank 0's incident is within 5 s of break 4, which no incident has
                explained yet, so it becomes a consequence of the eviction (rule 3)

Nothing counts, and `restarts.recent` shows the eviction and the incident, both with the round of
the eviction. If one reconcile had seen both, rule 2 would have given the same result. A second
incident at 10:00:03 would not be merged into break 4, but would open break 5 and count.

If train-1-0 had ended with an ordinary failure of its worker, and one reconcile had seen this end
and the incident, the incident would be the cause, because it names the rank, the exit code and the
traceback.

Why there are two levels of judgment: docs/decisions/0010.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from ddpjob.api.job_status import ConditionType, JobStatus, Restart
from ddpjob.core.failures.classify import Cause, names_pod

SAME_BREAK = timedelta(seconds=5)
"""Maximum time between a pod's end and an incident of the same break."""
CLEARLY_BEFORE = timedelta(seconds=2)
"""An incident counts as earlier than a pod's end only if the difference exceeds this time. The
clocks always differ by less, even with the kubelets' rounding."""

_EVER = datetime.max.replace(tzinfo=UTC)
_HARD = frozenset({Cause.OOM_KILLED, Cause.STORAGE_EXCEEDED})
"""Causes of pod ends that can make a worker fail, but never result from a worker's failure. This is
also true of all causes that do not count, so the set lists only causes that count."""
_NO_BREAKS = frozenset({Cause.JOINED, Cause.SCALED})


@dataclass(frozen=True)
class Finding:
    """A failure before `attribute` has decided whether it is a cause or a consequence."""

    restart: Restart
    """The restart to record if the finding is a cause."""
    made_in: int | None = None
    """The round in which the pod was created; None for incidents and for the coordinator's own
    end."""
    fails: str = ""
    """The Failed condition's reason if the finding is a cause and fails the job; else empty."""
    why: str = ""
    """The rule that fails the job; empty if a default fails the job."""
    exit_code: int | None = None
    idle: bool = False
    """Whether this is the end of an idle spare, which does not break the group."""

    @property
    def contestable(self) -> bool:
        """Whether it matters if this finding is a cause or a consequence.

        A cause may count or fail the job, and a consequence does neither. A program that cannot
        start is never a consequence. A finding is therefore not contestable if its only effect is
        to fail the job with the reason InitFailure.
        """
        return self.restart.counted or bool(self.fails and self.fails != Cause.INIT_FAILURE)


@dataclass(frozen=True)
class Attributed:
    """The outcome of `attribute`."""

    restarts: tuple[Restart, ...]
    """The restarts to record, in this order. Each of them is marked as a cause or a consequence,
    and has the number of its round."""
    causes: tuple[Finding, ...]
    """The findings that are not consequences. Only a cause may fail the job."""
    seen_round: int
    """The latest round with a break that an incident has explained. Later incidents are not
    merged into that break."""
    idle: tuple[Restart, ...] = ()
    """Ends of idle spares. They do not restart the group and are not recorded."""


@dataclass
class _Break:
    """A break that this reconcile has found. The first of its findings is its cause."""

    findings: list[Finding]
    incident: bool
    """Whether an incident already belongs to this break. No break has more than one incident."""


def attribute(
    status: JobStatus, ends: Sequence[Finding], incidents: Sequence[Finding], lost: Sequence[tuple[str, datetime]]
) -> Attributed:
    """Merge the findings of one reconcile into breaks, each with one cause.

    The function is pure and records nothing. `status` holds the breaks of earlier reconciles
    (`restarts.recent`, `restarts.seen_round`, `round`). `ends` are the ends of pods since then, in
    any order. `incidents` are the coordinator's incidents, in the order of their numbers. `lost`
    lists the incidents that do not name a cause, each as a pod and a time. The end of that pod
    explains the incident.

    1. An end that would count or fail the job joins the last recorded break if its pod was created
       before that break. The group must also still be down because of the break, or the end must be
       within SAME_BREAK of the break. All other ends form one new break. If any of these ends does
       not count, it is the cause of the new break. If all of them count, the earliest is the cause.
    2. The first incident within SAME_BREAK of the new break joins this break. If the ends are
       ordinary failures of a worker, the incident is the cause. If an end is an eviction, a
       deletion or a lack of memory, the incident is a consequence of that end. But an incident that
       is clearly earlier than such an end is a separate break.
    3. An incident within SAME_BREAK of the last recorded break is a consequence of that break if no
       earlier incident has explained it. Every other incident is a separate break.

    New breaks are numbered from `status.round + 1`. Consequences get the round of their cause and
    never count. Uncounted ends of idle pods are not restarts, have no round and explain nothing.
    """
    idle = [end for end in ends if end.idle and not end.contestable]
    ends = [end for end in ends if end not in idle]
    last = _last_break(status)
    absorbed = [end for end in ends if last is not None and end.contestable and _belongs(end, last, status)]
    own = sorted((end for end in ends if end not in absorbed), key=lambda f: (f.contestable, f.restart.time))
    here = _Break(own, incident=False) if own else None
    seen = status.restarts.seen_round
    late: list[Finding] = []
    breaks: list[_Break] = []
    losses = sorted(lost, key=lambda loss: loss[1])

    def explain_losses(until: datetime = _EVER) -> None:
        """Mark every break that includes a loss up to this time as explained by an incident.

        Later losses are handled after the incidents that precede them. A coordinator that has just
        started may report a failure first, and then a loss that belongs to the same break.
        """
        nonlocal seen
        while losses and losses[0][1] <= until:
            pod, time = losses.pop(0)
            if here is not None and _explained_by(here, pod, time):
                here.incident = True
            elif last is not None and (last.pod == pod or abs(time - last.time) <= SAME_BREAK):
                seen = max(seen, last.round)

    for incident in incidents:
        explain_losses(incident.restart.time)
        if incident.restart.reason == Cause.JOINED and _scaling(status):
            continue  # The operator already recorded this restart when spec.nodes changed.
        if here is not None and not here.incident and _close(incident, here):
            here.incident = True
            if not _join(incident, here):
                breaks.append(_Break([incident], incident=True))
        elif (
            last is not None
            and seen < last.round
            and incident.contestable
            and abs(incident.restart.time - last.time) <= SAME_BREAK
        ):
            seen = last.round
            late.append(incident)
        else:
            breaks.append(_Break([incident], incident=True))
    explain_losses()
    if here is not None:
        breaks.append(here)
    found = _recorded(status, last, [*absorbed, *late], breaks, seen)
    return replace(found, causes=(*idle, *found.causes), idle=tuple(end.restart for end in idle))


def _scaling(status: JobStatus) -> bool:
    """Whether the group is down because of a change to spec.nodes."""
    recent = status.restarts.recent
    return bool(recent) and recent[-1].reason == Cause.SCALED and status.holds(ConditionType.RESTARTING)


def _last_break(status: JobStatus) -> Restart | None:
    breaks = (
        r for r in reversed(status.restarts.recent) if r.round and not r.consequence and r.reason not in _NO_BREAKS
    )
    return next(breaks, None)


def _belongs(end: Finding, last: Restart, status: JobStatus) -> bool:
    """Whether a pod may have ended because of the last recorded break."""
    if end.made_in is None or end.made_in >= last.round:
        return False
    still_broken = last.seconds is None and status.holds(ConditionType.RESTARTING)
    return still_broken or abs(end.restart.time - last.time) <= SAME_BREAK


def _explained_by(here: _Break, pod: str, time: datetime) -> bool:
    return any(f.restart.pod == pod or abs(time - f.restart.time) <= SAME_BREAK for f in here.findings)


def _close(incident: Finding, here: _Break) -> bool:
    return any(abs(incident.restart.time - f.restart.time) <= SAME_BREAK for f in here.findings)


def _join(incident: Finding, here: _Break) -> bool:
    """Add an incident, as the cause or a consequence, to a break that began with ends of pods.

    Return False if the incident is a separate, earlier break.
    """
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


def _recorded(
    status: JobStatus, last: Restart | None, late: list[Finding], breaks: list[_Break], seen: int
) -> Attributed:
    """Number the new breaks, and return their restarts together with the consequences of `last`.

    `late` contains the findings that are consequences of `last`.
    """
    assert last is not None or not late, "a consequence must have a break that caused it"
    restarts = [_consequence(f, last) for f in late if last is not None]
    causes = []
    for number, broken in enumerate(breaks, start=status.round + 1):
        cause = replace(broken.findings[0].restart, round=number)
        causes.append(broken.findings[0])
        restarts.append(cause)
        for finding in broken.findings[1:]:
            if finding.contestable:
                restarts.append(_consequence(finding, cause))
            else:
                restarts.append(replace(finding.restart, round=number))
                causes.append(finding)
        seen = number if broken.incident else seen
    return Attributed(tuple(restarts), tuple(causes), seen)


def _consequence(finding: Finding, cause: Restart) -> Restart:
    first, newline, rest = finding.restart.message.partition("\n")
    where = f" of pod {cause.pod}" if names_pod(cause) and cause.pod != finding.restart.pod else ""
    message = f"{first} (a consequence of {cause.reason}{where}){newline}{rest}"
    return replace(finding.restart, counted=False, consequence=True, round=cause.round, message=message)
