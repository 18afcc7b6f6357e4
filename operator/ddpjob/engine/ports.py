"""What a pass needs of the place where jobs live: Kubernetes, or this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ddpjob.api.types import DDPJob, Json
from ddpjob.core.decision import Event
from ddpjob.core.world import Role, World
from ddpjob.objects.site import Site


class JobKey(NamedTuple):
    namespace: str
    name: str


@dataclass(frozen=True)
class Observation:
    job: DDPJob
    world: World


class Conflict(Exception):
    """The job changed since it was read: nothing was written, the pass is made again."""


class Refused(Exception):
    """The API server does not accept an object. `status` is the HTTP status, `message` its explanation."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class NameTaken(Exception):
    """An object of this name exists and is not this job's, for instance an earlier job's of the same name. Its text says whose."""


class Unavailable(Exception):
    """The API server is away, throttles, or timed out: tried again later. `retry_after` in seconds, `status` of HTTP, where it said so."""

    def __init__(self, message: str, retry_after: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status


class NamespaceEnding(Unavailable):
    """The namespace is being deleted, and the job with it: nothing is left to do."""


class Cluster(Protocol):
    """Reads for the pass, writes for `apply` alone. Every write may be repeated with no harm."""

    site: Site

    async def observe(self, key: JobKey) -> Observation | None:
        """All that belongs to a job; None when there is no such job."""
        ...

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        """Replaces the status as of `job.resource_version`; returns the job as written. Raises Conflict."""
        ...

    async def create(self, job: DDPJob, manifest: Json) -> None:
        """Creates an object; one of this job that is there already is success. Raises NameTaken, Refused."""
        ...

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        """Asks for a pod's end; one that is gone, or is another by now, is success."""
        ...

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        """Sets a pod's role label; one that is gone, or is another by now, is success."""
        ...

    async def delete_job(self, job: DDPJob) -> None:
        """Deletes the job; what it owns is collected after it."""
        ...

    async def tell(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        """Posts to the coordinator at `host:port`; an empty endpoint or an unreachable one is no error."""
        ...

    async def record(self, job: DDPJob, event: Event) -> None:
        """Records an event on the job."""
        ...
