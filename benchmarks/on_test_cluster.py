"""Runs apply_to_pods.py on the test cluster (`make cluster-up`), with an operator of its own on this machine that sees one namespace.

    python benchmarks/on_test_cluster.py [OPTIONS OF apply_to_pods.py]

The pods run scripts/ddp_steps.py of the cluster tests with this machine's Python: no image is pulled.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "cluster"))

from jobs import steps_job  # noqa: E402
from operator_process import OperatorProcess, install_crd  # noqa: E402
from testcluster.cluster import Cluster  # noqa: E402

HEALTH_PORT = 18080


def main() -> int:
    """The benchmark's exit code. The operator and the namespace are gone at the end."""
    cluster = Cluster()
    if cluster.state() is None:
        print("the test cluster does not run: make cluster-up", file=sys.stderr)
        return 2
    install_crd(cluster)
    namespace = f"benchmark-{secrets.token_hex(2)}"
    cluster.kubectl("create", "namespace", namespace)
    with tempfile.TemporaryDirectory() as folder:
        operator = OperatorProcess(cluster, Path(folder) / "operator.log")
        operator.start(DDPJOB_OPERATOR_NAMESPACES=namespace, DDPJOB_OPERATOR_HEALTH_PORT=str(HEALTH_PORT))
        try:
            wait_healthy(operator, HEALTH_PORT)
            manifest = Path(folder) / "job.yaml"
            manifest.write_text(json.dumps(steps_job("benchmark", 20)))
            command = [sys.executable, str(HERE / "apply_to_pods.py"), str(manifest), "--namespace", namespace, *sys.argv[1:]]
            return subprocess.run(command, env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}, check=False).returncode
        finally:
            operator.kill()
            cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def wait_healthy(operator: OperatorProcess, port: int) -> None:
    """Until its probe answers. Raises SystemExit with its log when it has ended."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1):
                return
        except OSError:
            if not operator.running():
                break
            time.sleep(0.1)
    raise SystemExit(f"the operator does not start:\n{operator.log.read_text(errors='replace')}")


if __name__ == "__main__":
    sys.exit(main())
