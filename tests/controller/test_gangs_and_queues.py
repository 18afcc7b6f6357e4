"""PodGroups of Kubernetes and Volcano, and Kueue's Workloads, on the API server."""

from __future__ import annotations

import asyncio
from functools import partial

from ddpjob.api.job import PRIORITY_LABEL, DDPJob
from ddpjob.controller.caches import Caches
from ddpjob.controller.kube.informer import REFUSED_SECONDS
from ddpjob.core.decision import BLOCKED_POLL
from ddpjob.objects.workload import LABEL_ADDITIONAL, marked

from .api_server import Fault
from .cluster_case import SPOT, Case, in_case, judged, put_into_queue, refused_by, seen
from .virtual_loop import virtual
from .world import api_server, connected, followed


@in_case()
async def test_a_cluster_without_gang_apis_gets_no_gangs_and_few_requests_for_them(c: Case) -> None:
    await c.reconcile()
    await asyncio.sleep(300)
    assert len(c.pods()) == 3 and not list(c.server.store.all("PodGroup"))
    assert c.asked("podgroups") == 2, "one request for the API of Kubernetes, and one for Volcano's"


META = {"name": "job", "namespace": "space", "uid": "uid"}
ANY_JOB = DDPJob.read({"metadata": META, "spec": {"image": "image", "command": ["x"], "nodes": 2}})


def refuse_gangs(method: str, path: str) -> Fault | None:
    return Fault(403, reason="Forbidden") if "podgroups" in path else None


@virtual
async def test_a_gang_api_that_the_operator_may_not_list_is_not_used() -> None:
    """This happens if the image is upgraded but not the chart."""
    async with api_server() as server, connected(server) as rest:
        server.serves_gangs, server.faults = True, refuse_gangs
        caches = Caches(rest, lambda key, urgent: None, lambda hosts, changed: None)
        async with followed(server, caches):
            assert caches.complete_in("space") and not caches.serves_gangs(ANY_JOB)


@virtual
async def test_gangs_are_still_used_after_a_refusal_that_is_soon_over() -> None:
    """Without them, a waiting job would be planned again without a gang, and lose its pods."""
    async with api_server() as server, connected(server) as rest:
        server.serves_gangs = True
        caches = Caches(rest, lambda key, urgent: None, lambda hosts, changed: None)
        async with followed(server, caches):
            await asyncio.sleep(100)
            server.faults = refuse_gangs
            server.break_watches()
            for second in range(240):
                await asyncio.sleep(1)
                assert caches.serves_gangs(ANY_JOB) or second >= REFUSED_SECONDS - 5
            assert not caches.serves_gangs(ANY_JOB), "the permission was withdrawn"


@in_case(serves_gangs=True)
async def test_a_job_has_one_gang_per_generation_and_deletes_the_previous_one(c: Case) -> None:
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


@in_case(serves_gangs=True)
async def test_a_job_for_volcano_gets_pod_groups_of_volcanos_kind(c: Case) -> None:
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


@in_case(serves_gangs=True)
async def test_the_pod_group_of_a_finished_job_is_deleted_when_its_pods_have_ended(c: Case) -> None:
    """Regression: the group stayed until the job was deleted, which may never happen."""
    await c.reconcile()
    c.finish("job")
    await c.settle(4)
    assert not list(c.server.store.all("PodGroup")) and c.pods() == ["job-0-0", "job-1-0"]


@in_case(serves_gangs=True)
async def test_the_deletion_of_a_pod_group_is_not_requested_again(c: Case) -> None:
    await c.reconcile()
    (group,) = c.server.store.all("PodGroup")
    group["metadata"]["deletionTimestamp"] = c.server.store.clock.stamp()
    c.server.store.changed("PodGroup", group)
    await seen()
    job = await c.job()
    assert c.cluster.caches.gangs(job) == {"job-gang-0": ""}


