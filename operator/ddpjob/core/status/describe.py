"""Describes a job's current state in its status, from its pods and the coordinator's report.

Each condition has one function (`CONDITIONS`), which sees the conditions that were judged before
it. Two rules apply to all of them:

- Messages are stable. A message that changed at each reconcile would be written each time, and each
  write causes the next reconcile. So messages name times, not durations, and omit figures that
  fluctuate.
- Conditions about rare problems, such as NodesHealthy, are absent until the problem first occurs.
  Afterwards they stay and become true, so that users see that the problem is over.

Example of a pod on an unhealthy Kubernetes node, with no place to go:

    before the fault     there is no NodesHealthy condition
    after 60 s           NodesHealthy is false: NoOtherNode, with the node and the reason
    after the repair     NodesHealthy is true: AllHealthy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from ddpjob_runtime.protocol import COPY_BEHIND, COPY_STEP

from ddpjob.api.job_status import ConditionType, JobStatus, Restart, SlotState
from ddpjob.core.failures.classify import Cause
from ddpjob.core.failures.node_health import judge_nodes
from ddpjob.core.failures.slow_ranks import is_named, judge_slow_ranks
from ddpjob.core.rank_order import judge_order
from ddpjob.core.status.conditions import with_condition, with_phase, without_condition
from ddpjob.core.status.group_counts import IN_GROUP, count_ready_spares, count_training_nodes
from ddpjob.core.status.messages import count
from ddpjob.core.status.repeated import count_repeats, judge_snapshots
from ddpjob.core.status.restarting import judge_fast_recovery, judge_preflight, judge_restarting
from ddpjob.core.status.running import judge_running
from ddpjob.core.status.scheduled import judge_scheduled
from ddpjob.core.status.shown_progress import show_progress, show_stragglers
from ddpjob.core.view import View, is_number
from ddpjob.core.volumes import has_claim
from ddpjob.core.world import PodView

SURELY_TRAINED = timedelta(minutes=10)


@dataclass(frozen=True)
class Present:
    """The current state of a job while its conditions are judged.

    The view's status contains the conditions judged so far.
    """

    view: View
    restarts: tuple[Restart, ...]
    """Restarts that were recorded in this reconcile."""
    creating: bool
    """Whether missing objects are about to be created."""
    alive: list[PodView]
    running_pods: int
    training: int | None
    """Number of nodes that train as one group, according to the report; None if unknown."""


CONDITIONS: tuple[Callable[[Present], JobStatus], ...] = (
    lambda present: judge_scheduled(present.view, present.alive, creating=present.creating),
    lambda present: _running(present),
    lambda present: count_repeats(present.view),
    lambda present: _restarting(present),
    lambda present: judge_preflight(
        present.view, present.restarts, formed=present.view.status.holds(ConditionType.RUNNING)
    ),
    lambda present: judge_fast_recovery(present.view),
    lambda present: _isolated(present.view),
    lambda present: _nodes_healthy(present.view),
    lambda present: _ranks_keep_pace(present.view),
    lambda present: _checkpoints_copied(present.view),
    lambda present: judge_snapshots(present.view),
    lambda present: _ranks_ordered(present.view, present.training),
)
"""Functions that judge the conditions, in order. Restarting and all later conditions depend on
Running."""


def describe(view: View, restarts: tuple[Restart, ...], *, creating: bool) -> JobStatus:
    """Return the view's status with its current conditions, counts and progress."""
    present = _count(view, restarts, creating=creating)
    for judge in CONDITIONS:
        present = replace(present, view=present.view.with_status(judge(present)))
    view, status, now = present.view, present.view.status, present.view.now
    trained = view.trained or _has_run_long(status, now)
    status = replace(status, trained=trained, claim_made=status.claim_made or has_claim(view.job, view.world))
    due, stragglers = status.phase is not with_phase(status).phase, show_stragglers(view)
    progress = show_progress(status.progress, view.reported_progress, now, at_once=due, stragglers=stragglers)
    return with_phase(replace(status, progress=progress))


def _count(view: View, restarts: tuple[Restart, ...], *, creating: bool) -> Present:
    nodes, training = view.job.spec.nodes, count_training_nodes(view)
    alive = [p for p in view.pods if p is not None and not p.ended and p.deleted_at is None]
    running_pods = sum(p.main.running for p in alive)
    finished = sum(s.state is SlotState.SUCCEEDED for s in view.status.slots)
    ready = max(0, min(training, nodes) - finished) if training is not None else min(running_pods, nodes)
    spare = min(count_ready_spares(view, training), max(0, running_pods - ready))
    status = replace(view.status, active=min(len(alive), nodes), ready=ready, spare=spare)
    return Present(view.with_status(status), restarts, creating, alive, running_pods, training)


