"""Reconciles one job: observe, decide, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from ddpjob_runtime.protocol import escaped

from ddpjob.api.job_status import utc_now
from ddpjob.core.decide import decide
from ddpjob.core.decision import BLOCKED_POLL, Decision, Event
from ddpjob.core.status.messages import event_text
from ddpjob.engine.apply import apply
from ddpjob.engine.ports import (
    Cluster,
    Conflict,
    JobKey,
    NamespaceEnding,
    Observation,
    Refused,
    ReportPending,
    Unavailable,
)

log = logging.getLogger("ddpjob.reconcile")

# Seconds until the next reconcile after a conflict, after a new object's name was found taken, and
# after the API server could not be reached.
CONFLICT_RETRY = 0.05
NAME_RETRY = 1.0
UNAVAILABLE_RETRY = 2.0


async def reconcile(
    cluster: Cluster,
    key: JobKey,
    clock: Callable[[], datetime] = utc_now,
    outcome: Callable[[str], None] = lambda word: None,
) -> float | None:
    """Bring one job a step closer to its spec.

    Return the seconds until the next reconcile, or None to wait for a change. `outcome` is called
    with one word for the metrics: done, conflict or unavailable. An exception caused by a bug is
    recorded as an event on the job and raised again.
    """
    try:
        delay = await _reconcile(cluster, key, clock)
        outcome("done")
        return delay
    except Conflict:
        outcome("conflict")
        return CONFLICT_RETRY
    except (NamespaceEnding, ReportPending) as later:
        outcome("done")
        log.debug("%s/%s: %s", key.namespace, key.name, later)
        return later.retry_after
    except Unavailable as error:
        outcome("unavailable")
        log.warning("%s/%s: the API server is unavailable: %s", key.namespace, key.name, error)
        return error.retry_after or UNAVAILABLE_RETRY


async def _reconcile(cluster: Cluster, key: JobKey, clock: Callable[[], datetime]) -> float | None:
    seen = await cluster.observe(key)
    if seen is None:
        return None
    try:
        return await _act(cluster, seen, clock)
    except (Conflict, Unavailable):
        raise
    except Exception as defect:
        # Record an event, because the job's owner might be unable to read the operator's log.
        await apply(cluster, seen.job, Decision(seen.job.status, events=(_failed(defect),)))
        raise


def _failed(defect: Exception) -> Event:
    what = escaped(f"{type(defect).__name__}: {defect}")
    whose = "this is a bug in the operator; see the traceback in its log"
    if isinstance(defect, Refused):
        what, whose = (
            f"the API server refuses the job's status: {defect}",
            "check the admission policies and the operator's permissions",
        )
    advice = f"{whose}; the job stays as it is until a retry succeeds"
    return Event(True, "ReconcileFailed", event_text(what, advice), once=True)


async def _act(cluster: Cluster, seen: Observation, clock: Callable[[], datetime]) -> float | None:
    decision = decide(seen.job, seen.world, clock())
    applied = await apply(cluster, seen.job, decision)
    if applied.rejections:
        # Decide again without acting, so that the status shows the rejections immediately.
        rejections = tuple(r for r in applied.rejections if not r.optional)
        policy_refused = next((r.message for r in applied.rejections if r.optional), "")
        world = replace(seen.world, rejections=rejections, policy_refused=policy_refused)
        shown = decide(applied.job, world, clock())
        await apply(cluster, applied.job, replace(shown, actions=()))
        if not rejections:
            return decision.wake
        retry = NAME_RETRY if any(r.name_taken for r in rejections) else BLOCKED_POLL
        return min(retry, shown.wake) if shown.wake is not None else retry
    return decision.wake
