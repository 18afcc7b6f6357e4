"""What a pass wants: a status to write, actions to perform, events to record, and when to look again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpjob.api.types import JobStatus, Json
from ddpjob.core.world import Role


@dataclass(frozen=True)
class CreateService:
    """The headless service of the job."""


@dataclass(frozen=True)
class CreatePodFiles:
    """The ConfigMap of pod files; its name is `status.pod_files`."""


@dataclass(frozen=True)
class CreateBudget:
    """The PodDisruptionBudget of the job's node pods."""


@dataclass(frozen=True)
class CreateCoordinator:
    """The coordinator pod; generation and attempt are the status'."""


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
class LabelPod:
    """Another role label for a pod of a slot: the coordinator has given it, or taken from it, a place in the group."""

    name: str
    uid: str
    role: Role


@dataclass(frozen=True)
class DeleteJob:
    """The job itself, after its time to live."""


@dataclass(frozen=True)
class Tell:
    """A message to the coordinator at `endpoint` (host:port): `POST /v1/VERB`. Nothing depends on its arrival."""

    endpoint: str
    verb: str
    body: Json = field(hash=False)


Creation = CreateService | CreatePodFiles | CreateBudget | CreateCoordinator | CreateNode
Action = Creation | DeletePod | LabelPod | DeleteJob | Tell


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
