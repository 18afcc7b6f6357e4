"""Builds the PodDisruptionBudget, which makes drains evict one node at a time so that the group can
recover in between.
"""

from __future__ import annotations

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.world import LABEL_BUDGET, LABEL_ROLE, LABEL_UID, Role
from ddpjob.objects.service import make_object, metadata


def build_budget(job: DDPJob) -> Json:
    """Build the budget, which has the job's name.

    It selects pods by a separate label, since spec.scheduling may change for later pods.
    Coordinators and spares are not selected, because drains are allowed to evict them at any time.

    Kubernetes reads the expected number of pods, `spec.nodes`, from the job's scale subresource. If
    a spare were selected too, Kubernetes would count one pod more than expected, and allow two
    evictions at once.
    """
    spec = {
        "maxUnavailable": 1,
        # A broken job must not block the drain of a Kubernetes node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {LABEL_UID: job.uid, LABEL_ROLE: str(Role.NODE), LABEL_BUDGET: "true"}},
    }
    return make_object("policy/v1", "PodDisruptionBudget", metadata(job, job.name), spec=spec)
