"""Elastic jobs, spares, lost nodes, the Fast coordinator, budget and rules: what is done, and that the status tells the truth meanwhile."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from ddpjob.api.types import DDPJob, Json
from ddpjob.core.world import Note, Role
from simulated import Pod, Simulation, conditions

FAST: Json = {"recovery": {"mode": "Fast"}}


def running(s: Simulation) -> list[Pod]:
    return [p for p in s._nodes() if p.running]


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
    await s.until(lambda: s.status.get("nodes", {}).get("display") == "2/2 +1")
    assert {p.name: p.role for p in s._nodes()} == {"job-0-0": Role.NODE, "job-1-0": Role.NODE, "job-2-0": Role.SPARE}
    assert ("PodDisruptionBudget", "job") in s.others
    s.force_delete("job-0-0")
    await passes(s, 0.5)
    assert conditions(s)["Running"]["status"] == "True", "the spare has taken over before the replacement is there"
    assert s.status["nodes"]["display"] == "2/2"
    await passes(s, 3)
    assert {p.name: p.role for p in running(s)} == {"job-1-0": Role.NODE, "job-2-0": Role.NODE, "job-0-1": Role.SPARE}
    assert s.status["nodes"]["display"] == "2/2 +1"
    assert s.status["nodes"]["active"] == 2, "what a scale subresource tells has no spares in it"
    assert reasons(s) == [("Deleted", False)]
    assert conditions(s)["Restarting"]["status"] == "False"


async def test_a_report_from_before_a_loss_is_not_believed() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=1000)
    await s.until(lambda: s.status.get("nodes", {}).get("display") == "2/2 +1")
    s.cut(s.pods["job-0-0"].node)
    s.force_delete("job-0-0")
    await s.one_pass()
    assert conditions(s)["Running"]["status"] == "False", "two pods run, but the group that the report tells of is no more"
    assert conditions(s)["Restarting"]["status"] == "True"
    await passes(s, 2)
    assert s.phase == "Running", "the operator has told the coordinator, which did not wait for the silent pod"


async def test_a_job_does_not_wait_for_spares_that_find_no_node() -> None:
    s = Simulation({"spares": 2}, steps=20)
    s.capacity = 2
    await s.until_phase("Running")
    assert conditions(s)["Scheduled"]["reason"] == "Unschedulable"
    await s.until_phase("Complete")
    assert conditions(s)["Complete"]["message"] == "all 2 nodes have finished"
    await s.until(lambda: all(p.state != "Pending" for p in s._nodes()), limit=10)


async def test_a_lost_spare_is_no_restart_of_training() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=1000)
    await s.until(lambda: s.status.get("nodes", {}).get("display") == "2/2 +1")
    rounds = s.groups[0].rounds
    s.force_delete("job-2-0")
    phases = set()
    for _ in range(10):
        await passes(s, 0.5)
        phases.add(s.phase)
    assert phases == {"Running"}
    assert s.groups[0].rounds == rounds
    assert s.status["nodes"]["display"] == "2/2 +1"


# --- elastic ----------------------------------------------------------------------------------------------------


async def test_fewer_nodes_train_while_others_are_pending_and_they_join_later() -> None:
    s = Simulation({"nodes": 4, "elastic": {"minNodes": 2}}, steps=1000)
    s.capacity = 3
    await passes(s, 20, 1)
    running_condition = conditions(s)["Running"]
    assert (running_condition["status"], s.phase) == ("False", "Starting"), "it waits for the others for a while"
    await s.until_phase("Running")
    message = conditions(s)["Running"]["message"]
    assert message == "3 of 4 nodes train as one group; pod job-3-0 waits for a node: 0/8 nodes are available"
    assert s.status["nodes"]["display"] == "3/4"
    assert conditions(s)["Scheduled"]["status"] == "False"
    s.capacity = 4
    await s.until(lambda: conditions(s)["Running"]["message"] == "4 nodes train as one group")
    assert reasons(s) == [("Joined", False)]
    assert s.groups[0].worlds == [3, 4]
    assert conditions(s)["Scheduled"]["status"] == "True"


async def test_with_fewer_than_min_nodes_it_waits() -> None:
    s = Simulation({"nodes": 4, "elastic": {"minNodes": 2}}, steps=1000)
    s.capacity = 1
    await passes(s, 60, 1)
    assert conditions(s)["Running"]["message"] == "1 of 4 nodes run, 2 are needed"
    assert s.groups[0].rounds == 0


# --- scaling in place -------------------------------------------------------------------------------------------


async def test_scaling_keeps_the_pods_and_the_generation() -> None:
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    s.change_spec({"nodes": 3})
    await s.until(lambda: conditions(s)["Running"]["message"] == "3 nodes train as one group")
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0", "job-2-1"], "an attempt that was never used"
    assert reasons(s) == [("Joined", False)]
    s.change_spec({"nodes": 1})
    await s.until(lambda: conditions(s)["Running"]["message"] == "1 nodes train as one group")
    await s.until(lambda: [p.name for p in s._nodes() if p.state != "Ended"] == ["job-0-0"])
    assert reasons(s) == [("Joined", False), ("Scaled", False)]
    s.change_spec({"nodes": 2})
    await s.until(lambda: conditions(s)["Running"]["message"] == "2 nodes train as one group")
    assert "job-1-2" in s.pods, "not the name of a pod that was dropped"
    assert s.status["rendezvous"]["generation"] == 0
    assert s.status["restarts"]["counted"] == 0


class Deaf(Simulation):
    """The coordinator does not get the first messages."""

    deaf = 3

    async def tell(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        if verb == "size" and self.deaf > 0:
            self.deaf -= 1
            return
        await super().tell(job, endpoint, verb, body)


async def test_the_size_is_told_until_the_report_shows_it() -> None:
    s = Deaf({"nodes": 2, "elastic": {"minNodes": 1}}, steps=1000)
    await s.until_phase("Running")
    s.change_spec({"nodes": 3, "elastic": {"minNodes": 2}})
    await s.until(lambda: s.groups[0].wanted == 3)
    assert s.groups[0].minimum == 2
    assert s.deaf == 0


async def test_patience_changes_in_place() -> None:
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    rounds = s.groups[0].rounds
    s.change_spec({"recovery": {"hangAfterSeconds": 90, "backoff": {"initialSeconds": 2, "maxSeconds": 8}}})
    await s.until(lambda: (s.groups[0].hang_after, s.groups[0].backoff) == (90, (2.0, 8.0)))
    assert s.groups[0].rounds == rounds


async def test_more_spares_disturb_nobody() -> None:
    s = Simulation({"nodes": 2}, steps=1000)
    await s.until_phase("Running")
    rounds = s.groups[0].rounds
    s.change_spec({"spares": 2})
    await s.until(lambda: s.status["nodes"]["display"] == "2/2 +2")
    assert s.groups[0].rounds == rounds
    assert reasons(s) == []
    s.change_spec({"spares": 0})
    await s.until(lambda: s.status["nodes"]["display"] == "2/2" and len([p for p in s._nodes() if p.state != "Ended"]) == 2)
    assert s.groups[0].rounds == rounds


# --- the coordinator in mode Fast -------------------------------------------------------------------------------


async def test_a_lost_coordinator_costs_no_step_in_mode_fast() -> None:
    s = Simulation(FAST, steps=1000)
    await s.until_phase("Running")
    await passes(s, 5)
    steps, pods = s.done_steps, {p.name for p in running(s)}
    s.force_delete("job-coordinator-0")
    for _ in range(20):
        await passes(s, 0.5)
        assert (s.phase, conditions(s)["Running"]["status"]) == ("Running", "True")
    assert s.done_steps - steps >= 10, "it trained all the while"
    assert {p.name for p in running(s)} == pods
    assert [p.name for p in s.pods.values() if p.role is Role.COORDINATOR] == ["job-coordinator-0-1"]
    assert s.pods["job-coordinator-0-1"].manifest["spec"]["hostname"] == "coordinator"
    assert s.pods["job-coordinator-0-1"].argument("attempt") == "1"
    assert (s.status["rendezvous"]["generation"], s.status["rendezvous"]["attempt"], s.status["round"]) == (0, 1, 0)
    assert reasons(s) == [("CoordinatorLost", False)]
    assert conditions(s).get("Restarting", {"status": "False"})["status"] == "False"
    s.worker_fails("job-0-0")
    await s.until(lambda: reasons(s)[-1] == ("WorkerFailed", True))


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


async def test_a_pod_without_warm_workers_is_told_by_a_condition() -> None:
    s = Simulation(FAST, steps=1000)
    await s.until_phase("Running")
    await s.one_pass()
    assert conditions(s)["FastRecovery"]["status"] == "True"
    s.groups[0].notes = (Note(pod="job-1-0", kind="ColdWorkers", why="torch 1.9 is not supported"),)
    await s.one_pass()
    told = conditions(s)["FastRecovery"]
    assert (told["status"], told["reason"], told["message"]) == ("False", "ColdWorkers", "pod job-1-0: torch 1.9 is not supported")
    standard = Simulation({}, steps=1000)
    await standard.until_phase("Running")
    assert "FastRecovery" not in conditions(standard)


# --- nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_hosts", [True, False])
@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_silent_node_is_left_and_its_pod_replaced_elsewhere(mode: str, knows_hosts: bool) -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": mode, "nodeLostAfterSeconds": 20}}, steps=1000)
    s.knows_hosts = knows_hosts
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


async def test_a_short_silence_is_no_loss() -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000)
    await s.until_phase("Running")
    s.cut(s.pods["job-1-0"].node, after=3)
    await passes(s, 15)
    assert "lostSince" in s.status["slots"][1]
    s.heal(s.pods["job-1-0"].node)
    await s.until_phase("Running")
    assert "job-1-0" in s.pods
    assert reasons(s) == []
    assert "lostSince" not in s.status["slots"][1]


async def test_a_deleted_node_object_is_a_loss_after_the_same_time() -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000)
    await s.until_phase("Running")
    node, began = s.pods["job-1-0"].node, s.now
    s.cut_nodes.add(node)
    del s.hosts[node]
    await s.until(lambda: "job-1-0" not in s.pods)
    assert 20 <= s.now - began <= 23
    assert reasons(s) == [("NodeLost", False)]
    assert s.status["restarts"]["recent"][0]["message"] == f"node {node} of pod job-1-0 is deleted"


async def test_out_of_service_is_believed_at_once() -> None:
    s = Simulation({"nodes": 2, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 600}}, steps=1000)
    await s.until_phase("Running")
    node = s.pods["job-1-0"].node
    s.cut(node, after=0)
    s.hosts[node] = replace(s.hosts[node], out_of_service=True)
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
        assert {reason for reason, _ in reasons(s)} == {"CoordinatorLost" if mode == "Fast" else "RendezvousLost"}
        assert s.status["restarts"]["counted"] == 0


async def test_a_node_that_fails_the_job_again_and_again_is_avoided() -> None:
    s = Simulation({"nodes": 2, "recovery": {"maxRestarts": 100}}, steps=10000)
    await s.until_phase("Running")
    bad = s.pods["job-1-0"].node
    for _ in range(3):
        pod = next(p for p in running(s) if p.label("ddpjob.io/index") == 1)
        pod.node = bad
        await s.one_pass()
        s.end(pod.name, 1)
        await s.until_phase("Restarting")
        await s.until_phase("Running")
        await passes(s, 65, 5)
    assert [n["node"] for n in s.status["avoidedNodes"]] == [bad]
    assert "NodeAvoided" in [e.reason for e in s.events]
    s.end(next(p for p in running(s) if p.label("ddpjob.io/index") == 1).name, 1)
    await s.until_phase("Restarting")
    await s.until_phase("Running")
    newest = max((p for p in running(s)), key=lambda p: p.born)
    assert newest.node != bad
    await passes(s, 3700, 50)
    assert "avoidedNodes" not in s.status


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
    assert failed["message"].startswith("1 failure, recovery.maxRestarts is 0; the last one: WorkerFailed: rank 0 in pod job-0-0")
    assert "Traceback (most recent call last)" in failed["message"]
    assert "Traceback (most recent call last)" in next(e.message for e in s.events if e.reason == "RestartBudgetSpent")


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
    assert [e.reason for e in s.events].count("BudgetRestored") == 3
    s.worker_fails("job-0-0")
    await passes(s, 10, 1)
    s.worker_fails("job-0-0")
    await s.until_phase("Failed")


async def test_a_rule_fails_the_job_with_the_cause() -> None:
    s = Simulation({"recovery": {"rules": [{"cause": "ExitCode", "exitCodes": [7], "action": "Fail"}]}}, steps=1000)
    await s.until_phase("Running")
    s.worker_fails("job-0-0", exit_code=3)
    await s.until(lambda: reasons(s) == [("WorkerFailed", True)])
    await s.until_phase("Running")
    s.worker_fails("job-0-0", exit_code=7)
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "RuleFailed"
    assert failed["message"].startswith(
        "recovery.rules[0] (cause ExitCode) fails the job: WorkerFailed: rank 0 in pod job-0-0 ended with exit"
    )
    assert "Traceback" in failed["message"]


async def test_incidents_have_their_causes() -> None:
    s = Simulation({"recovery": {"maxRestarts": 1000}}, steps=10000)
    await s.until_phase("Running")
    for kind in ("OOMKilled", "Hang", "InitFailure"):
        s.worker_fails("job-1-0", kind, message=f"told: {kind}", backoff_seconds=4.0)
        await s.until(lambda kind=kind: bool(reasons(s)) and reasons(s)[-1] == (kind, True))
        assert f"told: {kind}; waits 4 s" in s.status["restarts"]["recent"][-1]["message"]
        await s.until_phase("Running")


async def test_an_import_error_before_any_step_fails_the_job() -> None:
    s = Simulation({}, steps=10**9)
    await s.until(lambda: 0 in s.groups and s.groups[0].state == "Running")
    s.groups[0].step = 0
    s.job["status"].pop("progress", None)  # type: ignore[union-attr]
    s.worker_fails("job-1-0", "InitFailure", message="ModuleNotFoundError: No module named 'lunch'")
    for _ in range(3):
        s.groups[0].step = 0
        await s.one_pass()
        s.now += 1
    assert s.phase == "Failed"
    assert conditions(s)["Failed"]["reason"] == "InitFailure"
    assert "No module named 'lunch'" in conditions(s)["Failed"]["message"]


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
    assert "takes its place at" in [e for e in s.events if e.reason == "ExitCode"][-1].message
    assert s.status["restarts"]["counted"] == 5, "each of them is a failure of its own"


async def test_pods_deleted_by_hand_never_wait() -> None:
    s = Simulation({**FAST, "nodes": 2}, steps=10000)
    await s.until_phase("Running")
    for attempt in range(10):
        began = s.now
        s.force_delete(f"job-1-{attempt}")
        await s.until(lambda attempt=attempt: f"job-1-{attempt + 1}" in s.pods and s.pods[f"job-1-{attempt + 1}"].running)
        assert s.now - began <= 2
    assert s.status["restarts"]["counted"] == 0
