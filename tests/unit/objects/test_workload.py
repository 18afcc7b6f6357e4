"""A job's request to Kueue: all resources of its pods that Kueue counts."""

from __future__ import annotations

from built import PLATFORM, container, job
from ddpjob.api.job_spec import Json
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
        s["name"]: s["template"] for s in build_workload(made, PLATFORM, "asks", "")["spec"]["podSets"]
    }
    asked = sets[NODE_SET]["spec"]
    assert asked["resources"] == whole and asked["resourceClaims"] == claims
    assert container(sets[NODE_SET])["resources"] == {"claims": [{"name": "gpu"}]}
    assert not {"resources", "resourceClaims"} & sets[COORDINATOR_SET]["spec"].keys(), "the pod requests none"
