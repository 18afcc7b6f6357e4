"""The `Cluster` interface, which is implemented for Kubernetes, for this machine and for tests.

A reconcile reads and writes only through this interface. docs/decisions/0005 explains why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.decision import Event
from ddpjob.core.world import Role, World
from ddpjob.objects.platform import Platform
from ddpjob.unavailable import Unavailable as Unavailable


class JobKey(NamedTuple):
    """Namespace and name of a job."""

    namespace: str
    name: str


@dataclass(frozen=True)
class Observation:
    """A job, and the state of everything that belongs to it. The job was read first."""

    job: DDPJob
    world: World


class Conflict(Exception):
    """The job, or an object of the job, has changed since it was read.

    That object was not written, and the job will be reconciled again.
    """


class Refused(Exception):
    """The API server rejected an object or a job's status.

    `status` is the HTTP status, and `message` explains it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class NameTaken(Exception):
    """A different owner already has an object with this name.

    The owner may be an earlier job with the same name. The message names the owner.
    """


class NamespaceEnding(Unavailable):
    """The namespace is being deleted together with the job, so there is nothing left to do."""


class ReportPending(Unavailable):
    """The coordinator's first report was requested a moment ago and has not arrived yet.

    The state of the job cannot be judged without that report, so the reconcile is repeated soon.
    """


class Cluster(Protocol):
    """Access to jobs and their objects: `reconcile` only reads, and only `apply` writes.

    Every write is idempotent. Every method raises Unavailable when the API server cannot be used.
    """

    platform: Platform

    async def observe(self, key: JobKey) -> Observation | None:
        """Return the job and everything that belongs to it, or None if the job does not exist."""

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        """Replace the job's status and return the job as written.

        Raises Conflict if the job no longer has `job.resource_version`, and Refused if the API
        server rejects the status.
        """

    async def create(self, job: DDPJob, manifest: Json) -> None:
        """Create an object, unless this job already has it. Raises NameTaken or Refused."""

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        """Start deleting a pod, with a grace period in seconds.

        If `grace` is None, the pod's own grace period is used. Succeed if the pod is gone or has a
        different uid. A refusal is not an error. If the next observation still shows the pod, the
        request is repeated after a while.
        """

    async def delete(self, job: DDPJob, kind: str, name: str, uid: str) -> None:
        """Start deleting a PodGroup, a Workload or the job itself.

        Succeed if the object is gone or has a different uid. Kubernetes' garbage collector removes
        the objects that a job owns.
        """

    async def change_workload(
        self, job: DDPJob, name: str, uid: str, change: Callable[[Json, datetime], Json | None]
    ) -> None:
        """Apply `change` to a Workload, and store the result.

        If `change` returns None, the Workload stays unchanged. Succeed if the Workload is gone or
        has a different uid. A refusal is not treated as an error. Raises Conflict.
        """

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        """Set a pod's role label.

        Succeed if the pod is gone or has a different uid. A refusal is not treated as an error.
        """

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        """Send `POST /v1/VERB` to the coordinator at `host:port`.

        An empty or unreachable endpoint is not an error.
        """

    async def send_notification(self, job: DDPJob, id: str, receiver: str, body: Json) -> None:
        """Queue a notification for the receiver without waiting for its delivery.

        Do nothing if this id has already been queued.
        """

    async def record(self, job: DDPJob, event: Event) -> None:
        """Record an event on the job."""
