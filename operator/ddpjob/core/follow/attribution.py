"""The second stage of `follow`, which attributes ended pods and new incidents to a break of the
group.

Each break has one cause. All other failures in it are consequences, which never count. The rules
are in `failures.merge_causes`. This stage turns ends and incidents into findings for these rules.
The stage also handles two cases that the findings alone cannot show:

- The end of an idle spare does not break the group (`_was_idle`).
- A `command` has no coordinator that reports which rank failed first. If one node fails, all others
  soon fail as well, because they have lost a peer. If all errors so far are about a lost peer, the
  stage waits up to CAUSE_WAIT for that peer to end (`awaits_cause`). Then a single finding is kept:
  a disruption if there is one, otherwise the first error that is not about a lost peer.

Example of a `command` with 2 nodes:

    10:00:00  node 1 ends with "Connection closed by peer": wait for the cause
    10:00:02  node 0 ends with a KeyError: the restart's cause is the KeyError in node 0

Why: docs/decisions/0010.
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
"""How long to wait for the cause after an end that looks like a consequence. The cause may be
observed later than its consequence, because torchrun takes a while to exit."""
_LOSSES = frozenset({IncidentKind.PEER_LOST, IncidentKind.LEFT})
"""Kinds of incidents that report the end of a training pod."""


def awaits_cause(ends: Ends) -> bool:
    """Whether to wait for a cause, because all ended nodes of a `command` report a lost peer."""
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
    """The ends of pods and the new incidents, each classified as a cause or a consequence."""

    ends: Ends
    incidents: NewIncidents
    merged: Attributed

    @property
    def fatal(self) -> Finding | None:
        """The first cause that fails the job; None if no cause does."""
        return next((f for f in self.merged.causes if f.fails), None)

    def with_seen(self, view: View) -> View:
        """Return the view, with these incidents marked as seen in the status."""
        return view.with_status(with_seen(view.status, self.incidents, self.merged.seen_round))


def attribute_ends(ends: Ends) -> Attribution:
    """Merge the ends of pods and the new incidents into breaks, each with one cause."""
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
    """Whether the pod was an idle spare, so that its end does not break the group.

    A spare's label changes about a second after the spare takes over, so the coordinator's report
    takes precedence over the label.
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
        # After a worker's failure, the same nodes restart, and no spare takes over.
        return not new.lost and all(finding.restart.reason != Cause.JOINED for finding in new.findings)
    return report.state == CoordinatorState.RUNNING


def _one_for_command(job: DDPJob, findings: list[Finding]) -> list[Finding]:
    """Return the findings, reduced to the most likely cause if the job uses `command`.

    The nodes of a `command` end together. A disruption explains the failures of all peers, so it
    takes precedence. An error about a lost peer is chosen only if there is no other finding.
    """
    if job.spec.under_torchrun:
        return findings
    return sorted(findings, key=lambda f: (f.contestable, _is_of_peer(f.restart.message), f.restart.time))[:1]


def _is_of_peer(message: str) -> bool:
    """Whether a rank's error is typical of a lost peer.

    The pod's name is ignored, because it may contain a word such as "nccl".
    """
    said = message.partition("\n")[0].partition(": ")[2]
    return COMMUNICATION_ERROR.search(said) is not None
