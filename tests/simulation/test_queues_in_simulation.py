"""Queues in simulated time: a job waits, runs with quota, and is evicted, resumed and resized. The
operator crashes at any point.
"""

from __future__ import annotations

import pytest
from ddpjob.api.job import PRIORITY_LABEL, QUEUE_LABEL
from ddpjob.api.job_classes import JobClasses

from . import test_crashes as crashes
from .kueue import Kueue
from .simulated import Simulation, conditions
from .store import Json


def queued(spec: Json | None = None, pods: int = 2, steps: int = 20) -> tuple[Simulation, Kueue]:
    s = Simulation(spec or {}, steps=steps)
    return s, Kueue(s, pods)


async def with_quota(spec: Json | None = None, pods: int = 2, steps: int = 20) -> tuple[Simulation, Kueue]:
    """Start a job in a queue, and wait until it runs."""
    s, kueue = queued(spec, pods, steps)
    return await s.begun(), kueue


def events(s: Simulation) -> list[str]:
    return [event.reason for event in s.cluster.events]


# --- from start to end


@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
async def test_a_job_waits_without_pods_until_its_queue_has_room(placement: str) -> None:
    s, kueue = queued({"rendezvous": {"placement": placement}})
    kueue.taken = 1
    await s.passes(30)
    assert s.phase == "Queued" and not s.pods and "startTime" not in s.status
    suspended = conditions(s)["Suspended"]
    assert suspended["reason"] == "Queued"
    assert suspended["message"] == "waits in queue team for the quota of 2 pods: insufficient unused quota for cpu"
    [workload] = kueue.workloads().values()
    assert workload["spec"]["queueName"] == "team"
    assert [(one["name"], one["count"]) for one in workload["spec"]["podSets"]] == (
        [("node", 2), ("coordinator", 1)] if placement == "Dedicated" else [("node", 2)]
    )
    kueue.taken = 0
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0 and s.status["rendezvous"]["generation"] == 0
    await s.passes(3)
    assert kueue.using() == 0 and kueue.holds(workload, "Finished"), "quota is released at the end"
    assert events(s)[:2] == ["Queued", "Admitted"]


async def test_kueue_is_notified_that_the_pods_run() -> None:
    s, kueue = await with_quota(steps=1000)
    await s.passes(2)
    [workload] = kueue.workloads().values()
    assert kueue.holds(workload, "PodsReady")
    writes = s.cluster.writes
    await s.passes(5)
    assert not any("Workload" in action for action in s.cluster.actions) and s.cluster.writes - writes <= 5


async def test_an_evicted_job_saves_releases_its_quota_and_continues_later() -> None:
    s, kueue = await with_quota({"recovery": {"maxRestarts": 0}}, steps=60)
    kueue.taken = 1
    kueue.evict()
    held_while_pods_end = []
    for _ in range(40):
        await s.one_pass()
        if any(not p.ended for p in s.pods.values()):
            held_while_pods_end.append(kueue.using())
        s.advance(1)
    assert held_while_pods_end and set(held_while_pods_end) == {2}, "other jobs must not get quota that is still in use"
    assert s.phase == "Queued" and kueue.using() == 0 and not [p for p in s.nodes() if not p.ended]
    assert "Evicted" in events(s)
    [workload] = kueue.workloads().values()
    assert kueue.holds(workload, "Requeued"), "it keeps its place in the queue"
    kueue.taken = 0
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0 and s.status["rendezvous"]["generation"] == 1


@pytest.mark.parametrize("command", [False, True], ids=["script", "command"])
@pytest.mark.parametrize("evicted", [False, True], ids=["suspended", "evicted"])
async def test_a_job_that_finished_unseen_completes_instead_of_starting_again(evicted: bool, command: bool) -> None:
    s, kueue = queued({"script": None, "command": ["train"]} if command else {})
    if command:
        del s.spec["script"]
    await s.until_phase("Running")
    s.advance(120)  # No operator runs.
    if evicted:
        kueue.evict()
    else:
        s.change_spec({"runPolicy": {"suspend": True}})
    await s.passes(5)
    assert s.phase == "Complete" and "Evicted" not in events(s) and kueue.using() == 0
    assert [p.name for p in s.nodes()] == ["job-0-0", "job-1-0"]


