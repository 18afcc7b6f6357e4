"""The operator may die before and after every call of apply.

The job's outcome is the same as without the crash, and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable, Container
from dataclasses import replace
from datetime import timedelta

import ddpjob.engine.reconcile as reconcile_module
import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import NotificationState
from ddpjob.core.decision import Decision
from ddpjob.core.world import Role
from ddpjob.engine.apply import Applied
from ddpjob.engine.apply import apply as right_apply
from ddpjob.engine.ports import Cluster
from ddpjob.objects.platform import Platform
from ddpjob_runtime.protocol import VERSION

from .operator_port import KEY
from .simulated import Simulation

Scenario = Callable[[Simulation], Awaitable[None]]


async def start_and_complete(s: Simulation) -> None:
    await s.until_phase("Complete")


async def pod_deleted(s: Simulation) -> None:
    await s.until_phase("Running")
    s.force_delete(next(p.name for p in s.nodes() if p.running))
    await s.until_phase("Complete")


async def worker_fails(s: Simulation) -> None:
    await s.until_phase("Running")
    assert s.worker_fails(next(p.name for p in s.nodes() if p.running))
    await s.until_phase("Complete")


async def pod_fails(s: Simulation) -> None:
    await s.until_phase("Running")
    s.end(next(p.name for p in s.nodes() if p.running), 1)
    await s.until_phase("Complete")


async def failed_pod_removed(s: Simulation) -> None:
    s.change_spec({"runPolicy": {"failedPodsKept": 0}})
    await pod_fails(s)


async def coordinator_deleted(s: Simulation) -> None:
    await s.until_phase("Running")
    s.force_delete(next(p.name for p in s.pods.values() if p.role is Role.COORDINATOR))
    await s.until_phase("Complete")


async def suspended_and_resumed(s: Simulation) -> None:
    await s.until_phase("Running")
    await s.suspended()
    await s.resumed("Complete")


async def scaled(s: Simulation) -> None:
    await s.until_phase("Running")
    s.change_spec({"nodes": 3})
    await s.until_phase("Complete")


async def key_changed(s: Simulation) -> None:
    await s.until_phase("Running")
    s.cluster.platform = Platform(operator_key=b"another key")
    await s.until_phase("Complete")


async def runtime_changed(s: Simulation) -> None:
    """Start a job with an operator of a different protocol version, whose runtime had other
    files.
    """
    await s.until_phase("Running")
    old, status = "job-podfiles-12345678", s.status
    template, key, _ = status["templateHash"].split("-")
    files = next(s.store.all("ConfigMap"))
    s.store.remove("ConfigMap", files)
    s.store.create("ConfigMap", {**files, "metadata": {**files["metadata"], "name": old, "uid": "old"}})
    s.job_body["status"] = {**status, "templateHash": f"{template}-{key}-{VERSION + 1}", "runtime": old}
    s.store.changed("DDPJob", s.job_body)
    running, observed = set(s.pods), s.now + 5
    await s.until(lambda: s.now >= observed)
    assert set(s.pods) == running and not s.status["restarts"]["recent"], "running pods are not affected"
    s.force_delete("job-1-0")
    await s.until_phase("Complete")
    assert s.status["runtime"].startswith("ddpjob-runtime-")
    assert s.store.find("ConfigMap", s.status["runtime"]) is not None
    for pod in (p for p in s.pods.values() if p.generation == 1):
        assert pod.body["spec"]["volumes"][0]["configMap"]["name"] == s.status["runtime"]
    assert [r["reason"] for r in s.status["restarts"]["recent"]] == ["Deleted"]


async def budget_spent(s: Simulation) -> None:
    s.change_spec({"recovery": {"maxRestarts": 0}})
    await s.until_phase("Running")
    assert s.worker_fails(next(p.name for p in s.nodes() if p.running))
    await s.until_phase("Failed")
    await s.until(lambda: not any(p.running for p in s.pods.values()))


FAST = {"maxRestarts": 10, "mode": "Fast", "nodeLostAfterSeconds": 15}


def some_node(s: Simulation) -> str:
    return max(p.name for p in s.nodes() if p.running and p.role is Role.NODE)


async def spare_takes_over(s: Simulation) -> None:
    s.change_spec({"spares": 1, "recovery": FAST})
    await s.until(lambda: s.status.get("nodes", {}).get("spare") == 1)
    s.force_delete(some_node(s))
    await s.until_phase("Complete")


async def elastic_shrinks_and_grows(s: Simulation) -> None:
    s.change_spec({"nodes": 3, "elastic": {"minNodes": 1}, "recovery": FAST})
    s.training.steps = 60
    await s.until_phase("Running")
    s.force_delete(some_node(s))
    s.machines.capacity = 2
    await s.until(lambda: s.status["nodes"]["display"] == "2/3")
    s.machines.capacity = 3
    await s.until_phase("Complete")


async def scaled_down_and_up(s: Simulation) -> None:
    s.change_spec({"nodes": 3, "spares": 1})
    s.training.steps = 60
    await s.until_phase("Running")
    s.change_spec({"nodes": 2, "spares": 0})
    await s.until(lambda: s.status["nodes"]["display"] == "2/2" and s.phase == "Running")
    s.change_spec({"nodes": 3})
    await s.until_phase("Complete")


async def node_lost(s: Simulation) -> None:
    s.change_spec({"recovery": {"nodeLostAfterSeconds": 15}})
    await s.until_phase("Running")
    s.cut(s.pods[some_node(s)].node)
    await s.until_phase("Complete")


async def fast_coordinator_lost(s: Simulation) -> None:
    s.change_spec({"recovery": FAST})
    await s.until_phase("Running")
    s.force_delete(next(p.name for p in s.pods.values() if p.role is Role.COORDINATOR))
    await s.until_phase("Complete")


async def ranks_ordered(s: Simulation) -> None:
    s.change_spec({"nodes": 3, "rankOrder": ["rack"]})
    s.machines.favourite = {index: f"n{index}" for index in range(3)}
    for number, host in enumerate(s.machines.hosts.values()):
        s.machines.label(host, rack="ab"[number % 2])
    await s.until_phase("Running")
    assert s.status["rankOrder"] == [0, 2, 1], "the first round waits for the order, no matter when the operator dies"
    assert s.worker_fails(some_node(s))
    await s.until(lambda: s.status["round"] == 1 and s.phase == "Running")
    assert s.status["rankOrder"] == [0, 2, 1]
    await s.until_phase("Complete")


async def both_out_of_memory(s: Simulation) -> None:
    await s.until_phase("Running")
    for name in [p.name for p in s.nodes()]:
        s.end(name, 137, "OOMKilled")
    await s.until_phase("Complete")


TEMPLATE = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}


async def makes_a_claim(s: Simulation) -> None:
    s.change_spec({"storage": {"checkpoints": {"claimTemplate": TEMPLATE}}})
    await s.until_phase("Running")
    [claim] = s.store.all("PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "job-checkpoints"
    s.force_delete(some_node(s))
    await s.until_phase("Complete")


async def time_to_live(s: Simulation) -> None:
    s.change_spec({"runPolicy": {"ttlSecondsAfterFinished": 5}})
    await s.until(lambda: s.job is None)


NOTIFIED = {"notify": {"receiver": "team"}}


async def complete_and_notified(s: Simulation) -> None:
    s.change_spec(NOTIFIED)
    await s.until_phase("Complete")
    await notified(s)


async def failed_and_notified(s: Simulation) -> None:
    s.change_spec({**NOTIFIED, "recovery": {"maxRestarts": 1}})
    await s.until_phase("Running")
    first, second = (p.name for p in s.nodes())  # A pod that fails twice in a row is replaced instead.
    assert s.worker_fails(first)
    await s.until(lambda: s.status["restarts"]["counted"] == 1 and s.phase == "Running")
    assert s.worker_fails(second)
    await s.until_phase("Failed")
    await notified(s)


async def notified_and_deleted(s: Simulation) -> None:
    s.change_spec({**NOTIFIED, "runPolicy": {"ttlSecondsAfterFinished": 0}})
    await s.until(lambda: s.job is None)


async def notified(s: Simulation) -> None:
    await s.until(lambda: all(n["state"] == "Delivered" for n in s.status["notifications"]))


SCENARIOS: list[Scenario] = [
    start_and_complete, pod_deleted, worker_fails, pod_fails, failed_pod_removed, coordinator_deleted,
    suspended_and_resumed, scaled, key_changed, runtime_changed,
    budget_spent, time_to_live, spare_takes_over, elastic_shrinks_and_grows, scaled_down_and_up, node_lost,
    fast_coordinator_lost, ranks_ordered, both_out_of_memory, makes_a_claim,
    complete_and_notified, failed_and_notified, notified_and_deleted,
]  # fmt: skip


def outcome(s: Simulation) -> object:
    # A receiver may get a notification twice, with the same id, if the operator dies before it has
    # recorded the delivery.
    got = sorted({(body["id"], body["event"]) for body in s.cluster.received})
    if s.job is None:
        return "gone", got
    restarts = s.status["restarts"]
    recent = [(r["reason"], r["counted"]) for r in restarts.get("recent", ())]
    # The coordinator reports a change of size as well. Whether it is recorded in addition to Scaled
    # depends on the timing.
    echoes = recent.count(("Joined", False)) if ("Scaled", False) in recent else 0
    reasons = [one for one in recent if not echoes or one != ("Joined", False)]
    return s.phase, restarts["counted"], restarts["uncounted"] - echoes, reasons, got


class Forks:
    """Fork this process at every point of a simulation. In the fork, the operator dies at that
    point, and the fork reports the outcome.

    So the story before a point is played only once. Repeated points are skipped.
    """

    def __init__(self, simulation: Simulation, *, half: bool = False) -> None:
        """Fork only before every second call and after the others if `half` is true."""
        self.simulation, self._half = simulation, half
        self.outcomes: dict[int, object] = {}
        self._answer: int | None = None
        """Whether this process is a fork."""

    def __contains__(self, point: int) -> bool:
        if self._answer is not None or self.simulation.cluster.is_repeated:
            return False
        if self._half and point % 2 != point // 2 % 2:
            return False
        loop = asyncio.get_running_loop()
        inward, outward = os.pipe()
        child = os.fork()
        if child == 0:
            asyncio._set_running_loop(loop)
            os.close(inward)
            self._answer = outward
            return True
        os.close(outward)
        with os.fdopen(inward, "rb") as answers:
            self.outcomes[point] = pickle.load(answers)
        os.waitpid(child, 0)
        return False

    async def play(self, scenario: Scenario) -> object:
        """Play to the end, and return the outcome. A fork ends here instead."""
        self.simulation.cluster.die_at = self
        try:
            await scenario(self.simulation)
            end = outcome(self.simulation)
        except BaseException as error:
            if self._answer is None:
                raise
            end = repr(error)
        if self._answer is not None:
            with os.fdopen(self._answer, "wb") as answer:
                pickle.dump(end, answer)
            os._exit(0)
        return end


async def run(scenario: Scenario, die_at: Container[int], placement: str) -> Simulation:
    simulation = Simulation({"rendezvous": {"placement": placement}})
    simulation.cluster.die_at = die_at
    await scenario(simulation)
    return simulation


NEED_A_COORDINATOR_POD = (coordinator_deleted, spare_takes_over, elastic_shrinks_and_grows, fast_coordinator_lost)
CASES = [(scenario, "Dedicated") for scenario in SCENARIOS] + [
    (scenario, "Master") for scenario in SCENARIOS if scenario not in NEED_A_COORDINATOR_POD
]


async def die_everywhere(scenario: Scenario, placement: str) -> None:
    # With Master the decisions are the same as with Dedicated, except for the coordinator's own
    # pod.
    forks = Forks(Simulation({"rendezvous": {"placement": placement}}), half=placement == "Master")
    undisturbed = await forks.play(scenario)
    assert len(forks.outcomes) >= (5 if placement == "Master" else 10)
    for point, disturbed in forks.outcomes.items():
        assert disturbed == undisturbed, f"died at point {point}; to see it, run(scenario, {{{point}}}, placement)"


@pytest.mark.parametrize(("scenario", "placement"), CASES, ids=lambda c: c if isinstance(c, str) else c.__name__)
async def test_the_outcome_is_the_same_if_the_operator_dies_before_or_after_any_call(
    scenario: Scenario, placement: str
) -> None:
    await die_everywhere(scenario, placement)


async def _status_last(cluster: Cluster, job: DDPJob, decision: Decision) -> Applied:
    """Deliberate defect: act first and record the reason afterwards."""
    await right_apply(cluster, replace(job, status=decision.status), replace(decision, events=()))
    return await right_apply(cluster, job, replace(decision, actions=()))


async def _calls_it_delivered_before(cluster: Cluster, job: DDPJob, decision: Decision) -> Applied:
    """Deliberate defect: record the delivery of a notification before it is sent."""
    done = tuple(replace(n, state=NotificationState.DELIVERED) for n in decision.status.notifications)
    return await right_apply(cluster, job, replace(decision, status=replace(decision.status, notifications=done)))


async def _forgets_incidents(cluster: Cluster, job: DDPJob, decision: Decision) -> Applied:
    """Deliberate defect: do not record which of the coordinator's incidents have been counted."""
    counts = replace(decision.status.restarts, seen_incident=0)
    return await right_apply(cluster, job, replace(decision, status=replace(decision.status, restarts=counts)))


