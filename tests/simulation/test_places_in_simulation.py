"""Kubernetes nodes and topology domains that are lost, unhealthy, failing or avoided."""

from __future__ import annotations

from functools import partial

import pytest
from ddpjob.core.follow import recording

from . import operator_port
from .simulated import Simulation, conditions
from .test_recovery_in_simulation import FAST, passes, reasons, running


@pytest.mark.parametrize("knows_hosts", [True, False])
@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_pod_on_a_silent_node_is_replaced_elsewhere(mode: str, knows_hosts: bool) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "nodeLostAfterSeconds": 20}}, steps=1000)
    s.cluster.knows_hosts = knows_hosts
    await s.until_phase("Running")
    node, began = s.pods["job-1-0"].node, s.now
    s.cut(node)
    await s.until(lambda: "job-1-0" not in s.pods)
    assert 20 <= s.now - began <= 24, "the delay counts from the node's last heartbeat"
    await s.until_phase("Running")
    assert s.pods["job-1-1"].node != node
    assert reasons(s) == [("NodeLost", False)]
    assert s.status["slots"][1].get("lostSince") is None
    s.heal(node)
    await passes(s, 5)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-1"]


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_pod_leaves_an_unhealthy_node_before_it_fails(mode: str) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode}}, steps=10**6)
    s.machines.saves = True
    await s.until_phase("Running")
    node = s.pods["job-1-0"].node
    s.machines.diagnose(s.host_of("job-1-0"), True)
    await passes(s, 55)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"], "a report counts only if it persists"
    await passes(s, 15)
    await s.until_phase("Running")
    assert [p.name for p in running(s)] == ["job-0-0", "job-1-1"] and s.pods["job-1-1"].node != node
    assert reasons(s) == [("NodeUnhealthy", False)] and s.status["restarts"]["counted"] == 0
    assert [entry["node"] for entry in s.status["avoidedNodes"]] == [node]
    assert "NodesHealthy" not in conditions(s)


async def test_a_withdrawn_health_report_moves_no_pod() -> None:
    s = await Simulation({"nodes": 2}, steps=10**6).begun()
    for _ in range(6):
        s.machines.diagnose(s.host_of("job-1-0"), True)
        await passes(s, 40, step=2)
        s.machines.diagnose(s.host_of("job-1-0"), False)
        await passes(s, 5, step=2)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"] and reasons(s) == []


async def test_an_agent_that_reports_most_nodes_as_unhealthy_moves_no_pod() -> None:
    s = await Simulation({"nodes": 2}, steps=10**6).begun()
    for host in list(s.machines.hosts.values())[:3]:
        s.machines.diagnose(host, True)
    await passes(s, 90, step=2)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"] and reasons(s) == []
    shown = conditions(s)["NodesHealthy"]
    assert (shown["status"], shown["reason"]) == ("False", "TooManyUnhealthy")
    assert "more than a quarter of the Kubernetes nodes of the same kind are unhealthy" in shown["message"]
    for host in s.machines.hosts.values():
        s.machines.diagnose(host, False)
    await passes(s, 5)
    assert conditions(s)["NodesHealthy"]["status"] == "True"


