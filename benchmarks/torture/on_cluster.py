"""The arena of the test cluster: pods on nodes, an operator on this machine that is killed as well, nodes that lose their network."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "cluster"))

from arena import Seen, seen_in
from jobs import Json
from operator_process import OperatorProcess, install_crd
from testcluster import python_host
from testcluster.cluster import Cluster
from testcluster.settings import ClusterError
from torture import note

OPERATOR_DOWN, HOST_AWAY = 5.0, 20.0
"""Seconds: how long the operator is down at most; how long a node has no network."""


class OnCluster:
    """Jobs in one namespace."""

    def __init__(self, cluster: Cluster, namespace: str, operator: OperatorProcess, folder: Path) -> None:
        self.cluster, self.namespace, self.operator, self.folder = cluster, namespace, operator, folder
        self.extras: dict[str, tuple[int, Callable[[], bool]]] = {"operator": (2, self._kill_operator), "host": (1, self._cut_host)}
        self._away = threading.Lock()

    def _kubectl(self, *words: str) -> str:
        return self.cluster.kubectl(*words, "--namespace", self.namespace)

    def start(self, name: str, spec: Json) -> None:
        self.checkpoints(name).mkdir(mode=0o777)
        base = {
            "image": python_host.IMAGE, "imagePullPolicy": "IfNotPresent", "podTemplate": python_host.overlay("trainer"),
            "scheduling": {"onePodPerNode": False}, "rendezvous": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}},
            "storage": {"checkpoints": {"hostPath": str(self.checkpoints(name)), "shared": True}},
        }  # fmt: skip
        body = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": name}, "spec": {**base, **spec}}
        self.cluster.apply(body, namespace=self.namespace)

    def look(self, name: str) -> Seen:
        seen = seen_in(self.cluster.kubectl_json("get", "ddpjob", name, "--namespace", self.namespace).get("status", {}))
        for pod in self._pods(name):
            if pod["status"].get("phase") in ("Running", "Pending") and "deletionTimestamp" not in pod["metadata"]:
                role = pod["metadata"]["labels"]["ddpjob.io/role"]
                (seen.coordinators if role == "coordinator" else seen.pods).append(pod["metadata"]["name"])
        return seen

    def _pods(self, name: str) -> list[Any]:
        selector = f"ddpjob.io/job={name}"
        found: list[Any] = self.cluster.kubectl_json("get", "pods", "--namespace", self.namespace, "--selector", selector)["items"]
        return found

    def kill(self, name: str, pods: list[str]) -> None:
        self._kubectl("delete", "pod", *pods, "--force", "--grace-period=0", "--wait=false", "--ignore-not-found")

    def checkpoints(self, name: str) -> Path:
        return self.folder / f"checkpoints-{name}"

    def close(self, name: str) -> None:
        self._kubectl("delete", "ddpjob", name, "--wait=false", "--ignore-not-found")
        self._kubectl("delete", "pods", "--selector", f"ddpjob.io/job={name}", "--force", "--grace-period=0", "--ignore-not-found")

    def _kill_operator(self) -> bool:
        """SIGKILL, and a new one after some seconds; nothing else is killed meanwhile."""
        self.operator.kill()
        seconds = random.Random(time.time_ns()).uniform(0, OPERATOR_DOWN)
        note(f"killed the operator, for {seconds:.1f} s")
        time.sleep(seconds)
        self.operator.start(DDPJOB_OPERATOR_NAMESPACES=self.namespace)
        return True

    def _cut_host(self) -> bool:
        """One node at a time loses its network and comes back; kills go on meanwhile."""
        if not self._away.acquire(blocking=False):
            return False
        host = random.Random(time.time_ns()).choice(sorted(self.cluster.ready_nodes()))
        note(f"cut the network of {host} for {HOST_AWAY:.0f} s")
        self.cluster.cut(host)
        threading.Thread(target=self._bring_back, args=(host,)).start()
        return True

    def _bring_back(self, host: str) -> None:
        try:
            time.sleep(HOST_AWAY)
            self.cluster.heal(host)
            while host not in self.cluster.ready_nodes():
                time.sleep(0.5)
            note(f"{host} is back")
        finally:
            self._away.release()


@contextmanager
def on_test_cluster(folder: Path) -> Iterator[OnCluster]:
    """A namespace and an operator of its own. Raises ClusterError when the test cluster does not run."""
    cluster = Cluster()
    if cluster.state() is None:
        raise ClusterError("the test cluster does not run: make cluster-up")
    install_crd(cluster)
    folder.chmod(0o755)
    namespace = f"torture-{time.time_ns() % 100000}"
    cluster.kubectl("create", "namespace", namespace)
    operator = OperatorProcess(cluster, folder / "operator.log")
    operator.start(DDPJOB_OPERATOR_NAMESPACES=namespace)
    arena = OnCluster(cluster, namespace, operator, folder)
    try:
        yield arena
    finally:
        with arena._away:
            operator.kill()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
