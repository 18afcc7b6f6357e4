"""The observed state of one job, as frozen values.

It includes pods, hosts, claims and the coordinator's report.
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
CODE_CONTAINER = "ddpjob-code"
"""The init container that clones spec.code.git."""

NAME_TAKEN = 409
"""The HTTP status code for a conflict. A `Rejection` has this code if an object with the same name
exists and belongs to another owner."""

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
"""Pod annotation from which Volcano reads the name of the PodGroup."""
ANNOTATION_WORKLOAD = "kueue.x-k8s.io/workload"
"""Pod annotation that names the Kueue Workload whose topology assignment applies to the pod."""
ANNOTATION_TEMPLATE = "ddpjob.io/claim-template"
"""Annotation on a claim that a job has made. The value is a hash of the claimTemplate."""


class Role(StrEnum):
    """A pod's role in its job, which is the value of the `ddpjob.io/role` label."""

    NODE = "node"
    SPARE = "spare"
    COORDINATOR = "coordinator"


NODE_ROLES = (Role.NODE, Role.SPARE)
"""Roles of the pods in slots. The coordinator chooses which of these pods train, and the operator
updates their labels to match."""


@dataclass(frozen=True, kw_only=True)
class ContainerView:
    """A container's state: waiting, running, ended, or still unknown."""

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
    """A pod with the fields that decisions need."""

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
    """When the pod's grace period ends; None if the pod is not being deleted."""
    status_reason: str = ""
    status_message: str = ""
    unschedulable: str = ""
    """The scheduler's message if it finds no host for the pod."""
    gated: str = ""
    """Kubernetes' message while scheduling gates hold the pod back from the scheduler."""
    scheduled: datetime | None = None
    """When the pod was bound to its host."""
    prepared: bool | None = None
    """Whether the pod's volumes and network are ready; None if the kubelet does not report it."""
    disruption: str = ""
    """The DisruptionTarget condition's reason, such as PreemptionByScheduler or
    EvictionByEvictionAPI."""
    disruption_message: str = ""
    containers: Mapping[str, ContainerView] = field(default_factory=dict)
    init_containers: Mapping[str, ContainerView] = field(default_factory=dict)
    initialized: bool = False
    """Whether the init containers are done: ordinary ones have ended, and sidecars have started."""
    grace_seconds: int = 30
    devices: Mapping[str, int] = field(default_factory=dict)
    """How many devices the pod's containers request, by resource name."""
    default_memory: str = ""
    """The main container's memory limit, if it comes from the namespace's LimitRange."""

    @cached_property
    def main(self) -> ContainerView:
        """The main container: the trainer's or, in a coordinator pod, the coordinator's."""
        name = COORDINATOR_CONTAINER if self.role is Role.COORDINATOR else TRAINER_CONTAINER
        return self.containers.get(name, _NO_CONTAINER)

    @cached_property
    def ended(self) -> bool:
        """Whether the main container or the whole pod has ended."""
        return self.main.ended or self.phase in ("Succeeded", "Failed")

    @cached_property
    def succeeded(self) -> bool:
        """Whether the pod has finished its work.

        An evicted program may exit with 0 without having finished.
        """
        if self.disruption or self.status_reason:
            return False
        return self.main.exit_code == 0 if self.main.ended else self.phase == "Succeeded"


REMEMBERED = timedelta(hours=1)
"""How long the operator remembers that a host was deleted. By then, the host's pods have
disappeared too."""


