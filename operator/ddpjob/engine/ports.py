"""The port through which a reconcile reads and writes: implemented for Kubernetes, for this machine and for tests.

Why: docs/decisions/0005.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.decision import Event
from ddpjob.core.world import Role, World
from ddpjob.objects.platform import Platform
from ddpjob.unavailable import Unavailable as Unavailable


class JobKey(NamedTuple):
    """Names a job."""

    namespace: str
    name: str


@dataclass(frozen=True)
class Observation:
    """A job and everything that belongs to it, observed after the job was read."""

    job: DDPJob
    world: World


class Conflict(Exception):
    """The job has changed since it was read: nothing was written, and it is reconciled again."""


class Refused(Exception):
    """The API server rejects an object, or a job's status. `status` is the HTTP status, `message` its explanation."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class NameTaken(Exception):
    """An object of this name exists and is not this job's but, for instance, an earlier job's of the same name.

    The message names the owner.
    """


class NamespaceEnding(Unavailable):
    """The namespace is being deleted, and the job with it: there is nothing left to do."""


class ReportPending(Unavailable):
    """The coordinator was asked for its first report a moment ago: what it says decides what the job's state is."""


class Cluster(Protocol):
    """Reads for `reconcile`, writes for `apply` alone. Every write is idempotent.

    Every method raises Unavailable when the API server cannot be used.
    """

    platform: Platform

    async def observe(self, key: JobKey) -> Observation | None:
        """The job and everything that belongs to it; None when it does not exist."""
        ...

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        """Replaces the status as of `job.resource_version`; returns the job as written. Raises Conflict, Refused."""
        ...

    async def create(self, job: DDPJob, manifest: Json) -> None:
        """Creates an object; one of this job that exists already is success. Raises NameTaken, Refused."""
        ...

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        """Requests a pod's deletion with a grace period in seconds (None: the pod's own).

        A pod that is gone, or has another uid, is success. A refusal is no error: the next observation shows it, and
        it is tried again after a while.
        """
        ...

    async def delete_gang(self, job: DDPJob, name: str, uid: str) -> None:
        """Requests a PodGroup's deletion; one that is gone, or has another uid, is success."""
        ...

    async def delete_workload(self, job: DDPJob, name: str, uid: str) -> None:
        """Requests a Workload's deletion; one that is gone, or has another uid, is success."""
        ...

    async def mark_workload(self, job: DDPJob, name: str, uid: str, condition: str, reason: str, message: str) -> None:
        """Sets a condition of a Workload to True; one that is gone, or has another uid, is success.

        So is a refusal. Raises Conflict.
        """
        ...

    async def release_workload(self, job: DDPJob, name: str, uid: str) -> None:
        """Gives back the quota of a Workload; one that is gone, or is not evicted, is success, and so is a refusal.

        Raises Conflict.
        """
        ...

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        """Sets a pod's role label; a pod that is gone, or has another uid, is success, and so is a refusal."""
        ...

    async def delete_job(self, job: DDPJob) -> None:
        """Deletes the job; Kubernetes' garbage collector removes what it owns."""
        ...

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        """Sends `POST /v1/VERB` to the coordinator at `host:port`; an empty or unreachable endpoint is no error."""
        ...

    async def send_notification(self, job: DDPJob, id: str, receiver: str, body: Json) -> None:
        """Has it posted to the receiver, without waiting for that; one whose id is known changes nothing."""
        ...

    async def record(self, job: DDPJob, event: Event) -> None:
        """Records an event on the job."""
        ...
