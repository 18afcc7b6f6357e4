"""The Kubernetes implementation of the port.

What it caches and for how long, and what it makes of the server's answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job import PRIORITY_LABEL, QUEUE_LABEL, DDPJob
from ddpjob.api.job_classes import JobClasses
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType
from ddpjob.controller.caches import Caches
from ddpjob.controller.kubernetes_cluster import CREATIONS, FOUND_FOR, LOOK_AGAIN, KubernetesCluster
from ddpjob.controller.report_watch import ReportWatch
from ddpjob.core.decision import BLOCKED_POLL, Event
from ddpjob.core.world import Role
from ddpjob.engine import reconcile as reconcile_module
from ddpjob.engine.coordinator_client import CoordinatorClient
from ddpjob.engine.ports import Conflict, JobKey, NamespaceEnding, NameTaken, Refused, ReportPending, Unavailable
from ddpjob.engine.reconcile import CONFLICT_RETRY, reconcile
from ddpjob.objects.claim import build_claim
from ddpjob.objects.platform import Platform
from ddpjob.objects.service import (
    build_runtime,
    build_runtime_jobs,
    build_service,
    runtime_jobs_name,
    runtime_name,
    runtime_owner,
)
from simulation.store import Refusal

from .api_server import ApiServer, Fault
from .virtual_loop import run
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
        """One more job."""
        self.server.store.create(
            "DDPJob",
            {
                "metadata": {"name": name, "uid": f"{name}-uid"},
                "status": status or {},
                "spec": {"image": "image", "script": "train.py", "nodes": nodes, "gpusPerNode": 0, **spec},
            },
        )

    async def change(self, **spec: Any) -> None:
        """The job's user changes its spec, and the operator follows."""
        body = self.server.store.get("DDPJob", "job")
        body["spec"] = {**body["spec"], **spec}
        body["metadata"]["generation"] += 1
        self.server.store.changed("DDPJob", body)
        for _ in range(4):
            await seen()
            await self.reconcile()

    def finish(self, name: str) -> None:
        """The job is Complete, and its nodes have ended."""
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

    def pods(self) -> list[str]:
        return sorted(str(p["metadata"]["name"]) for p in self.server.store.all("Pod"))

    def keepers(self) -> set[str]:
        """The jobs that keep the namespace's runtime."""
        return {o["name"] for o in self.server.store.get("ConfigMap", JOBS)["metadata"]["ownerReferences"]}

    def asked(self, part: str) -> int:
        """How many GETs had this in their path."""
        return sum(method == "GET" and part in path for method, path, _ in self.server.requests)

    def fault_once(self, method: str, part: str, fault: Fault) -> None:
        """The next request of this kind, and no other."""
        left = [fault]
        self.server.faults = lambda m, path: left.pop() if left and m == method and part in path else None


@asynccontextmanager
async def case(*, serves_gangs: bool = False, serves_queues: bool = False) -> AsyncIterator[Case]:
    async with api_server() as server, connected(server) as rest:
        server.serves_gangs, server.serves_queues = serves_gangs, serves_queues
        coordinators, woken = CoordinatorClient(), list[tuple[JobKey, bool]]()
        caches = Caches(rest, lambda key, urgent: woken.append((key, urgent)), lambda hosts, changed: None)
        cluster = KubernetesCluster(rest, caches, coordinators, Platform(operator_key=b"key"), "operator-0")
        case = Case(server, cluster)
        case.woken = woken
        async with followed(server, caches):
            yield case
        await coordinators.close()


async def seen() -> None:
    """Time for the watches to show what has happened."""
    await asyncio.sleep(0.1)


def test_nothing_is_asked_while_nothing_changes() -> None:
    async def main() -> None:
        async with case() as c:
            for _ in range(3):
                await c.reconcile()
                await seen()
            c.server.requests.clear()
            for _ in range(100):
                await c.reconcile()
            assert c.server.requests == []

    run(main())


def test_of_what_only_has_to_exist_the_contents_are_never_read() -> None:
    """A namespace's runtime has 240 kB."""

    async def main() -> None:
        async with case() as c:
            for _ in range(3):
                await c.reconcile()
                await seen()
            whole = {kind for method, kind in c.server.read_whole if method == "GET"}
            assert whole & {"Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"} == set()
            assert {"DDPJob", "Pod"} <= whole

    run(main())


def test_an_event_says_that_a_defect_of_the_operator_keeps_it_from_its_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with case() as c:
            with monkeypatch.context() as broken:
                broken.setattr(reconcile_module, "decide", lambda *_: {}["\udc80nodes"])
                for _ in range(3):
                    with pytest.raises(KeyError):
                        await c.reconcile()
            [event] = c.server.events
            assert (event["type"], event["reason"], event["regarding"]["name"]) == ("Warning", "ReconcileFailed", "job")
            assert event["note"].startswith(r"KeyError: '\udc80nodes' (a defect of the operator, whose log has the")
            assert not caplog.records, "the same event again is no fault"
            await c.reconcile()
            assert len(c.pods()) == 3

    run(main())


def test_a_failed_request_is_no_defect() -> None:
    async def main() -> None:
        async with case() as c:
            c.server.faults = lambda method, path: Fault(500) if method != "GET" and "/events" not in path else None
            await c.reconcile()
            assert c.server.events == []

    run(main())


def test_what_it_writes_itself_wakes_nobody_and_what_others_write_does() -> None:
    async def main() -> None:
        async with case() as c:
            await seen()
            c.woken.clear()
            c.server.drop_events = lambda kind, body: True  # Which may come before the answer, and then wake.
            await c.reconcile()
            await seen()
            assert len(c.pods()) == 3
            assert c.woken == []
            c.server.drop_events = lambda kind, body: False
            pod = c.server.store.get("Pod", "job-0-0")
            pod["status"] = {"phase": "Running"}
            c.server.store.changed("Pod", pod)
            await seen()
            assert c.woken == [(KEY, False)]
            pod["status"] = {"phase": "Failed"}
            c.server.store.changed("Pod", pod)
            await seen()
            assert c.woken[-1] == (KEY, True), "the end of a pod is urgent"
            c.server.store.remove("Pod", pod)
            await seen()
            assert c.woken[-1] == (KEY, True)
            job = c.server.store.get("DDPJob", "job")
            c.server.store.changed("DDPJob", job)
            await seen()
            assert c.woken[-1] == (KEY, False)
            job["metadata"]["generation"] += 1
            c.server.store.changed("DDPJob", job)
            await seen()
            assert c.woken[-1] == (KEY, True)

    run(main())


def test_a_watch_that_is_late_hides_nothing_that_the_operator_has_done() -> None:
    async def main() -> None:
        async with case() as c:
            c.server.drop_events = lambda kind, body: True
            for _ in range(3):
                await c.reconcile()
                await asyncio.sleep(1)
            assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]
            creations = [path for method, path in c.server.acted if method == "POST" and "events" not in path]
            assert len(creations) == 7, "service, runtime, its jobs, token and pods, each once"
            await c.cluster.delete_pod(await c.job(), "job-0-0", c.uid("job-0-0"), None)
            observed = await c.cluster.observe(KEY)
            assert observed is not None
            assert sorted(p.name for p in observed.world.pods) == ["job-1-0", "job-coordinator-0"]

    run(main())


def test_a_status_that_others_have_written_is_read_again_at_once() -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            pod = c.server.store.get("Pod", "job-0-0")
            pod["status"] = {"phase": "Running", "podIP": "127.0.0.9"}
            c.server.store.changed("Pod", pod)  # A reason to write the status.
            await seen()
            c.server.drop_events = lambda kind, body: True
            body = c.server.store.get("DDPJob", "job")
            body["metadata"]["generation"] += 1
            body["spec"] = {**body["spec"], "nodes": 3}
            c.server.store.changed("DDPJob", body)
            assert await c.reconcile() == CONFLICT_RETRY
            assert (await c.job()).spec.nodes == 3
            c.server.store.delete("DDPJob", "job")
            with pytest.raises(Conflict):
                await c.cluster.write_status(c.cached(), {"phase": "Pending"})
            assert await c.cluster.observe(KEY) is None

    run(main())


