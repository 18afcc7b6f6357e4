"""The state that a reconcile observes of one job, as frozen values.

It has pods, hosts, claims and the coordinator's report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any

from ddpjob_runtime.protocol import Report

from ddpjob.api.job import DDPJob
from ddpjob.api.job_classes import Offer
from ddpjob.api.job_status import QueueStatus

TRAINER_CONTAINER = "trainer"
COORDINATOR_CONTAINER = "coordinator"

NAME_TAKEN = 409
"""HTTP's Conflict: the `Rejection.status` if another owner's object has the name."""

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
ANNOTATION_GROUP = "scheduling.k8s.io/group-name"
"""Annotation of a pod: the PodGroup that Volcano places it with."""
ANNOTATION_TEMPLATE = "ddpjob.io/claim-template"
"""Annotation of a claim that a job has made: the mark of the claimTemplate."""


class Role(StrEnum):
    """Value of the label `ddpjob.io/role`."""

    NODE = "node"
    SPARE = "spare"
    COORDINATOR = "coordinator"


NODE_ROLES = (Role.NODE, Role.SPARE)
"""Roles of slots' pods. The coordinator chooses which of them train, and the label follows its
choice."""


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
    """A pod, with the fields that decisions need."""

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
    gated: str = ""
    """Kubernetes' message while gates keep it from the scheduler."""
    scheduled: datetime | None = None
    """When it was given its host."""
    prepared: bool | None = None
    """Whether the kubelet has its volumes and its network ready; None: the kubelet does not report
    it."""
    disruption: str = ""
    """Reason of the condition DisruptionTarget, such as PreemptionByScheduler or
    EvictionByEvictionAPI."""
    disruption_message: str = ""
    containers: Mapping[str, ContainerView] = field(default_factory=dict)
    init_containers: Mapping[str, ContainerView] = field(default_factory=dict)
    initialized: bool = False
    """Whether its init containers are done: ordinary ones have ended, and sidecars among them have
    started."""
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
        """Whether it has finished its work.

        An evicted program may end with 0 without having finished.
        """
        if self.disruption or self.status_reason:
            return False
        return self.main.exit_code == 0 if self.main.ended else self.phase == "Succeeded"


REMEMBERED = timedelta(hours=1)
"""How long a deleted host is remembered, which is longer than pods outlive their host."""


@dataclass(frozen=True)
class HealthSignals:
    """The signals by which an agent reports a Kubernetes node as unhealthy.

    A name that ends with `*` is a prefix.
    """

    conditions: tuple[tuple[str, str], ...] = ()
    """Types with their bad statuses: ("AcceleratedHardwareReady", "False")."""
    taints: tuple[str, ...] = ()
    """Keys of taints."""

    def against(self, conditions: Iterable[Mapping[str, Any]], taints: Iterable[Mapping[str, Any]]) -> str:
        """Return the first sign in words; empty if there is none.

        Parts that change while the fault is the same are left out.
        """
        for condition in conditions:
            kind, status = str(condition["type"]), str(condition.get("status"))
            if any(status == bad and _named(name, kind) for name, bad in self.conditions):
                return f"condition {kind} is {status} ({condition.get('reason') or 'no reason'})"[:_LONGEST_SIGN]
        for taint in taints:
            if any(_named(name, str(taint["key"])) for name in self.taints):
                return f"taint {taint['key']}"[:_LONGEST_SIGN]
        return ""


_LONGEST_SIGN = 300
_MOST_TAINTS = 50


