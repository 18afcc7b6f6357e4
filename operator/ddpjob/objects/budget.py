"""Builds the job's PodDisruptionBudget: a drain takes its node pods one at a time, so that the group can go on in between."""

from __future__ import annotations

from ddpjob.api.types import DDPJob, Json
from ddpjob.core.world import LABEL_ROLE, LABEL_UID, Role
from ddpjob.objects.service import metadata


def build_budget(job: DDPJob) -> Json:
    """Named as the job. Neither coordinator nor spares are in it: they may always go.

    Kubernetes takes the number of pods that there should be from the job's scale, `spec.nodes`: with spares among them, two could go.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, job.name),
        "spec": {
            "maxUnavailable": 1,
            # A pod that does not run holds nothing up: a broken job must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {LABEL_UID: job.uid, LABEL_ROLE: str(Role.NODE)}},
        },
    }
