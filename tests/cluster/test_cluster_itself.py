"""The test cluster has the properties that the other tests assume."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

import pytest
from machine import slowness
from testcluster import processes, python_host
from testcluster.cluster import Cluster

pytestmark = pytest.mark.usefixtures("cluster_machine")
SERVER = "import http.server as h; h.HTTPServer(('', 8000), h.SimpleHTTPRequestHandler).serve_forever()"
SLEEP = ["sleep", "600"]


MAIN_THREAD_ENDS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_program_counts_as_alive_until_its_last_thread_has_ended() -> None:
    """The process holds its ports until then. Regression: the kubelet that replaced a killed one
    failed with "address already in use".
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", MAIN_THREAD_ENDS], stdin=pipe, stdout=pipe) as program:
        stat = processes._stat(program.pid)
        assert stat is not None
        recorded = processes.Process("program", program.pid, stat.started)
        assert program.stdout is not None and program.stdin is not None
        program.stdout.readline()
        processes.wait_for("the end of its main thread", lambda: _state(program.pid) == "Z", timeout=20)
        assert recorded.alive()
        program.stdin.close()
        processes.wait_for("its end", lambda: not recorded.alive(), timeout=20)


def _state(pid: int) -> str:
    stat = processes._stat(pid)
    return stat.state if stat is not None else ""


def headless(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"group": name}, "publishNotReadyAddresses": True},
    }


def member(name: str, service: str, command: list[str], node: str) -> dict[str, Any]:
    made = python_host.pod(name, command, node, hostname=name, subdomain=service)
    made["metadata"]["labels"]["group"] = service
    return made


def wait_for_phase(cluster: Cluster, namespace: str, name: str, phase: str, timeout: float = 90) -> dict[str, Any]:
    """Wait until the pod has the phase, and return the pod."""
    pod: dict[str, Any] = {}

    def reached() -> bool:
        nonlocal pod
        pod = cluster.kubectl_json("get", "pod", name, "--namespace", namespace)
        found = pod["status"]["phase"]
        assert found in (phase, "Pending", "Running"), (
            f"{name} is {found}: {cluster.kubectl('logs', name, '--namespace', namespace)}"
        )
        return bool(found == phase)

    processes.wait_for(f"{name} to be {phase}", reached, timeout=timeout)
    return pod


def run_to_end(cluster: Cluster, namespace: str, name: str, code: str, node: str, **spec: Any) -> str:
    """Return the log of a pod that ran a Python program to its end."""
    cluster.apply(python_host.pod(name, ["python3", "-c", code], node, **spec), namespace=namespace)
    wait_for_phase(cluster, namespace, name, "Succeeded")
    return cluster.kubectl("logs", name, "--namespace", namespace)


def test_nodes_are_ready_and_have_the_pinned_version(cluster: Cluster) -> None:
    assert set(cluster.nodes) <= cluster.ready_nodes()
    for item in cluster.kubectl_json("get", "nodes")["items"]:
        assert item["status"]["nodeInfo"]["kubeletVersion"] == "v1.36.3"
    assert json.loads(cluster.kubectl("get", "--raw", "/version"))["gitVersion"] == "v1.36.3"


def test_pods_on_two_nodes_and_the_host_reach_each_other(cluster: Cluster, namespace: str) -> None:
    client = "import socket, urllib.request as u; print(socket.gethostname(), u.urlopen('http://server.group:8000/etc/').status)"
    cluster.apply(headless("group"), member("server", "group", ["python3", "-c", SERVER], "n1"), namespace=namespace)
    server = wait_for_phase(cluster, namespace, "server", "Running")
    address = server["status"]["podIP"]
    processes.wait_for("the server's port", lambda: _answers(f"http://{address}:8000/"), timeout=20)
    assert run_to_end(cluster, namespace, "client", client, "n2").strip() == "client 200"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_pod_can_reach_the_api_server_with_its_service_account(cluster: Cluster, namespace: str) -> None:
    code = """
import pathlib, ssl, urllib.error, urllib.request
home = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
trusted = ssl.create_default_context(cafile=home / "ca.crt")
proof = {"Authorization": "Bearer " + (home / "token").read_text()}
request = urllib.request.Request("https://kubernetes.default.svc/api/v1/nodes", headers=proof)
try:
    urllib.request.urlopen(request, context=trusted)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    log = run_to_end(cluster, namespace, "caller", code, "n2")
    assert log.startswith("403 ")
    assert f"system:serviceaccount:{namespace}:default" in log


def test_kubectl_logs_and_exec_work(cluster: Cluster, namespace: str) -> None:
    cluster.apply(python_host.pod("talker", ["sh", "-c", "echo said; exec sleep 600"], "n2"), namespace=namespace)
    wait_for_phase(cluster, namespace, "talker", "Running")
    assert cluster.kubectl("logs", "talker", "--namespace", namespace) == "said\n"
    assert cluster.kubectl("exec", "talker", "--namespace", namespace, "--", "cat", "/etc/hostname") == "talker\n"


def test_the_name_of_a_new_pod_resolves_in_two_seconds_even_after_a_failed_lookup(
    cluster: Cluster, namespace: str
) -> None:
    """A cached negative answer would delay a replaced pod by several seconds."""
    asker = """
