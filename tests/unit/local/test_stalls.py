"""`ddpjob run` prints the time without training, measured between steps."""

from __future__ import annotations

from types import SimpleNamespace

from ddpjob.local.process_cluster import ProcessCluster
from ddpjob_runtime.protocol import CoordinatorState, Recovery, Report


def report(**progress: int) -> Report:
    recovery = Recovery(last_seconds=0.3)
    return Report(1, CoordinatorState.RUNNING, 2, 2, (1.0, 60.0), progress=progress, recovery=recovery)


def test_no_stall_is_printed_for_a_job_without_completed_steps() -> None:
    cluster = SimpleNamespace(stalls=[])
    ProcessCluster._note_stall(cluster, report())  # type: ignore[arg-type]
    assert cluster.stalls == []
    for _ in range(2):
        ProcessCluster._note_stall(cluster, report(step=7))  # type: ignore[arg-type]
    assert cluster.stalls == [0.3]
