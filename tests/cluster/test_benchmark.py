"""The benchmark runs and prints its measurements."""

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
from machine import slowness
from testcluster.cluster import Cluster
from testcluster.settings import CHECKOUT

pytestmark = pytest.mark.slow


def benchmark(jobs: Jobs, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    manifest = folder / "job.yaml"
    manifest.write_text(json.dumps(steps_job("benchmark", 3)))
    command = [sys.executable, "-m", "benchmarks.apply_to_pods", str(manifest), "--namespace", jobs.namespace, *options]
    environment = {**os.environ, "KUBECONFIG": str(jobs.cluster.kubeconfig)}
    limit = 240 * slowness()
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment, text=True, capture_output=True, timeout=limit, check=False
    )


def test_the_benchmark_prints_its_measurements(jobs: Jobs, tmp_path: Path) -> None:
    figures = tmp_path / "figures.csv"
    done = benchmark(jobs, tmp_path, "--runs", "2", "--step-runs", "1", "--csv", str(figures))
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(figures.open()))
    assert [(row["what"], row["pods"]) for row in rows] == [("apply -> pods", "3"), ("direct", "3")] * 2 + [
        ("apply -> step", "0")
    ]
    seconds = [float(row["seconds"]) for row in rows]
    assert all(value > 0 for value in seconds)
    assert max(seconds[:4]) < seconds[4], (
        "starting containers and importing torch takes longer than the control plane's work"
    )
    shown = re.search(r"apply -> step +2 +1 +(\S+) +(\S+)", done.stdout)
    assert shown and [float(value) for value in shown.groups()] == pytest.approx([seconds[4]] * 2, abs=0.001)
    assert not jobs.pods() and not jobs.kubectl("get", "ddp", "--output=name").strip()


def test_a_log_without_the_expected_step_is_reported(jobs: Jobs, tmp_path: Path) -> None:
    done = benchmark(jobs, tmp_path, "--runs", "0", "--step-runs", "1", "--step-pattern", "no such line")
    assert done.returncode == 1
    assert "no such line" in done.stderr and "--step-pattern" in done.stderr
    assert not jobs.pods()


def test_the_scale_benchmark_measures_many_jobs_which_cost_no_reads_at_rest(other: Cluster, tmp_path: Path) -> None:
    """The short form of benchmarks.scale runs on its own API server."""
    figures, chart, timeline = tmp_path / "figures.csv", tmp_path / "chart.png", tmp_path / "timeline.csv"
    sizes = ["--sizes", "4", "10", "--nodes", "2", "--burst", "4", "--rounds", "1", "--rest", "5", "--settle", "2"]
    parts = ["--ended", "4", "--storm", "10", "--hostile", "5", "--csv", str(figures), "--chart", str(chart)]
    parts += ["--timeline", str(timeline)]
    environment = {**os.environ, "DDPJOB_CLUSTER_SLOT": str(other.settings.slot)}
    command = [sys.executable, "-m", "benchmarks.scale", *sizes, *parts]
    limit = 240 * slowness()
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, text=True, capture_output=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["part"], row["what"]): row for row in csv.DictReader(figures.open())}
    for part in ("4 jobs x 2", "10 jobs x 2"):
        assert float(rows[part, "reads per job and minute"]["value"]) == 0
        assert float(rows[part, "other requests per job and minute"]["value"]) == 0
    assert {part for part, _ in rows} >= {"creation", "+ 4 ended", "storm: 10 pods", "restart", "5 hostile", "all"}
    assert float(rows["restart", "other pods that were replaced"]["value"]) == 0
    assert float(rows["storm: 10 pods", "status writes per job until it is Running again"]["value"]) >= 2
    pods = [list(row.values()) for row in csv.DictReader(timeline.open())]
    assert len(pods) == 20 and all(map(all, pods)), "every step of each pod is known, for both clients"
    assert chart.stat().st_size > 10_000
    assert other.state() is None, "the benchmark has stopped the API server that it started"
