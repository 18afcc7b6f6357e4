"""What a job asks Kueue for: all that its pods hold and that Kueue counts."""

from __future__ import annotations

from built import PLATFORM, container, job
from ddpjob.api.job_spec import Json
from ddpjob.objects.workload import COORDINATOR_SET, NODE_SET, build_workload


def test_what_podtemplate_requests_for_the_pod_as_a_whole_is_asked_for() -> None:
    """Kueue counts resources of the pod, and devices that containers take from its claims."""
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
    assert not {"resources", "resourceClaims"} & sets[COORDINATOR_SET]["spec"].keys(), "its pod has none"
