"""Elastic jobs, spares, lost nodes, the coordinator in mode Fast, the budget and rules.

The tests check the actions, and that the status stays true throughout.
"""

from __future__ import annotations

from dataclasses import replace

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
    """Let the operator reconcile every `step` seconds."""
    end = s.now + seconds
    while s.now < end:
        await s.one_pass()
        s.advance(step)
    await s.one_pass()


# --- spares -----------------------------------------------------------------------------------------------------


async def test_after_a_spare_has_taken_over_the_replacement_is_the_new_spare() -> None:
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
    assert s.status["nodes"]["active"] == 2, "the scale subresource counts no spares"
    assert reasons(s) == [("Deleted", False)]
    assert conditions(s)["Restarting"]["status"] == "False"


async def test_a_spare_is_counted_once_it_can_take_over() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=10**6)
    await s.until(lambda: s.status.get("nodes", {}).get("display") == "2/2 +1")
    s.network.pace = replace(s.network.pace, boot=(20, 20))
    s.force_delete("job-0-0")
    await s.until(lambda: s.phase == "Running" and s.pods["job-0-1"].running)
    await passes(s, 15)
    assert s.status["nodes"]["display"] == "2/2", "its container runs, but its Python has not started yet"
    await s.until(lambda: s.status["nodes"]["display"] == "2/2 +1", limit=10)
    s.network.operator_cut = True
    await passes(s, 30)
    assert conditions(s)["Running"]["reason"] == "CoordinatorUnreachable"
    assert s.status["nodes"]["spare"] == 1, "the last known count is kept"


