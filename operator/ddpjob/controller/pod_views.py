"""Converts pods, claims and Workloads from the Kubernetes API into the views that `core` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpjob_runtime.protocol import clip_kept

from ddpjob.api.job_status import PodChanges, QueueStatus, parse_time
from ddpjob.core.world import (
    ANNOTATION_TEMPLATE,
    ANNOTATION_WORKLOAD,
    COORDINATOR_CONTAINER,
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_MANAGED,
    LABEL_ROLE,
    LABEL_UID,
    MANAGED_BY,
    TRAINER_CONTAINER,
    ClaimView,
    ContainerView,
    PodView,
    Role,
    WorkloadView,
)
from ddpjob.objects.workload import (
    COORDINATOR_SET,
    LABEL_ADDITIONAL,
    LABEL_SHAPE,
    NODE_SET,
    TOPOLOGIES,
    UNCONSTRAINED,
)

_LONGEST_TEXT = 1000
_LONGEST_ENDING = 4096
"""Maximum number of characters that are read from a container's termination message. Kubernetes has
the same limit."""
_MOST_CONTAINERS = 64
"""Maximum number of containers that are read from a pod. The trainer or the coordinator is always
among them."""
_LARGEST_LABEL = 2**31
_MOST_DEVICES, _LONGEST_AMOUNT = 16, 6
_OF_LIMIT_RANGE = "kubernetes.io/limit-ranger"
_MAIN = (TRAINER_CONTAINER, COORDINATOR_CONTAINER)


def read_pod(body: Mapping[str, Any]) -> PodView:
    """Convert a Pod object to the view of a pod.

    The size of the view is limited, because anyone who is permitted to create pods can label a pod
    as belonging to a job. Raises KeyError or ValueError if the labels are missing or invalid.
    """
    meta, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
    labels = meta.get("labels", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    placed, disrupted = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    prepared = conditions.get("PodReadyToStartContainers", {}).get("status")
    unplaced = placed.get("message", "") if placed.get("status") == "False" else ""
    # A pod that is not scheduled can also have the reason Unschedulable or SchedulerError.
    gated = placed.get("reason") == "SchedulingGated"
    hit = disrupted.get("status") == "True"
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        role=Role(labels[LABEL_ROLE]),
        index=_number(labels, LABEL_INDEX),
        attempt=_number(labels, LABEL_ATTEMPT),
        generation=_number(labels, LABEL_GENERATION),
        phase=status.get("phase", "Pending"),
        host=spec.get("nodeName", ""),
        address=status.get("podIP", ""),
        created=parse_time(meta.get("creationTimestamp")),
        deleted_at=parse_time(meta.get("deletionTimestamp")),
        status_reason=_text(status.get("reason")),
        status_message=_text(status.get("message")),
        unschedulable="" if gated else _text(unplaced),
        gated=_text(unplaced) if gated else "",
        scheduled=parse_time(placed.get("lastTransitionTime")) if placed.get("status") == "True" else None,
        prepared=prepared == "True" if prepared is not None else None,
        disruption=_text(disrupted.get("reason")) if hit else "",
        disruption_message=_text(disrupted.get("message")) if hit else "",
        containers=_containers(status.get("containerStatuses", ())),
        init_containers=_containers(status.get("initContainerStatuses", ())),
        initialized=conditions.get("Initialized", {}).get("status") == "True",
        grace_seconds=spec.get("terminationGracePeriodSeconds", 30),
        devices=_devices(spec),
        default_memory=_default_memory(meta, spec),
    )


def _devices(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return how many devices of each kind the containers of a pod request together.

    A resource counts as a device if its name contains a domain and its amount is a whole number.
    """
    found: dict[str, int] = {}
    for container in spec.get("containers", ())[:_MOST_CONTAINERS]:
        for name, amount in ((container.get("resources") or {}).get("limits") or {}).items():
            if "/" in name and str(amount).isdecimal() and len(str(amount)) <= _LONGEST_AMOUNT:
                found[name] = found.get(name, 0) + int(amount)
    return dict(sorted(found.items())[:_MOST_DEVICES])


