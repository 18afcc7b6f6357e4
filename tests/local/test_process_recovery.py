"""`ddpjob run` of elastic jobs, with real processes. tests/runtime and tests/cluster cover spares
and mode Fast.
"""

from __future__ import annotations

from process_harness import ENDLESS, Machine, Run, manifest


def display(run: Run) -> str:
    return str(run.status.get("nodes", {}).get("display", ""))


def reasons(run: Run) -> list[str]:
    return [entry["reason"] for entry in run.status["restarts"].get("recent", ())]


def further(run: Run, steps: int) -> None:
    """Wait until `steps` additional steps are saved."""
    begin = run.steps()
    run.until(lambda r: r.steps() >= begin + steps)


def test_scaling_up_and_down_keeps_the_pods(machine: Machine) -> None:
    """A round forms differently in mode Fast, which tests/runtime/test_runtime_fast.py tests."""
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
