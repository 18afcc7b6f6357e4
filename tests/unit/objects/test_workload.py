"""A job's request to Kueue: the resources of its pods that Kueue counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from built import PLATFORM, container, job
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import PodChanges, QueueStatus, QuotaShare, Slot
from ddpjob.controller.pod_views import read_workload
from ddpjob.core.decision import CreateWorkload
from ddpjob.core.plan.queue import find_request
from ddpjob.objects.pods import TOPOLOGY_GATE, build_coordinator, build_node
from ddpjob.objects.workload import COORDINATOR_SET, NODE_SET, build_workload


def test_resources_that_podtemplate_requests_for_the_whole_pod_are_included() -> None:
    """Kueue counts resources of the whole pod, and devices that containers get from the pod's
    claims.
    """
    whole = {"requests": {"cpu": "64"}, "limits": {"memory": "500Gi"}}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "h100"}]
    trainer = {"name": "trainer", "resources": {"claims": [{"name": "gpu"}]}}
    spec = {"resources": whole, "resourceClaims": claims, "containers": [trainer]}
    made = job(gpusPerNode=0, podTemplate={"spec": spec})
    sets: dict[str, Json] = {
        s["name"]: s["template"] for s in build_workload(made, PLATFORM, CreateWorkload("asks", 2))["spec"]["podSets"]
    }
    asked = sets[NODE_SET]["spec"]
    assert asked["resources"] == whole and asked["resourceClaims"] == claims
    assert container(sets[NODE_SET])["resources"] == {"claims": [{"name": "gpu"}]}
    assert not {"resources", "resourceClaims"} & sets[COORDINATOR_SET]["spec"].keys(), (
        "the pod itself requests no resources"
    )


def test_an_elastic_jobs_workload_allows_partial_admission_unless_it_is_a_slice() -> None:
    """Kueue's webhook rejects a Workload that asks for both."""
    fixed, elastic = job(nodes=4), job(nodes=4, elastic={"minNodes": 2})
    slices = "kueue.x-k8s.io/elastic-job"
    for made, least in ((fixed, None), (elastic, 2)):
        request = find_request(made, None)
        assert request is not None
        built = build_workload(made, PLATFORM, request)
        nodes, coordinator = built["spec"]["podSets"]
        assert (nodes["count"], nodes.get("minCount")) == (4, least) and "minCount" not in coordinator
        assert (slices in built["metadata"]["annotations"]) == (made is fixed)


def test_additional_quota_does_not_include_the_coordinator() -> None:
    elastic = job(nodes=4, elastic={"minNodes": 2})
    request = find_request(elastic, QueueStatus(workload="first", uid="u", pods=3))
    assert request == CreateWorkload(request.name if request else "", 1, least=1, after=3)
    built = build_workload(elastic, PLATFORM, request)
    assert [(s["name"], s["count"], s["minCount"]) for s in built["spec"]["podSets"]] == [(NODE_SET, 1, 1)]
    assert read_workload(admitted(built, 1)).additional


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, {}),
        ({"required": "rack"}, {"required": "rack"}),
        ({"preferred": "block"}, {"preferred": "block"}),
        ({"unconstrained": "true"}, {"unconstrained": True}),
        (
            {"preferred": "block", "slice-required": "rack", "slice-size": "2"},
            {"preferred": "block", "podSetSliceRequiredTopology": "rack", "podSetSliceSize": 2},
        ),
        ({"slice-required": "rack", "slice-size": "two"}, {}),
    ],
    ids=str,
)
def test_topology_annotations_are_passed_to_kueue(annotations: Json, expected: Json) -> None:
    given = {f"kueue.x-k8s.io/podset-{key if key == 'slice-size' else f'{key}-topology'}": value
             for key, value in annotations.items()}  # fmt: skip
    made = job(podTemplate={"metadata": {"annotations": given}})
    nodes, coordinator = build_workload(made, PLATFORM, CreateWorkload("asks", 2))["spec"]["podSets"]
    assert nodes["topologyRequest"] == {"podIndexLabel": "ddpjob.io/index", **expected}
    assert "topologyRequest" not in coordinator


