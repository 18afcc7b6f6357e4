"""Tortures jobs on the test cluster, where the operator is also killed and hosts lose their
network.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.testbed import Testbed, python_host, testbed
from benchmarks.torture.arena import Observed, observed_in
from benchmarks.torture.jobs import Json
from benchmarks.torture.torture import note

OPERATOR_DOWN, HOST_AWAY = 5.0, 20.0
"""Longest downtime of the operator, and the time for which a host has no network, in seconds."""


class OnCluster:
    """Jobs in one namespace."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.cluster, self.namespace, self.operator, self.folder = bed.cluster, bed.namespace, bed.operator, folder
        self.extras: dict[str, tuple[int, Callable[[], bool]]] = {
            "operator": (2, self._kill_operator),
            "host": (1, self._cut_host),
        }
        self.faults: dict[str, tuple[int, Callable[[str, Observed], str]]] = {}
        self._away = threading.Lock()

    def _kubectl(self, *words: str) -> str:
        return self.cluster.kubectl(*words, "--namespace", self.namespace)

    def start(self, name: str, spec: Json) -> None:
        self.checkpoints(name).mkdir(mode=0o777)
        base = {
            "image": python_host.IMAGE, "imagePullPolicy": "IfNotPresent",
            "podTemplate": python_host.overlay("trainer"), "scheduling": {"onePodPerNode": False},
            "rendezvous": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}},
            "storage": {"checkpoints": {"hostPath": str(self.checkpoints(name)), "shared": True}},
        }  # fmt: skip
        body = {
            "apiVersion": "ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name},
            "spec": {**base, **spec},
        }
        self.cluster.apply(body, namespace=self.namespace)

    def observe(self, name: str) -> Observed:
        observed = observed_in(
            self.cluster.kubectl_json("get", "ddpjob", name, "--namespace", self.namespace).get("status", {})
        )
        for pod in self._pods(name):
            if pod["status"].get("phase") in ("Running", "Pending") and "deletionTimestamp" not in pod["metadata"]:
                role = pod["metadata"]["labels"]["ddpjob.io/role"]
                (observed.coordinators if role == "coordinator" else observed.pods).append(pod["metadata"]["name"])
        return observed

    def _pods(self, name: str) -> list[Any]:
        selector = f"ddpjob.io/job={name}"
        found: list[Any] = self.cluster.kubectl_json(
            "get", "pods", "--namespace", self.namespace, "--selector", selector
        )["items"]
        return found

    def kill(self, name: str, pods: list[str]) -> None:
        self._kubectl("delete", "pod", *pods, "--force", "--grace-period=0", "--wait=false", "--ignore-not-found")

    def checkpoints(self, name: str) -> Path:
        return self.folder / f"checkpoints-{name}"

    def missed(self, name: str) -> int:
        return 0

    def close(self, name: str) -> None:
        self._kubectl("delete", "ddpjob", name, "--wait=false", "--ignore-not-found")
        self._kubectl(
            "delete", "pods", "--selector", f"ddpjob.io/job={name}", "--force", "--grace-period=0", "--ignore-not-found"
        )

    def _kill_operator(self) -> bool:
        """Kill the operator, and start a new one a few seconds later.

        Nothing else is killed until then.
        """
        self.operator.kill()
        seconds = random.Random(time.time_ns()).uniform(0, OPERATOR_DOWN)
        note(f"killed the operator, for {seconds:.1f} s")
        time.sleep(seconds)
        self.operator.start(DDPJOB_OPERATOR_NAMESPACES=self.namespace)
        return True

    def _cut_host(self) -> bool:
        """Disconnect one host at a time and reconnect it, while other kills continue."""
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

    def wait_for_hosts(self) -> None:
        """Wait until every host has its network."""
        with self._away:
            pass


@contextmanager
def on_test_cluster(folder: Path) -> Iterator[OnCluster]:
    """Provide the test cluster with its own namespace and operator.

    Every host has its network back at the end.
    """
    folder.chmod(0o755)
    with testbed("torture", folder) as bed:
        arena = OnCluster(bed, folder)
        try:
            yield arena
        finally:
            arena.wait_for_hosts()
