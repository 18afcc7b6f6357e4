"""One pass over one job: observe, decide, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from ddpjob.core.decide import BLOCKED_POLL, decide
from ddpjob.engine.apply import apply
from ddpjob.engine.ports import Cluster, Conflict, JobKey, NamespaceEnding, Unavailable

log = logging.getLogger("ddpjob.reconcile")

CONFLICT_RETRY = 0.05
NAME_RETRY = 1.0
UNAVAILABLE_RETRY = 2.0


def utc_now() -> datetime:
    return datetime.now(UTC)


async def reconcile(cluster: Cluster, key: JobKey, clock: Callable[[], datetime] = utc_now) -> float | None:
    """Brings one job a step nearer to what its spec asks for.

    Returns the seconds until it must be looked at again, None when only a change can be a reason.
    """
    try:
        return await _pass(cluster, key, clock)
    except Conflict:
        return CONFLICT_RETRY
    except NamespaceEnding as ending:
        log.debug("%s/%s: %s", key.namespace, key.name, ending)
        return ending.retry_after
    except Unavailable as away:
        log.warning("%s/%s: the API server is not available: %s", key.namespace, key.name, away)
        return away.retry_after or UNAVAILABLE_RETRY


async def _pass(cluster: Cluster, key: JobKey, clock: Callable[[], datetime]) -> float | None:
    seen = await cluster.observe(key)
    if seen is None:
        return None
    decision = decide(seen.job, seen.world, clock())
    applied = await apply(cluster, seen.job, decision)
    if applied.rejections:
        # Told at once: the refusal is part of what was observed.
        world = replace(seen.world, rejections=applied.rejections)
        told = decide(applied.job, world, clock())
        await apply(cluster, applied.job, replace(told, actions=()))
        retry = NAME_RETRY if any(r.name_taken for r in applied.rejections) else BLOCKED_POLL
        return min(retry, told.wake) if told.wake is not None else retry
    return decision.wake
