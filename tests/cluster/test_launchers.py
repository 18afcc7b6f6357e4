"""`command` on real pods: launchers that need an address find index 0 by its name, and failures
under torchrun count.

Other launchers are tested with processes in tests/local/test_process_launchers.py, which runs the
same script.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs, Json, job
from testcluster.settings import CHECKOUT

LAUNCHED = str(CHECKOUT / "tests" / "local" / "scripts" / "launched.py")
ACCELERATE = [
    *("accelerate", "launch", "--multi_gpu", "--num_machines", "2", "--num_processes", "2"),
    *("--machine_rank", "$(DDPJOB_INDEX)", "--main_process_ip", "$(MASTER_ADDR)"),
    *("--main_process_port", "$(MASTER_PORT)", LAUNCHED, "--accelerate"),
]
BOTH = ["rank 0 of 2: 2", "rank 1 of 2: 2"]
"""The ranks' output in a group of two pods."""


def launched(name: str, command: list[str], **spec: Any) -> Json:
    return job(name, command=command, runPolicy={"cleanPodPolicy": "None"}, **spec)


def sums(jobs: Jobs) -> list[str]:
    """Return the lines that the ranks have printed about their group, in order."""
    logs = (jobs.kubectl("logs", pod) for pod in jobs.pods())
    return sorted(line for log in logs for line in log.splitlines() if line.startswith("rank "))


def summed(jobs: Jobs, *names: str) -> bool:
    """Return whether these are the job's pods, and both have joined a group."""
    pods = jobs.pods()
    running = all(pod["status"]["phase"] == "Running" for pod in pods.values())
    return sorted(pods) == [*names] and running and sums(jobs) == BOTH


def masters(jobs: Jobs) -> set[str]:
    """Return MASTER_ADDR of each pod."""
    containers = [pod["spec"]["containers"][0] for pod in jobs.pods().values()]
    return {e["value"] for container in containers for e in container["env"] if e["name"] == "MASTER_ADDR"}


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_forms_a_group_of_two_pods(jobs: Jobs) -> None:
    jobs.apply(launched("accelerate", ACCELERATE))
    jobs.wait_phase("accelerate", "Complete")
    assert sums(jobs) == BOTH
    assert masters(jobs) == {"accelerate-0-0.accelerate"}, "the address is the name of the pod with index 0"


def test_a_group_with_a_tcp_address_survives_the_loss_of_the_pod_at_that_address(jobs: Jobs, tmp_path: Path) -> None:
    storage = {"checkpoints": {"hostPath": str(tmp_path), "shared": True}}
    command = [sys.executable, LAUNCHED, "--spawn", "--until", "/checkpoints/enough"]
    jobs.apply(launched("spawn", command, storage=storage))
    for attempt in (0, 1):
        jobs.wait("a sum", lambda: summed(jobs, f"spawn-0-{attempt}", f"spawn-1-{attempt}"))  # noqa: B023
        assert masters(jobs) == {f"spawn-0-{attempt}.spawn"}
        if attempt == 0:
            jobs.kill("spawn-0-0")
    (tmp_path / "enough").touch()
    jobs.wait_phase("spawn", "Complete")
    [restart] = jobs.status("spawn")["restarts"]["recent"]
    assert (restart["pod"], restart["reason"], restart["counted"]) == ("spawn-0-0", "Deleted", False)


def test_a_failed_rank_under_torchrun_in_a_pod_is_counted_with_its_traceback(jobs: Jobs) -> None:
    """Torchrun starts the script through PYTHON_EXEC, which is a file from the ConfigMap. If the
    file were not executable, no rank would start.
    """
    jobs.apply(launched("fails", ["torchrun", LAUNCHED, "--fail"], recovery={"maxRestarts": 0}))
    jobs.wait_phase("fails", "Failed")
    [restart] = (r for r in jobs.status("fails")["restarts"]["recent"] if r["counted"])
    assert (restart["reason"], restart["rank"]) == ("WorkerFailed", 1)
    first = f"rank 1 in pod {restart['pod']} ended with exit code 1: ValueError: made to fail"
    assert restart["message"].startswith(first)
    assert 'raise ValueError("made to fail")' in restart["message"] and "launched.py" in restart["message"]
