"""A job on the fake API server, and the cluster under test."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from ddpjob.api.job import QUEUE_LABEL, DDPJob
from ddpjob.api.job_classes import JobClasses
from ddpjob.api.job_spec import Json
from ddpjob.controller.caches import Caches
from ddpjob.controller.kube.workqueue import Turns
from ddpjob.controller.kubernetes_cluster import CREATIONS, KubernetesCluster
from ddpjob.controller.notifier import Notifier, Receivers
from ddpjob.controller.report_watch import ReportWatch
from ddpjob.engine.coordinator_client import CoordinatorClient
from ddpjob.engine.ports import JobKey
from ddpjob.engine.reconcile import reconcile
from ddpjob.objects.platform import Platform
from ddpjob.objects.service import (
    runtime_jobs_name,
    runtime_name,
)

from .api_server import ApiServer, Fault
from .virtual_loop import Test, virtual_in
from .world import api_server, connected, followed, loop_moment

KEY = JobKey("space", "job")
JOBS = runtime_jobs_name(runtime_name())


class Case:
    """One job on a server, and the cluster under test."""

    def __init__(self, server: ApiServer, cluster: KubernetesCluster) -> None:
        self.server, self.cluster = server, cluster
        self.woken: list[tuple[JobKey, bool]] = []
        self.add("job")

    def add(self, name: str, nodes: int = 2, status: dict[str, Any] | None = None, **spec: Any) -> None:
        """Add a job."""
        self.server.store.create(
            "DDPJob",
            {
                "metadata": {"name": name, "uid": f"{name}-uid"},
                "status": status or {},
                "spec": {"image": "image", "script": "train.py", "nodes": nodes, "gpusPerNode": 0, **spec},
            },
        )

    async def change(self, **spec: Any) -> None:
        """Change the spec as the job's user, and let the operator follow."""
        body = self.server.store.get("DDPJob", "job")
        body["spec"] = {**body["spec"], **spec}
        body["metadata"]["generation"] += 1
        self.server.store.changed("DDPJob", body)
        await self.settle(4)

    def finish(self, name: str) -> None:
        """Complete the job, and end its nodes."""
        body = self.server.store.get("DDPJob", name)
        moment = self.server.store.clock.stamp()
        complete = {
            "type": "Complete",
            "status": "True",
            "reason": "Finished",
            "message": "",
            "lastTransitionTime": moment,
        }
        rendezvous = {**body["status"]["rendezvous"], "endpoint": "127.0.0.1:9"}
        body["status"] = {
            **body["status"],
            "rendezvous": rendezvous,
            "completionTime": moment,
            "conditions": [complete],
        }
        self.server.store.changed("DDPJob", body)
        for pod in self.server.store.all("Pod"):
            pod["status"] = {"phase": "Succeeded"}
            self.server.store.changed("Pod", pod)

    def uid(self, pod: str) -> str:
        return str(self.server.store.get("Pod", pod)["metadata"]["uid"])

    async def job(self, key: JobKey = KEY) -> DDPJob:
        observed = await self.cluster.observe(key)
        assert observed is not None
        return observed.job

    def cached(self) -> DDPJob:
        job = self.cluster.caches.job(KEY)
        assert job is not None
        return job

    async def reconcile(self) -> float | None:
        return await reconcile(self.cluster, KEY, loop_moment)

    async def settle(self, times: int = 1) -> None:
        """Let the operator see all changes and reconcile, and let the watches show its writes."""
        for _ in range(times):
            await seen()
            await self.reconcile()
        await seen()

    def pods(self) -> list[str]:
        return sorted(str(p["metadata"]["name"]) for p in self.server.store.all("Pod"))

    def keepers(self) -> set[str]:
        """Return the jobs whose owner references keep the namespace's runtime."""
        return {o["name"] for o in self.server.store.get("ConfigMap", JOBS)["metadata"]["ownerReferences"]}

    def asked(self, part: str) -> int:
        """Return the number of GETs whose path contains this text."""
        return sum(method == "GET" and part in path for method, path, _ in self.server.requests)

    def fault_once(self, method: str, part: str, fault: Fault) -> None:
        """Apply a fault only to the next request with this method and path."""
        left = [fault]
        self.server.faults = lambda m, path: left.pop() if left and m == method and part in path else None