def test_a_job_that_went_with_its_namespace_and_the_role_in_it_is_forgotten() -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            c.server.faults = lambda method, path: Fault(403, reason="Forbidden")
            with pytest.raises(Refused):
                await c.cluster.write_status(c.cached(), {"phase": "Pending"})
            c.server.store.delete("DDPJob", "job")
            await seen()
            assert await c.reconcile() is None

    run(main())


def test_a_job_that_has_ended_costs_no_request() -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            c.finish("job")
            await seen()
            for _ in range(5):
                await c.reconcile()
                await seen()
            assert [p for p in c.pods() if "coordinator" in p] == []
            c.server.requests.clear()
            asked: list[str] = []

            async def report(endpoint: str) -> None:
                asked.append(endpoint)

            c.cluster.coordinators.report = report  # type: ignore[assignment]
            assert await c.reconcile() is None
            assert c.server.requests == asked == [], "nor is the address that the coordinator had asked"

    run(main())


@pytest.mark.parametrize("ready", [True, False, None])
def test_a_node_that_seems_lost_is_read_before_anything_is_decided(ready: bool | None) -> None:
    """True: the watch is late; False: it is not; None: the Kubernetes node does not exist."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            pod = c.server.store.get("Pod", "job-0-0")
            pod["spec"]["nodeName"], pod["status"] = "new", {"phase": "Running"}
            c.server.store.changed("Pod", pod)
            await seen()
            c.server.drop_events = lambda kind, body: kind == "Node"
            if ready is not None:
                conditions = [{"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}]
                c.server.store.create("Node", {"metadata": {"name": "new"}, "status": {"conditions": conditions}}, "")
            observed = await c.cluster.observe(KEY)
            assert observed is not None and observed.world.hosts is not None
            host = observed.world.hosts["new"]
            assert (host.ready, host.deleted) == (bool(ready), ready is None)
            before = c.asked("/nodes/new")
            await c.cluster.observe(KEY)
            assert c.asked("/nodes/new") == before, "not more than once in a while"
            await asyncio.sleep(LOOK_AGAIN)
            graces = []
            c.server.faults = lambda method, path: graces.append(method) if method == "DELETE" else None
            await c.cluster.delete_pod(observed.job, "job-0-0", pod["metadata"]["uid"], 0)
            forced = c.server.store.find("Pod", "job-0-0") is None
            assert forced is (ready is not True), "a node that is Ready confirms the end of its pods itself"

    run(main())


def test_an_unavailable_api_server_gives_no_node_up() -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            pod = c.server.store.get("Pod", "job-0-0")
            pod["spec"]["nodeName"], pod["status"] = "new", {"phase": "Running"}
            c.server.store.changed("Pod", pod)
            await seen()
            c.server.faults = lambda method, path: Fault(503)
            with pytest.raises(Unavailable):
                await c.cluster.observe(KEY)

    run(main())


def test_jobs_of_a_namespace_share_one_runtime_that_ends_with_the_last() -> None:
    async def main() -> None:
        async with case() as c:
            for name in ("b", "c", "d"):
                c.add(name)
            await seen()
            keys = [JobKey("space", name) for name in ("job", "b", "c", "d")]
            await asyncio.gather(*(reconcile(c.cluster, key, loop_moment) for key in keys))
            await seen()
            await asyncio.gather(*(reconcile(c.cluster, key, loop_moment) for key in keys))
            runtime, jobs = (c.server.store.get("ConfigMap", name) for name in (runtime_name(), JOBS))
            assert runtime["immutable"] and len(runtime["binaryData"]) == 3 and "binaryData" not in jobs
            assert [o["uid"] for o in runtime["metadata"]["ownerReferences"]] == [jobs["metadata"]["uid"]]
            assert {o["name"] for o in jobs["metadata"]["ownerReferences"]} == {"job", "b", "c", "d"}
            assert not any(o.get("controller") for o in jobs["metadata"]["ownerReferences"])
            for name in ("job", "b", "c"):
                c.server.store.delete("DDPJob", name)
            assert c.server.store.find("ConfigMap", runtime_name()) is not None
            c.server.store.delete("DDPJob", "d")
            assert not list(c.server.store.all("ConfigMap"))

    run(main())


def test_many_jobs_share_their_runtime_by_two_requests() -> None:
    async def main() -> None:
        async with case() as c:
            keys = [KEY, *(JobKey("space", f"job{number}") for number in range(30))]
            for key in keys[1:]:
                c.add(key.name)
            await seen()
            await asyncio.gather(*(reconcile(c.cluster, key, loop_moment) for key in keys))
            asked = [method for method, path, _ in c.server.requests if "/configmaps" in path and method != "GET"]
            assert asked == ["POST", "POST"], "what belongs to the jobs, and the runtime that it keeps"
            assert c.keepers() == {key.name for key in keys}
            assert len(c.pods()) == 3 * len(keys)

    run(main())


def test_a_job_that_comes_to_share_the_runtime_takes_those_along_that_are_about_to() -> None:
    """But none that has ended, is suspended, or runs with the runtime of another version."""

    async def main() -> None:
        async with case() as c:
            await reconcile(c.cluster, KEY, loop_moment)
            for name in ("b", "c", "d"):
                c.add(name)
            complete = {"type": "Complete", "status": "True", "reason": "Finished", "message": ""}
            complete["lastTransitionTime"] = "2026-01-01T00:00:00Z"
            c.add("ended", status={"phase": "Complete", "conditions": [complete]})
            c.add("older", status={"runtime": "ddpjob-runtime-00000000"})
            c.add("suspended", runPolicy={"suspend": True})
            await seen()
            for name in ("b", "c", "d"):
                await reconcile(c.cluster, JobKey("space", name), loop_moment)
            asked = [method for method, path, _ in c.server.requests if "/configmaps" in path and method != "GET"]
            assert asked == ["POST", "POST", "PATCH"]
            assert c.keepers() == {"job", "b", "c", "d"}

    run(main())


def test_what_an_operator_has_left_half_shared_is_finished_by_the_next() -> None:
    """It died when the job had become an owner, and the runtime did not belong to the jobs yet."""

    async def main() -> None:
        async with case() as c:
            job = await c.job()
            runtime = build_runtime(job)
            runtime["metadata"]["ownerReferences"][0] |= {"name": "other", "uid": "other-uid"}
            c.server.store.create("ConfigMap", runtime)
            c.server.store.create("ConfigMap", build_runtime_jobs(job, [runtime_owner(job)]))
            await seen()
            await c.reconcile()
            jobs = c.server.store.get("ConfigMap", JOBS)["metadata"]["uid"]
            owners = c.server.store.get("ConfigMap", runtime_name())["metadata"]["ownerReferences"]
            assert {o["uid"] for o in owners} == {"other-uid", jobs} and len(c.pods()) == 3

    run(main())


@pytest.mark.parametrize("gone", ["runtime", "jobs"])
def test_a_runtime_that_is_collected_while_a_job_comes_is_made_again(gone: str) -> None:
    """The last of its jobs has ended, and no watch has said so yet."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            c.add("b")
            await seen()
            c.server.drop_events = lambda kind, body: kind == "ConfigMap"
            body = c.server.store.get("ConfigMap", runtime_name() if gone == "runtime" else JOBS)
            c.server.store.remove("ConfigMap", body)
            await reconcile(c.cluster, JobKey("space", "b"), loop_moment)
            if gone == "runtime":  # No request needs it: only a watch can tell.
                c.server.drop_events = lambda kind, body: False
                c.server.store.changed("ConfigMap", body, "DELETED")
                await seen()
                await reconcile(c.cluster, JobKey("space", "b"), loop_moment)
            assert len([name for name in c.pods() if name.startswith("b-")]) == 3
            runtime = c.server.store.get("ConfigMap", runtime_name())
            jobs = c.server.store.get("ConfigMap", JOBS)["metadata"]
            assert jobs["uid"] in {o["uid"] for o in runtime["metadata"]["ownerReferences"]} and "b" in c.keepers()

    run(main())


