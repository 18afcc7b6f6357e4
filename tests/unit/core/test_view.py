"""The derived values of a View. They belong to the current attempts and generation, and are
recomputed for a new status.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, RendezvousStatus, Slot
from ddpjob.core.view import View, is_number
from ddpjob.core.world import ClaimView, PodView, Role, World
from ddpjob_runtime.protocol import CoordinatorState, Report

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PODS = (
    PodView(name="job-0-0", uid="a", role=Role.NODE, index=0),
    PodView(name="job-0-1", uid="b", role=Role.NODE, index=0, attempt=1),
    PodView(name="job-1-0", uid="c", role=Role.SPARE, index=1),
    PodView(name="job-coordinator-2-1", uid="d", role=Role.COORDINATOR, generation=2, attempt=1),
)


def view(world: World | None = None, progress: dict[str, Any] | None = None, **spec: Any) -> View:
    body = {"image": "image", "script": "train.py", "nodes": 2, **spec}
    job = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": body})
    status = JobStatus(
        slots=(Slot(attempt=1), Slot(attempt=0), Slot(attempt=7)),
        rendezvous=RendezvousStatus(generation=2, attempt=1, nodes=2),
        progress=progress or {},
    )
    return View(job, status, world or World(pods=PODS), NOW)


def test_pods_belong_to_the_slots_current_attempts() -> None:
    assert [pod.uid if pod else None for pod in view().pods] == ["b", "c", None]
    assert view().current_names == {"job-0-1", "job-1-0", "job-2-7", "job-coordinator-2-1"}


def test_the_coordinator_is_a_separate_pod_or_slot_0() -> None:
    dedicated, master = view().coordinator, view(rendezvous={"placement": "Master"}).coordinator
    assert dedicated is not None and dedicated.uid == "d"
    assert master is not None and master.uid == "b"


def test_a_view_with_a_new_status_has_new_derived_values() -> None:
    first = view()
    assert first.pods[0] is not None
    second = first.with_status(replace(first.status, slots=(Slot(attempt=2),)))
    assert second.pods == (None,) and (second.job, second.world, second.now) == (first.job, first.world, first.now)


def test_only_progress_counts_in_a_report_of_another_generation() -> None:
    old, current = (Report(n, CoordinatorState.RUNNING, 2, 2, (1.0, 60.0), progress={"step": 3}) for n in (1, 2))
    assert view(World(report=current)).report is current
    assert view(World(report=old)).report is None
    assert view(World(report=old)).trained and view(progress={"percent": 1}).trained and not view().trained


def test_a_missing_claim_is_reported_as_a_problem() -> None:
    missing = view(World(claims=(ClaimView(name="data", exists=False),))).claim_problem
    assert missing is not None and missing.reason == "ClaimNotFound"
    assert view().claim_problem is None


@pytest.mark.parametrize("value", [True, None, "3", float("nan"), float("inf"), -float("inf")])
def test_invalid_numbers_in_a_report_are_unknown(value: Any) -> None:
    assert not is_number(value)
    assert is_number(3) and is_number(-0.5) and is_number(10**400)
