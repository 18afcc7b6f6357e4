"""Runs one night: jobs train and nodes are lost. Checks each second which jobs wait despite room."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.informer import Informer
from ddpjob.controller.kube.rest import ApiError, Rest
from ddpjob.core.world import LABEL_MANAGED, LABEL_ROLE, MANAGED_BY

from benchmarks.night.machines import Kubelets, WallClock
from benchmarks.night.schedule import GPUS, HOSTS, PRIORITIES, Fault, FaultKind, Job
from benchmarks.night.simulated import Network, Pace
from benchmarks.night.training import PlayedTraining, Trainings, judge
from benchmarks.night.waits import Lack, Need, Wait, Waits, by_job, fitting, free_gpus, gpus_of, holds, is_ready, needs

LOOK = 1.0
ENDED = ("Complete", "Failed")
PACE = Pace(
    message=(0.001, 0.005),
    start=(0.5, 1.5),
    boot=(0.5, 2.0),
    listen=(0.2, 0.5),
    join=(0.3, 1.0),
    drain=(0.1, 0.5),
    notice=(0.05, 0.3),
)
"""Containers start in about a second, launchers in one or two seconds, forked workers in less."""


@dataclass(frozen=True)
class Look:
    """The cluster's state at one time. `at` is in seconds since the start of the night."""

    at: float
    held: dict[str, int]
    """GPUs by job."""
    offered: int
    """GPUs of Ready nodes."""
    waiting: int
    """Number of jobs that do not have enough nodes."""
    longest: float
    """The longest time, in seconds, that a job has been waiting although it fits."""
    fits: dict[str, str]
    """The kind of need (Lack) of each job that fits."""


@dataclass
class Record:
    """The record of a night."""

    looks: list[Look] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)
    faults: list[tuple[float, FaultKind, float]] = field(default_factory=list)
    """(time, kind, seconds for which the node was gone)"""
    created: dict[str, float] = field(default_factory=dict)
    first_held: dict[str, float] = field(default_factory=dict)
    """When each job first had all the nodes that it needs."""
    statuses: dict[str, Json] = field(default_factory=dict)
    """The last status of each job."""
    preempted: set[str] = field(default_factory=set)
    """Uids of preempted pods, including coordinators."""
    mistaken: int = 0
    """Number of nodes that were considered lost although their kubelets ran, because this machine
    was too busy.
    """
    scheduler_seconds: float = 0.0
    """kube-scheduler's CPU time."""
    useful: int = 0
    """GPU-seconds of the steps that count."""
    samples: int = 0
    fenced: int = 0
    exact: int = 0
    """Number of jobs with an exact ledger."""
    problems: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.looks[-1].at if self.looks else 0.0

    def waits_for(self, *lacks: Lack) -> list[Wait]:
        """Return the waits of these kinds, longest first."""
        return sorted((w for w in self.waits.ended if w.lack in lacks), key=lambda wait: -wait.seconds)

    def reasons(self) -> Counter[str]:
        """Count the reasons for restarts that are still in the statuses."""
        recent = (r for s in self.statuses.values() for r in s.get("restarts", {}).get("recent", ()))
        return Counter(r["reason"] for r in recent)


class _Over(Exception):
    """The night is over."""


