"""The third stage of `follow`, which records and counts restarts in the status, and remembers hosts
to avoid.

The status is written before any pod is replaced, so a restart is counted exactly once even if the
operator dies in between. The attributed restarts are recorded first. Then this stage adds:

- an entry for each pod that is alive but has a broken device or host, because such a pod is
  replaced (`judge_failing`). The entry is a consequence of the failure that revealed the fault.
- a separate restart for a lost coordinator. In Fast mode the group continues to train without a
  coordinator, so the loss neither counts nor breaks the group.
- hosts that have become suspect, to the list of hosts that new pods avoid.

Example: rank 3's worker fails for the second time in a row, in pod train-3-0.

    WorkerFailed, rank 3       does not count, because the first failure on this host was counted
    PodUnhealthy, train-3-0    a consequence; the pod is replaced, and its host is avoided

Why: docs/decisions/0002.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpjob.api.job_status import JobStatus, Restart
from ddpjob.core.failures.avoided_nodes import FAULTS, RECENT, find_avoided_nodes
from ddpjob.core.failures.classify import Cause, with_traceback
from ddpjob.core.failures.node_health import MOVE_CAUSES, judge_failing
from ddpjob.core.failures.policy import evaluate_rules
from ddpjob.core.follow.attribution import Attribution
from ddpjob.core.follow.ends import Ended, Ends
from ddpjob.core.plan.slots import can_replace
from ddpjob.core.view import View


@dataclass(frozen=True)
class Recorded:
    """The restarts that follow from an attribution, and the view that records them."""

    attribution: Attribution
    view: View
    slots: dict[int, Ended]
    """The pods to replace, by slot index: ended pods, and living pods that have failed."""
    restarts: tuple[Restart, ...]

    @property
    def coordinator(self) -> Ended | None:
        """How the coordinator has ended; None if it has not ended."""
        return self.attribution.ends.coordinator


def record_restarts(attribution: Attribution) -> Recorded:
    """Record and count the restarts that result from the attribution.

    Pods are replaced only after this stage, so the pods that prove these restarts still exist.
    """
    ends, merged = attribution.ends, attribution.merged
    view, coordinator = ends.view, ends.coordinator
    fatal = attribution.fatal is not None
    slots, restarts = (ends.slots, list(merged.restarts)) if fatal else _replace_failing(ends, list(merged.restarts))
    status = record(view.status, restarts)
    view, faults = attribution.with_seen(view.with_status(status)), merged.idle
    if coordinator is not None:
        restart = _coordinator_restart(view, coordinator)
        if coordinator.pod is not None and coordinator.pod.name in {ended.name for ended in slots.values()}:
            # With Master placement, this pod contained the coordinator, and the end of the pod has
            # already been counted.
            restart = replace(restart, counted=False)
        restarts.append(restart)
        view = view.with_status(record(view.status, [restart]))
        if coordinator.end.cause in FAULTS:
            faults = (*faults, replace(restart, reason=coordinator.end.cause))
    if not view.world.one_host:
        hosts = find_avoided_nodes(view.status, view.now, trained=view.trained, faults=faults)
        view = view.with_status(replace(view.status, avoided_nodes=hosts))
    return Recorded(attribution, view, slots, tuple(restarts))


def _replace_failing(ends: Ends, restarts: list[Restart]) -> tuple[dict[int, Ended], list[Restart]]:
    """Return the ends and the restarts, with an entry in both for each living pod to be replaced.

    If the restarts exceed the budget, the job fails, so no living pod is added.
    """
    view = ends.view
    failing = {f.number: f for f in judge_failing(view, restarts) if f.index not in ends.slots}
    # A pod that is already leaving may fail again before it is gone. The second failure does not
    # count.
    leaving = {r.pod: -1 for r in view.status.restarts.recent if r.reason in MOVE_CAUSES}
    leaving |= {f.failure.pod: number for number, f in failing.items()}
    restarts = [replace(r, counted=False) if n > leaving.get(r.pod, n) else r for n, r in enumerate(restarts)]
    recorded = [failing[n].failure if n in failing else restart for n, restart in enumerate(restarts)]
    counted = view.status.restarts.counted + sum(restart.counted for restart in recorded)
    if counted > view.job.spec.recovery.max_restarts:
        return ends.slots, restarts
    moving = dict[int, Ended]()
    for each in failing.values():
        end, failure = each.end, each.failure
        moved = replace(failure, reason=end.cause, message=end.message, counted=False, consequence=True)
        recorded.append(replace(moved, rank=None))
        moving[each.index] = Ended(end, view.pods[each.index], failure.pod)
    return ends.slots | moving, recorded


def _coordinator_restart(view: View, ended: Ended) -> Restart:
    """Return the restart for a lost coordinator.

    In Fast mode, training continues without a coordinator, so the loss does not begin a round. The
    exception is a coordinator that cannot be replaced alone because the pods need a new generation.
    """
    end, fast = ended.end, view.job.spec.fast and can_replace(view)
    ruled = evaluate_rules(view.job.spec, end.cause, end.exit_code, trained=True)
    return Restart(
        time=view.now,
        pod=ended.name,
        reason=Cause.COORDINATOR_LOST,
        node=ended.pod.host if ended.pod else "",
        message=with_traceback(f"the coordinator was lost: {end.message}", end.traceback),
        counted=ruled.counted and not fast,
        round=0 if fast else view.status.round + 1,
        seconds=0.0 if fast else None,
    )


def without_restart(view: View, before: JobStatus) -> View:
    """Return a failed job's view, without restarts for the latest failures.

    The failures stay listed, and counted failures stay counted. Only the round and the total
    numbers of restarts are as they were before these failures.
    """
    old = before.restarts
    counts = replace(view.status.restarts, uncounted=old.uncounted, total=old.total)
    return view.with_status(replace(view.status, round=before.round, restarts=counts))


def record(status: JobStatus, restarts: list[Restart]) -> JobStatus:
    """Return the status with these restarts counted and listed, and with the latest round."""
    if not restarts:
        return status
    counted = [r for r in restarts if r.counted]
    old = status.restarts
    counts = replace(
        old,
        counted=old.counted + len(counted),
        uncounted=old.uncounted + len(restarts) - len(counted),
        total=old.total + len(restarts),
        last_counted=max([r.time for r in counted], default=old.last_counted),
        recent=(*old.recent, *restarts)[-RECENT:],
    )
    return replace(status, restarts=counts, round=max([status.round, *(r.round for r in restarts)]))