@dataclass(frozen=True)
class HealthSignals:
    """The conditions and taints that a health agent uses to mark a Kubernetes node as unhealthy.

    A name that ends with `*` matches every name with the same beginning.
    """

    conditions: tuple[tuple[str, str], ...] = ()
    """Types of conditions, each with the status that means unhealthy, such as
    ("AcceleratedHardwareReady", "False")."""
    taints: tuple[str, ...] = ()
    """Keys of taints that mark a host as unhealthy."""

    def against(self, conditions: Iterable[Mapping[str, Any]], taints: Iterable[Mapping[str, Any]]) -> str:
        """Describe the first of these signals that a Kubernetes node shows.

        The result is empty if the node shows none of them. The description must not change while
        the fault lasts, so it omits timestamps and messages.
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
    """The state of a Kubernetes node that decisions about jobs depend on."""

    name: str
    ready: bool
    """Whether the host's Ready condition is True. The condition is Unknown while a host has no
    network, and such a host counts as not ready."""
    since: datetime | None
    """When the operator first saw the current value of `ready`, by the operator's own clock (see
    `remembered`). None if unknown."""
    out_of_service: bool
    """Whether an administrator has set the out-of-service taint, which marks the host as shut down.
    Nothing is running on such a host."""
    deleted: bool = False
    """Whether the host's object has been deleted since the operator first saw it."""
    unhealthy: str = ""
    """The fault that a health agent reports with a condition or a taint; empty if there is none."""
    unhealthy_since: datetime | None = None
    """When the operator saw the fault begin, by its own clock. None if the fault already existed
    when the operator first saw the host.
    """
    schedulable: bool = True
    """False if the host is cordoned, or if it has more taints than `taints` can list."""
    taints: tuple[tuple[str, str, str], ...] = ()
    """Taints with the effect NoSchedule or NoExecute, which keep pods away from the host. Each
    taint is a tuple of key, value and effect.
    """
    devices: Mapping[str, int] = field(default_factory=dict)
    """Number of devices that the host offers to pods, by resource name."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        """Whether the host is ready and no health agent reports a fault."""
        return self.ready and not self.deleted and not self.unhealthy

    @classmethod
    def read(cls, body: Mapping[str, Any], signals: HealthSignals | None = None) -> HostView:
        """Read a Node object's body, and check it for the `signals` of a health agent.

        Raises KeyError if the body has no name.
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
    """Return the allocatable resources that come from device plugins.

    The names of such resources have a domain, and their amounts are whole numbers.
    """
    return {name: int(n) for name, n in allocatable.items() if "/" in name and str(n).isdecimal()}


def remembered(
    before: Mapping[str, HostView] | None, found: Mapping[str, HostView], now: datetime
) -> dict[str, HostView]:
    """Return the hosts that exist now (`found`), and the hosts that were deleted recently.

    `before` is the previous result. It shows when each host became ready, not ready or unhealthy,
    and which hosts have been deleted. The result has no entry for a host that neither argument
    contains. Such a host counts as unknown, not as deleted, because it may be newer than `found`.
    If a host was already unhealthy when the operator first saw it, the beginning of the fault is
    unknown.
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
    """A PersistentVolumeClaim that the job's spec names, or that the job makes."""

    name: str
    exists: bool = True
    access_modes: tuple[str, ...] = ()
    made_by: str = ""
    """UID of the job that made the claim, possibly an earlier job; empty if no job made it."""
    made_for: str = ""
    """Name of the job that made the claim."""
    template: str = ""
    """Hash of the claimTemplate that the claim was made from."""
    owners: tuple[str, ...] = ()
    """UIDs of the objects that own the claim. The claim is deleted together with its owners."""
    deleting: bool = False


