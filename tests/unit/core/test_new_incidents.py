"""Incidents of the coordinator's report become findings."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, Slot
from ddpjob.core.failures.new_incidents import new_incidents
from ddpjob.core.view import View
from ddpjob.core.world import World
from ddpjob_runtime.protocol import CoordinatorState, Incident, IncidentKind, Report

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("index", "node"), [(None, "first"), (1, "second"), (2, ""), (-1, ""), (-3, "")])
def test_the_node_of_an_incident_is_its_slots(index: int | None, node: str) -> None:
    job = DDPJob.read(
        {
            "metadata": {"name": "job", "namespace": "space", "uid": "uid"},
            "spec": {"image": "image", "script": "train.py", "nodes": 2},
        }
    )
    status = JobStatus(slots=(Slot(node="first"), Slot(node="second")))
    incident = Incident(1, NOW, IncidentKind.WORKER_FAILED, pod="job-0-0", index=index, exit_code=1)
    report = Report(0, CoordinatorState.RESTARTING, 2, 2, (1.0, 60.0), incidents=(incident,))
    view = View(job, replace(status, rendezvous=replace(status.rendezvous, generation=0)), World(report=report), NOW)
    assert [f.restart.node for f in new_incidents(view).findings] == [node]
