"""All kinds of partitions. Members follow one coordinator, and two groups of a job never train at
the same time.
"""

from __future__ import annotations

from typing import Any

import pytest
from ddpjob.api.job_spec import Json

from .kubelet import Host, Pod
from .simulated import Simulation, conditions
from .training import WorkerRound

ELASTIC: Json = {"recovery": {"mode": "Fast"}, "nodes": 4, "elastic": {"minNodes": 1, "maxNodes": 4}}
FIXED: Json = {"recovery": {"mode": "Fast"}, "nodes": 4}
SIZES = pytest.mark.parametrize("spec", [ELASTIC, FIXED], ids=["elastic", "fixed"])


class OneGroup(Simulation):
    """A simulation that also fails if a round takes a step after a later round has, whichever
    coordinator reaches its members.
    """

    def __init__(self, spec: Json, steps: int = 10**9, **more: Any) -> None:
        super().__init__(spec, steps, **more)
        self.newest, check = (-1, -1), self.training.check

        def strictly(current: WorkerRound) -> None:
            place = current.generation, current.number
            if place < self.newest:
                self.invariants._fail(f"round {place} trains beside round {self.newest}")
            self.newest = max(self.newest, place)
            check(current)

        self.training.check = strictly

    @property
    def coordinator_pod(self) -> Pod:
        return self.coordinator().pod

    async def live(self, seconds: float) -> None:
        """Let the operator reconcile once a second."""
        end = self.now + seconds
        while self.now < end:
            await self.one_pass()
            self.advance(1)
            assert not self.invariants.violations

    async def trains_by(self, attempt: int, seconds: int = 200) -> None:
        """Wait until the whole group trains and all its members are connected to the coordinator of
        this attempt.
        """

        def reached() -> bool:
            launchers = [p.launcher for p in self.running() if p.launcher is not None]
            followed = [x._connection.coordinator.attempt for x in launchers if x._connection is not None]
            whole = conditions(self)["Running"]["reason"] == "GroupRuns"
            return whole and followed == [attempt] * 4 and self.training.last_step > self.now - 2

        await self.until(reached, seconds)
        assert not self.invariants.violations

    def reasons(self) -> list[str]:
        return [str(r["reason"]) for r in self.status["restarts"].get("recent", ())]


async def begun(spec: Json) -> OneGroup:
    s = OneGroup(spec)
    await s.until(lambda: s.training.made > 5)
    return s


def alone(s: OneGroup) -> Pod:
    """Check that the coordinator's pod is alone on its host, and return it."""
    pod = s.coordinator_pod
    assert [p for p in s.pods.values() if p.host is pod.host] == [pod]
    return pod


def move(s: OneGroup, pod: Pod, host: Host) -> None:
    """Place the pod as if the scheduler had chosen the host."""
    pod.host, pod.body["spec"]["nodeName"] = host, host.name
    s.store.changed("Pod", pod.body)


@SIZES
@pytest.mark.parametrize("heard", [True, False], ids=["the operator reaches it", "the operator does not"])
async def test_members_leave_a_coordinator_on_a_dead_kubelet_without_losing_a_step(spec: Json, heard: bool) -> None:
    s = await begun(spec)
    old, began = alone(s), s.training.made
    s.machines.silence(old.host, 5)
    if not heard:
        s.cluster.lose_messages = 1.0
    started = s.now
    await s.live(30)
    await s.trains_by(1)
    assert s.reasons() == ["CoordinatorLost"]
    assert s.training.made - began >= s.now - started - 2, "no pod was restarted"
    assert old.coordinator is not None and not old.coordinator.alive, "it was asked to exit by the operator or a member"