async def with_a_victim(nodes: int, spares: int, mode: str) -> tuple[Simulation, Pod]:
    """Return a training job, and one of its pods that does not share the coordinator's host."""
    s = Simulation({"nodes": nodes, "spares": spares, "recovery": {"mode": mode}}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"].get("spare", 0) == spares)
    await passes(s, 5)
    coordinator = s.network.coordinators[0].pod
    return s, next(p for p in s.nodes() if p.role is Role.NODE and p.host is not coordinator.host)


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_spare_takes_over_from_a_silent_host_whose_pod_becomes_the_spare(mode: str) -> None:
    s, victim = await with_a_victim(3, 1, mode)
    names, made = {p.name for p in s.nodes()}, s.training.made
    s.cut(victim.node, noticed_after=None)
    await passes(s, 4)
    assert s.phase == "Running" and s.status["nodes"]["display"] == "3/3"
    assert s.training.made > made, "the spare trains while the operator still waits for the silent pod"
    assert {p.name for p in s.nodes()} == names, "nothing was replaced"
    s.heal(victim.node)
    await passes(s, 10)
    assert s.status["nodes"]["display"] == "3/3 +1"
    assert {p.name: p.role for p in running(s)} == {
        name: Role.SPARE if name == victim.name else Role.NODE for name in names
    }
    assert reasons(s) == [("PeerLost", False)] and not s.status["restarts"].get("counted")
    assert not s.status.get("avoidedNodes"), "a network that came back says nothing about its Kubernetes node"


async def test_a_host_that_stays_silent_is_lost_once_and_does_not_count() -> None:
    s, victim = await with_a_victim(3, 1, "Fast")
    s.cut(victim.node, noticed_after=40)
    await passes(s, 60)
    assert s.status["nodes"]["display"] == "3/3 +1" and victim.name not in {p.name for p in running(s)}
    assert reasons(s) == [("NodeLost", False)] and not s.status.get("avoidedNodes")


@pytest.mark.parametrize(("spares", "seconds"), [(1, 0.4), (0, 5.0)])
async def test_a_short_outage_or_a_longer_one_without_a_spare_has_no_effect(spares: int, seconds: float) -> None:
    s, victim = await with_a_victim(3, spares, "Fast")
    s.machines.isolate(victim, seconds)
    await passes(s, 20)
    assert reasons(s) == [] and s.network.coordinators[0].real.rounds == 1


async def test_a_report_from_before_a_loss_is_not_trusted() -> None:
    s = Simulation({**FAST, "spares": 1}, steps=1000)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.cut(s.pods["job-0-0"].node)
    s.force_delete("job-0-0")
    await s.one_pass()
    assert conditions(s)["Running"]["status"] == "False", "two pods run, but the group in the report no longer exists"
    assert conditions(s)["Restarting"]["status"] == "True"
    await passes(s, 2)
    assert s.phase == "Running", "the operator has notified the coordinator, which did not wait for the silent pod"


async def test_a_job_does_not_wait_for_spares_that_cannot_be_scheduled() -> None:
    s = Simulation({"spares": 2}, steps=20)
    s.machines.capacity = 2
    await s.until_phase("Running")
    assert conditions(s)["Scheduled"]["reason"] == "Unschedulable"
    await s.until_phase("Complete")
    assert conditions(s)["Complete"]["message"] == "all 2 nodes have finished"
    await s.until(lambda: all(p.state != "Pending" for p in s.nodes()), limit=10)


async def test_the_loss_of_a_spare_does_not_restart_training() -> None:
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
        event
        == "pod job-2-0 was deleted, or its labels were removed (a spare, so nothing restarts; job-2-1 replaces it)"
    )


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_an_evicted_spare_does_not_excuse_a_workers_failure(mode: str) -> None:
    """The spare was not training, so its end explains nothing about the training."""
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
    assert "job-0-0" in conditions(s)["Restarting"]["message"], "not blamed on the spare's end"
    await s.until_phase("Running")


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
@pytest.mark.parametrize("distance", [0.0, 0.2])
async def test_a_spare_evicted_during_a_restart_does_not_excuse_the_failure(mode: str, distance: float) -> None:
    """The spare's end is seen when the group is already down, before the coordinator has reported
    the cause.
    """
    s = Simulation({"recovery": {"mode": mode}, "spares": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.advance(0.5)
    assert s.worker_fails("job-0-0")
    s.advance(distance)
    s.delete("job-2-0")
    await passes(s, 10, step=0.1)
    assert reasons(s) == [("WorkerFailed", True)]


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_the_end_of_a_spare_that_has_taken_over_breaks_the_group(mode: str) -> None:
    """This holds although the operator has not reconciled since the takeover, so that the pod still
    has a spare's label.
    """
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
    """Regression: the event named the spare, and the restart lasted until the reconcile instead of
    until the next step.
    """
    s = Simulation({"recovery": {"mode": mode}, "spares": 1}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    assert s.worker_fails("job-0-0")
    await passes(s, 0.1, step=0.05)
    assert s.phase == "Restarting"
    s.advance(5)
    s.delete("job-2-0")
    await s.one_pass()
    (failed,) = s.status["restarts"]["recent"]
    assert failed["pod"] == "job-0-0" and failed["seconds"] < 3, "the reconcile was five seconds later"
    assert s.cluster.events[-1].message.endswith(f"{failed['seconds']} s after job-0-0 broke the group")


# --- elastic ----------------------------------------------------------------------------------------------------


async def test_fewer_nodes_train_while_others_are_pending_and_join_later() -> None:
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


async def test_a_smaller_group_reports_the_state_of_its_missing_pod() -> None:
    s = await Simulation({**FAST, "nodes": 3, "elastic": {"minNodes": 1}}, steps=10**6).begun()
    s.network.pace = replace(s.network.pace, boot=(10, 10))
    s.force_delete("job-0-0")
    await s.until(lambda: "job-0-1" in s.pods and s.pods["job-0-1"].running)
    await passes(s, 3)
    assert conditions(s)["Running"]["message"] == "2 of 3 nodes run together; pod job-0-1 is starting"
    await s.until(lambda: s.status["nodes"]["display"] == "3/3")
    s.machines.isolate(s.pods["job-1-0"], 60)
    await s.until(lambda: s.status["nodes"]["display"] == "2/3")
    message = "2 of 3 nodes run together; pod job-1-0 is running but has lost its connection to the coordinator"
    await s.until(lambda: conditions(s)["Running"]["message"] == message)


async def test_a_group_smaller_than_min_nodes_waits() -> None:
    s = Simulation({"nodes": 4, "elastic": {"minNodes": 2}}, steps=1000)
    s.machines.capacity = 1
    await passes(s, 60, 1)
    assert conditions(s)["Running"]["message"] == "1 of 4 nodes runs, 2 are needed"
    assert s.coordinator().real.rounds == 0


# --- scaling in place -------------------------------------------------------------------------------------------


async def test_scaling_does_not_replace_pods_or_begin_a_generation() -> None:
    s = await Simulation({"nodes": 2}, steps=1000).begun()
    s.change_spec({"nodes": 3})
    await s.until(lambda: conditions(s)["Running"]["message"] == "3 nodes run together")
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-0", "job-2-1"], "a name that was never used"
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


async def test_a_node_that_is_about_to_become_a_spare_no_longer_counts_as_ready() -> None:
    s = await Simulation({"nodes": 2}, steps=1000).begun()
    s.change_spec({"nodes": 1, "spares": 1})
    await s.one_pass()
    assert conditions(s)["Running"]["reason"] == "GroupShrinking"
    assert s.status["nodes"]["ready"] == 1


@pytest.mark.parametrize("command", [False, True], ids=["script", "command"])
async def test_scaling_down_a_job_that_waits_for_room_restarts_no_pod(command: bool) -> None:
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
    """Drops the first messages on their way to the coordinator."""

    deaf = 3

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        if verb == "size" and self.deaf > 0:
            self.deaf -= 1
            return
        await super().notify(job, endpoint, verb, body)


class Deaf(Simulation):
    cluster_class = DeafCluster


async def test_the_size_is_sent_until_the_report_shows_it() -> None:
    s = await Deaf({"nodes": 2, "elastic": {"minNodes": 1}}, steps=1000).begun()
    s.change_spec({"nodes": 3, "elastic": {"minNodes": 2}})
    await s.until(lambda: s.report()["nodes"] == 3)
    assert s.report()["minNodes"] == 2
    assert s.cluster.deaf == 0  # type: ignore[attr-defined]


async def test_hang_and_back_off_limits_change_without_a_restart() -> None:
    s = await Simulation({"nodes": 2}, steps=1000).begun()
    rounds = s.coordinator().real.rounds
    s.change_spec({"recovery": {"hangAfterSeconds": 90, "backoff": {"initialSeconds": 2, "maxSeconds": 8}}})
    await s.until(lambda: (s.report()["hangAfter"], s.report()["backoff"]) == (90, [2, 8]))
    assert s.coordinator().real.rounds == rounds


async def test_a_group_that_is_about_to_grow_is_shown_as_restarting_and_not_as_starting() -> None:
    """The group's workers may save first. The operator sees that the coordinator has ended the
    round before it sees the reason.
    """
    s = await Simulation({"nodes": 2}, steps=1000).begun()
    s.change_spec({"nodes": 3})
    phases = [s.phase]
    for _ in range(100):
        await s.one_pass()
        phases += [s.phase] if s.phase != phases[-1] else []
        if phases[-1] == "Restarting":
            assert conditions(s)["Running"]["message"] == "3 of 3 nodes run, and the group is restarting"
        s.advance(0.25)
    assert phases == ["Running", "Restarting", "Running"]
    assert reasons(s) == [("Joined", False)]


async def test_adding_spares_does_not_interrupt_training() -> None:
    s = await Simulation({"nodes": 2}, steps=1000).begun()
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


@pytest.mark.parametrize("spares", [1, 2])
async def test_removing_spares_deletes_idle_pods_and_does_not_interrupt_training(spares: int) -> None:
    """Regression: the highest slots were removed although one of them trained, and an idle
    replacement was kept.
    """
    s = Simulation({"nodes": 2, "spares": spares}, steps=10**6)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == f"2/2 +{spares}")
    s.force_delete("job-0-0")
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == f"2/2 +{spares}")
    await s.passes(3)
    rounds, trains = s.coordinator().real.rounds, {p.name for p in s.nodes() if p.role is Role.NODE and p.running}
    assert len(trains) == 2 and "job-0-1" not in trains
    s.change_spec({"spares": 0})
    await s.until(lambda: s.status["nodes"]["display"] == "2/2" and len(running(s)) == 2)
    await s.passes(30)
    assert s.coordinator().real.rounds == rounds and {p.name for p in running(s)} == trains
    assert [e.reason for e in s.cluster.events].count("Scaled") == 1 and reasons(s) == [("Deleted", False)]
    s.force_delete(max(trains))
    await s.until(lambda: s.phase == "Running" and {p.name for p in running(s)} == {"job-0-2", "job-1-0"})
    assert len(s.status["slots"]) == 2, "the loss dropped the last slot"


async def test_removing_a_spare_that_has_taken_over_restarts_the_group() -> None:
    s = Simulation({"nodes": 2, "spares": 1, "rendezvous": {"placement": "Master"}}, steps=1000)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.force_delete("job-1-0")
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2 +1")
    s.change_spec({"spares": 0})
    await s.until(lambda: s.phase == "Restarting", limit=5)
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "2/2")
    assert sorted(p.name for p in running(s)) == ["job-0-0", "job-1-1"]
    assert reasons(s) == [("Deleted", False), ("Scaled", False)]


