"""Builds the Workload that requests quota from Kueue for all pods of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus, Slot, format_time
from ddpjob.core.decision import CreateWorkload
from ddpjob.core.plan.queue import ONE_DOMAIN, shape_of
from ddpjob.core.world import LABEL_INDEX
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import build_coordinator, build_node
from ddpjob.objects.service import make_object, metadata

API_VERSION, KIND = "kueue.x-k8s.io/v1beta2", "Workload"
NODE_SET, COORDINATOR_SET = "node", "coordinator"
"""Names of the Workload's two pod sets. The node set contains the pods of all slots, including
spares. The coordinator set contains the coordinator's own pod."""
LABEL_SHAPE = "ddpjob.io/queue-shape"
LABEL_ADDITIONAL = "ddpjob.io/queue-additional"
"""Label of a Workload that requests additional pods for an elastic job with quota."""
TOPOLOGIES = {"required": ONE_DOMAIN, "preferred": "kueue.x-k8s.io/podset-preferred-topology"}
"""Maps each field of a pod set's topologyRequest to the annotation in podTemplate that sets it."""
UNCONSTRAINED = "kueue.x-k8s.io/podset-unconstrained-topology"
_SLICE, _SLICE_SIZE = "kueue.x-k8s.io/podset-slice-required-topology", "kueue.x-k8s.io/podset-slice-size"
PRIORITY_CLASSES = {"WorkloadPriorityClass": "kueue.x-k8s.io", "PriorityClass": "scheduling.k8s.io"}
"""Maps each kind of priority class to its API group."""

_POD_FIELDS = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "schedulerName", "overhead",
               "resources", "resourceClaims")  # fmt: skip
_CONTAINER_FIELDS = ("name", "image", "resources", "restartPolicy")


def build_workload(job: DDPJob, platform: Platform, asked: CreateWorkload) -> Json:
    """Build a Workload that asks Kueue for the quota of a job's pods.

    `asked.pods` is the number of slot pods. The Workload also includes the coordinator's own pod,
    unless it asks only for additional pods.

    If `asked.least` is not 0, Kueue may admit only some of the pods. Kueue rejects such a Workload
    if it has the annotation for elastic jobs, so the annotation is left out. A Workload without
    this annotation can still replace another Workload.

    Kueue reads the priority from `spec.priority`, which is not set here. The code that sends the
    Workload to the API server adds the value from the priority class.
    """
    plain = JobStatus(slots=(Slot(),))
    nodes = _pod_set(NODE_SET, build_node(job, plain, platform, 0, 0), asked.pods)
    nodes["topologyRequest"] = _topology_request(job)
    sets = [{**nodes, "minCount": asked.least} if asked.least else nodes]
    labels = {LABEL_SHAPE: shape_of(job), "kueue.x-k8s.io/job-uid": job.uid}
    if asked.after:
        labels[LABEL_ADDITIONAL] = "true"
    elif job.spec.rendezvous.placement is Placement.DEDICATED:
        sets.append(_pod_set(COORDINATOR_SET, build_coordinator(job, plain, platform), 1))
    annotations = {} if asked.least else {"kueue.x-k8s.io/elastic-job": "true"}
    if asked.replaces:
        annotations["kueue.x-k8s.io/workload-slice-replacement-for"] = f"{job.namespace}/{asked.replaces}"
    spec: Json = {"queueName": job.queue, "podSets": sets, **_priority(job)}
    return make_object(API_VERSION, KIND, {**metadata(job, asked.name, labels), "annotations": annotations}, spec=spec)


