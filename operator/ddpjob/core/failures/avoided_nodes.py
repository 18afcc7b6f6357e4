"""Decides which Kubernetes nodes new pods avoid, from the restarts of the last hour."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.api.job_status import AvoidedNode, JobStatus, Restart
from ddpjob.core.failures.classify import Cause

WINDOW = timedelta(hours=1)
"""How long a failure is remembered, and how long a host is avoided after its last failure."""
RECENT = 10
"""Maximum number of entries in `status.restarts.recent`."""
FAILURES = 3
LOSSES = 2
_OF_LIMITS = frozenset({Cause.OOM_KILLED, Cause.STORAGE_EXCEEDED})
"""Causes that are the job's own fault on any host."""
_MOVED = frozenset({Cause.NODE_UNHEALTHY, Cause.POD_UNHEALTHY, Cause.SLOW_RANK})
FAULTS = _MOVED | {Cause.NODE_FAULT, Cause.START_ERROR, Cause.PREFLIGHT_FAILED}
"""Faults of a host that hit a pod before its program runs or regardless of its program. One is
enough."""


def find_avoided_nodes(
    status: JobStatus, now: datetime, *, trained: bool, faults: tuple[Restart, ...] = ()
) -> tuple[AvoidedNode, ...]:
    """Return the hosts to avoid, by name.

    These are known hosts whose time is not over, and newly suspect hosts. `trained` is true once
    the job has made a step; before that, its failures say nothing about a host. `faults` are host
    faults that the status's restarts do not name.
    """
    fresh = {entry.node: entry for entry in _suspects((*status.restarts.recent, *faults), now, trained=trained)}
    kept = {entry.node: entry for entry in status.avoided_nodes if entry.until > now}
    return tuple(sorted((kept | fresh).values(), key=lambda entry: entry.node))


def _suspects(recent: tuple[Restart, ...], now: datetime, *, trained: bool) -> list[AvoidedNode]:
    """Return the hosts that have become suspect.

    These are hosts with a fault, hosts lost LOSSES times, and a host with at least FAILURES
    failures if no other host had any. Failures on several hosts are the job's own fault, and so are
    memory and storage; losing a host is always the host's fault.
    """
    recent = tuple(r for r in recent if r.node and r.time > now - WINDOW)
    own = [r for r in recent if trained and r.counted and r.reason not in _OF_LIMITS]
    lost = [r for r in recent if r.reason == Cause.NODE_LOST]
    alone = len({r.node for r in own + lost}) == 1
    suspects = []
    for host in dict.fromkeys(r.node for r in recent):
        faults = [r for r in recent if r.node == host and r.reason in FAULTS]
        losses = [r for r in lost if r.node == host]
        failures = losses + [r for r in own if r.node == host]
        if faults:
            reason, of = faults[-1].reason + " on it within an hour", faults
        elif len(losses) >= LOSSES:
            reason, of = f"lost {len(losses)} times within an hour", losses
        elif alone and len(failures) >= FAILURES:
            reason, of = f"{len(failures)} failures within an hour, none on other Kubernetes nodes", failures
        else:
            continue
        suspects.append(AvoidedNode(node=host, until=max(r.time for r in of) + WINDOW, reason=reason))
    return suspects
