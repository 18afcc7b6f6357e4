"""Jobs with `command`: which failure is the cause, and messages about restarts and about pods that
hang next to finished ones.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import ConditionType
from ddpjob.core.status.messages import event_text
from ddpjob.core.world import ContainerView, PodView
from ddpjob_runtime.protocol import CoordinatorState, iso
from worlds import COORDINATOR, job_of, later, pod, report, seen

MINE = "ValueError: mine"
PEERS = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345"


def runs(nodes: int = 2) -> DDPJob:
    job, _ = seen(job_of(nodes, script=None, command=["torchrun", "train.py"]), 1, pods(nodes), forming())
    assert job.status.holds(ConditionType.RUNNING)
    return job


def pods(nodes: int = 2) -> tuple[PodView, ...]:
    return (*(pod(i) for i in range(nodes)), COORDINATOR)


def forming(**progress: Any) -> Any:
    return report(CoordinatorState.FORMING, progress=progress)


def failed(index: int, message: str, at: float) -> PodView:
    written = json.dumps({"kind": "RankFailed", "rank": index, "exitCode": 1, "message": message, "traceback": ""})
    container = ContainerView(started=later(0), exit_code=1, reason="Error", message=written, finished=later(at))
    return pod(index, container, phase="Failed")


def causes(job: DDPJob) -> list[tuple[str, str, int | None, bool]]:
    return [(r.reason, r.pod, r.rank, r.counted) for r in job.status.restarts.recent]


@pytest.mark.parametrize("first", [MINE, PEERS])
def test_of_two_pods_that_end_the_one_with_its_own_error_is_the_cause(first: str) -> None:
    """torchrun notices that a peer's worker has ended within a tenth of a second, so either pod may
    end first.
    """
    second = PEERS if first == MINE else MINE
    job, _ = seen(runs(), 12, (failed(0, first, 10), failed(1, second, 11), COORDINATOR), forming())
    at = 0 if first == MINE else 1
    assert causes(job) == [("WorkerFailed", f"job-{at}-0", at, True)]
    assert job.status.rendezvous.generation == 1


def test_a_lost_peer_is_the_cause_only_if_its_pod_does_not_end_soon() -> None:
    job, decision = seen(runs(), 11, (failed(0, PEERS, 10), pod(1), COORDINATOR), forming())
    assert causes(job) == [] and decision.wake <= 1
    both, _ = seen(job, 12, (failed(0, PEERS, 10), failed(1, MINE, 11), COORDINATOR), forming())
    assert causes(both) == [("WorkerFailed", "job-1-0", 1, True)]
    alone, _ = seen(job, 16, (failed(0, PEERS, 10), pod(1), COORDINATOR), forming())
    assert causes(alone) == [("WorkerFailed", "job-0-0", 0, True)], "the peer may hang without ending"


def test_a_pods_own_error_is_reported_without_a_wait() -> None:
    job, _ = seen(runs(), 11, (failed(0, MINE, 10), pod(1), COORDINATOR), forming())
    assert causes(job) == [("WorkerFailed", "job-0-0", 0, True)]


def restarted(**progress: Any) -> DDPJob:
    """Replace the pods with new running ones."""
    job, _ = seen(runs(), 5, pods(), forming(**progress))
    job, _ = seen(job, 11, (failed(0, MINE, 10), pod(1), COORDINATOR), forming(**progress))
    assert job.status.holds(ConditionType.RESTARTING) and job.status.slots[0].attempt == 1
    return job


def again(job: DDPJob, at: float, **progress: Any) -> tuple[DDPJob, list[str]]:
    new = (*(replace(pod(i), name=f"job-{i}-1", uid=f"{i}b", attempt=1, generation=1) for i in (0, 1)),
        replace(COORDINATOR, name="job-coordinator-1", generation=1))  # fmt: skip
    job, decision = seen(job, at, new, replace(forming(**progress), generation=1))
    return job, [e.message for e in decision.events]


def test_pods_that_run_again_are_not_reported_as_training() -> None:
    job, events = again(restarted(), 13)
    assert [text for text in events if "again" in text] == ["2 nodes run again, 3.0 s after job-0-0 broke the group"]
    condition = job.status.condition(ConditionType.RESTARTING)
    assert condition is not None and (condition.status, condition.reason) == (False, "PodsRunAgain")


def test_a_job_that_reports_steps_recovers_with_the_next_step() -> None:
    job, _ = again(restarted(step=7), 13)
    assert job.status.holds(ConditionType.RESTARTING) and job.status.restarts.recent[0].seconds is None
    job, _ = again(job, 40, step=1)
    condition = job.status.condition(ConditionType.RESTARTING)
    assert condition is not None and (condition.status, condition.reason) == (False, "Recovered")
    assert job.status.restarts.recent[0].seconds == 30.0


def test_a_pod_that_hangs_next_to_a_finished_one_is_reported_within_minutes() -> None:
    done = pod(0, ContainerView(started=later(0), exit_code=0, reason="Completed", finished=later(10)),
        phase="Succeeded")  # fmt: skip
    there = (done, pod(1), COORDINATOR)
    job, decision = seen(runs(), 11, there, forming())
    assert [e.reason for e in decision.events if e.warning] == []
    steps = forming(step=9, updatedAt=iso(later(150)))
    working, decision = seen(job, 191, there, steps)
    assert [e.reason for e in decision.events if e.warning] == [], "the job takes steps"
    job, decision = seen(working, 191, there, forming())
    (event,) = (e for e in decision.events if e.warning)
    assert event.reason == "NodeFinishedEarly" and "pod job-0-0 ended with exit code 0" in event.message
    assert "pod job-1-0 is still running" in event.message and event.message == event_text(event.message)
    assert job.status.holds(ConditionType.RUNNING)
    _, decision = seen(job, 300, there, forming())
    assert not decision.events
