"""Job classes in simulated time: classes that are missing, appear later or change while a job runs,
refused jobs, and crashes of the operator.
"""

from __future__ import annotations

import pytest
from ddpjob.api.job_classes import JobClasses

from .simulated import Simulation, conditions
from .store import Json

H100: Json = {
    "spec": {"image": "team/train:1", "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}]},
    "limits": {"maxNodes": 3, "images": ["team/*"]},
}


def classed(spec: Json | None = None, steps: int = 20, **classes: Json) -> Simulation:
    """Create a job in class h100 without an image."""
    s = Simulation({"className": "h100", **(spec or {})}, steps=steps)
    if "image" not in (spec or {}):
        del s.spec["image"]
    s.cluster.classes = JobClasses.read(classes)
    return s


def platform_team_sets(s: Simulation, **classes: Json) -> None:
    """Restart the operator with different settings, as an upgrade of the chart does."""
    s.cluster.restart()
    s.cluster.classes = JobClasses.read(classes)


def images(s: Simulation) -> set[str]:
    return {c["image"] for body in s.store.all("Pod") for c in body["spec"]["containers"]}


def variables(s: Simulation) -> list[dict[str, str]]:
    pods = [body for body in s.store.all("Pod") if body["metadata"]["labels"]["ddpjob.io/role"] == "node"]
    return [{e["name"]: e.get("value", "") for e in body["spec"]["containers"][0]["env"]} for body in pods]


def events(s: Simulation) -> list[str]:
    return [event.reason for event in s.cluster.events]


# --- from start to end


async def test_a_job_uses_the_values_of_its_class() -> None:
    s = await classed({"env": [{"name": "MINE", "value": "1"}]}, h100=H100).begun()
    assert images(s) == {"team/train:1"}, "the coordinator's image too"
    assert all((v["NCCL_IB_HCA"], v["MINE"]) == ("mlx5", "1") for v in variables(s)) and len(variables(s)) == 2
    taken = s.status["jobClass"]
    assert (taken["name"], taken["spec"], taken["limits"]) == ("h100", H100["spec"], H100["limits"])
    assert conditions(s)["ClassApplied"]["status"] == "True"
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0 and s.status["rendezvous"]["generation"] == 0


async def test_the_class_is_recorded_before_any_object_is_created() -> None:
    s = classed(h100=H100)
    await s.one_pass()
    assert s.status["jobClass"]["name"] == "h100" and not list(s.store.all("Pod")) and s.wake == 0.0


async def test_a_job_waits_for_a_missing_class() -> None:
    s = classed(other={"namespaces": ["elsewhere"]}, a100=H100)
    await s.passes(30)
    assert s.phase == "Pending" and not s.pods and "startTime" not in s.status
    condition = conditions(s)["ClassApplied"]
    assert (condition["status"], condition["reason"]) == ("False", "ClassMissing")
    assert (
        'spec.className: "h100" is not one of the classes' in condition["message"] and "(a100)" in condition["message"]
    )
    assert events(s) == ["ClassMissing"], "once"
    writes = s.cluster.writes
    await s.passes(5)
    assert s.cluster.writes == writes
    platform_team_sets(s, h100=H100)
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0


async def test_a_class_that_excludes_the_jobs_namespace_counts_as_missing() -> None:
    s = classed(h100={**H100, "namespaces": ["elsewhere"]})
    await s.passes(3)
    assert conditions(s)["ClassApplied"]["reason"] == "ClassMissing" and not s.pods


@pytest.mark.parametrize("gone", [False, True], ids=["changed", "gone"])
async def test_a_running_job_keeps_its_copy_of_the_class(gone: bool) -> None:
    s = await classed(h100=H100, steps=200).begun()
    before = s.status["jobClass"]
    other = {**H100, "spec": {"image": "team/train:2"}, "limits": {"maxNodes": 1}}
    platform_team_sets(s, **({} if gone else {"h100": other}))
    await s.passes(5)
    assert s.phase == "Running" and s.status["restarts"]["total"] == 0
    s.delete(s.nodes()[0].name)
    await s.until(lambda: s.status["restarts"]["total"] == 1)
    await s.until_phase("Running")
    assert images(s) == {"team/train:1"}, "a replacement pod is like the others"
    assert s.status["jobClass"] == before and conditions(s)["ClassApplied"]["status"] == "True"


async def test_a_resumed_job_uses_the_current_version_of_its_class() -> None:
    s = await classed(h100=H100, steps=200).begun()
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.passes(60)
    assert not [p for p in s.pods.values() if not p.ended]
    platform_team_sets(s, h100={**H100, "spec": {"image": "team/train:2"}})
    await s.passes(5)
    assert s.status["jobClass"]["spec"]["image"] == "team/train:1", "the class is read when the job resumes"
    await s.resumed()
    now = str(s.status["rendezvous"]["generation"])
    pods = [body for body in s.store.all("Pod") if body["metadata"]["labels"]["ddpjob.io/generation"] == now]
    assert {c["image"] for body in pods for c in body["spec"]["containers"]} == {"team/train:2"}
    assert s.status["restarts"]["counted"] == 0
    await s.until_phase("Complete")


async def test_a_resumed_job_waits_if_its_class_is_missing_or_refuses_it() -> None:
    s = await classed(h100=H100, steps=200).begun()
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.passes(60)
    platform_team_sets(s)
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.passes(30)
    assert s.phase == "Suspended" and conditions(s)["Suspended"]["reason"] == "ClassMissing"
    platform_team_sets(s, h100={**H100, "limits": {"maxNodes": 1}})
    await s.passes(30)
    assert s.phase == "Suspended" and conditions(s)["ClassApplied"]["reason"] == "ClassRefused"
    assert not [p for p in s.pods.values() if not p.ended]
    platform_team_sets(s, h100=H100)
    await s.until_phase("Complete")


async def test_a_job_created_suspended_and_resumed_waits_for_its_missing_class() -> None:
    s = classed({"runPolicy": {"suspend": True}})
    await s.passes(3)
    assert s.phase == "Suspended" and conditions(s)["Suspended"]["reason"] == "Suspended"
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.passes(30)
    suspended = conditions(s)["Suspended"]
    assert suspended["reason"] == "ClassMissing" and "ask the platform team to add the class" in suspended["message"]
    assert not s.pods and events(s) == ["Suspended", "ClassMissing"]
    platform_team_sets(s, h100=H100)
    await s.until_phase("Complete")
    assert [event.message for event in s.cluster.events if event.reason == "Resumed"] == ["class h100 is applied"]
    assert conditions(s)["Suspended"]["message"] == "class h100 is applied"


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
async def test_a_job_uses_its_class_even_if_its_suspension_was_not_observed(gone: bool) -> None:
    """The job is suspended, changed and resumed while no operator runs."""
    other = {"a100": {**H100, "spec": {"image": "team/other:1"}}}
    s = await classed(h100=H100, steps=200, **({} if gone else other)).begun()
    s.change_spec({"className": "a100"})
    await s.passes(60)
    if gone:
        assert s.phase == "Suspended" and conditions(s)["Suspended"]["reason"] == "ClassMissing"
        assert not [p for p in s.pods.values() if not p.ended]
        platform_team_sets(s, h100=H100, **other)
    await s.until_phase("Complete")
    assert s.status["jobClass"]["name"] == "a100" and conditions(s)["ClassApplied"]["status"] == "True"
    now = str(s.status["rendezvous"]["generation"])
    pods = [body for body in s.store.all("Pod") if body["metadata"]["labels"]["ddpjob.io/generation"] == now]
    assert {c["image"] for body in pods for c in body["spec"]["containers"]} == {"team/other:1"}
    assert s.status["restarts"]["counted"] == 0


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_pod_template_is_validated_together_with_its_class(suspended: bool) -> None:
    """The job adds a variable to a container whose image comes from the class."""
    theirs = {"spec": {"initContainers": [{"name": "fetch", "image": "team/fetch:1"}]}}
    given = {**H100, "spec": {**H100["spec"], "podTemplate": theirs}}
    own = {"spec": {"initContainers": [{"name": "fetch", "env": [{"name": "FROM", "value": "b"}]}]}}
    s = classed({"podTemplate": own, "runPolicy": {"suspend": suspended}}, h100=given)
    await s.passes(3)
    assert s.phase == ("Suspended" if suspended else "Starting")
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.passes(3)
    made = [c for body in s.store.all("Pod") for c in body["spec"].get("initContainers", ())]
    assert len(made) == 2 and {c["image"] for c in made} == {"team/fetch:1"} and made[0]["env"][0]["name"] == "FROM"
    faulty = classed({"podTemplate": {"spec": {"hostname": "mine"}}}, h100=given)
    await faulty.passes(3)
    assert conditions(faulty)["Failed"]["reason"] == "InvalidPodTemplate"


# --- limits


@pytest.mark.parametrize(
    ("spec", "given", "says"),
    [
        ({"nodes": 3, "spares": 1}, H100, "spec.nodes: 4 including spares, but class h100 allows at most 3"),
        ({"image": "other/train:1"}, H100, "spec.image: other/train:1 is not one of the images"),
        ({"image": "team/other:1"}, {**H100, "fixed": ["image"]}, "spec.image: class h100 sets this field"),
        ({}, {}, "spec.image: required, but neither the job nor class h100 sets it"),
    ],
)
async def test_a_job_that_breaks_a_rule_of_its_class_fails_before_any_pod_is_created(
    spec: Json, given: Json, says: str
) -> None:
    s = classed(spec, h100=given)
    await s.passes(3)
    failed = conditions(s)["Failed"]
    assert s.phase == "Failed" and failed["reason"] == "ClassRefused" and failed["message"].startswith(says)
    assert not s.pods and not list(s.store.all("Service")) and "ClassRefused" in events(s)


async def test_a_job_may_override_fields_that_are_not_fixed() -> None:
    s = classed({"image": "team/mine:1"}, h100=H100)
    await s.until_phase("Complete")
    assert images(s) == {"team/mine:1"}


async def test_a_running_job_scaled_beyond_its_class_grows_up_to_the_limit() -> None:
    s = await classed(h100=H100, steps=400).begun()
    s.change_spec({"nodes": 8})
    await s.passes(30)
    assert s.phase == "Running" and len(s.status["slots"]) == 3 and s.status["restarts"]["counted"] == 0
    condition = conditions(s)["ClassApplied"]
    assert condition["reason"] == "ClassExceeded"
    assert "spec.nodes: 8, but class h100 allows at most 3; lower nodes" in condition["message"]
    [scaled] = [e.message for e in s.cluster.events if e.reason == "Scaled"]
    assert scaled == "spec.nodes changed from 2 to 8, but class h100 allows only 3"
    s.change_spec({"nodes": 2})
    await s.until(lambda: conditions(s)["ClassApplied"]["status"] == "True")
    await s.until_phase("Complete")


async def test_values_from_class_and_job_together_must_satisfy_the_crds_rules() -> None:
    s = classed({"script": None, "command": ["train"]}, h100={"spec": {"image": "team/train:1", "preflight": {}}})
    del s.spec["script"]
    await s.passes(2)
    assert "preflight cannot be used with command" in conditions(s)["Failed"]["message"]


async def test_a_job_whose_class_is_removed_from_its_spec_runs_without_it() -> None:
    s = await classed({"image": "team/mine:1"}, h100=H100, steps=200).begun()
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.passes(60)
    del s.spec["className"]
    await s.resumed()
    assert "jobClass" not in s.status and "ClassApplied" not in conditions(s)


# --- crashes


@pytest.mark.parametrize("point", range(12))
async def test_pods_are_consistent_wherever_the_operator_dies_during_the_start(point: int) -> None:
    s = classed(h100=H100)
    s.cluster.die_at = {point + 1}
    for _ in range(400):
        if s.phase == "Complete":
            break
        if not await s.one_pass():
            platform_team_sets(s, h100={**H100, "spec": {"image": "team/train:2"}})
        s.advance(1)
    assert s.phase == "Complete" and len(images(s)) == 1
