"""Clusters whose machines differ: two architectures, an image mirror that lacks a layer, and a host
that cannot start a coordinator.
"""

from __future__ import annotations

from typing import Any

import pytest

from .clock import stamp
from .kubelet import Pod
from .simulated import Simulation, conditions
from .test_recovery_in_simulation import reasons

NO_PLATFORM = 'failed to pull and unpack image "image": no match for platform in manifest: not found'
EXEC = "exec /usr/bin/python3: exec format error"
NO_LAYER = "failed to copy: httpReadSeeker: failed open: content at https://mirror/v2/i/blobs/1 not found: not found"
MODES = pytest.mark.parametrize("mode", ["Standard", "Fast"])


def mixed(mode: str, arm: int = 6, **spec: Any) -> Simulation:
    """Return a cluster with two amd64 machines on which the job's nodes run, and empty arm64
    machines.
    """
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "maxRestarts": 0}, **spec}, steps=50)
    for number, host in enumerate(s.machines.hosts.values()):
        is_arm = number < arm
        s.machines.label(host, **{"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64" if is_arm else "amd64"})
    s.machines.favourite = {0: "n6", 1: "n7"}
    return s


def on_arm(s: Simulation, fault: tuple[str | int, str]) -> None:
    def faults(pod: Pod) -> tuple[str | int, str] | None:
        return fault if pod.host.body["metadata"]["labels"]["kubernetes.io/arch"] == "arm64" else None

    s.machines.faults = faults


def coordinator_hosts(s: Simulation) -> list[str]:
    recent = s.status["restarts"].get("recent", ())
    return [r["node"] for r in recent if r["reason"] == "CoordinatorLost"]


@MODES
async def test_the_coordinator_prefers_the_architecture_of_the_jobs_nodes(mode: str) -> None:
    s = mixed(mode)
    on_arm(s, ("ErrImagePull", NO_PLATFORM))
    await s.until_phase("Complete", limit=120)
    assert s.status["restarts"]["display"] == "0/0" and coordinator_hosts(s) == []


@MODES
@pytest.mark.parametrize("fault", [("ErrImagePull", NO_PLATFORM), (255, EXEC)], ids=["pull", "exec"])
async def test_a_coordinator_on_the_wrong_architecture_moves_without_counting(
    mode: str, fault: tuple[str | int, str]
) -> None:
    s = mixed(mode)
    on_arm(s, fault)
    s.machines._far = lambda pod, host: False  # type: ignore[method-assign]  # The nodes were not placed yet.
    await s.until(lambda: s.phase in ("Complete", "Failed"), limit=600)
    assert s.phase == "Complete" and s.status["restarts"]["counted"] == 0
    hosts = coordinator_hosts(s)
    assert hosts and len(set(hosts)) == len(hosts), "no host is tried twice"
    message = s.status["restarts"]["recent"][0]["message"]
    assert f"was not built for the architecture or operating system of Kubernetes node {hosts[0]}" in message


@MODES
async def test_an_image_without_a_matching_architecture_fails_the_job(mode: str) -> None:
    s = mixed(mode, arm=8)
    on_arm(s, ("ErrImagePull", NO_PLATFORM))
    await s.until_phase("Failed", limit=120)
    assert conditions(s)["Failed"]["reason"] == "InitFailure"
    assert "no match for platform" in conditions(s)["Failed"]["message"]


@MODES
async def test_a_mirror_that_temporarily_lacks_a_layer_does_not_fail_the_job(mode: str) -> None:
    s = mixed(mode)
    s.machines.faults = lambda pod: ("ErrImagePull", NO_LAYER) if s.now < 30 else None
    await s.until(lambda: s.now >= 20)
    assert s.phase in ("Pending", "Starting") and conditions(s)["Running"]["reason"] == "ErrImagePull"
    await s.until_phase("Complete", limit=120)


@MODES
@pytest.mark.parametrize("fault", [(1, "dlopen: lunch"), ("ContainerCreating", "")], ids=["ends", "unprepared"])
async def test_if_a_coordinator_cannot_start_its_host_is_blamed_before_the_program(
    mode: str, fault: tuple[str | int, str]
) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "maxRestarts": 0}}, steps=50)
    hosts: list[str] = []

    def faults(pod: Pod) -> tuple[str | int, str] | None:
        if pod.is_node:
            return None
        hosts.append(pod.node)
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(pod.born)}
        if pod.node == hosts[0]:
            pod.body["status"]["conditions"] = [placed, {"type": "PodReadyToStartContainers", "status": "False"}]
        return fault if pod.node == hosts[0] else None

    s.machines.faults = faults
    await s.until(lambda: s.phase in ("Complete", "Failed"), limit=300)
    assert s.phase == "Complete" and reasons(s) == [("CoordinatorLost", False)]
    assert f"on Kubernetes node {hosts[0]}" in s.status["restarts"]["recent"][0]["message"]
    assert [entry["node"] for entry in s.status["avoidedNodes"]] == [hosts[0]]


@MODES
async def test_only_the_first_host_on_which_a_coordinator_fails_is_blamed(mode: str) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "maxRestarts": 1}}, steps=50)
    s.machines.faults = lambda pod: (1, "ImportError: lunch") if not pod.is_node else None
    await s.until(lambda: s.phase == "Failed" or s.status.get("restarts", {}).get("total", 0) >= 3, limit=200)
    counted = s.status["restarts"]["counted"]
    assert counted == (2 if mode == "Standard" else 0), "the first host is blamed, later ones are not"
    hosts = coordinator_hosts(s)
    assert hosts[0] != hosts[1]
