"""Defines the DDPJob of `ddpjob.io/v1alpha1`, a frozen dataclass with identity, spec and status."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ddpjob.api.job_spec import JobSpec, Json, oversized, without_large_fields
from ddpjob.api.job_status import ClassLimits, JobClass, JobStatus, parse_time
from ddpjob.api.merging import QUEUE, with_class

GROUP, VERSION, KIND, PLURAL = "ddpjob.io", "v1alpha1", "DDPJob", "ddpjobs"
API_VERSION = f"{GROUP}/{VERSION}"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
"""Labels that name a job's LocalQueue and WorkloadPriorityClass for Kueue."""


@dataclass(frozen=True, kw_only=True)
class DDPJob:
    """A job as it was read, with its identity, its spec and its latest status."""

    name: str
    namespace: str
    uid: str
    spec: JobSpec
    status: JobStatus
    generation: int = 1
    resource_version: str = ""
    created: datetime | None = None
    deleting: bool = False
    queue: str = ""
    """Name of the job's LocalQueue, from the job's label or its class. Empty if the job is not in a
    queue."""
    queue_priority: str = ""
    """Name of the job's WorkloadPriorityClass, from the job's label."""
    written: Json = field(default_factory=dict, compare=False, repr=False)
    """The `spec` as written in the object, without the class's values. Empty if the job names no
    class."""
    oversized: str = ""
    """Path to the part of the spec that is too large, or an empty string. A spec that is too large
    is read without its large fields, and no pods are created from it."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> DDPJob:
        """Read a whole object with metadata, spec and status.

        The result has the effective `spec`. If the status contains the job's class, the class's
        values are added, and nodes and spares are reduced to the class's limit. Raises KeyError or
        ValueError for a malformed object.
        """
        meta, spec = body["metadata"], body["spec"]
        too_large = oversized(spec)
        if too_large:
            spec = without_large_fields(spec)
        status = JobStatus.read(body.get("status") or {})
        taken = taken_class(spec, status)
        queue, queue_priority = queue_labels(meta, taken)
        return cls(
            name=meta["name"],
            namespace=meta.get("namespace", "default"),
            uid=meta["uid"],
            spec=JobSpec.read(spec) if taken is None else _within(JobSpec.read(classed(spec, taken)), taken.limits),
            status=status,
            generation=meta.get("generation", 1),
            resource_version=meta.get("resourceVersion", ""),
            created=parse_time(meta.get("creationTimestamp")),
            deleting="deletionTimestamp" in meta,
            queue=queue,
            queue_priority=queue_priority,
            written=spec if spec.get("className") else {},
            oversized=too_large,
        )

    def granted(self, status: JobStatus) -> DDPJob:
        """Return the job, reduced to the size for which its queue has granted quota.

        A queue can grant quota for fewer pods than the spec asks for. An elastic job then gives up
        its spares first, and nodes only if no spares are left. Any other job gets no additional
        nodes until the queue grants more quota.
        """
        if status.queue is None or status.queue.pods >= self.spec.pods:
            return self
        nodes = min(self.spec.nodes, status.queue.pods)
        if self.spec.elastic is None:
            nodes = min(nodes, status.rendezvous.nodes or nodes)
        return replace(self, spec=replace(self.spec, nodes=nodes, spares=max(0, status.queue.pods - nodes)))

    @property
    def made_claim(self) -> str:
        """Name of the claim that the job creates from its claimTemplate.

        Empty if the job creates no claim.
        """
        return f"{self.name}-checkpoints" if self.spec.storage.claim_template else ""

    @property
    def checkpoint_folder(self) -> str:
        """Path of the job's own folder in its checkpoint volume.

        Empty if the job uses the root of the volume. If other jobs can use the volume too, the
        folder is named after the job. docs/decisions/0027 explains why.
        """
        volume = self.spec.storage.checkpoints
        if volume is None:
            return ""
        if volume.sub_path:
            folder = posixpath.normpath(volume.sub_path)
            return "" if folder == "." else folder
        of_many = bool(volume.claim_name or volume.nfs) and not volume.read_only
        return self.name if of_many else ""

    @property
    def claims(self) -> tuple[str, ...]:
        """Names of the PersistentVolumeClaims that the pods mount, without duplicates."""
        volumes = (self.spec.storage.data, self.spec.storage.checkpoints)
        named = [v.claim_name for v in volumes if v and v.claim_name]
        return tuple(dict.fromkeys(name for name in (*named, self.made_claim) if name))

    @property
    def reference(self) -> Json:
        """The reference that other objects, such as events, use to identify the job."""
        return {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "uid": self.uid}

    @property
    def owner_reference(self) -> Json:
        """The owner reference in the metadata of this job's objects."""
        return {**self.reference, "controller": True, "blockOwnerDeletion": False}


def taken_class(spec: Mapping[str, Any], status: JobStatus) -> JobClass | None:
    """Return the class that applies to a job now, or None.

    `spec` is the job's spec as the user wrote it. A class applies if the spec names the class and
    the job's status already contains it.
    """
    taken = status.job_class
    return taken if taken is not None and taken.name == spec.get("className") else None


def classed(spec: Mapping[str, Any], given: JobClass) -> Json:
    """Return the user's spec with the class's values added."""
    return with_class(spec, given.spec, given.fixed)


def _within(spec: JobSpec, limits: ClassLimits) -> JobSpec:
    """Reduce the numbers of nodes and spares to the limit of the job's class.

    Otherwise, a user could scale a running job beyond this limit.
    """
    most = limits.max_nodes
    if most is None or spec.pods <= most:
        return spec
    nodes = max(1, min(spec.nodes, most))
    elastic = spec.elastic and replace(spec.elastic, min_nodes=min(spec.elastic.min_nodes, nodes))
    return replace(spec, nodes=nodes, spares=max(0, most - nodes), elastic=elastic)


def queue_labels(meta: Mapping[str, Any], taken: JobClass | None) -> tuple[str, str]:
    """Return the values of a DDPJob's `queue` and `queue_priority`.

    Both come from the job's labels. The queue can also come from the class. A changed label does
    not change the generation, so a cache that keeps the spec of an unchanged generation must read
    these values again.
    """
    labels = meta.get("labels") or {}
    queue = labels.get(QUEUE_LABEL, "")
    if taken is not None and (not queue or QUEUE in taken.fixed):
        queue = taken.queue
    return queue, labels.get(PRIORITY_LABEL, "")
