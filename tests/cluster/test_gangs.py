"""Gangs with Kubernetes' own scheduler: jobs that each need all GPUs, a replacement, and preemption
by priority.

The GPUs are fictitious, because only the scheduler deals with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import FAST, Jobs, Json, job, sleeping, steps_job
from testcluster.cluster import Cluster

GPU = "example.com/gpu"
ONE_GPU: Json = {"gpusPerNode": 1, "gpuResource": GPU}
BACKOFF_SECONDS = 2.5
"""Longest back-off of kube-scheduler, plus a margin. It then tries a pod again."""
DEADLOCK_SECONDS = 3 * BACKOFF_SECONDS


class Gpus:
    """Offers one GPU on each of two Kubernetes nodes, or none."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def each(self, number: int) -> None:
        for node in self.cluster.nodes[:2]:
            self.cluster.set_gpus(node, number, GPU)


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[Gpus]:
    if not cluster.succeeds("get", "--raw", "/apis/scheduling.k8s.io/v1alpha2"):
        pytest.skip("this cluster serves no PodGroups")
    made = Gpus(cluster)
    yield made
    made.each(0)


@pytest.fixture
def priorities(cluster: Cluster, namespace: str) -> Iterator[tuple[str, str]]:
    """Create a low and a high PriorityClass, and yield their names."""
    names = f"{namespace}-low", f"{namespace}-high"
    for value, name in zip((-10, 1000), names, strict=True):
        manifest = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        cluster.apply(manifest | {"value": value})
    yield names
    cluster.kubectl("delete", "priorityclass", *names)


def sleeping_job(name: str, seconds: int, **spec: object) -> Json:
    return job(name, command=sleeping(seconds), **ONE_GPU, **spec)


def group_of(pod: Json) -> str:
    return str(pod["spec"].get("schedulingGroup", {}).get("podGroupName", ""))


def was_refused(pod: Json) -> bool:
    """Return whether the scheduler tried and failed to place the pod."""
    return any(each.get("reason") == "Unschedulable" for each in pod["status"].get("conditions", []))


@pytest.mark.parametrize("gang", [False, True])
def test_two_jobs_that_would_deadlock_run_one_after_the_other_as_gangs(jobs: Jobs, gpus: Gpus, gang: bool) -> None:
    """The scheduler tries pods in the order of their arrival: first one pod of each job, then each
    job's second pod.

    Without gangs, each job gets half of the GPUs, which is a deadlock. As the end of the test
    shows, only the loss of one job lets the other run.
    """
    for name in ("one", "two"):
        jobs.apply(steps_job(name, 5, recovery=FAST, scheduling={"gang": gang}, **ONE_GPU))
        jobs.wait(f"the pods of {name}", lambda name=name: {f"{name}-0-0", f"{name}-1-0"} <= set(jobs.pods()))
    jobs.kill("one-1-0")
    tried = {"one-0-0", "one-1-1", "two-0-0", "two-1-0"}
    jobs.wait(
        "the scheduler has tried its successor",
        lambda: tried <= {n for n, pod in jobs.pods().items() if was_refused(pod)},
    )
    time.sleep(BACKOFF_SECONDS)  # pods that are still in their back-off would come after the others
    gpus.each(1)
    if gang:
        for name in ("one", "two"):
            jobs.wait_phase(name, "Complete")
            assert jobs.status(name)["restarts"]["counted"] == 0
        return
    jobs.wait("each has half", lambda: len(jobs.held("one")) == len(jobs.held("two")) == 1)
    assert not any(map(group_of, jobs.pods().values()))
    halves = jobs.held("one"), jobs.held("two")
    until = time.monotonic() + DEADLOCK_SECONDS
    while time.monotonic() < until:
        assert (jobs.held("one"), jobs.held("two")) == halves
        assert not {jobs.status(name)["phase"] for name in ("one", "two")} & {"Running", "Complete"}
        time.sleep(1)
    waiting = [pod for pod in jobs.pods().values() if not pod["spec"].get("nodeName")]
    assert len(waiting) == 2 and all("Insufficient example.com/gpu" in str(pod["status"]) for pod in waiting)
    jobs.kubectl("delete", "ddpjob", "one")
    jobs.wait_phase("two", "Complete")