async def test_a_job_that_changes_its_resources_requests_new_quota_and_is_not_evicted() -> None:
    s, _ = await with_quota(steps=200)
    s.change_spec({"resources": {"requests": {"cpu": "3"}}})
    await s.until_phase("Queued")
    await s.until_phase("Complete")
    assert "Evicted" not in events(s)
    [changed] = [e.message for e in s.cluster.events if e.reason == "SpecChanged"]
    assert changed == (
        "the quota granted by queue team no longer fits the job's spec; the job requests new quota; "
        "checkpoints are kept"
    )


async def test_a_lost_host_does_not_keep_the_quota_of_an_evicted_job() -> None:
    s, kueue = await with_quota(steps=200)
    s.cut(s.pods["job-1-0"].node)
    kueue.evict()
    await s.passes(10)
    assert kueue.using() == 2 and conditions(s)["Suspended"]["message"].endswith("still terminating")
    await s.until(lambda: not s.pods, limit=90)
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0


async def test_pods_of_a_suspended_job_on_a_lost_host_are_removed_before_the_coordinator() -> None:
    s = await Simulation({}, steps=10**6).begun()
    s.cut(s.pods["job-1-0"].node)
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.until(lambda: not s.pods, limit=90)
    await s.passes(2)
    assert conditions(s)["Suspended"]["message"] == "no pods are running; set runPolicy.suspend to false to resume"


async def test_a_lost_pod_is_replaced_within_the_quota() -> None:
    s, kueue = await with_quota(steps=100)
    before = kueue.workloads()
    s.force_delete("job-1-0")
    await s.until(lambda: s.phase == "Running" and "job-1-1" in s.pods)
    assert kueue.workloads() == before and s.status["restarts"]["total"] == 1


@pytest.mark.parametrize("faulty", [{"hostname": "mine"}, {"containers": 3}, 3], ids=str)
async def test_a_resumed_job_with_a_faulty_template_requests_no_quota_and_reports_why(faulty: object) -> None:
    s, kueue = await with_quota(steps=60)
    s.change_spec({"runPolicy": {"suspend": True}, "podTemplate": {"spec": faulty}})
    await s.until(lambda: not s.pods)
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.passes(10)
    assert s.phase == "Queued" and not kueue.workloads()
    message = conditions(s)["Suspended"]["message"]
    assert message.startswith(
        "the job requests no quota from queue team until spec.podTemplate is corrected: spec.podTemplate.spec"
    )
    s.change_spec({"podTemplate": {}})
    await s.until_phase("Complete")


async def test_a_job_suspended_by_its_user_holds_no_quota() -> None:
    s, kueue = await with_quota(steps=60)
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.until(lambda: s.phase == "Suspended" and not kueue.workloads())
    await s.passes(5)
    assert not kueue.workloads() and "queue" not in s.status and "Admitted" not in conditions(s)
    await s.resumed("Complete")


async def test_if_its_workload_is_deleted_a_job_ends_its_pods_and_requests_quota_again() -> None:
    s, kueue = await with_quota(steps=60)
    [name] = kueue.workloads()
    s.store.delete("Workload", name)
    await s.until_phase("Queued")
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0


