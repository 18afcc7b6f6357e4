"""Describes the present in the status: conditions, counts and progress, from pods and the
report.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from ddpjob_runtime.protocol import (
    COPY_BEHIND,
    COPY_STEP,
)

from ddpjob.api.job_status import ConditionType, JobStatus, Restart, SlotState
from ddpjob.core.failures.node_health import judge_nodes
from ddpjob.core.rank_order import judge_order
from ddpjob.core.status.conditions import with_condition, with_phase, without_condition
from ddpjob.core.status.group_counts import IN_GROUP, ready_spares, training_nodes
from ddpjob.core.status.messages import count
from ddpjob.core.status.restarting import fast_recovery, preflight_passed, restarting
from ddpjob.core.status.running import judge_running
from ddpjob.core.status.scheduled import scheduled
from ddpjob.core.status.shown_progress import shown_progress, shown_stragglers
from ddpjob.core.view import View, is_number
from ddpjob.core.volumes import has_claim

SURELY_TRAINED = timedelta(minutes=10)


def describe(view: View, restarts: tuple[Restart, ...], *, creating: bool) -> JobStatus:
    """The view's status with conditions, counts and progress as of now.

    `restarts` are those recorded in this reconcile. `creating`: something is missing and is about
    to be created.
    """
    job, now = view.job, view.now
    alive = [p for p in view.pods if p is not None and not p.ended and p.deleted_at is None]
    training = training_nodes(view)
    running_pods = sum(p.main.running for p in alive)
    finished = sum(s.state is SlotState.SUCCEEDED for s in view.status.slots)
    ready = max(0, training - finished) if training is not None else min(running_pods, job.spec.nodes)
    spare = min(ready_spares(view, training), max(0, running_pods - ready))
    status = replace(view.status, active=min(len(alive), job.spec.nodes), ready=ready, spare=spare)
    view = view.with_status(scheduled(view.with_status(status), alive, creating=creating))
    running, reason, message = judge_running(view, training, running_pods)
    view = view.with_status(with_condition(view.status, ConditionType.RUNNING, running, reason, message, now))
    whole = (
        running
        and reason not in ("CoordinatorUnreachable", "CoordinatorReplaced")
        and (training is None or training <= job.spec.nodes)
    )
    view = view.with_status(restarting(view, whole, [r for r in restarts if r.round]))
    view = view.with_status(preflight_passed(view, restarts, formed=view.status.holds(ConditionType.RUNNING)))
    status = _isolated(view.with_status(fast_recovery(view)))
    status = _nodes_healthy(view.with_status(status))
    status = _checkpoints_copied(view.with_status(status))
    status = _ranks_ordered(view.with_status(status), training)
    status = replace(
        status,
        trained=view.trained or _has_run_long(status, now),
        claim_made=status.claim_made or has_claim(job, view.world),
    )
    due = status.phase is not with_phase(status).phase
    return with_phase(
        replace(
            status,
            progress=shown_progress(
                status.progress, view.reported_progress, now, at_once=due, stragglers=shown_stragglers(view)
            ),
        )
    )


def _has_run_long(status: JobStatus, now: datetime) -> bool:
    """Whether the group has run for so long that steps must be assumed, although the program
    reports none.
    """
    running = status.condition(ConditionType.RUNNING)
    return running is not None and running.status and now - running.since >= SURELY_TRAINED


def _isolated(view: View) -> JobStatus:
    """What prevents the isolation that spec.network asks for; no condition where nothing does."""
    status, spec, world = view.status, view.job.spec, view.world
    condition = partial(with_condition, status, ConditionType.ISOLATED, now=view.now)

    if world.policy_refused:
        reached = "pods of other jobs can reach this job's pods; the operator tries again with the job's next pod"
        return condition(False, "PolicyRefused", f"NetworkPolicy {world.policy}: {world.policy_refused}; {reached}")
    if spec.network.isolate and spec.on_host_network:
        why = "no NetworkPolicy applies to the job's pods, because podTemplate.spec.hostNetwork is set"
        return condition(False, "HostNetwork", f"{why}; if this is intended, set spec.network.isolate to false")
    if not world.policy:
        return without_condition(status, ConditionType.ISOLATED)
    if world.has_policy and status.condition(ConditionType.ISOLATED) is not None:
        return condition(True, "PolicyExists", f"NetworkPolicy {world.policy}")
    return status


def _nodes_healthy(view: View) -> JobStatus:
    """Which pods stay on unhealthy Kubernetes nodes, and why; no condition where none ever did."""
    status = view.status
    staying = [verdict for verdict in judge_nodes(view) if verdict.reason]
    condition = partial(with_condition, status, ConditionType.NODES_HEALTHY, now=view.now)
    if staying:
        first, more = staying[0], len(staying) - 1
        others = f" (and {count(more, 'more pod')})" if more else ""
        return condition(False, first.reason, f"{first.end.message}; the pod stays: {first.why}{others}")
    if status.holds(ConditionType.NODES_HEALTHY) or status.condition(ConditionType.NODES_HEALTHY) is None:
        return status
    return condition(True, "AllHealthy", "no pod runs on a Kubernetes node that is known to be unhealthy")


def _ranks_ordered(view: View, training: int | None) -> JobStatus:
    """The order of the ranks of a group that trains, and whether it is that of spec.rankOrder."""
    status, report, wanted = view.status, view.report, view.job.spec.rank_order
    if not wanted:
        status = without_condition(status, ConditionType.RANKS_ORDERED)
    if training is None or report is None:
        return status
    ranked = sorted((m.rank, m.index, m.pod) for m in report.members if m.state in IN_GROUP and m.rank is not None)
    indices = tuple(index for _, index, _ in ranked)
    known = len(set(indices)) == len(indices) and all(status.slot(index) is not None for index in indices)
    status = replace(status, rank_order=indices if known and list(indices) != sorted(indices) else ())
    if not wanted:
        return status
    verdict = judge_order(view, report, [pod for _, _, pod in ranked])
    return with_condition(status, ConditionType.RANKS_ORDERED, *verdict, view.now)


COPIES_BEHIND, NO_COPIES = "CopiesBehind", "NoCopies"
BEHIND_SECONDS = 600
FIRST_COPY = timedelta(minutes=30)
"""Time without a restart after which a job has saved something, if it copies at all."""


def _checkpoints_copied(view: View) -> JobStatus:
    """Whether checkpoints reach the bucket, by what the script reports; no condition where they
    always did.
    """
    status, url = view.status, view.job.spec.storage.url
    condition = partial(with_condition, status, ConditionType.CHECKPOINTS_COPIED, now=view.now)
    before = status.condition(ConditionType.CHECKPOINTS_COPIED)
    metrics = view.reported_progress.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    behind, step = metrics.get(COPY_BEHIND), metrics.get(COPY_STEP)
    where = url or "its bucket"
    if is_number(behind) and behind > BEHIND_SECONDS:
        newest = f"latest: step {step:.0f}" if is_number(step) else "none since this start"
        text = f"no checkpoint has reached {where} for more than 10 minutes ({newest}). Training continues, but losing"
        return condition(False, COPIES_BEHIND, f"{text} rank 0's pod would lose the work since then; see its log")
    running = status.condition(ConditionType.RUNNING)
    long = running is not None and running.status and view.now - running.since >= FIRST_COPY
    if url and behind is None and step is None and long:
        return condition(
            False,
            NO_COPIES,
            f"the program has reported no copy to {url} for more than 30 minutes. Checkpoints that exist only in its "
            f"folder are lost with the pod; call ddpjob_report.restore_checkpoint and copy_checkpoint, or use a claim",
        )
    if before is None or before.status or (behind is None and step is None):
        return status
    return condition(True, "Copied", f"checkpoints reach {where}")
