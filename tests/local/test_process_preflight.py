"""`ddpjob run` with spec.preflight: a pod whose node computes incorrectly is replaced, and the
links between nodes are checked for real.
"""

from __future__ import annotations

from pathlib import Path

from process_harness import Machine, manifest

FAULTS = str(Path(__file__).parents[1] / "runtime" / "scripts" / "faulty")


def test_a_pod_that_fails_the_preflight_is_replaced_and_the_groups_links_are_checked(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    env = {"PYTHONPATH": FAULTS, "FAULT": "product", "FAULTY": "job-1-0"}
    variables = [{"name": name, "value": value} for name, value in env.items()]
    preflight = {"timeoutSeconds": 1800}
    job = manifest(args=["--steps=5"], preflight=preflight, env=variables, recovery={"mode": "Fast", "maxRestarts": 0})
    try:
        run = machine.run(job, seconds=240)
        assert run.condition("Complete").get("status") == "True", run.everything()
        (failed,) = run.status["restarts"]["recent"]
        assert (failed["reason"], failed["counted"], failed["pod"]) == ("PreflightFailed", False, "job-1-0")
        assert "failed the preflight: cpu: " in failed["message"]
        assert failed["message"].endswith(" of 1024 rows of a matrix product are wrong")
        passed = run.condition("PreflightPassed")
        assert (passed["status"], passed["reason"]) == ("True", "LinksChecked"), run.everything()
        assert passed["message"].startswith("an all-reduce of 2 x 1 ranks is correct, ")
        run.assert_nothing_left()
    finally:
        machine.close()
