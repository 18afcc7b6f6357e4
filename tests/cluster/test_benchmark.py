"""The benchmark runs, and what it prints is what it measured."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Jobs, steps_job
from testcluster.settings import CHECKOUT

pytestmark = pytest.mark.slow
PROGRAM = CHECKOUT / "benchmarks" / "apply_to_pods.py"


def benchmark(jobs: Jobs, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    manifest = folder / "job.yaml"
    manifest.write_text(json.dumps(steps_job("benchmark", 3)))
    command = [sys.executable, str(PROGRAM), str(manifest), "--namespace", jobs.namespace, *options]
    environment = {**os.environ, "KUBECONFIG": str(jobs.cluster.kubeconfig)}
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240, check=False)


def test_the_figures(jobs: Jobs, tmp_path: Path) -> None:
    figures = tmp_path / "figures.csv"
    done = benchmark(jobs, tmp_path, "--runs", "2", "--step-runs", "1", "--csv", str(figures))
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(figures.open()))
    assert [(row["what"], row["pods"]) for row in rows] == [("apply -> pods", "3"), ("direct", "3")] * 2 + [("apply -> step", "0")]
    seconds = [float(row["seconds"]) for row in rows]
    assert all(value > 0 for value in seconds)
    assert max(seconds[:4]) < seconds[4], "containers and torch take longer than the control plane"
    shown = re.search(r"apply -> step +2 +1 +(\S+) +(\S+)", done.stdout)
    assert shown and [float(value) for value in shown.groups()] == pytest.approx([seconds[4]] * 2, abs=0.001)
    assert not jobs.pods() and not jobs.kubectl("get", "ddp", "--output=name").strip()


def test_a_log_without_the_step_is_told(jobs: Jobs, tmp_path: Path) -> None:
    done = benchmark(jobs, tmp_path, "--runs", "0", "--step-runs", "1", "--step-pattern", "no such line")
    assert done.returncode == 1
    assert "no such line" in done.stderr and "--step-pattern" in done.stderr
    assert not jobs.pods()
