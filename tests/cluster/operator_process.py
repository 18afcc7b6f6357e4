"""The operator as a process of this machine, for tests that start and kill it; a pod would see the same cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from testcluster import processes
from testcluster.cluster import Cluster

KEY = "a key of the tests, used by every start of the operator"
CRD = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "crds"


class OperatorProcess:
    """One process at a time; `start` after `kill` is a restart with nothing remembered."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        self.cluster, self.log = cluster, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, **environment: str) -> None:
        settings = {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "DDPJOB_OPERATOR_KEY": KEY,
            "DDPJOB_OPERATOR_HEALTH_PORT": "0",
            "DDPJOB_OPERATOR_METRICS_PORT": "0",
            "DDPJOB_OPERATOR_NODE_CONDITIONS": '["GpuUnhealthy=True"]',
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command or [sys.executable, "-m", "ddpjob.controller"],
                env={**os.environ, **settings, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL: nothing is cleaned up."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


def install_crd(cluster: Cluster, folder: Path = CRD) -> None:
    """Apply the CRD in a folder, and wait until the API serves it.

    Not by `kubectl wait`, which fails where the API server has not yet written the CRD's first condition.
    """
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(folder))
    processes.wait_for("the API server to serve ddpjobs", lambda: _served(cluster), timeout=60)


def _served(cluster: Cluster) -> bool:
    found = cluster.kubectl_json("get", "customresourcedefinition", "ddpjobs.ddpjob.io")
    conditions = {it["type"]: it["status"] for it in found.get("status", {}).get("conditions") or ()}
    listing = ("get", "--raw", "/apis/ddpjob.io/v1alpha1")
    return conditions.get("Established") == "True" and cluster.succeeds(*listing) and cluster.succeeds("get", "ddpjobs")
