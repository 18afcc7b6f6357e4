"""Measures recovery on the test cluster (`make cluster-up`), with an operator of its own on this machine that sees one namespace.

    python benchmarks/recovery_on_test_cluster.py [--runs 20] [--cases ...] [--csv FILE]

The cases of `python benchmarks/recovery cluster`, and fast-network-cut, which cuts a node's network: nobody else may use the cluster then.
The pods run recovery/steps.py with this machine's Python: no image is pulled.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "recovery"), str(HERE.parent / "tests" / "cluster")]

import cluster as on_cluster  # noqa: E402
import interleaved  # noqa: E402
from ddpjob.cli.run import read_job  # noqa: E402
from jobs import job  # noqa: E402
from kubernetes import config  # noqa: E402
from on_test_cluster import wait_healthy  # noqa: E402
from operator_process import OperatorProcess, install_crd  # noqa: E402
from testcluster.cluster import Cluster  # noqa: E402

CASES = (*on_cluster.ON_CLUSTER, on_cluster.CUT)


@contextmanager
def place(cluster: Cluster, folder: Path, patience: float) -> Iterator[on_cluster.Cluster]:
    """A namespace and an operator, gone at the end."""
    install_crd(cluster)
    namespace = f"recovery-{secrets.token_hex(2)}"
    cluster.kubectl("create", "namespace", namespace)
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    folder.chmod(0o755)
    operator = OperatorProcess(cluster, folder / "operator.log")
    operator.start(DDPJOB_OPERATOR_NAMESPACES=namespace, DDPJOB_OPERATOR_HEALTH_PORT="18081")
    try:
        wait_healthy(operator, 18081)
        storage = {"checkpoints": {"hostPath": str(checkpoints), "shared": True}}
        manifest = folder / "job.json"
        manifest.write_text(
            json.dumps(job("recovery", script=str(HERE / "recovery" / "steps.py"), storage=storage, scheduling={"onePodPerNode": False}))
        )
        config.load_kube_config(str(cluster.kubeconfig))
        made = on_cluster.Cluster(read_job(manifest), namespace, checkpoints, patience)
        made.cut, made.heal = cluster.cut, cluster.heal
        yield made
    finally:
        operator.kill()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def main() -> int:
    """0 when everything was measured, 1 when a case did not recover, 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    interleaved.add_options(parser, CASES)
    options = parser.parse_args()
    cluster = Cluster()
    if cluster.state() is None:
        print("the test cluster does not run: make cluster-up", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as folder,
        place(cluster, Path(folder), options.patience) as on,
    ):
        return interleaved.run(on, CASES, options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended on the way out
    sys.exit(main())
