"""Reads the coordinator's incidents that were not looked at before into findings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob.api.types import DDPJob, JobStatus, Restart
from ddpjob.core.attribution import Finding
from ddpjob.core.classify import Cause
from ddpjob.core.progress import trained
from ddpjob.core.rules import ruling, shell_code
from ddpjob.core.texts import with_traceback
from ddpjob.core.world import Incident, Report, World

_CAUSES = {
    "WorkerFailed": Cause.WORKER_FAILED,
    "OOMKilled": Cause.OOM_KILLED,
    "Hang": Cause.HANG,
    "InitFailure": Cause.INIT_FAILURE,
    "Joined": Cause.JOINED,
}
"""The other kinds, PeerLost and Left, show in the pods."""


@dataclass(frozen=True)
class News:
    """New incidents: those that are causes by themselves, those that pods' ends explain (pod, time), the number of the last."""

    findings: tuple[Finding, ...] = ()
    lost: tuple[tuple[str, datetime], ...] = ()
    last: int = 0


def present_report(status: JobStatus, world: World) -> Report | None:
    """The report, if it is of the present generation."""
    report = world.report
    return report if report is not None and report.generation == status.rendezvous.generation else None


def news(job: DDPJob, status: JobStatus, world: World) -> News:
    """What the report tells beyond what the status has seen."""
    report = present_report(status, world)
    seen = status.restarts.seen_incident if status.restarts.seen_generation == status.rendezvous.generation else 0
    if report is None:
        return News(last=seen)
    fresh = sorted((i for i in report.incidents if i.id > seen), key=lambda i: i.id)
    return News(
        findings=tuple(_finding(job, status, i, world) for i in fresh if i.kind in _CAUSES),
        lost=tuple((i.pod, i.time) for i in fresh if i.kind not in _CAUSES),
        last=max((i.id for i in fresh), default=seen),
    )


def seen(status: JobStatus, news: News, seen_round: int) -> JobStatus:
    """The status that knows these incidents."""
    generation = status.rendezvous.generation
    return replace(status, restarts=replace(status.restarts, seen_generation=generation, seen_incident=news.last, seen_round=seen_round))


def _finding(job: DDPJob, status: JobStatus, incident: Incident, world: World) -> Finding:
    cause = _CAUSES[incident.kind]
    code = shell_code(incident.exit_code, incident.signal)
    ruled = ruling(job.spec, cause, code, trained=trained(status.progress, world))
    first, _, rest = _summary(cause, incident).rstrip(": ").partition("\n")
    if incident.backoff_seconds:
        first += f"; waits {incident.backoff_seconds:g} s"
    restart = Restart(
        time=incident.time,
        pod=incident.pod or job.name,
        index=incident.index,
        node=status.slots[incident.index].node if 0 <= incident.index < len(status.slots) else "",
        rank=incident.rank,
        reason=cause,
        message=with_traceback(first + (f"\n{rest}" if rest else ""), incident.traceback),
        counted=ruled.counted,
    )
    return Finding(restart, fails=ruled.fails, why=ruled.why, exit_code=code)


def _summary(cause: Cause, incident: Incident) -> str:
    if cause is Cause.WORKER_FAILED:
        how = f"signal {incident.signal}" if incident.signal else f"exit code {incident.exit_code}"
        return f"rank {incident.rank} in pod {incident.pod} ended with {how}: {incident.message}"
    if cause is Cause.OOM_KILLED:
        what = "was killed: the container used more memory than spec.resources.limits.memory allows"
        return f"rank {incident.rank} in pod {incident.pod} {what}: {incident.message}"
    if cause is Cause.INIT_FAILURE:
        return f"the entry point of pod {incident.pod} cannot start: {incident.message}"
    return incident.message or f"{incident.kind} in pod {incident.pod}"
