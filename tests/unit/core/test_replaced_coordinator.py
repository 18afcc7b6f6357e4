"""A replaced coordinator that may still run is asked to exit. The coordinator of a superseded
generation is asked to stop its group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job_status import Restart, Restarts
from ddpjob.core.decision import Decision, NotifyCoordinator
from ddpjob.core.world import ContainerView, HostView, PodView, World
from ddpjob_runtime.protocol import CoordinatorState, MemberState
from worlds import COORDINATOR, decide, job_of, later, pod, report, running, seen

ENDPOINT = "10.0.0.1:29401"


def messages(decision: Decision) -> list[tuple[str, str]]:
    return [
        (a.endpoint, str(a.verb))
        for a in decision.actions
        if isinstance(a, NotifyCoordinator) and a.verb in ("exit", "stop")
    ]


def on_a_dead_host(mode: str) -> Decision:
    """Return a coordinator whose host has been silent for a long time and runs none of the job's
    nodes.
    """
    job, pods = running(2, recovery={"mode": mode})
    hosts = {name: HostView(name=name, ready=True, since=None, out_of_service=False) for name in ("n0", "n1", "n9")}
    hosts["n9"] = replace(hosts["n9"], ready=False, since=later(3))
    pods = (*pods[:2], replace(COORDINATOR, host="n9"))
    last = report(CoordinatorState.RUNNING, MemberState.RUNNING, MemberState.RUNNING)
    world = World(pods=pods, runtime="r", runtime_offered="r", report=last, hosts=hosts, has_service=True)
    return decide(job, world, later(40))


def test_in_fast_mode_the_coordinator_exits_so_that_members_find_the_next_one() -> None:
    decision = on_a_dead_host("Fast")
    assert decision.status.rendezvous.attempt == 1
    assert messages(decision) == [(ENDPOINT, "exit")]
    assert [a.body["before"] for a in decision.actions if isinstance(a, NotifyCoordinator)] == [1]


def test_training_is_said_to_continue_unless_a_pod_is_lost_with_the_coordinator() -> None:
    job, pods = running(2, recovery={"mode": "Fast"})
    said = []
    for left in (pods[:2], pods[:1], ()):
        _, decision = seen(job, 3, left, None)
        (event,) = [e for e in decision.events if e.reason == "CoordinatorLost"]
        assert event.message.endswith("a new coordinator takes over)")
        said.append("training continues" in event.message)
    assert said == [True, False, False]


def test_in_standard_mode_a_lost_coordinator_ends_its_generation() -> None:
    decision = on_a_dead_host("Standard")
    assert decision.status.rendezvous.generation == 1
    assert messages(decision) == [(ENDPOINT, "stop")]


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
def test_the_coordinator_of_pods_that_are_saving_is_left_alone(mode: str) -> None:
    job, pods = running(2, recovery={"mode": mode})
    changed = job_of(2, recovery={"mode": mode}, env=[{"name": "LR", "value": "2"}])
    last = report(CoordinatorState.RUNNING, MemberState.RUNNING, MemberState.RUNNING)
    _, decision = seen(replace(changed, status=job.status), 5, pods, last)
    assert decision.status.rendezvous.generation == 1 and messages(decision) == []


def test_a_coordinator_that_is_not_replaced_is_not_asked_to_exit() -> None:
    job, pods = running(2, recovery={"mode": "Fast"})
    last = report(CoordinatorState.RUNNING, MemberState.RUNNING)
    ended: PodView = pod(1, ContainerView(started=later(0), exit_code=1, finished=later(4)))
    _, decision = seen(job, 5, (pods[0], ended, COORDINATOR), last)
    assert decision.status.slots[1].attempt == 1 and messages(decision) == []


@pytest.mark.parametrize(
    ("at", "of_it", "named"),
    [
        (2, {"state": CoordinatorState.FORMING}, ["job-1-0"]),
        (2, {"state": CoordinatorState.RESTARTING, "round": 7}, ["job-1-0"]),
        (2, {"state": CoordinatorState.RESTARTING, "round": 1_000_001}, []),
        (-60, {"state": CoordinatorState.FORMING}, []),
    ],
    ids=["a loss", "a loss in a planned restart", "a loss in a round of its own", "cut short by a suspension"],
)
def test_the_next_coordinator_learns_which_pods_were_lost_in_this_incarnation(
    at: float, of_it: dict[str, Any], named: list[str]
) -> None:
    """If a pod was lost, the next coordinator waits 5 s for it instead of 45 s, which would be too
    short if only the coordinator was lost.
    """
    job, pods = running(2, recovery={"mode": "Fast"})
    loss = Restart(time=later(at), pod="job-1-0", reason="NodeLost", message="", counted=False, index=1)
    slots = (job.status.slots[0], replace(job.status.slots[1], attempt=1))
    job = replace(job, status=replace(job.status, restarts=Restarts(recent=(loss,)), slots=slots))
    present = (pods[0], replace(pods[1], name="job-1-1", uid="job-1-1"), COORDINATOR)
    _, decision = seen(job, 5, present, replace(report(), attempt=1, **of_it))
    gone = [a.body["pods"] for a in decision.actions if isinstance(a, NotifyCoordinator) and a.verb == "gone"]
    assert gone == ([named] if named else [])
