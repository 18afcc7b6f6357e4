"""Job classes on a real cluster: the values that a job gets, classes that appear late or change,
and refusals.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from jobs import Jobs, Json, job, sleeping
from operator_process import OperatorProcess

Sets = Callable[..., None]


@pytest.fixture
def platform_team_sets(operator: OperatorProcess) -> Sets:
    """Return a function that restarts the operator with these classes, as `helm upgrade` does."""

    def sets(**classes: Json) -> None:
        operator.kill()
        operator.start(DDPJOB_OPERATOR_CLASSES=json.dumps(classes))

    return sets


def classed(name: str, **spec: object) -> tuple[Json, Json]:
    """Return a job whose image and podTemplate come from class `team`, and that class."""
    made = job(name, className="team", command=sleeping(), nodes=2)
    given = {field: made["spec"].pop(field) for field in ("image", "imagePullPolicy", "podTemplate")}
    made["spec"] |= spec
    template = given["podTemplate"]["spec"]
    template["volumes"] = [*template.get("volumes", ()), {"name": "scratch", "emptyDir": {}}]
    return made, {"spec": {**given, "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]}, "limits": {"maxNodes": 2}}


def running(jobs: Jobs) -> dict[str, Json]:
    return {name: pod for name, pod in jobs.pods().items() if pod["status"].get("phase") == "Running"}


def variable(pod: Json, name: str) -> str:
    return next((e.get("value", "") for e in pod["spec"]["containers"][0]["env"] if e["name"] == name), "")


def test_a_job_waits_for_its_class_and_uses_the_changed_class_when_resumed(
    jobs: Jobs, platform_team_sets: Sets
) -> None:
    made, team = classed("job")
    platform_team_sets(other=team)
    jobs.apply(made)
    jobs.wait("it waits", lambda: jobs.condition("job", "ClassApplied").get("reason") == "ClassMissing")
    assert "may use (other)" in jobs.condition("job", "ClassApplied")["message"]
    assert not jobs.pods() and jobs.status("job")["phase"] == "Pending"
    platform_team_sets(team=team)
    jobs.wait_phase("job", "Running", timeout=120)
    first = jobs.pods()
    assert len(first) == 2 and {variable(pod, "NCCL_DEBUG") for pod in first.values()} == {"WARN"}
    assert all("scratch" in {v["name"] for v in pod["spec"]["volumes"]} for pod in first.values())
    assert jobs.status("job")["jobClass"]["spec"] == team["spec"], "the API server has stored the whole class"
    # A changed class does not affect running jobs or replacements for their pods.
    changed = {**team["spec"], "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
    platform_team_sets(team={**team, "spec": changed})
    jobs.kill(next(iter(first)))
    jobs.wait("it restarts", lambda: jobs.status("job")["restarts"]["total"] == 1, timeout=120)
    jobs.wait_phase("job", "Running", timeout=120)
    assert {variable(pod, "NCCL_DEBUG") for pod in running(jobs).values()} == {"WARN"}
    # The scale subresource does not check the class, but the operator does.
    jobs.kubectl("scale", "ddpjob", "job", "--replicas=5")
    jobs.wait("the condition says so", lambda: jobs.condition("job", "ClassApplied")["reason"] == "ClassExceeded")
    assert len(jobs.status("job")["slots"]) == 2 and jobs.status("job")["phase"] == "Running"
    jobs.kubectl("scale", "ddpjob", "job", "--replicas=2")
    patch = ("patch", "ddpjob", "job", "--type=merge", "--patch")
    jobs.kubectl(*patch, json.dumps({"spec": {"runPolicy": {"suspend": True}}}))
    jobs.wait("its pods have ended", lambda: not running(jobs), timeout=120)
    jobs.kubectl(*patch, json.dumps({"spec": {"runPolicy": {"suspend": False}}}))
    jobs.wait_phase("job", "Running", timeout=120)
    assert {variable(pod, "NCCL_DEBUG") for pod in running(jobs).values()} == {"INFO"}
    assert jobs.status("job")["restarts"]["counted"] <= 1


def test_jobs_that_break_a_rule_of_their_class_fail_before_any_pod_is_created(
    jobs: Jobs, platform_team_sets: Sets
) -> None:
    wide, team = classed("wide")
    wide["spec"]["nodes"] = 3
    own, _ = classed("own", podTemplate={"metadata": {"labels": {"a": "b"}}})
    platform_team_sets(team={**team, "fixed": ["podTemplate"]})
    for made, says in ((wide, "spec.nodes: 3"), (own, "spec.podTemplate: class team")):
        name = made["metadata"]["name"]
        jobs.apply(made)
        jobs.wait_phase(name, "Failed")
        failed = jobs.condition(name, "Failed")
        assert failed["reason"] == "ClassRefused" and failed["message"].startswith(says)
    assert not jobs.pods() and "ClassRefused" in jobs.kubectl("get", "events", "--output=yaml")
