"""NetworkPolicies on nodes that enforce them: who reaches a job's ports, and what a job itself needs
where outgoing traffic is denied by default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from borrowed import require_python_host
from conftest import new_namespace, refuse
from jobs import FAST, Jobs, sleeping, steps_job
from operator_process import OperatorProcess, install_crd
from testcluster import policies, python_host
from testcluster.cluster import Cluster
from testcluster.settings import Settings

Json = dict[str, Any]
Port = tuple[str, int]
PAGE = Path(__file__).parents[2] / "docs" / "pod-security.md"
OPERATOR = {"app.kubernetes.io/name": "ddpjob-operator", "app.kubernetes.io/instance": "mine"}
"""Labels of the operator's pods, as the chart sets them."""
STORE, COORDINATOR = 29400, 29401
LISTENING = """
for name in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(name).read().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address, port = local.split(":")
        if state == "0A" and not address.endswith("0100007F") and not address.endswith("01000000"):
            print(int(port, 16))
"""
"""Prints the ports on which a pod listens, except those of its loopback."""
CONNECT = """
import concurrent.futures, socket, sys
def reaches(target):
    host, port = target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 4).close()
        return target
    except OSError:
        return ""
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(*pool.map(reaches, sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def enforcing(cluster: Cluster, cluster_machine: Settings) -> Iterator[Cluster]:
    """Yield the cluster while its nodes enforce NetworkPolicies."""
    if why := policies.obstacle(cluster):
        refuse(why)
    with policies.enforced(cluster):
        yield cluster


@pytest.fixture(scope="module")
def operators_namespace(enforcing: Cluster) -> Iterator[str]:
    with new_namespace(enforcing, "ddpjob-system") as name:
        yield name


@pytest.fixture(scope="module")
def operator(
    enforcing: Cluster, operators_namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """Run the operator with the peer that the chart would give it. The process itself runs on the
    host, whose address is admitted as that of a reader of metrics.
    """
    require_python_host(enforcing)
    install_crd(enforcing)
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": operators_namespace}}
    peer = {"namespaceSelector": namespace, "podSelector": {"matchLabels": OPERATOR}}
    host = {"ipBlock": {"cidr": f"{enforcing.settings.addresses.door_host}/32"}}
    process = OperatorProcess(enforcing, tmp_path_factory.mktemp("operator") / "operator.log")
    process.start(DDPJOB_OPERATOR_PEER=json.dumps(peer), DDPJOB_OPERATOR_METRICS_PEERS=json.dumps([host]))
    yield process
    process.kill()


@pytest.fixture
def elsewhere(cluster: Cluster) -> Iterator[str]:
    """Yield the namespace of another team."""
    with new_namespace(cluster, "another-team") as name:
        yield name


def run_in(cluster: Cluster, namespace: str, pod: str, code: str, *arguments: str) -> list[str]:
    """Return the words that a Python program prints in a pod."""
    return cluster.kubectl("exec", pod, "--namespace", namespace, "--", "python3", "-c", code, *arguments).split()


def start_pod(cluster: Cluster, namespace: str, name: str, **labels: str) -> None:
    """Start a pod that sleeps, and wait until it runs."""
    pod = python_host.pod(name, sleeping())
    pod["metadata"]["labels"] = labels
    cluster.apply(pod, namespace=namespace)
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--namespace", namespace, "--timeout=90s")


def pods_of(jobs: Jobs, name: str) -> dict[str, str]:
    """Return the addresses of a job's pods, by their names."""
    found = jobs.read("api/v1", "pods", labelSelector=f"ddpjob.io/job={name}")["items"]
    return {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in found}


def ports_of(jobs: Jobs, name: str) -> set[Port]:
    """Return every port on which pods of a job listen."""
    return {
        (address, int(port))
        for pod, address in pods_of(jobs, name).items()
        for port in run_in(jobs.cluster, jobs.namespace, pod, LISTENING)
    }


def reached(cluster: Cluster, namespace: str, pod: str, ports: set[Port]) -> set[Port]:
    """Return the ports to which a pod can connect."""
    targets = [f"{address}:{port}" for address, port in sorted(ports)]
    words = run_in(cluster, namespace, pod, CONNECT, *targets)
    return {(address, int(port)) for address, _, port in (word.rpartition(":") for word in words)}


def test_only_the_jobs_own_pods_and_the_operator_reach_its_ports(
    enforcing: Cluster, jobs: Jobs, elsewhere: str, operators_namespace: str
) -> None:
    """The ports are those of the coordinator, the store, the launchers and the workers."""
    jobs.apply(steps_job("isolated", 10**6))
    jobs.apply(steps_job("open", 10**6, recovery=FAST, nodes=1, network={"isolate": False}))
    start_pod(enforcing, elsewhere, "stranger")
    start_pod(enforcing, elsewhere, "impostor", **OPERATOR)
    start_pod(enforcing, operators_namespace, "operator", **OPERATOR)
    for name in ("isolated", "open"):
        jobs.wait_phase(name, "Running", timeout=180)
        jobs.wait(f"steps of {name}", lambda name=name: jobs.step(name) > 0)
    ports, others = ports_of(jobs, "isolated"), ports_of(jobs, "open")
    coordinator = pods_of(jobs, "isolated")["isolated-coordinator-0"]
    control = {(coordinator, COORDINATOR)}
    assert {(coordinator, STORE), *control} <= ports
    assert {address for address, _ in ports} == set(pods_of(jobs, "isolated").values()), "every pod listens"
    assert reached(enforcing, elsewhere, "stranger", others) == others, "the stranger's own network works"
    assert not reached(enforcing, elsewhere, "stranger", ports)
    assert not reached(enforcing, elsewhere, "impostor", ports), "the labels count only in the operator's namespace"
    assert not reached(enforcing, jobs.namespace, "open-0-0", ports), "another job of the same namespace"
    assert reached(enforcing, jobs.namespace, "isolated-0-0", ports) == ports
    assert reached(enforcing, jobs.namespace, "isolated-1-0", ports) == ports
    assert reached(enforcing, operators_namespace, "operator", ports) == control
    step = jobs.step("isolated")
    jobs.wait("more steps, which the operator reads from the coordinator", lambda: jobs.step("isolated") > step)
    assert jobs.condition("isolated", "Running")["reason"] == "GroupRuns"
    assert jobs.status("isolated")["restarts"]["total"] == 0


def documented_policy() -> Json:
    """Return the policy in docs/pod-security.md."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [policy] = [body for text in blocks if (body := yaml.safe_load(text)).get("kind") == "NetworkPolicy"]
    found: Json = policy
    return found


def test_a_job_trains_under_a_default_deny_of_egress_with_the_documented_policy(enforcing: Cluster, jobs: Jobs) -> None:
    deny = {"podSelector": {}, "policyTypes": ["Egress"]}
    made = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny"}, "spec": deny}
    jobs.apply(made)
    jobs.apply(steps_job("train", 30, recovery=FAST))

    def has_addresses() -> bool:
        pods = jobs.read("api/v1", "pods", labelSelector="ddpjob.io/job=train")["items"]
        return len(pods) == 3 and all(pod["status"].get("phase") == "Running" for pod in pods)

    jobs.wait("three running pods", has_addresses)
    control = {(pods_of(jobs, "train")["train-coordinator-0"], COORDINATOR)}
    assert not reached(enforcing, jobs.namespace, "train-0-0", control), "nothing may leave a pod yet"
    jobs.apply(documented_policy())
    jobs.wait_phase("train", "Complete", timeout=180)
    assert jobs.status("train")["restarts"]["counted"] == 0
