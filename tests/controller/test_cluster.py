"""The Kubernetes implementation of the port: its caches, and its handling of the server's
responses.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_classes import JobClasses
from ddpjob.controller.kubernetes_cluster import CREATIONS, FOUND_FOR, LOOK_AGAIN
from ddpjob.core.decision import BLOCKED_POLL
from ddpjob.core.world import Role
from ddpjob.engine import reconcile as reconcile_module
from ddpjob.engine.ports import Conflict, JobKey, NameTaken, Refused, ReportPending, Unavailable
from ddpjob.engine.reconcile import CONFLICT_RETRY, reconcile
from ddpjob.objects.claim import build_claim
from ddpjob.objects.service import (
    build_service,
)

from .api_server import Fault
from .cluster_case import KEY, MANIFEST, Case, case, delete_token, in_case, owned_by, seen
from .virtual_loop import run, virtual
from .world import loop_moment


@in_case()
async def test_no_request_is_sent_while_nothing_changes(c: Case) -> None:
    await c.settle(3)
    c.server.requests.clear()
    for _ in range(100):
        await c.reconcile()
    assert c.server.requests == []


@in_case()
async def test_objects_that_only_need_to_exist_are_never_read_as_a_whole(c: Case) -> None:
    """A namespace's runtime takes up 240 kB."""
    await c.settle(3)
    whole = {kind for method, kind in c.server.read_whole if method == "GET"}
    assert whole & {"Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"} == set()
    assert {"DDPJob", "Pod"} <= whole


@in_case()
async def test_a_bug_in_the_operator_is_reported_by_an_event(
    c: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(reconcile_module, "decide", lambda *_: {}["\udc80nodes"])
        for _ in range(3):
            with pytest.raises(KeyError):
                await c.reconcile()
    [event] = c.server.events
    assert (event["type"], event["reason"], event["regarding"]["name"]) == ("Warning", "ReconcileFailed", "job")
    assert event["note"].startswith(r"KeyError: '\udc80nodes' (this is a bug in the operator; see the traceback")
    assert not caplog.records, "a repeated event is not logged as an error"
    await c.reconcile()
    assert len(c.pods()) == 3


@in_case()
async def test_a_failed_request_is_not_reported_as_a_bug(c: Case) -> None:
    c.server.faults = lambda method, path: Fault(500) if method != "GET" and "/events" not in path else None
    await c.reconcile()
    assert c.server.events == []


@in_case()
async def test_a_job_is_woken_by_writes_of_others_but_not_by_the_operators_own(c: Case) -> None:
    await seen()
    c.woken.clear()
    c.server.drop_events = lambda kind, body: True  # if an event arrived before the response, it would wake the job
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


@in_case()
async def test_the_operator_sees_its_own_writes_even_if_the_watch_is_late(c: Case) -> None:
    c.server.drop_events = lambda kind, body: True
    for _ in range(3):
        await c.reconcile()
        await asyncio.sleep(1)
    assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]
    creations = [path for method, path in c.server.acted if method == "POST" and "events" not in path]
    assert len(creations) == 7, "service, runtime, its list of jobs, token and pods are created once each"
    await c.cluster.delete_pod(await c.job(), "job-0-0", c.uid("job-0-0"), None)
    observed = await c.cluster.observe(KEY)
    assert observed is not None
    assert sorted(p.name for p in observed.world.pods) == ["job-1-0", "job-coordinator-0"]


@in_case()
async def test_a_status_written_by_others_is_read_again_immediately(c: Case) -> None:
    await c.reconcile()
    pod = c.server.store.get("Pod", "job-0-0")
    pod["status"] = {"phase": "Running", "podIP": "127.0.0.9"}
    c.server.store.changed("Pod", pod)  # this makes a status write necessary
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


@in_case()
async def test_a_job_deleted_with_its_namespace_and_the_operators_role_is_forgotten(c: Case) -> None:
    await c.reconcile()
    c.server.faults = lambda method, path: Fault(403, reason="Forbidden")
    with pytest.raises(Refused):
        await c.cluster.write_status(c.cached(), {"phase": "Pending"})
    c.server.store.delete("DDPJob", "job")
    await seen()
    assert await c.reconcile() is None


