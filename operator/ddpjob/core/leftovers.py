"""Decides how a pod ends whose trainer has ended while other containers still run, from the pod alone."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob.api.types import DDPJob
from ddpjob.core.decision import Action, DeletePod, Tell
from ddpjob.core.world import COORDINATOR_CONTAINER, PodView

EXIT_SECONDS = 15
"""How long the coordinator inside a node's pod may take to exit before the pod is deleted, log and all."""


def has_leftovers(pod: PodView) -> bool:
    return pod.ended and not all(c.ended for c in pod.containers.values())


def end_leftovers(job: DDPJob, pod: PodView, now: datetime) -> list[Action]:
    """A coordinator (placement Master) is asked to exit, so that the trainer's log stays; a sidecar goes with its pod."""
    coordinator = pod.containers.get(COORDINATOR_CONTAINER)
    patient = pod.main.finished is None or now < pod.main.finished + timedelta(seconds=EXIT_SECONDS)
    if coordinator is not None and coordinator.running and patient:
        return [Tell(f"{pod.address}:{job.spec.rendezvous.endpoint_port}", "exit", {"why": "the trainer beside it has ended"})]
    return [DeletePod(pod.name, pod.uid)]
