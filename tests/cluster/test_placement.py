"""Where pods run: away from Kubernetes nodes that health agents call unhealthy, and in one domain of the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import more_nodes
from jobs import Jobs, Json, steps_job
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
    """As a health agent does."""
    condition = {"type": "GpuUnhealthy", "status": str(unhealthy), "reason": "XidError", "message": "Xid 79"}
    patch = json.dumps({"status": {"conditions": [condition]}})
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "--patch", patch)


def test_a_pod_leaves_a_node_that_an_agent_calls_unhealthy(four: Cluster, jobs: Jobs) -> None:
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
    assert moved > 55, "a sign has to last"
    print(f"moved {moved:.1f} s after the agent's word, and trained again after {recorded.get('seconds')} s")


RACK = "test.ddpjob.io/rack"


def test_all_pods_run_in_one_domain_and_so_do_their_replacements(four: Cluster, jobs: Jobs) -> None:
    for rack, nodes in {"a": ("n1", "n2"), "b": ("n3", "n4")}.items():
        four.kubectl("label", "nodes", *nodes, "--overwrite", f"{RACK}={rack}")
    scheduling = {"sameTopology": RACK}
    try:
        jobs.apply(steps_job("near", 100000, "--sleep=0.2", scheduling=scheduling))
        jobs.wait("the job to run", lambda: jobs.status("near").get("phase") == "Running", timeout=120)
        placed = {node_of(jobs, f"near-{index}-0") for index in range(2)}
        assert placed in ({"n1", "n2"}, {"n3", "n4"})
        left = node_of(jobs, "near-1-0")
        jobs.kubectl("delete", "pod", "near-1-0", "--wait=false")
        jobs.wait("the replacement to run", lambda: jobs.status("near")["round"] > 0, timeout=60)
        jobs.wait("the job to run again", lambda: jobs.status("near").get("phase") == "Running", timeout=90)
        assert node_of(jobs, "near-1-1") == left, "the only other place of the rack"
        jobs.apply(steps_job("wide", 100000, "--sleep=0.2", nodes=3, scheduling=scheduling))
        jobs.wait("no room", lambda: jobs.condition("wide", "Scheduled").get("reason") == "Unschedulable", timeout=120)
        assert f"all pods share one {RACK}" in jobs.condition("wide", "Scheduled")["message"]
    finally:
        four.kubectl("label", "nodes", "--all", f"{RACK}-")


@pytest.mark.parametrize("name", ["infiniband", "roce", "efa", "gpudirect-tcpx", "dynamic-resources"])
def test_the_api_server_accepts_the_recipes_for_fast_networks(jobs: Jobs, name: str) -> None:
    """The jobs, and the pods that the operator makes of them."""
    command = [sys.executable, "-m", "ddpjob.cli", "validate", "--server", "--namespace", jobs.namespace]
    environment = {**os.environ, "KUBECONFIG": str(jobs.cluster.kubeconfig)}
    example = str(CHECKOUT / "examples" / f"{name}.yaml")
    done = subprocess.run([*command, example], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