def admitted(made: Json, count: object, **nodes: object) -> Json:
    sets = [{"name": NODE_SET, "count": count, **nodes}, {"name": COORDINATOR_SET, "count": 1}]
    now = {"status": "True", "reason": "Admitted", "message": ""}
    conditions = [{"type": kind, **now} for kind in ("QuotaReserved", "Admitted")]
    status = {"conditions": conditions, "admission": {"clusterQueue": "all", "podSetAssignments": sets}}
    return {**made, "metadata": {**made["metadata"], "uid": "u"}, "status": status}


@pytest.mark.parametrize("count", [0, 5, -1, "2", None])
def test_a_grant_of_an_impossible_size_is_reported_and_not_used(count: object) -> None:
    made = build_workload(job(nodes=4), PLATFORM, CreateWorkload("asks", 4))
    view = read_workload(admitted(made, count))
    assert view.grant is None and not view.admitted
    assert view.message == f"its Workload is admitted for count={count}: must be from 1 to 4"


def test_a_grant_without_a_count_covers_all_requested_pods() -> None:
    workload = admitted(build_workload(job(nodes=4), PLATFORM, CreateWorkload("asks", 4)), 4)
    del workload["status"]["admission"]["podSetAssignments"][0]["count"]
    view = read_workload(workload)
    assert view.grant is not None and view.grant.pods == 4


def test_pods_with_a_topology_wait_for_their_domain_and_name_their_workload() -> None:
    """Kueue's TopologyUngater finds pods by these labels and annotations."""
    made = job(nodes=2)
    built = build_workload(made, PLATFORM, CreateWorkload("asks", 2))
    topology = {"levels": ["rack"], "slices": [{"domainCount": 1}]}
    grant = read_workload(admitted(built, 2, topologyAssignment=topology)).grant
    status = replace(made.status, slots=(Slot(), Slot()), queue=grant)
    pod = build_node(made, status, PLATFORM, 1, 0)
    assert pod["spec"]["schedulingGates"] == [{"name": TOPOLOGY_GATE}]
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == NODE_SET
    assert pod["metadata"]["annotations"] == {
        "kueue.x-k8s.io/workload": "asks",
        "kueue.x-k8s.io/podset-unconstrained-topology": "true",
    }
    assert "schedulingGates" not in build_coordinator(made, status, PLATFORM)["spec"]


def test_the_coordinators_pod_has_only_its_own_topology_annotation() -> None:
    """Kueue's webhook refuses a pod with two topology annotations."""
    preferred = {"kueue.x-k8s.io/podset-preferred-topology": "rack"}
    made = job(nodes=2, podTemplate={"metadata": {"annotations": preferred}})
    workload = admitted(build_workload(made, PLATFORM, CreateWorkload("asks", 2)), 2)
    for assignment in workload["status"]["admission"]["podSetAssignments"]:
        assignment["topologyAssignment"] = {"levels": ["rack"], "slices": [{"domainCount": 1}]}
    status = replace(made.status, slots=(Slot(), Slot()), queue=read_workload(workload).grant)
    own = {"kueue.x-k8s.io/workload": "asks"}
    unconstrained = {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}
    assert build_coordinator(made, status, PLATFORM)["metadata"]["annotations"] == own | unconstrained
    assert build_node(made, status, PLATFORM, 1, 0)["metadata"]["annotations"] == own | preferred


def test_each_slot_gets_the_settings_of_the_quota_that_covers_it() -> None:
    first, second, third = (PodChanges(node_selector={"pool": pool}) for pool in ("a", "b", "c"))
    more = (
        QuotaShare(workload="2", uid="2", pods=1, node=second),
        QuotaShare(workload="3", uid="3", pods=2, node=third),
    )
    queue = QueueStatus(workload="1", uid="1", pods=5, node=first, more=more)
    assert [queue.changes_of(index).node_selector["pool"] for index in range(6)] == [*"aabccc"]
    assert queue.uids == {"1", "2", "3"}