def _default_memory(meta: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """Return the memory limit of the pod's main container if it comes from a LimitRange.

    If the pod's author has set the limit, the result is empty. The admission plugin sets the
    missing values, and lists them in an annotation on the pod, such as `LimitRanger plugin set:
    cpu, memory request for container trainer; memory limit for container trainer`.
    """
    said = str((meta.get("annotations") or {}).get(_OF_LIMIT_RANGE, "")).partition(": ")[2].split("; ")
    for container in spec.get("containers", ()):
        if container["name"] in _MAIN and any(_sets_memory(part, container["name"]) for part in said):
            return _text(str(((container.get("resources") or {}).get("limits") or {}).get("memory", "")), 40)
    return ""


def _sets_memory(said: str, container: str) -> bool:
    names, found, of = said.partition(" limit for container ")
    return bool(found) and of == container and "memory" in names.split(", ")


def _number(labels: Mapping[str, str], label: str) -> int:
    value = int(labels.get(label, 0))
    if not 0 <= value < _LARGEST_LABEL:
        raise ValueError(f"{label}={value}: must be a number from 0 to {_LARGEST_LABEL - 1}")
    return value


def _text(text: str | None, most: int = _LONGEST_TEXT) -> str:
    return clip_kept(text or "", most)


def _containers(statuses: Sequence[Mapping[str, Any]]) -> dict[str, ContainerView]:
    kept = sorted(statuses, key=lambda c: c["name"] not in _MAIN)[:_MOST_CONTAINERS]
    return {c["name"]: read_container(c) for c in kept}


def read_container(status: Mapping[str, Any]) -> ContainerView:
    """Convert an item of `containerStatuses` to the view of a container."""
    state = status.get("state", {})
    waiting, running, ended = state.get("waiting", {}), state.get("running", {}), state.get("terminated")
    if ended is not None:
        return ContainerView(
            started=parse_time(ended.get("startedAt")),
            exit_code=ended.get("exitCode", -1),
            reason=_text(ended.get("reason")),
            message=_text(ended.get("message"), _LONGEST_ENDING),
            finished=parse_time(ended.get("finishedAt")),
        )
    return ContainerView(
        started=parse_time(running.get("startedAt")),
        waiting_reason=_text(waiting.get("reason")),
        waiting_message=_text(waiting.get("message")),
    )


def read_claim(body: Mapping[str, Any]) -> ClaimView:
    """Convert a PersistentVolumeClaim object to the view of a claim."""
    meta = body["metadata"]
    labels = meta.get("labels") or {}
    made = labels.get(LABEL_MANAGED) == MANAGED_BY
    return ClaimView(
        name=meta["name"],
        access_modes=tuple(body.get("spec", {}).get("accessModes", ())),
        made_by=labels.get(LABEL_UID, "") if made else "",
        made_for=labels.get(LABEL_JOB, "") if made else "",
        template=(meta.get("annotations") or {}).get(ANNOTATION_TEMPLATE, ""),
        owners=tuple(owner["uid"] for owner in meta.get("ownerReferences") or ()),
        deleting="deletionTimestamp" in meta,
    )


def read_workload(body: Mapping[str, Any]) -> WorkloadView:
    """Convert a Workload object to the view of a job's Workload.

    The view does not contain the fields that the Workload's flavors add to pods, because this
    object only names the flavors. Raises KeyError if the object has no name.
    """
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    held = {kind for kind, c in conditions.items() if c.get("status") == "True"}
    priority = spec.get("priorityClassRef") or {}
    admission = status.get("admission") or {}
    assigned = {a.get("name"): a for a in admission.get("podSetAssignments") or ()}
    sets = {one.get("name"): one for one in spec.get("podSets") or ()}
    nodes, coordinator = assigned.get(NODE_SET), assigned.get(COORDINATOR_SET, {})
    grant, message = None, _said(conditions, held, status)
    if "Admitted" in held and nodes is not None:
        asked = sets.get(NODE_SET, {}).get("count", 1)
        # Kueue may leave out the count if it equals the requested count.
        pods = nodes.get("count", asked)
        if isinstance(pods, int) and 1 <= pods <= asked:
            grant = QueueStatus(
                workload=meta["name"],
                uid=meta["uid"],
                cluster_queue=str(admission.get("clusterQueue", "")),
                pods=pods,
                node=_with_topology(_checks_changes(status, NODE_SET), meta["name"], nodes, sets),
                coordinator=_with_topology(_checks_changes(status, COORDINATOR_SET), meta["name"], coordinator, sets),
            )
        else:
            message = f"its Workload is admitted for count={clip_kept(str(pods), 40)}: must be from 1 to {asked}"
    return WorkloadView(
        name=meta["name"],
        uid=meta["uid"],
        asks=(str(spec.get("queueName", "")), str(priority.get("name", ""))),
        shape=str((meta.get("labels") or {}).get(LABEL_SHAPE, "")),
        additional=LABEL_ADDITIONAL in (meta.get("labels") or {}),
        reserved="QuotaReserved" in held,
        admitted=grant is not None,
        evicted=str(conditions["Evicted"].get("reason", "")) if "Evicted" in held else "",
        finished=str(conditions["Finished"].get("reason", "")) if "Finished" in held else "",
        ready="PodsReady" in held,
        leaving="deletionTimestamp" in meta,
        message=message,
        grant=grant,
        flavors=(_flavors(nodes or {}), _flavors(coordinator)),
    )


def _said(conditions: Mapping[str, Any], held: set[str], status: Mapping[str, Any]) -> str:
    """Return Kueue's explanation of why a Workload was evicted or is waiting."""
    if "Evicted" in held and "QuotaReserved" in held:
        return str(conditions["Evicted"].get("message", ""))[:_LONGEST_TEXT]
    if "QuotaReserved" not in held:
        return str(conditions.get("QuotaReserved", {}).get("message", ""))[:_LONGEST_TEXT]
    checks = [c for c in status.get("admissionChecks") or () if c.get("state") != "Ready"]
    said = [f"admission check {c.get('name')} is {c.get('state')}: {c.get('message', '')}".rstrip(": ") for c in checks]
    return "; ".join(said)[:_LONGEST_TEXT]


def _flavors(assignment: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted({str(name) for name in (assignment.get("flavors") or {}).values()}))


def _checks_changes(status: Mapping[str, Any], pod_set: str) -> PodChanges:
    """Return the fields that admission checks add to the pods in a pod set.

    Only checks that have succeeded count.
    """
    changes = PodChanges()
    for check in status.get("admissionChecks") or ():
        for update in check.get("podSetUpdates") or ():
            if check.get("state") == "Ready" and update.get("name") == pod_set:
                changes = added(changes, update, update.get("nodeSelector"))
    return changes


def _with_topology(
    changes: PodChanges, workload: str, assignment: Mapping[str, Any], sets: Mapping[Any, Any]
) -> PodChanges:
    """Return a pod set's changes to its pods, with the marks that Kueue needs to place these pods.

    Kueue recognizes the pods by a label and annotations, and writes a topology domain into each
    pod's node selector. If Kueue has not assigned topology domains to the pod set, the changes are
    returned as they are.
    """
    if not assignment.get("topologyAssignment"):
        return changes
    name = str(assignment["name"])
    asked = sets.get(name, {}).get("topologyRequest") or {}
    marks = {ANNOTATION_WORKLOAD: workload}
    if not asked.keys() & {*TOPOLOGIES, "unconstrained"}:
        # Kueue has assigned a topology although the job did not request one, so all of the queue's
        # flavors have a topology.
        marks[UNCONSTRAINED] = "true"
    return added(changes, {"labels": {"kueue.x-k8s.io/podset": name}, "annotations": marks}, None)


def added(changes: PodChanges, more: Mapping[str, Any], selector: Mapping[str, str] | None) -> PodChanges:
    """Return these changes combined with the changes from a flavor or an admission check.

    `selector` contains the additional node selector. `more` contains the additional tolerations,
    labels and annotations.
    """
    tolerations = [t for t in more.get("tolerations") or () if t not in changes.tolerations]
    return PodChanges(
        node_selector={**changes.node_selector, **(selector or {})},
        tolerations=(*changes.tolerations, *tolerations),
        labels={**changes.labels, **(more.get("labels") or {})},
        annotations={**changes.annotations, **(more.get("annotations") or {})},
    )