def test_one_of_two_gangs_runs_while_the_other_occupies_no_node(jobs: Jobs, gpus: Gpus) -> None:
    for name in ("one", "two"):
        jobs.apply(sleeping_job(name, 8))
    for name in ("one", "two"):
        jobs.wait(f"the pods of {name}", lambda name=name: {f"{name}-0-0", f"{name}-1-0"} <= set(jobs.pods()))
    jobs.wait_unschedulable("one", "waits for room for 2 nodes with 1 GPU each at once")
    jobs.wait_unschedulable("one", "0 of them would fit now")
    assert not jobs.pods("coordinator")["one-coordinator-0"]["spec"].get("nodeName"), "the second pod waits as well"
    gpus.each(1)
    jobs.wait("one runs", lambda: any(jobs.status(name)["phase"] == "Running" for name in ("one", "two")))
    first, second = ("one", "two") if jobs.status("one")["phase"] == "Running" else ("two", "one")
    while jobs.status(first)["phase"] == "Running":
        assert not jobs.held(second) or jobs.status(first)["phase"] != "Running"
        time.sleep(0.5)
    jobs.wait_phase(first, "Complete")
    jobs.wait_phase(second, "Complete")
    for name in ("one", "two"):
        assert jobs.status(name)["restarts"]["total"] == 0
    jobs.kubectl("delete", "ddpjobs", "--all")
    left = ("get", "podgroups", "--namespace", jobs.namespace)
    jobs.wait("no PodGroup is left", lambda: not jobs.cluster.kubectl_json(*left)["items"])


def test_a_lost_pod_of_a_gang_is_replaced_immediately_and_spares_come_later(jobs: Jobs, gpus: Gpus) -> None:
    gpus.each(1)
    jobs.apply(steps_job("lossy", 1000, spares=1, recovery=FAST, **ONE_GPU))
    jobs.wait_phase("lossy", "Running")
    assert group_of(jobs.pods()["lossy-1-0"]) == "lossy-gang-0"
    group = jobs.cluster.kubectl_json("get", "podgroup", "lossy-gang-0", "--namespace", jobs.namespace)
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 3}}, "the gang has two nodes and the coordinator"
    assert not group_of(jobs.pods("spare")["lossy-2-0"]), (
        "the spare is in no group, because nothing must wait for it if it has no room"
    )
    jobs.kubectl("delete", "ddpjob", "lossy")

    jobs.apply(steps_job("again", 1000, recovery=FAST, **ONE_GPU))
    jobs.wait_phase("again", "Running")
    jobs.kill("again-1-0")
    jobs.wait("its successor has a node", lambda: "again-1-1" in jobs.held("again"), timeout=20)
    assert not group_of(jobs.pods()["again-1-1"])
    jobs.wait_phase("again", "Running")
    assert jobs.status("again")["rendezvous"]["generation"] == 0


def test_a_preempted_job_releases_all_its_gpus_and_continues_later(
    jobs: Jobs, gpus: Gpus, priorities: tuple[str, str], tmp_path: Path
) -> None:
    """A single GPU would have been enough for the other job. The state is on a volume; otherwise,
    the job would keep its pods.
    """
    low, high = priorities
    gpus.each(1)
    storage = {"checkpoints": {"hostPath": str(tmp_path), "shared": True}}
    scheduling = {"priorityClassName": low}
    jobs.apply(steps_job("low", 100_000, recovery=FAST, scheduling=scheduling, storage=storage, **ONE_GPU))
    jobs.wait_phase("low", "Running")
    jobs.apply(sleeping_job("high", 10_000, nodes=1, scheduling={"priorityClassName": high}))
    jobs.wait_phase("high", "Running")
    jobs.wait("low holds nothing", lambda: not jobs.held("low"), timeout=60)
    assert jobs.status("high")["phase"] == "Running"
    jobs.wait("it waits as a gang", lambda: jobs.status("low").get("gang") == {"nodes": 2})
    jobs.kubectl("delete", "ddpjob", "high")
    jobs.wait_phase("low", "Running", timeout=120)
    counts = jobs.status("low")["restarts"]
    assert counts["counted"] == 0 and {r["reason"] for r in counts["recent"]} <= {"Preempted", "Yielded"}
