"""Decides whether the job's claims can serve all its nodes, from spec.storage and the claims' access modes."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob.api.types import DDPJob
from ddpjob.core.world import ClaimView, World

_ONE_HOST = {"ReadWriteOnce", "ReadWriteOncePod"}


@dataclass(frozen=True)
class Unusable:
    """Why no pod is created, and what to do."""

    reason: str
    message: str


def unusable_claim(job: DDPJob, world: World) -> Unusable | None:
    """The first claim that does not exist, or that one host would hold while several need it; None: all can serve."""
    for claim in world.claims:
        if not claim.exists:
            message = (
                f"storage names the claim {claim.name}, which does not exist in namespace {job.namespace}: "
                "create it, the job then starts by itself"
            )
            return Unusable("ClaimNotFound", message)
        if _serves_one(job, claim):
            modes = ", ".join(claim.access_modes)
            message = (
                f"claim {claim.name} ({modes}) can be mounted by one Kubernetes node only, but {_sizes(job)}: "
                "use a claim with ReadWriteMany (or ReadOnlyMany for data), or spec.nodes 1"
            )
            return Unusable("VolumeSingleNode", message)
    return None


def _sizes(job: DDPJob) -> str:
    return f"spec.nodes is {job.spec.nodes}" + (f" and spec.spares {job.spec.spares}" if job.spec.spares else "")


def _serves_one(job: DDPJob, claim: ClaimView) -> bool:
    if not claim.access_modes or not set(claim.access_modes) <= _ONE_HOST or job.spec.pods == 1:
        return False
    only_pod = set(claim.access_modes) == {"ReadWriteOncePod"}
    return job.spec.scheduling.one_pod_per_node or only_pod
