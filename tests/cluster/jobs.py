"""DDPJobs of the cluster tests: manifests whose pods use this machine's Python, and waits for
their states.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import kubernetes
import urllib3
from machine import slowness
from testcluster import python_host
from testcluster.cluster import Cluster
from testcluster.settings import ClusterError

SCRIPTS = Path(__file__).parent / "scripts"
Json = dict[str, Any]
FAST = {"mode": "Fast"}
"""The `recovery` of jobs whose mode does not matter. Their pods import torch once, without its
compiler, and start with less than half of the CPU time that mode Standard needs.
"""


def job(name: str, **spec: Any) -> Json:
    """Return a DDPJob of two CPU nodes. `spec` adds or replaces fields of its spec."""
    base: Json = {
        "image": python_host.IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "nodes": 2,
        "gpusPerNode": 0,
        "rendezvous": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}},
        "podTemplate": python_host.overlay("trainer"),
    }
    return {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": name}, "spec": base | spec}


def sleeping(seconds: int = 3600) -> list[str]:
    """Return a `command` that ends on SIGTERM. The first process of a container ignores SIGTERM
    unless it has a handler.
    """
    return ["sh", "-c", f"trap 'exit 143' TERM; sleep {seconds} & wait"]


def training_job(name: str, *args: str, **spec: Any) -> Json:
    """Return a job with the project's own trainer. Its threads are limited, because each pod sees
    all cores and would start one thread per core.
    """
    return job(name, module="ddpjob_trainer", args=[*args, "train.threads=1"], **spec)


def steps_job(name: str, steps: int = 50, *arguments: str, **spec: Any) -> Json:
    """Return a job with the plain script scripts/ddp_steps.py, at 0.1 s per step."""
    return job(name, script=str(SCRIPTS / "ddp_steps.py"), args=[f"--steps={steps}", *arguments], **spec)


class Jobs:
    """The jobs of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def apply(self, manifest: Json) -> None:
        self.cluster.apply(manifest, namespace=self.namespace)

    def kubectl(self, *words: str) -> str:
        return self.cluster.kubectl(*words, "--namespace", self.namespace)

    @cached_property
    def _access(self) -> tuple[str, dict[str, str], urllib3.PoolManager]:
        """Return (address, headers, connections) of the API server."""
        settings = kubernetes.client.Configuration()
        settings.retries = False
        kubernetes.config.load_kube_config(str(self.cluster.kubeconfig), client_configuration=settings)
        token = settings.get_api_key_with_prefix("authorization")
        pool: urllib3.PoolManager = kubernetes.client.ApiClient(settings).rest_client.pool_manager
        return settings.host, {"Authorization": token} if token else {}, pool

    def read(self, group: str, path: str, **query: str) -> Json:
        """Return the API server's response over a persistent connection. It is used because waits
        poll five times a second, and kubectl would need a new process each time.

        `group` is `api/v1` or `apis/GROUP/VERSION`; `path` is relative to the namespace.
        """
        address, headers, pool = self._access
        url = f"{address}/{group}/namespaces/{self.namespace}/{path}"
        try:
            answer = pool.request("GET", url, fields=query, headers=headers, timeout=30.0)
        except urllib3.exceptions.HTTPError as error:
            raise ClusterError(f"{url}: {error}") from error
        if answer.status != 200:
            raise ClusterError(f"{url}: {answer.status} {answer.data.decode(errors='replace')[:1000]}")
        found: Json = json.loads(answer.data)
        return found

    def status(self, name: str) -> Json:
        status: Json = self.read("apis/ddpjob.io/v1alpha1", f"ddpjobs/{name}").get("status", {})
        return status

    def condition(self, name: str, kind: str) -> Json:
        """Return the condition, or an empty one if it has never been written."""
        return next((c for c in self.status(name).get("conditions", ()) if c["type"] == kind), {})

    def pods(self, role: str = "node") -> dict[str, Json]:
        found = self.read("api/v1", "pods", labelSelector=f"ddpjob.io/role={role}")
        return {pod["metadata"]["name"]: pod for pod in found["items"]}

    def held(self, name: str) -> list[str]:
        """Return the pods of a job that are bound to a Kubernetes node."""
        return [
            pod
            for pod, body in self.pods().items()
            if pod.startswith(f"{name}-") and body["spec"].get("nodeName") and body["status"]["phase"] != "Succeeded"
        ]

    def kill(self, pod: str) -> None:
        """Force-delete a pod, as users do with pods that hang."""
        self.kubectl("delete", "pod", pod, "--force", "--grace-period=0")

    def wait(self, what: str, ready: Callable[[], bool], timeout: float = 90) -> float:
        """Wait until `ready` returns true, and return the seconds it took. Fails the test after
        `timeout` seconds (longer on a busy machine).
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout * slowness():
            if ready():
                return time.monotonic() - began
            time.sleep(0.2)
        raise AssertionError(
            f"did not happen within {timeout} s: {what}\n{self.kubectl('get', 'ddpjobs,pods', '--output=wide')}"
        )

    def wait_phase(self, name: str, phase: str, timeout: float = 90) -> float:
        """Wait for a phase. A different terminal phase fails the test immediately, with its
        message.
        """

        def reached() -> bool:
            status = self.status(name)
            now = status.get("phase")
            if now != phase and now in ("Complete", "Failed"):
                raise AssertionError(f"{name} is {now}, not {phase}: {status['conditions']}")
            return bool(now == phase)

        return self.wait(f"{name} is {phase}", reached, timeout)

    def wait_unschedulable(self, name: str, why: str, timeout: float = 90) -> float:
        """Wait until the condition contains the reason. The scheduler's first verdict on a pod may
        not contain the reason yet.
        """

        def said() -> bool:
            condition = self.condition(name, "Scheduled")
            return condition.get("reason") == "Unschedulable" and why in condition["message"]

        return self.wait(f"{name} has no room: {why}", said, timeout)

    def step(self, name: str) -> int:
        return int(self.status(name).get("progress", {}).get("step", 0))
