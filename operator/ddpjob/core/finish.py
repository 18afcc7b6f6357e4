"""Decides what happens to a job that has ended: its training stops, its pods go by policy, itself by its time to live."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.api.types import CleanPodPolicy, ConditionType, DDPJob, JobStatus
from ddpjob.core.decision import Action, Decision, DeleteJob, DeletePod, Tell
from ddpjob.core.group import coordinator_pod
from ddpjob.core.leftovers import end_leftovers, has_leftovers
from ddpjob.core.world import PodView, Role, World

STOP_SECONDS = 15
"""How long running nodes may take to end by themselves, so that their logs stay, before they are deleted."""


def wind_down(job: DDPJob, status: JobStatus, world: World, now: datetime) -> Decision:
    """The actions that are due for an ended job; the status stays as it is."""
    ended_at = status.completion_time or now
    training = [p for p in world.nodes() if not p.ended and p.deleted_at is None]
    overdue = now >= ended_at + timedelta(seconds=STOP_SECONDS)
    actions: list[Action] = []
    if training:
        actions += _stop(job, status, world, training, overdue)
    else:
        actions += _clean(job, world, now)
    wake = [1.0] if training or actions else []
    ttl = job.spec.run_policy.ttl_seconds_after_finished
    if ttl is not None:
        left = (ended_at + timedelta(seconds=ttl) - now).total_seconds()
        if left <= 0:
            return Decision(status, (DeleteJob(),))
        wake.append(left)
    return Decision(status, tuple(actions), wake=min(wake, default=None))


def _stop(job: DDPJob, status: JobStatus, world: World, training: list[PodView], overdue: bool) -> list[Action]:
    """Told to stop, a node keeps its log; nobody can tell a `command`, nor a pod that has not begun."""
    told = job.spec.under_torchrun and coordinator_pod(job, status, world) is not None
    if overdue or not told:
        return [DeletePod(p.name, p.uid) for p in training]
    idle: list[Action] = [DeletePod(p.name, p.uid) for p in training if not p.main.running]
    failed = status.condition(ConditionType.FAILED)
    if failed is None or not failed.status:
        return idle
    return [*idle, Tell(status.rendezvous.endpoint, "stop", {"ok": False, "why": failed.reason})]


def _clean(job: DDPJob, world: World, now: datetime) -> list[Action]:
    policy = job.spec.run_policy.clean_pod_policy
    actions: list[Action] = []
    for pod in world.pods:
        if pod.deleted_at is not None:
            continue
        if pod.role is Role.COORDINATOR or policy is CleanPodPolicy.ALL:
            actions.append(DeletePod(pod.name, pod.uid))
        elif has_leftovers(pod):
            ends = end_leftovers(job, pod, now)
            actions += [e for e in ends if policy is CleanPodPolicy.RUNNING or isinstance(e, Tell)]
    return actions
