"""What a reconcile observes of one job: pods, hosts, claims and the coordinator's report, as frozen values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any

from ddpjob_runtime.protocol import Report

from ddpjob.api.types import DDPJob

TRAINER_CONTAINER = "trainer"
COORDINATOR_CONTAINER = "coordinator"

NAME_TAKEN = 409
"""HTTP's Conflict: `Rejection.status` where an object of another owner has the name."""

OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"

LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGED_BY = "ddpjob"
LABEL_JOB = "ddpjob.io/job"
LABEL_UID = "ddpjob.io/job-uid"
LABEL_ROLE = "ddpjob.io/role"
LABEL_INDEX = "ddpjob.io/index"
LABEL_ATTEMPT = "ddpjob.io/attempt"
LABEL_GENERATION = "ddpjob.io/generation"
LABEL_ROUND = "ddpjob.io/round"
LABEL_ISOLATED = "ddpjob.io/isolated"
LABEL_BUDGET = "ddpjob.io/disruption-budget"


class Role(StrEnum):
    """Value of the label `ddpjob.io/role`."""

    NODE = "node"
    SPARE = "spare"
    COORDINATOR = "coordinator"


NODE_ROLES = (Role.NODE, Role.SPARE)
"""Roles of slots' pods. Which of them train is the coordinator's choice, and the label follows it."""


@dataclass(frozen=True, kw_only=True)
class ContainerView:
    """A container's state. At most one of waiting, started and exit_code describes the present."""

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


_NO_CONTAINER = ContainerView()


@dataclass(frozen=True, kw_only=True)
class PodView:
    """A pod, as far as decisions need it."""

    name: str
    uid: str
    role: Role
    index: int = 0
    attempt: int = 0
    generation: int = 0
    phase: str = "Pending"
    host: str = ""
    """Name of the Kubernetes node that the pod is bound to; empty until it is scheduled."""
    address: str = ""
    created: datetime | None = None
    deleted_at: datetime | None = None
    """The moment by which the kubelet ends it; None while its deletion has not been requested."""
    status_reason: str = ""
    status_message: str = ""
    unschedulable: str = ""
    """The scheduler's message while no host fits."""
    disruption: str = ""
    """Reason of the condition DisruptionTarget: PreemptionByScheduler, EvictionByEvictionAPI, ..."""
    disruption_message: str = ""
    containers: Mapping[str, ContainerView] = field(default_factory=dict)
    init_containers: Mapping[str, ContainerView] = field(default_factory=dict)
    grace_seconds: int = 30

    @cached_property
    def main(self) -> ContainerView:
        """The main container: the trainer's, or in a coordinator pod the coordinator's."""
        name = COORDINATOR_CONTAINER if self.role is Role.COORDINATOR else TRAINER_CONTAINER
        return self.containers.get(name, _NO_CONTAINER)

    @cached_property
    def ended(self) -> bool:
        """Whether the main container has ended, or the pod as a whole."""
        return self.main.ended or self.phase in ("Succeeded", "Failed")

    @cached_property
    def succeeded(self) -> bool:
        """Whether it has finished its work. A program that is evicted may end with 0 without having done so."""
        if self.disruption or self.status_reason:
            return False
        return self.main.exit_code == 0 if self.main.ended else self.phase == "Succeeded"


REMEMBERED = timedelta(hours=1)
"""How long a deleted host is remembered, which is longer than pods outlive theirs."""


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A Kubernetes node."""

    name: str
    ready: bool
    """Whether its Ready condition is True. Unknown, the state of a host without a network, is not ready."""
    since: datetime | None
    """When the operator saw `ready` change last, by its own clock (see `remembered`). None: not known."""
    out_of_service: bool
    """Whether an administrator has marked it, by a taint, as down for good: nothing on it runs any more."""
    deleted: bool = False
    """Whether it was seen, and its object is deleted since."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> HostView:
        """From a Node object. Raises KeyError for a body without a name, ValueError for a time that cannot be read."""
        conditions = (body.get("status") or {}).get("conditions") or ()
        ready: Mapping[str, Any] = next((c for c in conditions if c["type"] == "Ready"), {})
        taints = (body.get("spec") or {}).get("taints") or ()
        return cls(
            name=str(body["metadata"]["name"]),
            ready=ready.get("status") == "True",
            since=None,
            out_of_service=any(t["key"] == OUT_OF_SERVICE_TAINT for t in taints),
        )


def remembered(
    before: Mapping[str, HostView] | None, found: Mapping[str, HostView], now: datetime
) -> dict[str, HostView]:
    """The hosts that were `found`, with what the operator remembers of those from `before`.

    That is since when each is ready or is not, and which were deleted. A host that was never seen
    may be newer than what was found: it is unknown, not deleted.
    """
    hosts = {}
    for name, host in (before or {}).items():
        if name not in found and not host.deleted:
            hosts[name] = replace(host, ready=False, deleted=True, since=now)
        elif name not in found and host.since is not None and now - host.since < REMEMBERED:
            hosts[name] = host
    for name, host in found.items():
        old = (before or {}).get(name)
        same = old is not None and (old.ready, old.deleted) == (host.ready, False)
        hosts[name] = replace(host, since=old.since if old is not None and same else now)
    return hosts


