"""Builds the PodDisruptionBudget, which makes drains evict one node at a time so that the group can
recover in between.
"""

from __future__ import annotations

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.world import LABEL_BUDGET, LABEL_ROLE, LABEL_UID, Role
from ddpjob.objects.service import make_object, metadata


def build_budget(job: DDPJob) -> Json:
    """Build a job's PodDisruptionBudget, named after the job.

    The budget covers only pods that train, so a drain can evict coordinators and spares at any
    time. A separate label selects the pods, because a change to spec.scheduling applies only to
    pods created later.

    Kubernetes gets the expected number of pods, `spec.nodes`, from the job's scale subresource. If
    the budget also covered a spare, Kubernetes would count one pod more than expected and allow two
    evictions at once.
    """
    spec = {
        "maxUnavailable": 1,
        # Allow the eviction of pods that are not ready. Otherwise, a broken job would keep its
        # Kubernetes nodes from being drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {LABEL_UID: job.uid, LABEL_ROLE: str(Role.NODE), LABEL_BUDGET: "true"}},
    }
    return make_object("policy/v1", "PodDisruptionBudget", metadata(job, job.name), spec=spec)