@pytest.mark.parametrize("wrong", ["content", "mutable", "label"])
def test_a_runtime_that_is_not_the_operator_s_is_not_mounted(wrong: str) -> None:
    async def main() -> None:
        async with case() as c:
            manifest = build_runtime(await c.job())
            if wrong == "content":
                manifest["binaryData"] = {**manifest["binaryData"], "ddpjob_worker.py": b64encode(b"evil").decode()}
            if wrong == "mutable":
                manifest["immutable"] = False
            if wrong == "label":
                manifest["metadata"]["labels"] = {}
            c.server.store.create("ConfigMap", manifest)
            await seen()
            await c.reconcile()
            assert c.pods() == []
            conditions = c.server.store.get("DDPJob", "job")["status"]["conditions"]
            assert [x["message"] for x in conditions if x["reason"] == "NameTaken"]
            c.server.requests.clear()
            for _ in range(10):
                await asyncio.sleep(1)
                await c.reconcile()
            assert len([r for r in c.server.requests if "configmaps" in r[1] and "watch" not in r[2]]) <= 8
            c.server.store.delete("ConfigMap", runtime_name())
            await asyncio.sleep(11)
            await c.reconcile()
            assert len(c.pods()) == 3

    run(main())


def test_creations_of_all_jobs_together_are_bounded() -> None:
    async def main() -> None:
        async with case() as c:
            under_way, most = 0, 0
            create = c.cluster._create

            async def slow(job: DDPJob, manifest: Any) -> None:
                nonlocal under_way, most
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(1)
                under_way -= 1
                await create(job, manifest)

            c.cluster._create = slow  # type: ignore[method-assign]
            names = [f"j{number}" for number in range(8)]
            for name in names:
                c.add(name, nodes=40)
            await seen()
            keys = [JobKey("space", name) for name in names]
            burst = asyncio.gather(*(reconcile(c.cluster, key, loop_moment) for key in keys))
            await asyncio.sleep(7)
            other = replace(await c.job(keys[0]), namespace="other")
            began = asyncio.get_running_loop().time()
            with contextlib.suppress(Conflict):  # There is no such namespace.
                await c.cluster.create(other, build_service(other))
            assert asyncio.get_running_loop().time() - began < 2.5, "the next turn is another namespace's"
            await burst
            assert most == 2 * CREATIONS, "behind a webhook that takes a second"
            assert len(c.pods()) == 8 * 41

    run(main())


async def a_job_with_room_for_four_pods(c: Case) -> JobKey:
    """It wants 64."""
    c.add("big", nodes=64)
    await seen()
    quota = Fault(403, reason="Forbidden", message="exceeded quota")
    c.server.faults = lambda m, path: quota if m == "POST" and path.endswith("/pods") and len(c.pods()) >= 4 else None
    return JobKey("space", "big")


async def the_room_of_a_pod_is_used(c: Case, key: JobKey) -> None:
    """At once, after one of four has been deleted."""
    await c.cluster.delete_pod(await c.job(key), "big-0-0", c.uid("big-0-0"), None)
    await seen()
    await reconcile(c.cluster, key, loop_moment)
    await reconcile(c.cluster, key, loop_moment)
    assert len(c.pods()) == 4, "the room of a pod that is gone is used"


def test_what_a_quota_refuses_is_tried_less_and_less_and_room_is_used_at_once() -> None:
    async def main() -> None:
        async with case() as c:
            key = await a_job_with_room_for_four_pods(c)
            tries = []
            for second in range(300):
                c.server.requests.clear()
                await reconcile(c.cluster, key, loop_moment)
                tries += [second] * sum(r[0] == "POST" and r[1].endswith("/pods") for r in c.server.requests)
                await asyncio.sleep(1)
            assert len(c.pods()) == 4
            assert len([t for t in tries if t >= 1]) <= 8, tries
            await the_room_of_a_pod_is_used(c, key)

    run(main())


def test_room_is_used_at_once_after_the_first_refusal_too() -> None:
    async def main() -> None:
        async with case() as c:
            key = await a_job_with_room_for_four_pods(c)
            await reconcile(c.cluster, key, loop_moment)
            assert len(c.pods()) == 4
            await the_room_of_a_pod_is_used(c, key)

    run(main())


def test_what_one_job_was_refused_is_not_held_against_the_next_one_of_its_name() -> None:
    """Deleted and created between two looks, as by `kubectl replace --force` while a watch is away."""

    async def main() -> None:
        async with case() as c:
            c.fault_once("POST", "/pods", Fault(422, reason="Invalid", message="spec.nodeSelector: Invalid value"))
            await c.reconcile()
            spec = c.server.store.delete("DDPJob", "job")["spec"]
            c.server.store.create("DDPJob", {"metadata": {"name": "job", "uid": "next"}, "spec": spec})
            await seen()
            await c.reconcile()
            assert (await c.job()).status.condition(ConditionType.FAILED) is None
            assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]

    run(main())


def test_many_pods_that_are_refused_at_the_same_time_wait_as_long_as_one() -> None:
    async def main() -> None:
        async with case() as c:
            c.add("big", nodes=64)
            await seen()
            down = True
            webhook = Fault(500, message="failed calling webhook")
            c.server.faults = lambda m, path: (
                webhook if down and m == "POST" and path.endswith("/pods") and len(c.pods()) >= 15 else None
            )
            key = JobKey("space", "big")
            await reconcile(c.cluster, key, loop_moment)
            assert len(c.pods()) == 15
            down = False
            await asyncio.sleep(BLOCKED_POLL + 1)
            await reconcile(c.cluster, key, loop_moment)
            assert len(c.pods()) == 65

    run(main())


@pytest.mark.parametrize("files", ["the same", "one more", "one less"])
def test_an_older_runtime_is_kept_while_its_files_are_those_that_pods_mount(files: str) -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            store = c.server.store
            made = store.get("ConfigMap", runtime_name())
            data = {**made["binaryData"], "ddpjob_worker.py": b64encode(b"the older one").decode()}
            if files == "one more":
                data["ddpjob_runtime.more.py"] = ""
            old = {**made["metadata"], "name": f"job-runtime-{digest(data)}", "uid": "old"}
            jobs = store.get("ConfigMap", JOBS)
            jobs = {**jobs, "metadata": {**jobs["metadata"], "name": runtime_jobs_name(old["name"]), "uid": "keeper"}}
            jobs = store.create("ConfigMap", jobs)["metadata"]
            old["ownerReferences"] = [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": jobs["name"], "uid": jobs["uid"]}
            ]
            if files == "one less":
                data.popitem()
            store.remove("ConfigMap", made)
            store.create("ConfigMap", {**made, "metadata": old, "binaryData": data})
            job = next(store.all("DDPJob"))
            job["status"] = {**job["status"], "runtime": old["name"]}
            store.changed("DDPJob", job)
            for pod in list(store.all("Pod")):
                store.remove("Pod", pod)
            await seen()
            await c.reconcile()
            pinned = (await c.job()).status.runtime
            [mounted] = {
                volume["configMap"]["name"]
                for pod in store.all("Pod")
                for volume in pod["spec"]["volumes"]
                if "configMap" in volume
            }
            assert mounted == pinned == (old if files == "the same" else made["metadata"])["name"]
            assert store.find("ConfigMap", pinned) is not None

    run(main())


def test_what_it_writes_itself_is_seen_by_the_next_reconcile() -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]
            for _ in range(3):
                await c.reconcile()
            creations = [path for method, path in c.server.acted if method == "POST" and "events" not in path]
            assert len(creations) == 7, "service, runtime, its jobs, token and pods, each once"
            for body in list(c.server.store.all("Pod")):
                await c.cluster.delete_pod(await c.job(), body["metadata"]["name"], body["metadata"]["uid"], 0)
            observed = await c.cluster.observe(KEY)
            assert observed is not None and observed.world.pods == ()

    run(main())