@in_case()
async def test_a_finished_job_causes_no_requests(c: Case) -> None:
    await c.reconcile()
    c.finish("job")
    await c.settle(5)
    assert [p for p in c.pods() if "coordinator" in p] == []
    c.server.requests.clear()
    asked: list[str] = []

    async def report(endpoint: str) -> None:
        asked.append(endpoint)

    c.cluster.coordinators.report = report  # type: ignore[assignment]
    assert await c.reconcile() is None
    assert c.server.requests == asked == [], "the coordinator's former address gets no request either"


@pytest.mark.parametrize("ready", [True, False, None])
@in_case()
async def test_a_kubernetes_node_that_seems_lost_is_read_before_any_decision(c: Case, ready: bool | None) -> None:
    """`ready` is the node's real state. True means that the watch is late, and None that the
    Kubernetes node does not exist.
    """
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
    assert forced is (ready is not True), "the kubelet of a Ready node confirms the end of its pods itself"


@in_case()
async def test_no_node_is_declared_lost_during_an_outage_of_the_api_server(c: Case) -> None:
    await c.reconcile()
    pod = c.server.store.get("Pod", "job-0-0")
    pod["spec"]["nodeName"], pod["status"] = "new", {"phase": "Running"}
    c.server.store.changed("Pod", pod)
    await seen()
    c.server.faults = lambda method, path: Fault(503)
    with pytest.raises(Unavailable):
        await c.cluster.observe(KEY)


@in_case()
async def test_the_number_of_concurrent_creations_is_limited_for_all_jobs_together(c: Case) -> None:
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
    with contextlib.suppress(Conflict):  # the namespace does not exist
        await c.cluster.create(other, build_service(other))
    assert asyncio.get_running_loop().time() - began < 2.5, "the other namespace gets the next turn"
    await burst
    assert most == 2 * CREATIONS, "if a webhook takes a second, two groups of creations run concurrently"
    assert len(c.pods()) == 8 * 41


@in_case()
async def test_the_next_reconcile_sees_the_operators_own_writes(c: Case) -> None:
    await c.reconcile()
    assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]
    for _ in range(3):
        await c.reconcile()
    creations = [path for method, path in c.server.acted if method == "POST" and "events" not in path]
    assert len(creations) == 7, "service, runtime, its list of jobs, token and pods are created once each"
    for body in list(c.server.store.all("Pod")):
        await c.cluster.delete_pod(await c.job(), body["metadata"]["name"], body["metadata"]["uid"], 0)
    observed = await c.cluster.observe(KEY)
    assert observed is not None and observed.world.pods == ()


@pytest.mark.parametrize("how", ["hang-after", "reset-after", "page"])
@pytest.mark.parametrize(
    ("method", "part"), [("POST", "/pods"), ("POST", "/services"), ("PUT", "/status"), ("POST", "/configmaps")]
)
@in_case()
async def test_after_a_lost_response_no_successful_write_is_repeated(c: Case, how: str, method: str, part: str) -> None:
    c.fault_once(method, part, Fault(how))
    for _ in range(5):
        await c.reconcile()
        await asyncio.sleep(2)
    assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]
    status = c.server.store.get("DDPJob", "job")["status"]
    assert [slot["attempt"] for slot in status["slots"]] == [0, 0]
    assert status["restarts"]["total"] == 0


@in_case()
async def test_writing_a_status_with_an_outdated_version_is_a_conflict(c: Case) -> None:
    job = await c.job()
    c.server.store.changed("DDPJob", c.server.store.get("DDPJob", "job"))
    with pytest.raises(Conflict):
        await c.cluster.write_status(job, {"phase": "Pending"})
    c.server.store.delete("DDPJob", "job")
    with pytest.raises(Conflict):
        await c.cluster.write_status(job, {"phase": "Pending"})


@in_case()
async def test_after_writing_a_status_the_operator_does_not_read_the_whole_job(c: Case) -> None:
    c.server.drop_events = lambda kind, body: True
    for again in range(3):
        await c.reconcile()
        stored = c.server.store.get("DDPJob", "job")
        assert c.cached() == DDPJob.read(stored), f"after {again} more reconciles"
    assert stored["status"]["slots"]
    assert ("PUT", "DDPJob") not in c.server.read_whole


@in_case()
async def test_a_written_status_is_not_read_again_if_kopf_shows_it_first(c: Case) -> None:
    asked = c.asked("/ddpjobs/job")
    c.server.faults = lambda method, path: Fault("late", seconds=1.0) if method == "PUT" else None
    await c.settle(3)
    assert c.cached() == DDPJob.read(c.server.store.get("DDPJob", "job"))
    assert c.asked("/ddpjobs/job") == asked
    lost = Fault("reset-after")
    c.server.faults = lambda method, path: lost if method == "PUT" and path.endswith("/status") else None
    c.server.store.delete("Pod", "job-0-0")
    await seen()
    with contextlib.suppress(Unavailable):
        await c.reconcile()
    await seen()
    assert c.cached() == DDPJob.read(c.server.store.get("DDPJob", "job")), "after a lost response, the status is read"


