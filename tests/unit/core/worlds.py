"""Jobs, their pods and their reports as `decide` sees them. The defaults describe a running job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import Phase
from ddpjob.core.decide import decide
from ddpjob.core.decision import Decision
from ddpjob.core.world import ContainerView, PodView, Role, World
from ddpjob_runtime.protocol import CoordinatorState, Member, MemberState, Report

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def pod(index: int, container: ContainerView | None = None, **fields: Any) -> PodView:
    container = container if container is not None else ContainerView(started=NOW)
    name, containers = f"job-{index}-0", {"trainer": container}
    values: dict[str, Any] = {"phase": "Running", "created": NOW, **fields}
    return PodView(name=name, uid=name, role=Role.NODE, index=index, host=f"n{index}", containers=containers, **values)


COORDINATOR = PodView(
    name="job-coordinator-0",
    uid="c",
    role=Role.COORDINATOR,
    host="n0",
    address="10.0.0.1",
    phase="Running",
    created=NOW,
    containers={"coordinator": ContainerView(started=NOW)},
)


def report(state: CoordinatorState = CoordinatorState.RUNNING, *members: MemberState, **fields: Any) -> Report:
    listed = tuple(Member(f"job-{i}-0", m, index=i, rank=i, round=1) for i, m in enumerate(members))
    return Report(0, state, len(members), len(members), (1.0, 60.0), world=len(members), members=listed, **fields)


def job_of(nodes: int, **spec: Any) -> DDPJob:
    body = {"image": "image", "script": "train.py", "nodes": nodes, **spec}
    job = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": body})
    return replace(job, status=decide(job, World(runtime_offered="r"), NOW).status)


def seen(
    job: DDPJob, at: float, pods: tuple[PodView, ...], last: Report | None, report_refused: str = ""
) -> tuple[DDPJob, Decision]:
    world = World(pods=pods, runtime="r", runtime_offered="r", report=last, has_service=True, has_budget=True)
    world = replace(world, report_refused=report_refused)
    decision = decide(job, world, later(at))
    return replace(job, status=decision.status), decision


def running(nodes: int, **spec: Any) -> tuple[DDPJob, tuple[PodView, ...]]:
    pods = (*(pod(i) for i in range(nodes)), COORDINATOR)
    job, _ = seen(job_of(nodes, **spec), 1, pods, None)
    job, _ = seen(job, 2, pods, report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * nodes))
    assert job.status.phase is Phase.RUNNING
    return job, pods
