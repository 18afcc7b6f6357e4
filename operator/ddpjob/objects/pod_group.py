"""Builds the PodGroup by which Kubernetes' own scheduler places the pods of a generation at once or not at all.

`scheduling.k8s.io/v1alpha2` of Kubernetes 1.36, with its feature gates GenericWorkload and GangScheduling. A PodGroup
needs no Workload there, and cannot be changed.
"""

from __future__ import annotations

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus
from ddpjob.core.world import gang_name
from ddpjob.objects.service import metadata

API_VERSION, KIND = "scheduling.k8s.io/v1alpha2", "PodGroup"


def build_gang(job: DDPJob, status: JobStatus) -> Json:
    """The PodGroup of the status' generation. Raises ValueError where it has none.

    The coordinator's own pod is in it: a job that waits for room then holds nothing at all. Disruption mode and
    priority are read with the gate WorkloadAwarePreemption, and dropped by the API server without it.
    """
    if status.gang is None:
        raise ValueError(f"generation {status.rendezvous.generation} of {job.name} has no gang")
    coordinator = job.spec.rendezvous.placement is Placement.DEDICATED
    spec: Json = {
        "schedulingPolicy": {"gang": {"minCount": status.gang.nodes + coordinator}},
        # A group that can do with fewer nodes loses single pods; another one is of no use without one of them.
        "disruptionMode": "Pod" if job.spec.min_nodes < job.spec.nodes else "PodGroup",
    }
    template = job.spec.pod_template.get("spec") or {}
    priority = template.get("priorityClassName") or job.spec.scheduling.priority_class_name
    if priority:
        spec["priorityClassName"] = priority
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata(job, gang_name(job, status.rendezvous.generation)),
        "spec": spec,
    }
