"""The ConfigMap with the runtime, which the jobs of a namespace share."""

from __future__ import annotations

import asyncio
from base64 import b64encode

import pytest
from ddpjob.engine.ports import JobKey
from ddpjob.engine.reconcile import reconcile
from ddpjob.objects.service import (
    build_runtime,
    build_runtime_jobs,
    runtime_jobs_name,
    runtime_name,
    runtime_owner,
)

from .cluster_case import JOBS, KEY, Case, digest, in_case, seen
from .world import loop_moment


@in_case()
async def test_jobs_of_a_namespace_share_one_runtime_that_is_deleted_with_the_last_job(c: Case) -> None:
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


@in_case()
async def test_two_requests_suffice_for_many_jobs_to_share_their_runtime(c: Case) -> None:
    keys = [KEY, *(JobKey("space", f"job{number}") for number in range(30))]
    for key in keys[1:]:
        c.add(key.name)
    await seen()
    await asyncio.gather(*(reconcile(c.cluster, key, loop_moment) for key in keys))
    asked = [method for method, path, _ in c.server.requests if "/configmaps" in path and method != "GET"]
    assert asked == ["POST", "POST"], "the object that the jobs own, and the runtime that it owns"
    assert c.keepers() == {key.name for key in keys}
    assert len(c.pods()) == 3 * len(keys)


@in_case()
async def test_a_job_also_adds_jobs_about_to_start_as_owners_of_the_runtime(c: Case) -> None:
    """Jobs that have ended, are suspended, or use a different version's runtime are not added."""
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


@in_case()
async def test_the_next_operator_completes_an_unfinished_sharing_of_the_runtime(c: Case) -> None:
    """The operator died when the job was already an owner, but the runtime did not belong to the
    jobs yet.
    """
    job = await c.job()
    runtime = build_runtime(job)
    runtime["metadata"]["ownerReferences"][0] |= {"name": "other", "uid": "other-uid"}
    c.server.store.create("ConfigMap", runtime)
    c.server.store.create("ConfigMap", build_runtime_jobs(job, [runtime_owner(job)]))
    await c.settle()
    jobs = c.server.store.get("ConfigMap", JOBS)["metadata"]["uid"]
    owners = c.server.store.get("ConfigMap", runtime_name())["metadata"]["ownerReferences"]
    assert {o["uid"] for o in owners} == {"other-uid", jobs} and len(c.pods()) == 3


@pytest.mark.parametrize("gone", ["runtime", "jobs"])
@in_case()
async def test_a_runtime_deleted_while_a_job_arrives_is_recreated(c: Case, gone: str) -> None:
    """The last of its jobs has ended, but no watch has reported it yet."""
    await c.reconcile()
    c.add("b")
    await seen()
    c.server.drop_events = lambda kind, body: kind == "ConfigMap"
    body = c.server.store.get("ConfigMap", runtime_name() if gone == "runtime" else JOBS)
    c.server.store.remove("ConfigMap", body)
    await reconcile(c.cluster, JobKey("space", "b"), loop_moment)
    if gone == "runtime":  # no request needs it, so only a watch can report it
        c.server.drop_events = lambda kind, body: False
        c.server.store.changed("ConfigMap", body, "DELETED")
        await seen()
        await reconcile(c.cluster, JobKey("space", "b"), loop_moment)
    assert len([name for name in c.pods() if name.startswith("b-")]) == 3
    runtime = c.server.store.get("ConfigMap", runtime_name())
    jobs = c.server.store.get("ConfigMap", JOBS)["metadata"]
    assert jobs["uid"] in {o["uid"] for o in runtime["metadata"]["ownerReferences"]} and "b" in c.keepers()


@pytest.mark.parametrize("wrong", ["content", "mutable", "label"])
@in_case()
async def test_a_runtime_that_the_operator_did_not_create_is_not_mounted(c: Case, wrong: str) -> None:
    manifest = build_runtime(await c.job())
    if wrong == "content":
        manifest["binaryData"] = {**manifest["binaryData"], "ddpjob_worker.py": b64encode(b"evil").decode()}
    if wrong == "mutable":
        manifest["immutable"] = False
    if wrong == "label":
        manifest["metadata"]["labels"] = {}
    c.server.store.create("ConfigMap", manifest)
    await c.settle()
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


@pytest.mark.parametrize("files", ["the same", "one more", "one less"])
@in_case()
async def test_an_older_runtime_is_kept_while_pods_mount_its_files(c: Case, files: str) -> None:
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
    old["ownerReferences"] = [{"apiVersion": "v1", "kind": "ConfigMap", "name": jobs["name"], "uid": jobs["uid"]}]
    if files == "one less":
        data.popitem()
    store.remove("ConfigMap", made)
    store.create("ConfigMap", {**made, "metadata": old, "binaryData": data})
    job = next(store.all("DDPJob"))
    job["status"] = {**job["status"], "runtime": old["name"]}
    store.changed("DDPJob", job)
    for pod in list(store.all("Pod")):
        store.remove("Pod", pod)
    await c.settle()
    pinned = (await c.job()).status.runtime
    [mounted] = {
        volume["configMap"]["name"]
        for pod in store.all("Pod")
        for volume in pod["spec"]["volumes"]
        if "configMap" in volume
    }
    assert mounted == pinned == (old if files == "the same" else made["metadata"])["name"]
    assert store.find("ConfigMap", pinned) is not None