# --- the coordinator in mode Fast -------------------------------------------------------------------------------


async def test_in_mode_fast_no_step_is_lost_with_the_coordinator() -> None:
    s = await Simulation(FAST, steps=1000).begun()
    await passes(s, 5)
    steps, pods = s.training.made, {p.name for p in running(s)}
    s.force_delete("job-coordinator-0")
    for _ in range(20):
        await passes(s, 0.5)
        assert (s.phase, conditions(s)["Running"]["status"]) == ("Running", "True")
    assert s.training.made - steps >= 10, "the group kept training"
    assert {p.name for p in running(s)} == pods
    assert [p.name for p in s.pods.values() if p.role is Role.COORDINATOR] == ["job-coordinator-0-1"]
    assert s.pods["job-coordinator-0-1"].body["spec"]["hostname"] == "coordinator"
    assert s.pods["job-coordinator-0-1"].argument("attempt") == "1"
    assert (s.status["rendezvous"]["generation"], s.status["rendezvous"]["attempt"], s.status["round"]) == (0, 1, 0)
    assert reasons(s) == [("CoordinatorLost", False)]
    assert conditions(s).get("Restarting", {"status": "False"})["status"] == "False"
    s.worker_fails("job-0-0")
    await s.until(lambda: reasons(s)[-1] == ("WorkerFailed", True))