@pytest.mark.parametrize("how", ["hang-after", "reset-after", "page"])
@pytest.mark.parametrize(
    ("method", "part"), [("POST", "/pods"), ("POST", "/services"), ("PUT", "/status"), ("POST", "/configmaps")]
)
def test_a_write_without_an_answer_repeats_nothing_that_has_succeeded(how: str, method: str, part: str) -> None:
    async def main() -> None:
        async with case() as c:
            c.fault_once(method, part, Fault(how))
            for _ in range(5):
                await c.reconcile()
                await asyncio.sleep(2)
            assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]
            status = c.server.store.get("DDPJob", "job")["status"]
            assert [slot["attempt"] for slot in status["slots"]] == [0, 0]
            assert status["restarts"]["total"] == 0

    run(main())


def test_a_status_of_another_version_is_a_conflict() -> None:
    async def main() -> None:
        async with case() as c:
            job = await c.job()
            c.server.store.changed("DDPJob", c.server.store.get("DDPJob", "job"))
            with pytest.raises(Conflict):
                await c.cluster.write_status(job, {"phase": "Pending"})
            c.server.store.delete("DDPJob", "job")
            with pytest.raises(Conflict):
                await c.cluster.write_status(job, {"phase": "Pending"})

    run(main())


def test_a_written_status_is_known_without_the_rest_of_the_job_coming_back() -> None:
    async def main() -> None:
        async with case() as c:
            c.server.drop_events = lambda kind, body: True
            for again in range(3):
                await c.reconcile()
                stored = c.server.store.get("DDPJob", "job")
                assert c.cached() == DDPJob.read(stored), f"after {again} reconciles more"
            assert stored["status"]["slots"]
            assert ("PUT", "DDPJob") not in c.server.read_whole

    run(main())


def test_a_written_status_is_not_read_again_where_kopf_shows_it_before_the_answer() -> None:
    async def main() -> None:
        async with case() as c:
            asked = c.asked("/ddpjobs/job")
            c.server.faults = lambda method, path: Fault("late", seconds=1.0) if method == "PUT" else None
            for _ in range(3):
                await c.reconcile()
                await seen()
            assert c.cached() == DDPJob.read(c.server.store.get("DDPJob", "job"))
            assert c.asked("/ddpjobs/job") == asked
            lost = Fault("reset-after")
            c.server.faults = lambda method, path: lost if method == "PUT" and path.endswith("/status") else None
            c.server.store.delete("Pod", "job-0-0")
            await seen()
            with contextlib.suppress(Unavailable):
                await c.reconcile()
            await seen()
            assert c.cached() == DDPJob.read(c.server.store.get("DDPJob", "job")), "a write without an answer is read"

    run(main())


def digest(data: dict[str, str]) -> str:
    """As the name of a ConfigMap of the runtime ends."""
    files = ((name.encode(), b64decode(text)) for name, text in sorted(data.items()))
    return hashlib.sha256(b"".join(b"%s\0%d\0%s" % (n, len(c), c) for n, c in files)).hexdigest()[:16]


MANIFEST = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job-0-0"}, "spec": {}}


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault(403, reason="Forbidden", message="exceeded quota"), Refused),
        (Fault(422, reason="Invalid"), Refused),
        (Fault(500, message="Internal error occurred: failed calling webhook"), Refused),
        (Fault(500, message='admission webhook "mpod.kb.io" denied the request: not decided'), Refused),
        (Fault(500, message="Internal error occurred: etcdserver: no leader"), Unavailable),
        (
            Fault(403, reason="Forbidden", message="unable to create: namespace space is being terminated"),
            NamespaceEnding,
        ),
        (Fault(409, reason="Conflict", message="Operation cannot be fulfilled on resourcequotas"), Unavailable),
        (Fault(404, reason="NotFound"), Conflict),
        (Fault(429, {"Retry-After": "3"}), Unavailable),
        (Fault(503), Unavailable),
    ],
    ids=lambda v: str(getattr(v, "how", getattr(v, "__name__", v))),
)
def test_what_a_creation_that_fails_is_called(fault: Fault, raised: type[Exception]) -> None:
    async def main() -> None:
        async with case() as c:
            job = await c.job()
            c.fault_once("POST", "/pods", fault)
            with pytest.raises(raised):
                await c.cluster.create(job, MANIFEST)

    run(main())


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [("failed calling webhook", True), ("etcdserver: no leader", False)],
    ids=["webhook", "its own"],
)
def test_a_500_is_the_same_for_all_that_is_changed(said: str, *, is_refused: bool) -> None:
    """A webhook may be away for long, and then holds up nothing else; a fault of the server's own is over soon."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            c.server.faults = lambda m, path: Fault(500, message=said) if m != "GET" else None
            job, uid = await c.job(), c.uid("job-0-0")
            for change in (
                c.cluster.label_pod(job, "job-0-0", uid, Role.SPARE),
                c.cluster.delete_pod(job, "job-0-0", uid, None),
                c.cluster.record(job, Event(False, "Resumed", "an event")),
            ):
                with contextlib.nullcontext() if is_refused else pytest.raises(Unavailable):
                    await change
            for write in (c.cluster.create(job, _owned(job)), c.cluster.write_status(job, {"phase": "Pending"})):
                with pytest.raises(Refused if is_refused else Unavailable, match=rf"^(500: |.*: 500: ){said}$"):
                    await write

    run(main())


def _owned(job: DDPJob, uid: str | None = None, **more: Any) -> dict[str, Any]:
    owner = {**job.owner_reference, "uid": uid or job.uid}
    return {**MANIFEST, "metadata": {"name": "job-0-0", "ownerReferences": [owner], **more}}


def test_a_name_that_exists_is_its_own_or_taken() -> None:
    async def main() -> None:
        async with case() as c:
            job = await c.job()
            body = c.server.store.create("Pod", _owned(job))
            await c.cluster.create(job, _owned(job))  # its own
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            await asyncio.sleep(1)
            with pytest.raises(NameTaken, match="still being removed"):
                await c.cluster.create(job, _owned(job))
            c.server.store.remove("Pod", body)
            await asyncio.sleep(BLOCKED_POLL)
            body = c.server.store.create("Pod", _owned(job, uid="of an earlier job"))
            with pytest.raises(NameTaken, match="earlier job"):
                await c.cluster.create(job, _owned(job))
            c.server.store.remove("Pod", body)
            await asyncio.sleep(BLOCKED_POLL)
            c.server.store.create("Pod", MANIFEST)
            with pytest.raises(NameTaken, match="another name"):
                await c.cluster.create(job, _owned(job))

    run(main())


def test_a_service_that_has_lost_its_labels_is_asked_for_now_and_then_and_made_again_when_it_is_gone() -> None:
    """No watch shows it, and the operator has no right to write it."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            service = c.server.store.get("Service", "job")
            del service["metadata"]["labels"]
            c.server.store.changed("Service", service)
            c.cluster.caches.forget("Service", "space", "job")  # As the watch shows it.
            c.server.requests.clear()
            for _ in range(100):
                await c.reconcile()
                await asyncio.sleep(1)
            assert sum("/services" in path for _, path, _ in c.server.requests) <= 8
            c.server.store.remove("Service", service)
            await asyncio.sleep(FOUND_FOR)
            await c.reconcile()
            assert c.server.store.find("Service", "job") is not None

    run(main())


