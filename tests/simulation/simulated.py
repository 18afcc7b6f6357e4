"""A Kubernetes with kubelets, torchrun and a coordinator, simulated in memory, for the real reconcile, decide and apply.

Time is a number that the test moves. Every write of the port passes through `_call`, where the operator can be made
to die before or after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api.types import DDPJob, Json
from ddpjob.core.decision import Event
from ddpjob.core.hosts import HostView
from ddpjob.core.world import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_ROLE,
    NODE_ROLES,
    ContainerView,
    PodView,
    Report,
    Role,
    World,
)
from ddpjob.engine.ports import Conflict, JobKey, NameTaken, Observation
from ddpjob.engine.reconcile import reconcile
from ddpjob.objects.overlay import problems
from ddpjob.objects.service import pod_files_name
from ddpjob.objects.site import Site
from simulated_group import Group, moments

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
KEY = JobKey("space", "job")
PATIENCE = 120.0
"""Seconds that nodes wait for another coordinator in mode Fast."""
TRACEBACK = "Traceback (most recent call last):\nValueError: lunch"


class Killed(BaseException):
    """The operator dies here; nothing of it goes on."""


@dataclass
class Pod:
    manifest: Json
    uid: str
    born: float
    state: str = "Pending"
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    finished: float | None = None
    deleted_at: float | None = None
    coordinator_ended: bool = False
    node: str = ""
    unschedulable: bool = False

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def label(self, key: str, default: int = 0) -> int:
        return int(self.manifest["metadata"]["labels"].get(key, default))

    @property
    def role(self) -> Role:
        return Role(self.manifest["metadata"]["labels"][LABEL_ROLE])

    def argument(self, name: str) -> str:
        """Of the coordinator's container."""
        container = next(c for c in self.manifest["spec"]["containers"] if c["name"] == "coordinator")
        return next(a.partition("=")[2] for a in container["args"] if a.startswith(f"--{name}="))

    @property
    def running(self) -> bool:
        return self.state == "Running"


