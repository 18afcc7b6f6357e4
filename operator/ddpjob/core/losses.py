"""Decides since when a pod is silent, from its Kubernetes node and from the coordinator's report."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.api.types import DDPJob
from ddpjob.core.world import PodView, World


def lost_since(pod: PodView, world: World, now: datetime) -> datetime | None:
    """The moment from which a pod that has not ended is not heard of; None while it is.

    `now` where nobody tells the beginning (a node object that is deleted): the caller remembers the first answer.
    """
    if pod.ended:
        return None
    moments = [moment for moment in (_node_lost(pod, world, now), _member_lost(pod, world)) if moment is not None]
    return min(moments, default=None)


def out_of_service(pod: PodView, world: World) -> bool:
    """Somebody has said that the pod's node is down for good, and it is not ready: there is nothing to wait for."""
    host = (world.hosts or {}).get(pod.node)
    return host is not None and host.out_of_service and not host.ready


def given_up(job: DDPJob, pod: PodView, since: datetime | None, world: World, now: datetime) -> bool:
    """Whether a pod that has been silent `since` then has been waited for long enough; never one that is heard of (None)."""
    patience = timedelta(seconds=job.spec.recovery.node_lost_after_seconds)
    return since is not None and (now >= since + patience or out_of_service(pod, world))


def _node_lost(pod: PodView, world: World, now: datetime) -> datetime | None:
    if world.hosts is None or not pod.node:
        return None
    host = world.hosts.get(pod.node)
    if host is None:
        return now
    if not host.out_of_service and (host.ready or not any(other.ready for other in world.hosts.values())):
        return None  # where no node is ready, the control plane is cut off from all of them, and there is no place to go
    return now if host.ready or host.since is None else host.since


def _member_lost(pod: PodView, world: World) -> datetime | None:
    """The coordinator had a connection to it, and has none any more, while the kubelet says that it runs."""
    if world.report is None or not pod.main.running:
        return None
    connected = {member.pod for member in world.report.members}
    return next((m.since for m in world.report.lost if m.pod == pod.name and m.pod not in connected), None)
