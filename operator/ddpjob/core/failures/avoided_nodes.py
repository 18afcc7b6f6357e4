"""Decides, from the restarts of the last hour, which Kubernetes nodes new pods avoid.

A broken host has free devices, so the scheduler would place the next pod there again. But most
failures are the job's own fault, and each avoided host is capacity that the job cannot use. So a
host is avoided for WINDOW after one of these signs:

- one fault that is not the program's (FAULTS), such as a container that cannot start
- LOSSES losses of the host itself
- FAILURES counted failures on this host and none on other hosts. If several hosts have failures,
  the job itself is at fault. The same is true of exceeded limits (_OF_LIMITS) and of all failures
  before the first step.

Example with pods on the Kubernetes nodes a and b:

    10:00   a container on b cannot start: StartError     b is avoided until 11:00
    10:10   rank 0 fails on a, and again at 10:20         a may be at fault, but is not avoided yet
    10:30   rank 0 fails on a for the third time          a is avoided until 11:30
    or      rank 1 fails on b instead                     two hosts, so the program is at fault

Pods only prefer other hosts, so they still start if there is no other room. In a cluster with one
host, no host is avoided.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.api.job_status import AvoidedNode, JobStatus, Restart
from ddpjob.core.failures.classify import Cause

WINDOW = timedelta(hours=1)
"""How long a failure is remembered, and how long a host is avoided after the last failure on it."""
RECENT = 10
"""Maximum number of entries in `status.restarts.recent`."""
FAILURES = 3
LOSSES = 2
_OF_LIMITS = frozenset({Cause.OOM_KILLED, Cause.STORAGE_EXCEEDED})
"""Causes that are the job's own fault, no matter which host the pod runs on."""
_MOVED = frozenset({Cause.NODE_UNHEALTHY, Cause.POD_UNHEALTHY, Cause.SLOW_RANK})
FAULTS = _MOVED | {Cause.NODE_FAULT, Cause.START_ERROR, Cause.PREFLIGHT_FAILED}
"""Causes that make new pods avoid the host immediately, because the program was not at fault or had
not run yet."""


def find_avoided_nodes(
    status: JobStatus, now: datetime, *, trained: bool, faults: tuple[Restart, ...] = ()
) -> tuple[AvoidedNode, ...]:
    """Return the hosts that new pods are to avoid, sorted by name.

    These are newly suspect hosts, and hosts that must still be avoided. `trained` is true once the
    job has completed a step. `faults` are host faults in addition to the restarts in the status.
    """
    fresh = {entry.node: entry for entry in _suspects((*status.restarts.recent, *faults), now, trained=trained)}
    kept = {entry.node: entry for entry in status.avoided_nodes if entry.until > now}
    return tuple(sorted((kept | fresh).values(), key=lambda entry: entry.node))


def _suspects(recent: tuple[Restart, ...], now: datetime, *, trained: bool) -> list[AvoidedNode]:
    """Return the hosts that the last hour's restarts make suspect.

    Each entry has the reason, and the time until which the host is avoided.
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
            reason, of = faults[-1].reason + " occurred there within an hour", faults
        elif len(losses) >= LOSSES:
            reason, of = f"lost {len(losses)} times within an hour", losses
        elif alone and len(failures) >= FAILURES:
            reason, of = f"{len(failures)} failures within an hour, none on other Kubernetes nodes", failures
        else:
            continue
        suspects.append(AvoidedNode(node=host, until=max(r.time for r in of) + WINDOW, reason=reason))
    return suspects
