"""`ddpjob run` with recovery: mode Fast, spares, elastic sizes, rules, the coordinator's loss; real processes."""

from __future__ import annotations

import re

from process_harness import ENDLESS, FAST, Machine, Run, manifest


def display(run: Run) -> str:
    return str(run.status.get("nodes", {}).get("display", ""))


def reasons(run: Run) -> list[str]:
    return [entry["reason"] for entry in run.status["restarts"].get("recent", ())]


def further(run: Run, steps: int) -> None:
    """Waits until so many more steps are saved."""
    begin = run.steps()
    run.until(lambda r: r.steps() >= begin + steps)


def test_a_spare_takes_over_in_mode_fast(machine: Machine) -> None:
    run = machine.start(manifest(args=ENDLESS, recovery=FAST, spares=1))
    run.until(lambda r: display(r) == "2/2 +1" and r.steps() >= 3)
    run.until(lambda r: r.condition("FastRecovery").get("status") == "True")
    for index in range(2):
        pods = [p for p in run.pods() if "coordinator" not in p]
        assert machine.command("kill", next(p for p in pods if p.startswith(f"job-{index}-"))).returncode == 0
        further(run, 5)
        run.until(lambda r, kills=index + 1: reasons(r) == ["Deleted"] * kills and display(r) == "2/2 +1")
    assert run.status["rendezvous"]["generation"] == 0
    run.finish()
    run.assert_nothing_left()


def test_a_lost_coordinator_costs_no_step_in_mode_fast(machine: Machine) -> None:
    run = machine.start(manifest(args=ENDLESS, recovery=FAST))
    run.until(lambda r: r.steps() >= 3)
    for number in range(2):
        name = "job-coordinator-0" + (f"-{number}" if number else "")
        run.until(lambda r, name=name: name in r.pods())
        assert machine.command("kill", name).returncode == 0
        further(run, 10)
    run.finish()
    assert (run.status["rendezvous"]["generation"], run.status["rendezvous"]["attempt"]) == (0, 2)
    assert reasons(run) == ["CoordinatorLost", "CoordinatorLost"]
    assert run.status["round"] == 0
    begins = re.findall(r"rank 0 of 2 begins at step (\d+)", "".join(run.log(f"job-{i}-0") for i in range(2)))
    assert begins == ["0"], "the workers were never started again"


def test_scaling_up_and_down_keeps_the_pods(machine: Machine) -> None:
    """In mode Fast, which differs in how a round forms: tests/runtime/test_runtime_fast.py."""
    job = manifest(args=ENDLESS, elastic={"minNodes": 1, "maxNodes": 3})
    run = machine.start(job)
    run.until(lambda r: r.steps() >= 3)
    assert machine.command("scale", "job", "3").returncode == 0
    run.until(
        lambda r: display(r) == "3/3" and "3 nodes run together" in r.condition("Running")["message"], seconds=120
    )
    further(run, 5)
    assert machine.command("scale", "job", "1").returncode == 0
    run.until(lambda r: display(r) == "1/1" and "1 node trains" in r.condition("Running")["message"], seconds=120)
    further(run, 5)
    assert run.status["rendezvous"]["generation"] == 0
    assert [s["attempt"] for s in run.status["slots"]] == [0]
    assert reasons(run) == ["Joined", "Scaled"]
    assert run.status["restarts"]["counted"] == 0
    refused = machine.command("scale", "job", "4")
    assert refused.returncode == 2
    assert "nodes is more than elastic.maxNodes" in refused.stderr
    assert machine.command("stop", "job").returncode == 0
    run.wait()
    run.assert_nothing_left()