@dataclass(frozen=True, kw_only=True)
class ClaimView:
    """A persistent volume claim that the job names."""

    name: str
    exists: bool = True
    access_modes: tuple[str, ...] = ()


_POLICY = re.compile(r"admission webhook|AdmissionPolicy|denied", re.IGNORECASE)
"""What the API server writes where a webhook or an admission policy rejects an object, or cannot be asked."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """An object that the API server rejected."""

    object: str
    status: int
    message: str
    optional: bool = False
    """Whether the job runs without it."""

    @property
    def final(self) -> bool:
        """Whether the same object will always be rejected: its content is invalid.

        A denial by an admission policy has the same HTTP statuses, and lasts as long as the policy.
        """
        return self.status in (400, 422) and not _POLICY.search(self.message)

    @property
    def name_taken(self) -> bool:
        return self.status == NAME_TAKEN


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that belongs to one job, at one moment."""

    pods: tuple[PodView, ...] = ()
    departed: tuple[PodView, ...] = ()
    """The last that was known of pods that are gone: as the event of their deletion showed them."""
    has_service: bool = False
    has_budget: bool = False
    """Whether the job's PodDisruptionBudget (named as the job) exists."""
    runtime: str = ""
    """Name of the ConfigMap with the runtime of the job's pods, if it exists; or empty."""
    runtime_offered: str = ""
    """Name of the one that this version of the operator would create."""
    key_mark: str = ""
    """Identifies the key that the jobs' tokens derive from; pods with tokens of different keys reject each other."""
    report: Report | None = None
    report_seconds: float = 0.0
    """How old a report may become whose news wake the job by themselves. 0: each reconcile reads it."""
    claims: tuple[ClaimView, ...] = ()
    hosts: Mapping[str, HostView] | None = None
    """Kubernetes nodes by name; of a missing one nothing is known. None: the state of hosts is not known at all."""
    problems: tuple[str, ...] = ()
    """Faults of the podTemplate, one sentence each."""
    rejections: tuple[Rejection, ...] = ()
    """What the API server rejected when this decision was last applied, without what is optional."""
    policy: str = ""
    """Name of the NetworkPolicy that this operator makes for the job; empty: it makes none."""
    has_policy: bool = False
    """Whether it exists."""
    policy_refused: str = ""
    """Why the API server rejected it when this decision was last applied."""

    def nodes(self) -> tuple[PodView, ...]:
        """The pods of slots, spares included."""
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple[PodView, ...]:
        return tuple(p for p in self.pods if p.role in NODE_ROLES)

    @cached_property
    def nodes_by_name(self) -> Mapping[str, PodView]:
        """The pods of slots."""
        return {p.name: p for p in self.nodes()}

    def last_of(self, name: str) -> PodView | None:
        """The last that was known of a pod that is gone."""
        return self._departed_by_name.get(name)

    @cached_property
    def _departed_by_name(self) -> Mapping[str, PodView]:
        return {p.name: p for p in self.departed}

    @cached_property
    def silent(self) -> Mapping[str, datetime]:
        """Pods whose program runs, and that the coordinator has not heard since then."""
        if self.report is None:
            return {}
        connected = {member.pod for member in self.report.members}
        running = {pod.name for pod in self.pods if pod.main.running}
        return {m.pod: m.since for m in self.report.lost if m.pod in running and m.pod not in connected}

    @cached_property
    def deaf_since(self) -> datetime | None:
        """Since when the coordinator has not heard most of its members, although their hosts are well.

        Then it is the coordinator that is cut off. None: it hears them.
        """
        if self.report is None or not self.silent:
            return None
        well = sorted(
            since
            for pod in self.pods
            if (since := self.silent.get(pod.name)) is not None and not is_down(pod.host, self.hosts)
        )
        most = max(len(self.report.members) + len(self.silent), self.report.nodes) // 2
        return well[most] if len(well) > most else None


def is_down(host: str, hosts: Mapping[str, HostView] | None) -> bool:
    """Whether a host is known to be down: it is not ready, or its node object was deleted."""
    known = (hosts or {}).get(host)
    return known is not None and not known.ready


def host_port(host: str, port: int) -> str:
    """`host:port`, as in a URL: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_pod_name(job: DDPJob, index: int, attempt: int) -> str:
    """The name of a slot's pod, never used twice."""
    return f"{job.name}-{index}-{attempt}"


def coordinator_pod_name(job: DDPJob, generation: int, attempt: int = 0) -> str:
    """The name of a coordinator's own pod (placement Dedicated)."""
    return f"{job.name}-coordinator-{generation}" + (f"-{attempt}" if attempt else "")
