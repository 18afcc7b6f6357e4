"""spec.preflight on a cluster: pods leave a Kubernetes node that computes incorrectly, and no
restart is counted.
"""

from __future__ import annotations

from jobs import Jobs, steps_job
from testcluster.settings import CHECKOUT
from watching import restarts

_N1 = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}]}
PREFERS_N1 = {
    "affinity": {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 50, "preference": _N1}]}
    }
}


def test_a_job_leaves_a_defective_node_and_its_links_are_checked(jobs: Jobs) -> None:
    env = {"PYTHONPATH": f"{CHECKOUT}/tests/runtime/scripts/faulty", "FAULT": "product", "FAULTY": "n1"}
    manifest = steps_job(
        "checked", 5,
        preflight={"timeoutSeconds": 1800},
        recovery={"mode": "Fast", "maxRestarts": 0},
        scheduling={"onePodPerNode": False},
        env=[{"name": name, "value": value} for name, value in env.items()],
    )  # fmt: skip
    manifest["spec"]["podTemplate"]["spec"] |= PREFERS_N1
    jobs.apply(manifest)
    jobs.wait_phase("checked", "Complete", timeout=240)
    status, pods = jobs.status("checked"), jobs.pods()
    failed = [restart for restart in restarts(status) if restart["reason"] == "PreflightFailed"]
    assert failed and {(restart["counted"], restart["node"]) for restart in failed} == {(False, "n1")}
    assert " on Kubernetes node n1 failed the preflight: cpu: " in failed[0]["message"]
    assert "n1" in [entry["node"] for entry in status["avoidedNodes"]]
    trained = [pod["spec"]["nodeName"] for pod in pods.values() if pod["status"]["phase"] != "Failed"]
    assert trained == ["n2", "n2"], "the pod left n1, although n1 is preferred"
    passed = jobs.condition("checked", "PreflightPassed")
    assert (passed["status"], passed["reason"]) == ("True", "LinksChecked")
    assert passed["message"].startswith("an all-reduce of 2 x 1 ranks is correct, ")
    assert passed["message"].endswith(" MB/s, via gloo over TCP on eth0")