import socket, time
last, known = time.monotonic(), None
while known is None:
    try:
        known = socket.gethostbyname("late.group")
    except socket.gaierror:
        time.sleep(0.02)
print(time.time(), known, flush=True)
"""
    cluster.apply(headless("group"), member("asker", "group", ["python3", "-c", asker], "n1"), namespace=namespace)
    wait_for_phase(cluster, namespace, "asker", "Running")
    time.sleep(1)
    cluster.apply(member("late", "group", SLEEP, "n2"), namespace=namespace)
    late = wait_for_phase(cluster, namespace, "late", "Running")
    seen = time.time()
    wait_for_phase(cluster, namespace, "asker", "Succeeded", timeout=20)
    moment, address = cluster.kubectl("logs", "asker", "--namespace", namespace).split()
    assert address == late["status"]["podIP"]
    assert float(moment) < seen + 2 * slowness()


@pytest.mark.parametrize("node", ["n1", "n2"])
@pytest.mark.parametrize("user", [0, 10001])
def test_the_hosts_python_runs_in_a_pod(cluster: Cluster, namespace: str, node: str, user: int) -> None:
    code = (
        "import os, tempfile, ddpjob, torch; tempfile.TemporaryFile(); print(os.getuid(), int(torch.ones(2, 2).sum()))"
    )
    security = {"runAsUser": user, "runAsGroup": user}
    assert run_to_end(cluster, namespace, "python", code, node, securityContext=security).strip() == f"{user} 4"


def test_pods_are_scheduled_by_their_number_of_gpus(cluster: Cluster, namespace: str) -> None:
    """The resource has a special name, because other tests may count nvidia.com/gpu at the same
    time.
    """
    resource = "test.ddpjob.io/gpu"

    def unschedulable(name: str) -> str:
        status = cluster.kubectl_json("get", "pod", name, "--namespace", namespace)["status"]
        found = [it["message"] for it in status.get("conditions", ()) if it.get("reason") == "Unschedulable"]
        return " ".join(found)

    cluster.set_gpus("n2", 2, resource)
    try:
        for name in ("first", "second"):
            pod = python_host.pod(name, SLEEP)
            pod["spec"]["containers"][0]["resources"] = {"limits": {resource: "2"}}
            cluster.apply(pod, namespace=namespace)
            if name == "first":
                assert wait_for_phase(cluster, namespace, name, "Running")["spec"]["nodeName"] == "n2"
        processes.wait_for("the second to be refused", lambda: resource in unschedulable("second"), timeout=30)
    finally:
        cluster.set_gpus("n2", 0, resource)


def test_a_pod_whose_image_does_not_exist_fails_quickly(cluster: Cluster, namespace: str) -> None:
    """Nothing is pulled, because the cluster's network does not leave the machine."""
    pod = python_host.pod("nowhere", SLEEP, "n1")
    pod["spec"]["containers"][0] |= {"image": "registry.example/nowhere:1", "imagePullPolicy": "IfNotPresent"}
    cluster.apply(pod, namespace=namespace)

    def refused() -> bool:
        found = cluster.kubectl_json("get", "pod", "nowhere", "--namespace", namespace)["status"].get(
            "containerStatuses", []
        )
        return any(
            status["state"].get("waiting", {}).get("reason") in ("ErrImagePull", "ImagePullBackOff") for status in found
        )

    processes.wait_for("ErrImagePull", refused, timeout=30)


@pytest.mark.slow
def test_a_partitioned_node_becomes_not_ready_and_recovers(cluster: Cluster, third_node: str) -> None:
    assert third_node in cluster.ready_nodes()
    cluster.cut(third_node)
    lost_after = processes.wait_for("the loss", lambda: third_node not in cluster.ready_nodes(), timeout=30)
    assert lost_after < 15 * slowness()
    assert {"n1", "n2"} <= cluster.ready_nodes()
