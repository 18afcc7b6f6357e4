"""The operator is killed before and after each call that it makes. While it is down, a namespace is
deleted.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from jobs import FAST, Jobs, steps_job
from machine import slowness
from operator_process import OperatorProcess
from testcluster.cluster import Cluster

DYING = Path(__file__).parent / "dying_operator.py"


def test_a_job_completes_even_if_the_operator_dies_before_and_after_every_call(
    jobs: Jobs, operator: OperatorProcess, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    operator.kill()
    operator.start(sys.executable, str(DYING), str(seen))
    jobs.apply(steps_job("often", 200, runPolicy={"ttlSecondsAfterFinished": 3600}))
    jobs.wait_phase("often", "Running", timeout=240)
    jobs.wait("the first steps", lambda: jobs.step("often") >= 3, timeout=60)
    jobs.kill("often-1-0")
    jobs.wait_phase("often", "Complete", timeout=240)
    status = jobs.status("often")
    jobs.wait("the coordinator's end", lambda: not jobs.pods("coordinator"), timeout=60)
    assert operator.running(), "the operator must not die for a different reason"
    operator.kill()
    calls = Counter(seen.read_text().splitlines())
    deaths = sum(min(times, 2) for times in calls.values())
    print(f"{deaths} deaths of the operator at {len(calls)} kinds of calls:", *sorted(calls), sep="\n  ")
    for call in (
        "create Service",
        "create ConfigMap",
        "create Pod often-0-0",
        "create Pod often-1-1",
        "delete_pod often-coordinator-0",
    ):
        met = sum(times for line, times in calls.items() if call in line)
        assert met >= 2, f"the operator did not die before and after: {call}"
    assert (status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 1)
    assert [slot["attempt"] for slot in status["slots"]] == [0, 1]


def test_a_namespace_can_be_deleted_while_the_operator_is_down(
    jobs: Jobs, operator: OperatorProcess, cluster: Cluster
) -> None:
    jobs.apply(steps_job("left", 1000, nodes=1, recovery=FAST))
    jobs.wait_phase("left", "Running")
    operator.kill()
    cluster.kubectl("delete", "namespace", jobs.namespace, f"--timeout={90 * slowness():.0f}s")
    operator.start()
