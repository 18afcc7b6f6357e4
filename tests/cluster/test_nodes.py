"""Kubernetes nodes are drained, tainted, deleted and partitioned. Jobs continue elsewhere, and
leftover pods end.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import create_namespace, more_nodes, print_namespace, remove_namespace
from ddpjob_trainer.commands.check_ledger import read, verify
from jobs import Jobs, Json, job, steps_job
from machine import slowness
from operator_process import OperatorProcess
from strategy_jobs import held, let_go
from testcluster import processes
from testcluster.cluster import Cluster
from testcluster.settings import ClusterError
from watching import Watch, at_once, phase, restart, restarts

NODE_LOST_AFTER = 8
CONTROL = "test.ddpjob.io/control"
"""Resource that coordinators request. Only `n1` has it, so no coordinator is on a node that is
lost.
"""


@dataclass
class Stage:
    """The namespace in which all the jobs run. Each job has a pod on `n1` and another on a node
    that it will lose.
    """

    jobs: Jobs
    watch: Watch
    cluster: Cluster

    def place(self, name: str) -> Json:
        """Return the fields of a spec that place the job's node pods where `offer` allows it."""
        control = {"resources": {"limits": {CONTROL: 1}}}
        return {
            "gpusPerNode": 1,
            "procsPerNode": 1,
            "backend": "gloo",
            "gpuResource": f"test.ddpjob.io/{name}",
            "rendezvous": control,
        }

    def offer(self, name: str, *nodes: str) -> None:
        for node in nodes:
            self.cluster.set_gpus(node, 1, f"test.ddpjob.io/{name}")

    def pod_on(self, name: str, node: str) -> str:
        (found,) = [n for n, p in self.pods(name).items() if p["spec"].get("nodeName") == node]
        return found

    def pods(self, name: str) -> dict[str, Json]:
        return {n: p for n, p in self.jobs.pods().items() if p["metadata"]["labels"]["ddpjob.io/job"] == name}

    def uid(self, name: str) -> str:
        return self.jobs.kubectl("get", "ddpjob", name, "--output=jsonpath={.metadata.uid}")

    def running(self, name: str, node: str, refuge: bool = True) -> str:
        """Wait until the job trains, and return its pod on the node. Only then is the other node
        offered as a refuge.
        """
        self.watch.first(name, phase("Running"), timeout=180)
        pod = self.pod_on(name, node)
        if refuge:
            self.offer(name, "n2")
        return pod

    def trains_again(self, name: str, lost: Json, timeout: float = 90) -> float:
        """Return when the job continued on other nodes, in the round that began with the loss."""
        when, _ = self.watch.first(name, lambda s: s.get("phase") == "Running" and s["round"] >= lost["round"], timeout)
        return when


JOBS = {"moved": "n3", "tainted": "n4", "deleted": "n5", "cut": "n6", "cut-fast": "n6"}
"""The node that each job will lose."""


@pytest.fixture(scope="module")
def stage(
    cluster: Cluster, operator: OperatorProcess, checkpoints: Path, request: pytest.FixtureRequest
) -> Iterator[Stage]:
    namespace = f"nodes-{secrets.token_hex(2)}"
    before = request.session.testsfailed
    with more_nodes(cluster, 6):
        create_namespace(cluster, namespace)
        made = Stage(Jobs(cluster, namespace), Watch(cluster, namespace), cluster)
        cluster.set_gpus("n1", 100, CONTROL)
        for name, node in JOBS.items():
            made.offer(name, "n1", node)
        _apply(made, checkpoints)
        yield made
        made.watch.close()
        for resource in (CONTROL, *(f"test.ddpjob.io/{name}" for name in JOBS)):
            for node in cluster.nodes:
                cluster.set_gpus(node, 0, resource)
        if request.session.testsfailed > before:
            print_namespace(cluster, namespace)
        remove_namespace(cluster, namespace)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def _apply(stage: Stage, checkpoints: Path) -> None:
    shared = {"checkpoints": {"hostPath": str(checkpoints), "shared": True}}
    keys = ["--config", "digits", "train.threads=1", "train.ledger=true", "train.epochs=12", "checkpoint.every_steps=9"]
    # This takes 43 s, but uses little CPU, which the other jobs need.
    training = held(keys, {"HELD": "", "PAUSE": "0.15"})
    stage.jobs.apply(job("moved", **training, storage=shared, **stage.place("moved")))
    stage.jobs.apply(
        steps_job("tainted", 100000, "--sleep=0.5", **stage.place("tainted"), recovery={"nodeLostAfterSeconds": 300})
    )
    for name, mode in (("deleted", "Standard"), ("cut", "Standard"), ("cut-fast", "Fast")):
        recovery = {"mode": mode, "nodeLostAfterSeconds": NODE_LOST_AFTER}
        stage.jobs.apply(steps_job(name, 100000, "--sleep=0.5", **stage.place(name), recovery=recovery))


