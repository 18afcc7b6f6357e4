"""A Kubernetes with kubelets, torchrun and a coordinator, simulated in memory, for the real reconcile, decide and apply.

Time is a number that the test moves. Every write of the port passes through `_call`, where the operator can be made
to die before or after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api.types import DDPJob, Json
from ddpjob.core.decision import Event
from ddpjob.core.world import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_ROLE,
    ContainerView,
    Incident,
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

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
KEY = JobKey("space", "job")


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
    deleted_at: float | None = None
    coordinator_ended: bool = False

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def label(self, key: str, default: int = 0) -> int:
        return int(self.manifest["metadata"]["labels"].get(key, default))

    @property
    def role(self) -> str:
        return str(self.manifest["metadata"]["labels"][LABEL_ROLE])

    @property
    def running(self) -> bool:
        return self.state == "Running"


@dataclass
class Group:
    """One generation's coordinator: what it saw of its members."""

    state: str = "Forming"
    incidents: list[Incident] = field(default_factory=list)
    step: int = 0
    members: frozenset[str] = frozenset()
    formed: float = 0.0


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
        self.events: list[Event] = []
        self.done_steps = 0
        self.points = 0
        self.die_at: set[int] = set()
        self.site = Site(operator_key=b"key")
        self.created: list[str] = []
        self.conflict_next = False
        self.wake: float | None = 0.0

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
            assert after >= before, f"{name} went back"

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
            self.pods[name] = Pod(manifest, f"uid-{next(self.uids)}", self.now)
            self.created.append(name)

        self._call(act)

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        def act() -> None:
            pod = self.pods.get(name)
            if pod is not None and pod.uid == uid and pod.deleted_at is None:
                pod.deleted_at = self.now + (30 if grace is None else grace)

        self._call(act)

    async def delete_job(self, job: DDPJob) -> None:
        def act() -> None:
            self.job = None
            self.pods.clear()
            self.others.clear()

        self._call(act)

    async def tell(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        def act() -> None:
            if verb == "stop":
                for pod in self._nodes():
                    if pod.running:
                        pod.state, pod.exit_code = "Ended", 77
            if verb == "exit":
                for pod in self._nodes():
                    pod.coordinator_ended |= pod.state == "Ended"

        self._call(act)

    async def record(self, job: DDPJob, event: Event) -> None:
        self._call(lambda: self.events.append(event))

    # --- kubelets and torchrun --------------------------------------------------------------------------------

    def _nodes(self) -> list[Pod]:
        return [p for p in self.pods.values() if p.role == "node"]

    def advance(self, seconds: float) -> None:
        """Pods start, groups form, train and finish, deleted pods go."""
        self.now += seconds
        for pod in list(self.pods.values()):
            if pod.state == "Pending" and pod.deleted_at is None and self.now - pod.born >= 1:
                pod.state = "Running"
            if pod.deleted_at is not None:
                if pod.running:
                    pod.state, pod.exit_code = "Ended", 143
                elif pod.state == "Ended" or pod.state == "Pending":
                    del self.pods[pod.name]
        for generation in {p.label(LABEL_GENERATION) for p in self.pods.values()}:
            self._train(generation, seconds)

    def _train(self, generation: int, seconds: float) -> None:
        nodes = [p for p in self._nodes() if p.label(LABEL_GENERATION) == generation]
        hosts = [p for p in self.pods.values() if p.role == "coordinator" and p.label(LABEL_GENERATION) == generation and p.running]
        master = self.spec.get("rendezvous", {}).get("placement") == "Master"
        alive = any(p.running and p.label(LABEL_INDEX) == 0 and not p.coordinator_ended for p in nodes) if master else bool(hosts)
        group = self.groups.setdefault(generation, Group())
        members = [p for p in nodes if p.running]
        if not alive:
            for pod in members:
                if self.now - pod.born > 5:
                    pod.state, pod.exit_code = "Ended", 76
            return
        if group.state == "Succeeded":
            for pod in members:
                pod.state, pod.exit_code = "Ended", 0
            return
        names = frozenset(p.name for p in members)
        if group.state == "Running" and names != group.members:
            group.state = "Restarting"
        if group.state != "Running" and len(members) == self.spec["nodes"]:
            group.state, group.members, group.formed = "Running", names, self.now
            return
        if group.state == "Running":
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
        del self.pods[name]

    def delete(self, name: str) -> None:
        self.pods[name].deleted_at = self.now + 30

    def end(self, name: str, exit_code: int, reason: str = "Error", message: str = "") -> None:
        pod = self.pods[name]
        pod.state, pod.exit_code, pod.reason, pod.message = "Ended", exit_code, reason, message

    def worker_fails(self, name: str) -> bool:
        """An exception in a worker; its pod stays. False when its group does not train."""
        pod = self.pods[name]
        group = self.groups.get(pod.label(LABEL_GENERATION))
        if group is None or group.state != "Running" or name not in group.members:
            return False
        group.state = "Restarting"
        number = len(group.incidents) + 1
        incident = Incident(
            id=number, time=EPOCH + timedelta(seconds=self.now), kind="WorkerFailed", pod=name, index=pod.label(LABEL_INDEX),
            rank=pod.label(LABEL_INDEX), local_rank=0, exit_code=1, signal=None, message="ValueError: lunch",
            traceback="Traceback (most recent call last):\nValueError: lunch",
        )  # fmt: skip
        group.incidents.append(incident)
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
        hosts = [p for p in self.pods.values() if p.running and p.label(LABEL_GENERATION) == generation]
        if group is None or not any(p.role == "coordinator" or p.label(LABEL_INDEX) == 0 for p in hosts):
            return None
        progress = {"step": group.step, "steps": self.steps} if group.step else {}
        return Report(generation=generation, state=group.state, incidents=tuple(group.incidents), progress=progress)

    def _view(self, pod: Pod) -> PodView:
        ended = pod.state == "Ended"
        started = EPOCH if pod.state != "Pending" else None
        main = ContainerView(started=started, exit_code=pod.exit_code, reason=pod.reason, message=pod.message)
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
            role=Role(pod.role),
            index=pod.label(LABEL_INDEX),
            attempt=pod.label(LABEL_ATTEMPT),
            generation=pod.label(LABEL_GENERATION),
            phase=phase,
            node="n1",
            address="10.0.0.1" if started else "",
            deleted_at=EPOCH + timedelta(seconds=pod.deleted_at) if pod.deleted_at is not None else None,
            containers=containers,
        )


def conditions(simulation: Simulation) -> dict[str, Any]:
    return {c["type"]: c for c in simulation.status.get("conditions", ())}
