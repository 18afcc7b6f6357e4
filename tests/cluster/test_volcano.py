"""Gangs scheduled by Volcano, with its own PodGroup definition. DDPJOB_TEST_VOLCANO adds its
scheduler and controllers.

DDPJOB_TEST_VOLCANO is a folder with its programs `scheduler` and `controller-manager`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from go_modules import folder_of
from jobs import Jobs, Json, job, steps_job
from operator_process import install_crd
from testcluster import processes
from testcluster.cluster import Cluster

VARIABLE = "DDPJOB_TEST_VOLCANO"
GROUPS, QUEUES = "podgroups.scheduling.volcano.sh", "queues.scheduling.volcano.sh"
API = "scheduling.volcano.sh/v1beta1"
QUEUE_NAME, GROUP_NAME = "scheduling.volcano.sh/queue-name", "scheduling.k8s.io/group-name"
GPU = "example.com/gpu"


@pytest.fixture(scope="module", autouse=True)
def crds(cluster: Cluster) -> Iterator[None]:
    """Install the CRDs before the operator, which checks for PodGroups when it starts."""
    folder = folder_of("volcano.sh/volcano@v1.15.0") / "config" / "crd" / "volcano" / "bases"
    install_crd(cluster)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(folder))
    processes.wait_for(
        "the API server to serve them", lambda: cluster.succeeds("get", f"{GROUPS},{QUEUES}", "--all-namespaces")
    )
    yield
    cluster.kubectl("delete", "--ignore-not-found", "--filename", str(folder), timeout=300)


@pytest.fixture
def volcano(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Run Volcano itself."""
    if not os.environ.get(VARIABLE):
        pytest.skip(
            f"{VARIABLE} is not set; write the path of a folder with Volcano's `scheduler` and `controller-manager`"
        )
    programs = Path(os.environ[VARIABLE]).resolve()
    options = [f"--kubeconfig={cluster.kubeconfig}", "--leader-elect=false", "--logtostderr", "-v=2"]
    running = []
    for name, own in (
        ("scheduler", ["--listen-address=127.0.0.1:18080"]),
        ("controller-manager", ["--listen-address=127.0.0.1:18081", "--controllers=pg-controller,queue-controller"]),
    ):
        log = (tmp_path / f"{name}.log").open("wb")
        running.append(subprocess.Popen([str(programs / name), *options, *own], stdout=log, stderr=log))
    yield
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of GPUs on each of two Kubernetes nodes."""

    def each(number: int) -> None:
        for node in cluster.nodes[:2]:
            cluster.set_gpus(node, number, GPU)

    yield each
    each(0)


def by_volcano(manifest: Json, queue: str = "", **scheduling: object) -> Json:
    manifest["spec"] |= {"scheduling": {"schedulerName": "volcano", "onePodPerNode": False, **scheduling}}
    if queue:
        manifest["spec"]["podTemplate"]["metadata"] = {"annotations": {QUEUE_NAME: queue}}
    return manifest


def with_gpus(name: str, seconds: int) -> Json:
    return job(name, command=["sleep", str(seconds)], gpusPerNode=1, gpuResource=GPU)


def groups(jobs: Jobs) -> dict[str, Json]:
    found = jobs.cluster.kubectl_json("get", GROUPS, "--namespace", jobs.namespace)
    return {group["metadata"]["name"]: group for group in found["items"]}


def group_of(pod: Json) -> str:
    return str(pod["metadata"].get("annotations", {}).get(GROUP_NAME, ""))


def test_volcanos_definition_accepts_the_pod_group_of_a_job(jobs: Jobs) -> None:
    """The API server validates strictly. No scheduler with that name runs, so the pods wait for
    one.
    """
    jobs.apply(by_volcano(steps_job("grouped", 5, spares=1), queue="team"))
    jobs.wait("its pods", lambda: {"grouped-0-0", "grouped-1-0"} <= set(jobs.pods()))
    group = groups(jobs)["grouped-gang-0"]
    assert {key: group["spec"][key] for key in ("minMember", "queue")} == {"minMember": 3, "queue": "team"}
    pods = {**jobs.pods(), **jobs.pods("coordinator")}
    assert {group_of(pod) for pod in pods.values()} == {"grouped-gang-0"} and not jobs.pods("spare")
    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"volcano"}
    jobs.kubectl("delete", "ddpjob", "grouped")
    jobs.wait("nothing is left", lambda: not groups(jobs) and not jobs.pods())


def test_one_of_two_jobs_for_volcano_runs_while_the_other_holds_no_node(
    jobs: Jobs, volcano: None, gpus: Callable[[int], None]
) -> None:
    for name in ("one", "two"):
        jobs.apply(by_volcano(with_gpus(name, 8)))
    for name in ("one", "two"):
        jobs.wait(f"the pods of {name}", lambda name=name: {f"{name}-0-0", f"{name}-1-0"} <= set(jobs.pods()))
    gpus(1)
    jobs.wait("one runs", lambda: any(jobs.status(name)["phase"] == "Running" for name in ("one", "two")))
    first, second = ("one", "two") if jobs.status("one")["phase"] == "Running" else ("two", "one")
    jobs.wait_unschedulable(second, "2 nodes with 1 GPU")
    while jobs.status(first)["phase"] == "Running":
        assert not jobs.held(second) or jobs.status(first)["phase"] != "Running"
    jobs.wait_phase(first, "Complete")
    jobs.wait_phase(second, "Complete")
    assert [jobs.status(name)["restarts"]["total"] for name in ("one", "two")] == [0, 0]


def test_a_lost_pod_is_replaced_within_the_limit_of_its_volcano_queue(
    jobs: Jobs, cluster: Cluster, volcano: None, gpus: Callable[[int], None]
) -> None:
    gpus(2)
    queue = {"apiVersion": API, "kind": "Queue", "metadata": {"name": jobs.namespace}}
    cluster.apply({**queue, "spec": {"weight": 1, "capability": {GPU: 3}}})
    try:
        steps = steps_job("lossy", 400, gpusPerNode=1, gpuResource=GPU, recovery={"mode": "Fast"}, spares=1)
        jobs.apply(by_volcano(steps, queue=jobs.namespace))
        jobs.wait("its spare", lambda: jobs.status("lossy").get("nodes", {}).get("display") == "2/2 +1")
        assert group_of(jobs.pods()["lossy-1-0"]) == "lossy-gang-0"
        jobs.apply(by_volcano(job("above", command=["true"], gpusPerNode=1, gpuResource=GPU), queue=jobs.namespace))
        waits = "waits for room for 2 nodes with 1 GPU each at once, and holds none of them until then; pod above-"
        jobs.wait("it waits", lambda: waits in jobs.condition("above", "Scheduled").get("message", ""))
        jobs.kill("lossy-1-0")
        jobs.wait("another spare", lambda: "lossy-1-1" in jobs.pods("spare"))
        jobs.wait("it is placed by itself", lambda: group_of(jobs.pods("spare")["lossy-1-1"]).startswith("podgroup-"))
        assert not jobs.held("above"), "one GPU is free, but the queue's limit is reached"
        jobs.wait_phase("lossy", "Complete")
        jobs.wait_phase("above", "Complete")
    finally:
        jobs.kubectl("delete", "ddpjobs", "--all")
        jobs.wait("nothing is left", lambda: not groups(jobs) and not jobs.pods())
        cluster.kubectl("delete", QUEUES, jobs.namespace)