def _topology_request(job: DDPJob) -> Json:
    """Return the pod set's topologyRequest, according to the annotations in podTemplate.

    The request makes Kueue place pods of consecutive slots in the same topology domain.
    """
    given: Json = (job.spec.pod_template.get("metadata") or {}).get("annotations") or {}
    request: Json = {"podIndexLabel": LABEL_INDEX}
    field = next((field for field, annotation in TOPOLOGIES.items() if annotation in given), "")
    if field:
        request[field] = given[TOPOLOGIES[field]]
    elif UNCONSTRAINED in given:
        request["unconstrained"] = given[UNCONSTRAINED] == "true"
    if _SLICE in given and given.get(_SLICE_SIZE, "").isdecimal():
        request |= {"podSetSliceRequiredTopology": given[_SLICE], "podSetSliceSize": int(given[_SLICE_SIZE])}
    return request


def _priority(job: DDPJob) -> Json:
    template: Json = job.spec.pod_template.get("spec") or {}
    name, kind = job.queue_priority, "WorkloadPriorityClass"
    if not name:
        name = template.get("priorityClassName") or job.spec.scheduling.priority_class_name or ""
        kind = "PriorityClass"
    return {"priorityClassRef": {"group": PRIORITY_CLASSES[kind], "kind": kind, "name": name}} if name else {}


def _pod_set(name: str, pod: Json, number: int) -> Json:
    """Build a pod set from the fields of a pod that determine the quota and the flavor.

    Environment variables are left out, because their values may be confidential.
    """
    whole = pod["spec"]
    spec: Json = {field: whole[field] for field in _POD_FIELDS if field in whole}
    for kind in ("initContainers", "containers"):
        if whole.get(kind):
            spec[kind] = [{f: c[f] for f in _CONTAINER_FIELDS if f in c} for c in whole[kind]]
    affinity: dict[str, Any] = whole.get("affinity") or {}
    if "nodeAffinity" in affinity:
        spec["affinity"] = {"nodeAffinity": affinity["nodeAffinity"]}
    return {"name": name, "count": number, "template": {"metadata": {}, "spec": {**spec, "restartPolicy": "Never"}}}


# --- a Workload's status, part of which Kueue leaves to the jobs' controllers -----------------------------------


def marked(workload: Json, now: datetime, *, condition: str, reason: str, message: str) -> Json:
    """Return the Workload with one of its conditions set to True."""
    return _with_conditions(workload, {condition: ("True", reason, message)}, now)


_REQUEUED_AT_ONCE = ("Preempted", "NodeFailures")
"""Reasons for an eviction that let Kueue admit the Workload again at once. After any other
eviction, Kueue itself decides when to admit the Workload again."""


def released(workload: Json, now: datetime) -> Json | None:
    """Return an evicted Workload without its quota, or None if the Workload is not evicted.

    Kueue itself makes the same changes for the kinds of jobs that it manages.
    """
    known = {c["type"]: c for c in workload["status"].get("conditions") or ()}
    evicted = known.get("Evicted", {})
    if evicted.get("status") != "True":
        return None
    reason, message = evicted.get("reason") or "Evicted", evicted.get("message") or ""
    conditions = {
        "QuotaReserved": ("False", "Pending", message),
        "Admitted": ("False", "NoReservation", "The workload has no reservation"),
        "Requeued": ("True" if reason in _REQUEUED_AT_ONCE else "False", reason, message),
    }
    if "PodsReady" in known:
        conditions["PodsReady"] = ("False", "WaitForStart", "Not all pods are ready or succeeded")
    status = {key: value for key, value in workload["status"].items() if key != "admission"}
    return _with_conditions({**workload, "status": status}, conditions, now)


def _with_conditions(workload: Json, changes: dict[str, tuple[str, str, str]], now: datetime) -> Json:
    """Return the Workload with some of its conditions changed.

    `changes` maps the type of each changed condition to its new status, reason and message.
    """
    status = workload.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    for kind, (state, reason, message) in changes.items():
        old = conditions.get(kind, {})
        conditions[kind] = {
            "type": kind,
            "status": state,
            "reason": reason,
            "message": message,
            "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == state else format_time(now),
            "observedGeneration": workload["metadata"].get("generation", 0),
        }
    return {**workload, "status": {**status, "conditions": list(conditions.values())}}
