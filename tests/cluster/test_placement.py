"""Pods avoid Kubernetes nodes that health agents report as unhealthy, and run within one network
domain.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import more_nodes
from jobs import FAST, Jobs, Json, steps_job
from testcluster.cluster import Cluster
from testcluster.settings import CHECKOUT
from watching import restarts


@pytest.fixture(scope="module")
def four(cluster: Cluster) -> Iterator[Cluster]:
    with more_nodes(cluster, 4):
        yield cluster


def node_of(jobs: Jobs, pod: str) -> str:
    return str(jobs.pods()[pod]["spec"]["nodeName"])


def say(cluster: Cluster, node: str, unhealthy: bool) -> None:
    """Mark a Kubernetes node as unhealthy or healthy, as a health agent does."""
    condition = {"type": "GpuUnhealthy", "status": str(unhealthy), "reason": "XidError", "message": "Xid 79"}
    patch = json.dumps({"status": {"conditions": [condition]}})
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "--patch", patch)


def test_a_pod_leaves_a_node_that_an_agent_reports_as_unhealthy(four: Cluster, jobs: Jobs) -> None:
    jobs.apply(steps_job("moved", 100000, "--sleep=0.2"))
    jobs.wait("the job to run", lambda: jobs.status("moved").get("phase") == "Running", timeout=120)
    node = node_of(jobs, "moved-1-0")
    said = time.time()
    say(four, node, True)
    try:
        jobs.wait("the move", lambda: bool(restarts(jobs.status("moved"))), timeout=120)
        moved = time.time() - said
        jobs.wait("the job to run again", lambda: jobs.status("moved").get("phase") == "Running", timeout=60)
        status: Json = jobs.status("moved")
        assert node_of(jobs, "moved-1-1") != node and "moved-0-0" in jobs.pods()
    finally:
        say(four, node, False)
    (recorded,) = restarts(status)
    assert (recorded["reason"], recorded["counted"], recorded["node"]) == ("NodeUnhealthy", False, node)
    assert "condition GpuUnhealthy is True (XidError)" in recorded["message"]
    assert [entry["node"] for entry in status["avoidedNodes"]] == [node]
    assert moved > 55, "a signal has to persist"
    print(f"moved {moved:.1f} s after the agent's report, and trained again after {recorded.get('seconds')} s")


RACK = "test.ddpjob.io/rack"
NODES_ONLY = [{"key": "ddpjob.io/role", "operator": "In", "values": ["node"]}]


def test_all_pods_and_their_replacements_run_in_one_domain(four: Cluster, jobs: Jobs) -> None:
    for rack, nodes in {"a": ("n1", "n2"), "b": ("n3", "n4")}.items():
        four.kubectl("label", "nodes", *nodes, "--overwrite", f"{RACK}={rack}")
    scheduling = {"sameTopology": RACK}
    try:
        jobs.apply(steps_job("near", 100000, "--sleep=0.2", recovery=FAST, scheduling=scheduling))
        jobs.wait("the job to run", lambda: jobs.status("near").get("phase") == "Running", timeout=120)
        placed = {node_of(jobs, f"near-{index}-0") for index in range(2)}
        assert placed in ({"n1", "n2"}, {"n3", "n4"})
        left = node_of(jobs, "near-1-0")
        jobs.kubectl("delete", "pod", "near-1-0", "--wait=false")
        jobs.wait("the replacement to run", lambda: jobs.status("near")["round"] > 0, timeout=60)
        jobs.wait("the job to run again", lambda: jobs.status("near").get("phase") == "Running", timeout=90)
        assert node_of(jobs, "near-1-1") == left, "this is the only other free node in the rack"
        jobs.apply(steps_job("wide", 100000, "--sleep=0.2", nodes=3, recovery=FAST, scheduling=scheduling))
        jobs.wait_unschedulable("wide", f"all pods must be in the same {RACK}", timeout=120)
    finally:
        four.kubectl("label", "nodes", "--all", f"{RACK}-")


def ranks_in_logs(jobs: Jobs, name: str) -> dict[str, int]:
    """Return the latest rank of each pod, as logged by its script."""
    found = {}
    for pod in jobs.pods():
        began = re.findall(r"^rank (\d+) of 4 begins", jobs.kubectl("logs", pod, "--container=trainer"), re.MULTILINE)
        found |= {pod: int(began[-1])} if began else {}
    return {pod: rank for pod, rank in found.items() if pod.startswith(f"{name}-")}


def test_pods_of_one_rack_have_adjacent_ranks(cluster: Cluster, jobs: Jobs) -> None:
    """Two pods run on each of two nodes. Neither node has only pods with consecutive indices."""
    name = "ranks"
    for node, rack in {"n1": "b", "n2": "a"}.items():
        cluster.kubectl("label", "node", node, "--overwrite", f"{RACK}={rack}")
    # Each node gets one of the indices 0 and 1 and one of the indices 2 and 3, depending on which
    # pod is scheduled first. Here, a node is also a rack. Two keys are needed, because a pod may
    # have only one such constraint per key.
    spread = [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {
                "matchLabels": {"ddpjob.io/job": name},
                "matchExpressions": [*NODES_ONLY, {"key": "ddpjob.io/index", "operator": "In", "values": indices}],
            },
        }
        for key, indices in {"kubernetes.io/hostname": ["0", "1"], RACK: ["2", "3"]}.items()
    ]
    manifest = steps_job(
        name, 100000, "--sleep=0.2", nodes=4, rankOrder=[RACK], recovery=FAST,
        scheduling={"onePodPerNode": False},
    )  # fmt: skip
    pod = manifest["spec"]["podTemplate"]["spec"]
    pod["topologySpreadConstraints"] = spread
    # The cluster may have more nodes because of another test.
    these = [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1", "n2"]}]
    required = {"nodeSelectorTerms": [{"matchExpressions": these}]}
    pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}

    def check() -> None:
        jobs.wait("all ranks to begin", lambda: len(ranks_in_logs(jobs, name)) == 4, timeout=60)
        jobs.wait("the order", lambda: jobs.condition(name, "RanksOrdered").get("reason") == "InOrder", timeout=30)
        ranks = ranks_in_logs(jobs, name)
        order = sorted(ranks, key=lambda pod: ranks[pod])
        nodes = [node_of(jobs, pod) for pod in order]
        indices = [int(pod.rsplit("-", 2)[1]) for pod in order]
        print(f"ranks 0 to 3 are the indices {indices} on {nodes}")
        assert sorted(ranks.values()) == [0, 1, 2, 3] and indices[0] == 0
        assert nodes in ([nodes[0]] * 2 + [nodes[2]] * 2, [nodes[0]] * 4), "the ranks of each rack must be consecutive"
        assert nodes[0] != nodes[2] and indices in ([0, 2, 1, 3], [0, 3, 1, 2]), (
            "the order must differ from that of the indices"
        )
        assert jobs.status(name)["rankOrder"] == indices
        command = [sys.executable, "-m", "ddpjob.cli", "logs", name, "--rank", "1", "--tail", "1", "--prefix"]
        environment = {**os.environ, "KUBECONFIG": str(jobs.cluster.kubeconfig)}
        said = subprocess.run(
            [*command, "--namespace", jobs.namespace], env=environment, capture_output=True, text=True, check=True
        )
        assert "rank 1 step" in said.stdout, said.stdout

    try:
        jobs.apply(manifest)
        jobs.wait("the job to run", lambda: jobs.status(name).get("phase") == "Running", timeout=120)
        check()
        jobs.kill(f"{name}-1-0")
        jobs.wait("the next round", lambda: jobs.status(name)["round"] > 0, timeout=60)
        jobs.wait("the job to run again", lambda: jobs.status(name).get("phase") == "Running", timeout=120)
        check()
    finally:
        cluster.kubectl("label", "nodes", "--all", f"{RACK}-")


@pytest.mark.parametrize("name", ["infiniband", "roce", "efa", "gpudirect-tcpx", "dynamic-resources"])
def test_the_api_server_accepts_the_recipes_for_fast_networks(jobs: Jobs, name: str) -> None:
    """The jobs are accepted, and so are the pods that the operator creates from them."""
    command = [sys.executable, "-m", "ddpjob.cli", "validate", "--server", "--namespace", jobs.namespace]
    environment = {**os.environ, "KUBECONFIG": str(jobs.cluster.kubeconfig)}
    example = str(CHECKOUT / "examples" / f"{name}.yaml")
    done = subprocess.run([*command, example], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