async def test_a_spare_takes_over_from_an_unhealthy_node_immediately() -> None:
    s = Simulation({**FAST, "nodes": 2, "spares": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    for host in s.machines.hosts.values():
        s.machines.cordon(host)  # there is no other host
    s.machines.diagnose(s.host_of("job-0-0"), True)
    await passes(s, 63)
    assert reasons(s) == [("NodeUnhealthy", False)]
    assert conditions(s)["Running"]["status"] == "True" and s.status["nodes"]["display"].startswith("2/2")


async def test_a_pod_stays_on_an_unhealthy_node_if_no_other_node_is_free() -> None:
    s = await Simulation({"nodes": 2}, steps=10**6).begun()
    for host in s.machines.hosts.values():
        s.machines.cordon(host)  # there is no other host
    s.machines.diagnose(s.host_of("job-0-0"), True)
    await passes(s, 90, step=2)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"] and reasons(s) == []
    assert conditions(s)["NodesHealthy"]["reason"] == "NoOtherNode"


@pytest.mark.parametrize("end", ["Suspended", "Complete", "Failed"])
async def test_a_job_without_pods_has_no_condition_about_nodes(end: str) -> None:
    s = await Simulation({"nodes": 2}, steps=400).begun()
    for host in s.machines.hosts.values():
        s.machines.cordon(host)
    s.machines.diagnose(s.host_of("job-0-0"), True)
    await passes(s, 65)
    assert conditions(s)["NodesHealthy"]["status"] == "False"
    if end == "Suspended":
        s.change_spec({"runPolicy": {"suspend": True}})
    elif end == "Failed":
        s.change_spec({"runPolicy": {"activeDeadlineSeconds": 60}})
    await s.until_phase(end, 1000)
    assert "NodesHealthy" not in conditions(s)


@pytest.mark.slow
async def test_a_job_leaves_unhealthy_nodes_once_an_hour_and_at_most_three_times() -> None:
    # Without shared checkpoints the pod would hold the only copy of its state, and would stay.
    s = Simulation({"nodes": 1, "storage": {"checkpoints": {"claimName": "kept"}}}, steps=10**7)
    s.store.create("PersistentVolumeClaim", {"metadata": {"name": "kept"}, "spec": {"accessModes": ["ReadWriteMany"]}})
    await s.begun()
    for number in range(4):
        s.machines.diagnose(s.host_of(f"job-0-{number}"), True)
        await passes(s, 80, step=2)
        if number < 3:
            for host in s.machines.hosts.values():
                s.machines.diagnose(host, False)
    assert [p.name for p in running(s)] == ["job-0-3"]
    assert conditions(s)["NodesHealthy"]["reason"] == "MovedTooOften"
    await passes(s, 3600, step=10)
    assert [p.name for p in running(s)] == ["job-0-4"], "an hour later, the job may move a pod again"


async def test_a_node_that_is_silent_for_a_short_time_is_not_lost() -> None:
    s = await Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000).begun()
    s.cut(s.pods["job-1-0"].node, noticed_after=3)
    await passes(s, 15)
    assert "lostSince" in s.status["slots"][1]
    s.heal(s.pods["job-1-0"].node)
    await s.until_phase("Running")
    assert "job-1-0" in s.pods
    await passes(s, 100)
    assert "lostSince" not in s.status["slots"][1]
    assert reasons(s) == [("PeerLost", False)], "the group has restarted, once"
    (restart,) = s.status["restarts"]["recent"]
    assert restart["pod"] == "job-1-0" and restart["seconds"] > 0
    assert restart["message"].startswith("the group lost pod job-1-0, which then reconnected: ")
    assert next(e.message for e in s.cluster.events if e.reason == "PeerLost").endswith("it restarts in its pod)")
    assert conditions(s)["Restarting"]["reason"] == "Recovered" and s.status["round"] == 1


async def test_a_node_whose_object_is_deleted_is_lost_after_the_same_delay() -> None:
    s = await Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000).begun()
    node, began = s.pods["job-1-0"].node, s.now
    s.cut(node, noticed_after=None)
    s.store.delete("Node", node, namespace="")
    await s.until(lambda: "job-1-0" not in s.pods)
    assert 20 <= s.now - began <= 23
    assert reasons(s) == [("NodeLost", False)]
    assert s.status["restarts"]["recent"][0]["message"] == f"Kubernetes node {node} of pod job-1-0 has been deleted"


async def test_a_node_with_the_out_of_service_taint_is_lost_immediately() -> None:
    s = await Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 600}}, steps=1000).begun()
    node = s.pods["job-1-0"].node
    s.cut(node, noticed_after=0)
    await passes(s, 0.5)
    body = s.store.get("Node", node, "")
    body["spec"]["taints"] = [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]
    s.store.changed("Node", body)
    await passes(s, 2)
    assert "job-1-0" not in s.pods
    assert reasons(s) == [("NodeLost", False)]


async def test_a_pod_that_terminates_on_a_dying_node_is_force_deleted() -> None:
    s = await Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000).begun()
    s.cut(s.pods["job-1-0"].node)
    await passes(s, 12)
    s.delete("job-1-0")
    await passes(s, 3)
    assert reasons(s) == [("Deleted", False)]
    await s.until(lambda: "job-1-0" not in s.pods, limit=40)