def alive(pod: str, uid: str) -> list[int]:
    """Return the processes of a job's pod, even if the API server no longer knows the pod."""
    needles = (f"DDPJOB_POD={pod}".encode(), f"DDPJOB_UID={uid}".encode())
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the process ended in the meantime, or belongs to another user
        if all(needle in environment for needle in needles):
            found.append(int(folder.name))
    return found


def test_draining_a_node_moves_a_job_pod_by_pod_without_losing_steps(stage: Stage, checkpoints: Path) -> None:
    leaving = stage.running("moved", "n3", refuge=False)
    staying = stage.pod_on("moved", "n1")
    stage.jobs.wait(
        "some epochs", lambda: stage.jobs.status("moved").get("progress", {}).get("percent", 0) >= 3, timeout=60
    )
    began = time.time()
    limit = 90 * slowness()
    drain = ["drain", "n3", "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={limit:.0f}s"]
    kubectl = [stage.cluster.programs / "kubectl", "--kubeconfig", stage.cluster.kubeconfig, *drain]
    with subprocess.Popen(kubectl, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as draining:
        stage.jobs.wait(
            "the eviction",
            lambda: (
                "deletionTimestamp"
                in stage.pods("moved").get(leaving, {"metadata": {"deletionTimestamp": 0}})["metadata"]
            ),
        )
        with pytest.raises(ClusterError, match="disruption budget"):
            # No node is offered to the replacement yet, so the job has only one healthy pod.
            evict(stage.jobs, staying)
        stage.offer("moved", "n2")
        output, _ = draining.communicate(timeout=limit + 30)
    assert draining.returncode == 0, output
    noticed, lost = stage.watch.first("moved", lambda s: bool(restarts(s)))
    # On a very busy machine, the pod may end before the operator sees the eviction. The operator
    # then only knows that the pod is gone.
    assert restarts(lost)[0]["reason"] in (("Evicted",) if slowness() < 2 else ("Evicted", "Deleted"))
    again = stage.trains_again("moved", lost)
    print(f"moved: reported {noticed - began:.2f} s after the drain began, trains again {again - began:.2f} s after it")
    assert noticed - began < at_once()
    assert lost["progress"]["percent"] < 95, "the drain must begin before the job ends"
    let_go(checkpoints, "pause")
    _, status = stage.watch.first("moved", phase("Complete"), timeout=240)
    assert [(r["pod"], r["counted"]) for r in restarts(status)] == [(leaving, False)]
    assert staying in stage.pods("moved"), "the other pod must stay"
    lives = read([checkpoints])
    assert len(lives) == 2, "the ledger must show the move"
    verify(lives)


def evict(jobs: Jobs, pod: str) -> None:
    """Evict a pod, as `kubectl drain` does. Raises ClusterError if a disruption budget forbids
    it.
    """
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": jobs.namespace}}
    path = f"/api/v1/namespaces/{jobs.namespace}/pods/{pod}/eviction"
    jobs.cluster.kubectl("create", "--raw", path, "--filename=-", input_text=json.dumps(body))


def test_a_job_does_not_wait_for_a_node_tainted_as_out_of_service(stage: Stage) -> None:
    pod = stage.running("tainted", "n4")
    stage.cluster.cut("n4")
    processes.wait_for("n4 to be NotReady", lambda: "n4" not in stage.cluster.ready_nodes(), timeout=30)
    assert not restarts(stage.jobs.status("tainted")), "recovery.nodeLostAfterSeconds is 300"
    began = time.time()
    stage.cluster.kubectl("taint", "node", "n4", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
    try:
        noticed, lost = stage.watch.first("tainted", lambda s: bool(restarts(s)))
        again = stage.trains_again("tainted", lost)
    finally:
        stage.cluster.kubectl("taint", "node", "n4", "node.kubernetes.io/out-of-service-")
        stage.cluster.heal("n4")
    print(f"tainted: reported {noticed - began:.2f} s after the taint, trains again {again - began:.2f} s after it")
    assert noticed - began < at_once()
    (recorded,) = restarts(lost)
    # Kubernetes' own controller also marks and deletes the pod because of the taint.
    assert (recorded["pod"], recorded["counted"]) == (pod, False) and recorded["reason"] in ("NodeLost", "Disruption")
    assert recorded["reason"] in stage.jobs.kubectl("describe", "ddpjob", "tainted")


def test_a_job_leaves_a_node_whose_object_is_deleted(stage: Stage) -> None:
    pod = stage.running("deleted", "n5")
    uid = stage.uid("deleted")
    assert alive(pod, uid)
    began = time.time()
    stage.cluster.kubectl("delete", "node", "n5", "--wait=false")
    try:
        noticed, lost = stage.watch.first("deleted", restart("NodeLost"))
        again = stage.trains_again("deleted", lost)
    finally:
        stage.cluster.register("n5")
    print(f"deleted: reported {noticed - began:.2f} s after the deletion, trains again {again - began:.2f} s after it")
    assert noticed - began < NODE_LOST_AFTER + at_once()
    assert [(r["pod"], r["counted"]) for r in restarts(lost)] == [(pod, False)]
    assert "n5" in restarts(lost)[0]["message"]
    processes.wait_for(f"the end of {pod}", lambda: not alive(pod, uid), timeout=30)


def test_a_job_leaves_a_partitioned_node_and_its_leftover_pods_exit(stage: Stage) -> None:
    names = ("cut", "cut-fast")
    pods = {name: stage.running(name, "n6") for name in names}
    uids = {name: stage.uid(name) for name in names}
    began = time.time()
    stage.cluster.cut("n6")
    for name in names:
        noticed, lost = stage.watch.first(name, restart("NodeLost"), timeout=NODE_LOST_AFTER + 30)
        again = stage.trains_again(name, lost)
        print(f"{name}: reported {noticed - began:.2f} s after the cut, trains again {again - began:.2f} s after it")
        assert NODE_LOST_AFTER - 1.5 <= noticed - began < NODE_LOST_AFTER + at_once()
        assert [(r["pod"], r["counted"]) for r in restarts(lost)] == [(pods[name], False)]
        # The pod is force-deleted once its host is NotReady too. This may be after the coordinator
        # has reported its silence.
        stage.jobs.wait("the end of the pod's object", lambda name=name: pods[name] not in stage.pods(name), timeout=30)
    assert alive(pods["cut-fast"], uids["cut-fast"]), "the pod must have kept training while it was unreachable"
    stage.cluster.heal("n6")
    seconds = processes.wait_for(
        "the end of the zombies", lambda: not any(alive(pods[n], uids[n]) for n in names), timeout=60
    )
    print(f"the leftover pods ended {seconds:.1f} s after the network was back")
    for name in names:
        before = stage.jobs.step(name)
        stage.jobs.wait(f"{name} to continue", lambda name=name, before=before: stage.jobs.step(name) != before)
        assert len(restarts(stage.jobs.status(name))) == 1, "the leftover pod must not disturb its replacement"


def test_a_spare_takes_over_from_a_partitioned_node_whose_pod_becomes_the_spare(stage: Stage) -> None:
    name, nodes = "spared", ("n1", "n2", "n4")
    stage.offer(name, *nodes)
    recovery = {"mode": "Fast", "nodeLostAfterSeconds": 120}
    steps = steps_job(name, 100000, "--sleep=0.1", **stage.place(name), recovery=recovery)

    def shows(display: str) -> bool:
        status = stage.jobs.status(name)
        return status.get("phase") == "Running" and status["nodes"]["display"] == display

    try:
        # The spare is created later, so that it is certainly not one of the first two pods. If
        # three pods arrive together, any of them may become the spare, and the labels follow the
        # status a moment later.
        stage.jobs.apply(steps)
        stage.jobs.wait("the group", lambda: shows("2/2"), timeout=180)
        pods = stage.pods(name)
        stage.jobs.apply(steps | {"spec": steps["spec"] | {"spares": 1}})
        stage.jobs.wait("a ready spare", lambda: shows("2/2 +1"), timeout=180)
        hosts = {n: p["spec"]["nodeName"] for n, p in pods.items()}
        victim, host = next((n, host) for n, host in hosts.items() if host != "n1")
        stage.cluster.cut(host)
        try:
            seconds = stage.jobs.wait("the spare to take over", lambda: shows("2/2"), timeout=60)
            before = stage.jobs.step(name)
            stage.jobs.wait("the spare to train", lambda: stage.jobs.step(name) != before)
            print(f"{name}: shown as complete again {seconds:.2f} s after the cut")
        finally:
            stage.cluster.heal(host)
        assert seconds < 3 + at_once()
        stage.jobs.wait("the other to be the spare", lambda: shows("2/2 +1"), timeout=90)
        status = stage.jobs.status(name)
        assert [(r["reason"], r["pod"], r["counted"]) for r in restarts(status)] == [("PeerLost", victim, False)]
        assert not status.get("avoidedNodes"), "the host is not blamed"
        after = {**stage.jobs.pods("spare"), **stage.jobs.pods("node")}
        assert after[victim]["metadata"]["uid"] == pods[victim]["metadata"]["uid"], "the pod is not replaced"
    finally:
        for node in nodes:
            stage.cluster.set_gpus(node, 0, f"test.ddpjob.io/{name}")
