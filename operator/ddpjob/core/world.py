"""What a pass has seen of one job: pods, claims and the coordinator's report, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from ddpjob.api.types import DDPJob, Json, parse_time

TRAINER_CONTAINER = "trainer"
COORDINATOR_CONTAINER = "coordinator"

NAME_TAKEN = 409
"""HTTP's Conflict: `Rejection.status` where an object of another owner has the name."""

LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGED_BY = "ddpjob"
LABEL_JOB = "ddpjob.io/job"
LABEL_UID = "ddpjob.io/job-uid"
LABEL_ROLE = "ddpjob.io/role"
LABEL_INDEX = "ddpjob.io/index"
LABEL_ATTEMPT = "ddpjob.io/attempt"
LABEL_GENERATION = "ddpjob.io/generation"
LABEL_ROUND = "ddpjob.io/round"


class Role(StrEnum):
    NODE = "node"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, kw_only=True)
class ContainerView:
    """A container's state: at most one of waiting, started and exit_code tells of now."""

    waiting_reason: str = ""
    waiting_message: str = ""
    started: datetime | None = None
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    finished: datetime | None = None

    @property
    def running(self) -> bool:
        return self.started is not None and self.exit_code is None

    @property
    def ended(self) -> bool:
        return self.exit_code is not None


@dataclass(frozen=True, kw_only=True)
class PodView:
    """What decisions need of a pod."""

    name: str
    uid: str
    role: Role
    index: int = 0
    attempt: int = 0
    generation: int = 0
    phase: str = "Pending"
    node: str = ""
    address: str = ""
    created: datetime | None = None
    deleted_at: datetime | None = None
    """The moment by which the kubelet ends it; None while nobody has asked for its deletion."""
    status_reason: str = ""
    status_message: str = ""
    unschedulable: str = ""
    """The scheduler's message, while it finds no node."""
    disruption: str = ""
    """Reason of the DisruptionTarget condition: PreemptionByScheduler, EvictionByEvictionAPI, TerminationByKubelet, ..."""
    disruption_message: str = ""
    containers: Mapping[str, ContainerView] = field(default_factory=dict)
    init_containers: Mapping[str, ContainerView] = field(default_factory=dict)
    grace_seconds: int = 30

    @property
    def main(self) -> ContainerView:
        """The container that decides: the trainer's, in a coordinator pod the coordinator's."""
        name = TRAINER_CONTAINER if self.role is Role.NODE else COORDINATOR_CONTAINER
        return self.containers.get(name, ContainerView())

    @property
    def ended(self) -> bool:
        """The deciding container has ended, or the pod as a whole has."""
        return self.main.ended or self.phase in ("Succeeded", "Failed")

    @property
    def succeeded(self) -> bool:
        """A program that its node or an eviction told to end may end with 0 and has not finished its work."""
        if self.disruption or self.status_reason:
            return False
        return self.main.exit_code == 0 if self.main.ended else self.phase == "Succeeded"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One break of the group, as the coordinator tells it."""

    id: int
    time: datetime
    kind: str
    pod: str
    index: int
    rank: int | None
    local_rank: int | None
    exit_code: int | None
    signal: str | None
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The coordinator's answer to `GET /status`."""

    generation: int
    state: str
    incidents: tuple[Incident, ...] = ()
    progress: Json = field(default_factory=dict)
    recovery_seconds: float | None = None
    version: int = 0

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Report:
        """Raises KeyError or ValueError where the coordinator does not keep to the contract."""
        return cls(
            generation=int(body["generation"]),
            state=str(body["state"]),
            incidents=tuple(_read_incident(i) for i in body.get("incidents", ())),
            progress=dict(body.get("progress") or {}),
            recovery_seconds=(body.get("recovery") or {}).get("lastSeconds"),
            version=int(body.get("version", 0)),
        )


def _read_incident(body: Mapping[str, Any]) -> Incident:
    moment = parse_time(body["time"])
    if moment is None:
        raise ValueError("an incident has no time")
    return Incident(
        id=int(body["id"]),
        time=moment,
        kind=str(body["kind"]),
        pod=str(body.get("pod") or ""),
        index=int(body.get("index") or 0),
        rank=body.get("rank"),
        local_rank=body.get("localRank"),
        exit_code=body.get("exitCode"),
        signal=body.get("signal"),
        message=_text(body.get("message")),
        traceback=_text(body.get("traceback")),
    )


def _text(value: Any) -> str:
    """What an exception says may hold halves of surrogate pairs (file names that are not UTF-8): no API takes them."""
    return str(value or "").encode(errors="backslashreplace").decode()


@dataclass(frozen=True, kw_only=True)
class ClaimView:
    """A persistent volume claim the job names."""

    name: str
    exists: bool = True
    access_modes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """The API server refused to create an object."""

    object: str
    status: int
    message: str

    @property
    def final(self) -> bool:
        """Whether the same object will always be refused: its content is invalid."""
        return self.status in (400, 422)

    @property
    def name_taken(self) -> bool:
        return self.status == NAME_TAKEN


@dataclass(frozen=True, kw_only=True)
class World:
    """What belongs to one job at one moment."""

    pods: tuple[PodView, ...] = ()
    has_service: bool = False
    pod_files: str = ""
    """Name of the job's ConfigMap of pod files, if it exists; or empty."""
    pod_files_offered: str = ""
    """Name of the one this version of the operator would make."""
    key_mark: str = ""
    """Of the key that the jobs' tokens are made from; pods of another key's tokens cannot speak with each other."""
    report: Report | None = None
    claims: tuple[ClaimView, ...] = ()
    problems: tuple[str, ...] = ()
    """What is wrong with the podTemplate, one sentence each."""
    rejections: tuple[Rejection, ...] = ()
    """What the API server refused when this decision was last applied."""

    def nodes(self) -> tuple[PodView, ...]:
        return tuple(p for p in self.pods if p.role is Role.NODE)


def node_pod_name(job: DDPJob, index: int, attempt: int) -> str:
    return f"{job.name}-{index}-{attempt}"


def coordinator_pod_name(job: DDPJob, generation: int) -> str:
    return f"{job.name}-coordinator-{generation}"
