"""Finds what a pod is waiting for while nothing has failed.

It may be a gate, a silent scheduler, volumes, an init container or an image. Kubernetes reports
little about these in a pod's status, and reports it late.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from ddpjob.api.job_spec import Scheduling
from ddpjob.api.job_status import format_time
from ddpjob.core.world import PodView

LONG = timedelta(seconds=30)
"""Schedulers consider a pod, and kubelets prepare one whose image is present, within a few
seconds."""
SCHEDULER_SILENT = "SchedulerSilent"
SCHEDULING_GATED = "SchedulingGated"
NOT_PREPARED = "PodNotPrepared"
NODES_MISSING = "NodesMissing"


def find_not_considered(pods: Iterable[PodView], scheduling: Scheduling, now: datetime) -> tuple[str, str] | None:
    """Return reason and message for the first pod that no scheduler is trying to place.

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
            f"check that the scheduler {wanted} runs, which spec.scheduling.schedulerName names"
            if wanted
            else "check that the cluster's scheduler runs, and that the resource claims in podTemplate exist"
        )
        since = format_time(pod.created)
        return SCHEDULER_SILENT, f"pod {pod.name}: no scheduler has reported on it since {since}; {remedy}"
    return None


def find_not_started(pods: Iterable[PodView], now: datetime) -> tuple[str, str] | None:
    """Return reason and message for the first placed pod that is not running a program.

    The pod was placed long ago. Return None if there is no such pod.
    """
    for pod in pods:
        if pod.ended or pod.main.running or pod.scheduled is None or now - pod.scheduled < LONG:
            continue
        where = f"pod {pod.name} on Kubernetes node {pod.host}"
        # Otherwise only sidecars are running, which nothing waits for.
        preparing = {} if pod.initialized else pod.init_containers
        running = [name for name, container in preparing.items() if container.running]
        if running:
            # Init containers run one after another, except sidecars, which start in order but keep
            # running.
            since = format_time(preparing[running[-1]].started or pod.scheduled)
            return NODES_MISSING, f"{where}: init container {running[-1]} has run since {since}"
        since = format_time(pod.scheduled)
        if pod.prepared is False:
            hint = f"a Secret, a folder or a driver may be missing, which `kubectl describe pod {pod.name}` names"
            return NOT_PREPARED, f"{where} has waited for its volumes or its network since {since}: {hint}"
        return NODES_MISSING, f"{where} was placed at {since}, and its image is being pulled or its program is starting"
    return None