@in_case()
async def test_an_existing_object_is_either_the_jobs_own_or_its_name_is_taken(c: Case) -> None:
    job = await c.job()
    body = c.server.store.create("Pod", owned_by(job))
    await c.cluster.create(job, owned_by(job))  # its own pod
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    await asyncio.sleep(1)
    with pytest.raises(NameTaken, match="still being removed"):
        await c.cluster.create(job, owned_by(job))
    c.server.store.remove("Pod", body)
    await asyncio.sleep(BLOCKED_POLL)
    body = c.server.store.create("Pod", owned_by(job, uid="of an earlier job"))
    with pytest.raises(NameTaken, match="earlier job"):
        await c.cluster.create(job, owned_by(job))
    c.server.store.remove("Pod", body)
    await asyncio.sleep(BLOCKED_POLL)
    c.server.store.create("Pod", MANIFEST)
    with pytest.raises(NameTaken, match="a different name"):
        await c.cluster.create(job, owned_by(job))


@in_case()
async def test_a_service_that_has_lost_its_labels_is_looked_up_until_it_is_gone(
    c: Case,
) -> None:
    """No watch shows the Service, and the operator has no right to write it."""
    await c.reconcile()
    service = c.server.store.get("Service", "job")
    del service["metadata"]["labels"]
    c.server.store.changed("Service", service)
    c.cluster.caches.forget("Service", "space", "job")  # the watch shows it as deleted
    c.server.requests.clear()
    for _ in range(100):
        await c.reconcile()
        await asyncio.sleep(1)
    assert sum("/services" in path for _, path, _ in c.server.requests) <= 8
    c.server.store.remove("Service", service)
    await asyncio.sleep(FOUND_FOR)
    await c.reconcile()
    assert c.server.store.find("Service", "job") is not None


