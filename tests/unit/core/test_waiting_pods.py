"""Messages about pods that have not failed, but do not start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job_status import Condition, ConditionType
from ddpjob.controller.pod_views import read_pod
from ddpjob.core.world import ContainerView, PodView
from ddpjob_runtime.protocol import CoordinatorState, MemberState
from worlds import COORDINATOR, job_of, later, pod, report, running, seen

CREATING = ContainerView(waiting_reason="ContainerCreating")


def shown(kind: ConditionType, at: float, *pods: PodView, **spec: Any) -> Condition:
    _, decision = seen(job_of(2, **spec), at, pods, None)
    found = decision.status.condition(kind)
    assert found is not None and not found.status
    return found


def unplaced(index: int, **fields: Any) -> PodView:
    return replace(pod(index, ContainerView(), phase="Pending", **fields), host="")


def placed(index: int, **fields: Any) -> PodView:
    return pod(index, CREATING, phase="Pending", scheduled=later(0), **fields)


def test_a_missing_scheduler_is_reported_with_the_field_that_names_it() -> None:
    scheduling = {"schedulerName": "fair-share"}
    pods = unplaced(0), unplaced(1), COORDINATOR
    assert shown(ConditionType.SCHEDULED, 29, *pods, scheduling=scheduling).reason == "Placing"
    silent = shown(ConditionType.SCHEDULED, 30, *pods, scheduling=scheduling)
    assert silent.reason == "SchedulerSilent"
    assert silent.message == (
        "pod job-0-0: no scheduler has reported on this pod since 2026-01-01T00:00:00Z; "
        "check that the scheduler fair-share (spec.scheduling.schedulerName) is running"
    )
    assert "resource claims" in shown(ConditionType.SCHEDULED, 30, *pods).message
    coordinator = replace(COORDINATOR, host="", phase="Pending", containers={})
    assert "job-coordinator-0" in shown(ConditionType.SCHEDULED, 30, placed(0), placed(1), coordinator).message
    tried = unplaced(0, unschedulable="0/3 nodes"), unplaced(1, unschedulable="0/3 nodes"), COORDINATOR
    assert shown(ConditionType.SCHEDULED, 30, *tried).reason == "Unschedulable"


def test_a_pod_that_runs_or_has_ended_does_not_wait_for_a_scheduler() -> None:
    bound_by_hand = replace(pod(0), host="")
    gone = unplaced(1)
    for other in (bound_by_hand, replace(gone, phase="Failed")):
        said = seen(job_of(2), 60, (other, gone, COORDINATOR), None)[1].status.condition(ConditionType.SCHEDULED)
        assert said is not None and "job-1-0:" in said.message


def test_a_scheduling_gate_is_shown_immediately_with_kubernetes_own_reason() -> None:
    gated = unplaced(0, gated="Scheduling is blocked due to non-empty scheduling gates")
    found = shown(ConditionType.SCHEDULED, 1, gated, placed(1), COORDINATOR)
    assert found.reason == "SchedulingGated"
    assert found.message == "pod job-0-0: Scheduling is blocked due to non-empty scheduling gates"


def test_volumes_that_cannot_be_mounted_are_reported_with_a_place_to_look() -> None:
    pods = placed(0, prepared=False), placed(1, prepared=False), COORDINATOR
    assert shown(ConditionType.RUNNING, 29, *pods).message == "0 of 2 nodes run"
    found = shown(ConditionType.RUNNING, 30, *pods)
    assert found.reason == "PodNotPrepared"
    assert found.message == (
        "0 of 2 nodes run; pod job-0-0 on Kubernetes node n0 has waited for its volumes or its network since "
        "2026-01-01T00:00:00Z: a Secret, a folder or a driver may be missing; run `kubectl describe pod job-0-0`"
    )
    coordinator = replace(COORDINATOR, containers={}, scheduled=later(0), prepared=False, address="")
    found = shown(ConditionType.RUNNING, 30, pod(0), pod(1), coordinator)
    assert found.reason == "PodNotPrepared" and "; pod job-coordinator-0 on" in found.message


def test_an_init_container_that_takes_long_is_reported() -> None:
    """The last running init container is reported, because earlier sidecars keep running."""
    proxy, fetch = ContainerView(started=later(1)), ContainerView(started=later(3))
    waiting = {"proxy": proxy, "fetch": fetch, "later": ContainerView(waiting_reason="PodInitializing")}
    pods = placed(0, init_containers=waiting, prepared=True), pod(1), COORDINATOR
    found = shown(ConditionType.RUNNING, 40, *pods)
    assert found.reason == "NodesMissing"
    assert found.message == (
        "1 of 2 nodes runs; pod job-0-0 on Kubernetes node n0: init container fetch has been running since "
        "2026-01-01T00:00:03Z"
    )


def test_a_running_sidecar_is_not_reported_as_the_reason_for_waiting() -> None:
    """This is the state of a native sidecar while the trainer's image is pulled."""
    labels = {"ddpjob.io/role": "node", "ddpjob.io/index": "0"}
    conditions = [
        {"type": "Initialized", "status": "True"},
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
    ]
    status = {
        "conditions": conditions,
        "initContainerStatuses": [{"name": "proxy", "state": {"running": {"startedAt": "2026-01-01T00:00:01Z"}}}],
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    meta = {"name": "job-0-0", "uid": "u", "labels": labels}
    pulling = read_pod({"metadata": meta, "spec": {"nodeName": "n0"}, "status": status})
    found = shown(ConditionType.RUNNING, 40, pulling, pod(1), COORDINATOR)
    assert "image is being pulled" in found.message and "init container" not in found.message
    conditions[0]["status"] = "False"
    starting = read_pod({"metadata": meta, "spec": {"nodeName": "n0"}, "status": status})
    found = shown(ConditionType.RUNNING, 40, starting, pod(1), COORDINATOR)
    assert "init container proxy has been running since 2026-01-01T00:00:01Z" in found.message


@pytest.mark.parametrize("prepared", [True, None])
def test_a_slow_image_pull_is_not_reported_as_another_reason(prepared: bool | None) -> None:
    found = shown(ConditionType.RUNNING, 40, placed(0, prepared=prepared), pod(1), COORDINATOR)
    assert found.reason == "NodesMissing" and "image is being pulled" in found.message


def test_the_conditions_of_a_pod_are_read() -> None:
    def read(*conditions: dict[str, str]) -> PodView:
        meta = {"name": "p", "uid": "u", "labels": {"ddpjob.io/role": "node"}}
        return read_pod({"metadata": meta, "status": {"conditions": list(conditions)}})

    gated = read({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"})
    assert (gated.gated, gated.unschedulable, gated.scheduled) == ("gates", "", None)
    full = read({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"})
    assert (full.gated, full.unschedulable) == ("", "0/3")
    there = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    assert (read(there).scheduled, read(there).prepared, read(there).gated) == (later(0), None, "")
    assert read(there, {"type": "PodReadyToStartContainers", "status": "False"}).prepared is False
    assert read(there, {"type": "PodReadyToStartContainers", "status": "True"}).prepared is True


@pytest.mark.parametrize(
    ("waiting", "says"),
    [
        (placed(1, prepared=False), "pod job-1-0 on Kubernetes node n1 has waited for its volumes or its network"),
        (unplaced(1, gated="scheduling is blocked"), "pod job-1-0: scheduling is blocked"),
        (unplaced(1), "pod job-1-0: no scheduler has reported on this pod since 2026-01-01T00:00:00Z"),
    ],
)
def test_a_smaller_group_reports_why_its_missing_pod_waits(waiting: PodView, says: str) -> None:
    job, pods = running(2, elastic={"minNodes": 1})
    job, _ = seen(job, 60, (pods[0], waiting, pods[-1]), report(CoordinatorState.RUNNING, MemberState.RUNNING))
    condition = job.status.condition(ConditionType.RUNNING)
    assert condition is not None and condition.message.startswith(f"1 of 2 nodes trains; {says}")
