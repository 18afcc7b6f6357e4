"""Builds the PodGroup that makes a scheduler place a generation's pods all at once or not at all.

For Kubernetes' scheduler, the PodGroup has the API version `scheduling.k8s.io/v1alpha2`, which
needs Kubernetes 1.36 with the feature gates GenericWorkload and GangScheduling. This PodGroup does
not need a Workload and cannot be changed. For Volcano (`scheduling.schedulerName: volcano`), the
PodGroup has the API version `scheduling.volcano.sh/v1beta1`. Each pod of the group names the
PodGroup in an annotation, because Volcano would create a separate PodGroup for a pod without this
annotation.
"""

from __future__ import annotations

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus
from ddpjob.core.world import gang_name
from ddpjob.objects.service import make_object, metadata

API_VERSION, KIND = "scheduling.k8s.io/v1alpha2", "PodGroup"
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
VOLCANO_KIND = "PodGroup.scheduling.volcano.sh"
"""The operator's own name for Volcano's kind of PodGroup. Volcano and Kubernetes both call this
kind PodGroup, so the operator needs a second name."""
QUEUE_ANNOTATION = "scheduling.volcano.sh/queue-name"
"""The pod annotation that names the Volcano queue."""


def kind_of(manifest: Json) -> str:
    """Return the operator's name for the kind of an object.

    Volcano's PodGroups get a different name from Kubernetes' own PodGroups.
    """
    return VOLCANO_KIND if manifest["apiVersion"] == VOLCANO_API else str(manifest["kind"])


def kind_for(job: DDPJob) -> str:
    """Return the kind of PodGroup that this job's scheduler reads."""
    return VOLCANO_KIND if job.spec.scheduling.by_volcano else KIND


def build_gang(job: DDPJob, status: JobStatus) -> Json:
    """Build the PodGroup of the job's current generation.

    The coordinator's own pod belongs to the group too. Otherwise, the coordinator would hold
    resources while the job waits for room. The fields for disruption and priority need the feature
    gate WorkloadAwarePreemption. Without the gate, the API server drops these fields.

    Raises ValueError if `status` has no gang.
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
            # If the job can train with fewer nodes, the scheduler may preempt single pods of the
            # group. Otherwise, it preempts the whole group, because losing any pod makes the rest
            # useless.
            "disruptionMode": "Pod" if job.spec.min_nodes < job.spec.nodes else "PodGroup",
        }
    priority = (template.get("spec") or {}).get("priorityClassName") or job.spec.scheduling.priority_class_name
    if priority:
        spec["priorityClassName"] = priority
    meta = metadata(job, gang_name(job, status.rendezvous.generation))
    return make_object(VOLCANO_API if volcano else API_VERSION, KIND, meta, spec=spec)
