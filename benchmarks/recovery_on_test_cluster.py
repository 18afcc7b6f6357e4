"""Measures recovery on the test cluster (`make cluster-up`), with its own operator on this machine.

    python -m benchmarks.recovery_on_test_cluster [--runs 20] [--cases ...] [--csv FILE]

Runs the cases of `python -m benchmarks.recovery cluster`, and fast-network-cut, which disconnects a
node from the network. Nobody else may use the cluster at the same time. The operator watches one
namespace. The pods run recovery/steps.py with this machine's Python, so that no image is pulled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpjob.client.manifests.manifest_sources import read_job
from kubernetes import config

from benchmarks.processes import exit_on_sigterm
from benchmarks.recovery import cluster as on_cluster
from benchmarks.recovery import interleaved
from benchmarks.recovery.groups import SCRIPT
from benchmarks.testbed import job, testbed

CASES = (*on_cluster.ON_CLUSTER, on_cluster.CUT)


@contextmanager
def backend(folder: Path, patience: float) -> Iterator[on_cluster.Cluster]:
    """Provide the test cluster with an operator.

    The operator and its namespace are removed at the end.
    """
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    folder.chmod(0o755)
    with testbed("recovery", folder) as bed:
        storage = {"checkpoints": {"hostPath": str(checkpoints), "shared": True}}
        manifest = folder / "job.json"
        body = job("recovery", script=str(SCRIPT), storage=storage, scheduling={"onePodPerNode": False})
        manifest.write_text(json.dumps(body))
        config.load_kube_config(str(bed.cluster.kubeconfig))
        made = on_cluster.Cluster(read_job(manifest), bed.namespace, checkpoints, patience)
        made.cut, made.heal = bed.cluster.cut, bed.cluster.heal
        yield made


def main() -> int:
    """Return 0 if everything was measured, 1 if a case did not recover, 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    interleaved.add_options(parser, CASES)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as folder,
        backend(Path(folder), options.patience) as on,
    ):
        return interleaved.run(on, CASES, options)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
