"""Counts a job's GPU seconds: the number of GPUs that its pods hold, multiplied by how long they
hold them.

Costs and fair shares are calculated in GPU hours, which nobody can reconstruct once pods are gone.
The status therefore has the sum, the number of GPUs that are held now, and the time at which the
sum was last updated:

    gpuSeconds: 28800
    gpuUse: {held: 16, since: "2026-03-01T10:30:00Z"}

The sum covers the time up to `since`. A pod holds its GPUs from the moment that Kubernetes binds it
to a host until all its containers have ended or its object is gone, even while images are pulled,
while a spare stands by, and while the pod terminates. Nobody else can use these GPUs. Only devices
of the resource spec.gpuResource count.

At each reconcile, the number in `gpuUse.held` is multiplied by the time since `gpuUse.since` and
added to the sum. The result is written together with any other change to the status, whenever the
number of held GPUs changes, and at least every REFRESH. A job without GPUs gets neither field.

Example with 2 pods of 8 GPUs:

    10:00:00  both pods are bound              gpuSeconds  -      held 16  since 10:00:00
    10:30:00  REFRESH, or progress is written  gpuSeconds  28800  held 16  since 10:30:00
    10:40:00  one pod is lost                  gpuSeconds  38400  held  8  since 10:40:00
    10:40:05  its replacement is bound         gpuSeconds  38440  held 16  since 10:40:05

Only the operator's clock is used, in whole seconds, so each change is off by less than a second, in
either direction. If no operator runs for a while, nothing is lost or counted twice, because the
next operator continues from the same `since`. The next operator cannot know when pods ended or were
bound in the meantime, so it counts those changes from its first reconcile. If its clock is behind
the previous operator's clock, the difference is not counted.

Why the status holds it: docs/decisions/0002.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import GpuUse
from ddpjob.core.decision import Decision
from ddpjob.core.world import PodView, World

REFRESH = timedelta(minutes=10)
"""While pods hold GPUs and the job is being reconciled, the sum is written at least this often."""
_MOST_GPUS = 10**6
"""Maximum number of GPUs that are counted, because a pod can request any number."""


def count_gpu_seconds(job: DDPJob, world: World, now: datetime, decision: Decision) -> Decision:
    """Return the decision with the GPU seconds up to `now`, if they are due to be written."""
    use, moment = job.status.gpu_use, now.replace(microsecond=0)
    found = sum(pod.devices.get(job.spec.gpu_resource, 0) for pod in world.nodes() if holds_devices(pod))
    held = min(found, _MOST_GPUS)
    if use is None:
        if not held:
            return decision
        return replace(decision, status=replace(decision.status, gpu_use=GpuUse(held=held, since=moment)))
    is_due = held != use.held or moment - use.since >= REFRESH or decision.status != job.status
    if not is_due:
        return decision
    seconds = max(0, round((moment - use.since).total_seconds()))
    status = replace(
        decision.status,
        gpu_seconds=job.status.gpu_seconds + use.held * seconds,
        gpu_use=GpuUse(held=held, since=moment) if held else None,
    )
    return replace(decision, status=status)


def holds_devices(pod: PodView) -> bool:
    """Whether Kubernetes reserves devices on a host for the pod."""
    return bool(pod.host) and pod.phase not in ("Succeeded", "Failed")
