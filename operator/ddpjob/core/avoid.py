"""Decides which Kubernetes nodes new pods keep away from, from the restarts of the last hour."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from ddpjob.api.types import AvoidedNode, JobStatus, Restart
from ddpjob.core.classify import Cause

WINDOW = timedelta(hours=1)
"""Failures are remembered for so long, and a node is avoided for so long after the last."""
FAILURES = 3
LOSSES = 2


def avoided(status: JobStatus, now: datetime) -> tuple[AvoidedNode, ...]:
    """Those avoided already until their time is over, and those that have become so."""
    fresh = {entry.node: entry for entry in _suspects(status.restarts.recent, now)}
    kept = {entry.node: entry for entry in status.avoided_nodes if entry.until > now}
    return tuple(sorted((kept | fresh).values(), key=lambda entry: entry.node))


def _suspects(recent: tuple[Restart, ...], now: datetime) -> list[AvoidedNode]:
    """Memory is the job's own matter, not the node's. Failures on several nodes are the job's too; a lost node is a lost node."""
    failed = [r for r in recent if r.node and r.time > now - WINDOW and (_is_lost(r) or (r.counted and r.reason != Cause.OOM_KILLED))]
    lost = Counter(r.node for r in failed if _is_lost(r))
    alone = len({r.node for r in failed}) == 1
    suspects = []
    for node, count in Counter(r.node for r in failed).items():
        if lost[node] >= LOSSES or (alone and count >= FAILURES):
            last = max(r.time for r in failed if r.node == node)
            what = f"{lost[node]} times lost" if lost[node] >= LOSSES else f"{count} failures, and none on other nodes"
            suspects.append(AvoidedNode(node=node, until=last + WINDOW, reason=f"{what}, within an hour"))
    return suspects


def _is_lost(restart: Restart) -> bool:
    return restart.reason == Cause.NODE_LOST
