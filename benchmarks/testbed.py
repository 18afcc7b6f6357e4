"""The test cluster (`make cluster-up`) with a benchmark's own namespace and operator process."""

from __future__ import annotations

import secrets
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.processes import free_port

sys.path += [str(CHECKOUT / "tests"), str(CHECKOUT / "tests" / "cluster")]  # The test cluster's modules.

from jobs import Jobs, job, steps_job
from operator_process import KEY, OperatorProcess, install_crd
from prometheus_programs import PrometheusServer
from testcluster import controlplane, prerequisites, processes, python_host
from testcluster.cluster import Cluster
from testcluster.processes import recorded

__all__ = [
    "KEY",
    "Cluster",
    "Jobs",
    "OperatorProcess",
    "PrometheusServer",
    "Testbed",
    "controlplane",
    "install_crd",
    "job",
    "prerequisites",
    "processes",
    "python_host",
    "recorded",
    "steps_job",
    "testbed",
]


@dataclass(frozen=True)
class Testbed:
    """An operator that watches one namespace of the test cluster."""

    cluster: Cluster
    namespace: str
    operator: OperatorProcess

    def start_operator(self) -> None:
        """Start the operator, and wait for its health probe.

        Raises SystemExit with its log if the operator ends.
        """
        port = free_port()
        self.operator.start(DDPJOB_OPERATOR_NAMESPACES=self.namespace, DDPJOB_OPERATOR_HEALTH_PORT=str(port))
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1):
                    return
            except OSError:
                if not self.operator.running():
                    break
                time.sleep(0.1)
        raise SystemExit(f"the operator did not start:\n{self.operator.log.read_text(errors='replace')}")


@contextmanager
def testbed(name: str, folder: Path) -> Iterator[Testbed]:
    """Provide a namespace `NAME-...` and an operator that logs to `folder`; remove both at the end.

    Exits with 2 if the test cluster is not running.
    """
    cluster = Cluster()
    if cluster.state() is None:
        print("the test cluster is not running; start it with make cluster-up", file=sys.stderr)
        raise SystemExit(2)
    install_crd(cluster)
    namespace = f"{name}-{secrets.token_hex(2)}"
    cluster.kubectl("create", "namespace", namespace)
    bed = Testbed(cluster, namespace, OperatorProcess(cluster, folder / "operator.log"))
    try:
        bed.start_operator()
        yield bed
    finally:
        bed.operator.kill()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
