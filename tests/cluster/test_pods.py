"""A job's pods: GPUs by resource name, shared memory, names, environment and storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import create_namespace
from jobs import FAST, Jobs, job, steps_job
from testcluster.cluster import Cluster


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[str]:
    """Offer two fictitious GPUs on each node. Only the scheduler uses them."""
    resource = "example.com/gpu"
    for node in cluster.nodes[:2]:
        cluster.set_gpus(node, 2, resource)
    yield resource
    for node in cluster.nodes[:2]:
        cluster.set_gpus(node, 0, resource)


def test_gpus_are_requested_by_resource_name(jobs: Jobs, gpus: str) -> None:
    jobs.apply(steps_job("many", 3, recovery=FAST, gpusPerNode=4, gpuResource=gpus))
    jobs.wait_unschedulable("many", f"Insufficient {gpus}")
    jobs.kubectl("delete", "ddpjob", "many")
    jobs.apply(steps_job("few", 3, recovery=FAST, gpusPerNode=2, gpuResource=gpus))
    jobs.wait_phase("few", "Complete", timeout=120)
    assert "of 4 begins" in jobs.kubectl("logs", "few-0-0"), "a process per GPU"


def test_a_pod_that_has_lost_its_device_is_replaced_immediately(jobs: Jobs, gpus: str) -> None:
    rule = {**FAST, "maxRestarts": 1}
    jobs.apply(steps_job("lost", 20, "--lose-device-in=lost-1-0", recovery=rule, gpusPerNode=1, gpuResource=gpus))
    jobs.wait_phase("lost", "Complete")
    recent = [(r["reason"], r["counted"], r["pod"]) for r in jobs.status("lost")["restarts"]["recent"]]
    first, again = ("WorkerFailed", True, "lost-1-0"), ("WorkerFailed", False, "lost-1-0")
    assert recent[0] == first and recent.count(("PodUnhealthy", False, "lost-1-0")) == 1
    # The worker may fail again before its pod is stopped, several times on a busy machine.
    assert recent.count(again) == len(recent) - 2
    assert "lost-0-0" in jobs.pods() and "lost-1-1" in jobs.pods()


def test_a_pod_has_the_specified_environment_names_and_volumes(jobs: Jobs) -> None:
    jobs.apply(
        steps_job(
            "look", 1000, storage={"sharedMemory": "64Mi"}, env=[{"name": "GREETING", "value": "hello $(DDPJOB_NAME)"}]
        )
    )
    jobs.wait_phase("look", "Running")

    def run(pod: str, script: str) -> str:
        words = ("exec", pod, "--container=trainer", "--namespace", jobs.namespace, "--", "/bin/sh", "-c", script)
        return jobs.cluster.kubectl(*words).strip()

    assert run("look-0-0", "df -k --output=size /dev/shm | tail -1").strip() == "65536"
    assert run("look-1-0", "cat /proc/sys/kernel/hostname") == "look-1-0"
    assert (
        run("look-0-0", 'echo "$DDPJOB_INDEX $DDPJOB_ATTEMPT $DDPJOB_ROUND $DDPJOB_NODES $GREETING"')
        == "0 0 0 2 hello look"
    )
    assert run("look-0-0", "echo $POD_IP") == jobs.pods()["look-0-0"]["status"]["podIP"]
    name = f"look-1-0.look.{jobs.namespace}.svc.cluster.local"
    found = run("look-0-0", f"python3 -c \"import socket; print(socket.gethostbyname('{name}'))\"")
    assert found == jobs.pods()["look-1-0"]["status"]["podIP"]
    mounted = run("look-0-0", "touch /checkpoints/x && ls /opt/ddpjob").split()
    assert mounted == ["ddpjob_report.py", "ddpjob_runtime", "ddpjob_worker.py"]
    owned = jobs.cluster.kubectl_json(
        "get", "pods,services,configmaps", "--namespace", jobs.namespace, "--selector=ddpjob.io/job=look"
    )
    for item in owned["items"]:
        assert [o["name"] for o in item["metadata"]["ownerReferences"]] == ["look"]
        assert "finalizers" not in item["metadata"]
    body = jobs.cluster.kubectl_json("get", "ddpjob", "look", "--namespace", jobs.namespace)
    assert "finalizers" not in body["metadata"] and not any("kopf" in key for key in body["metadata"]["annotations"])


def test_two_jobs_with_the_same_name_run_in_two_namespaces_on_one_machine(jobs: Jobs, cluster: Cluster) -> None:
    other = Jobs(cluster, f"{jobs.namespace}-b")
    create_namespace(cluster, other.namespace)
    try:
        for place in (jobs, other):
            place.apply(steps_job("twin", 5, nodes=1, recovery=FAST))
        for place in (jobs, other):
            place.wait_phase("twin", "Complete", timeout=120)
    finally:
        cluster.kubectl("delete", "namespace", other.namespace, "--wait=false")


def test_several_processes_run_on_one_node(jobs: Jobs) -> None:
    jobs.apply(job("procs", script=steps_job("x")["spec"]["script"], args=["--steps=3"], nodes=1, procsPerNode=2))
    jobs.wait_phase("procs", "Complete", timeout=120)
    log = jobs.kubectl("logs", "procs-0-0")
    assert "rank 0 of 2 begins" in log and "rank 1 of 2 begins" in log
