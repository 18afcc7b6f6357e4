"""The parts of the benchmark, in order."""

from __future__ import annotations

import asyncio
import copy
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.rest import MERGE_PATCH, ApiError, Rest
from ddpjob.controller.main import CONNECTIONS
from ddpjob.core.world import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_MANAGED,
    LABEL_ROLE,
    LABEL_UID,
    MANAGED_BY,
)
from ddpjob.engine.ports import Unavailable

from benchmarks.scale.floor import BARE, BareClient
from benchmarks.scale.hollow import ENDED, HOSTILE, PORT, Hollow, Pod, pods_of
from benchmarks.scale.measure import Figure, Meter, Operator, Usage, requests
from benchmarks.scale.onlooker import Onlooker
from benchmarks.scale.timeline import Timeline, gap_table

NO_SCHEDULER = "nobody"
TIMEOUT = 600.0
"""Seconds after which a part has failed."""
LOOK = 0.02
"""Seconds between two checks of a condition."""
ENDED_PODS = 2
"""Number of succeeded pods of each finished job."""
PROBES = 5
BARE_PAUSE = 0.5
"""Seconds between two pairs of pods that a bare client creates during a storm, with or without the
operator."""
WRITES = ("PUT", "PATCH", "POST", "DELETE", "APPLY")


class BenchmarkError(Exception):
    """A part did not finish."""


@dataclass
class Options:
    """The options from `__main__`. `sizes` are numbers of jobs, ascending."""

    sizes: list[int]
    nodes: int
    burst: int
    rounds: int
    rest: float
    settle: float
    ended: int
    storm: int
    hostile: int
    large: int
    reports: int


@dataclass
class Series:
    """The series of the chart."""

    rest: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    """(jobs, cores, MiB, status writes and reads per job and minute)"""
    storm: list[float] = field(default_factory=list)
    """Seconds until each lost pod was replaced."""
    probes: list[tuple[float, float]] = field(default_factory=list)
    """(when another team's job was created during the storm, seconds until it had its pods)"""


@dataclass(frozen=True)
class _Burst:
    """The creation of many pods at once. `rate` is in pods per second."""

    pods: int
    rate: float
    usage: Usage
    requests: int

    @property
    def server_ms(self) -> float:
        """Milliseconds of the API server's CPU time per pod."""
        return self.usage.control_plane * 1000 / self.pods