class Night:
    """Plays a night. `folder` holds the jobs' checkpoints and ledgers."""

    def __init__(
        self, rest: Rest, namespace: str, jobs: list[Job], faults: list[Fault], folder: Path, *, forgets: bool = False
    ) -> None:
        self.rest, self.namespace, self.folder, self.forgets = rest, namespace, folder, forgets
        self.jobs = {job.name: job for job in jobs}
        self._faults = faults
        self.record = Record()
        self._network = Network(WallClock(), random.Random(0), PACE)
        self._trainings = Trainings()
        self.kubelets = Kubelets(rest, namespace, self._network, self._trainings)
        self._pods: Informer[Json] = Informer(
            rest, f"/api/v1/namespaces/{namespace}/pods", dict, self._pod_changed,
            selector=f"{LABEL_MANAGED}={MANAGED_BY}",
        )  # fmt: skip
        self._nodes: Informer[Json] = Informer(rest, "/api/v1/nodes", dict, self._node_changed)
        self._objects: Informer[Json] = Informer(rest, self._job_path(), dict, lambda before, after: None)
        self._began = 0.0
        self._classes = {name: f"{namespace}-{name}" for name in PRIORITIES}

    def _job_path(self, name: str = "") -> str:
        return f"/apis/ddpjob.io/v1alpha1/namespaces/{self.namespace}/ddpjobs{'/' if name else ''}{name}"

    def _node_changed(self, before: Json | None, after: Json | None) -> None:
        if after is None:
            return
        name = after["metadata"]["name"]
        if is_ready(after):
            self.kubelets.ready.add(name)
        elif name in self.kubelets.ready:
            self.kubelets.ready.remove(name)
            self.record.mistaken += not self.kubelets.hosts[name].silent

    def _pod_changed(self, before: Json | None, after: Json | None) -> None:
        self.kubelets.pod_changed(before, after)
        for condition in (after or {}).get("status", {}).get("conditions", ()):
            if condition.get("reason") == "PreemptionByScheduler" and after is not None:
                self.record.preempted.add(after["metadata"]["uid"])

    def _now(self) -> float:
        return time.monotonic() - self._began

    # ---- the whole

    async def run(self, limit: float) -> Record:
        """Run until all jobs have ended, or for `limit` seconds."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._play(group, limit))
        except* _Over:
            self.record.waits.close()
        finally:
            self.kubelets.close()
        self._judge()
        return self.record

    async def _play(self, group: asyncio.TaskGroup, limit: float) -> None:
        """Play the night, and raise _Over at the end, which ends the other tasks."""
        await self._prepare(group)
        self._began = time.monotonic()
        group.create_task(self._submit())
        group.create_task(self._hurt())
        while not self._all_ended() and self._now() < limit:
            self._look()
            await asyncio.sleep(LOOK - self._now() % LOOK)
        self._look()
        raise _Over

    def _failed(self, loop: asyncio.AbstractEventLoop, context: Json) -> None:
        """Record a failed assertion in the simulation, or an error in this program."""
        self.record.problems.append(repr(context.get("exception") or context["message"]))

    async def _prepare(self, group: asyncio.TaskGroup) -> None:
        for name, value in PRIORITIES.items():
            body = {"metadata": {"name": self._classes[name]}, "value": value}
            await self.rest.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body=body)
        for informer in (self._pods, self._nodes, self._objects):
            group.create_task(informer.run())
        for number in range(HOSTS):
            await self.kubelets.register(f"gpu-{number}")
            group.create_task(self.kubelets.keep_alive(f"gpu-{number}"))
        for _ in range(300):
            if len(free_gpus(self._nodes.views(), ())) == HOSTS:
                return
            await asyncio.sleep(0.2)
        raise TimeoutError("not all nodes are free of taints after a minute")

    async def _submit(self) -> None:
        for job in self.jobs.values():
            await asyncio.sleep(max(0.0, job.at - self._now()))
            body = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": job.name}}
            made = await self.rest.request("POST", self._job_path(), body={**body, "spec": job.spec(self._classes)})
            uid, folder = made["metadata"]["uid"], self.folder / job.name
            self._trainings.of_job[job.name] = PlayedTraining(self._network, job, uid, folder, forgets=self.forgets)
            self.record.created[job.name] = self._now()

    def _all_ended(self) -> bool:
        phases = [body.get("status", {}).get("phase") for body in self._objects.views()]
        return len(phases) == len(self.jobs) and all(phase in ENDED for phase in phases)

    # ---- faults

    async def _hurt(self) -> None:
        for fault in self._faults:
            await asyncio.sleep(max(0.0, fault.at - self._now()))
            if fault.kind in (FaultKind.POWER, FaultKind.CABLE):
                await self._lose_node(fault)
            else:
                await self._kill(fault)

    async def _kill(self, fault: Fault) -> None:
        """Force-delete a pod, as a user does with a hung pod."""
        wanted = fault.kind is FaultKind.COORDINATOR
        found = sorted(
            (p["metadata"]["name"] for p in self._pods.views() if holds(p) and _is_coordinator(p) is wanted), key=str
        )
        if not found:
            return
        path = f"/api/v1/namespaces/{self.namespace}/pods/{found[int(fault.choice * len(found))]}"
        try:
            await self.rest.request("DELETE", path, body={"gracePeriodSeconds": 0})
        except ApiError as error:
            if error.status != 404:
                raise
            return
        self.record.faults.append((self._now(), fault.kind, 0.0))

    async def _lose_node(self, fault: Fault) -> None:
        """Remove a node for `fault.seconds`. Other faults happen during that time."""
        host = list(self.kubelets.hosts.values())[int(fault.choice * HOSTS)]
        self.kubelets.cut(host, None)
        if fault.kind is FaultKind.POWER:
            self.kubelets.lose(host)
        self.record.faults.append((self._now(), fault.kind, fault.seconds))
        asyncio.get_running_loop().call_later(fault.seconds, self.kubelets.bring_back, host)

    # ---- looking

    def _look(self) -> None:
        now, pods = self._now(), by_job(self._pods.views())
        wanted: list[Need] = []
        for body in self._objects.views():
            job = self.jobs[body["metadata"]["name"]]
            wanted += needs(job, body, pods.get(job.name, ()), PRIORITIES[job.priority])
            self.record.statuses[job.name] = body.get("status", {})
        lacking = {need.job for need in wanted if need.lack is not Lack.MORE}
        for name in self.record.created.keys() - lacking - self.record.first_held.keys():
            self.record.first_held[name] = now
        held = {name: sum(gpus_of(pod) for pod in own if holds(pod)) for name, own in pods.items()}
        free = free_gpus(self._nodes.views(), self._pods.views())
        fit = fitting(free, wanted)
        self.record.looks.append(
            Look(
                at=now,
                held=held,
                offered=GPUS * len(free),
                waiting=len(lacking),
                longest=self.record.waits.look(now, fit),
                fits={need.job: need.lack for need in fit},
            )
        )
        self.record.loads.append(os.getloadavg()[0])

    def _judge(self) -> None:
        """Check that every job is Complete without a counted restart, with an exact ledger."""
        record = self.record
        for name in self.jobs:
            status, training = record.statuses.get(name, {}), self._trainings.of_job.get(name)
            if status.get("phase") != "Complete":
                record.problems.append(f"{name} is {status.get('phase') or 'not begun'}, not Complete")
            if counted := status.get("restarts", {}).get("counted"):
                record.problems.append(f"{name}: {counted} restarts were counted, but none was the job's own failure")
            if training is not None:
                samples, problem = judge(training)
                record.samples, record.fenced = record.samples + samples, record.fenced + training.fenced
                record.exact += not problem
                record.useful += training.made * training.job.nodes * training.job.gpus
                if problem:
                    record.problems.append(f"{name}: {problem}")


def _is_coordinator(pod: Json) -> bool:
    return bool(pod["metadata"]["labels"][LABEL_ROLE] == "coordinator")
