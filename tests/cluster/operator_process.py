"""The operator as a process on this machine, for tests that start and kill it. It sees the same
cluster as a pod would.
"""

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
    """Runs one operator process at a time. `start` after `kill` starts a new process without any
    state.
    """

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
        """Kill the operator with SIGKILL, so that it cannot clean up."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


def install_crd(cluster: Cluster, folder: Path = CRD) -> None:
    """Apply the CRD in a folder, and wait until the API serves it.

    `kubectl wait` is not used, because it fails if the API server has not written the CRD's first
    condition yet.
    """
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(folder))
    processes.wait_for("the API server to serve ddpjobs", lambda: _served(cluster), timeout=60)


def _served(cluster: Cluster) -> bool:
    found = cluster.kubectl_json("get", "customresourcedefinition", "ddpjobs.ddpjob.io")
    conditions = {it["type"]: it["status"] for it in found.get("status", {}).get("conditions") or ()}
    listing = ("get", "--raw", "/apis/ddpjob.io/v1alpha1")
    return conditions.get("Established") == "True" and cluster.succeeds(*listing) and cluster.succeeds("get", "ddpjobs")