async def test_the_node_of_a_lost_coordinator_is_avoided() -> None:
    for mode, name in (("Fast", "job-coordinator-0-1"), ("Standard", "job-coordinator-1")):
        s = Simulation({"recovery": {"mode": mode, "nodeLostAfterSeconds": 20}}, steps=1000)
        await s.until_phase("Running")
        s.cut(s.pods["job-coordinator-0"].node)
        await s.until(lambda s=s, name=name: name in s.pods)
        await s.until(lambda s=s: "job-coordinator-0" not in s.pods)
        await s.until_phase("Running")
        assert {reason for reason, _ in reasons(s)} == {"CoordinatorLost"}
        assert s.status["restarts"]["counted"] == 0


async def test_a_member_lost_together_with_the_coordinators_node_delays_nothing() -> None:
    """The other members wait for it in a collective, and the new coordinator has never heard from
    it.
    """
    s = await Simulation({"nodes": 3, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=10**6).begun()
    for pod in ("job-coordinator-0", "job-1-0"):
        s.cut(s.pods[pod].node)
    await s.until_phase("Restarting")
    began = s.now
    await s.until_phase("Running")
    assert s.now - began < 15
    assert reasons(s) == [("NodeLost", False), ("CoordinatorLost", False)]


async def test_a_node_on_which_the_job_fails_repeatedly_is_avoided() -> None:
    s = await Simulation({"nodes": 2, "recovery": {"maxRestarts": 100}}, steps=10000).begun()
    bad = s.machines.favourite[1] = s.pods["job-1-0"].node
    for _ in range(3):
        pod = next(p for p in running(s) if p.index == 1)
        s.end(pod.name, 1)
        await s.until_phase("Restarting")
        await s.until_phase("Running")
        await passes(s, 65, 5)
    assert [n["node"] for n in s.status["avoidedNodes"]] == [bad]
    assert "NodeAvoided" in [e.reason for e in s.cluster.events]
    s.end(next(p for p in running(s) if p.index == 1).name, 1)
    await s.until_phase("Restarting")
    await s.until_phase("Running")
    newest = max((p for p in running(s)), key=lambda p: p.born)
    assert newest.node != bad
    await passes(s, 3700, 50)
    assert "avoidedNodes" not in s.status


# --- places -----------------------------------------------------------------------------------------------------

LOST_GPU = "RuntimeError: CUDA error: no CUDA-capable device is detected"


async def fails_wherever(s: Simulation, broken: set[str], message: str, seconds: float = 120) -> None:
    """Repeatedly let the group train for a second, and then make a worker fail in a pod of
    `broken`.
    """
    end = s.now + seconds
    while s.now < end and s.phase != "Failed":
        await s.one_pass()
        if s.phase == "Running" and any(s.worker_fails(p.name, message) for p in running(s) if p.name in broken):
            await s.one_pass()
        s.advance(1)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_pod_that_loses_its_device_is_replaced_immediately_and_counts_once(mode: str, spares: int) -> None:
    s = Simulation({"nodes": 2, "spares": spares, "recovery": {"mode": mode, "maxRestarts": 1}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    node = s.pods["job-0-0"].node
    await fails_wherever(s, {"job-0-0"}, LOST_GPU, 30)
    assert reasons(s) == [("WorkerFailed", True), ("PodUnhealthy", False)] and s.phase == "Running"
    assert "has lost its device (no CUDA-capable device)" in s.status["restarts"]["recent"][-1]["message"]
    assert [entry["node"] for entry in s.status["avoidedNodes"]] == [node]
    assert "job-0-1" in s.pods and s.pods["job-0-1"].node != node
    assert s.status["restarts"]["recent"][0]["seconds"] < (3 if spares else 15), "a spare takes over immediately"


async def test_a_pod_that_fails_again_before_it_is_deleted_does_not_count_twice() -> None:
    s = Simulation({**FAST, "nodes": 2, "recovery": {"mode": "Fast", "maxRestarts": 1}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    at_once = s.machines._terminate_if_reachable
    s.machines._terminate_if_reachable = lambda pod: s.clock.later(5, lambda: at_once(pod))  # type: ignore[method-assign]
    assert s.worker_fails("job-1-0", LOST_GPU)
    await s.until(lambda: len(reasons(s)) == 2)
    await s.until(lambda: s.worker_fails("job-1-0", LOST_GPU))
    await s.until(lambda: len(reasons(s)) == 3)
    assert reasons(s) == [("WorkerFailed", True), ("PodUnhealthy", False), ("WorkerFailed", False)]
    await s.until_phase("Running")
    assert s.status["restarts"]["counted"] == 1 and "job-1-1" in s.pods


async def test_failures_of_a_pod_that_are_seen_together_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Simulation({**FAST, "nodes": 2, "recovery": {"mode": "Fast", "maxRestarts": 1}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    replace_failing = recording._replace_failing
    # This happens if the operator was down while the worker failed twice.
    monkeypatch.setattr(recording, "_replace_failing", lambda ends, given: replace_failing(ends, given * 2))
    assert s.worker_fails("job-1-0", LOST_GPU)
    await s.until(lambda: reasons(s) != [])
    assert reasons(s) == [("WorkerFailed", True), ("WorkerFailed", False), ("PodUnhealthy", False)]
    await s.until_phase("Running")
    assert s.status["restarts"]["counted"] == 1 and "job-1-1" in s.pods


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
@pytest.mark.parametrize("seen_late", [False, True])
async def test_a_pod_that_fails_twice_while_others_work_is_replaced(mode: str, seen_late: bool) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "maxRestarts": 2}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    message = "CUDA error: an illegal memory access was encountered"
    assert s.worker_fails("job-1-0", message)
    await s.until(lambda: reasons(s) != [])
    if seen_late:  # The informer of pods may lag behind the informer of reports.
        s.status["restarts"]["recent"][0]["node"] = ""
    await fails_wherever(s, {"job-1-0"}, message)
    assert reasons(s) == [("WorkerFailed", True), ("WorkerFailed", False), ("PodUnhealthy", False)]
    assert [p.name for p in running(s)] == ["job-0-0", "job-1-1"] and s.phase == "Running"
    assert any("job-1-1 replaces it" in e.message for e in s.cluster.events if e.reason == "PodUnhealthy")


async def test_with_a_single_host_a_failing_pod_stays_and_each_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_port, "World", partial(operator_port.World, one_host=True))
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "maxRestarts": 2}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    await fails_wherever(s, {"job-1-0"}, "CUDA error: an illegal memory access was encountered")
    assert reasons(s) == [("WorkerFailed", True)] * 3 and s.phase == "Failed"


async def test_a_pod_that_causes_two_hangs_is_replaced() -> None:
    s = Simulation({**FAST, "nodes": 3, "recovery": {"mode": "Fast", "hangAfterSeconds": 10}}, steps=10**6)
    for number in (1, 2):
        await s.until(lambda: s.phase == "Running" and s.training.made > 3)
        launcher = s.pods["job-1-0"].launcher
        assert launcher is not None and launcher.round is not None
        launcher.stands_in, launcher.round.hung = "read_sample", True
        await s.until(lambda: [r for r, _ in reasons(s)].count("Hang") == number)  # noqa: B023
    await s.until_phase("Running")
    assert reasons(s) == [("Hang", True), ("Hang", False), ("PodUnhealthy", False)]
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-1", "job-2-0"]


async def test_if_a_daemon_reload_takes_all_devices_it_counts_once_per_node() -> None:
    """All containers lose their devices at the same time. New containers get devices again on any
    host.
    """
    s = Simulation({**FAST, "nodes": 5, "gpusPerNode": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    await fails_wherever(s, {p.name for p in running(s)}, "RuntimeError: No CUDA GPUs are available", 200)
    assert s.phase == "Running" and s.status["restarts"]["counted"] == 5
    assert sorted(p.name for p in running(s)) == [f"job-{index}-1" for index in range(5)]


async def test_if_new_pods_lose_their_devices_too_the_job_fails_by_its_budget() -> None:
    s = Simulation({**FAST, "recovery": {"mode": "Fast", "maxRestarts": 10}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    await fails_wherever(s, {f"job-{i}-{a}" for i in range(2) for a in range(40)}, LOST_GPU, 1500)
    assert conditions(s)["Failed"]["reason"] == "RestartBudgetSpent"


@pytest.mark.parametrize(
    "message", ["NameError: name 'lunch' is not defined", "killed by the kernel: the container's memory limit"]
)
async def test_an_error_that_any_pod_would_have_does_not_move_a_pod(message: str) -> None:
    s = Simulation({**FAST, "nodes": 2, "recovery": {"mode": "Fast", "maxRestarts": 3}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for _ in range(3):
        await s.until(lambda: s.worker_fails("job-1-0", message, oom="memory" in message))
    await passes(s, 10)
    assert {reason for reason, _ in reasons(s)} <= {"WorkerFailed", "OOMKilled"} and "job-1-0" in s.pods
    assert s.status["restarts"]["counted"] == 3


async def test_an_error_that_another_pod_had_in_the_same_round_does_not_move_the_pod() -> None:
    s = Simulation({**FAST, "nodes": 2}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for number in (1, 2, 3):
        await s.until(lambda: s.worker_fails("job-1-0"))
        other = s.pods["job-0-0"].launcher
        assert other is not None and other.worker_ends("ValueError: lunch", 1)
        await s.until(lambda: len(reasons(s)) == number)  # noqa: B023
    await passes(s, 10)
    assert reasons(s) == [("WorkerFailed", True)] * 3


async def test_pods_that_fail_alternately_are_not_moved() -> None:
    s = Simulation({**FAST, "nodes": 2}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for number in range(4):
        await s.until(lambda: s.worker_fails(f"job-{number % 2}-0"))  # noqa: B023
    await passes(s, 10)
    assert reasons(s) == [("WorkerFailed", True)] * 4


async def test_a_rank_that_fails_on_every_host_is_moved_at_most_three_times() -> None:
    s = Simulation({**FAST, "nodes": 2, "recovery": {"mode": "Fast", "maxRestarts": 9}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    await fails_wherever(s, {f"job-1-{attempt}" for attempt in range(20)}, "ValueError: lunch", 900)
    assert s.phase == "Failed" and max(p.attempt for p in s.nodes() if p.index == 1) == 3


@pytest.mark.parametrize("spares", [0, 1])
async def test_a_failing_pod_stays_if_there_is_no_spare_and_no_free_node(spares: int) -> None:
    s = Simulation({**FAST, "nodes": 2, "spares": spares}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for host in s.machines.hosts.values():
        s.machines.cordon(host)
    assert s.worker_fails("job-1-0", LOST_GPU)
    await passes(s, 10)
    assert ("PodUnhealthy", False) in reasons(s) or not spares
    assert ("job-1-0" in s.pods) is not bool(spares)


async def loses_its_connection(s: Simulation, pod: str, times: int) -> None:
    """Cut and heal the network of a pod's host repeatedly, before its node counts as lost."""
    for _ in range(times):
        await s.until(lambda: s.phase == "Running" and s.training.made > 3)
        node, known = s.pods[pod].node, len(reasons(s))
        s.cut(node, noticed_after=3)
        await passes(s, 8)
        s.heal(node)
        await s.until(lambda: len(reasons(s)) > known, limit=200)  # noqa: B023


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_pod_is_replaced_if_it_alone_loses_its_connection_three_times(mode: str) -> None:
    s = await Simulation({"nodes": 3, "recovery": {"mode": mode}}, steps=10**6).begun()
    coordinator = next(p.node for p in s.pods.values() if not p.is_node)
    pod = next(p for p in s.nodes() if p.node != coordinator)
    await loses_its_connection(s, pod.name, 2)
    assert reasons(s) == [("PeerLost", False)] * 2 and pod.name in s.pods
    await loses_its_connection(s, pod.name, 1)
    await s.until_phase("Running")
    assert reasons(s) == [("PeerLost", False)] * 3 + [("PodUnhealthy", False)]
    assert "lost its connection 3 times in a row" in s.status["restarts"]["recent"][-1]["message"]
    assert f"job-{pod.index}-1" in s.pods and [entry["node"] for entry in s.status["avoidedNodes"]] == [pod.node]


async def test_in_a_pair_of_pods_a_broken_connection_replaces_neither() -> None:
    s = await Simulation({"nodes": 2, "rendezvous": {"placement": "Master"}}, steps=10**6).begun()
    await loses_its_connection(s, "job-1-0", 4)
    assert reasons(s) == [("PeerLost", False)] * 4 and "job-1-0" in s.pods
