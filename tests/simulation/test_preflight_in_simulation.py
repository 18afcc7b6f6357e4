"""spec.preflight in simulated time: pods on defective hosts fail the preflight, and the status
reports them.
"""

from __future__ import annotations

import pytest

from .kubelet import Pod
from .simulated import Simulation, conditions


def defective(s: Simulation, *hosts: str) -> None:
    """Make pods fail the preflight on these hosts, or on all hosts if none are given."""

    def boot(pod: Pod) -> None:
        if pod.launcher is not None and (pod.node in hosts or not hosts):
            pod.launcher.unfit = "cuda:3: 12 of 1024 rows of a matrix product are wrong"

    s.machines.on_pod = boot


def reasons(s: Simulation) -> list[tuple[str, bool]]:
    return [(str(r["reason"]), r["counted"]) for r in s.status["restarts"].get("recent", ())]


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_pod_that_fails_the_preflight_moves_without_counting_as_a_failure(mode: str) -> None:
    s = Simulation({"preflight": {"scope": "Node"}, "recovery": {"mode": mode, "maxRestarts": 0}}, steps=10**6)
    s.machines.favourite = {1: "n5"}
    defective(s, "n5")
    await s.until(lambda: s.status.get("restarts", {}).get("total", 0) > 0)
    failed = conditions(s)["PreflightPassed"]
    assert (failed["status"], failed["reason"]) == ("False", "PreflightFailed")
    assert failed["message"] == (
        "pod job-1-0 on Kubernetes node n5 failed the preflight: cuda:3: 12 of 1024 rows of a matrix product are wrong"
    )
    await s.until_phase("Running")
    await s.one_pass()
    assert reasons(s) == [("PreflightFailed", False)]
    assert [(n["node"], n["reason"]) for n in s.status["avoidedNodes"]] == [
        ("n5", "PreflightFailed occurred there within an hour")
    ]
    assert s.pods["job-1-1"].node != "n5", "although the scheduler prefers that host"
    assert conditions(s)["PreflightPassed"]["reason"] == "NodesChecked"
    assert s.status["rendezvous"]["generation"] == 0, "the other pods stay"


async def test_a_run_too_short_to_be_observed_counts_as_a_passed_preflight() -> None:
    s = Simulation({"preflight": {"scope": "Node"}, "recovery": {"mode": "Fast"}}, steps=5)
    s.machines.favourite = {1: "n5"}
    defective(s, "n5")
    await s.until(lambda: "job-1-1" in s.pods)
    assert conditions(s)["PreflightPassed"]["reason"] == "PreflightFailed"
    s.advance(120)
    await s.one_pass()
    assert s.phase == "Complete"
    assert conditions(s)["PreflightPassed"]["reason"] == "NodesChecked"


async def test_a_replacement_that_fails_the_preflight_does_not_use_the_budget() -> None:
    s = Simulation({"preflight": {}, "recovery": {"mode": "Fast", "maxRestarts": 0}}, steps=10**6)
    s.machines.favourite = {1: "n5"}
    await s.until_phase("Running")
    defective(s, "n5")
    s.force_delete("job-1-0")
    await s.until(lambda: s.status["restarts"]["total"] >= 2)
    await s.until_phase("Running")
    assert reasons(s) == [("Deleted", False), ("PreflightFailed", False)]
    assert s.pods["job-1-2"].node != "n5"
    assert "PreflightPassed" in conditions(s)


async def test_a_preflight_that_every_pod_fails_fails_the_job() -> None:
    s = Simulation({"preflight": {}, "recovery": {"mode": "Fast"}}, steps=100)
    defective(s)
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "InitFailure"
    assert failed["message"].startswith("no pod has passed the preflight: pod job-")
    assert len([r for r in reasons(s) if r == ("PreflightFailed", False)]) >= 3


async def test_without_spec_preflight_there_is_no_preflight_condition() -> None:
    s = await Simulation({}, steps=100).begun()
    assert "PreflightPassed" not in conditions(s)