async def test_settings_from_the_flavor_are_in_every_pod() -> None:
    s, _ = queued(steps=60)
    await s.until_phase("Queued")

    def with_flavor(workload: Json) -> None:
        update = {"nodeSelector": {"pool": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
        updates = [{"name": name, **update} for name in ("node", "coordinator")]
        workload.setdefault("status", {})["admissionChecks"] = [
            {"name": "c", "state": "Ready", "podSetUpdates": updates}
        ]

    [workload] = s.store.all("Workload")
    with_flavor(workload)
    await s.until_phase("Running")
    s.force_delete("job-1-0")
    await s.until(lambda: s.phase == "Running" and "job-1-1" in s.pods)
    for pod in s.pods.values():
        assert pod.body["spec"]["nodeSelector"]["pool"] == "spot"
        assert {"key": "spot", "operator": "Exists"} in pod.body["spec"]["tolerations"]


# --- a different size


async def test_a_job_that_grows_trains_at_its_old_size_until_there_is_quota() -> None:
    s, kueue = await with_quota(pods=2, steps=200)
    s.change_spec({"nodes": 3})
    await s.passes(20)
    assert s.status["nodes"]["display"] == "2/3" and s.phase == "Running" and s.status["restarts"]["total"] == 0
    admitted = conditions(s)["Admitted"]
    assert (admitted["status"], admitted["reason"]) == ("True", "Growing")
    assert "2 pods; waits in queue team for the quota of 3 pods: insufficient" in admitted["message"]
    assert len(s.nodes()) == 2 and len(kueue.workloads()) == 2
    kueue.pods = 3
    await s.until(lambda: s.status["nodes"]["display"] == "3/3" and s.phase == "Running")
    await s.passes(3)
    assert len(kueue.workloads()) == 1 and kueue.using() == 3
    assert s.status["restarts"]["counted"] == 0 and s.status["rendezvous"]["generation"] == 0


async def test_a_job_that_grows_keeps_its_spares_until_there_is_quota() -> None:
    s, kueue = await with_quota({"spares": 1}, pods=3, steps=10**6)
    s.change_spec({"nodes": 4})
    await s.passes(100)
    assert s.status["nodes"]["display"] == "2/4 +1" and s.phase == "Running" and s.status["restarts"]["total"] == 0
    assert "Scaled" not in events(s), "nothing has changed yet"
    kueue.pods = 5
    await s.until(lambda: s.status["nodes"]["display"] == "4/4 +1" and s.phase == "Running")
    [scaled] = [e.message for e in s.cluster.events if e.reason == "Scaled"]
    assert scaled == "spec.nodes changed from 2 to 4"


async def test_a_job_that_shrinks_releases_quota_without_a_stop() -> None:
    s, kueue = await with_quota({"nodes": 3}, pods=3, steps=200)
    s.change_spec({"nodes": 2})
    await s.until(lambda: s.status["nodes"]["display"] == "2/2" and s.phase == "Running" and kueue.using() == 2)
    s.change_spec({"nodes": 3})
    await s.until(lambda: s.status["nodes"]["display"] == "3/3" and kueue.using() == 3)
    assert s.status["restarts"]["counted"] == 0 and s.status["rendezvous"]["generation"] == 0


async def test_a_scale_up_reverted_before_its_admission_leaves_nothing_behind() -> None:
    s, kueue = await with_quota(pods=2, steps=200)
    [first] = kueue.workloads()
    s.change_spec({"nodes": 3})
    await s.passes(5)
    s.change_spec({"nodes": 2})
    await s.passes(5)
    assert list(kueue.workloads()) == [first] and conditions(s)["Admitted"]["reason"] == "Admitted"


async def test_a_scale_up_reverted_during_its_admission_leaves_the_job_with_quota() -> None:
    """Kueue has finished the first Workload, but not yet admitted its replacement."""
    s, kueue = await with_quota(pods=3, steps=400)
    [first] = kueue.workloads()
    s.change_spec({"nodes": 3})
    await s.until(lambda: kueue.holds(kueue.workloads()[first], "Finished"))
    assert len(kueue.workloads()) == 2 and kueue.using() == 0
    s.change_spec({"nodes": 2})
    await s.until(lambda: s.status["nodes"]["display"] == "2/2" and s.phase == "Running" and kueue.using() == 2)
    assert s.status["restarts"]["counted"] == 0 and s.status["rendezvous"]["generation"] == 0


async def test_a_waiting_job_requests_quota_for_its_current_spec() -> None:
    s, _kueue = queued({"nodes": 3}, pods=2)
    await s.passes(5)
    assert s.phase == "Queued"
    s.change_spec({"nodes": 2})
    await s.until_phase("Complete")


async def test_a_change_of_resources_needs_new_quota() -> None:
    s, kueue = await with_quota(steps=100)
    kueue.pods = 0
    s.change_spec({"resources": {"requests": {"cpu": "2"}}})
    await s.until_phase("Queued")
    await s.passes(60)
    assert not [p for p in s.nodes() if not p.ended] and kueue.using() == 0
    kueue.pods = 2
    await s.until_phase("Complete")
    assert s.status["restarts"]["counted"] == 0


# --- labels, and what the cluster serves


async def test_a_waiting_job_may_change_its_queue() -> None:
    s, kueue = queued(pods=1)
    await s.passes(5)
    s.job_body["metadata"]["labels"][QUEUE_LABEL] = "other"
    await s.passes(5)
    [workload] = kueue.workloads().values()
    assert workload["spec"]["queueName"] == "other"


@pytest.mark.parametrize("changed", [QUEUE_LABEL, PRIORITY_LABEL, "scheduling"])
async def test_a_job_resumed_while_its_pods_end_requests_quota_for_its_new_spec(changed: str) -> None:
    s, kueue = queued(steps=10**6)
    if changed == "scheduling":
        del s.job_body["metadata"]["labels"][PRIORITY_LABEL]
    await s.until_phase("Running")
    [first] = kueue.workloads().values()
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.one_pass()
    assert any(not p.ended for p in s.nodes())
    if changed == "scheduling":
        s.change_spec({"scheduling": {"priorityClassName": "other"}})
    else:
        s.job_body["metadata"]["labels"][changed] = "other"
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.one_pass()
    await s.until_phase("Running")
    [workload] = kueue.workloads().values()
    assert workload["metadata"]["uid"] != first["metadata"]["uid"]
    asked = workload["spec"]["queueName"], workload["spec"]["priorityClassRef"]["name"]
    assert asked[changed != QUEUE_LABEL] == "other" and s.status["restarts"]["total"] == 0


async def test_quota_is_revoked_by_the_queue_that_granted_it() -> None:
    s, kueue = await with_quota(steps=10**6)
    s.job_body["metadata"]["labels"][QUEUE_LABEL] = "other"
    kueue.pods = 0
    kueue.evict()
    await s.until_phase("Queued")
    [evicted] = [e.message for e in s.cluster.events if e.reason == "Evicted"]
    assert evicted.startswith("queue team has withdrawn the quota: preempted")
    await s.passes(60)
    assert conditions(s)["Suspended"]["message"].startswith("waits in queue other for the quota of 2 pods")


async def test_a_queue_label_does_not_stop_a_job_that_runs_without_a_queue() -> None:
    s = Simulation({}, steps=1000)
    s.cluster.serves_queues = True
    await s.until_phase("Running")
    Kueue(s, 0)
    await s.passes(10)
    assert s.phase == "Running" and not list(s.store.all("Workload"))


async def test_removing_the_queue_label_lets_a_waiting_job_run() -> None:
    s, kueue = queued(pods=0)
    await s.passes(5)
    s.job_body["metadata"]["labels"] = {}
    await s.until_phase("Complete")
    assert not kueue.workloads()


async def test_a_running_job_keeps_its_quota_when_its_label_is_removed() -> None:
    s, kueue = await with_quota(steps=10**6)
    s.job_body["metadata"]["labels"] = {}
    s.change_spec({"nodes": 3})
    await s.passes(10)
    assert kueue.using() == 2 and s.status["nodes"]["ready"] == 2, "no other job gets the quota that it uses"
    assert conditions(s)["Admitted"]["message"].endswith("was removed, so the job does not request a different quota")
    kueue.evict()
    await s.until(lambda: not kueue.workloads(), limit=60)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["ready"] == 3)
    assert "Admitted" not in conditions(s) and "Evicted" in events(s)
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.passes(60)
    assert s.phase == "Suspended" and not s.status.get("queue")


async def test_an_evicted_job_without_its_label_keeps_its_quota_while_its_pods_end() -> None:
    s, kueue = await with_quota(steps=10**6)
    s.job_body["metadata"]["labels"] = {}
    old = s.pods["job-1-0"]
    s.cut(old.node)
    kueue.evict()
    held_while_a_pod_ends = []
    while old.name in s.pods and not old.ended:
        await s.one_pass()
        held_while_a_pod_ends.append(kueue.using())
        s.advance(1)
    assert len(held_while_a_pod_ends) > 5 and set(held_while_a_pod_ends[:-1]) == {2}
    await s.until(lambda: not kueue.workloads())


async def test_a_waiting_job_leaves_the_queue_when_its_class_is_removed() -> None:
    s, kueue = queued({"className": "h100"}, pods=0)
    s.cluster.classes = JobClasses.read({"h100": {}})
    await s.passes(5)
    [first] = kueue.workloads().values()
    s.cluster.restart()
    s.cluster.classes = JobClasses.read({})
    await s.passes(5)
    assert not kueue.workloads() and conditions(s)["Suspended"]["reason"] == "ClassMissing"
    s.cluster.restart()
    s.cluster.classes = JobClasses.read({"h100": {}})
    await s.passes(5)
    [again] = kueue.workloads().values()
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    kueue.pods = 2
    await s.until_phase("Complete")


async def test_without_kueue_a_job_in_a_queue_waits_and_reports_it() -> None:
    s, kueue = queued(steps=1000)
    s.cluster.serves_queues = False
    await s.passes(5)
    assert s.phase == "Queued" and not s.pods
    assert conditions(s)["Suspended"]["reason"] == "QueueNotServed"
    s.cluster.serves_queues = True
    await s.until_phase("Running")
    s.cluster.serves_queues = False
    await s.passes(10)
    assert s.phase == "Running" and len(kueue.workloads()) == 1, "a running job is left alone"


async def test_a_job_managed_by_another_controller_is_left_alone() -> None:
    s, kueue = queued({"managedBy": "kueue.x-k8s.io/multikueue"})
    await s.passes(10)
    assert not s.pods and not kueue.workloads() and s.status == {"schema": 1} and not s.cluster.actions


async def test_a_job_whose_managed_by_field_names_this_operator_runs() -> None:
    s = Simulation({"managedBy": "ddpjob.io/operator"}, steps=20)
    await s.until_phase("Complete")


# --- an elastic job, which may run with some of its nodes

ELASTIC: Json = {"nodes": 4, "elastic": {"minNodes": 2}}


def display(s: Simulation, shown: str) -> bool:
    return bool(s.phase == "Running" and s.status["nodes"]["display"] == shown)


async def test_an_elastic_job_starts_with_the_nodes_that_have_quota_and_grows_later() -> None:
    s, kueue = queued(ELASTIC, pods=1, steps=10**6)
    await s.passes(5)
    assert s.phase == "Queued" and not s.pods
    waits = conditions(s)["Suspended"]["message"]
    assert waits == "waits in queue team for the quota of 4 pods, or at least 2: insufficient unused quota for cpu"
    kueue.pods = 2
    await s.until(lambda: display(s, "2/4"))
    assert len(s.nodes()) == 2 and kueue.using() == 2
    assert conditions(s)["Admitted"]["message"] == (
        "cluster-queue has granted the quota of 2 pods; waits in queue team for the quota of 2 more pods: "
        "insufficient unused quota for cpu"
    )
    for pods in (3, 4):
        kueue.pods = pods
        await s.until(lambda: display(s, f"{len(s.nodes())}/4") and kueue.using() == kueue.pods == len(s.nodes()))
    assert conditions(s)["Admitted"]["reason"] == "Admitted" and len(kueue.workloads()) == 3
    assert s.status["restarts"]["counted"] == 0 and s.status["rendezvous"]["generation"] == 0
    assert {"job-0-0", "job-1-0"} <= s.pods.keys()
    scaled = [e.message for e in s.cluster.events if e.reason == "Scaled"]
    assert scaled[-1] == "the size changed from 3 nodes to 4 nodes; the queue has granted 4 pods"


async def test_an_elastic_job_uses_quota_for_nodes_before_spares() -> None:
    s, _ = await with_quota({**ELASTIC, "spares": 1}, pods=3, steps=10**6)
    assert s.status["nodes"]["display"] == "3/4"


async def test_an_elastic_job_that_loses_additional_quota_shrinks_and_keeps_training() -> None:
    s, kueue = queued(ELASTIC, pods=2, steps=10**6)
    await s.until(lambda: display(s, "2/4"))
    kueue.pods = 4
    await s.until(lambda: display(s, "4/4"))
    first, added = [p.name for p in s.nodes()][:2], [p.name for p in s.nodes()][2:]
    kueue.taken = 2
    kueue.evict(kueue.additional())
    held_while_pods_end = []
    while any(name in s.pods and not s.pods[name].ended for name in added):
        await s.one_pass()
        held_while_pods_end.append(kueue.using())
        s.advance(0.1)
    assert set(held_while_pods_end) == {4}, "the pods still use the quota"
    await s.until(lambda: display(s, "2/4") and kueue.using() == 2)
    assert [p.name for p in s.nodes()] == first and s.status["restarts"]["counted"] == 0
    assert "Evicted" not in events(s) and s.status["rendezvous"]["generation"] == 0
    uid = kueue.additional()["metadata"]["uid"]
    kueue.taken = 0
    await s.until(lambda: display(s, "4/4"))
    assert kueue.additional()["metadata"]["uid"] == uid, "it keeps its place in the queue"


async def test_an_elastic_job_that_loses_its_first_quota_stops_and_starts_again() -> None:
    s, kueue = queued(ELASTIC, pods=2, steps=10**6)
    await s.until(lambda: display(s, "2/4"))
    kueue.pods = 4
    await s.until(lambda: display(s, "4/4"))
    first = next(w for w in kueue.workloads().values() if w is not kueue.additional())
    kueue.taken = 1
    kueue.evict(first)
    await s.until_phase("Queued")
    await s.until(lambda: kueue.using() == 0)
    assert "Evicted" in events(s) and not [p for p in s.nodes() if not p.ended]
    await s.until(lambda: display(s, "3/4"))
    assert first["metadata"]["uid"] in [w["metadata"]["uid"] for w in kueue.workloads().values()]


async def test_a_smaller_elastic_job_releases_its_additional_quota_first() -> None:
    s, kueue = queued(ELASTIC, pods=2, steps=10**6)
    await s.until(lambda: display(s, "2/4"))
    kueue.pods = 4
    await s.until(lambda: display(s, "4/4"))
    for nodes in (3, 2):
        s.change_spec({"nodes": nodes})
        await s.until(lambda: display(s, f"{nodes}/{nodes}") and kueue.using() == nodes == len(s.nodes()))  # noqa: B023
    s.change_spec({"nodes": 1, "elastic": {"minNodes": 1}})
    await s.until(lambda: display(s, "1/1") and kueue.using() == 1)
    assert s.status["restarts"]["counted"] == 0 and s.status["rendezvous"]["generation"] == 0


async def test_a_partial_grant_below_a_new_min_nodes_stops_the_job() -> None:
    s, kueue = await with_quota(ELASTIC, pods=2, steps=10**6)
    s.change_spec({"elastic": {"minNodes": 3}})
    await s.until_phase("Queued")
    await s.until(lambda: kueue.using() == 0)
    assert conditions(s)["Suspended"]["message"].startswith(
        "waits in queue team for the quota of 4 pods, or at least 3"
    )


# --- topology


def racks(s: Simulation) -> list[str]:
    """Return the racks of the slots' pods, in order of their index."""
    pods = sorted(s.nodes(), key=lambda pod: pod.index)
    return [pod.body["spec"].get("nodeSelector", {}).get("rack", "") for pod in pods]


async def test_pods_follow_the_topology_that_the_queue_assigns() -> None:
    s, kueue = queued(ELASTIC, pods=3, steps=10**6)
    kueue.racks = ["a", "a", "b", "c"]
    await s.until(lambda: display(s, "3/4"))
    assert racks(s) == ["a", "a", "b"]
    s.force_delete("job-1-0")
    await s.until(lambda: display(s, "3/4") and "job-1-1" in s.pods)
    assert racks(s) == ["a", "a", "b"], "a replacement runs in the rack of the lost pod"
    kueue.pods = 4
    await s.until(lambda: display(s, "4/4"))
    assert racks(s) == ["a", "a", "b", "c"]


async def test_a_job_that_requires_a_single_domain_does_not_grow_into_another() -> None:
    template = {"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}}
    s, kueue = queued({**ELASTIC, "podTemplate": template}, pods=2, steps=10**6)
    await s.until(lambda: display(s, "2/4"))
    [workload] = kueue.workloads().values()
    assert workload["spec"]["podSets"][0]["topologyRequest"]["required"] == "rack"
    kueue.pods = 4
    await s.passes(10)
    assert display(s, "2/4") and list(kueue.workloads().values()) == [workload]
    assert "the job does not grow, because" in conditions(s)["Admitted"]["message"]


# --- the operator's death


async def admitted_and_done(s: Simulation) -> None:
    kueue = Kueue(s, 2)
    kueue.taken = 1
    await s.until(lambda: s.phase == "Queued")
    kueue.taken = 0
    await s.until_phase("Complete")
    await s.passes(5)
    assert kueue.using() == 0


async def evicted_and_resumed(s: Simulation) -> None:
    kueue = Kueue(s, 2)
    await s.until_phase("Running")
    kueue.taken = 1
    kueue.evict()
    await s.until(lambda: s.phase == "Queued" and kueue.using() == 0)
    kueue.taken = 0
    await s.until_phase("Complete")


async def grown_while_admitted(s: Simulation) -> None:
    s.training.steps = 60
    kueue = Kueue(s, 3)
    await s.until_phase("Running")
    s.change_spec({"nodes": 3})
    await s.until(lambda: s.status["nodes"]["display"] == "3/3" and kueue.using() == 3 and len(kueue.workloads()) == 1)
    await s.until_phase("Complete")


async def suspended_in_a_queue(s: Simulation) -> None:
    kueue = Kueue(s, 2)
    await s.until_phase("Running")
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.until(lambda: s.phase == "Suspended" and not kueue.workloads())
    await s.resumed("Complete")


async def partly_admitted_then_grown_and_shrunk(s: Simulation) -> None:
    s.training.steps = 120
    s.change_spec({**ELASTIC, "nodes": 3})
    kueue = Kueue(s, 2)
    await s.until(lambda: display(s, "2/3"))
    kueue.pods = 3
    await s.until(lambda: display(s, "3/3"))
    kueue.taken = 1
    kueue.evict(kueue.additional())
    await s.until(lambda: display(s, "2/3") and kueue.using() == 2)
    kueue.taken = 0
    await s.until_phase("Complete")
    await s.passes(5)
    assert kueue.using() == 0


SCENARIOS = [
    *(admitted_and_done, evicted_and_resumed, grown_while_admitted, suspended_in_a_queue),
    partly_admitted_then_grown_and_shrunk,
]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_with_a_queue_the_operator_may_die_before_or_after_any_call(scenario: crashes.Scenario) -> None:
    await crashes.die_everywhere(scenario, "Dedicated")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_with_a_queue_the_operator_may_die_at_every_third_call(scenario: crashes.Scenario) -> None:
    undisturbed = await crashes.run(scenario, set(), "Dedicated")
    disturbed = await crashes.run(scenario, set(range(1, 400, 3)), "Dedicated")
    assert crashes.outcome(disturbed) == crashes.outcome(undisturbed)