def _make_a_claim(c: Case, **more: Any) -> None:
    """Have the job make the claim of its checkpoints."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    body = c.server.store.get("DDPJob", "job")
    body["spec"]["storage"] = {"checkpoints": {"claimTemplate": {"spec": spec}}}
    body["metadata"]["generation"] += 1
    body.update(more)
    c.server.store.changed("DDPJob", body)


def test_a_job_is_read_with_its_class_as_soon_as_that_is_written() -> None:
    async def main() -> None:
        async with case() as c:
            c.cluster.classes = JobClasses.read({"team": {"spec": {"image": "team/train:1"}}})
            body = c.server.store.get("DDPJob", "job")
            del body["spec"]["image"]
            body["spec"]["className"] = "team"
            body["metadata"]["generation"] += 1
            c.server.store.changed("DDPJob", body)
            await seen()
            assert await reconcile(c.cluster, KEY, loop_moment) == 0.0 and not c.pods()
            assert c.server.store.get("DDPJob", "job")["status"]["jobClass"]["name"] == "team"
            job = c.cluster.caches.job(KEY)
            assert job is not None and job.spec.image == "team/train:1"
            await seen()
            await c.reconcile()
            read = c.cluster.caches.job(KEY)
            assert read is not None and read.spec == job.spec, "from the watch too"
            assert {pod["spec"]["containers"][0]["image"] for pod in c.server.store.all("Pod")} == {"team/train:1"}

    run(main())


def test_a_claim_is_made_once_and_one_without_an_owner_is_known_by_its_label() -> None:
    async def main() -> None:
        async with case() as c:
            _make_a_claim(c)
            await asyncio.sleep(1)
            await reconcile(c.cluster, KEY, loop_moment)
            claim = c.server.store.get("PersistentVolumeClaim", "job-checkpoints")
            assert c.pods(), "in the same reconcile"
            job = DDPJob.read(c.server.store.get("DDPJob", "job"))
            await c.cluster.create(job, build_claim(job))  # as after a lost answer
            with pytest.raises(NameTaken, match="another name"):
                await c.cluster.create(replace(job, uid="later"), build_claim(job))
            assert [claim] == list(c.server.store.all("PersistentVolumeClaim"))

    run(main())


def test_a_claim_that_is_lost_under_a_job_is_seen_when_a_pod_is_missing() -> None:
    async def main() -> None:
        async with case() as c:
            _make_a_claim(c, status={"trained": True})
            await seen()
            await c.reconcile()
            pods = c.pods()
            assert pods, "it has trained elsewhere: its first claim is made"
            await seen()
            await c.reconcile()
            assert c.server.store.get("DDPJob", "job")["status"]["claimMade"]
            c.server.store.remove(
                "PersistentVolumeClaim", c.server.store.get("PersistentVolumeClaim", "job-checkpoints")
            )
            for pod in pods:
                c.server.store.remove("Pod", c.server.store.get("Pod", pod))
            await seen()
            for _ in range(3):
                await c.reconcile()
                await seen()
            conditions = c.server.store.get("DDPJob", "job")["status"]["conditions"]
            assert [x["reason"] for x in conditions if x["type"] == "Scheduled"] == ["ClaimNotFound"]
            assert not c.pods() and c.server.store.find("PersistentVolumeClaim", "job-checkpoints") is None

    run(main())


def test_deletions_and_labels_never_hit_a_namesake() -> None:
    async def main() -> None:
        async with case() as c:
            job = await c.job()
            body = c.server.store.create("Pod", {**_owned(job), "metadata": {**_owned(job)["metadata"], "labels": {}}})
            await c.cluster.delete_pod(job, "job-0-0", "another uid", 0)
            await c.cluster.label_pod(job, "job-0-0", "another uid", Role.SPARE)
            assert c.pods() == ["job-0-0"]
            assert body["metadata"]["labels"] == {}
            await c.cluster.label_pod(job, "job-0-0", body["metadata"]["uid"], Role.SPARE)
            assert body["metadata"]["labels"] == {"ddpjob.io/role": "spare"}
            await c.cluster.delete_pod(job, "job-0-0", body["metadata"]["uid"], 0)
            await c.cluster.delete_pod(job, "job-0-0", body["metadata"]["uid"], 0)  # gone: success
            await c.cluster.label_pod(job, "job-0-0", body["metadata"]["uid"], Role.NODE)
            assert c.pods() == []

    run(main())


def test_an_event_that_is_refused_is_logged_only() -> None:
    async def main() -> None:
        async with case() as c:
            job = await c.job()
            await c.cluster.record(job, Event(True, "Reason", "words " * 1000))
            assert len(c.server.events[0]["note"].encode()) <= 1000
            c.fault_once("POST", "/events", Fault(403, reason="Forbidden"))
            await c.cluster.record(job, Event(False, "Reason", "more"))
            assert len(c.server.events) == 1

    run(main())


def test_throttling_is_waited_for_as_long_as_the_server_says() -> None:
    async def main() -> None:
        async with case() as c:
            c.fault_once("PUT", "/ddpjobs/job", Fault(429, {"Retry-After": "7"}))
            assert await c.reconcile() == 7
            c.fault_once("GET", "/ddpjobs/job", Fault(503, {"Retry-After": "3600"}))
            assert await c.reconcile() == 60, "not for as long as the page of a proxy says"
            c.fault_once("GET", "/ddpjobs/job", Fault(503))
            assert await c.reconcile() == 2, "what became of the status is read first"

    run(main())


def test_a_reconcile_waits_for_no_coordinator() -> None:
    """Only the first report is waited for: outside of the reconcile, and until the first request has failed."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1e6)

    async def main() -> None:
        listener = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with case() as c:
            await c.reconcile()
            woken: list[JobKey] = []
            c.cluster.report_watch = ReportWatch(woken.append)
            job = c.server.store.get("DDPJob", "job")
            place = {**job["status"]["rendezvous"], "endpoint": f"127.0.0.1:{port}", "state": "Running"}
            job["status"] = {**job["status"], "rendezvous": place}
            c.server.store.changed("DDPJob", job)
            await seen()
            loop = asyncio.get_running_loop()
            for seconds in (0, 3, 30, 300):
                await asyncio.sleep(seconds)
                began = loop.time()
                if not seconds:
                    with pytest.raises(ReportPending):
                        await c.cluster.observe(KEY)
                else:
                    observed = await c.cluster.observe(KEY)
                    assert observed is not None and observed.world.report is None
                assert loop.time() - began < 0.1
            assert woken == [KEY], "once, when the first request has failed"
            await c.cluster.report_watch.close()
        listener.close()

    run(main())


