"""Counts the nodes of a job that train together, and its ready spares."""

from __future__ import annotations

from ddpjob_runtime.protocol import CoordinatorState, MemberState

from ddpjob.core.view import View

FORMED = (CoordinatorState.RUNNING, CoordinatorState.SUCCEEDED)
IN_GROUP = (MemberState.RUNNING, MemberState.FINISHED)


def count_training_nodes(view: View) -> int | None:
    """Return the number of nodes that train as one group; None if unknown or if no group trains.

    The coordinator's report is used only while all pods of the reported group are alive. Otherwise
    the report is older than the loss of a pod.
    """
    report = view.report
    if not view.job.spec.under_torchrun or report is None or report.state not in FORMED:
        return None
    alive = {p.name for p in view.pods if p is not None and (p.succeeded or (p.main.running and not p.ended))}
    members = [m.pod for m in report.members if m.state in IN_GROUP]
    if report.world is None or len(members) < report.world or not set(members) <= alive:
        return None
    return report.world


def count_ready_spares(view: View, training: int | None) -> int:
    """Return the number of spares that can take over immediately.

    A running pod counts only once its launcher has started. Without a report, the last known number
    is kept.
    """
    report = view.report
    if report is None:
        return view.status.spare
    running = {p.name for p in view.pods if p is not None and p.main.running and not p.ended}
    ready = sum(m.state is MemberState.READY and m.pod in running for m in report.members)
    return ready if training is not None else max(0, ready - view.job.spec.nodes)