@asynccontextmanager
async def case(
    *,
    serves_gangs: bool = False,
    serves_queues: bool = False,
    classes: JobClasses = JobClasses(),  # noqa: B008
    on_report: Callable[[JobKey], None] = lambda key: None,
) -> AsyncIterator[Case]:
    """Yield a case. `on_report` is called with each job whose coordinator has news."""
    async with api_server() as server, connected(server) as rest:
        server.serves_gangs, server.serves_queues = serves_gangs, serves_queues
        coordinators, woken = CoordinatorClient(), list[tuple[JobKey, bool]]()
        caches = Caches(rest, lambda key, urgent: woken.append((key, urgent)), lambda hosts, changed: None)
        watch, notifier = ReportWatch(on_report), Notifier(Receivers(), on_report)
        platform, creating = Platform(operator_key=b"key"), Turns(CREATIONS)
        cluster = KubernetesCluster(
            rest, caches, coordinators, platform, watch, notifier, classes, creating, "operator-0"
        )
        case = Case(server, cluster)
        case.woken = woken
        async with followed(server, caches):
            yield case
        await watch.close()
        await coordinators.close()


def in_case(**settings: Any) -> Callable[[Test], Test]:
    """Return a decorator that runs a test in virtual time. The test's first parameter is a case."""
    return virtual_in(partial(case, **settings))


async def seen() -> None:
    """Wait until the watches have shown all changes."""
    await asyncio.sleep(0.1)


def digest(data: dict[str, str]) -> str:
    """Return the suffix of the name of the runtime's ConfigMap."""
    files = ((name.encode(), b64decode(text)) for name, text in sorted(data.items()))
    return hashlib.sha256(b"".join(b"%s\0%d\0%s" % (n, len(c), c) for n, c in files)).hexdigest()[:16]


MANIFEST = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job-0-0"}, "spec": {}}


def owned_by(job: DDPJob, uid: str | None = None, **more: Any) -> dict[str, Any]:
    owner = {**job.owner_reference, "uid": uid or job.uid}
    return {**MANIFEST, "metadata": {"name": "job-0-0", "ownerReferences": [owner], **more}}


def use_up_the_quota_of_secrets(c: Case) -> None:
    quota = Fault(403, reason="Forbidden", message="exceeded quota: q, requested: secrets=1")
    c.server.faults = lambda m, path: quota if m == "POST" and path.endswith("/secrets") else None


async def delete_token(c: Case) -> None:
    """Create the job's Secret, and a pod that waits for it."""
    [secret] = c.server.store.all("Secret")
    c.server.store.remove("Secret", secret)
    pod = c.server.store.get("Pod", "job-0-0")
    message = f'secret "{secret["metadata"]["name"]}" not found'
    waiting = {"reason": "CreateContainerConfigError", "message": message}
    main = pod["spec"]["containers"][0]["name"]
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": main, "state": {"waiting": waiting}}]}
    c.server.store.changed("Pod", pod)
    await seen()


def refused_by(policy: Fault, what: str = "policy") -> pytest.MarkDecorator:
    """Return test parameters for `policy`: the given refusal, a webhook that cannot be called, and
    one that denies the request with the status of an object that does not exist.
    """
    said = (
        'Internal error occurred: failed calling webhook "nodel": Post "https://nodel.svc": context deadline exceeded'
    )
    denied = Fault(404, reason="NotFound", message='admission webhook "nodel.svc" denied the request: no such team')
    return pytest.mark.parametrize("policy", [policy, Fault(500, message=said), denied], ids=[what, "webhook", "404"])


# --- queues


def put_into_queue(c: Case, **labels: str) -> None:
    body = c.server.store.get("DDPJob", "job")
    body["metadata"]["labels"] = {QUEUE_LABEL: "team", **labels}
    c.server.store.changed("DDPJob", body)


def judged(
    c: Case,
    *,
    admitted: bool = False,
    flavor: str = "spot",
    pods: int | None = None,
    name: str = "",
    **states: str,
) -> Json:
    """Return the job's Workload, or the one called `name`, after Kueue has set conditions and, with
    `admitted`, the flavor and the number of admitted pods.
    """
    (workload,) = (w for w in c.server.store.all("Workload") if not name or w["metadata"]["name"] == name)
    status = workload.setdefault("status", {})
    known = {one["type"]: one for one in status.get("conditions", ())}
    for kind, state in states.items():
        moment = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
        known[kind] = {"type": kind, "status": state, "reason": "Preempted", "message": "said", **moment}
    status["conditions"] = list(known.values())
    if admitted:
        sets = [
            {"name": s["name"], "count": s["count"], "flavors": {"cpu": flavor}} for s in workload["spec"]["podSets"]
        ]
        sets[0]["count"] = pods or sets[0]["count"]
        status["admission"] = {"clusterQueue": "all", "podSetAssignments": sets}
    c.server.store.changed("Workload", workload)
    return workload


SPOT = {"nodeLabels": {"pool": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
