"""The test cluster leaves nothing behind, no matter how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from testcluster import cgroups, network, processes, python_host
from testcluster.cluster import LEGACY_LOG_LINKS, Cluster
from testcluster.settings import MODULE, ClusterError, Settings

pytestmark = pytest.mark.slow


def command_line(cluster: Cluster, *words: str, package: Path | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of `python -m testcluster`, in the slot of
    `cluster`.
    """
    folder = package or Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parents[1]))),
        "DDPJOB_CLUSTER_SLOT": str(cluster.settings.slot),
        "DDPJOB_CLUSTER_CACHE": str(cluster.settings.cache),
    }
    return [sys.executable, "-m", "testcluster", *words], env


def leftovers(settings: Settings) -> list[str]:
    """Return everything on this machine that belongs to a cluster."""
    found = [f"process {pid}" for pid in cgroups.members(settings)]
    found += [str(root / settings.prefix) for root in cgroups.hierarchies() if (root / settings.prefix).exists()]
    found += network.namespaces(settings)
    found += [line for line in processes.run("ip", "-brief", "link").splitlines() if settings.prefix in line]
    found += [line for line in processes.run("ip", "route").splitlines() if settings.prefix in line]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(settings.run) in line]
    found += [
        str(link)
        for link in LEGACY_LOG_LINKS.glob("*")
        if link.is_symlink() and link.readlink().is_relative_to(settings.run)
    ]
    return found + [str(settings.run)] * settings.run.exists()


def run_a_pod(cluster: Cluster) -> None:
    cluster.apply(python_host.pod("held", ["sleep", "600"], "n1"))
    phase = ("get", "pod", "held", "--output=jsonpath={.status.phase}")
    processes.wait_for("the pod to run", lambda: cluster.kubectl(*phase) == "Running", cluster.settings, timeout=60)


def test_down_cleans_up_after_all_programs_were_killed(other: Cluster) -> None:
    """Shims and pods outlive their containerd. Only their cgroups show the cluster that they belong
    to.
    """
    other.up(nodes=1)
    run_a_pod(other)
    for process in processes.recorded(other.settings):
        os.kill(process.pid, signal.SIGKILL)
    for process in processes.recorded(other.settings):
        processes.wait_for(f"the end of {process.name}", lambda process=process: not process.alive(), timeout=10)
    assert cgroups.members(other.settings), "the pod's processes must have survived, otherwise this test shows nothing"
    other.down()
    assert leftovers(other.settings) == []
    other.down()  # it is not an error if there is nothing to remove


def test_up_repairs_a_cluster_that_has_crashed(other: Cluster) -> None:
    other.up(nodes=1)
    victim = next(process for process in processes.recorded(other.settings) if process.name == "kube-apiserver")
    os.kill(victim.pid, signal.SIGKILL)
    processes.wait_for("the API server to end", lambda: not victim.alive(), timeout=10)
    other.up(nodes=1)
    assert other.ready_nodes() == {"n1"}


def test_a_lone_api_server_starts_fast_and_can_become_a_cluster_with_nodes(other: Cluster) -> None:
    other.up(nodes=0)
    assert {process.name for process in processes.recorded(other.settings)} == {"etcd", "kube-apiserver"}
    other.kubectl("create", "namespace", "kept")
    other.up(nodes=0)
    other.kubectl("get", "namespace", "kept")
    other.up(nodes=1)
    assert other.ready_nodes() == {"n1"}


def test_a_killed_up_command_does_not_affect_the_next_one(other: Cluster) -> None:
    command, env = command_line(other, "up", "--nodes", "1")
    starting = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    processes.wait_for(
        "containerd to be started", lambda: (other.settings.run / "pid" / "n1-containerd").exists(), timeout=60
    )
    starting.kill()
    starting.wait()
    state = other.state()
    assert state is not None
    assert not state.ready
    other.up(nodes=1)
    assert other.ready_nodes() == {"n1"}
    other.down()
    assert leftovers(other.settings) == []


def test_a_cluster_of_another_checkout_is_refused_and_left_alone(other: Cluster, tmp_path: Path) -> None:
    other.up(nodes=1)
    copy = tmp_path / "checkout" / "tests" / "cluster"
    shutil.copytree(Path(__file__).parent / "testcluster", copy / "testcluster")
    shutil.copytree(MODULE, copy / "binaries")
    command, env = command_line(other, "up", "--nodes", "1", package=copy)
    # The command must work although a module in the current folder takes precedence.
    done = subprocess.run(command, env=env, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert f"slot {other.settings.slot} is taken by the cluster of {Path(__file__).parents[2]}" in done.stderr
    assert "DDPJOB_CLUSTER_SLOT" in done.stderr
    # Test runs use this to find a free slot.
    assert not other.is_anothers()
    ask = "from testcluster.cluster import Cluster; print(Cluster().is_anothers())"
    assert processes.run(sys.executable, "-c", ask, env=env).strip() == "True"
    assert other.ready_nodes() == {"n1"}


def test_invalid_numbers_in_settings_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_CLUSTER_SLOT", "99")
    with pytest.raises(ClusterError, match="DDPJOB_CLUSTER_SLOT=99: must be a number from 0 to 15"):
        Settings()
    with pytest.raises(ClusterError, match=r"nodes: 8: must be from 0 .* to 7"):
        Cluster(Settings(slot=1)).up(nodes=8)
