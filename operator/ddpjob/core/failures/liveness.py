"""Determines how long a pod has been silent, and whether it is declared lost.

A pod on a machine without power looks healthy, because Kubernetes keeps showing the last state that
its kubelet reported. Giving up a pod too early costs a restart for a short network outage, but
giving it up too late keeps all other nodes waiting. Two sources are consulted, because either of
them may be wrong.

- The host: Kubernetes reports that the host is not ready or was deleted. If no host at all is
  ready, the control plane is partitioned from all hosts, so a host that is not ready does not count
  as lost.
- The coordinator: it has lost its connection to the pod, although the kubelet reports that the
  program is running. If the coordinator has lost most of its members, the coordinator itself is
  partitioned, so its losses do not count (`World.deaf_since`).

The earlier of the two times is used (`lost_since`). The pod is abandoned when it has been silent
for `recovery.nodeLostAfterSeconds` (`is_given_up`), or immediately if its host is not ready and has
been marked as out of service. A pod that ends or reconnects before then is not lost.

Example with a limit of 30 s, in which a machine loses power:

     0  the coordinator hears from the pod for the last time
    10  the coordinator reports it as lost, with the time 0
    30  the pod is abandoned, and its slot gets the next attempt
    40  Kubernetes reports the host as not ready, which has no effect

The slot keeps the time (`lostSince`), so a new operator continues the count (docs/decisions/0002).
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.core.view import View
from ddpjob.core.world import PodView, World

ENDING_MARGIN = timedelta(seconds=5)
"""How long a pod may take to terminate after its grace period has ended."""


def lost_since(pod: PodView, world: World, now: datetime) -> datetime | None:
    """Return the time at which a pod fell silent; None if the pod is alive or has ended.

    The result is `now` if the time is unknown, or if it is in the future because the clock was set
    back. The caller must remember the result of the first call.
    """
    if pod.ended:
        return None
    times = [time for time in (_host_lost(pod, world, now), _member_lost(pod, world)) if time is not None]
    return min(*times, now) if times else None


def is_out_of_service(pod: PodView, world: World) -> bool:
    """Whether the pod's host was marked as permanently down and is not ready.

    Waiting for such a host is pointless.
    """
    host = (world.hosts or {}).get(pod.host)
    return host is not None and host.out_of_service and not host.ready


def is_given_up(view: View, pod: PodView, since: datetime | None) -> bool:
    """Whether to abandon a pod that has been silent since `since`.

    The pod may stay silent for recovery.nodeLostAfterSeconds, unless the pod's host is out of
    service. A pod that is alive (`since` is None) is never abandoned.
    """
    patience = timedelta(seconds=view.job.spec.recovery.node_lost_after_seconds)
    return since is not None and (view.now >= since + patience or is_out_of_service(pod, view.world))


def is_overdue(pod: PodView, now: datetime) -> bool:
    """Whether a pod still exists after its grace period, due to a finalizer or a dead host."""
    return pod.deleted_at is not None and now >= pod.deleted_at + ENDING_MARGIN


def may_run(pod: PodView, now: datetime) -> bool:
    """Whether a pod may still be running, and may therefore be saving a checkpoint."""
    return not pod.ended and not is_overdue(pod, now)


def _host_lost(pod: PodView, world: World, now: datetime) -> datetime | None:
    if world.hosts is None or not pod.host:
        return None
    host = world.hosts.get(pod.host)
    if host is None:
        return None
    if host.deleted:
        return host.since or now
    if host.ready or not (host.out_of_service or any(other.ready for other in world.hosts.values())):
        # If no host is ready, the control plane is partitioned from all of them, and there is no
        # host that the pod could move to.
        return None
    return host.since or now


def _member_lost(pod: PodView, world: World) -> datetime | None:
    """Return the time at which a running pod lost its connection to the coordinator.

    Return None if the pod has a connection, or if the coordinator has lost most pods. In the latter
    case, the coordinator itself is partitioned.
    """
    return world.silent.get(pod.name) if world.silent and world.deaf_since is None else None