@pytest.mark.parametrize(
    ("defect", "scenario"),
    [
        (_status_last, failed_pod_removed),
        (_forgets_incidents, worker_fails),
        (_calls_it_delivered_before, complete_and_notified),
    ],
)
async def test_the_test_of_operator_crashes_finds_deliberate_defects(
    defect: Callable[..., Awaitable[Applied]], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = outcome(await run(scenario, set(), "Dedicated"))
    monkeypatch.setattr(reconcile_module, "apply", defect)
    with pytest.raises(AssertionError):
        await die_everywhere(scenario, "Dedicated")
        assert outcome(await run(scenario, set(), "Dedicated")) == undisturbed


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
async def test_the_outcome_is_the_same_if_the_operator_dies_at_every_second_point(scenario: Scenario) -> None:
    undisturbed = await run(scenario, set(), "Dedicated")
    assert outcome(await run(scenario, set(range(1, 400, 3)), "Dedicated")) == outcome(undisturbed)


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_job_completes_although_its_finished_pods_were_removed_unseen(mode: str) -> None:
    """The garbage collector for terminated pods, or a cleanup job, removes the pods. The
    coordinator still runs and knows the result.
    """
    s = await Simulation({"recovery": {"mode": mode}}, steps=20).begun()
    s.advance(120)
    assert all(p.ended for p in s.nodes()), s.inventory()
    for pod in s.nodes():
        s.force_delete(pod.name)
    s.advance(600)
    s.cluster.restart()
    await s.until_phase("Complete", limit=20)
    assert s.status["restarts"]["total"] == 0


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_job_completes_although_finished_pods_and_coordinator_were_removed(
    mode: str,
) -> None:
    """The event of a pod's deletion shows that the pod ended with 0."""
    s = await Simulation({"recovery": {"mode": mode}}, steps=20).begun()
    s.advance(120)
    for name in list(s.pods):
        s.force_delete(name)
    await s.until_phase("Complete", limit=20)
    assert s.status["restarts"]["total"] == 0


@pytest.mark.parametrize("ending", [False, True], ids=["before", "while"])
async def test_a_job_that_finishes_as_it_is_suspended_shows_all_nodes(*, ending: bool) -> None:
    """The job is complete before its pods have exited, or after their slots were planned again."""
    s = await Simulation({"nodes": 3}, steps=5).begun()
    if ending:
        s.change_spec({"runPolicy": {"suspend": True}})
        await s.one_pass()
        s.training.made = 5
        for pod in s.running():
            s.end(pod.name, 0)
    else:
        while s.report()["state"] != "Succeeded":
            s.advance(0.05)
        s.change_spec({"runPolicy": {"suspend": True}})
    await s.until_phase("Complete", limit=20)
    assert s.status["nodes"]["display"] == "3/3", s.status["slots"]


async def test_a_clock_that_was_set_back_does_not_keep_a_silent_pod() -> None:
    s = Simulation({"script": None, "command": ["train"], "recovery": {"nodeLostAfterSeconds": 20}}, steps=10**6)
    del s.spec["script"]
    await s.begun()
    s.cut(s.pods["job-1-0"].node)
    await s.until(lambda: "lostSince" in s.status["slots"][1])
    for _ in range(60):
        s.cluster.changed()
        await reconcile_module.reconcile(s.cluster, KEY, lambda: s.clock.moment() - timedelta(hours=1))
        s.advance(1)
    assert s.status["slots"][1]["attempt"] == 1, s.status["slots"]
