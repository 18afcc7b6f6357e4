"""Explains why a pod is waiting, although nothing has failed.

Kubernetes reports failures, but rarely why a healthy pod does not start. If a pod waits longer than
LONG, this module derives the most likely reason from the pod's conditions and init containers:

- It has no host: a scheduling gate holds it, or no scheduler has considered it.
- It has a host: its volumes or network are not ready, an init container runs, or the image is being
  pulled.

Example of a pod whose Secret is missing:

     0 s   placed on Kubernetes node n1
    30 s   PodNotPrepared: pod train-0-0 on Kubernetes node n1 has waited for its volumes or ...
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from ddpjob.api.job_spec import Scheduling
from ddpjob.api.job_status import format_time
from ddpjob.core.world import PodView

LONG = timedelta(seconds=30)
"""The longest time that a pod normally waits. A scheduler considers a pod within a few seconds, and
a kubelet that has the image starts the pod just as quickly."""
SCHEDULER_SILENT = "SchedulerSilent"
SCHEDULING_GATED = "SchedulingGated"
NOT_PREPARED = "PodNotPrepared"
NODES_MISSING = "NodesMissing"


def find_not_considered(pods: Iterable[PodView], scheduling: Scheduling, now: datetime) -> tuple[str, str] | None:
    """Return the reason and message for the first pod that no scheduler has considered.

    Return None if there is no such pod.
    """
    for pod in pods:
        if pod.host or pod.ended or pod.main.running:
            continue
        if pod.gated:
            return SCHEDULING_GATED, f"pod {pod.name}: {pod.gated}"
        if pod.unschedulable or pod.created is None or now - pod.created < LONG:
            continue
        wanted = scheduling.scheduler_name
        remedy = (
            f"check that the scheduler {wanted} (spec.scheduling.schedulerName) is running"
            if wanted
            else "check that the cluster's scheduler runs, and that the resource claims in podTemplate exist"
        )
        since = format_time(pod.created)
        return SCHEDULER_SILENT, f"pod {pod.name}: no scheduler has reported on this pod since {since}; {remedy}"
    return None


def find_not_started(pods: Iterable[PodView], now: datetime) -> tuple[str, str] | None:
    """Return the reason and message for the first pod that was placed LONG ago but has not started.

    Return None if there is no such pod.
    """
    for pod in pods:
        if pod.ended or pod.main.running or pod.scheduled is None or now - pod.scheduled < LONG:
            continue
        where = f"pod {pod.name} on Kubernetes node {pod.host}"
        # Once a pod is initialized, its sidecars are the only init containers that still run, and
        # the program does not wait for them.
        preparing = {} if pod.initialized else pod.init_containers
        running = [name for name, container in preparing.items() if container.running]
        if running:
            # Only the last running init container holds up the pod, because the others are
            # sidecars.
            since = format_time(preparing[running[-1]].started or pod.scheduled)
            return NODES_MISSING, f"{where}: init container {running[-1]} has been running since {since}"
        since = format_time(pod.scheduled)
        if pod.prepared is False:
            hint = f"a Secret, a folder or a driver may be missing; run `kubectl describe pod {pod.name}`"
            return NOT_PREPARED, f"{where} has waited for its volumes or its network since {since}: {hint}"
        return NODES_MISSING, f"{where} was placed at {since}, and its image is being pulled or its program is starting"
    return None
