"""Decides since when a pod has been silent, from its host and from the coordinator's report.

A pod on a machine without power looks well: Kubernetes keeps showing the last state that its
kubelet reported. A pod that is given up too early costs a restart for a short outage of the
network. One that is given up too late keeps all other nodes waiting. There are two witnesses, and
either may be wrong alone.

- The host: Kubernetes reports it as not ready, or it has been deleted. That counts unless no host
  at all is ready, because then the control plane is partitioned from all of them.
- The coordinator: it has lost its connection to the pod, although the kubelet reports that the
  program runs. That counts unless the coordinator has lost most of its members, because then it is
  the one that is partitioned (`World.deaf_since`).

The earlier of the two moments counts (`lost_since`). The pod is given up when it has been silent
for `recovery.nodeLostAfterSeconds` (`is_given_up`), or at once if somebody has marked its host as
out of service. A pod that ends or is heard again meanwhile is not lost.

Example, a limit of 30 s, and a machine loses its power:

     0  the coordinator hears the pod for the last time
    10  the coordinator reports it as lost, with the time 0
    30  the pod is given up, and its slot gets the next attempt
    40  Kubernetes reports the host as not ready, which changes nothing

The moment is kept in the slot (`lostSince`), so a new operator continues the count
(docs/decisions/0002).
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.core.view import View
from ddpjob.core.world import PodView, World

ENDING_MARGIN = timedelta(seconds=5)
"""How long a pod may take to end beyond its grace period."""


def lost_since(pod: PodView, world: World, now: datetime) -> datetime | None:
    """Return since when a pod that has not ended has been silent.

    None if it is alive, or has ended. Returns `now` if the beginning is not known: the caller
    remembers the first answer.
    """
    if pod.ended:
        return None
    host, member = _host_lost(pod, world, now), _member_lost(pod, world)
    return member if host is None else host if member is None else min(host, member)


def is_out_of_service(pod: PodView, world: World) -> bool:
    """Whether the pod's host was marked as down for good, and is not ready.

    Waiting for it is pointless.
    """
    host = (world.hosts or {}).get(pod.host)
    return host is not None and host.out_of_service and not host.ready


def is_given_up(view: View, pod: PodView, since: datetime | None) -> bool:
    """Whether a pod that has been silent since `since` is given up.

    It has recovery.nodeLostAfterSeconds to return, unless its host is out of service. A pod that is
    alive (`since` None) is never given up.
    """
    patience = timedelta(seconds=view.job.spec.recovery.node_lost_after_seconds)
    return since is not None and (view.now >= since + patience or is_out_of_service(pod, view.world))


def is_overdue(pod: PodView, now: datetime) -> bool:
    """Whether a pod is beyond its grace period.

    Only somebody's finalizer or a dead host then keeps it.
    """
    return pod.deleted_at is not None and now >= pod.deleted_at + ENDING_MARGIN


def may_run(pod: PodView, now: datetime) -> bool:
    """Whether a pod may still run, and save."""
    return not pod.ended and not is_overdue(pod, now)


def _host_lost(pod: PodView, world: World, now: datetime) -> datetime | None:
    if world.hosts is None or not pod.host:
        return None
    host = world.hosts.get(pod.host)
    if host is None:
        return None
    if host.deleted:
        return host.since or now
    if not host.out_of_service and (host.ready or not any(other.ready for other in world.hosts.values())):
        # If no host is ready, the control plane is partitioned from all of them, and there is no
        # host to move to.
        return None
    return now if host.ready or host.since is None else host.since


def _member_lost(pod: PodView, world: World) -> datetime | None:
    """Return since when the coordinator has lost its connection to a running pod.

    The kubelet reports that the pod runs. None if the coordinator has lost most pods, because
    its view then means nothing.
    """
    return world.silent.get(pod.name) if world.silent and world.deaf_since is None else None