class Parts:
    """One run.

    `namespaces` are the teams' namespaces; the last one belongs to another team, whose jobs are the
    probes. `bare` creates pods without a job. `onlooker` sees the pods in the last namespace.
    """

    def __init__(
        self,
        options: Options,
        rest: Rest,
        hollow: Hollow,
        bare: BareClient,
        onlooker: Onlooker,
        operator: Operator,
        meter: Meter,
        namespaces: list[str],
    ) -> None:
        self.options, self.rest, self.hollow, self.bare = options, rest, hollow, bare
        self.onlooker = onlooker
        self.operator, self.meter = operator, meter
        self.teams, self.other = namespaces[:-1], namespaces[-1]
        self.figures: list[Figure] = []
        self.series = Series()
        self.timelines: dict[str, Timeline] = {}
        """The storm's timelines by client."""
        self.error = ""
        """Why a part did not finish."""
        self.jobs: list[str] = []
        """namespace/name of the training jobs."""
        self._names = count()
        self._first_seen: dict[str, float] = {}
        hollow.on_pod = self._see

    def _see(self, pod: Pod) -> None:
        self._first_seen[pod.uid] = time.monotonic()

    async def run(self) -> None:
        self.operator.start()
        await self._operator_acts()
        await self._creation()
        for size in self.options.sizes:
            await self._grow(size)
        if self.options.ended:
            await self._ended()
        await self._storm()
        await self._restart()
        if self.options.hostile:
            await self._hostile()
        self._note("all", "the operator's memory at its peak", self.operator.peak(), "MiB", "<= 512")

    # --- tools

    def _note(self, part: str, what: str, value: float, unit: str, aim: str = "", beside: object = "") -> None:
        figure = Figure(part, what, value, unit, aim, str(beside))
        self.figures.append(figure)
        goal = f"{aim:<7} {figure.reached}" if aim else ""
        print(f"{part:<18} {what:<58} {value:>8.3g} {unit:<9} {goal:<12} {beside}", flush=True)

    async def _until(self, what: str, check: Callable[[], bool]) -> float:
        """Wait until `check()` is true, and return the seconds."""
        began = time.monotonic()
        while not check():
            if not self.operator.process.running():
                raise BenchmarkError(f"the operator exited before {what}")
            if time.monotonic() - began > TIMEOUT:
                raise BenchmarkError(f"timed out after {TIMEOUT:.0f} s: {what}")
            await asyncio.sleep(LOOK)
        return time.monotonic() - began

    async def _create_job(self, namespace: str, nodes: int, kind: str = "job", **spec: Any) -> str:
        name = f"{kind}-{next(self._names)}"
        manifest = {
            "apiVersion": "ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name},
            "spec": {
                "image": "image",
                "script": "train.py",
                "nodes": nodes,
                "gpusPerNode": 0,
                "rendezvous": {"port": PORT},
                "scheduling": {"schedulerName": NO_SCHEDULER},
                **spec,
            },
        }
        await self.rest.request("POST", f"{_jobs_path(namespace)}", body=manifest)
        return f"{namespace}/{name}"

    async def _create_jobs(self, number: int) -> list[str]:
        """Create jobs for the teams in turn."""
        teams = [self.teams[i % len(self.teams)] for i in range(number)]
        return await together(self._create_job(team, self.options.nodes) for team in teams)

    def _running(self) -> int:
        """Return how many of the teams' jobs are Running according to their status."""
        return sum(g.phase == "Running" and g.complete and g.kind == "job" for g in self.hollow.groups.values())

    async def _probe(self) -> float:
        """Return the seconds until another team's new one-node job has its two pods."""
        began = time.monotonic()
        job = await self._create_job(self.other, 1, "probe")
        await self._until(f"the pods of {job}", lambda: len(pods_of(self.hollow, job)) == 2)
        return await self._seen(pod.name for pod in pods_of(self.hollow, job)) - began

    async def _seen(self, names: Iterable[str]) -> float:
        """Return when the onlooker saw the last of these pods."""
        pods, seen = tuple(names), self.onlooker.seen
        await self._until("the onlooker to see the pods", lambda: all(name in seen for name in pods))
        return max(seen[name] for name in pods)

    async def _operator_acts(self) -> None:
        await self._probe()

    async def _sweep(self, namespaces: Iterable[str]) -> None:
        """Remove jobs and everything that they own, because there may be no garbage collector."""
        for path in _SWEPT:
            await together(self._delete_all(path.format(namespace)) for namespace in namespaces)
        gone = set(namespaces)
        await self._until("all pods are gone", lambda: not any(n in gone for n, _ in self.hollow.pods))

    async def _delete_all(self, path: str, **query: str) -> None:
        while True:
            try:
                await self.rest.request("DELETE", path, query={"gracePeriodSeconds": "0", **query})
                return
            except Unavailable:
                # On a busy machine, a deletion may take longer than a request's timeout.
                await asyncio.sleep(LOOK)

    # --- creation

    async def _creation(self) -> None:
        """Measure bursts of jobs, and of the same pods from a bare client, in turn.

        The pods remain as they were created.
        """
        options, bursts, bares = self.options, list[_Burst](), list[_Burst]()
        self.hollow.kubelets_run = self.bare.hollow.kubelets_run = False
        for _ in range(options.rounds):
            bursts.append(await self._burst())
            manifests = await together(self._bare(pod) for pod in self._pods_of_teams())
            await self._sweep(self.teams)
            await asyncio.sleep(2)  # Give the operator time to notice the deletions.
            bares.append(await self._bare_burst(manifests))
        self.hollow.kubelets_run = self.bare.hollow.kubelets_run = True
        part, what = "creation", f"{options.burst} jobs x {options.nodes}"
        ours, bare = (sorted(found, key=lambda b: b.rate)[len(found) // 2] for found in (bursts, bares))
        ratios = [a.rate / b.rate for a, b in zip(bursts, bares, strict=True)]
        self._note(part, "a bare client", bare.rate, "pods/s", "", bare.usage)
        self._note(part, what, ours.rate, "pods/s", "", ours.usage)
        self._note(part, f"{what}: rate relative to the bare client", statistics.median(ratios), "", ">= 0.5",
                   f"{min(ratios):.2f} to {max(ratios):.2f} in {options.rounds} rounds")  # fmt: skip
        requests_per_second = ours.requests / ours.usage.wall
        self._note(part, f"{what}: request rate relative to the bare client", requests_per_second / bare.rate, "", "",
                   f"{ours.requests / ours.pods:.2f} requests per pod")  # fmt: skip
        self._note(part, f"{what}: CPU time per pod, API server", ours.server_ms, "ms", "",
                   f"{bare.server_ms:.1f} for the bare client")  # fmt: skip
        self._note(part, f"{what}: CPU time per pod, operator", ours.usage.operator * 1000 / ours.pods, "ms", "",
                   f"{bare.usage.benchmark * 1000 / bare.pods:.1f} for the bare client")  # fmt: skip

    async def _burst(self) -> _Burst:
        wanted, counts = self.options.burst * (self.options.nodes + 1), await requests(self.rest)
        before, began = self.meter.read(), time.monotonic()
        await self._create_jobs(self.options.burst)
        await self._until("every pod of the burst", lambda: len(self._pods_of_teams()) >= wanted)
        usage, after = self.meter.read() - before, await requests(self.rest)
        last = max(self._first_seen[pod.uid] for pod in self._pods_of_teams())
        return _Burst(wanted, wanted / (last - began), usage, (after - counts).total())

    def _pods_of_teams(self) -> list[Pod]:
        return [pod for (namespace, _), pod in self.hollow.pods.items() if namespace != self.other]

    async def _bare(self, pod: Pod) -> Json:
        """Return the pod as a user would write it, without a job."""
        body = await self.rest.request("GET", f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}")
        labels = {key: value for key, value in body["metadata"]["labels"].items() if key != LABEL_MANAGED}
        spec = copy.deepcopy(body["spec"])
        for name in ("serviceAccount", "serviceAccountName", "priority", "preemptionPolicy"):
            spec.pop(name, None)
        meta = {"name": pod.name, "namespace": pod.namespace, "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}

    async def _bare_burst(self, manifests: list[Json]) -> _Burst:
        """Measure a client that only creates and watches pods.

        It has as many connections as the operator.
        """
        before, began = self.meter.read(), time.monotonic()
        created = await together((self.bare.create(pod) for pod in manifests), CONNECTIONS)
        await self._until("every bare pod", lambda: all(key in self.bare.seen for key in created))
        usage, last = self.meter.read() - before, max(self.bare.seen[key] for key in created)
        await self._sweep_bare(self.teams)
        return _Burst(len(created), len(created) / (last - began), usage, len(created))

    # --- rest

    async def _grow(self, size: int) -> None:
        """Create jobs until `size` are Running, and measure what they cost."""
        options = self.options
        before, began = self.meter.read(), time.monotonic()
        self.jobs += await self._create_jobs(size - len(self.jobs))
        await self._until(f"{size} jobs are Running", lambda: self._running() >= size)
        usage = self.meter.read() - before
        part = f"{size} jobs x {options.nodes}"
        self._note(part, "time until all are Running", time.monotonic() - began, "s", "", usage)
        usage, counts = await self._at_rest()
        memory, (writes, reads, others) = self.operator.memory(), self._per_job(counts, usage, size)
        self._note(part, "status writes per job and minute", writes, "", "<= 6", _listed(counts))
        self._note(part, "reads per job and minute", reads, "", "<= 1")
        self._note(part, "other requests per job and minute", others, "")
        self._note(part, "the operator at rest", usage.cores, "cores", "<= 0.5", usage)
        self._note(part, "the operator's memory", memory, "MiB", "<= 300")
        self.series.rest.append((size, usage.cores, memory, writes, reads))

    async def _at_rest(self) -> tuple[Usage, Counter[tuple[str, str]]]:
        """Return the usage and the API server's served requests during `rest` seconds."""
        await asyncio.sleep(self.options.settle)
        counts, before = await requests(self.rest), self.meter.read()
        await asyncio.sleep(self.options.rest)
        usage, after = self.meter.read() - before, await requests(self.rest)
        return usage, after - counts

    def _per_job(self, counts: Counter[tuple[str, str]], usage: Usage, jobs: int) -> tuple[float, float, float]:
        status = sum(n for (verb, what), n in counts.items() if verb in WRITES and what == "ddpjobs/status")
        reads = sum(n for (verb, _), n in counts.items() if verb not in WRITES)
        per = jobs * usage.wall / 60
        return status / per, reads / per, (counts.total() - status - reads) / per

    async def _ended(self) -> None:
        """Check that finished jobs with succeeded pods do not change anything."""
        options = self.options
        await together(self._create_ended(self.teams[i % len(self.teams)]) for i in range(options.ended))
        usage, counts = await self._at_rest()
        part = f"+ {options.ended} ended"
        writes, reads, _ = self._per_job(counts, usage, len(self.jobs))
        self._note(part, "status writes per running job and minute", writes, "", "<= 6", _listed(counts))
        self._note(part, "reads per running job and minute", reads, "", "<= 1")
        self._note(part, "the operator at rest", usage.cores, "cores", "<= 0.5", usage)
        self._note(part, "the operator's memory", self.operator.memory(), "MiB", "<= 300")

    async def _create_ended(self, namespace: str) -> None:
        policy = {"suspend": True, "cleanPodPolicy": "None"}
        _, _, name = (await self._create_job(namespace, ENDED_PODS, ENDED, runPolicy=policy)).rpartition("/")
        path, now = f"{_jobs_path(namespace)}/{name}", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Complete", "status": "True", "reason": "Finished", "message": ""}
        status = {
            "phase": "Complete",
            "completionTime": now,
            "conditions": [{**condition, "lastTransitionTime": now}],
        }
        job = await self._patch(f"{path}/status", {"status": status})
        owner = {"apiVersion": job["apiVersion"], "kind": "DDPJob", "name": name, "uid": job["metadata"]["uid"]}
        pods = f"/api/v1/namespaces/{namespace}/pods"
        for index in range(ENDED_PODS):
            labels = {LABEL_MANAGED: MANAGED_BY, LABEL_JOB: name, LABEL_UID: owner["uid"], LABEL_ROLE: "node"}
            labels |= {LABEL_GENERATION: "0", LABEL_ATTEMPT: "0", LABEL_INDEX: str(index)}
            meta = {"name": f"{name}-{index}-0", "labels": labels, "ownerReferences": [owner]}
            spec = {"schedulerName": NO_SCHEDULER, "containers": [{"name": "trainer", "image": "image"}]}
            await self._create_succeeded(pods, {"metadata": meta, "spec": spec})

    async def _create_succeeded(self, pods: str, body: Json) -> None:
        """Create a succeeded pod, and recreate it whenever the operator has removed it.

        The operator removes the pod until it has seen that the suspended job is finished.
        """
        while True:
            await self.rest.request("POST", pods, body=body)
            try:
                await self._patch(f"{pods}/{body['metadata']['name']}/status", {"status": {"phase": "Succeeded"}})
                return
            except ApiError as error:
                if error.status != 404:
                    raise
            await asyncio.sleep(LOOK)

    async def _patch(self, path: str, body: Json) -> Json:
        return await self.rest.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    # --- storm

    async def _storm(self) -> None:
        """Delete all nodes of some jobs at once, as if their Kubernetes nodes were lost."""
        quiet = sorted([await self._probe() for _ in range(PROBES)])
        jobs = self.jobs[: max(1, self.options.storm // self.options.nodes)]
        victims = [p for job in jobs for p in pods_of(self.hollow, job) if p.index >= 0 and p.attempt == 0]
        part, probe = f"storm: {len(victims)} pods", await self._bare_probe_pods()
        floor = await self._floor(part, victims, probe)
        groups = [self.hollow.groups[uid] for uid in {pod.job_uid for pod in victims}]
        counts, versions = await requests(self.rest), sum(group.versions for group in groups)
        before, began = self.meter.read(), time.monotonic()
        ours = self.hollow.timeline = Timeline(pod.id for pod in victims)
        bare: list[tuple[float, float]] = []
        async with (
            self._probing(began, self._probe, self.series.probes),
            self._probing(began, lambda: self._bare_probe(probe), bare, BARE_PAUSE),
        ):
            await self._delete_nodes_of(jobs)
            deleted = time.monotonic() - began
            await self._until("every lost pod is replaced", lambda: ours.count("replaced") >= len(victims))
        usage, counts = self.meter.read() - before, await requests(self.rest) - counts
        self.series.storm = ours.gaps("", "replaced")
        await self._until("every job is Running again", lambda: self._running() >= len(self.jobs))
        versions = sum(group.versions for group in groups) - versions
        await self._until("every replacement runs", lambda: ours.count("runs") >= len(victims))
        self._note(part, "time until all are deleted", deleted, "s", "", "by the benchmark")
        self._note(part, "time until all are replaced", ours.last("replaced"), "s", "<= 10", usage)
        self._note(part, "the operator's CPU time until then", usage.operator, "s")
        for step, what, aim in (("replaced", "are replaced", "<= 1.5"), ("runs", "run again", "")):
            ratio = ours.last(step) / floor.last(step)
            self._note(part, f"time until all {what}, relative to the bare client", ratio, "", aim)
        self._note(part, "requests until all are replaced", counts.total(), "", "", _listed(counts))
        self._note(part, "status writes per job until it is Running again", versions / len(groups), "")
        self._note_waits(part, "wait of another team's new job", self.series.probes, "<= 1",
                         f"without the storm {statistics.median(quiet):.2f}")  # fmt: skip
        self._note_waits(part, "wait for two pods of a bare client, created one pair after another", bare)
        late = max((seconds for at, seconds in self.onlooker.late if at >= began), default=0.0)
        self._note(
            part, "wake-up delay of a process that only sleeps (worst)", late, "s", "", "delay of the machine itself"
        )
        self._note(part, "time until all jobs are Running again", time.monotonic() - began, "s")
        await self._sweep_bare([self.other])
        self.timelines = {"operator": ours, "bare client": floor}
        print(gap_table(self.timelines), flush=True)

    def _note_waits(
        self, part: str, what: str, waits: list[tuple[float, float]], aim: str = "", beside: str = ""
    ) -> None:
        seconds = [wait for _, wait in waits]
        self._note(part, f"{what} (median)", statistics.median(seconds), "s")
        self._note(part, f"{what} (worst of {len(seconds)})", max(seconds), "s", aim, beside)

    async def _floor(self, part: str, victims: list[Pod], probe: list[Json]) -> Timeline:
        """Measure an equal storm of pods without a job, which a bare client replaces.

        The jobs are at rest during the measurement. Return the storm's timeline.
        """
        manifests = await together(self._bare(pod) for pod in victims)
        await together((self.bare.create(manifest) for manifest in manifests), CONNECTIONS)
        await self._until("the bare client's pods run", lambda: self.bare.running() >= len(victims))
        counts, before, began = await requests(self.rest), self.meter.read(), time.monotonic()
        timeline = self.bare.hollow.timeline = Timeline(pod.id for pod in victims)
        self.bare.replace_from_now_on()
        waits: list[tuple[float, float]] = []
        async with self._probing(began, lambda: self._bare_probe(probe), waits, BARE_PAUSE):
            await together(
                self._delete_all(_PODS.format(team), labelSelector=f"{LABEL_MANAGED}={BARE},{LABEL_ATTEMPT}=0")
                for team in self.teams
            )
            deleted = time.monotonic() - began
            await self._until(
                "the bare client has replaced every pod", lambda: timeline.count("replaced") >= len(victims)
            )
        usage, counts = self.meter.read() - before, await requests(self.rest) - counts
        await self._until("the bare client's new pods run", lambda: timeline.count("runs") >= len(victims))
        self.bare.stop()
        self._note(part, "a bare client alone: time until all are deleted", deleted, "s", "", "by the benchmark")
        self._note(part, "a bare client alone: time until all are replaced", timeline.last("replaced"), "s", "", usage)
        self._note(
            part, "a bare client alone: requests until all are replaced", counts.total(), "", "", _listed(counts)
        )
        self._note_waits(part, "a bare client alone: wait for two more pods, created during the storm", waits)
        await self._sweep_bare([*self.teams, self.other])
        return timeline

    async def _sweep_bare(self, namespaces: list[str]) -> None:
        ours = f"{LABEL_MANAGED}={BARE}"
        await together(self._delete_all(_PODS.format(namespace), labelSelector=ours) for namespace in namespaces)
        await self._until("the bare client's pods are gone", lambda: not self.bare.hollow.pods)

    async def _bare_probe_pods(self) -> list[Json]:
        """Return the pods of another team's job with one node."""
        job = await self._create_job(self.other, 1, "probe")
        await self._until(f"the pods of {job}", lambda: len(pods_of(self.hollow, job)) == 2)
        return [await self._bare(pod) for pod in pods_of(self.hollow, job)]

    async def _bare_probe(self, pods: list[Json]) -> float:
        """Return the seconds until pods that a bare client creates are seen."""
        began = time.monotonic()
        created = await asyncio.gather(*(self.bare.create(pod, 1) for pod in pods))
        return await self._seen(name for _, name in created) - began

    async def _delete_nodes_of(self, jobs: list[str]) -> None:
        """Delete the jobs' nodes with few requests, so that the CPUs are not loaded by them.

        Replacements are kept if a request is repeated.
        """
        by_team: dict[str, list[str]] = {}
        for job in jobs:
            namespace, _, name = job.partition("/")
            by_team.setdefault(namespace, []).append(name)
        await together(
            self._delete_all(
                f"/api/v1/namespaces/{namespace}/pods",
                labelSelector=f"{LABEL_INDEX},{LABEL_ATTEMPT}=0,{LABEL_JOB} in ({','.join(names)})",
            )
            for namespace, names in by_team.items()
        )

    @asynccontextmanager
    async def _probing(
        self, began: float, probe: Callable[[], Awaitable[float]], waits: list[tuple[float, float]], pause: float = 0.1
    ) -> AsyncIterator[None]:
        """Run probes one after another during the context.

        `waits` receives the start time and the result of each.
        """
        first = asyncio.Event()

        async def go_on() -> None:
            while True:
                at = time.monotonic() - began
                waits.append((at, await probe()))
                first.set()
                await asyncio.sleep(pause)

        probing = asyncio.create_task(go_on())
        try:
            yield
            await first.wait()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    # --- restart

    async def _restart(self) -> None:
        """Kill the operator. Before it is restarted, a pod is lost and a job is created."""
        self.operator.kill()
        victim = next(pod for pod in pods_of(self.hollow, self.jobs[-1]) if pod.index >= 0)
        path = f"/api/v1/namespaces/{victim.namespace}/pods/{victim.name}"
        await self.rest.request("DELETE", path, query={"gracePeriodSeconds": "0"})
        job = await self._create_job(self.other, 1, "probe")
        await asyncio.sleep(1)
        known, began = set(self._first_seen), time.monotonic()
        had_pods = {(pod.namespace, pod.job) for pod in self.hollow.pods.values()}
        self.operator.start()
        before = self.meter.read()

        def replaced() -> list[Pod]:
            """Return new pods of jobs that had pods before.

            The storm's last job may get its first pods only now.
            """
            new = [pod for pod in self.hollow.pods.values() if pod.uid not in known]
            return [pod for pod in new if (pod.namespace, pod.job) in had_pods]

        await self._until("the first pod of the new job", lambda: len(pods_of(self.hollow, job)) > 0)
        await self._until("the lost pod is replaced", lambda: len(replaced()) > 0)
        first = min(self._first_seen[pod.uid] for pod in pods_of(self.hollow, job)) - began
        again = min(self._first_seen[pod.uid] for pod in replaced()) - began
        usage = self.meter.read() - before
        self._note("restart", "time until a lost pod is replaced", again, "s", "<= 5", usage)
        self._note("restart", "the operator's CPU time until then", usage.operator, "s")
        self._note("restart", "time until a new job's first pod", first, "s", "<= 5", "from the start of the process")
        await self._until("every job is Running", lambda: self._running() >= len(self.jobs))
        await asyncio.sleep(self.options.settle)
        self._note("restart", "other pods that were replaced", len(replaced()) - 1, "", "<= 0")

    # --- hostile coordinators

    async def _hostile(self) -> None:
        number = self.options.hostile
        quiet = sorted([await self._probe() for _ in range(PROBES)])
        kinds = [HOSTILE[i % len(HOSTILE)] for i in range(number)]
        await together(self._create_job(self.teams[0], 1, kind) for kind in kinds)
        await self._until(
            "the hostile coordinators run",
            lambda: sum(g.kind in HOSTILE and g.complete for g in self.hollow.groups.values()) >= number,
        )
        await asyncio.sleep(self.options.settle)
        before = self.meter.read()
        beside = []
        for _ in range(2 * PROBES):
            beside.append(await self._probe())
            await asyncio.sleep(0.5)
        usage, part = self.meter.read() - before, f"{number} hostile"
        self._note(
            part, "time until another team's job has its pods (median)", statistics.median(beside), "s", "<= 0.5", usage
        )
        alone = f"without them {statistics.median(quiet):.2f}, worst {max(quiet):.2f}"
        self._note(
            part, f"time until another team's job has its pods (worst of {len(beside)})", max(beside), "s", "", alone
        )


async def together(work: Iterable[Coroutine[Any, Any, Any]], at_once: int = 32) -> list[Any]:
    """Run all of `work`, at most `at_once` at a time, and return the results."""
    gate = asyncio.Semaphore(at_once)

    async def one(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async with gate:
            return await coroutine

    return await asyncio.gather(*(one(coroutine) for coroutine in work))


async def prepare(rest: Rest, namespaces: Iterable[str]) -> None:
    """Create namespaces for pods, with service accounts if no controller adds them."""
    for namespace in namespaces:
        await rest.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        try:
            accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            await rest.request("POST", accounts, body={"metadata": {"name": "default"}})
        except ApiError as error:
            if error.status != 409:
                raise


def _jobs_path(namespace: str) -> str:
    return f"/apis/ddpjob.io/v1alpha1/namespaces/{namespace}/ddpjobs"


_PODS = "/api/v1/namespaces/{}/pods"
_SWEPT = (
    "/apis/ddpjob.io/v1alpha1/namespaces/{}/ddpjobs",
    _PODS,
    "/api/v1/namespaces/{}/secrets",
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "/apis/events.k8s.io/v1/namespaces/{}/events",
)


def _listed(counts: Counter[tuple[str, str]]) -> str:
    """List the requests, most frequent first."""
    return ", ".join(f"{verb} {what} {number}" for (verb, what), number in counts.most_common(6)) or "none"