def _make_a_claim(c: Case, **more: Any) -> None:
    """Let the job create the claim for its checkpoints."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    body = c.server.store.get("DDPJob", "job")
    body["spec"]["storage"] = {"checkpoints": {"claimTemplate": {"spec": spec}}}
    body["metadata"]["generation"] += 1
    body.update(more)
    c.server.store.changed("DDPJob", body)


@in_case(classes=JobClasses.read({"team": {"spec": {"image": "team/train:1"}}}))
async def test_a_job_is_read_with_the_values_of_its_class_once_the_class_is_recorded(c: Case) -> None:
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
    await c.settle()
    read = c.cluster.caches.job(KEY)
    assert read is not None and read.spec == job.spec, "also if the job comes from the watch"
    assert {pod["spec"]["containers"][0]["image"] for pod in c.server.store.all("Pod")} == {"team/train:1"}


@in_case()
async def test_a_claim_without_an_owner_is_created_once_and_recognized_by_its_label(c: Case) -> None:
    _make_a_claim(c)
    await asyncio.sleep(1)
    await reconcile(c.cluster, KEY, loop_moment)
    claim = c.server.store.get("PersistentVolumeClaim", "job-checkpoints")
    assert c.pods(), "in the same reconcile"
    job = DDPJob.read(c.server.store.get("DDPJob", "job"))
    await c.cluster.create(job, build_claim(job))  # as after a lost response
    with pytest.raises(NameTaken, match="a different name"):
        await c.cluster.create(replace(job, uid="later"), build_claim(job))
    assert [claim] == list(c.server.store.all("PersistentVolumeClaim"))


@in_case()
async def test_a_lost_claim_of_a_job_is_noticed_when_a_pod_is_missing(c: Case) -> None:
    _make_a_claim(c, status={"trained": True})
    await c.settle()
    pods = c.pods()
    assert pods, "the job has trained without a claim so far, so its first claim is created"
    await c.settle()
    assert c.server.store.get("DDPJob", "job")["status"]["claimMade"]
    c.server.store.remove("PersistentVolumeClaim", c.server.store.get("PersistentVolumeClaim", "job-checkpoints"))
    for pod in pods:
        c.server.store.remove("Pod", c.server.store.get("Pod", pod))
    await c.settle(3)
    conditions = c.server.store.get("DDPJob", "job")["status"]["conditions"]
    assert [x["reason"] for x in conditions if x["type"] == "Scheduled"] == ["ClaimNotFound"]
    assert not c.pods() and c.server.store.find("PersistentVolumeClaim", "job-checkpoints") is None


@in_case()
async def test_deletions_and_labels_never_affect_a_later_object_with_the_same_name(c: Case) -> None:
    job = await c.job()
    body = c.server.store.create("Pod", {**owned_by(job), "metadata": {**owned_by(job)["metadata"], "labels": {}}})
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


def test_a_reconcile_does_not_wait_for_a_coordinator() -> None:
    """Only the first report is awaited, and outside of the reconcile. This wait ends when the first
    request has failed.
    """

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1e6)

    async def main() -> None:
        listener = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        woken: list[JobKey] = []
        async with case(on_report=woken.append) as c:
            await c.reconcile()
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
        listener.close()

    run(main())


@virtual
async def test_a_coordinator_is_asked_as_soon_as_its_pods_status_is_running() -> None:
    """If all pods start at the same moment, nothing else would wake the job for up to a minute."""
    asked = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        writer.close()

    async with case() as c:
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
        listener.close()


@in_case()
async def test_the_cache_forgets_a_deleted_job(c: Case) -> None:
    await c.reconcile()
    c.server.store.delete("DDPJob", "job")
    await seen()
    assert await c.reconcile() is None
    assert c.pods() == []
    assert c.cluster.caches.jobs_on(frozenset({"", "n0"})) == set()


@in_case()
async def test_the_last_state_of_a_pod_is_remembered_for_a_while(c: Case) -> None:
    """An operator that is late may learn why a pod was evicted only from the event of its
    deletion.
    """
    await c.reconcile()
    pod = c.server.store.get("Pod", "job-0-0")
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    c.server.store.remove("Pod", {**pod, "status": {**pod.get("status", {}), "conditions": [evicted]}})
    await seen()
    observed = await c.cluster.observe(KEY)
    assert observed is not None and "job-0-0" not in [p.name for p in observed.world.pods]
    last = observed.world.last_of("job-0-0")
    assert last is not None and last.disruption == "EvictionByEvictionAPI"


@in_case()
async def test_the_secret_with_the_token_is_created_once_and_never_read(c: Case) -> None:
    """The operator has no right to read Secrets. A Secret that already has that name therefore
    counts as this job's.
    """
    await c.reconcile()
    [secret] = c.server.store.all("Secret")
    assert secret["stringData"] == {"token": c.cluster.platform.token(await c.job())}
    for name, created in (("job-0-0", 1), ("job-1-0", 2)):
        c.server.store.remove("Pod", c.server.store.get("Pod", name))
        await c.settle()
        await c.reconcile()
        assert f"{name[:-1]}1" in c.pods()
        assert len(list(c.server.store.all("Secret"))) == 1
        asked = [(method, path) for method, path, _ in c.server.requests if "/secrets" in path]
        assert asked == [("POST", "/api/v1/namespaces/space/secrets")] * created
        c.cluster._tokens.clear()  # a different operator does not know the token


@pytest.mark.parametrize("restarted", [False, True])
@in_case()
async def test_a_deleted_token_is_recreated_only_once_before_the_kubelet_retries(c: Case, *, restarted: bool) -> None:
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


@in_case()
async def test_a_job_learns_whether_others_use_its_folder_or_wait_for_room(c: Case) -> None:
    storage = {"checkpoints": {"claimName": "c", "subPath": "same"}}
    waits = {"type": "Scheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes",
             "lastTransitionTime": c.server.store.clock.stamp()}  # fmt: skip
    c.add("first", storage=storage, status={"slots": [{"state": "Running"}], "conditions": [waits]})
    c.add("second", storage=storage)
    c.add("third", storage={"checkpoints": {"claimName": "c"}}, status={"conditions": [waits]})
    await seen()
    worlds = {}
    for name in ("first", "second", "third"):
        observed = await c.cluster.observe(JobKey("space", name))
        assert observed is not None
        worlds[name] = (observed.world.folder_user, observed.world.others_wait)
    assert worlds["first"] == ("", True) and worlds["third"] == ("", True), (
        "each of the two waiting jobs sees that the other one waits"
    )
    assert worlds["second"][0].startswith("first, which is ") and not worlds["second"][1], (
        "the second job has another user of its folder, and no rival that waits"
    )
