"""Builds the PodGroup by which a scheduler places the pods of a generation at once or not at all.

Kubernetes' own: `scheduling.k8s.io/v1alpha2` of 1.36, with its feature gates GenericWorkload and GangScheduling. A
PodGroup needs no Workload there, and cannot be changed. Volcano's (`scheduling.schedulerName: volcano`):
`scheduling.volcano.sh/v1beta1`; its pods name it by an annotation. A pod that names none gets one for itself there.
"""

from __future__ import annotations

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus
from ddpjob.core.world import gang_name
from ddpjob.objects.service import metadata

API_VERSION, KIND = "scheduling.k8s.io/v1alpha2", "PodGroup"
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
VOLCANO_KIND = "PodGroup.scheduling.volcano.sh"
"""What is said for KIND where Volcano's is meant."""
QUEUE_ANNOTATION = "scheduling.volcano.sh/queue-name"
"""Of pods: Volcano's queue."""


def kind_of(manifest: Json) -> str:
    """An object's kind; Volcano's PodGroups have another one than those of Kubernetes."""
    return VOLCANO_KIND if manifest["apiVersion"] == VOLCANO_API else str(manifest["kind"])


def kind_for(job: DDPJob) -> str:
    """Of the PodGroups that the job's scheduler reads."""
    return VOLCANO_KIND if job.spec.scheduling.by_volcano else KIND


def build_gang(job: DDPJob, status: JobStatus) -> Json:
    """The PodGroup of the status' generation. Raises ValueError where it has none.

    The coordinator's own pod is in it: a job that waits for room then holds nothing at all. Disruption mode and
    priority are read with the gate WorkloadAwarePreemption, and dropped by the API server without it.
    """
    if status.gang is None:
        raise ValueError(f"generation {status.rendezvous.generation} of {job.name} has no gang")
    volcano, template = job.spec.scheduling.by_volcano, job.spec.pod_template
    members = status.gang.nodes + (job.spec.rendezvous.placement is Placement.DEDICATED)
    spec: Json
    if volcano:
        queue = ((template.get("metadata") or {}).get("annotations") or {}).get(QUEUE_ANNOTATION)
        spec = {"minMember": members, **({"queue": queue} if queue else {})}
    else:
        spec = {
            "schedulingPolicy": {"gang": {"minCount": members}},
            # A group that can do with fewer nodes loses single pods; another one is of no use without one of them.
            "disruptionMode": "Pod" if job.spec.min_nodes < job.spec.nodes else "PodGroup",
        }
    priority = (template.get("spec") or {}).get("priorityClassName") or job.spec.scheduling.priority_class_name
    if priority:
        spec["priorityClassName"] = priority
    return {
        "apiVersion": VOLCANO_API if volcano else API_VERSION,
        "kind": KIND,
        "metadata": metadata(job, gang_name(job, status.rendezvous.generation)),
        "spec": spec,
    }