@SIZES
async def test_a_pod_on_the_lost_coordinators_host_is_replaced(spec: Json) -> None:
    """A pod on the coordinator's host is also abandoned, although it still trains."""
    s = await begun(spec)
    host = s.pods["job-0-0"].host
    move(s, s.coordinator_pod, host)
    s.cluster.lose_messages = 1.0
    s.machines.silence(host, 5)
    await s.live(30)
    await s.trains_by(1)
    assert "job-0-1" in s.pods and s.status["restarts"]["counted"] == 0
    s.machines.heal(host)
    await s.live(60)
    await s.trains_by(1)
    assert s.status["restarts"]["counted"] == 0


@SIZES
async def test_a_partition_of_only_the_operator_does_not_affect_the_job(spec: Json) -> None:
    s = await begun(spec)
    s.network.operator_cut = True
    began, started = s.training.made, s.now
    await s.live(300)
    assert s.training.made - began >= s.now - started - 2 and s.coordinator().attempt == 0
    assert conditions(s)["Running"]["reason"] == "CoordinatorUnreachable"
    s.network.operator_cut = False
    await s.trains_by(0)
    assert s.reasons() == []


@SIZES
@pytest.mark.parametrize("seconds", [20, 200])
async def test_members_that_lose_the_coordinator_keep_training_and_follow_its_successor(
    spec: Json, seconds: float
) -> None:
    s = await begun(spec)
    old, began = s.coordinator_pod, s.training.made
    old.deaf = True
    s.network.changed()
    await s.live(seconds)
    old.deaf = False
    s.network.changed()
    await s.live(60)
    await s.trains_by(s.coordinator().attempt)
    assert s.training.made > began and s.status["restarts"]["counted"] == 0
    assert len([c for c in s.network.coordinators if c.alive]) == 1


@SIZES
@pytest.mark.parametrize("with_coordinator", [True, False])
@pytest.mark.parametrize("seconds", [10, 100])
async def test_training_recovers_if_half_of_the_members_are_partitioned(
    spec: Json, with_coordinator: bool, seconds: float
) -> None:
    """These members are partitioned from the other half, and from the control plane, the
    coordinator, or both.
    """
    s = await begun(spec)
    hosts = [s.pods[name].host for name in ("job-0-0", "job-1-0")]
    if with_coordinator:
        hosts.append(s.coordinator_pod.host)
    for host in hosts:
        s.cut(host.name)
    await s.live(seconds)
    for host in hosts:
        s.heal(host.name)
    await s.live(60)
    await s.trains_by(s.coordinator().attempt, 300)
    assert s.status["restarts"]["counted"] == 0
    assert len([c for c in s.network.coordinators if c.alive]) == 1


async def test_training_continues_without_a_coordinator_until_a_round_is_needed() -> None:
    """The next coordinator may wait for an image, or for the operator itself."""
    s = await begun(FIXED)
    began, started = s.training.made, s.now
    s.force_delete(s.coordinator_pod.name)
    s.advance(1000)  # without an operator
    assert s.training.made - began >= s.now - started - 2
    await s.trains_by(1)
    assert s.reasons() == ["CoordinatorLost"] and s.training.made - began >= s.now - started - 2


@pytest.mark.parametrize("reachable", [True, False])
async def test_pods_of_an_abandoned_generation_exit_although_their_kubelet_is_dead(reachable: bool) -> None:
    """The job gets new pods. Without this, old pods on a host with a dead kubelet would keep
    training on their own.
    """
    s = await begun({"recovery": {"mode": "Fast"}, "nodes": 2, "elastic": {"minNodes": 1, "maxNodes": 2}})
    zombies = [s.pods["job-0-0"], s.coordinator_pod]
    move(s, zombies[1], zombies[0].host)
    s.machines.silence(zombies[0].host, 5)
    if not reachable:
        s.cluster.lose_messages = 1.0
    s.change_spec({"env": [{"name": "LR", "value": "2"}]})
    await s.until(lambda: s.phase == "Running" and s.status["rendezvous"]["generation"] == 1)
    await s.live(120)
    launcher = zombies[0].launcher
    assert launcher is not None and not launcher.alive
