"""The operator as a process of this machine, for tests that start and kill it; it sees the cluster as the one in a pod does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from testcluster.cluster import Cluster

KEY = "a key of the tests, used by every life of the operator"
CRD = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "crds"


class OperatorProcess:
    """One life at a time; `start` after `kill` is a restart with nothing remembered."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        self.cluster, self.log = cluster, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, **environment: str) -> None:
        settings = {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "DDPJOB_OPERATOR_KEY": KEY,
            "DDPJOB_OPERATOR_HEALTH_PORT": "0",
            "DDPJOB_OPERATOR_METRICS_PORT": "0",
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
        """SIGKILL: nothing is tidied up."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def wait_ended(self, timeout: float = 60) -> int:
        """The exit code of a life that ends by itself."""
        assert self.process is not None
        code = self.process.wait(timeout)
        self.process = None
        return code

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


def install_crd(cluster: Cluster) -> None:
    """Applies the CRD and waits until the API serves it."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd/ddpjobs.ddpjob.io")
    for _ in range(100):
        if "ddpjobs" in cluster.kubectl("api-resources", "--api-group=ddpjob.io"):
            return
        time.sleep(0.1)
    raise AssertionError("the API server does not serve ddpjobs")
