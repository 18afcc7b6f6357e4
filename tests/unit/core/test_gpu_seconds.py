"""GPU seconds: held GPUs times the time between reconciles. They are written rarely, and no time is
counted twice.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus
from ddpjob.core.decide import decide
from ddpjob.core.status.gpu_seconds import REFRESH
from ddpjob.core.world import ContainerView, PodView, Role, World
from worlds import COORDINATOR, NOW, job_of, later, pod

GPUS = {"nvidia.com/gpu": 8}


class Cluster:
    """A job whose pods are set by the test. Each reconcile writes the result of `decide`."""

    def __init__(self, **spec: Any) -> None:
        self.job: DDPJob = job_of(2, **spec)
        self.writes = 0

    def look(self, at: float, *pods: PodView) -> int:
        world = World(pods=(*pods, COORDINATOR), runtime="r", runtime_offered="r", has_service=True, has_budget=True)
        status = decide(self.job, world, later(at)).status
        written = status.write(self.job.spec)
        self.writes += written != self.job.status.write(self.job.spec)
        # The next reconcile reads the stored status, whose times are whole seconds.
        self.job = replace(self.job, status=JobStatus.read(written))
        return status.gpu_seconds


def holder(index: int, **fields: Any) -> PodView:
    return pod(index, devices=GPUS, **fields)


def test_the_example_in_the_modules_docstring_is_correct() -> None:
    one, both = Cluster(), (holder(0), holder(1))
    assert one.look(0, *both) == 0
    assert one.look(1800, *both) == 28800
    assert one.look(2400, holder(0)) == 38400
    assert one.look(2405, *both) == 38440
    use = one.job.status.gpu_use
    assert use is not None and (use.held, use.since) == (16, later(2405))


@pytest.mark.parametrize(
    ("held", "fields"),
    [
        (8, {"phase": "Pending"}),  # it pulls its image
        (8, {"phase": "Running", "deleted_at": later(30)}),  # it is terminating, and still occupies its GPUs
        (8, {"phase": "Running", "role": Role.SPARE}),
        (8, {"phase": "Running", "container": ContainerView(exit_code=0)}),  # a sidecar is still running
        (0, {"phase": "Succeeded"}),
        (0, {"phase": "Failed"}),
        (0, {"phase": "Pending", "host": ""}),
    ],
    ids=["image", "ending", "spare", "sidecar", "succeeded", "failed", "unscheduled"],
)
def test_a_pod_holds_gpus_from_its_binding_to_its_end(held: int, fields: dict[str, Any]) -> None:
    container = fields.pop("container", None)
    other = replace(pod(1, container, devices=GPUS), **fields)
    one = Cluster()
    one.look(0, holder(0), other)
    assert one.look(100) == 100 * (8 + held)


def test_no_fraction_of_a_second_is_lost_if_the_status_is_written_often() -> None:
    one, pods = Cluster(), (holder(0), holder(1))
    for tenth in range(0, 1000, 7):
        one.job = replace(one.job, generation=tenth + 1)  # this makes each reconcile write the status
        one.look(tenth / 10, *pods)
    assert one.writes == 143
    assert one.look(100 + REFRESH.total_seconds(), *pods) == 16 * (100 + REFRESH.total_seconds())


def test_the_sum_of_a_job_without_other_changes_is_written_every_ten_minutes() -> None:
    one, pods = Cluster(), (holder(0), holder(1))
    for second in range(30):
        one.look(second, *pods)
    one.writes = 0
    for second in range(30, 3630, 20):
        one.look(second, *pods)
    assert one.writes == timedelta(hours=1) / REFRESH


def test_setting_the_clock_back_does_not_reduce_the_sum() -> None:
    one, pods = Cluster(), (holder(0), holder(1))
    one.look(0, *pods)
    assert one.look(600, *pods) == 9600
    assert one.look(300, holder(0)) == 9600
    assert one.look(400, *pods) == 9600 + 800


def test_gpus_of_another_resource_and_of_the_coordinator_do_not_count() -> None:
    one = Cluster(gpuResource="amd.com/gpu")
    world = World(pods=(holder(0), replace(COORDINATOR, devices={"amd.com/gpu": 8})), runtime="r", runtime_offered="r")
    assert decide(one.job, world, NOW).status.gpu_use is None


def test_a_pod_that_claims_impossibly_many_gpus_does_not_distort_the_sum() -> None:
    one, pods = Cluster(), tuple(replace(holder(n), devices={"nvidia.com/gpu": 10**9}) for n in range(2))
    one.look(0, *pods)
    one.look(10**7, *pods)
    stored = one.job.status.write(one.job.spec)
    assert JobStatus.read(stored).gpu_seconds == stored["gpuSeconds"] == 10**13
