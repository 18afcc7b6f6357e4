"""Builds the PodGroup that makes a scheduler place a generation's pods all at once or not at all.

For Kubernetes' scheduler, the PodGroup has the API version `scheduling.k8s.io/v1alpha2` and needs
Kubernetes 1.36 with the feature gates GenericWorkload and GangScheduling. It does not need a
Workload and cannot be changed. For Volcano (`scheduling.schedulerName: volcano`), it has the API
version `scheduling.volcano.sh/v1beta1`. Each pod of the group names the PodGroup in an annotation,
because Volcano creates a separate PodGroup for every pod without this annotation.
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
"""The operator's own name for the kind of Volcano's PodGroups. It is needed because Kubernetes'
PodGroups have the same kind."""
QUEUE_ANNOTATION = "scheduling.volcano.sh/queue-name"
"""Name of the pod annotation whose value is the Volcano queue."""


def kind_of(manifest: Json) -> str:
    """Return the kind of an object, as the operator names it.

    Volcano's PodGroups get a different name from Kubernetes' own PodGroups.
    """
    return VOLCANO_KIND if manifest["apiVersion"] == VOLCANO_API else str(manifest["kind"])


def kind_for(job: DDPJob) -> str:
    """Return the kind of PodGroup that this job's scheduler reads."""
    return VOLCANO_KIND if job.spec.scheduling.by_volcano else KIND


def build_gang(job: DDPJob, status: JobStatus) -> Json:
    """Build the PodGroup of the job's current generation.

    The coordinator's own pod belongs to the group too. Outside the group, that pod would hold
    resources while the job waits for room. The fields for disruption and priority have an effect
    only with the feature gate WorkloadAwarePreemption. Without this gate, the API server drops
    these fields.

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
            # If the job can train with fewer nodes, the scheduler may preempt single pods in the
            # group. If not, the group is useless as soon as one pod is missing, so it is preempted
            # as a whole.
            "disruptionMode": "Pod" if job.spec.min_nodes < job.spec.nodes else "PodGroup",
        }
    priority = (template.get("spec") or {}).get("priorityClassName") or job.spec.scheduling.priority_class_name
    if priority:
        spec["priorityClassName"] = priority
    meta = metadata(job, gang_name(job, status.rendezvous.generation))
    return make_object(VOLCANO_API if volcano else API_VERSION, KIND, meta, spec=spec)