_POLICY = re.compile(r"admission webhook|AdmissionPolicy|denied", re.IGNORECASE)
"""Matches messages in which the API server names a webhook or an admission policy as the reason for
a rejection. The webhook may have rejected the object, or may have been unreachable."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """An object that the API server rejected."""

    object: str
    status: int
    message: str
    optional: bool = False
    """Whether the job can run without the object."""

    @property
    def final(self) -> bool:
        """Whether the same object will always be rejected because its content is invalid.

        A rejection by a webhook or an admission policy has the same HTTP statuses, but is not
        final, because the webhook or policy may change.
        """
        return self.status in (400, 422) and not _POLICY.search(self.message)

    @property
    def is_claim(self) -> bool:
        """Whether the object is the claim of storage.checkpoints.claimTemplate."""
        return self.object.startswith("PersistentVolumeClaim ")

    @property
    def of_gang(self) -> bool:
        """Whether the object is the PodGroup. Users can configure the job to run without one."""
        return self.object.startswith("PodGroup ")

    @property
    def of_budget(self) -> bool:
        """Whether the object is the PodDisruptionBudget. Pods can run without it."""
        return self.object.startswith("PodDisruptionBudget ")

    @property
    def of_queue(self) -> bool:
        """Whether the object is a quota request. A job that already has quota can still run."""
        return self.object.startswith("Workload ")

    @property
    def name_taken(self) -> bool:
        return self.status == NAME_TAKEN


@dataclass(frozen=True, kw_only=True)
class NotificationOutcome:
    """The outcome of a notification."""

    delivered: bool
    message: str = ""
    """Why the notification was abandoned."""


@dataclass(frozen=True, kw_only=True)
class WorkloadView:
    """A Kueue Workload: the job's quota request and its state."""

    name: str
    uid: str
    asks: tuple[str, str] = ("", "")
    """Names of the LocalQueue and of the priority class that the Workload asks for. The priority
    class is either a WorkloadPriorityClass or a PriorityClass."""
    shape: str = ""
    """Hash of the requirements of a single pod (see `core.plan.queue`)."""
    additional: bool = False
    """Whether the Workload requests only additional pods for an elastic job that already has
    quota."""
    reserved: bool = False
    admitted: bool = False
    """Whether quota is reserved and every admission check has passed."""
    evicted: str = ""
    """Kueue's reason for the eviction; empty if the Workload is not evicted."""
    finished: str = ""
    """Why the Workload has finished; empty if it has not."""
    ready: bool = False
    """Whether Kueue has been notified that the pods are running."""
    leaving: bool = False
    """Whether the Workload is being deleted."""
    message: str = ""
    """Kueue's explanation of why the Workload is waiting or has been evicted."""
    grant: QueueStatus | None = None
    """The size and flavors that Kueue has granted; None until the Workload is admitted."""
    flavors: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Names of the ResourceFlavors for the slots' pods, and for the coordinator's pod."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that a reconcile has observed about one job at one moment."""

    pods: tuple[PodView, ...] = ()
    departed: tuple[PodView, ...] = ()
    """The last known states of pods that no longer exist, taken from their deletion events."""
    has_service: bool = False
    has_budget: bool = False
    """Whether the job's PodDisruptionBudget exists. Its name is the name of the job."""
    runtime: str = ""
    """Name of the ConfigMap that contains the runtime of the job's pods; empty if there is no such
    ConfigMap."""
    runtime_offered: str = ""
    """Name of the runtime ConfigMap that this version of the operator would create."""
    key_mark: str = ""
    """Short hash of the key that the jobs' tokens are derived from. Pods reject each other if their
    tokens come from different keys."""
    is_sole_operator: bool = False
    """Whether this operator holds the Lease for the job's namespace, so that no other operator
    acts there."""
    has_token: bool = False
    """Whether the operator has created the Secret with the token. This stays true if somebody
    deletes the Secret later, because the operator is not permitted to read Secrets.
    """
    report: Report | None = None
    report_refused: str = ""
    """Why the coordinator's last response could not be used. Empty if the response was usable, or
    if the coordinator has not responded.
    """
    report_seconds: float = 0.0
    """Maximum age of `report` in seconds if the operator follows the coordinator's reports. Such an
    operator reconciles the job whenever a report contains news. The value is 0 if the operator asks
    the coordinator for a report only during reconciles."""
    serves_gangs: bool = False
    """Whether the cluster serves PodGroups for the job's scheduler and lets the operator list
    them."""
    gangs: Mapping[str, str] = field(default_factory=dict)
    """The uids of the job's PodGroups by name. A PodGroup that is being deleted has an empty
    uid."""
    serves_queues: bool | None = None
    """Whether the cluster serves Kueue's Workloads and lets the operator read them. None if this
    operator does not support queues."""
    workloads: tuple[WorkloadView, ...] = ()
    """The job's Workloads, sorted by name."""
    claims: tuple[ClaimView, ...] = ()
    folder_user: str = ""
    """Name and phase of another job that uses this job's checkpoint folder; empty if no other job
    uses the folder.
    """
    claim_template: str = ""
    """Hash of the job's own claimTemplate."""
    hosts: Mapping[str, HostView] | None = None
    """Kubernetes nodes by name. If a name is missing, nothing is known about that node. The value
    is None if the operator is not permitted to watch nodes.
    """
    problems: tuple[str, ...] = ()
    """Faults in the podTemplate, one sentence each."""
    rejections: tuple[Rejection, ...] = ()
    """Objects that the API server rejected when the job's last decision was applied. A rejected
    NetworkPolicy is not included (see `policy_refused`)."""
    deletion_refused: str = ""
    """A pod that the API server refused to delete, and the reason; empty if there is no such
    pod."""
    policy: str = ""
    """Name of the NetworkPolicy that the operator creates for the job; empty if it creates none."""
    has_policy: bool = False
    """Whether the NetworkPolicy that `policy` names exists."""
    policy_refused: str = ""
    """Why the API server rejected the NetworkPolicy when the job's last decision was applied."""
    receivers: frozenset[str] = frozenset()
    """Names of the receivers that the job's namespace may use."""
    outcomes: Mapping[str, NotificationOutcome] = field(default_factory=dict)
    """Outcomes of the job's delivered or abandoned notifications, by id."""
    link: str = ""
    """URL of a page about the job, for links in notifications; empty if unknown."""
    offer: Offer = field(default_factory=Offer)
    """The class that a job adopts when it starts or resumes; empty unless the job is about to do
    so."""
    others_wait: bool = False
    """Whether another job waits for room in the cluster."""
    one_host: bool = False
    """Whether the cluster has only one host, so a replacement pod must run on the same host."""

    def nodes(self) -> tuple[PodView, ...]:
        """Return the slots' pods, including spares."""
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple[PodView, ...]:
        return tuple(p for p in self.pods if p.role in NODE_ROLES)

    @cached_property
    def nodes_by_name(self) -> Mapping[str, PodView]:
        """The slots' pods by name."""
        return {p.name: p for p in self.nodes()}

    def last_of(self, name: str) -> PodView | None:
        """Return the last known state of a pod that no longer exists; None if no state is known."""
        return self._departed_by_name.get(name)

    @cached_property
    def _departed_by_name(self) -> Mapping[str, PodView]:
        return {p.name: p for p in self.departed}

    @cached_property
    def silent(self) -> Mapping[str, datetime]:
        """Running pods whose connection to the coordinator is lost, and the time of each loss."""
        if self.report is None:
            return {}
        connected = {member.pod for member in self.report.members}
        running = {pod.name for pod in self.pods if pod.main.running}
        return {m.pod: m.since for m in self.report.lost if m.pod in running and m.pod not in connected}

    @cached_property
    def deaf_since(self) -> datetime | None:
        """When most members had fallen silent although their hosts are up; None if they have not.

        If they have, the coordinator itself is partitioned, not its members.
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
    """Whether a host is known to be down: it is not ready or its Node object was deleted."""
    known = (hosts or {}).get(host)
    return known is not None and not known.ready


def platform_of(host: HostView) -> tuple[str, str]:
    """Return a host's operating system and architecture, from labels that every kubelet sets."""
    return host.labels.get("kubernetes.io/os", ""), host.labels.get("kubernetes.io/arch", "")


def host_port(host: str, port: int) -> str:
    """Return `host:port` as in a URL, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_pod_name(job: DDPJob, index: int, attempt: int) -> str:
    """Return the name of the pod in a slot's attempt. No pod name is ever used twice."""
    return f"{job.name}-{index}-{attempt}"


def gang_name(job: DDPJob, generation: int) -> str:
    """Return the name of a generation's PodGroup."""
    return f"{job.name}-gang-{generation}"


def coordinator_pod_name(job: DDPJob, generation: int, attempt: int = 0) -> str:
    """Return the name of a coordinator's own pod (with Dedicated placement)."""
    return f"{job.name}-coordinator-{generation}" + (f"-{attempt}" if attempt else "")
