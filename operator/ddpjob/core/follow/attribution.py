"""Second stage: attribute ended pods and the coordinator's new incidents to breaks.

Each break has one cause. Everything else in it is a consequence, which never counts. The rules are
in `failures.merge_causes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ddpjob_runtime.protocol import COMMUNICATION_ERROR, CoordinatorState, IncidentKind, MemberState

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Placement
from ddpjob.api.job_status import ConditionType, Restart, SlotState
from ddpjob.core.failures.classify import Cause, with_traceback
from ddpjob.core.failures.merge_causes import Attributed, Finding, attribute
from ddpjob.core.failures.new_incidents import NewIncidents, find_new_incidents, with_seen
from ddpjob.core.failures.policy import evaluate_rules
from ddpjob.core.follow.ends import Ended, Ends
from ddpjob.core.plan.slots import can_replace
from ddpjob.core.view import View
from ddpjob.core.world import Role

CAUSE_WAIT = timedelta(seconds=5)
"""How long a pod's end that looks like a consequence waits for the end of a different pod, because
torchrun needs a while to exit."""
_LOSSES = frozenset({IncidentKind.PEER_LOST, IncidentKind.LEFT})
"""What the coordinator reports about the end of a training pod."""


def awaits_cause(ends: Ends) -> bool:
    """Return whether a `command`'s ended pods have all lost a peer.

    The peer's own end may be seen soon.
    """
    if ends.view.job.spec.under_torchrun or not ends.slots:
        return False
    if all(slot.state is not SlotState.RUNNING for slot in ends.view.status.slots):
        return False
    return all(
        ended.end.rank is not None
        and ended.end.time is not None
        and abs(ends.view.now - ended.end.time) < CAUSE_WAIT
        and _is_of_peer(ended.end.message)
        for ended in ends.slots.values()
    )


@dataclass(frozen=True)
class Attribution:
    """The ends and new incidents, each classified as a cause or a consequence."""

    ends: Ends
    incidents: NewIncidents
    merged: Attributed

    @property
    def fatal(self) -> Finding | None:
        """The cause that fails the job."""
        return next((f for f in self.merged.causes if f.fails), None)

    def with_seen(self, view: View) -> View:
        """Return the view with these incidents marked as seen in its status."""
        return view.with_status(with_seen(view.status, self.incidents, self.merged.seen_round))


def attribute_ends(ends: Ends) -> Attribution:
    """Attribute ended pods, and incidents that no reconcile has seen yet."""
    view = ends.view
    incidents = find_new_incidents(view)
    findings = [_finding_of_end(view, index, ended, incidents) for index, ended in ends.slots.items()]
    merged = attribute(view.status, _one_for_command(view.job, findings), incidents.findings, incidents.lost)
    return Attribution(ends, incidents, merged)


def _finding_of_end(view: View, index: int, ended: Ended, new: NewIncidents) -> Finding:
    end, slot = ended.end, view.status.slots[index]
    of_program = not (end.before_program and end.cause is Cause.EXIT_CODE)
    ruled = evaluate_rules(view.job.spec, end.cause, end.exit_code, trained=view.trained or not of_program)
    restart = Restart(
        time=min(end.time or view.now, view.now),
        pod=ended.name,
        index=index,
        node=slot.node,
        rank=end.rank,
        reason=end.cause,
        message=with_traceback(end.message, end.traceback),
        counted=ruled.counted,
    )
    idle = _was_idle(view, index, ended, new)
    return Finding(restart, made_in=slot.round, fails=ruled.fails, why=ruled.why, exit_code=end.exit_code, idle=idle)


def _was_idle(view: View, index: int, ended: Ended, new: NewIncidents) -> bool:
    """Return whether the pod was a spare, so that the group's rendezvous does not need it.

    A spare's label changes a second after the spare takes over, so the coordinator's report takes
    precedence.
    """
    pod, report = ended.pod or view.world.last_of(ended.name), view.report
    if pod is None or pod.role is not Role.SPARE or report is None:
        return False
    if not can_replace(view) or (index == 0 and view.job.spec.rendezvous.placement is Placement.MASTER):
        return False
    if any(incident.pod == ended.name and incident.kind in _LOSSES for incident in report.incidents):
        return False
    if any(m.pod == ended.name and (m.state == MemberState.RUNNING or m.rank is not None) for m in report.members):
        return False
    if report.state == CoordinatorState.RESTARTING and not view.status.holds(ConditionType.RESTARTING):
        # After a worker's failure the same nodes restart, and spares do not take over.
        return not new.lost and all(finding.restart.reason != Cause.JOINED for finding in new.findings)
    return report.state == CoordinatorState.RUNNING


def _one_for_command(job: DDPJob, findings: list[Finding]) -> list[Finding]:
    """Return a single finding if nodes of a `command` end together.

    Their causes and consequences look alike. A disruption explains the failures of a pod's peers,
    so it takes precedence. The error of a rank whose peer is gone comes last.
    """
    if job.spec.under_torchrun:
        return findings
    return sorted(findings, key=lambda f: (f.contestable, _is_of_peer(f.restart.message), f.restart.time))[:1]


def _is_of_peer(message: str) -> bool:
    """Return whether a rank's error is one that a peer's death causes.

    Pod names may contain a backend's name, so they are ignored.
    """
    said = message.partition("\n")[0].partition(": ")[2]
    return COMMUNICATION_ERROR.search(said) is not None
