"""The existing cluster in DDPJOB_TEST_KUBECONFIG, which tests use instead of building their own."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from testcluster import builder, python_host
from testcluster.cluster import Cluster

VARIABLE = "DDPJOB_TEST_KUBECONFIG"


def named() -> Path | None:
    """Return the kubeconfig of an existing cluster, or None if the tests build their own."""
    text = os.environ.get(VARIABLE)
    return Path(text).resolve() if text else None


def skip(need: str) -> NoReturn:
    pytest.skip(f"{VARIABLE} names an existing cluster, and this test {need}")


@dataclass(frozen=True)
class BorrowedCluster(Cluster):
    """A cluster that belongs to somebody else, with the operations that tests may use on it. Other
    operations skip the test and give the reason.
    """

    borrowed: Path = Path()
    tools: Path = Path()
    """Folder with links to the kubectl and helm on PATH."""

    @classmethod
    def open(cls, kubeconfig: Path, tools: Path) -> BorrowedCluster:
        """Open the cluster. Fail the session if it cannot be reached, or if an operator would act
        on the tests' jobs.
        """
        tools.mkdir(exist_ok=True)
        for name in ("kubectl", "helm"):
            if found := shutil.which(name):
                (tools / name).symlink_to(found)
        if not (tools / "kubectl").exists():
            pytest.fail(f"{VARIABLE} is set, but kubectl is not on PATH", pytrace=False)
        made = cls(borrowed=kubeconfig, tools=tools)
        if made.kubectl("get", "clusterrole", "ddpjob-operator", "--ignore-not-found").strip():
            pytest.fail(
                f"{VARIABLE}: this cluster runs a DDPJob operator, but the tests start their own; uninstall it first",
                pytrace=False,
            )
        return made

    @property
    def programs(self) -> Path:
        return self.tools

    @property
    def kubeconfig(self) -> Path:
        return self.borrowed

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that accept pods."""
        items = self.kubectl_json("get", "nodes")["items"]
        return tuple(sorted(it["metadata"]["name"] for it in items if not it["spec"].get("unschedulable")))

    def up(self, nodes: int = 2, keep: bool = True) -> float:
        if nodes > len(self.nodes):
            skip(f"needs {nodes} nodes, {len(self.nodes)} can be scheduled on")
        skip("adds nodes and loses them")

    def down(self) -> None:
        skip("ends the cluster")

    def cut(self, node_name: str) -> None:
        skip("cuts a node's network")

    def heal(self, node_name: str) -> None:
        skip("cuts a node's network")

    def register(self, node_name: str) -> None:
        skip("restarts a kubelet")

    def load_image(self, image: builder.Image, nodes: tuple[str, ...] | None = None) -> None:
        skip("loads an image into the nodes")


def require_python_host(cluster: Cluster) -> None:
    """Skip a test with pods if the nodes cannot run this machine's Python."""
    if not isinstance(cluster, BorrowedCluster):
        return
    items = json.loads(cluster.kubectl("get", "nodes", "--output=json"))["items"]
    holders = [it for it in items if python_host.IMAGE in str(it["status"].get("images", ()))]
    if len(holders) < 2:
        skip(f"runs pods of the image {python_host.IMAGE}, with this machine's Python mounted: two nodes must have it")
