"""The operator is killed before and after each call that it makes; while it is down, a namespace is deleted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dying_operator import DEAD
from jobs import FAST, Jobs, steps_job
from machine import slowness
from operator_process import OperatorProcess
from testcluster.cluster import Cluster

DYING = Path(__file__).parent / "dying_operator.py"


@contextmanager
def always_started(operator: OperatorProcess, seen: Path) -> Iterator[list[int]]:
    """Starts the dying operator again as often as it dies; yields the exit codes of its lives."""
    codes: list[int] = []
    stop = threading.Event()

    def live() -> None:
        while not stop.is_set():
            operator.start(sys.executable, str(DYING), str(seen))
            while operator.running() and not stop.wait(0.05):
                pass
            if not stop.is_set():
                codes.append(operator.wait_ended())

    operator.kill()
    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield codes
    finally:
        stop.set()
        thread.join()
        operator.kill()


def test_it_dies_before_and_after_every_call(jobs: Jobs, operator: OperatorProcess, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with always_started(operator, seen) as lives:
        jobs.apply(steps_job("often", 600, runPolicy={"ttlSecondsAfterFinished": 3600}))
        jobs.wait_phase("often", "Running", timeout=240)
        jobs.wait("the first steps", lambda: jobs.step("often") >= 3, timeout=60)
        jobs.kill("often-1-0")
        jobs.wait_phase("often", "Complete", timeout=240)
        status = jobs.status("often")
        jobs.wait("the coordinator's end", lambda: not jobs.pods("coordinator"), timeout=60)
    met = seen.read_text().splitlines()
    print(f"{len(lives)} lives of the operator, {len(set(met))} kinds of calls:", *sorted(set(met)), sep="\n  ")
    assert set(lives) == {DEAD}, "it died of something other than the test"
    for call in (
        "create Service",
        "create ConfigMap",
        "create Pod often-0-0",
        "create Pod often-1-1",
        "delete_pod often-coordinator-0",
    ):
        assert sum(call in line for line in met) >= 2, f"the operator did not die before and after: {call}"
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
