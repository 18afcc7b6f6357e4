"""Which failures count against the budget, and regressions found by seeds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ddpjob.api.job_spec import Json

from .simulated import Simulation, conditions
from .test_recovery_in_simulation import FAST, passes, reasons, running


async def test_two_pods_that_run_out_of_memory_together_count_as_one_failure() -> None:
    s = await Simulation({"nodes": 2}, steps=1000).begun()
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


async def test_with_a_budget_of_0_the_first_failure_ends_the_job_with_its_traceback() -> None:
    s = await Simulation({"recovery": {"maxRestarts": 0}}, steps=1000).begun()
    s.force_delete("job-1-0")
    await s.until(lambda: reasons(s) == [("Deleted", False)])
    await s.until_phase("Running")
    await passes(s, 10)
    s.worker_fails("job-0-0")
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "RestartBudgetSpent"
    said = "WorkerFailed: ValueError: lunch (rank 0 in pod job-0-0 ended with exit code 1; 1 failure, but "
    assert failed["message"].partition("\n")[0] == f"{said}recovery.maxRestarts is 0)", (
        "the message starts with the cause and ends with the budget"
    )
    assert "Traceback (most recent call last)" in failed["message"]
    assert "Traceback (most recent call last)" in next(
        e.message for e in s.cluster.events if e.reason == "RestartBudgetSpent"
    )
    assert s.status["round"] == s.status["restarts"]["total"] == 1, "no restart follows the last failure"


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_without_restarts_the_next_round_waits_for_the_operators_verdict(
    mode: str,
) -> None:
    s = await Simulation({"recovery": {"mode": mode, "maxRestarts": 0}}, steps=1000).begun()
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


async def test_healthy_training_restores_the_whole_budget() -> None:
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


async def test_a_rule_can_fail_the_job_and_the_message_has_the_cause() -> None:
    s = await Simulation(
        {"recovery": {"rules": [{"cause": "ExitCode", "exitCodes": [7], "action": "Fail"}]}}, steps=1000
    ).begun()
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


async def test_each_incident_is_reported_by_an_event_with_its_cause() -> None:
    s = await Simulation({"recovery": {"maxRestarts": 1000, "hangAfterSeconds": 10}}, steps=10000).begun()
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
    """Start a job without a step limit that takes 30 steps and then pauses, for an evaluation or
    because it hangs.
    """
    s = Simulation({**FAST, "recovery": {"mode": "Fast", "maxRestarts": 0}}, steps=100)
    await s.until(lambda: s.training.made >= 30)
    current = s.pods["job-1-0"].launcher.round  # type: ignore[union-attr]
    assert current is not None
    current.hung = True
    await passes(s, round(seconds))
    return s


@pytest.mark.slow
async def test_without_a_limit_a_long_evaluation_is_reported_but_not_ended() -> None:
    s = await paused(700)
    running = conditions(s)["Running"]
    assert (running["status"], running["reason"]) == ("True", "StepOverdue")
    assert "has completed no step since 20" in running["message"]
    assert "to restart it after a fixed time, set recovery.hangAfterSeconds" in running["message"]
    assert "rank 0 in step (train.py:7); rank 1 in step (train.py:7)" in running["message"]
    assert "rank 1:\nCurrent thread" in running["message"], "the stacks of all ranks"
    assert [e.warning for e in s.cluster.events if e.reason == "StepOverdue"] == [True], "once"
    s.pods["job-1-0"].launcher.round.hung = False  # type: ignore[union-attr]
    await s.until(lambda: conditions(s)["Running"]["reason"] == "GroupRuns")
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0


async def test_a_stalled_group_restarts_by_default() -> None:
    s = Simulation({**FAST, "recovery": {"mode": "Fast", "maxRestarts": 3}}, steps=10**6)
    await s.until(lambda: s.training.made >= 40)
    launchers = [s.pods[f"job-{index}-0"].launcher for index in (0, 1)]
    for launcher, place in zip(launchers, ("all_reduce", "read_sample"), strict=True):
        assert launcher is not None and launcher.round is not None
        launcher.stands_in, launcher.stands_still, launcher.round.hung = place, True, True
    await s.until(lambda: reasons(s) == [("Hang", True)], 100)
    message = s.status["restarts"]["recent"][-1]["message"]
    assert message.startswith("no step for ") and "rank 1 in read_sample (train.py:7)" in message
    await s.until_phase("Running")


async def test_a_hang_that_is_only_reported_does_not_end_the_group() -> None:
    s = Simulation({**FAST, "recovery": {"mode": "Fast", "hangs": "Report"}}, steps=10**6)
    await s.until(lambda: s.training.made >= 40)
    for launcher in (s.pods["job-0-0"].launcher, s.pods["job-1-0"].launcher):
        assert launcher is not None and launcher.round is not None
        launcher.stands_still = launcher.round.hung = True
    await s.until(lambda: conditions(s)["Running"]["reason"] == "StepOverdue", 100)
    assert "it is left running, because recovery.hangs is Report" in conditions(s)["Running"]["message"]
    await passes(s, 300)
    assert reasons(s) == []
    s.change_spec({"recovery": {"mode": "Fast", "hangs": "End"}})
    await s.until(lambda: reasons(s) == [("Hang", True)], 100)


@pytest.mark.slow
async def test_an_explicit_step_limit_restarts_the_group() -> None:
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


async def test_a_program_that_needs_a_gpu_in_a_job_without_one_fails_the_job() -> None:
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
        ([NO_GPU] * 3, {"gpusPerNode": 1}, False),  # The job has requested GPUs, so a machine's driver may be at fault.
        (["ValueError: lunch"] * 3, {}, False),  # A disk or a network may return a different value the next time.
        ([NAME_ERROR] * 3, {}, True),
        (
            [NAME_ERROR] * 3,
            {"recovery": {"rules": [{"cause": "ExitCode", "exitCodes": [1], "action": "Restart"}]}},
            False,
        ),
    ],
)
async def test_other_errors_before_the_first_step_are_retried(
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


async def test_a_pod_that_fails_repeatedly_at_its_start_backs_off() -> None:
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
    assert s.status["restarts"]["counted"] == 5, "each pod's exit is a separate failure"


@pytest.mark.parametrize("spec", [{"script": None, "command": ["train"]}, {}], ids=["command", "script"])
async def test_a_program_that_fails_in_every_pod_backs_off_longer_each_time(spec: Json) -> None:
    """Whichever pod ends first, it is one failure of the group, so the back-off must not start
    again for each pod.
    """
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


async def test_pods_that_a_user_deletes_are_replaced_without_back_off() -> None:
    s = await Simulation({**FAST, "nodes": 2}, steps=10000).begun()
    for attempt in range(10):
        began = s.now
        s.force_delete(f"job-1-{attempt}")
        await s.until(
            lambda attempt=attempt: f"job-1-{attempt + 1}" in s.pods and s.pods[f"job-1-{attempt + 1}"].running
        )
        assert s.now - began <= 2
    assert s.status["restarts"]["counted"] == 0


# --- found by seeds ---------------------------------------------------------------------------------------------


async def test_names_of_pods_created_just_before_a_suspension_are_not_reused() -> None:
    s = Simulation({}, steps=1000)
    await s.one_pass()  # the pods are created, but no reconcile has seen them yet
    await s.suspended()
    await s.resumed()
    assert sorted(p.name for p in running(s)) == ["job-0-1", "job-1-1"]


async def test_the_duration_of_a_restart_excludes_a_suspension() -> None:
    s = await Simulation({}, steps=10**6).begun()
    s.force_delete("job-1-0")
    await s.until_phase("Restarting")
    s.change_spec({"runPolicy": {"suspend": True}})
    await passes(s, 600, 10)
    assert s.phase == "Suspended" and not s.pods
    await s.resumed()
    s.force_delete("job-0-1")
    await s.until_phase("Restarting")
    await s.until_phase("Running")
    first, second = s.status["restarts"]["recent"]
    assert "seconds" not in first and second["seconds"] < 60


async def test_a_pod_whose_containers_end_together_counts_as_one_failure() -> None:
    s = await Simulation({"nodes": 1, "rendezvous": {"placement": "Master"}}, steps=1000).begun()
    host = s.host_of("job-0-0")
    s.cut(host.name, noticed_after=None)
    s.machines.lose(host)
    for container in s.pods["job-0-0"].containers.values():
        container.exit_code, container.reason = 1, "Error"
    s.advance(2)
    s.heal(host.name)  # its kubelet finds that both containers have ended
    await s.until(lambda: s.status["restarts"]["total"] > 0)
    assert reasons(s) == [("ExitCode", True), ("CoordinatorLost", False)]
    await s.until_phase("Running")


async def test_a_reboot_of_a_host_does_not_count_as_a_failure() -> None:
    s = await Simulation({"nodes": 2, "recovery": {"maxRestarts": 0}}, steps=100).begun()
    host = s.host_of("job-0-0")
    s.cut(host.name, noticed_after=None)
    s.machines.lose(host)
    s.advance(2)
    s.heal(host.name)  # the kubelet has forgotten its earlier containers
    await s.until(lambda: s.status["restarts"]["total"] > 0)
    assert reasons(s)[0] == ("NodeFault", False)
    assert [n["node"] for n in s.status["avoidedNodes"]] == [host.name]
    await s.until_phase("Complete")


@pytest.mark.parametrize(("placement", "state"), [("Dedicated", "Planned"), ("Master", "Running")])
async def test_pods_are_replaced_if_the_status_refers_to_a_later_generation(placement: str, state: str) -> None:
    """The status was changed by hand. It refers to a coordinator that the pods do not use, so the
    operator never asks the coordinator that they use.
    """
    s = await Simulation({"rendezvous": {"placement": placement}}, steps=100).begun()
    s.status["rendezvous"] |= {"generation": 5, "state": state}
    await s.until(lambda: s.status["rendezvous"]["generation"] == 6)
    assert set(reasons(s)) == {("RendezvousLost", False)}
    await s.until_phase("Complete")


async def test_a_token_deleted_before_the_pods_start_is_recreated() -> None:
    s = Simulation({}, steps=5)
    s.machines.capacity = 0
    await passes(s, 5)
    for body in s.store.all("Secret"):
        s.store.delete("Secret", body["metadata"]["name"])
    s.machines.capacity = 2
    await s.until_phase("Complete", limit=60)
    assert s.status["restarts"]["display"] == "0/10"


async def test_a_coordinator_in_a_trainers_pod_that_runs_out_of_memory_names_its_own_limit() -> None:
    s = await Simulation({"rendezvous": {"placement": "Master"}}, steps=100).begun()
    pod = s.pods["job-0-0"]
    assert pod.coordinator is not None
    pod.coordinator.kill()
    s.machines._ended(pod, pod.containers["coordinator"], 137, "OOMKilled")
    await s.until_phase("Restarting")
    [restart] = s.status["restarts"]["recent"]
    assert "than spec.rendezvous.resources.limits.memory allows" in restart["message"]
