"""What a pass has seen of one job: pods, claims and the coordinator's report, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from ddpjob.api.types import DDPJob, Json, parse_time
from ddpjob.core.hosts import HostView

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
    SPARE = "spare"
    COORDINATOR = "coordinator"


NODE_ROLES = (Role.NODE, Role.SPARE)
"""Pods of slots; which of them train is the coordinator's choice, and the label follows it."""


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
        name = COORDINATOR_CONTAINER if self.role is Role.COORDINATOR else TRAINER_CONTAINER
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
    backoff_seconds: float = 0.0
    """How long the coordinator waits before the next round."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A pod that is connected to the coordinator."""

    pod: str
    state: str
    """Starting, Ready (waits for a place), Running, Finished, Leaving."""
    rank: int | None = None
    """Of the node in the present round."""


@dataclass(frozen=True, kw_only=True)
class LostMember:
    """A pod that was connected, and is silent `since`."""

    pod: str
    since: datetime


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something that a pod says of itself, such as that it cannot have warm workers."""

    pod: str
    kind: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The coordinator's answer to `GET /status`."""

    generation: int
    state: str
    attempt: int = 0
    wanted: int | None = None
    minimum: int | None = None
    hang_after: float | None = None
    backoff: tuple[float, ...] | None = None
    """Initial and longest, in seconds; None where a coordinator does not tell."""
    """The size that the coordinator forms groups for."""
    world: int | None = None
    """Nodes of the present round."""
    members: tuple[Member, ...] = ()
    lost: tuple[LostMember, ...] = ()
    notes: tuple[Note, ...] = ()
    backoff_until: datetime | None = None
    down_since: datetime | None = None
    incidents: tuple[Incident, ...] = ()
    progress: Json = field(default_factory=dict)
    recovery_seconds: float | None = None
    version: int = 0

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Report:
        """Raises KeyError or ValueError where the coordinator does not keep to the contract."""
        recovery = body.get("recovery") or {}
        return cls(
            generation=int(body["generation"]),
            state=str(body["state"]),
            attempt=int(body.get("attempt", 0)),
            wanted=body.get("wanted"),
            minimum=body.get("minimum"),
            hang_after=body.get("hangAfter"),
            backoff=tuple(body["backoff"]) if body.get("backoff") else None,
            world=body.get("world"),
            members=tuple(Member(pod=str(m["pod"]), state=str(m["state"]), rank=m.get("rank")) for m in body.get("members", ())),
            lost=tuple(LostMember(pod=str(m["pod"]), since=_time(m["since"])) for m in body.get("lost", ())),
            notes=tuple(Note(pod=str(n["pod"]), kind=str(n["kind"]), why=_text(n.get("why"))) for n in body.get("notes", ())),
            backoff_until=parse_time(body.get("backoffUntil")),
            down_since=parse_time(recovery.get("downSince")),
            incidents=tuple(_read_incident(i) for i in body.get("incidents", ())),
            progress=dict(body.get("progress") or {}),
            recovery_seconds=recovery.get("lastSeconds"),
            version=int(body.get("version", 0)),
        )


def _read_incident(body: Mapping[str, Any]) -> Incident:
    return Incident(
        id=int(body["id"]),
        time=_time(body["time"]),
        kind=str(body["kind"]),
        pod=str(body.get("pod") or ""),
        index=int(body.get("index") or 0),
        rank=body.get("rank"),
        local_rank=body.get("localRank"),
        exit_code=body.get("exitCode"),
        signal=body.get("signal"),
        message=_text(body.get("message")),
        traceback=_text(body.get("traceback")),
        backoff_seconds=float(body.get("backoffSeconds") or 0),
    )


def _time(text: Any) -> datetime:
    moment = parse_time(text)
    if moment is None:
        raise ValueError("a time is missing")
    return moment


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
    has_budget: bool = False
    """Whether the job's PodDisruptionBudget (its name is the job's) is there."""
    pod_files: str = ""
    """Name of the job's ConfigMap of pod files, if it exists; or empty."""
    pod_files_offered: str = ""
    """Name of the one this version of the operator would make."""
    key_mark: str = ""
    """Of the key that the jobs' tokens are made from; pods of another key's tokens cannot speak with each other."""
    report: Report | None = None
    claims: tuple[ClaimView, ...] = ()
    hosts: Mapping[str, HostView] | None = None
    """Kubernetes nodes by name; a name that is missing: the node object is deleted. None: nothing is known of nodes."""
    problems: tuple[str, ...] = ()
    """What is wrong with the podTemplate, one sentence each."""
    rejections: tuple[Rejection, ...] = ()
    """What the API server refused when this decision was last applied."""

    def nodes(self) -> tuple[PodView, ...]:
        """Pods of slots, spares included."""
        return tuple(p for p in self.pods if p.role in NODE_ROLES)


def node_pod_name(job: DDPJob, index: int, attempt: int) -> str:
    return f"{job.name}-{index}-{attempt}"


def coordinator_pod_name(job: DDPJob, generation: int, attempt: int = 0) -> str:
    return f"{job.name}-coordinator-{generation}" + (f"-{attempt}" if attempt else "")
