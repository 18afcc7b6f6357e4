"""Turns incidents that no reconcile has evaluated yet into findings about the cause of a break.

The coordinator numbers its incidents, and each report repeats the latest ones. The status remembers
the generation, and the number of the last incident that was evaluated. Every incident is therefore
evaluated only once, even if the operator is replaced in between.

- An incident that names its cause, such as a failed worker or a hang, becomes a finding. The rules
  decide whether it counts.
- PeerLost and Left only show that a pod is gone. The cause is known from the pod's own end. Only
  the pod and the time of such an incident are kept, because `merge_causes` needs them to find that
  end.
- If the lost pod reconnects and the group runs again, no pod has ended. This module then reports
  the break, which does not count, because nothing else would report it.

Example: the status has seen incident 4 of this generation.

    the report has 4 WorkerFailed, 5 PeerLost of train-1-0     lost: train-1-0; last: 5
    the next report has 4, 5 and 6 WorkerFailed of rank 3      a finding for rank 3; last: 6
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob_runtime.protocol import CoordinatorState, Incident, IncidentKind

from ddpjob.api.job_status import JobStatus, Restart
from ddpjob.core.failures.classify import (
    Cause,
    describe_ranks,
    if_shared_memory_full,
    memory_limit,
    with_traceback,
)
from ddpjob.core.failures.merge_causes import SAME_BREAK, Finding
from ddpjob.core.failures.policy import evaluate_rules, shell_code
from ddpjob.core.view import View

_CAUSES = {
    IncidentKind.WORKER_FAILED: Cause.WORKER_FAILED,
    IncidentKind.OOM_KILLED: Cause.OOM_KILLED,
    IncidentKind.HANG: Cause.HANG,
    IncidentKind.INIT_FAILURE: Cause.INIT_FAILURE,
    IncidentKind.JOINED: Cause.JOINED,
}
"""The cause for each kind of incident that has one. The other kinds are PeerLost and Left."""


@dataclass(frozen=True)
class NewIncidents:
    """The coordinator's incidents that no earlier reconcile has evaluated."""

    findings: tuple[Finding, ...] = ()
    """The incidents that name a cause, in the order of their numbers."""
    lost: tuple[tuple[str, datetime], ...] = ()
    """The pod and the time of each incident that does not name a cause. The cause is known from the
    end of the pod."""
    last: int = 0
    """Number of the latest incident that has been evaluated."""


def find_new_incidents(view: View) -> NewIncidents:
    """Return the incidents in the coordinator's report that no reconcile has evaluated yet."""
    restarts = view.status.restarts
    seen = restarts.seen_incident if restarts.seen_generation == view.status.rendezvous.generation else 0
    if view.report is None:
        return NewIncidents(last=seen)
    fresh = sorted((i for i in view.report.incidents if i.id > seen), key=lambda i: i.id)
    found = [_finding(view, i) for i in fresh if i.kind in _CAUSES]
    return NewIncidents(
        findings=tuple(found if found else _came_back(view)),
        lost=tuple((i.pod or "", i.time) for i in fresh if i.kind not in _CAUSES),
        last=max((i.id for i in fresh), default=seen),
    )


def _came_back(view: View) -> list[Finding]:
    """Return a finding if the group lost a pod that then reconnected, and the group runs again.

    No pod has ended and no other incident names a cause, so nothing else would record this break.
    """
    report, recent = view.report, view.status.restarts.recent
    if report is None or report.state != CoordinatorState.RUNNING or not report.incidents:
        return []
    last = max(report.incidents, key=lambda i: i.id)
    if last.kind != IncidentKind.PEER_LOST or last.pod not in {member.pod for member in report.members}:
        return []
    if any(restart.time >= last.time - SAME_BREAK for restart in recent):
        return []
    message = f"the group lost pod {last.pod}, which then reconnected: {last.message}"
    return [Finding(_restart(view, last, Cause.PEER_LOST, message, counted=False))]


def with_seen(status: JobStatus, new: NewIncidents, seen_round: int) -> JobStatus:
    """Return the status with these incidents marked as evaluated.

    `seen_round` comes from `Attributed`.
    """
    generation = status.rendezvous.generation
    return replace(
        status,
        restarts=replace(status.restarts, seen_generation=generation, seen_incident=new.last, seen_round=seen_round),
    )


def _finding(view: View, incident: Incident) -> Finding:
    cause = _CAUSES[incident.kind]
    code = shell_code(incident.exit_code, incident.signal)
    ruled = evaluate_rules(view.job.spec, cause, code, trained=view.trained)
    first, _, rest = _summary(cause, incident, view).rstrip(": ").partition("\n")
    if incident.backoff_seconds:
        first += f"; waits {incident.backoff_seconds:g} s"
    message = with_traceback(first + (f"\n{rest}" if rest else ""), incident.traceback)
    restart = _restart(view, incident, cause, message, counted=ruled.counted)
    return Finding(restart, fails=ruled.fails, why=ruled.why, exit_code=code)


def _restart(view: View, incident: Incident, cause: Cause, message: str, *, counted: bool) -> Restart:
    slot = view.status.slot(incident.index)  # This is None for an incident of the whole group, such as a hang.
    return Restart(
        time=incident.time,
        pod=incident.pod or view.job.name,
        index=incident.index,
        node=slot.node if slot is not None else "",
        rank=incident.rank,
        reason=cause,
        message=message,
        counted=counted,
        everywhere=_is_everywhere(view, incident),
    )


def _is_everywhere(view: View, incident: Incident) -> bool:
    """Whether ranks of several pods have failed in the same way.

    If the job has only one node, several of its ranks are enough.
    """
    spec = view.job.spec
    ranks = spec.nodes * spec.procs_per_node
    return incident.alike_pods >= min(2, spec.nodes) and incident.alike_ranks >= min(2, ranks)


def _summary(cause: Cause, incident: Incident, view: View) -> str:
    procs = view.job.spec.procs_per_node
    if incident.group_rank is not None:
        ranks = describe_ranks(incident.group_rank, procs)
        return f"{ranks} in pod {incident.pod} ended with exit code 0 before the other ranks"
    if incident.rank is None and cause is not Cause.INIT_FAILURE:
        return incident.message or f"{incident.kind} in pod {incident.pod}"
    if cause is Cause.WORKER_FAILED:
        # The signal's name, or "signal N" if the system has no name for it.
        name = (incident.signal or "").removeprefix("signal ")
        how = f"signal {name}" if name else f"exit code {incident.exit_code}"
        said = incident.message.removeprefix(f"ended with {how}").removeprefix(f"killed by {how}")
        between = ": " if said == incident.message else ""
        remedy = if_shared_memory_full(said, name)
        return f"rank {incident.rank} in pod {incident.pod} ended with {how}{between}{said}{remedy}"
    if cause is Cause.OOM_KILLED:
        limit = memory_limit(next((pod for pod in view.pods if pod and pod.name == incident.pod), None))
        what = f"was killed: the container used more memory than {limit}"
        return f"rank {incident.rank} in pod {incident.pod} {what}: {incident.message}"
    if cause is Cause.INIT_FAILURE:
        return f"the entry point of pod {incident.pod} cannot start: {incident.message}"
    return incident.message or f"{incident.kind} in pod {incident.pod}"
