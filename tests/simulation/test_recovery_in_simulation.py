"""Elastic jobs, spares, lost nodes, the Fast coordinator, budget and rules.

What is done, and that the status is true meanwhile.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.world import Role

from .kubelet import Pod
from .operator_port import MemoryCluster
from .simulated import Simulation, conditions

FAST: Json = {"recovery": {"mode": "Fast"}}


def running(s: Simulation) -> list[Pod]:
    return [p for p in s.nodes() if p.running]


def reasons(s: Simulation) -> list[tuple[str, bool]]:
    return [(str(r["reason"]), r["counted"]) for r in s.status["restarts"].get("recent", ())]


async def passes(s: Simulation, seconds: float, step: float = 0.5) -> None:
    """The operator looks every `step` seconds."""
    end = s.now + seconds
    while s.now < end:
        await s.one_pass()
        s.advance(step)
    await s.one_pass()


# --- spares -----------------------------------------------------------------------------------------------------


async def test_a_spare_takes_over_and_the_replacement_is_the_new_spare() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=1000)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    assert {p.name: p.role for p in s.nodes()} == {"job-0-0": Role.NODE, "job-1-0": Role.NODE, "job-2-0": Role.SPARE}
    assert s.store.find("PodDisruptionBudget", "job") is not None
    s.force_delete("job-0-0")
    await passes(s, 0.5)
    assert conditions(s)["Running"]["status"] == "True", "the spare has taken over before the replacement is there"
    assert s.status["nodes"]["display"] == "2/2"
    await passes(s, 3)
    assert {p.name: p.role for p in running(s)} == {"job-1-0": Role.NODE, "job-2-0": Role.NODE, "job-0-1": Role.SPARE}
    assert s.status["nodes"]["display"] == "2/2 +1"
    assert s.status["nodes"]["active"] == 2, "what a scale subresource shows has no spares in it"
    assert reasons(s) == [("Deleted", False)]
    assert conditions(s)["Restarting"]["status"] == "False"


async def test_a_spare_counts_once_it_can_take_over() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=10**6)
    await s.until(lambda: s.status.get("nodes", {}).get("display") == "2/2 +1")
    s.network.pace = replace(s.network.pace, boot=(20, 20))
    s.force_delete("job-0-0")
    await s.until(lambda: s.phase == "Running" and s.pods["job-0-1"].running)
    await passes(s, 15)
    assert s.status["nodes"]["display"] == "2/2", "its container runs, and its Python has not started yet"
    await s.until(lambda: s.status["nodes"]["display"] == "2/2 +1", limit=10)
    s.network.operator_cut = True
    await passes(s, 30)
    assert conditions(s)["Running"]["reason"] == "CoordinatorUnreachable"
    assert s.status["nodes"]["spare"] == 1, "nothing else is known"


async def test_a_report_from_before_a_loss_is_not_believed() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=1000)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.cut(s.pods["job-0-0"].node)
    s.force_delete("job-0-0")
    await s.one_pass()
    assert conditions(s)["Running"]["status"] == "False", (
        "two pods run, but the group that the report describes is no more"
    )
    assert conditions(s)["Restarting"]["status"] == "True"
    await passes(s, 2)
    assert s.phase == "Running", "the operator has notified the coordinator, which did not wait for the silent pod"


async def test_a_job_does_not_wait_for_spares_that_find_no_node() -> None:
    s = Simulation({"spares": 2}, steps=20)
    s.machines.capacity = 2
    await s.until_phase("Running")
    assert conditions(s)["Scheduled"]["reason"] == "Unschedulable"
    await s.until_phase("Complete")
    assert conditions(s)["Complete"]["message"] == "all 2 nodes have finished"
    await s.until(lambda: all(p.state != "Pending" for p in s.nodes()), limit=10)


async def test_a_lost_spare_is_no_restart_of_training() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=1000)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    rounds = s.coordinator().real.rounds
    s.force_delete("job-2-0")
    phases = set()
    for _ in range(10):
        await passes(s, 0.5)
        phases.add(s.phase)
    assert phases == {"Running"}
    assert s.coordinator().real.rounds == rounds
    assert s.status["nodes"]["display"] == "2/2 +1"
    assert (s.status["restarts"]["total"], s.status["restarts"]["display"]) == (0, "0/10") and not reasons(s)
    (event,) = [e.message for e in s.cluster.events if e.reason == "Deleted"]
    assert (
        event == "pod job-2-0 was deleted, or its labels were removed (a spare: nothing restarts; job-2-1 replaces it)"
    )


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_spare_that_is_evicted_excuses_no_worker(mode: str) -> None:
    """It trained nothing, so that nothing of the training follows from its end."""
    s = Simulation({"recovery": {"mode": mode}, "spares": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.delete("job-2-0")
    await passes(s, 1)
    assert "Restarting" not in conditions(s)
    assert s.worker_fails("job-0-0")
    await passes(s, 10)
    assert reasons(s) == [("WorkerFailed", True)]
    assert "consequence" not in s.status["restarts"]["recent"][-1]["message"]
    s.delete("job-0-0")
    s.delete(next(p.name for p in s.nodes() if p.role is Role.SPARE))
    await passes(s, 0.5)
    assert "job-0-0" in conditions(s)["Restarting"]["message"], "not the spare's end"
    await s.until_phase("Running")


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
@pytest.mark.parametrize("distance", [0.0, 0.2])
async def test_a_spare_that_is_evicted_while_the_workers_restart_excuses_none(mode: str, distance: float) -> None:
    """Its end is seen when the group is down already, and before the coordinator has named the cause."""
    s = Simulation({"recovery": {"mode": mode}, "spares": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.advance(0.5)
    assert s.worker_fails("job-0-0")
    s.advance(distance)
    s.delete("job-2-0")
    await passes(s, 10, step=0.1)
    assert reasons(s) == [("WorkerFailed", True)]


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_spare_that_has_taken_over_breaks_the_group(mode: str) -> None:
    """Also where nobody has looked since: its label is a spare's until the operator's next look."""
    s = Simulation({"recovery": {"mode": mode}, "spares": 2}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +2")
    s.force_delete("job-0-0")
    s.advance(5)
    s.delete("job-2-0")
    s.advance(4)
    assert [m["pod"] for m in s.report()["members"] if m["state"] == "Running"] == ["job-1-0", "job-3-0"]
    await s.one_pass()
    assert {(r["pod"], r.get("round")) for r in s.status["restarts"]["recent"]} == {("job-0-0", 1), ("job-2-0", 1)}


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_spare_that_ends_before_the_recovery_is_seen_did_not_break_the_group(mode: str) -> None:
    """The event named it, and the restart lasted until the look instead of until the next step."""
    s = Simulation({"recovery": {"mode": mode}, "spares": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    assert s.worker_fails("job-0-0")
    await passes(s, 0.1, step=0.05)
    assert s.phase == "Restarting"
    s.advance(5)
    s.delete("job-2-0")
    await s.one_pass()
    (failed,) = s.status["restarts"]["recent"]
    assert failed["pod"] == "job-0-0" and failed["seconds"] < 1
    assert s.cluster.events[-1].message.endswith(f"{failed['seconds']} s after job-0-0 broke the group")


# --- elastic ----------------------------------------------------------------------------------------------------


async def test_fewer_nodes_train_while_others_are_pending_and_they_join_later() -> None:
    s = Simulation({"nodes": 4, "elastic": {"minNodes": 2}}, steps=1000)
    s.machines.capacity = 3
    await passes(s, 20, 1)
    running_condition = conditions(s)["Running"]
    assert (running_condition["status"], s.phase) == ("False", "Starting"), "it waits for the others for a while"
    await s.until_phase("Running")
    message = conditions(s)["Running"]["message"]
    assert message == "3 of 4 nodes run together; pod job-3-0 is not scheduled: 0/8 nodes are available"
    assert s.status["nodes"]["display"] == "3/4"
    assert conditions(s)["Scheduled"]["status"] == "False"
    s.machines.capacity = 4
    await s.until(lambda: conditions(s)["Running"]["message"] == "4 nodes run together")
    assert reasons(s) == [("Joined", False)]
    await passes(s, 2)
    assert s.invariants.worlds == [3, 4]
    assert conditions(s)["Scheduled"]["status"] == "True"


async def test_a_smaller_group_says_what_its_missing_pod_does() -> None:
    s = Simulation({**FAST, "nodes": 3, "elastic": {"minNodes": 1}}, steps=10**6)
    await s.until_phase("Running")
    s.network.pace = replace(s.network.pace, boot=(10, 10))
    s.force_delete("job-0-0")
    await s.until(lambda: "job-0-1" in s.pods and s.pods["job-0-1"].running)
    await passes(s, 3)
    assert conditions(s)["Running"]["message"] == "2 of 3 nodes run together; pod job-0-1 is starting"
    await s.until(lambda: s.status["nodes"]["display"] == "3/3")
    s.machines.isolate(s.pods["job-1-0"], 60)
    await s.until(lambda: s.status["nodes"]["display"] == "2/3")
    message = "2 of 3 nodes run together; pod job-1-0 runs, but the coordinator does not hear from it"
    await s.until(lambda: conditions(s)["Running"]["message"] == message)


async def test_with_fewer_than_min_nodes_it_waits() -> None:
    s = Simulation({"nodes": 4, "elastic": {"minNodes": 2}}, steps=1000)
    s.machines.capacity = 1
    await passes(s, 60, 1)
    assert conditions(s)["Running"]["message"] == "1 of 4 nodes runs, 2 are needed"
    assert s.coordinator().real.rounds == 0


# --- scaling in place -------------------------------------------------------------------------------------------


async def test_scaling_keeps_the_pods_and_the_generation() -> None:
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    s.change_spec({"nodes": 3})
    await s.until(lambda: conditions(s)["Running"]["message"] == "3 nodes run together")
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0", "job-2-1"], "an attempt that was never used"
    assert reasons(s) == [("Joined", False)]
    s.change_spec({"nodes": 1})
    await s.until(lambda: conditions(s)["Running"]["message"] == "1 node trains")
    await s.until(lambda: [p.name for p in s.nodes() if p.state != "Ended"] == ["job-0-0"])
    assert reasons(s) == [("Joined", False), ("Scaled", False)], "once"
    s.change_spec({"nodes": 2})
    await s.until(lambda: conditions(s)["Running"]["message"] == "2 nodes run together")
    assert "job-1-2" in s.pods, "not the name of a pod that was dropped"
    assert s.status["rendezvous"]["generation"] == 0
    assert s.status["restarts"]["counted"] == 0


@pytest.mark.parametrize("command", [False, True], ids=["script", "command"])
async def test_a_job_that_waits_for_room_restarts_nothing_when_it_is_made_smaller(command: bool) -> None:
    s = Simulation({"nodes": 3, **({"script": None, "command": ["train"]} if command else {})}, steps=1000)
    if command:
        del s.spec["script"]
    s.machines.capacity = 1
    await passes(s, 20, 1)
    s.change_spec({"nodes": 2})
    await passes(s, 20, 1)
    assert s.phase == "Starting" and "Restarting" not in conditions(s)
    assert conditions(s)["Scheduled"]["reason"] == "Unschedulable"
    s.machines.capacity = 2
    await s.until_phase("Running")
    await passes(s, 10, 1)
    assert "Restarting" not in conditions(s) and reasons(s) == []


class DeafCluster(MemoryCluster):
    """The coordinator does not get the first messages."""

    deaf = 3

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        if verb == "size" and self.deaf > 0:
            self.deaf -= 1
            return
        await super().notify(job, endpoint, verb, body)


class Deaf(Simulation):
    cluster_class = DeafCluster


async def test_the_size_is_sent_until_the_report_shows_it() -> None:
    s = Deaf({"nodes": 2, "elastic": {"minNodes": 1}}, steps=1000)
    await s.until_phase("Running")
    s.change_spec({"nodes": 3, "elastic": {"minNodes": 2}})
    await s.until(lambda: s.report()["nodes"] == 3)
    assert s.report()["minNodes"] == 2
    assert s.cluster.deaf == 0  # type: ignore[attr-defined]


async def test_patience_changes_in_place() -> None:
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    rounds = s.coordinator().real.rounds
    s.change_spec({"recovery": {"hangAfterSeconds": 90, "backoff": {"initialSeconds": 2, "maxSeconds": 8}}})
    await s.until(lambda: (s.report()["hangAfter"], s.report()["backoff"]) == (90, [2, 8]))
    assert s.coordinator().real.rounds == rounds


async def test_a_group_that_is_about_to_grow_restarts_and_does_not_start() -> None:
    """Its workers may save first. That the coordinator has ended the round is seen before it says why."""
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    s.change_spec({"nodes": 3})
    phases = [s.phase]
    for _ in range(100):
        await s.one_pass()
        phases += [s.phase] if s.phase != phases[-1] else []
        if phases[-1] == "Restarting":
            assert conditions(s)["Running"]["message"] == "3 of 3 nodes run, and the group restarts"
        s.advance(0.25)
    assert phases == ["Running", "Restarting", "Running"]
    assert reasons(s) == [("Joined", False)]


async def test_more_spares_disturb_nobody() -> None:
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    rounds = s.coordinator().real.rounds
    s.change_spec({"spares": 2})
    await s.until(lambda: s.status["nodes"]["display"] == "2/2 +2")
    assert s.coordinator().real.rounds == rounds
    assert reasons(s) == []
    s.change_spec({"spares": 0})
    await s.until(
        lambda: s.status["nodes"]["display"] == "2/2" and len([p for p in s.nodes() if p.state != "Ended"]) == 2
    )
    assert s.coordinator().real.rounds == rounds


async def test_fewer_spares_are_a_restart_where_one_that_goes_has_taken_over() -> None:
    s = Simulation({"nodes": 2, "spares": 1}, steps=1000)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.force_delete("job-0-0")
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.change_spec({"spares": 0})
    await s.until(lambda: s.phase == "Restarting", limit=5)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2")
    assert sorted(p.name for p in running(s)) == ["job-0-1", "job-1-0"]
    assert reasons(s) == [("Deleted", False), ("Scaled", False)]


# --- the coordinator in mode Fast -------------------------------------------------------------------------------


async def test_a_lost_coordinator_costs_no_step_in_mode_fast() -> None:
    s = Simulation(FAST, steps=1000)
    await s.until_phase("Running")
    await passes(s, 5)
    steps, pods = s.training.made, {p.name for p in running(s)}
    s.force_delete("job-coordinator-0")
    for _ in range(20):
        await passes(s, 0.5)
        assert (s.phase, conditions(s)["Running"]["status"]) == ("Running", "True")
    assert s.training.made - steps >= 10, "it trained all the while"
    assert {p.name for p in running(s)} == pods
    assert [p.name for p in s.pods.values() if p.role is Role.COORDINATOR] == ["job-coordinator-0-1"]
    assert s.pods["job-coordinator-0-1"].body["spec"]["hostname"] == "coordinator"
    assert s.pods["job-coordinator-0-1"].argument("attempt") == "1"
    assert (s.status["rendezvous"]["generation"], s.status["rendezvous"]["attempt"], s.status["round"]) == (0, 1, 0)
    assert reasons(s) == [("CoordinatorLost", False)]
    assert conditions(s).get("Restarting", {"status": "False"})["status"] == "False"
    s.worker_fails("job-0-0")
    await s.until(lambda: reasons(s)[-1] == ("WorkerFailed", True))


async def test_a_coordinator_that_hears_nobody_is_replaced_and_the_pods_are_left_alone() -> None:
    s = Simulation({"nodes": 4, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000)
    await s.until_phase("Running")
    pods, steps = {p.name for p in running(s)}, s.training.made
    s.pods["job-coordinator-0"].deaf = True
    s.network.changed()
    await s.until(lambda: "job-coordinator-0-1" in s.pods)
    await passes(s, 60, 1)
    assert {p.name for p in running(s)} == pods
    assert s.training.made - steps >= 60, "it trained all the while"
    assert reasons(s) == [("CoordinatorLost", False)]
    assert "has not heard most of its members" in s.status["restarts"]["recent"][0]["message"]
    assert s.phase == "Running"


async def test_a_coordinator_that_cannot_live_is_not_made_again_and_again_at_once() -> None:
    s = Simulation({"recovery": {"mode": "Fast", "backoff": {"initialSeconds": 4, "maxSeconds": 8}}}, steps=1000)
    await s.until_phase("Running")
    made = []
    for _ in range(4):
        await s.until(lambda: any(p.role is Role.COORDINATOR and p.running for p in s.pods.values()))
        name = next(p.name for p in s.pods.values() if p.role is Role.COORDINATOR and p.running)
        made.append(s.now)
        s.end(name, 1)
        await s.one_pass()
    assert made[1] - made[0] <= 2
    assert made[2] - made[1] >= 4
    assert made[3] - made[2] >= 8
    assert s.status["restarts"]["counted"] == 0


async def test_a_pod_without_warm_workers_is_reported_by_a_condition() -> None:
    warm = Simulation(FAST, steps=1000)
    await warm.until_phase("Running")
    await warm.one_pass()
    assert conditions(warm)["FastRecovery"]["status"] == "True"
    s = Simulation(FAST, steps=1000)

    def old_torch(pod: Pod) -> None:
        if pod.name == "job-1-0" and pod.launcher is not None:
            pod.launcher.note_cold = "torch 1.9 is not supported"

    s.machines.on_pod = old_torch
    await s.until_phase("Running")
    await s.one_pass()
    reported = conditions(s)["FastRecovery"]
    assert (reported["status"], reported["reason"], reported["message"]) == (
        "False",
        "ColdWorkers",
        "pod job-1-0: torch 1.9 is not supported",
    )
    s.force_delete("job-coordinator-0")
    await s.until(lambda: s.status["rendezvous"]["attempt"] == 1)
    await passes(s, 5)
    assert conditions(s)["FastRecovery"] == reported, "the next coordinator knows it as soon as the pod"
    standard = Simulation({}, steps=1000)
    await standard.until_phase("Running")
    assert "FastRecovery" not in conditions(standard)


# --- nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_hosts", [True, False])
@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_silent_node_is_left_and_its_pod_replaced_elsewhere(mode: str, knows_hosts: bool) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "nodeLostAfterSeconds": 20}}, steps=1000)
    s.cluster.knows_hosts = knows_hosts
    await s.until_phase("Running")
    node, began = s.pods["job-1-0"].node, s.now
    s.cut(node)
    await s.until(lambda: "job-1-0" not in s.pods)
    assert 20 <= s.now - began <= 24, "from when it was last heard"
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
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"], "it has to last"
    await passes(s, 15)
    await s.until_phase("Running")
    assert [p.name for p in running(s)] == ["job-0-0", "job-1-1"] and s.pods["job-1-1"].node != node
    assert reasons(s) == [("NodeUnhealthy", False)] and s.status["restarts"]["counted"] == 0
    assert [entry["node"] for entry in s.status["avoidedNodes"]] == [node]
    assert "NodesHealthy" not in conditions(s)


async def test_what_an_agent_takes_back_moves_nothing() -> None:
    s = Simulation({"nodes": 2}, steps=10**6)
    await s.until_phase("Running")
    for _ in range(6):
        s.machines.diagnose(s.host_of("job-1-0"), True)
        await passes(s, 40, step=2)
        s.machines.diagnose(s.host_of("job-1-0"), False)
        await passes(s, 5, step=2)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"] and reasons(s) == []


async def test_a_broken_agent_that_speaks_against_most_nodes_moves_nothing() -> None:
    s = Simulation({"nodes": 2}, steps=10**6)
    await s.until_phase("Running")
    for host in list(s.machines.hosts.values())[:3]:
        s.machines.diagnose(host, True)
    await passes(s, 90, step=2)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"] and reasons(s) == []
    shown = conditions(s)["NodesHealthy"]
    assert (shown["status"], shown["reason"]) == ("False", "TooManyUnhealthy")
    assert "more than a quarter of the Kubernetes nodes of its kind are unhealthy" in shown["message"]
    for host in s.machines.hosts.values():
        s.machines.diagnose(host, False)
    await passes(s, 5)
    assert conditions(s)["NodesHealthy"]["status"] == "True"


async def test_a_spare_takes_over_from_an_unhealthy_node_at_once() -> None:
    s = Simulation({**FAST, "nodes": 2, "spares": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    for host in s.machines.hosts.values():
        s.machines.cordon(host)  # there is no other place
    s.machines.diagnose(s.host_of("job-0-0"), True)
    await passes(s, 63)
    assert reasons(s) == [("NodeUnhealthy", False)]
    assert conditions(s)["Running"]["status"] == "True" and s.status["nodes"]["display"].startswith("2/2")


async def test_a_pod_stays_on_an_unhealthy_node_where_there_is_no_other() -> None:
    s = Simulation({"nodes": 2}, steps=10**6)
    await s.until_phase("Running")
    for host in s.machines.hosts.values():
        s.machines.cordon(host)  # there is no other place
    s.machines.diagnose(s.host_of("job-0-0"), True)
    await passes(s, 90, step=2)
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0"] and reasons(s) == []
    assert conditions(s)["NodesHealthy"]["reason"] == "NoOtherNode"


@pytest.mark.parametrize("end", ["Suspended", "Complete", "Failed"])
async def test_a_job_without_pods_says_nothing_of_their_nodes(end: str) -> None:
    s = Simulation({"nodes": 2}, steps=400)
    await s.until_phase("Running")
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
async def test_a_job_leaves_a_node_once_an_hour_and_moves_three_times_at_most() -> None:
    s = Simulation({"nodes": 1}, steps=10**7)
    await s.until_phase("Running")
    for number in range(4):
        s.machines.diagnose(s.host_of(f"job-0-{number}"), True)
        await passes(s, 80, step=2)
        if number < 3:
            for host in s.machines.hosts.values():
                s.machines.diagnose(host, False)
    assert [p.name for p in running(s)] == ["job-0-3"]
    assert conditions(s)["NodesHealthy"]["reason"] == "MovedTooOften"
    await passes(s, 3600, step=10)
    assert [p.name for p in running(s)] == ["job-0-4"], "an hour later it may move again"


async def test_a_short_silence_is_no_loss() -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000)
    await s.until_phase("Running")
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
    assert restart["message"].startswith("pod job-1-0 was lost to the group, and came back: ")
    assert next(e.message for e in s.cluster.events if e.reason == "PeerLost").endswith("it restarts in its pod)")
    assert conditions(s)["Restarting"]["reason"] == "Recovered" and s.status["round"] == 1


async def test_a_deleted_node_object_is_a_loss_after_the_same_time() -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000)
    await s.until_phase("Running")
    node, began = s.pods["job-1-0"].node, s.now
    s.cut(node, noticed_after=None)
    s.store.delete("Node", node, namespace="")
    await s.until(lambda: "job-1-0" not in s.pods)
    assert 20 <= s.now - began <= 23
    assert reasons(s) == [("NodeLost", False)]
    assert s.status["restarts"]["recent"][0]["message"] == f"Kubernetes node {node} of pod job-1-0 is deleted"


async def test_out_of_service_is_believed_at_once() -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 600}}, steps=1000)
    await s.until_phase("Running")
    node = s.pods["job-1-0"].node
    s.cut(node, noticed_after=0)
    await passes(s, 0.5)
    body = s.store.get("Node", node, "")
    body["spec"]["taints"] = [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]
    s.store.changed("Node", body)
    await passes(s, 2)
    assert "job-1-0" not in s.pods
    assert reasons(s) == [("NodeLost", False)]


async def test_a_pod_that_ends_on_a_node_that_dies_is_removed_by_force() -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000)
    await s.until_phase("Running")
    s.cut(s.pods["job-1-0"].node)
    await passes(s, 12)
    s.delete("job-1-0")
    await passes(s, 3)
    assert reasons(s) == [("Deleted", False)]
    await s.until(lambda: "job-1-0" not in s.pods, limit=40)


async def test_a_lost_coordinator_s_node_is_left_in_both_modes() -> None:
    for mode, name in (("Fast", "job-coordinator-0-1"), ("Standard", "job-coordinator-1")):
        s = Simulation({"recovery": {"mode": mode, "nodeLostAfterSeconds": 20}}, steps=1000)
        await s.until_phase("Running")
        s.cut(s.pods["job-coordinator-0"].node)
        await s.until(lambda s=s, name=name: name in s.pods)
        await s.until(lambda s=s: "job-coordinator-0" not in s.pods)
        await s.until_phase("Running")
        assert {reason for reason, _ in reasons(s)} == {"CoordinatorLost"}
        assert s.status["restarts"]["counted"] == 0


async def test_a_node_that_is_lost_with_the_coordinator_and_a_member_costs_no_wait_for_that_member() -> None:
    """The others are in a collective with it, and the coordinator that takes over has never heard of it."""
    s = Simulation({"nodes": 3, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=10**6)
    await s.until_phase("Running")
    for pod in ("job-coordinator-0", "job-1-0"):
        s.cut(s.pods[pod].node)
    await s.until_phase("Restarting")
    began = s.now
    await s.until_phase("Running")
    assert s.now - began < 15
    assert reasons(s) == [("NodeLost", False), ("CoordinatorLost", False)]


async def test_a_node_that_fails_the_job_again_and_again_is_avoided() -> None:
    s = Simulation({"nodes": 2, "recovery": {"maxRestarts": 100}}, steps=10000)
    await s.until_phase("Running")
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
    """Each time the group trains for a second, a worker of a pod among `broken` ends."""
    end = s.now + seconds
    while s.now < end and s.phase != "Failed":
        await s.one_pass()
        if s.phase == "Running" and any(s.worker_fails(p.name, message) for p in running(s) if p.name in broken):
            await s.one_pass()
        s.advance(1)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_pod_that_has_lost_its_device_is_replaced_at_once_and_counts_once(mode: str, spares: int) -> None:
    s = Simulation({"nodes": 2, "spares": spares, "recovery": {"mode": mode, "maxRestarts": 1}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    node = s.pods["job-0-0"].node
    await fails_wherever(s, {"job-0-0"}, LOST_GPU, 30)
    assert reasons(s) == [("WorkerFailed", True), ("PodUnhealthy", False)] and s.phase == "Running"
    assert "has lost its device (no CUDA-capable device)" in s.status["restarts"]["recent"][-1]["message"]
    assert [entry["node"] for entry in s.status["avoidedNodes"]] == [node]
    assert "job-0-1" in s.pods and s.pods["job-0-1"].node != node
    assert s.status["restarts"]["recent"][0]["seconds"] < (3 if spares else 15), "a spare takes over at once"


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
@pytest.mark.parametrize("seen_late", [False, True])
async def test_a_pod_whose_ranks_fail_twice_while_others_are_well_is_replaced(mode: str, seen_late: bool) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "maxRestarts": 2}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    message = "CUDA error: an illegal memory access was encountered"
    assert s.worker_fails("job-1-0", message)
    await s.until(lambda: reasons(s) != [])
    if seen_late:  # The informer of pods may be behind that of reports.
        s.status["restarts"]["recent"][0]["node"] = ""
    await fails_wherever(s, {"job-1-0"}, message)
    assert reasons(s) == [("WorkerFailed", True), ("WorkerFailed", False), ("PodUnhealthy", False)]
    assert [p.name for p in running(s)] == ["job-0-0", "job-1-1"] and s.phase == "Running"
    assert any("job-1-1 replaces it" in e.message for e in s.cluster.events if e.reason == "PodUnhealthy")


async def test_a_hang_that_names_the_same_pod_twice_replaces_it() -> None:
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


async def test_a_host_whose_daemon_reload_takes_all_devices_costs_one_failure_for_each_node() -> None:
    """Every container has lost its devices at the same time; new ones have them, wherever they are."""
    s = Simulation({**FAST, "nodes": 5, "gpusPerNode": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    await fails_wherever(s, {p.name for p in running(s)}, "RuntimeError: No CUDA GPUs are available", 200)
    assert s.phase == "Running" and s.status["restarts"]["counted"] == 5
    assert sorted(p.name for p in running(s)) == [f"job-{index}-1" for index in range(5)]


async def test_where_new_pods_lose_their_devices_too_the_budget_ends_the_job() -> None:
    s = Simulation({**FAST, "recovery": {"mode": "Fast", "maxRestarts": 10}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    await fails_wherever(s, {f"job-{i}-{a}" for i in range(2) for a in range(40)}, LOST_GPU, 1500)
    assert conditions(s)["Failed"]["reason"] == "RestartBudgetSpent"


@pytest.mark.parametrize(
    "message", ["NameError: name 'lunch' is not defined", "killed by the kernel: the container's memory limit"]
)
async def test_an_error_that_every_pod_would_have_moves_none(message: str) -> None:
    s = Simulation({**FAST, "nodes": 2, "recovery": {"mode": "Fast", "maxRestarts": 3}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for _ in range(3):
        await s.until(lambda: s.worker_fails("job-1-0", message, oom="memory" in message))
    await passes(s, 10)
    assert {reason for reason, _ in reasons(s)} <= {"WorkerFailed", "OOMKilled"} and "job-1-0" in s.pods
    assert s.status["restarts"]["counted"] == 3


async def test_an_error_that_another_pod_had_in_the_same_round_moves_none() -> None:
    s = Simulation({**FAST, "nodes": 2}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for number in (1, 2, 3):
        await s.until(lambda: s.worker_fails("job-1-0"))
        other = s.pods["job-0-0"].launcher
        assert other is not None and other.worker_ends("ValueError: lunch", 1)
        await s.until(lambda: len(reasons(s)) == number)  # noqa: B023
    await passes(s, 10)
    assert reasons(s) == [("WorkerFailed", True)] * 3


async def test_pods_that_fail_in_turn_stay() -> None:
    s = Simulation({**FAST, "nodes": 2}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for number in range(4):
        await s.until(lambda: s.worker_fails(f"job-{number % 2}-0"))  # noqa: B023
    await passes(s, 10)
    assert reasons(s) == [("WorkerFailed", True)] * 4


async def test_a_program_that_fails_for_one_rank_anywhere_moves_three_times_at_most() -> None:
    s = Simulation({**FAST, "nodes": 2, "recovery": {"mode": "Fast", "maxRestarts": 9}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    await fails_wherever(s, {f"job-1-{attempt}" for attempt in range(20)}, "ValueError: lunch", 900)
    assert s.phase == "Failed" and max(p.attempt for p in s.nodes() if p.index == 1) == 3


@pytest.mark.parametrize("spares", [0, 1])
async def test_a_failing_pod_stays_where_no_spare_is_and_its_node_could_not_take_it_back(spares: int) -> None:
    s = Simulation({**FAST, "nodes": 2, "spares": spares}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.training.made > 3)
    for host in s.machines.hosts.values():
        s.machines.cordon(host)
    assert s.worker_fails("job-1-0", LOST_GPU)
    await passes(s, 10)
    assert ("PodUnhealthy", False) in reasons(s) or not spares
    assert ("job-1-0" in s.pods) is not bool(spares)


async def loses_its_connection(s: Simulation, pod: str, times: int) -> None:
    """A place whose network breaks time and again, and heals before its node is lost."""
    for _ in range(times):
        await s.until(lambda: s.phase == "Running" and s.training.made > 3)
        node, known = s.pods[pod].node, len(reasons(s))
        s.cut(node, noticed_after=3)
        await passes(s, 8)
        s.heal(node)
        await s.until(lambda: len(reasons(s)) > known, limit=200)  # noqa: B023


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_pod_whose_connection_breaks_three_times_is_replaced_if_a_third_node_kept_its_own(mode: str) -> None:
    s = Simulation({"nodes": 3, "recovery": {"mode": mode}}, steps=10**6)
    await s.until_phase("Running")
    coordinator = next(p.node for p in s.pods.values() if not p.is_node)
    pod = next(p for p in s.nodes() if p.node != coordinator)
    await loses_its_connection(s, pod.name, 2)
    assert reasons(s) == [("PeerLost", False)] * 2 and pod.name in s.pods
    await loses_its_connection(s, pod.name, 1)
    await s.until_phase("Running")
    assert reasons(s) == [("PeerLost", False)] * 3 + [("PodUnhealthy", False)]
    assert "has lost its connection 3 times in a row" in s.status["restarts"]["recent"][-1]["message"]
    assert f"job-{pod.index}-1" in s.pods and [entry["node"] for entry in s.status["avoidedNodes"]] == [pod.node]


async def test_of_two_nodes_whose_connection_breaks_nobody_knows_which_one_is_cut_off() -> None:
    s = Simulation({"nodes": 2, "rendezvous": {"placement": "Master"}}, steps=10**6)
    await s.until_phase("Running")
    await loses_its_connection(s, "job-1-0", 4)
    assert reasons(s) == [("PeerLost", False)] * 4 and "job-1-0" in s.pods


# --- counting ---------------------------------------------------------------------------------------------------


async def test_two_pods_out_of_memory_count_once() -> None:
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    s.end("job-0-0", 137, "OOMKilled")
    await s.one_pass()
    s.advance(1)
    s.end("job-1-0", 137, "OOMKilled")
    await s.until_phase("Running")
    await passes(s, 5)
    assert reasons(s) == [("OOMKilled", True), ("OOMKilled", False)]
    last = s.status["restarts"]["recent"][-1]
    assert last["consequence"]
    assert "(a consequence of OOMKilled of pod job-0-0)" in last["message"]
    assert s.status["restarts"]["total"] == 2


async def test_a_budget_of_zero_fails_with_the_first_failure_and_its_traceback() -> None:
    s = Simulation({"recovery": {"maxRestarts": 0}}, steps=1000)
    await s.until_phase("Running")
    s.force_delete("job-1-0")
    await s.until(lambda: reasons(s) == [("Deleted", False)])
    await s.until_phase("Running")
    await passes(s, 10)
    s.worker_fails("job-0-0")
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "RestartBudgetSpent"
    said = "WorkerFailed: ValueError: lunch (rank 0 in pod job-0-0 ended with exit code 1; 1 failure, recovery.max"
    assert failed["message"].partition("\n")[0] == f"{said}Restarts is 0)", "the cause first, the budget last"
    assert "Traceback (most recent call last)" in failed["message"]
    assert "Traceback (most recent call last)" in next(
        e.message for e in s.cluster.events if e.reason == "RestartBudgetSpent"
    )


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_without_restarts_the_program_waits_for_the_verdict_and_continues_where_none_comes(
    mode: str,
) -> None:
    s = Simulation({"recovery": {"mode": mode, "maxRestarts": 0}}, steps=1000)
    await s.until_phase("Running")
    first = s.report()["round"]
    s.worker_fails("job-0-0")
    s.advance(4)
    assert s.report()["round"] == first
    s.advance(10)
    assert s.report()["round"] == first + 1
    s.worker_fails("job-1-0")
    s.advance(2)
    await s.until_phase("Failed")
    assert s.status["restarts"]["counted"] == 2
    assert "waits" not in conditions(s)["Failed"]["message"]


async def test_the_budget_is_whole_again_after_healthy_training() -> None:
    s = Simulation({"recovery": {"maxRestarts": 1, "resetAfterSeconds": 100}}, steps=10000)
    for number in range(3):
        await s.until_phase("Running")
        s.worker_fails("job-0-0")
        await s.until(lambda number=number: s.status["restarts"]["total"] == number + 1)
        await passes(s, 60, 5)
        assert s.status["restarts"]["counted"] == 1
        await passes(s, 60, 5)
        assert s.status["restarts"]["counted"] == 0
    assert s.status["restarts"]["total"] == 3
    assert [e.reason for e in s.cluster.events].count("BudgetRestored") == 3
    s.worker_fails("job-0-0")
    await passes(s, 10, 1)
    s.worker_fails("job-1-0")
    await s.until_phase("Failed")


async def test_a_rule_fails_the_job_with_the_cause() -> None:
    s = Simulation({"recovery": {"rules": [{"cause": "ExitCode", "exitCodes": [7], "action": "Fail"}]}}, steps=1000)
    await s.until_phase("Running")
    s.worker_fails("job-0-0", code=3)
    await s.until(lambda: reasons(s) == [("WorkerFailed", True)])
    await s.until_phase("Running")
    s.worker_fails("job-0-0", code=7)
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "RuleFailed"
    assert failed["message"].partition("\n")[0] == (
        "WorkerFailed: ValueError: lunch (rank 0 in pod job-0-0 ended with exit code 7; "
        "recovery.rules[0] (cause ExitCode) fails the job)"
    )
    assert "Traceback" in failed["message"]


async def test_incidents_have_their_causes() -> None:
    s = Simulation({"recovery": {"maxRestarts": 1000, "hangAfterSeconds": 10}}, steps=10000)
    await s.until_phase("Running")
    await passes(s, 3)
    s.worker_fails("job-1-0", "killed by the kernel", -9, oom=True)
    await s.until(lambda: reasons(s)[-1:] == [("OOMKilled", True)])
    await s.until_phase("Running")
    s.worker_fails("job-1-0", "ModuleNotFoundError: No module named 'lunch'", init=True)
    await s.until(lambda: reasons(s)[-1] == ("InitFailure", True))
    await s.until_phase("Running")
    current = s.pods["job-1-0"].launcher.round  # type: ignore[union-attr]
    assert current is not None
    current.hung = True
    await s.until(lambda: reasons(s)[-1] == ("Hang", True))
    assert "no step for 10 s: rank 0 in step (train.py:7)" in s.status["restarts"]["recent"][-1]["message"]
    await s.until_phase("Running")


async def paused(seconds: float) -> Simulation:
    """A job without a limit that has made 30 steps and then none for a while: an evaluation, or a hang."""
    s = Simulation({**FAST, "recovery": {"mode": "Fast", "maxRestarts": 0}}, steps=100)
    await s.until(lambda: s.training.made >= 30)
    current = s.pods["job-1-0"].launcher.round  # type: ignore[union-attr]
    assert current is not None
    current.hung = True
    await passes(s, round(seconds))
    return s


@pytest.mark.slow
async def test_without_a_limit_a_long_evaluation_is_shown_and_ends_nothing() -> None:
    s = await paused(700)
    running = conditions(s)["Running"]
    assert (running["status"], running["reason"]) == ("True", "StepOverdue")
    assert "has made no step since 20" in running["message"] and "set recovery.hangAfterSeconds" in running["message"]
    assert "rank 0 in step (train.py:7); rank 1 in step (train.py:7)" in running["message"]
    assert "rank 1:\nCurrent thread" in running["message"], "the stacks of all ranks"
    assert [e.warning for e in s.cluster.events if e.reason == "StepOverdue"] == [True], "once"
    s.pods["job-1-0"].launcher.round.hung = False  # type: ignore[union-attr]
    await s.until(lambda: conditions(s)["Running"]["reason"] == "GroupRuns")
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0


@pytest.mark.slow
async def test_a_limit_that_is_set_for_an_overdue_step_restarts_the_group() -> None:
    s = await paused(400)
    s.change_spec({"recovery": {"mode": "Fast", "hangAfterSeconds": 60}})
    await s.until(lambda: reasons(s) == [("Hang", True)], 10)
    await s.until(lambda: conditions(s)["Running"]["reason"] == "GroupRuns")


async def test_an_import_error_before_any_step_fails_the_job() -> None:
    s = Simulation({}, steps=10**9)
    s.training.progress = False
    await s.until_phase("Running")
    s.worker_fails("job-1-0", "ModuleNotFoundError: No module named 'lunch'", init=True)
    await s.until_phase("Failed", limit=3)
    assert conditions(s)["Failed"]["reason"] == "InitFailure"
    assert "No module named 'lunch'" in conditions(s)["Failed"]["message"]


NAME_ERROR = "NameError: name 'lunch' is not defined"
NO_GPU = "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_the_same_error_in_the_program_three_times_before_any_step_fails_the_job(mode: str) -> None:
    s = Simulation({"recovery": {"mode": mode}}, steps=10**9)
    s.training.progress = False
    for rank in (1, 0, 1):
        await s.until(lambda: s.phase == "Failed" or s.worker_fails(f"job-{rank}-0", NAME_ERROR))  # noqa: B023
    await s.until_phase("Failed", limit=5)
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "ProgramError" and s.status["restarts"]["counted"] == 3
    assert NAME_ERROR in failed["message"] and "waits" not in failed["message"]


async def test_a_program_that_wants_a_gpu_in_a_job_without_one_fails_the_job() -> None:
    s = Simulation({"gpusPerNode": 0}, steps=10**9)
    s.training.progress = False
    for rank in (1, 0, 1):
        await s.until(lambda: s.phase == "Failed" or s.worker_fails(f"job-{rank}-0", NO_GPU))  # noqa: B023
    await s.until_phase("Failed", limit=5)
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "ProgramError" and "spec.gpusPerNode is 0" in failed["message"]
    assert "no NVIDIA driver" in failed["message"]


@pytest.mark.parametrize(
    ("messages", "spec", "progress"),
    [
        ([NAME_ERROR, NAME_ERROR, NAME_ERROR.replace("lunch", "dinner")], {}, False),
        ([NO_GPU] * 3, {"gpusPerNode": 1}, False),  # A machine's driver may be at fault: the job has asked for GPUs.
        (["ValueError: lunch"] * 3, {}, False),  # What a disk or a network gave may be another value the next time.
        ([NAME_ERROR] * 3, {}, True),
        (
            [NAME_ERROR] * 3,
            {"recovery": {"rules": [{"cause": "ExitCode", "exitCodes": [1], "action": "Restart"}]}},
            False,
        ),
    ],
)
async def test_other_errors_before_the_first_step_are_tried_again(
    messages: list[str], spec: dict[str, Any], progress: bool
) -> None:
    s = Simulation(spec, steps=10**9)
    s.training.progress = progress
    for number, message in enumerate(messages, start=1):
        await s.until_phase("Running")
        if progress:
            await passes(s, 3)
        assert s.worker_fails(max(p.name for p in running(s) if p.index == 1), message)
        await s.until(lambda: [r for r, _ in reasons(s)].count("WorkerFailed") == number)  # noqa: B023
    await s.until_phase("Running")


async def test_a_pod_that_fails_at_its_start_again_and_again_waits() -> None:
    s = Simulation({"recovery": {"maxRestarts": 1000, "backoff": {"initialSeconds": 8, "maxSeconds": 20}}}, steps=1000)
    made = []
    for attempt in range(5):
        name = f"job-1-{attempt}"
        await s.until(lambda name=name: name in s.pods and s.pods[name].running)
        made.append(s.now)
        s.end(name, 1)
        await s.one_pass()
    waits = [round(after - before) for before, after in itertools.pairwise(made)]
    assert waits[0] <= 2
    assert 8 <= waits[1] <= 11
    assert 16 <= waits[2] <= 19
    assert 20 <= waits[3] <= 23
    assert "replaces it at" in [e for e in s.cluster.events if e.reason == "ExitCode"][-1].message
    assert s.status["restarts"]["counted"] == 5, "each of them is a failure of its own"


@pytest.mark.parametrize("spec", [{"script": None, "command": ["train"]}, {}], ids=["command", "script"])
async def test_a_program_that_fails_in_every_pod_waits_longer_each_time(spec: Json) -> None:
    """Whichever pod is the first to end: it is one failure of the group, and waiting must not begin with each pod."""
    recovery = {"maxRestarts": 1000, "backoff": {"initialSeconds": 8, "maxSeconds": 60}}
    s = Simulation({**spec, "nodes": 3, "recovery": recovery}, steps=10**6)
    made = []
    for attempt in range(5):
        await s.until(lambda: len(running(s)) == 3, limit=100)
        made.append(s.now)
        names = sorted(p.name for p in running(s))
        for name in names[attempt % 3 :] + names[: attempt % 3]:
            if name in s.pods and s.pods[name].running:
                s.end(name, 1)
            await s.one_pass()
    waits = [round(after - before) for before, after in itertools.pairwise(made)]
    assert waits[0] <= 3
    assert [8 <= waits[1] <= 12, 16 <= waits[2] <= 20, 32 <= waits[3] <= 36] == [True] * 3, waits
    assert s.status["restarts"]["counted"] == 5


async def test_pods_deleted_by_hand_never_wait() -> None:
    s = Simulation({**FAST, "nodes": 2}, steps=10000)
    await s.until_phase("Running")
    for attempt in range(10):
        began = s.now
        s.force_delete(f"job-1-{attempt}")
        await s.until(
            lambda attempt=attempt: f"job-1-{attempt + 1}" in s.pods and s.pods[f"job-1-{attempt + 1}"].running
        )
        assert s.now - began <= 2
    assert s.status["restarts"]["counted"] == 0


# --- found by seeds ---------------------------------------------------------------------------------------------


async def test_a_suspension_uses_up_the_names_of_pods_that_no_status_shows() -> None:
    s = Simulation({}, steps=1000)
    await s.one_pass()  # the pods are created, and no reconcile has seen them yet
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.until(lambda: s.phase == "Suspended" and not s.pods)
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.until_phase("Running")
    assert sorted(p.name for p in running(s)) == ["job-0-1", "job-1-1"]


async def test_a_suspension_in_the_middle_of_a_restart_is_no_part_of_its_duration() -> None:
    s = Simulation({}, steps=10**6)
    await s.until_phase("Running")
    s.force_delete("job-1-0")
    await s.until_phase("Restarting")
    s.change_spec({"runPolicy": {"suspend": True}})
    await passes(s, 600, 10)
    assert s.phase == "Suspended" and not s.pods
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.until_phase("Running")
    s.force_delete("job-0-1")
    await s.until_phase("Restarting")
    await s.until_phase("Running")
    first, second = s.status["restarts"]["recent"]
    assert "seconds" not in first and second["seconds"] < 60


async def test_a_pod_whose_containers_end_together_counts_once() -> None:
    s = Simulation({"nodes": 1, "rendezvous": {"placement": "Master"}}, steps=1000)
    await s.until_phase("Running")
    host = s.host_of("job-0-0")
    s.cut(host.name, noticed_after=None)
    s.machines.lose(host)
    for container in s.pods["job-0-0"].containers.values():
        container.exit_code, container.reason = 1, "Error"
    s.advance(2)
    s.heal(host.name)  # its kubelet finds both containers ended
    await s.until(lambda: s.status["restarts"]["total"] > 0)
    assert reasons(s) == [("ExitCode", True), ("CoordinatorLost", False)]
    await s.until_phase("Running")


async def test_a_host_that_is_started_again_costs_nothing() -> None:
    s = Simulation({"nodes": 2, "recovery": {"maxRestarts": 0}}, steps=100)
    await s.until_phase("Running")
    host = s.host_of("job-0-0")
    s.cut(host.name, noticed_after=None)
    s.machines.lose(host)
    s.advance(2)
    s.heal(host.name)  # the kubelet knows nothing of the containers it had
    await s.until(lambda: s.status["restarts"]["total"] > 0)
    assert reasons(s)[0] == ("NodeFault", False)
    assert [n["node"] for n in s.status["avoidedNodes"]] == [host.name]
    await s.until_phase("Complete")


@pytest.mark.parametrize(("placement", "state"), [("Dedicated", "Planned"), ("Master", "Running")])
async def test_a_status_that_is_ahead_of_its_pods_gets_others(placement: str, state: str) -> None:
    """Changed by hand: the coordinator that it names is not that of the pods, which the operator then never asks."""
    s = Simulation({"rendezvous": {"placement": placement}}, steps=100)
    await s.until_phase("Running")
    s.status["rendezvous"] |= {"generation": 5, "state": state}
    await s.until(lambda: s.status["rendezvous"]["generation"] == 6)
    assert set(reasons(s)) == {("RendezvousLost", False)}
    await s.until_phase("Complete")


async def test_a_token_that_is_deleted_before_the_pods_start_is_made_again() -> None:
    s = Simulation({}, steps=5)
    s.machines.capacity = 0
    await passes(s, 5)
    for body in s.store.all("Secret"):
        s.store.delete("Secret", body["metadata"]["name"])
    s.machines.capacity = 2
    await s.until_phase("Complete", limit=60)
    assert s.status["restarts"]["display"] == "0/10"


async def test_a_coordinator_beside_a_trainer_that_runs_out_of_memory_names_its_own_limit() -> None:
    s = Simulation({"rendezvous": {"placement": "Master"}}, steps=100)
    await s.until_phase("Running")
    pod = s.pods["job-0-0"]
    assert pod.coordinator is not None
    pod.coordinator.kill()
    s.machines._ended(pod, pod.containers["coordinator"], 137, "OOMKilled")
    await s.until_phase("Restarting")
    [restart] = s.status["restarts"]["recent"]
    assert "than spec.rendezvous.resources.limits.memory allows" in restart["message"]
