"""The PodGroup of a gang, and the pods that refer to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from built import PLATFORM, job
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import GangStatus
from ddpjob.objects.pod_group import build_gang
from ddpjob.objects.pods import build_coordinator, build_node


def with_gang(*, placed: bool = False, **spec: Any) -> DDPJob:
    made = job(**spec)
    return replace(made, status=replace(made.status, gang=GangStatus(nodes=made.spec.min_nodes, placed=placed)))


def test_a_gang_includes_the_coordinators_own_pod() -> None:
    for placement, count in (("Dedicated", 5), ("Master", 4)):
        made = with_gang(nodes=4, spares=1, rendezvous={"placement": placement})
        group = build_gang(made, made.status)
        assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": count}}
        assert group["metadata"]["name"] == "job-gang-0"
        assert group["metadata"]["labels"]["ddpjob.io/job-uid"] == "uid"
        assert group["metadata"]["ownerReferences"][0]["controller"] is True


def test_an_elastic_jobs_pod_group_may_lose_single_pods() -> None:
    elastic, fixed = with_gang(nodes=4, elastic={"minNodes": 2}), with_gang(nodes=4)
    assert build_gang(elastic, elastic.status)["spec"]["schedulingPolicy"] == {"gang": {"minCount": 3}}
    assert build_gang(elastic, elastic.status)["spec"]["disruptionMode"] == "Pod"
    assert build_gang(fixed, fixed.status)["spec"]["disruptionMode"] == "PodGroup"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({}, None),
        ({"scheduling": {"priorityClassName": "high"}}, "high"),
        ({"scheduling": {"priorityClassName": "high"}, "podTemplate": {"spec": {"priorityClassName": "own"}}}, "own"),
    ],
)
def test_the_pod_group_has_the_priority_class_of_its_pods(spec: dict[str, Any], name: str | None) -> None:
    made = with_gang(**spec)
    assert build_gang(made, made.status)["spec"].get("priorityClassName") == name


def test_only_pods_created_before_the_gang_is_placed_name_it() -> None:
    for placed in (False, True):
        made = with_gang(placed=placed)
        pods = (build_node(made, made.status, PLATFORM, 0, 0), build_coordinator(made, made.status, PLATFORM))
        wanted = None if placed else {"podGroupName": "job-gang-0"}
        assert [pod["spec"].get("schedulingGroup") for pod in pods] == [wanted, wanted]


def test_the_pods_of_a_gang_have_one_scheduler() -> None:
    """kube-scheduler does not schedule a group whose pods have different schedulers."""
    made = with_gang(podTemplate={"spec": {"schedulerName": "other"}})
    pods = (build_node(made, made.status, PLATFORM, 0, 0), build_coordinator(made, made.status, PLATFORM))
    assert [pod["spec"]["schedulerName"] for pod in pods] == ["other", "other"]


def test_volcanos_pod_group_is_in_the_queue_of_its_pods() -> None:
    scheduling = {"schedulerName": "volcano", "priorityClassName": "high"}
    template = {"metadata": {"annotations": {"scheduling.volcano.sh/queue-name": "team"}}}
    for spec, queue in (({}, {}), ({"podTemplate": template}, {"queue": "team"})):
        made = with_gang(nodes=4, scheduling=scheduling, **spec)
        group = build_gang(made, made.status)
        assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
        assert group["spec"] == {"minMember": 5, "priorityClassName": "high", **queue}


def test_pods_for_volcano_name_their_group_until_the_gang_is_placed() -> None:
    for placed in (False, True):
        made = with_gang(placed=placed, scheduling={"schedulerName": "volcano"})
        for pod in (build_node(made, made.status, PLATFORM, 0, 0), build_coordinator(made, made.status, PLATFORM)):
            wanted = {} if placed else {"scheduling.k8s.io/group-name": "job-gang-0"}
            assert pod["metadata"].get("annotations", {}) == wanted
            assert "schedulingGroup" not in pod["spec"]


def test_without_a_gang_there_is_no_pod_group() -> None:
    made = job()
    with pytest.raises(ValueError, match="generation 0 of job has no gang"):
        build_gang(made, made.status)
