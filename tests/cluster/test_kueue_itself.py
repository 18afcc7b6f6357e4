"""Jobs in queues of the real Kueue: quota, priority, stops, crashes, resizing and deletion.

Skipped unless DDPJOB_TEST_KUEUE is set, because building Kueue's manager takes a long time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import kueue_crds
import kueue_manager
import pytest
from jobs import FAST, Jobs, Json, job, steps_job
from operator_process import OperatorProcess, install_crd
from testcluster.cluster import Cluster
from testcluster.settings import Settings

GPU = "example.com/gpu"
ONE_GPU: Json = {"gpusPerNode": 1, "gpuResource": GPU, "scheduling": {"onePodPerNode": False}}
TRAINING: Json = {**ONE_GPU, "recovery": FAST}
WORKLOAD = "workloads.kueue.x-k8s.io"
LABELS = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"


@pytest.fixture(scope="module", autouse=True)
def kueue(cluster: Cluster, cluster_machine: Settings) -> Iterator[None]:
    """Install Kueue before the operator, which looks for Workloads when it starts."""
    manager = kueue_manager.program(cluster_machine)
    install_crd(cluster)
    kueue_manager.install(cluster, manager)
    for node in cluster.nodes[:2]:
        cluster.set_gpus(node, 8, GPU)
    yield
    for node in cluster.nodes[:2]:
        cluster.set_gpus(node, 0, GPU)
    kueue_manager.remove(cluster, manager)


@dataclass
class Queue:
    """A ClusterQueue with some GPUs of the first Kubernetes node, its flavor, and the LocalQueue
    `team`.
    """

    jobs: Jobs
    host: str

    def offer(self, gpus: int, local: str = "team", flavor_spec: Json | None = None, **spec: object) -> None:
        name, quota = self.jobs.namespace, {"cpu": 8, "memory": "8Gi", GPU: gpus}
        flavor = {"name": name, "resources": [{"name": key, "nominalQuota": it} for key, it in quota.items()]}
        rules = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": [*quota], "flavors": [flavor]}],
        }
        queue = {"apiVersion": kueue_crds.API, "kind": "ClusterQueue", "metadata": {"name": name}}
        team = {"apiVersion": kueue_crds.API, "kind": "LocalQueue", "metadata": {"name": local}}
        made = kueue_crds.flavor(name, {"kubernetes.io/hostname": self.host})
        self.jobs.cluster.apply(
            {**made, "spec": flavor_spec} if flavor_spec else made,
            {**queue, "spec": {**rules, **spec}},
            {**team, "spec": {"clusterQueue": name}},
            namespace=name,
        )

    def priority(self, suffix: str, value: int) -> str:
        name = f"{self.jobs.namespace}-{suffix}"
        kind = {"apiVersion": kueue_crds.API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
        self.jobs.cluster.apply({**kind, "value": value})
        return name

    def stop(self, policy: str) -> None:
        """Set the stop policy. `Hold` admits no further jobs, `HoldAndDrain` also evicts admitted
        ones, and `None` opens the queue.
        """
        patch = json.dumps({"spec": {"stopPolicy": policy}})
        self.jobs.cluster.kubectl("patch", "clusterqueue", self.jobs.namespace, "--type=merge", f"--patch={patch}")

    def used(self) -> int:
        """Return the number of GPUs that Kueue counts as reserved."""
        status = self.jobs.cluster.kubectl_json("get", "clusterqueue", self.jobs.namespace).get("status", {})
        [flavor] = status.get("flavorsReservation") or [{"resources": []}]
        return next((int(it["total"]) for it in flavor["resources"] if it["name"] == GPU), 0)


@pytest.fixture
def queue(jobs: Jobs, cluster: Cluster) -> Iterator[Queue]:
    yield Queue(jobs, cluster.nodes[0])
    jobs.kubectl("delete", "ddpjobs", "--all")
    jobs.wait("nothing is left", lambda: not workloads(jobs))
    for suffix in ("low", "high"):
        cluster.kubectl("delete", "workloadpriorityclass", f"{jobs.namespace}-{suffix}", "--ignore-not-found")
    cluster.kubectl(
        "delete", "clusterqueue,resourceflavor,topology.kueue.x-k8s.io", jobs.namespace, "--ignore-not-found"
    )


def queued(manifest: Json, priority: str = "", queue: str = "team") -> Json:
    values = (queue, priority) if priority else (queue,)
    manifest["metadata"]["labels"] = dict(zip(LABELS, values, strict=False))
    return manifest


def sleeping(name: str, seconds: int = 1000, **spec: object) -> Json:
    return job(name, command=["sleep", str(seconds)], **{**ONE_GPU, **spec})


def until_let(name: str, folder: Path) -> Json:
    """Return a job that runs until `folder/end` exists."""
    storage = {"checkpoints": {"hostPath": str(folder), "shared": True}}
    command = ["sh", "-c", "until test -e /checkpoints/end; do sleep 0.5; done"]
    return job(name, command=command, storage=storage, **ONE_GPU)


def workloads(jobs: Jobs) -> dict[str, Json]:
    found = jobs.cluster.kubectl_json("get", WORKLOAD, "--namespace", jobs.namespace)
    return {w["metadata"]["name"]: w for w in found["items"]}


def workload_of(jobs: Jobs, name: str) -> Json:
    """Return the unfinished Workload of a job, or an empty mapping if there is none."""
    own = [w for key, w in workloads(jobs).items() if key.startswith(f"{name}-queue-")]
    return next((w for w in own if conditions(w).get("Finished", ("", ""))[0] != "True"), {})


def conditions(workload: Json) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in workload.get("status", {}).get("conditions", ())}


def alive(jobs: Jobs, name: str) -> list[str]:
    pods = {**jobs.pods(), **jobs.pods("coordinator")}
    ended = ("Succeeded", "Failed")
    return [pod for pod, it in pods.items() if pod.startswith(f"{name}-") and it["status"]["phase"] not in ended]


def says(jobs: Jobs, name: str, words: str, kind: str = "Suspended") -> Callable[[], bool]:
    return lambda: words in jobs.condition(name, kind).get("message", "")


def test_a_job_that_fits_runs_on_its_flavor_and_the_next_job_waits_for_its_end(
    jobs: Jobs, queue: Queue, tmp_path: Path
) -> None:
    queue.offer(gpus=3)
    jobs.apply(queued(until_let("first", tmp_path)))
    jobs.wait_phase("first", "Running")
    for pod in [*jobs.pods().values(), *jobs.pods("coordinator").values()]:
        assert pod["spec"]["nodeName"] == queue.host
        assert pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] == queue.host
    jobs.wait(
        "Kueue is notified", lambda: conditions(workload_of(jobs, "first")).get("PodsReady") == ("True", "Started")
    )
    jobs.wait("its quota is taken", lambda: queue.used() == 2)
    jobs.apply(queued(sleeping("second", 1)))
    jobs.wait("the reason is shown", says(jobs, "second", f"insufficient unused quota for {GPU}"))
    assert jobs.status("second")["phase"] == "Queued" and "Queued" in jobs.kubectl("get", "ddpjob", "second")
    assert not alive(jobs, "second")
    (tmp_path / "end").touch()
    jobs.wait_phase("second", "Complete", timeout=180)
    assert jobs.status("first")["phase"] == "Complete"
    assert {conditions(w)["Finished"] for w in workloads(jobs).values()} == {("True", "Succeeded")}
    jobs.wait("all quota is free", lambda: queue.used() == 0)


def test_a_job_whose_queue_is_missing_or_too_small_reports_it(jobs: Jobs, queue: Queue) -> None:
    jobs.apply(queued(sleeping("early")))
    jobs.wait("no queue", says(jobs, "early", "LocalQueue team doesn't exist"))
    queue.offer(gpus=1)
    jobs.wait("too large", says(jobs, "early", "insufficient quota for"))
    queue.offer(gpus=2)
    jobs.wait_phase("early", "Running")


def test_a_job_with_a_higher_priority_takes_the_quota_and_the_other_resumes_later(
    jobs: Jobs, queue: Queue, tmp_path: Path
) -> None:
    queue.offer(gpus=2)
    low, high = queue.priority("low", 1), queue.priority("high", 100)
    storage = {"checkpoints": {"hostPath": str(tmp_path), "shared": True}}
    saving = steps_job("low", 100_000, "--saved=/checkpoints/last.pt", storage=storage, **TRAINING)
    jobs.apply(queued(saving, low))
    jobs.wait_phase("low", "Running")
    jobs.wait("some steps", lambda: jobs.step("low") > 20)
    uid = workload_of(jobs, "low")["metadata"]["uid"]
    jobs.apply(queued(until_let("high", tmp_path / "high"), high))
    jobs.wait_phase("low", "Queued")
    reached = jobs.step("low")
    jobs.wait_phase("high", "Running")
    assert not alive(jobs, "low")
    assert workload_of(jobs, "low")["metadata"]["uid"] == uid, "the evicted job's place in the queue is kept"
    (tmp_path / "high" / "end").touch()
    jobs.wait_phase("high", "Complete", timeout=180)
    jobs.wait_phase("low", "Running")
    log = "".join(jobs.kubectl("logs", pod) for pod in alive(jobs, "low") if "coordinator" not in pod)
    first = int(log.split("begins at step ")[1].split()[0])
    assert first >= reached > 20
    assert jobs.status("low").get("restarts", {}).get("counted", 0) == 0


def test_stopping_a_queue_ends_the_pods_and_reopening_it_resumes_the_job(
    jobs: Jobs, queue: Queue, tmp_path: Path
) -> None:
    queue.offer(gpus=2)
    storage = {"checkpoints": {"hostPath": str(tmp_path), "shared": True}}
    jobs.apply(queued(steps_job("drained", 100_000, "--saved=/checkpoints/last.pt", storage=storage, **TRAINING)))
    jobs.wait_phase("drained", "Running")
    jobs.wait("some steps", lambda: jobs.step("drained") > 20)
    queue.stop("Hold")
    jobs.apply(queued(sleeping("held", 1)))
    jobs.wait("the reason is shown", says(jobs, "held", "ClusterQueue"))
    assert jobs.status("drained")["phase"] == "Running", "Hold keeps admitted jobs running"
    queue.stop("HoldAndDrain")
    jobs.wait_phase("drained", "Queued")
    reached = jobs.step("drained")
    jobs.wait("its pods are gone", lambda: not alive(jobs, "drained"))
    jobs.wait("all quota is free", lambda: queue.used() == 0)
    jobs.kubectl("delete", "ddpjob", "held")
    queue.stop("None")
    jobs.wait_phase("drained", "Running")
    jobs.wait("it continues", lambda: jobs.step("drained") > reached > 20)
    log = "".join(jobs.kubectl("logs", pod) for pod in alive(jobs, "drained") if "coordinator" not in pod)
    assert int(log.split("begins at step ")[1].split()[0]) >= reached
    assert jobs.status("drained").get("restarts", {}).get("counted", 0) == 0


def test_no_step_is_lost_or_repeated_if_the_operator_and_kueue_die(
    jobs: Jobs, queue: Queue, operator: OperatorProcess, tmp_path: Path
) -> None:
    queue.offer(gpus=2)
    low, high = queue.priority("low", 1), queue.priority("high", 100)
    storage = {"checkpoints": {"hostPath": str(tmp_path), "shared": True}}

    # Each stage begins without the operator, and Kueue's manager dies during the stage.
    def step(change: Callable[[], object]) -> None:
        operator.kill()
        change()
        operator.start()
        kueue_manager.kill(jobs.cluster)

    saving = steps_job("low", 100_000, "--saved=/checkpoints/last.pt", storage=storage, **TRAINING)
    step(lambda: jobs.apply(queued(saving, low)))
    jobs.wait_phase("low", "Running")
    jobs.wait("some steps", lambda: jobs.step("low") > 20)
    step(lambda: jobs.apply(queued(until_let("high", tmp_path / "high"), high)))
    jobs.wait_phase("low", "Queued")
    reached = jobs.step("low")
    jobs.wait_phase("high", "Running")
    assert not alive(jobs, "low") and queue.used() == 2
    step((tmp_path / "high" / "end").touch)
    jobs.wait_phase("high", "Complete", timeout=180)
    jobs.wait_phase("low", "Running")
    jobs.wait("it continues", lambda: jobs.step("low") > reached > 20)
    assert jobs.status("low").get("restarts", {}).get("counted", 0) == 0
    step(lambda: jobs.kubectl("delete", "ddpjob", "low"))
    jobs.wait("no quota is taken", lambda: queue.used() == 0)
    assert all(conditions(it)["Finished"] == ("True", "Succeeded") for it in workloads(jobs).values())


def test_a_job_in_a_queue_is_resized_in_place(jobs: Jobs, queue: Queue) -> None:
    queue.offer(gpus=3)
    elastic = {"elastic": {"minNodes": 1, "maxNodes": 8}, "nodes": 1}
    jobs.apply(queued(steps_job("sized", 100_000, **{**TRAINING, **elastic})))
    jobs.wait_phase("sized", "Running")
    jobs.kubectl("scale", "ddpjob", "sized", "--replicas=2")
    jobs.wait("two nodes", lambda: jobs.status("sized").get("nodes", {}).get("display") == "2/2")
    jobs.wait("their quota alone", lambda: queue.used() == 2)
    jobs.wait_phase("sized", "Running")
    assert jobs.status("sized")["slots"][0]["attempt"] == 0, "the first pod has survived"
    jobs.kubectl("scale", "ddpjob", "sized", "--replicas=4")
    jobs.wait("it waits for more", says(jobs, "sized", f"insufficient unused quota for {GPU}", "Admitted"))
    assert jobs.condition("sized", "Admitted")["reason"] == "Growing" and jobs.status("sized")["phase"] == "Running"
    jobs.kubectl("scale", "ddpjob", "sized", "--replicas=1")
    jobs.wait("one node", lambda: len(alive(jobs, "sized")) == 2 and jobs.status("sized")["phase"] == "Running")
    jobs.wait("its quota alone", lambda: queue.used() == 1)
    assert jobs.status("sized")["slots"][0]["attempt"] == 0 and jobs.status("sized")["restarts"]["counted"] == 0


def test_an_elastic_job_releases_the_unneeded_part_of_its_first_quota(jobs: Jobs, queue: Queue) -> None:
    """The smaller request is granted in place of the first, because the queue has no room for both."""
    queue.offer(gpus=3)
    jobs.apply(queued(steps_job("less", 100_000, **{**TRAINING, "nodes": 3, "elastic": {"minNodes": 1}})))
    jobs.wait_phase("less", "Running")
    jobs.kubectl("scale", "ddpjob", "less", "--replicas=2")
    jobs.wait("two nodes", shows(jobs, "less", "2/2"))
    jobs.wait("their quota alone", lambda: queue.used() == 2)
    status = jobs.status("less")
    assert [slot["attempt"] for slot in status["slots"]] == [0, 0] and status["restarts"]["counted"] == 0


ELASTIC: Json = {**TRAINING, "nodes": 4, "elastic": {"minNodes": 2, "maxNodes": 8}}


def shows(jobs: Jobs, name: str, display: str) -> Callable[[], bool]:
    """Return whether the job runs with this number of nodes."""
    return lambda: (
        jobs.status(name).get("phase") == "Running" and jobs.status(name).get("nodes", {}).get("display") == display
    )


def test_an_elastic_job_starts_partially_grows_and_releases_only_added_nodes(
    jobs: Jobs, queue: Queue, tmp_path: Path
) -> None:
    queue.offer(gpus=4)
    low, high = queue.priority("low", 1), queue.priority("high", 100)
    folders = {name: tmp_path / name for name in ("first", "urgent")}
    for folder in folders.values():
        folder.mkdir()
    jobs.apply(queued(until_let("first", folders["first"]), low))
    jobs.wait_phase("first", "Running")
    jobs.apply(queued(steps_job("part", 100_000, **ELASTIC), low))
    jobs.wait("it starts with minNodes", shows(jobs, "part", "2/4"))
    assert queue.used() == 4 and "2/4" in jobs.kubectl("get", "ddpjob", "part")
    jobs.wait("it asks for more", says(jobs, "part", "for the quota of 2 more pods", "Admitted"))

    (folders["first"] / "end").touch()
    jobs.wait("it grows", shows(jobs, "part", "4/4"))
    jobs.wait("with quota", lambda: queue.used() == 4)

    jobs.apply(queued(until_let("urgent", folders["urgent"]), high))
    jobs.wait("it shrinks", shows(jobs, "part", "2/4"))
    jobs.wait_phase("urgent", "Running")
    reached = jobs.step("part")
    jobs.wait("it trains", lambda: jobs.step("part") > reached)
    (folders["urgent"] / "end").touch()
    jobs.wait("it grows again", shows(jobs, "part", "4/4"))
    status = jobs.status("part")
    assert [slot["attempt"] for slot in status["slots"][:2]] == [0, 0], "the first pods have survived"
    assert status["restarts"]["counted"] == 0 and status["rendezvous"]["generation"] == 0
    jobs.kubectl("delete", "ddpjob", "part")
    jobs.wait("all quota is free", lambda: queue.used() == 0)


RACK = "example.com/rack"


@pytest.fixture
def two_racks(jobs: Jobs, cluster: Cluster) -> Iterator[None]:
    """Yield two Kubernetes nodes in different racks with 2 GPUs each, and a Topology of racks."""
    levels = [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]
    topology = {"apiVersion": kueue_crds.API, "kind": "Topology", "metadata": {"name": jobs.namespace}}
    cluster.apply({**topology, "spec": {"levels": levels}})
    for number, node in enumerate(cluster.nodes[:2]):
        cluster.kubectl("label", "node", node, f"{RACK}=r{number}", "example.com/pool=racks", "--overwrite")
        cluster.set_gpus(node, 2, GPU)
    yield
    for node in cluster.nodes[:2]:
        cluster.kubectl("label", "node", node, f"{RACK}-", "example.com/pool-")
        cluster.set_gpus(node, 8, GPU)


def test_pods_follow_the_topology_that_kueue_assigns(jobs: Jobs, two_racks: None, queue: Queue) -> None:
    queue.offer(gpus=4, flavor_spec={"nodeLabels": {"example.com/pool": "racks"}, "topologyName": jobs.namespace})
    manifest = queued(steps_job("placed", 100_000, **{**ELASTIC, "nodes": 3}))
    meta = manifest["spec"]["podTemplate"].setdefault("metadata", {})
    meta["annotations"] = {"kueue.x-k8s.io/podset-preferred-topology": RACK}
    jobs.apply(manifest)
    jobs.wait("it runs", shows(jobs, "placed", "3/3"))
    admission = workload_of(jobs, "placed")["status"]["admission"]
    assert all("topologyAssignment" in assigned for assigned in admission["podSetAssignments"])
    pods = {**jobs.pods(), **jobs.pods("coordinator")}
    for pod in pods.values():
        assert pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] == pod["spec"]["nodeName"]
        assert not pod["spec"].get("schedulingGates")
    places = [pods[f"placed-{index}-0"]["spec"]["nodeName"] for index in range(3)]
    assert len(set(places)) == 2 and places[1] in (places[0], places[2]), "adjacent ranks share a rack"

    jobs.kill("placed-1-0")
    jobs.wait("a successor", lambda: "placed-1-1" in jobs.pods() and shows(jobs, "placed", "3/3")())
    assert jobs.pods()["placed-1-1"]["spec"]["nodeName"] == places[1], "the replacement has the lost pod's domain"

    jobs.kubectl("scale", "ddpjob", "placed", "--replicas=4")
    jobs.wait("it grows", shows(jobs, "placed", "4/4"))
    added = next(pod for name, pod in jobs.pods().items() if name.startswith("placed-3-"))
    assert added["spec"]["nodeSelector"]["kubernetes.io/hostname"] == added["spec"]["nodeName"]
    assert sorted(places.count(node) + (node == added["spec"]["nodeName"]) for node in set(places)) == [2, 2]


def test_a_deleted_job_leaves_no_workload_and_no_reserved_quota(jobs: Jobs, queue: Queue) -> None:
    queue.offer(gpus=2)
    for name in ("one", "two"):
        jobs.apply(queued(sleeping(name)))
    jobs.wait("one of them", lambda: queue.used() == 2)
    jobs.wait("both ask", lambda: len(workloads(jobs)) == 2)
    jobs.kubectl("delete", "ddpjob", "one", "two")
    jobs.wait("nothing is left", lambda: not workloads(jobs) and not jobs.pods())
    jobs.wait("all quota is free", lambda: queue.used() == 0)


def test_the_default_queue_of_a_namespace_does_not_apply_to_the_pods_of_jobs(jobs: Jobs, queue: Queue) -> None:
    queue.offer(gpus=2, local="default")
    jobs.apply(queued(sleeping("mine", 3), queue="default"))
    jobs.wait_phase("mine", "Complete")
    assert [name.rpartition("-")[0] for name in workloads(jobs)] == ["mine-queue"], "no pod requests quota on its own"