def _running(present: Present) -> JobStatus:
    view = present.view
    running, reason, message = judge_running(view, present.training, present.running_pods)
    return with_condition(view.status, ConditionType.RUNNING, running, reason, message, view.now)


def _restarting(present: Present) -> JobStatus:
    view, training = present.view, present.training
    running = view.status.condition(ConditionType.RUNNING)
    whole = (
        running is not None
        and running.status
        and running.reason not in ("CoordinatorUnreachable", "CoordinatorReplaced")
        and (training is None or training <= view.job.spec.nodes)
    )
    return judge_restarting(view, whole, [r for r in present.restarts if r.round])


def _has_run_long(status: JobStatus, now: datetime) -> bool:
    """Whether the group has run so long that it must have taken steps, reported or not."""
    running = status.condition(ConditionType.RUNNING)
    return running is not None and running.status and now - running.since >= SURELY_TRAINED


def _isolated(view: View) -> JobStatus:
    """Show in the Isolated condition whether the NetworkPolicy keeps other jobs' pods out."""
    status, spec, world = view.status, view.job.spec, view.world
    condition = partial(with_condition, status, ConditionType.ISOLATED, now=view.now)

    if world.policy_refused:
        reached = (
            "pods of other jobs can reach this job's pods; the operator retries when it creates the job's next pod"
        )
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
    """Explain in the NodesHealthy condition why a pod stays on an unhealthy Kubernetes node.

    The condition is absent until a pod first stays on such a node.
    """
    status = view.status
    staying = [verdict for verdict in judge_nodes(view) if verdict.reason]
    condition = partial(with_condition, status, ConditionType.NODES_HEALTHY, now=view.now)
    if staying:
        first = staying[0]
        message = f"{first.end.message}; the pod stays: {first.why}{_and_more(staying, 'pod')}"
        return condition(False, first.reason, message)
    if status.holds(ConditionType.NODES_HEALTHY) or status.condition(ConditionType.NODES_HEALTHY) is None:
        return status
    return condition(True, "AllHealthy", "no pod runs on a Kubernetes node that is known to be unhealthy")


def _ranks_keep_pace(view: View) -> JobStatus:
    """Explain in the RanksKeepPace condition why a clearly slow rank is not moved.

    The condition is absent until the operator first decides not to move such a rank.
    """
    status = view.status
    staying = [verdict for verdict in judge_slow_ranks(view) if verdict.why]
    condition = partial(with_condition, status, ConditionType.RANKS_KEEP_PACE, now=view.now)
    if staying:
        first = staying[0]
        message = f"{first.what}; its pod stays: {first.why}{_and_more(staying, 'rank')}"
        return condition(False, Cause.SLOW_RANK, message)
    known = status.condition(ConditionType.RANKS_KEEP_PACE)
    if known is None or known.status or is_named(view):
        return status
    return condition(True, "AllKeepPace", "no rank is known to be clearly slower than the others")


def _and_more(verdicts: Sequence[object], noun: str) -> str:
    """Return ` (and 2 more pods)` for verdicts after the first; empty if there is only one."""
    return f" (and {count(len(verdicts) - 1, f'more {noun}')})" if len(verdicts) > 1 else ""


def _ranks_ordered(view: View, training: int | None) -> JobStatus:
    """Show in the RanksOrdered condition whether ranks follow spec.rankOrder.

    The order of the group's ranks is also recorded in the status.
    """
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
"""How long a group may run without reporting that a checkpoint has been copied to the job's bucket.
After this time, CheckpointsCopied becomes false."""


def _checkpoints_copied(view: View) -> JobStatus:
    """Show in the CheckpointsCopied condition whether checkpoints reach the bucket.

    The condition is absent until a checkpoint fails to reach the bucket.
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
        return condition(
            False, COPIES_BEHIND, f"{text} rank 0's pod would lose the work since then; see that pod's log"
        )
    running = status.condition(ConditionType.RUNNING)
    long = running is not None and running.status and view.now - running.since >= FIRST_COPY
    if url and behind is None and step is None and long:
        return condition(
            False,
            NO_COPIES,
            f"the program has reported no copy to {url} for more than 30 minutes. Checkpoints that exist only in the "
            "pod's folder are lost with the pod; call ddpjob_report.restore_checkpoint and copy_checkpoint, or use a "
            "claim",
        )
    if before is None or before.status or (behind is None and step is None):
        return status
    return condition(True, "Copied", f"checkpoints reach {where}")