def _named(name: str, found: str) -> bool:
    return found.startswith(name[:-1]) if name.endswith("*") else found == name


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A Kubernetes node."""

    name: str
    ready: bool
    """Whether its Ready condition is True. Unknown, the state of a host without a network, is not
    ready."""
    since: datetime | None
    """When the operator last saw `ready` change, by its own clock (see `remembered`). None: not
    known."""
    out_of_service: bool
    """Whether an administrator has marked it, by a taint, as down for good, so that nothing on it
    runs."""
    deleted: bool = False
    """Whether it was seen, and its object has been deleted since."""
    unhealthy: str = ""
    """What a health agent reports against it, by a condition or a taint; empty: nothing."""
    unhealthy_since: datetime | None = None
    """When the operator saw that begin, by its own clock. None: it was there at the operator's
    first look."""
    schedulable: bool = True
    """Whether it is not cordoned, and has at most as many taints as are looked at."""
    taints: tuple[tuple[str, str, str], ...] = ()
    """Key, value and effect of taints that keep pods away: NoSchedule and NoExecute."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """How many devices it offers to pods, by the names of their resources."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        """Whether it is ready, and no health agent reports anything against it."""
        return self.ready and not self.deleted and not self.unhealthy

    @classmethod
    def read(cls, body: Mapping[str, Any], signals: HealthSignals | None = None) -> HostView:
        """Read a Node object, which is unhealthy by these signals.

        Raises KeyError for a body without a name.
        """
        conditions = (body.get("status") or {}).get("conditions") or ()
        ready: Mapping[str, Any] = next((c for c in conditions if c["type"] == "Ready"), {})
        taints = (body.get("spec") or {}).get("taints") or ()
        hard = [t for t in taints if t.get("effect") in ("NoSchedule", "NoExecute")]
        return cls(
            name=str(body["metadata"]["name"]),
            ready=ready.get("status") == "True",
            since=None,
            out_of_service=any(t["key"] == OUT_OF_SERVICE_TAINT for t in taints),
            unhealthy=signals.against(conditions, taints) if signals is not None else "",
            schedulable=not (body.get("spec") or {}).get("unschedulable") and len(hard) <= _MOST_TAINTS,
            taints=tuple((str(t["key"]), str(t.get("value") or ""), str(t["effect"])) for t in hard[:_MOST_TAINTS]),
            labels=body["metadata"].get("labels") or {},
            devices=_devices((body.get("status") or {}).get("allocatable") or {}),
        )


def _devices(allocatable: Mapping[str, Any]) -> dict[str, int]:
    """Return the devices of device plugins.

    Their resources have a domain, and are counted in whole numbers.
    """
    return {name: int(n) for name, n in allocatable.items() if "/" in name and str(n).isdecimal()}


def remembered(
    before: Mapping[str, HostView] | None, found: Mapping[str, HostView], now: datetime
) -> dict[str, HostView]:
    """Return the hosts that were `found`, with what the operator remembers of those from `before`.

    That is since when each is ready or is not, or is unhealthy, and which were deleted. A host that
    was never seen may be newer than what was found, so it is unknown, not deleted. If a host is
    unhealthy when it is first seen, nobody knows since when, or whether the signal is still valid.
    """
    hosts = {}
    for name, host in (before or {}).items():
        if name not in found and not host.deleted:
            hosts[name] = replace(host, ready=False, deleted=True, since=now, unhealthy="", unhealthy_since=None)
        elif name not in found and host.since is not None and now - host.since < REMEMBERED:
            hosts[name] = host
    for name, host in found.items():
        old = (before or {}).get(name)
        same = old is not None and (old.ready, old.deleted) == (host.ready, False)
        new = old is None or old.deleted
        ill = old.unhealthy_since if old is not None and old.unhealthy else None if new else now
        hosts[name] = replace(
            host,
            since=old.since if old is not None and same else now,
            unhealthy_since=ill if host.unhealthy else None,
        )
    return hosts


@dataclass(frozen=True, kw_only=True)
class ClaimView:
    """A persistent volume claim that the job names or makes."""

    name: str
    exists: bool = True
    access_modes: tuple[str, ...] = ()
    made_by: str = ""
    """UID of the job that has made it, which may be an earlier one; empty if no job has."""
    made_for: str = ""
    """Name of that job."""
    template: str = ""
    """The mark of the claimTemplate that it was made from."""
    owners: tuple[str, ...] = ()
    """UIDs of the objects with which it is removed."""
    deleting: bool = False


_POLICY = re.compile(r"admission webhook|AdmissionPolicy|denied", re.IGNORECASE)
"""Messages of the API server if a webhook or an admission policy rejects an object, or cannot be
asked."""


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
        """Whether the same object will always be rejected, because its content is invalid.

        A denial by an admission policy has the same HTTP statuses, and lasts as long as the policy.
        """
        return self.status in (400, 422) and not _POLICY.search(self.message)

    @property
    def is_claim(self) -> bool:
        """Whether it is the claim of storage.checkpoints.claimTemplate."""
        return self.object.startswith("PersistentVolumeClaim ")

    @property
    def of_gang(self) -> bool:
        """Whether it is the PodGroup, without which the job can be made to run."""
        return self.object.startswith("PodGroup ")

    @property
    def of_budget(self) -> bool:
        """Whether it is the PodDisruptionBudget, which pods do not need to run."""
        return self.object.startswith("PodDisruptionBudget ")

    @property
    def of_queue(self) -> bool:
        """Whether it is the request for quota. A job that has quota runs without another one."""
        return self.object.startswith("Workload ")

    @property
    def name_taken(self) -> bool:
        return self.status == NAME_TAKEN


@dataclass(frozen=True, kw_only=True)
class NotificationOutcome:
    """The outcome of a notification."""

    delivered: bool
    message: str = ""
    """Why it was given up."""


@dataclass(frozen=True, kw_only=True)
class WorkloadView:
    """A Workload of Kueue: the job's request for quota, and its state."""

    name: str
    uid: str
    asks: tuple[str, str] = ("", "")
    """LocalQueue, and WorkloadPriorityClass or PriorityClass."""
    shape: str = ""
    """The mark of what each of its pods needs, see `core.plan.queue`."""
    reserved: bool = False
    admitted: bool = False
    """Whether quota is reserved and every admission check has passed."""
    evicted: str = ""
    """Kueue's reason why the quota must be given back; empty if it need not be."""
    finished: str = ""
    """The reason why it has finished; empty: it has not."""
    ready: bool = False
    """Whether Kueue knows that the pods run."""
    leaving: bool = False
    """Whether its deletion was requested."""
    message: str = ""
    """Kueue's message: why it waits, or why it is evicted."""
    grant: QueueStatus | None = None
    """The grant of an admitted Workload."""
    flavors: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Names of the ResourceFlavors of the pods of slots, and of the coordinator's."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that belongs to one job, at one moment."""

    pods: tuple[PodView, ...] = ()
    departed: tuple[PodView, ...] = ()
    """The last known state of pods that are gone, as the event of their deletion showed them."""
    has_service: bool = False
    has_budget: bool = False
    """Whether the job's PodDisruptionBudget (which has the job's name) exists."""
    runtime: str = ""
    """Name of the ConfigMap with the runtime of the job's pods, if it exists; otherwise empty."""
    runtime_offered: str = ""
    """Name of the runtime's ConfigMap that this version of the operator would create."""
    key_mark: str = ""
    """Identifies the key from which the jobs' tokens derive; pods with tokens of different keys
    reject each other."""
    has_token: bool = False
    """Whether the Secret with the token was seen to exist. It cannot be read, and may have been
    deleted since."""
    report: Report | None = None
    report_refused: str = ""
    """Why the coordinator's last answer could not be used; empty if it could, or if there was
    none."""
    report_seconds: float = 0.0
    """Maximum age of a report whose news wake the job by themselves. 0: each reconcile reads it."""
    serves_gangs: bool = False
    """Whether the cluster serves the PodGroups of the job's scheduler, and lets the operator list
    them."""
    gangs: Mapping[str, str] = field(default_factory=dict)
    """The uids of the job's PodGroups by name; empty for one whose deletion was requested."""
    serves_queues: bool | None = None
    """Whether the cluster serves Kueue's Workloads, and lets the operator read them. None: nobody
    queues jobs here."""
    workloads: tuple[WorkloadView, ...] = ()
    """The job's Workloads, by name."""
    claims: tuple[ClaimView, ...] = ()
    claim_template: str = ""
    """The mark of the job's own claimTemplate."""
    hosts: Mapping[str, HostView] | None = None
    """Kubernetes nodes by name; nothing is known about a missing one. None: the state of hosts is
    not known at all."""
    problems: tuple[str, ...] = ()
    """Faults of the podTemplate, one sentence each."""
    rejections: tuple[Rejection, ...] = ()
    """Objects that the API server rejected when this decision was last applied, without optional
    ones."""
    deletion_refused: str = ""
    """An existing pod whose deletion the API server has refused, and the reason; empty if there is
    none."""
    policy: str = ""
    """Name of the NetworkPolicy that this operator makes for the job; empty if it makes none."""
    has_policy: bool = False
    """Whether that NetworkPolicy exists."""
    policy_refused: str = ""
    """Why the API server rejected it when this decision was last applied."""
    receivers: frozenset[str] = frozenset()
    """Names of the receivers that the job's namespace may use."""
    outcomes: Mapping[str, NotificationOutcome] = field(default_factory=dict)
    """Outcomes of the job's notifications that were delivered or given up, by id."""
    link: str = ""
    """URL of a page about the job, for its notifications; empty if none is known."""
    offer: Offer = field(default_factory=Offer)
    """The class that the job would get if it began now."""
    one_host: bool = False
    """Whether all pods are on the only host, which none can avoid."""

    def nodes(self) -> tuple[PodView, ...]:
        """Return the pods of slots, spares included."""
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple[PodView, ...]:
        return tuple(p for p in self.pods if p.role in NODE_ROLES)

    @cached_property
    def nodes_by_name(self) -> Mapping[str, PodView]:
        """The pods of slots, by name."""
        return {p.name: p for p in self.nodes()}

    def last_of(self, name: str) -> PodView | None:
        """Return the last known state of a pod that is gone."""
        return self._departed_by_name.get(name)

    @cached_property
    def _departed_by_name(self) -> Mapping[str, PodView]:
        return {p.name: p for p in self.departed}

    @cached_property
    def silent(self) -> Mapping[str, datetime]:
        """Pods whose program runs, and since when the coordinator has not heard them."""
        if self.report is None:
            return {}
        connected = {member.pod for member in self.report.members}
        running = {pod.name for pod in self.pods if pod.main.running}
        return {m.pod: m.since for m in self.report.lost if m.pod in running and m.pod not in connected}

    @cached_property
    def deaf_since(self) -> datetime | None:
        """Since when the coordinator has not heard most of its members on healthy hosts.

        In that case the coordinator is the one that is partitioned. None: it hears them.
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


def platform_of(host: HostView) -> tuple[str, str]:
    """Return a host's operating system and architecture; empty if not known.

    Every kubelet sets the labels that are read here.
    """
    return host.labels.get("kubernetes.io/os", ""), host.labels.get("kubernetes.io/arch", "")


def host_port(host: str, port: int) -> str:
    """Return `host:port`, as in a URL: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_pod_name(job: DDPJob, index: int, attempt: int) -> str:
    """Return the name of a slot's pod, which is never used twice."""
    return f"{job.name}-{index}-{attempt}"


def gang_name(job: DDPJob, generation: int) -> str:
    """Return the name of a generation's PodGroup."""
    return f"{job.name}-gang-{generation}"


def coordinator_pod_name(job: DDPJob, generation: int, attempt: int = 0) -> str:
    """Return the name of a coordinator's own pod (placement Dedicated)."""
    return f"{job.name}-coordinator-{generation}" + (f"-{attempt}" if attempt else "")
