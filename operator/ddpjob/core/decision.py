"""What a pass wants: a status to write, actions to perform, events to record, and when to look again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpjob.api.types import JobStatus, Json


@dataclass(frozen=True)
class CreateService:
    """The headless service of the job."""


@dataclass(frozen=True)
class CreatePodFiles:
    """The ConfigMap of pod files; its name is `status.pod_files`."""


@dataclass(frozen=True)
class CreateCoordinator:
    generation: int


@dataclass(frozen=True)
class CreateNode:
    index: int
    attempt: int


@dataclass(frozen=True)
class DeletePod:
    """With the uid as a precondition, so that a namesake is never hit. `grace` in seconds; None: the pod's own."""

    name: str
    uid: str
    grace: int | None = None


@dataclass(frozen=True)
class DeleteJob:
    """The job itself, after its time to live."""


@dataclass(frozen=True)
class Tell:
    """A message to the coordinator at `endpoint` (host:port): `POST /v1/VERB`. Nothing depends on its arrival."""

    endpoint: str
    verb: str
    body: Json = field(hash=False)


Action = CreateService | CreatePodFiles | CreateCoordinator | CreateNode | DeletePod | DeleteJob | Tell


@dataclass(frozen=True)
class Event:
    """A Kubernetes event on the job."""

    warning: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake: float | None = None
    """Seconds until the next look; None: only when something changes."""