@in_case(serves_queues=True)
async def test_a_job_in_a_queue_requests_quota_runs_with_its_flavor_and_releases_it(c: Case) -> None:
    c.server.store.create("ResourceFlavor", {"metadata": {"name": "spot"}, "spec": SPOT}, "")
    put_into_queue(c)
    await c.settle()
    (workload,) = c.server.store.all("Workload")
    assert workload["metadata"]["ownerReferences"][0]["uid"] == "job-uid" and not c.pods()
    assert (await c.job()).status.phase == "Queued"
    judged(c, admitted=True, QuotaReserved="True", Admitted="True")
    await c.settle()
    for pod in c.server.store.all("Pod"):
        assert pod["spec"]["nodeSelector"]["pool"] == "spot" and SPOT["tolerations"][0] in pod["spec"]["tolerations"]
    for _ in range(3):
        await c.reconcile()
    assert c.asked("resourceflavors") == 2, "one lookup per pod set"

    judged(c, Evicted="True", PodsReady="True")
    await c.settle(3)
    assert not c.pods()
    conditions = {one["type"]: one for one in workload["status"]["conditions"]}
    assert "admission" not in workload["status"]
    held = {kind for kind, one in conditions.items() if one["status"] == "True"}
    assert held == {"Evicted", "Requeued"} and len(conditions) == 5
    assert conditions["Evicted"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    written = [path for method, path in c.server.acted if method == "PUT" and "workloads" in path]
    assert len(written) == 1


@in_case(serves_queues=True)
async def test_additional_pods_of_an_elastic_job_run_with_the_flavor_of_their_own_quota(c: Case) -> None:
    for name in ("spot", "reserved"):
        c.server.store.create(
            "ResourceFlavor", {"metadata": {"name": name}, "spec": {"nodeLabels": {"pool": name}}}, ""
        )
    put_into_queue(c)
    await seen()
    await c.change(nodes=3, elastic={"minNodes": 2})
    judged(c, admitted=True, pods=2, QuotaReserved="True", Admitted="True")
    await c.settle()
    assert [pod for pod in c.pods() if "coordinator" not in pod] == ["job-0-0", "job-1-0"]
    [name] = [
        w["metadata"]["name"] for w in c.server.store.all("Workload") if w["metadata"]["labels"].get(LABEL_ADDITIONAL)
    ]
    judged(c, admitted=True, flavor="reserved", name=name, QuotaReserved="True", Admitted="True")
    await c.settle(3)
    pools = [c.server.store.get("Pod", pod)["spec"]["nodeSelector"]["pool"] for pod in c.pods() if pod[4].isdigit()]
    assert pools == ["spot", "spot", "reserved"]
    more = (await c.job()).status.queue
    assert more is not None and more.pods == 3 and [share.workload for share in more.more] == [name]
    assert c.asked("resourceflavors") == 3, "each flavor is read once"


@refused_by(Fault(403, reason="Forbidden"), "right")
@in_case(serves_queues=True)
async def test_a_failed_notification_of_kueue_delays_nothing_else(c: Case, policy: Fault) -> None:
    """Kueue's own webhook validates each change to a Workload, and is down together with Kueue."""
    put_into_queue(c)
    await c.settle()
    judged(c, admitted=True, QuotaReserved="True", Admitted="True")
    c.server.faults = lambda m, path: policy if m == "PUT" and "/workloads/" in path else None
    (workload,) = c.server.store.all("Workload")
    known = workload["metadata"]["name"], workload["metadata"]["uid"]
    mark = partial(marked, condition="PodsReady", reason="Started", message="the group trains")
    for _ in range(120):
        await c.cluster.change_workload(await c.job(), *known, mark)
        await asyncio.sleep(1)
    assert sum(m == "PUT" and "/workloads/" in path for m, path, _ in c.server.requests) == 4
    c.server.faults = lambda m, path: None
    await asyncio.sleep(60)
    await c.cluster.change_workload(await c.job(), *known, mark)
    assert "PodsReady" in {one["type"] for one in workload["status"]["conditions"] if one["status"] == "True"}


@in_case(serves_queues=True)
async def test_without_the_right_to_read_flavors_no_pod_runs_on_other_nodes(c: Case) -> None:
    put_into_queue(c)
    await c.settle()
    judged(c, admitted=True, QuotaReserved="True", Admitted="True")
    c.server.faults = lambda method, path: Fault(403, reason="Forbidden") if "flavors" in path else None
    await c.settle()
    suspended = next(one for one in (await c.job()).status.conditions if one.type == "Suspended")
    assert "cannot read ResourceFlavor spot" in suspended.message and not c.pods()


@in_case(serves_queues=True)
async def test_the_priority_of_a_workload_comes_from_its_priority_class(c: Case) -> None:
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


@in_case(serves_queues=True)
async def test_a_workload_in_a_different_namespace_grants_no_quota(c: Case) -> None:
    """A Workload's labels may contain the name of any job."""
    put_into_queue(c)
    await c.settle()
    workload = judged(c, admitted=True, QuotaReserved="True", Admitted="True")
    foreign = {**workload, "metadata": {**workload["metadata"], "namespace": "elsewhere", "uid": "other"}}
    c.server.store.delete("Workload", workload["metadata"]["name"])
    c.server.store.create("Workload", foreign, "elsewhere")
    await seen()
    assert not c.cluster.caches.workloads(await c.job())