async def test_a_partitioned_coordinator_is_replaced_and_the_pods_are_left_alone() -> None:
    s = await Simulation({"nodes": 4, "recovery": {"mode": "Fast", "nodeLostAfterSeconds": 20}}, steps=1000).begun()
    pods, steps = {p.name for p in running(s)}, s.training.made
    s.pods["job-coordinator-0"].deaf = True
    s.network.changed()
    await s.until(lambda: "job-coordinator-0-1" in s.pods)
    await passes(s, 60, 1)
    assert {p.name for p in running(s)} == pods
    assert s.training.made - steps >= 60, "the group kept training"
    assert reasons(s) == [("CoordinatorLost", False)]
    assert "has not heard from most of the other pods" in s.status["restarts"]["recent"][0]["message"]
    assert s.phase == "Running"


async def test_a_coordinator_that_cannot_run_is_recreated_with_a_back_off() -> None:
    s = await Simulation(
        {"recovery": {"mode": "Fast", "backoff": {"initialSeconds": 4, "maxSeconds": 8}}}, steps=1000
    ).begun()
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
    assert conditions(s)["FastRecovery"] == reported, "the next coordinator learns it together with the pod"
    standard = Simulation({}, steps=1000)
    await standard.until_phase("Running")
    assert "FastRecovery" not in conditions(standard)
