"""The outcome of a reconcile: the status to write, actions, events, and when to reconcile again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import JobStatus
from ddpjob.core.world import Role

POLL = 1.0
"""Seconds between reconciles while a job is changing, or while the operator does not follow the
reports of the job's coordinator."""
BLOCKED_POLL = 10.0
"""Seconds between reconciles while a job is blocked by something external, such as a missing claim
or quota."""


class Preparation(Enum):
    """Creates an object that pods need."""

    SERVICE = auto()
    """The job's headless service."""
    CLAIM = auto()
    """The PersistentVolumeClaim of storage.checkpoints.claimTemplate."""
    RUNTIME = auto()
    """The ConfigMap with the runtime for the job's pods. `status.runtime` holds its name."""
    BUDGET = auto()
    """The PodDisruptionBudget for the job's node pods."""
    POLICY = auto()
    """The NetworkPolicy for the job's pods. If it is rejected, the job runs without it."""
    TOKEN = auto()
    """The Secret with the token for the job's pods. The operator never reads it."""
    GANG = auto()
    """The generation's PodGroup. The scheduler places all of its pods or none."""


@dataclass(frozen=True)
class CreateWorkload:
    """Creates a Workload that asks Kueue for quota."""

    name: str
    pods: int
    """Number of pods to request quota for, without the coordinator's pod."""
    least: int = 0
    """The smallest number of pods that Kueue may admit if there is too little quota for all pods.
    0 means that Kueue must admit all pods."""
    replaces: str = ""
    """Name of the Workload that holds the job's quota now. Once Kueue has admitted the new
    Workload, the quota belongs to the new one."""
    after: int = 0
    """Number of pods that the job already has quota for. If this number is not 0, the Workload asks
    only for additional pods, and not for the coordinator's pod."""


@dataclass(frozen=True)
class CreateCoordinator:
    """Creates the pod of the coordinator that the status describes."""


@dataclass(frozen=True)
class CreateNode:
    """Creates the pod of a slot."""

    index: int
    attempt: int


@dataclass(frozen=True)
class DeletePod:
    """Deletes the pod with this name and uid. A newer pod with the same name is never deleted."""

    name: str
    uid: str
    grace: int | None = None
    """Grace period in seconds. If it is None, the pod's own grace period is used. If it is 0, the
    pod is deleted without waiting for its host to confirm that the containers have ended.
    """


@dataclass(frozen=True)
class DeleteGang:
    """Deletes the PodGroup of an old generation or of a finished job.

    A newer PodGroup with the same name but a different uid is never deleted.
    """

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteWorkload:
    """Deletes the Workload with this name and uid, but never a newer one with the same name."""

    name: str
    uid: str


@dataclass(frozen=True)
class MarkWorkload:
    """Reports to Kueue that a Workload's pods are running, or that they have ended for good."""

    name: str
    uid: str
    condition: str
    """Type of the Workload condition to set to True."""
    reason: str
    message: str


@dataclass(frozen=True)
class ReleaseWorkload:
    """Releases the quota of an evicted Workload and puts the Workload back into its queue."""

    name: str
    uid: str


@dataclass(frozen=True)
class LabelPod:
    """Changes the role label of a pod, after the coordinator has added the pod to the group or left
    it out.
    """

    name: str
    uid: str
    role: Role


@dataclass(frozen=True)
class DeleteJob:
    """Deletes the job itself, once runPolicy.ttlSecondsAfterFinished has passed."""


@dataclass(frozen=True)
class NotifyCoordinator:
    """Sends `POST /v1/VERB` to the coordinator at `endpoint` (host:port).

    The message may be lost. This does no harm, because the next reconcile sends it again if it is
    still needed.
    """

    endpoint: str
    verb: str
    body: Json = field(hash=False)


@dataclass(frozen=True)
class SendNotification:
    """Posts a notification to a receiver without waiting for the outcome.

    `World.outcomes` contains the outcome at a later reconcile.
    """

    id: str
    receiver: str
    body: Json = field(hash=False)


Creation = Preparation | CreateWorkload | CreateCoordinator | CreateNode
Queueing = DeleteWorkload | MarkWorkload | ReleaseWorkload
Change = DeletePod | DeleteGang | DeleteJob | LabelPod | Queueing
Action = Creation | Change | NotifyCoordinator | SendNotification


@dataclass(frozen=True)
class Event:
    """A Kubernetes event on the job."""

    warning: bool
    reason: str
    message: str
    once: bool = False
    """Whether to skip the event if the cluster still has an identical event for this job."""


@dataclass(frozen=True)
class Failure:
    """Why the job failed: the reason and message of its Failed condition."""

    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """The outcome of `decide`. `ddpjob.engine.apply` acts on the fields in this order."""

    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake: float | None = None
    """Seconds until the next reconcile. None means that only a change causes the next reconcile."""