def test_a_coordinator_is_asked_as_soon_as_the_status_says_that_it_runs() -> None:
    """All pods run at the same moment: nothing else wakes the job before its next reconcile, up to a minute later."""

    async def main() -> None:
        asked = asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            writer.close()

        async with case() as c:
            c.cluster.report_watch = ReportWatch(lambda key: None)
            await c.reconcile()
            rendezvous, moment = (await c.job()).spec.rendezvous, c.server.store.clock.stamp()
            listener = await asyncio.start_server(listen, "127.0.0.1", rendezvous.endpoint_port)
            for pod in c.server.store.all("Pod"):
                names = [container["name"] for container in pod["spec"]["containers"]]
                states = [{"name": name, "state": {"running": {"startedAt": moment}}} for name in names]
                pod["status"] = {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": states}
                c.server.store.changed("Pod", pod)
            await seen()
            assert not asked.is_set()
            await c.reconcile()
            async with asyncio.timeout(1):
                await asked.wait()
            await c.cluster.report_watch.close()
            listener.close()

    run(main())


def test_a_deleted_job_is_forgotten() -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            c.server.store.delete("DDPJob", "job")
            await seen()
            assert await c.reconcile() is None
            assert c.pods() == []
            assert c.cluster.caches.jobs_on(frozenset({"", "n0"})) == set()

    run(main())


def test_what_a_pod_was_at_last_is_known_for_a_while() -> None:
    """An operator that is late sees nothing of an eviction but the pod's end."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            pod = c.server.store.get("Pod", "job-0-0")
            evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            c.server.store.remove("Pod", {**pod, "status": {**pod.get("status", {}), "conditions": [evicted]}})
            await seen()
            observed = await c.cluster.observe(KEY)
            assert observed is not None and "job-0-0" not in [p.name for p in observed.world.pods]
            last = observed.world.last_of("job-0-0")
            assert last is not None and last.disruption == "EvictionByEvictionAPI"

    run(main())


def test_the_token_s_secret_is_created_once_and_never_read() -> None:
    """The operator has no right to read Secrets: one that exists is this job's, by its name."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            [secret] = c.server.store.all("Secret")
            assert secret["stringData"] == {"token": c.cluster.platform.token(await c.job())}
            for name, created in (("job-0-0", 1), ("job-1-0", 2)):
                c.server.store.remove("Pod", c.server.store.get("Pod", name))
                await seen()
                await c.reconcile()
                await c.reconcile()
                assert f"{name[:-1]}1" in c.pods()
                assert len(list(c.server.store.all("Secret"))) == 1
                asked = [(method, path) for method, path, _ in c.server.requests if "/secrets" in path]
                assert asked == [("POST", "/api/v1/namespaces/space/secrets")] * created
                c.cluster._tokens.clear()  # Another operator does not know it.

    run(main())


def use_up_the_quota_of_secrets(c: Case) -> None:
    quota = Fault(403, reason="Forbidden", message="exceeded quota: q, requested: secrets=1")
    c.server.faults = lambda m, path: quota if m == "POST" and path.endswith("/secrets") else None


@pytest.mark.parametrize("restarted", [False, True])
def test_a_quota_of_secrets_that_is_used_up_keeps_no_pod_from_a_job_that_has_its_token(*, restarted: bool) -> None:
    """It is judged before the name: a Secret that exists is refused like one that does not."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            use_up_the_quota_of_secrets(c)
            c.server.store.remove("Pod", c.server.store.get("Pod", "job-0-0"))
            await seen()
            if restarted:
                c.cluster._tokens.clear()
            await c.reconcile()
            await c.reconcile()
            assert "job-0-1" in c.pods()

    run(main())


async def delete_token(c: Case) -> None:
    """The job's Secret, and a pod waits for it."""
    [secret] = c.server.store.all("Secret")
    c.server.store.remove("Secret", secret)
    pod = c.server.store.get("Pod", "job-0-0")
    message = f'secret "{secret["metadata"]["name"]}" not found'
    waiting = {"reason": "CreateContainerConfigError", "message": message}
    main = pod["spec"]["containers"][0]["name"]
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": main, "state": {"waiting": waiting}}]}
    c.server.store.changed("Pod", pod)
    await seen()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_token_that_was_deleted_is_made_once_while_the_kubelet_has_not_looked_again(*, restarted: bool) -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            for _ in range(2):
                await delete_token(c)
                if restarted:
                    c.cluster._tokens.clear()
                c.server.requests.clear()
                for _ in range(20):
                    await c.reconcile()
                    await asyncio.sleep(1)
                assert len(list(c.server.store.all("Secret"))) == 1
                assert sum("/secrets" in path for _, path, _ in c.server.requests) == 1 + restarted
                await asyncio.sleep(FOUND_FOR)

    run(main())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_quota_of_secrets_that_is_used_up_is_shown_to_a_job_whose_token_was_deleted(*, restarted: bool) -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            use_up_the_quota_of_secrets(c)
            await delete_token(c)
            if restarted:
                c.cluster._tokens.clear()
            for _ in range(3):
                await c.reconcile()
                await seen()
            scheduled = (await c.job()).status.condition(ConditionType.SCHEDULED)
            assert scheduled is not None and "exceeded quota" in scheduled.message

    run(main())


def test_a_quota_of_secrets_that_is_used_up_is_shown_to_a_job_without_a_token() -> None:
    async def main() -> None:
        async with case() as c:
            use_up_the_quota_of_secrets(c)
            await c.reconcile()
            await seen()
            assert c.pods() == []
            scheduled = (await c.job()).status.condition(ConditionType.SCHEDULED)
            assert scheduled is not None and "exceeded quota" in scheduled.message

    run(main())


def refused_by(policy: Fault, what: str = "policy") -> pytest.MarkDecorator:
    """A test's `policy`: this one, and a webhook that cannot be called."""
    said = (
        'Internal error occurred: failed calling webhook "nodel": Post "https://nodel.svc": context deadline exceeded'
    )
    return pytest.mark.parametrize("policy", [policy, Fault(500, message=said)], ids=[what, "webhook"])


@refused_by(Fault(422, reason="Invalid", message="policy 'nodel' denied request: pods are evidence"))
def test_a_pod_whose_deletion_is_refused_is_shown_and_tried_less_and_less(policy: Fault) -> None:
    """By an admission policy, or by a webhook that is away. The job's other changes are made all the same."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            await c.reconcile()
            c.server.faults = lambda m, path: policy if m == "DELETE" and "/pods/" in path else None
            c.server.requests.clear()
            await c.change(runPolicy={"suspend": True})
            for _ in range(300):
                await c.reconcile()
                await asyncio.sleep(1)
            suspended = (await c.job()).status.condition(ConditionType.SUSPENDED)
            assert suspended is not None
            assert suspended.message == (
                f"3 pods still there: the API server refuses the deletion of pod job-0-0: {policy.message}; retried "
                "within a minute"
            )
            assert sum(method == "DELETE" for method, _, _ in c.server.requests) <= 3 * 9
            await c.change(runPolicy={"suspend": False})
            scheduled = (await c.job()).status.condition(ConditionType.SCHEDULED)
            assert scheduled is not None and scheduled.reason == "DeletionRefused"
            c.server.faults = lambda m, path: None
            for _ in range(70):
                await c.reconcile()
                await asyncio.sleep(1)
            assert (await c.cluster.observe(KEY)).world.deletion_refused == ""  # type: ignore[union-attr]

    run(main())


def test_a_job_that_a_policy_keeps_after_its_time_is_wound_down_and_an_event_says_so() -> None:
    policy = Fault(403, reason="Forbidden", message="policy 'nodel' denied request: jobs are evidence")

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            await seen()
            await c.change(runPolicy={"ttlSecondsAfterFinished": 0})
            c.server.faults = lambda m, path: policy if m == "DELETE" and "/ddpjobs/" in path else None
            c.finish("job")
            c.server.requests.clear()
            for _ in range(300):
                await seen()
                await c.reconcile()
                await asyncio.sleep(1)
            assert "job-coordinator-0" not in c.pods()
            assert sum(method == "DELETE" and "/ddpjobs/" in path for method, path, _ in c.server.requests) <= 9
            [refused] = [e["note"] for e in c.server.events if e["reason"] == "DeletionRefused"]
            assert refused == (
                "the API server refuses the deletion of DDPJob job: policy 'nodel' denied request: jobs are evidence "
                "(retried within a minute)"
            )
            assert "ReconcileFailed" not in {e["reason"] for e in c.server.events}
            c.server.faults = lambda m, path: None
            await asyncio.sleep(60)
            await c.reconcile()
            assert c.server.store.find("DDPJob", "job") is None

    run(main())


@refused_by(Fault(403, reason="Forbidden", message="policy 'nodel' denied request: pods are evidence"))
def test_an_ended_job_whose_pod_may_not_be_deleted_is_looked_at_no_more_than_one_that_is_refused_pods(
    policy: Fault,
) -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            await seen()
            c.server.faults = lambda m, path: policy if m == "DELETE" and "/pods/" in path else None
            c.finish("job")
            await seen()
            await c.reconcile()
            assert await c.reconcile() == BLOCKED_POLL
            c.server.faults = lambda m, path: None
            await asyncio.sleep(60)
            await c.reconcile()
            assert "job-coordinator-0" not in c.pods()
            await seen()
            assert await c.reconcile() is None

    run(main())


def test_a_workload_that_a_policy_keeps_is_tried_again_and_an_event_says_so() -> None:
    policy = Fault(403, reason="Forbidden", message="policy 'nodel' denied request")

    async def main() -> None:
        async with case(serves_queues=True) as c:
            put_into_queue(c)
            await seen()
            await c.reconcile()
            c.server.faults = lambda m, path: policy if m == "DELETE" and "/workloads/" in path else None
            await c.change(runPolicy={"suspend": True})
            assert await c.reconcile() == BLOCKED_POLL
            reasons = [e["reason"] for e in c.server.events]
            assert reasons.count("DeletionRefused") == 1 and "ReconcileFailed" not in reasons
            c.server.faults = lambda m, path: None
            await asyncio.sleep(60)
            await c.reconcile()
            assert not list(c.server.store.all("Workload"))

    run(main())


@refused_by(Fault(403, reason="Forbidden", message="policy 'frozen' denied request"))
def test_a_status_that_a_policy_refuses_is_no_defect_of_the_operator(policy: Fault) -> None:
    async def main() -> None:
        async with case() as c:
            c.server.faults = lambda m, path: policy if m == "PUT" and path.endswith("/status") else None
            for _ in range(2):
                with pytest.raises(Refused):
                    await c.reconcile()
            [event] = c.server.events
            assert event["note"].startswith(
                f"the API server refuses the job's status: {policy.how}: {policy.message} (an admission policy, or"
            )

    run(main())


@refused_by(Fault(422, reason="Invalid", message="policy 'nolabel' denied request: pods are immutable here"))
def test_a_label_that_is_refused_is_no_error_and_tried_less_and_less(policy: Fault) -> None:
    """A policy that lets nobody change a pod; which of them trains is known without the label."""

    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            c.server.faults = lambda m, path: policy if m == "PATCH" and "/pods/" in path else None
            job, uid = await c.job(), c.uid("job-0-0")
            for _ in range(120):
                await c.cluster.label_pod(job, "job-0-0", uid, Role.SPARE)
                await asyncio.sleep(1)
            assert sum(method == "PATCH" and "/pods/" in path for method, path, _ in c.server.requests) == 4
            await c.cluster.delete_pod(job, "job-0-0", uid, None)
            assert "job-0-0" not in c.pods(), "what is refused is the label alone"

    run(main())


def test_a_namespace_that_forbids_root_gets_its_pods_at_once() -> None:
    """The pause after the refusal of a pod is not for the one with runAsNonRoot that follows."""

    async def main() -> None:
        async with case() as c:
            act = c.server._act

            def restricted(
                method: str, kind: str, namespace: str, name: str | None, part: str | None, body: Json
            ) -> Json:
                if method == "POST" and kind == "Pod" and not body["spec"]["securityContext"].get("runAsNonRoot"):
                    raise Refusal(403, "Forbidden", 'violates PodSecurity "restricted:latest": runAsNonRoot != true')
                return act(method, kind, namespace, name, part, body)

            c.server._act = restricted  # type: ignore[method-assign]
            await c.reconcile()
            assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]

    run(main())


def test_without_the_right_to_read_policies_everything_else_is_read() -> None:
    async def main() -> None:
        async with api_server() as server, connected(server) as rest:
            server.faults = lambda method, path: Fault(403, reason="Forbidden") if "networkpol" in path else None
            caches = Caches(rest, lambda key, urgent: None, lambda hosts, changed: None)
            async with asyncio.timeout(30), followed(server, caches):
                pass

    run(main())


# --- gangs ------------------------------------------------------------------------------------------------------


def test_a_cluster_that_serves_no_gangs_gets_none_and_is_not_asked_again_soon() -> None:
    async def main() -> None:
        async with case() as c:
            await c.reconcile()
            await asyncio.sleep(300)
            assert len(c.pods()) == 3 and not list(c.server.store.all("PodGroup"))
            assert c.asked("podgroups") == 2, "of Kubernetes, and of Volcano"

    run(main())


def test_what_may_not_be_listed_is_not_used() -> None:
    """As after an upgrade of the image without that of the chart."""

    async def main() -> None:
        async with api_server() as server, connected(server) as rest:
            server.serves_gangs = True
            meta = {"name": "job", "namespace": "space", "uid": "uid"}
            any_job = DDPJob.read({"metadata": meta, "spec": {"image": "image", "command": ["x"], "nodes": 2}})
            server.faults = lambda method, path: Fault(403, reason="Forbidden") if "podgroups" in path else None
            caches = Caches(rest, lambda key, urgent: None, lambda hosts, changed: None)
            async with followed(server, caches):
                assert caches.complete_in("space") and not caches.serves_gangs(any_job)

    run(main())


def test_a_cluster_that_serves_gangs_gets_one_per_generation_and_loses_the_last() -> None:
    async def main() -> None:
        async with case(serves_gangs=True) as c:
            await c.reconcile()
            (group,) = c.server.store.all("PodGroup")
            assert group["metadata"]["name"] == "job-gang-0"
            assert group["metadata"]["ownerReferences"][0]["uid"] == "job-uid"
            for pod in c.server.store.all("Pod"):
                assert pod["spec"]["schedulingGroup"] == {"podGroupName": "job-gang-0"}
            await c.change(nodes=3)
            (group,) = c.server.store.all("PodGroup")
            assert group["metadata"]["name"] == "job-gang-1"
            assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 4}}
            deletions = [path for method, path in c.server.acted if method == "DELETE" and "podgroups" in path]
            assert len(deletions) == 1

    run(main())


def test_volcano_gets_groups_of_its_own_kind() -> None:
    async def main() -> None:
        async with case(serves_gangs=True) as c:
            await c.change(scheduling={"schedulerName": "volcano"})
            (group,) = c.server.store.all("PodGroup.scheduling.volcano.sh")
            assert group["spec"] == {"minMember": 3} and not list(c.server.store.all("PodGroup"))
            for pod in c.server.store.all("Pod"):
                assert pod["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": "job-gang-0"}
                assert pod["spec"]["schedulerName"] == "volcano" and "schedulingGroup" not in pod["spec"]
            await c.change(nodes=3)
            (group,) = c.server.store.all("PodGroup.scheduling.volcano.sh")
            assert group["metadata"]["name"] == "job-gang-1" and group["spec"] == {"minMember": 4}
            (deletion,) = [path for method, path in c.server.acted if method == "DELETE" and "podgroups" in path]
            assert deletion.startswith("/apis/scheduling.volcano.sh/")

    run(main())


def test_the_group_of_a_job_that_has_ended_goes_when_its_nodes_have_ended() -> None:
    """It stayed until the job was deleted, which may be never."""

    async def main() -> None:
        async with case(serves_gangs=True) as c:
            await c.reconcile()
            c.finish("job")
            for _ in range(4):
                await seen()
                await c.reconcile()
            assert not list(c.server.store.all("PodGroup")) and c.pods() == ["job-0-0", "job-1-0"]

    run(main())


def test_a_group_that_its_pods_still_hold_is_deleted_once() -> None:
    async def main() -> None:
        async with case(serves_gangs=True) as c:
            await c.reconcile()
            (group,) = c.server.store.all("PodGroup")
            group["metadata"]["deletionTimestamp"] = c.server.store.clock.stamp()
            c.server.store.changed("PodGroup", group)
            await seen()
            job = await c.job()
            assert c.cluster.caches.gangs(job) == {"job-gang-0": ""}

    run(main())


def test_groups_that_are_served_no_more_are_a_refusal_and_no_loop() -> None:
    async def main() -> None:
        async with case(serves_gangs=True) as c:
            c.server.faults = lambda method, path: (
                Fault(404, reason="NotFound", message="404 page not found")
                if method == "POST" and "podgroups" in path
                else None
            )
            assert await c.reconcile() == BLOCKED_POLL
            conditions = {one.type: one for one in (await c.job()).status.conditions}
            assert "does not serve it any more" in conditions["Scheduled"].message and not c.pods()

    run(main())


# --- queues


def put_into_queue(c: Case, **labels: str) -> None:
    body = c.server.store.get("DDPJob", "job")
    body["metadata"]["labels"] = {QUEUE_LABEL: "team", **labels}
    c.server.store.changed("DDPJob", body)


def test_a_refused_deletion_of_a_queued_jobs_group_is_tried_again() -> None:
    """Not only at the next event, which may be hours away."""

    async def main() -> None:
        async with case(serves_gangs=True, serves_queues=True) as c:
            c.server.store.create("ResourceFlavor", {"metadata": {"name": "spot"}, "spec": SPOT}, "")
            put_into_queue(c)
            await seen()
            await c.reconcile()
            judged(c, admitted=True, QuotaReserved="True", Admitted="True")
            for _ in range(3):
                await seen()
                await c.reconcile()
            assert c.pods() and list(c.server.store.all("PodGroup"))
            c.server.faults = lambda method, path: (
                Fault(403, reason="Forbidden", message="no") if method == "DELETE" and "podgroups" in path else None
            )
            judged(c, Evicted="True", PodsReady="True")
            for _ in range(9):
                await seen()
                wake = await c.reconcile()
            assert not c.pods() and (await c.job()).status.phase == "Queued"
            assert len(list(c.server.store.all("PodGroup"))) == 1 and wake == BLOCKED_POLL
            c.server.faults = lambda method, path: None
            await asyncio.sleep(BLOCKED_POLL)
            await c.reconcile()
            assert not list(c.server.store.all("PodGroup"))

    run(main())


def judged(c: Case, *, admitted: bool = False, **states: str) -> Json:
    """The job's Workload after Kueue has set conditions, and with `admitted` the flavor `spot`."""
    (workload,) = c.server.store.all("Workload")
    status = workload.setdefault("status", {})
    known = {one["type"]: one for one in status.get("conditions", ())}
    for kind, state in states.items():
        moment = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
        known[kind] = {"type": kind, "status": state, "reason": "Preempted", "message": "said", **moment}
    status["conditions"] = list(known.values())
    if admitted:
        sets = [
            {"name": s["name"], "count": s["count"], "flavors": {"cpu": "spot"}} for s in workload["spec"]["podSets"]
        ]
        status["admission"] = {"clusterQueue": "all", "podSetAssignments": sets}
    c.server.store.changed("Workload", workload)
    return workload


SPOT = {"nodeLabels": {"pool": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}


def test_a_job_in_a_queue_asks_runs_with_its_flavor_and_gives_back() -> None:
    async def main() -> None:
        async with case(serves_queues=True) as c:
            c.server.store.create("ResourceFlavor", {"metadata": {"name": "spot"}, "spec": SPOT}, "")
            put_into_queue(c)
            await seen()
            await c.reconcile()
            (workload,) = c.server.store.all("Workload")
            assert workload["metadata"]["ownerReferences"][0]["uid"] == "job-uid" and not c.pods()
            assert (await c.job()).status.phase == "Queued"
            judged(c, admitted=True, QuotaReserved="True", Admitted="True")
            await seen()
            await c.reconcile()
            for pod in c.server.store.all("Pod"):
                assert (
                    pod["spec"]["nodeSelector"]["pool"] == "spot"
                    and SPOT["tolerations"][0] in pod["spec"]["tolerations"]
                )
            for _ in range(3):
                await c.reconcile()
            assert c.asked("resourceflavors") == 2, "one look per kind of pod"

            judged(c, Evicted="True", PodsReady="True")
            await seen()
            for _ in range(3):
                await c.reconcile()
                await seen()
            assert not c.pods()
            conditions = {one["type"]: one for one in workload["status"]["conditions"]}
            assert "admission" not in workload["status"]
            held = {kind for kind, one in conditions.items() if one["status"] == "True"}
            assert held == {"Evicted", "Requeued"} and len(conditions) == 5
            assert conditions["Evicted"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
            written = [path for method, path in c.server.acted if method == "PUT" and "workloads" in path]
            assert len(written) == 1

    run(main())


def test_quota_is_not_given_back_where_kueue_has_judged_again() -> None:
    """It was evicted when the decision was made, and is admitted when it is carried out."""

    async def main() -> None:
        async with case(serves_queues=True) as c:
            put_into_queue(c)
            await seen()
            await c.reconcile()
            workload = judged(c, admitted=True, QuotaReserved="True", Admitted="True", Evicted="False")
            await c.cluster.release_workload(await c.job(), workload["metadata"]["name"], workload["metadata"]["uid"])
            assert "admission" in workload["status"]
            judged(c, Evicted="True")
            await c.cluster.release_workload(await c.job(), workload["metadata"]["name"], "another")
            assert "admission" in workload["status"], "a Workload of the same name is another one"

    run(main())


@refused_by(Fault(403, reason="Forbidden"), "right")
def test_what_kueue_cannot_be_let_know_holds_up_nothing_else(policy: Fault) -> None:
    """Kueue's own webhook judges each change of a Workload, and is away with Kueue: pods are replaced all the same."""

    async def main() -> None:
        async with case(serves_queues=True) as c:
            put_into_queue(c)
            await seen()
            await c.reconcile()
            judged(c, admitted=True, QuotaReserved="True", Admitted="True")
            c.server.faults = lambda m, path: policy if m == "PUT" and "/workloads/" in path else None
            (workload,) = c.server.store.all("Workload")
            mark = workload["metadata"]["name"], workload["metadata"]["uid"], "PodsReady", "Started", "the group trains"
            for _ in range(120):
                await c.cluster.mark_workload(await c.job(), *mark)
                await asyncio.sleep(1)
            assert sum(m == "PUT" and "/workloads/" in path for m, path, _ in c.server.requests) == 4
            c.server.faults = lambda m, path: None
            await asyncio.sleep(60)
            await c.cluster.mark_workload(await c.job(), *mark)
            assert "PodsReady" in {one["type"] for one in workload["status"]["conditions"] if one["status"] == "True"}

    run(main())


def test_without_the_right_to_read_flavors_no_pod_runs_elsewhere() -> None:
    async def main() -> None:
        async with case(serves_queues=True) as c:
            put_into_queue(c)
            await seen()
            await c.reconcile()
            judged(c, admitted=True, QuotaReserved="True", Admitted="True")
            c.server.faults = lambda method, path: Fault(403, reason="Forbidden") if "flavors" in path else None
            await seen()
            await c.reconcile()
            suspended = next(one for one in (await c.job()).status.conditions if one.type == "Suspended")
            assert "cannot read ResourceFlavor spot" in suspended.message and not c.pods()

    run(main())


def test_a_priority_is_that_of_the_class() -> None:
    async def main() -> None:
        async with case(serves_queues=True) as c:
            put_into_queue(c, **{PRIORITY_LABEL: "urgent"})
            await seen()
            assert await c.reconcile() == BLOCKED_POLL
            suspended = next(one for one in (await c.job()).status.conditions if one.type == "Suspended")
            assert "WorkloadPriorityClass urgent" in suspended.message and "not found" in suspended.message
            c.server.store.create("WorkloadPriorityClass", {"metadata": {"name": "urgent"}, "value": 700}, "")
            c.cluster._pauses.clear()
            await c.reconcile()
            (workload,) = c.server.store.all("Workload")
            assert workload["spec"]["priority"] == 700
            assert workload["spec"]["priorityClassRef"]["name"] == "urgent"

    run(main())


def test_a_workload_of_another_namespace_grants_nothing() -> None:
    """Its labels may name any job."""

    async def main() -> None:
        async with case(serves_queues=True) as c:
            put_into_queue(c)
            await seen()
            await c.reconcile()
            workload = judged(c, admitted=True, QuotaReserved="True", Admitted="True")
            foreign = {**workload, "metadata": {**workload["metadata"], "namespace": "elsewhere", "uid": "other"}}
            c.server.store.delete("Workload", workload["metadata"]["name"])
            c.server.store.create("Workload", foreign, "elsewhere")
            await seen()
            assert not c.cluster.caches.workloads(await c.job())

    run(main())
