"""Runs benchmarks.apply_to_pods on the test cluster (`make cluster-up`), with its own operator.

    python -m benchmarks.on_test_cluster [OPTIONS OF benchmarks.apply_to_pods]

The operator watches one namespace. The pods run tests/cluster/scripts/ddp_steps.py with this
machine's Python, so that no image is pulled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.testbed import steps_job, testbed


def main() -> int:
    """Run the benchmark, and return its exit code."""
    with tempfile.TemporaryDirectory() as folder, testbed("benchmark", Path(folder)) as bed:
        manifest = Path(folder) / "job.yaml"
        manifest.write_text(json.dumps(steps_job("benchmark", 20)))
        program = [sys.executable, "-m", "benchmarks.apply_to_pods", str(manifest), "--namespace", bed.namespace]
        environment = {**os.environ, "KUBECONFIG": str(bed.cluster.kubeconfig), "PYTHONPATH": str(CHECKOUT)}
        return subprocess.run([*program, *sys.argv[1:]], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
