"""Reads pods and claims of the Kubernetes API into the views that decisions need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpjob.api.types import parse_time
from ddpjob.core.world import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_ROLE,
    ClaimView,
    ContainerView,
    PodView,
    Role,
)


def read_pod(body: Mapping[str, Any]) -> PodView:
    """From a Pod object of a job. Raises KeyError or ValueError where its labels are missing or wrong."""
    meta, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
    labels = meta.get("labels", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    placed, disrupted = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    unschedulable = placed.get("status") == "False" and placed.get("reason") == "Unschedulable"
    hit = disrupted.get("status") == "True"
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        role=Role(labels[LABEL_ROLE]),
        index=int(labels.get(LABEL_INDEX, 0)),
        attempt=int(labels.get(LABEL_ATTEMPT, 0)),
        generation=int(labels.get(LABEL_GENERATION, 0)),
        phase=status.get("phase", "Pending"),
        host=spec.get("nodeName", ""),
        address=status.get("podIP", ""),
        created=parse_time(meta.get("creationTimestamp")),
        deleted_at=parse_time(meta.get("deletionTimestamp")),
        status_reason=status.get("reason", ""),
        status_message=status.get("message", ""),
        unschedulable=placed.get("message", "") if unschedulable else "",
        disruption=disrupted.get("reason", "") if hit else "",
        disruption_message=disrupted.get("message", "") if hit else "",
        containers={c["name"]: read_container(c) for c in status.get("containerStatuses", ())},
        init_containers={c["name"]: read_container(c) for c in status.get("initContainerStatuses", ())},
        grace_seconds=spec.get("terminationGracePeriodSeconds", 30),
    )


def read_container(status: Mapping[str, Any]) -> ContainerView:
    """From an item of `containerStatuses`."""
    state = status.get("state", {})
    waiting, running, ended = state.get("waiting", {}), state.get("running", {}), state.get("terminated")
    if ended is not None:
        return ContainerView(
            started=parse_time(ended.get("startedAt")),
            exit_code=ended.get("exitCode", -1),
            reason=ended.get("reason", ""),
            message=ended.get("message", ""),
            finished=parse_time(ended.get("finishedAt")),
        )
    return ContainerView(
        started=parse_time(running.get("startedAt")),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
    )


def read_claim(body: Mapping[str, Any]) -> ClaimView:
    """From a PersistentVolumeClaim object."""
    return ClaimView(name=body["metadata"]["name"], access_modes=tuple(body.get("spec", {}).get("accessModes", ())))