class Simulation:
    """See the module. `calls` counts the port's writes; `die_at` is the point (2 per write: before, after) at which the operator dies."""

    def __init__(self, spec: Json, steps: int = 20) -> None:
        self.now = 0.0
        self.steps = steps
        self.uids = itertools.count(1)
        self.job: Json | None = {
            "metadata": {"name": KEY.name, "namespace": KEY.namespace, "uid": "job-uid", "generation": 1, "resourceVersion": "1"},
            "spec": {"image": "image", "script": "train.py", "nodes": 2, "gpusPerNode": 0, **spec},
        }
        self.pods: dict[str, Pod] = {}
        self.others: dict[tuple[str, str], Json] = {}
        self.groups: dict[int, Group] = {}
        self._died_silently: set[str] = set()
        self._heard_at: dict[int, float] = {}
        self.events: list[Event] = []
        self.done_steps = 0
        self.points = 0
        self.die_at: set[int] = set()
        self.site = Site(operator_key=b"key")
        self.created: list[str] = []
        self.conflict_next = False
        self.wake: float | None = 0.0
        self.hosts: dict[str, HostView] = {f"n{i}": HostView(name=f"n{i}", ready=True, since=EPOCH, out_of_service=False) for i in range(8)}
        self.cut_nodes: set[str] = set()
        self.knows_hosts = True
        self.capacity = 10**6
        """Pods of slots that find a node; the others stay Pending."""

    # --- the port ---------------------------------------------------------------------------------------------

    async def observe(self, key: JobKey) -> Observation | None:
        if self.job is None:
            return None
        job = DDPJob.read(self.job)
        wanted = job.status.pod_files or pod_files_name(job)
        generation = job.status.rendezvous.generation
        world = World(
            pods=tuple(self._view(p) for p in self.pods.values()),
            has_service=("Service", job.name) in self.others,
            has_budget=("PodDisruptionBudget", job.name) in self.others,
            hosts={name: self._host(view) for name, view in self.hosts.items()} if self.knows_hosts else None,
            pod_files=wanted if ("ConfigMap", wanted) in self.others else "",
            pod_files_offered=pod_files_name(job),
            key_mark=self.site.key_mark,
            report=self._report(generation),
            problems=problems(job.spec.pod_template) if not job.status.slots else (),
        )
        return Observation(job, world)

    def _call(self, act: Callable[[], None]) -> None:
        for moment in ("before", "after"):
            if moment == "after":
                act()
            self.points += 1
            if self.points in self.die_at:
                raise Killed(f"{moment} call {self.points // 2}")

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        if self.job is None or job.resource_version != self.job["metadata"]["resourceVersion"] or self.conflict_next:
            self.conflict_next = False
            raise Conflict
        body = self.job

        def act() -> None:
            self._check_terminal(body.get("status", {}), status)
            body["status"] = status
            body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 1)

        self._call(act)
        return DDPJob.read(body)

    def _check_terminal(self, old: Json, new: Json) -> None:
        ended = [c["type"] for c in old.get("conditions", ()) if c["type"] in ("Complete", "Failed") and c["status"] == "True"]
        still = [c["type"] for c in new.get("conditions", ()) if c["type"] in ("Complete", "Failed") and c["status"] == "True"]
        assert not ended or ended == still, f"a terminal condition changed: {ended} -> {still}"
        for name in ("counted", "uncounted"):
            before, after = old.get("restarts", {}).get(name, 0), new.get("restarts", {}).get(name, 0)
            assert after >= before or (name == "counted" and after == 0), f"{name} went back"
        before, after = old.get("restarts", {}).get("total", 0), new.get("restarts", {}).get("total", 0)
        assert after >= before, "total went back"

    async def create(self, job: DDPJob, manifest: Json) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind != "Pod":
            self._call(lambda: self.others.__setitem__((kind, name), manifest))
            return
        assert ("Service", KEY.name) in self.others, "a pod before its service"
        assert any(k == "ConfigMap" for k, _ in self.others), "a pod before its files"
        if name in self.pods:
            if self.pods[name].deleted_at is not None:
                raise NameTaken
            return
        assert name not in self.created, f"the name {name} is used a second time"

        def act() -> None:
            pod = Pod(manifest, f"uid-{next(self.uids)}", self.now)
            self.pods[name] = pod
            self._place(pod)
            self.created.append(name)

        self._call(act)

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        def act() -> None:
            pod = self.pods.get(name)
            if pod is None or pod.uid != uid:
                return
            if grace == 0:
                del self.pods[name]
            elif pod.deleted_at is None:
                pod.deleted_at = self.now + (30 if grace is None else grace)

        self._call(act)

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        def act() -> None:
            pod = self.pods.get(name)
            if pod is not None and pod.uid == uid:
                pod.manifest["metadata"]["labels"][LABEL_ROLE] = str(role)

        self._call(act)

    async def delete_job(self, job: DDPJob) -> None:
        def act() -> None:
            self.job = None
            self.pods.clear()
            self.others.clear()

        self._call(act)

    async def tell(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        def act() -> None:
            group = self._group_at(endpoint)
            if verb == "stop":
                for pod in self._nodes():
                    if pod.running and not self._is_cut(pod):
                        self.end(pod.name, 77)
            elif verb == "exit":
                for pod in self._nodes():
                    pod.coordinator_ended |= pod.state == "Ended"
            elif verb == "size" and group is not None:
                group.wanted, group.minimum = body["nodes"], body["minNodes"]
            elif verb == "patience" and group is not None:
                group.hang_after, group.backoff = body["hangAfter"], tuple(body["backoff"])
            elif verb == "gone" and group is not None:
                group.gone(body["pod"], self.now)

        self._call(act)

    async def record(self, job: DDPJob, event: Event) -> None:
        self._call(lambda: self.events.append(event))

    # --- kubelets and torchrun --------------------------------------------------------------------------------

    def _nodes(self) -> list[Pod]:
        """Pods of slots."""
        return [p for p in self.pods.values() if p.role in NODE_ROLES]

    def _place(self, pod: Pod) -> None:
        """On the node with the fewest pods of those that are ready, away from avoided ones."""
        placed = sum(bool(p.node) and p.state != "Ended" for p in self._nodes())
        if pod.role in NODE_ROLES and placed >= self.capacity:
            pod.unschedulable = True
            return
        preferred = (
            pod.manifest["spec"].get("affinity", {}).get("nodeAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", ())
        )
        avoided = {v for term in preferred for field in term["preference"]["matchFields"] for v in field["values"]}
        load = {name: sum(p.node == name and p.state != "Ended" for p in self.pods.values()) for name, h in self.hosts.items() if h.ready}
        pod.node = min(load, key=lambda name: (name in avoided, load[name], name))
        pod.unschedulable = False

    def _is_cut(self, pod: Pod) -> bool:
        return pod.node in self.cut_nodes

    def advance(self, seconds: float) -> None:
        """Pods start, groups form, train and finish, deleted pods go."""
        self.now += seconds
        for pod in list(self.pods.values()):
            if pod.unschedulable:
                self._place(pod)
            if pod.state == "Pending" and pod.deleted_at is None and pod.node and not self._is_cut(pod) and self.now - pod.born >= 1:
                pod.state = "Running"
            if pod.deleted_at is not None and not self._is_cut(pod):
                if pod.running:
                    self.end(pod.name, 143)
                elif pod.state == "Ended" or pod.state == "Pending":
                    del self.pods[pod.name]
        for generation in {p.label(LABEL_GENERATION) for p in self.pods.values()}:
            self._train(generation, seconds)

    def _coordinator(self, generation: int) -> Pod | None:
        """The pod whose coordinator works, the newest."""
        hosts = [p for p in self.pods.values() if p.label(LABEL_GENERATION) == generation and p.running and not self._is_cut(p)]
        if self._master:
            return next((p for p in hosts if p.label(LABEL_INDEX) == 0 and p.role in NODE_ROLES and not p.coordinator_ended), None)
        ours = [p for p in hosts if p.role is Role.COORDINATOR]
        return max(ours, key=lambda p: p.label(LABEL_ATTEMPT), default=None)

    @property
    def _master(self) -> bool:
        return bool(self.spec.get("rendezvous", {}).get("placement") == "Master")

    @property
    def fast(self) -> bool:
        return bool(self.spec.get("recovery", {}).get("mode") == "Fast")

    def _group_at(self, endpoint: str) -> Group | None:
        generation = self.status.get("rendezvous", {}).get("generation", 0)
        return self.groups.get(generation) if endpoint and self._coordinator(generation) is not None else None

    def _train(self, generation: int, seconds: float) -> None:
        nodes = [p for p in self._nodes() if p.label(LABEL_GENERATION) == generation]
        host = self._coordinator(generation)
        alive = [p for p in nodes if p.running and not self._is_cut(p)]
        group = self.groups.get(generation)
        if host is None:
            self._train_without(group, alive, seconds)
            return
        if group is None:
            group = Group(generation, int(host.argument("nodes")), int(host.argument("min-nodes")), self.fast, moments(EPOCH))
            self.groups[generation] = group
        group.adopt(int(host.argument("attempt")))
        self._heard_at[generation] = self.now
        if group.state == "Succeeded":
            for pod in alive:
                self.end(pod.name, 0)
            return
        names = {p.name for p in nodes}
        ended = {n for n in group.running | group.ready if n not in names or not self.pods[n].running}
        gone_silently = {n for n in ended if n not in self.pods and n in self._died_silently}
        leaving = {p.name for p in nodes if p.deleted_at is not None}
        group.follow_members({p.name for p in alive}, ended - gone_silently, leaving, self.now)
        group.form(self.now)
        self._step(group, seconds)

    def _train_without(self, group: Group | None, alive: list[Pod], seconds: float) -> None:
        """Without a coordinator a Standard group ends; a Fast one goes on as it is while none of it is lost."""
        if group is not None and self.fast and group.running <= {p.name for p in alive}:
            self._step(group, seconds)
        for pod in alive:
            if self.now - max(pod.born, self._heard_at.get(pod.label(LABEL_GENERATION), 0.0)) > (PATIENCE if self.fast else 5):
                self.end(pod.name, 76)

    def _step(self, group: Group, seconds: float) -> None:
        if group.state != "Running" or group.formed >= self.now:
            return
        self.done_steps += max(1, round(seconds))
        group.step = self.done_steps
        if self.done_steps >= self.steps:
            group.state = "Succeeded"

    @property
    def spec(self) -> Json:
        assert self.job is not None
        spec: Json = self.job["spec"]
        return spec

    # --- faults -----------------------------------------------------------------------------------------------

    def force_delete(self, name: str) -> None:
        if self._is_cut(self.pods[name]):
            self._died_silently.add(name)
        del self.pods[name]

    def delete(self, name: str) -> None:
        self.pods[name].deleted_at = self.now + 30

    def end(self, name: str, exit_code: int, reason: str = "Error", message: str = "") -> None:
        pod = self.pods[name]
        pod.state, pod.exit_code, pod.reason, pod.message, pod.finished = "Ended", exit_code, reason, message, self.now

    def cut(self, node: str, after: float = 9.0) -> None:
        """The node's network is gone; its Ready condition tells of it `after` seconds."""
        self.cut_nodes.add(node)
        since = EPOCH + timedelta(seconds=self.now + after)
        self.hosts[node] = HostView(name=node, ready=False, since=since, out_of_service=False)

    def _host(self, view: HostView) -> HostView:
        """As the API shows it by now."""
        told = view.ready or view.since is None or view.since <= EPOCH + timedelta(seconds=self.now)
        return view if told else HostView(name=view.name, ready=True, since=EPOCH, out_of_service=False)

    def heal(self, node: str) -> None:
        self.cut_nodes.discard(node)
        self.hosts[node] = HostView(name=node, ready=True, since=EPOCH + timedelta(seconds=self.now), out_of_service=False)

    def worker_fails(self, name: str, kind: str = "WorkerFailed", **details: Any) -> bool:
        """An exception in a worker; its pod stays. False when its group does not train."""
        pod = self.pods[name]
        group = self.groups.get(pod.label(LABEL_GENERATION))
        if group is None or group.state != "Running" or name not in group.running or self._coordinator(group.generation) is None:
            return False
        told: Json = {
            "rank": pod.label(LABEL_INDEX),
            "local_rank": 0,
            "exit_code": 1,
            "message": "ValueError: lunch",
            "traceback": TRACEBACK,
        }
        group.break_up(kind, name, now=self.now, **(told | details))
        return True

    def change_spec(self, change: Json) -> None:
        assert self.job is not None
        self.job["spec"] = {**self.job["spec"], **change}
        meta = self.job["metadata"]
        meta["generation"] += 1
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)

    # --- driving ----------------------------------------------------------------------------------------------

    async def one_pass(self) -> bool:
        """A pass of the operator; False when it died in it."""
        try:
            self.wake = await reconcile(self, KEY, lambda: EPOCH + timedelta(seconds=self.now))
        except Killed:
            return False
        return True

    @property
    def status(self) -> Json:
        assert self.job is not None
        status: Json = self.job.get("status", {})
        return status

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    async def until(self, ended: Callable[[], bool], limit: int = 400) -> None:
        """One pass each simulated second until it is so."""
        for _ in range(limit):
            await self.one_pass()
            if ended():
                return
            self.advance(1)
        raise AssertionError(f"not reached after {limit} s: {self.status}\n{[(p.name, p.state, p.exit_code) for p in self.pods.values()]}")

    async def until_phase(self, phase: str, limit: int = 400) -> None:
        await self.until(lambda: self.phase == phase, limit)

    def _report(self, generation: int) -> Report | None:
        group = self.groups.get(generation)
        host = self._coordinator(generation)
        endpoint = self.status.get("rendezvous", {}).get("endpoint", "")
        if group is None or host is None or not endpoint:
            return None
        group.adopt(int(host.argument("attempt")))
        return group.report(self.now, self.steps)

    def _view(self, pod: Pod) -> PodView:
        ended = pod.state == "Ended"

        def moment(seconds: float | None) -> datetime | None:
            return None if seconds is None else EPOCH + timedelta(seconds=seconds)

        started = EPOCH if pod.state != "Pending" else None
        main = ContainerView(
            started=started, exit_code=pod.exit_code, reason=pod.reason, message=pod.message, finished=moment(pod.finished)
        )
        containers: dict[str, ContainerView] = {}
        for container in pod.manifest["spec"]["containers"]:
            name = container["name"]
            side = name == "coordinator" and pod.role == "node"
            containers[name] = ContainerView(started=started, exit_code=1 if pod.coordinator_ended else None) if side else main
        phase = (
            ("Succeeded" if pod.exit_code == 0 else "Failed") if ended and len(containers) == 1 else ("Running" if started else "Pending")
        )
        return PodView(
            name=pod.name,
            uid=pod.uid,
            role=pod.role,
            index=pod.label(LABEL_INDEX),
            attempt=pod.label(LABEL_ATTEMPT),
            generation=pod.label(LABEL_GENERATION),
            phase=phase,
            node=pod.node,
            unschedulable="0/8 nodes are available" if pod.unschedulable else "",
            created=moment(pod.born),
            address="10.0.0.1" if started else "",
            deleted_at=moment(pod.deleted_at),
            containers=containers,
        )


def conditions(simulation: Simulation) -> dict[str, Any]:
    return {c["type"]: c for c in simulation.status.get("conditions", ())}
