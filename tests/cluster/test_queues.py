"""Jobs in a Kueue queue with Kueue's own CRDs. The test acts as its controllers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import kueue_crds
import pytest
from jobs import FAST, Jobs, Json, steps_job
from testcluster.cluster import Cluster

WORKLOAD = "workloads.kueue.x-k8s.io"
CPU: Json = {"resources": {"requests": {"cpu": "100m"}}}


@pytest.fixture(scope="module", autouse=True)
def kueue(cluster: Cluster) -> Iterator[None]:
    """Install the CRDs before the operator, which checks for Workloads when it starts."""
    kueue_crds.install(cluster)
    yield
    kueue_crds.remove(cluster)


def queued(manifest: Json, queue: str = "team", **labels: str) -> Json:
    manifest["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue, **labels}
    return manifest


def workloads(jobs: Jobs) -> dict[str, Json]:
    found = jobs.cluster.kubectl_json("get", WORKLOAD, "--namespace", jobs.namespace)
    return {w["metadata"]["name"]: w for w in found["items"]}


def only(jobs: Jobs) -> Json:
    jobs.wait("one Workload", lambda: len(workloads(jobs)) == 1)
    [workload] = workloads(jobs).values()
    return workload


def conditions(workload: Json) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in workload.get("status", {}).get("conditions", ())}


def judge(jobs: Jobs, flavor: str = "", **states: tuple[str, str, str]) -> None:
    """Write conditions (status, reason, message) as Kueue does, and also an admission if a flavor
    is given.
    """
    workload = only(jobs)
    known = {c["type"]: c for c in workload.get("status", {}).get("conditions", ())}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for kind, (state, reason, message) in states.items():
        known[kind] = {"type": kind, "status": state, "reason": reason, "message": message, "lastTransitionTime": now}
    status: Json = {"conditions": list(known.values())}
    if flavor:
        sets = [
            {"name": one["name"], "count": one["count"], "flavors": {"cpu": flavor}, "resourceUsage": {"cpu": "1"}}
            for one in workload["spec"]["podSets"]
        ]
        status["admission"] = {"clusterQueue": "cluster-queue", "podSetAssignments": sets}
    name, patch = workload["metadata"]["name"], json.dumps({"status": status})
    jobs.kubectl("patch", WORKLOAD, name, "--subresource=status", "--type=merge", f"--patch={patch}")


def test_a_job_in_a_queue_waits_runs_is_evicted_and_continues(jobs: Jobs, cluster: Cluster) -> None:
    node = cluster.nodes[0]
    hostname = {"kubernetes.io/hostname": node}
    flavor = kueue_crds.flavor(jobs.namespace, hostname)
    cluster.apply(flavor)
    quick = {"scheduling": {"onePodPerNode": False}, **CPU}
    jobs.apply(queued(steps_job("quick", 100_000, recovery=FAST, **quick)))
    workload = only(jobs)
    assert workload["spec"]["queueName"] == "team"
    assert [(s["name"], s["count"]) for s in workload["spec"]["podSets"]] == [("node", 2), ("coordinator", 1)]
    requests = workload["spec"]["podSets"][0]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert requests["cpu"] == "100m"
    judge(jobs, QuotaReserved=("False", "Pending", "insufficient unused quota for cpu"))
    jobs.wait(
        "the reason is shown", lambda: "insufficient unused" in jobs.condition("quick", "Suspended").get("message", "")
    )
    assert jobs.status("quick")["phase"] == "Queued" and not jobs.pods() and not jobs.pods("coordinator")
    assert "Queued" in jobs.kubectl("get", "ddpjob", "quick")

    yes = ("True", "Admitted", "admitted")
    judge(jobs, flavor["metadata"]["name"], QuotaReserved=yes, Admitted=yes)
    jobs.wait_phase("quick", "Running")
    for pod in [*jobs.pods().values(), *jobs.pods("coordinator").values()]:
        assert pod["spec"]["nodeName"] == node and hostname.items() <= pod["spec"]["nodeSelector"].items()
    jobs.wait("Kueue is notified", lambda: conditions(only(jobs)).get("PodsReady") == ("True", "Started"))
    jobs.kill("quick-1-0")
    jobs.wait("a successor", lambda: "quick-1-1" in jobs.pods() and jobs.status("quick")["phase"] == "Running")
    assert jobs.pods()["quick-1-1"]["spec"]["nodeSelector"] == hostname

    judge(jobs, Evicted=("True", "Preempted", "preempted to accommodate a workload"))
    jobs.wait_phase("quick", "Queued")
    jobs.wait("the quota is released", lambda: conditions(only(jobs)).get("QuotaReserved") == ("False", "Pending"))
    given_back = only(jobs)
    assert "admission" not in given_back["status"] and given_back["metadata"]["uid"] == workload["metadata"]["uid"]
    assert conditions(given_back)["Admitted"] == ("False", "NoReservation")
    assert conditions(given_back)["Requeued"] == ("True", "Preempted")
    assert not any(pod["status"]["phase"] == "Running" for pod in jobs.pods().values())

    judge(jobs, flavor["metadata"]["name"], QuotaReserved=yes, Admitted=yes, Evicted=("False", "QuotaReserved", ""))
    jobs.wait_phase("quick", "Running")
    restarts = jobs.status("quick")["restarts"]
    assert restarts["counted"] <= 1 and {r["reason"] for r in restarts["recent"]} == {"Deleted"}
    jobs.kubectl("delete", "ddpjob", "quick")
    jobs.wait("nothing is left", lambda: not workloads(jobs) and not jobs.pods())


def test_a_job_deleted_while_it_waits_in_a_queue_leaves_nothing_behind(jobs: Jobs) -> None:
    jobs.apply(queued(steps_job("early", 5, **CPU)))
    only(jobs)
    jobs.kubectl("delete", "ddpjob", "early")
    jobs.wait("nothing is left", lambda: not workloads(jobs))


def test_a_job_managed_by_another_controller_is_left_alone_for_good(jobs: Jobs) -> None:
    theirs = "kueue.x-k8s.io/multikueue"
    jobs.apply(queued(steps_job("theirs", 5, managedBy=theirs)))
    jobs.apply(steps_job("ours", 5, nodes=1, recovery=FAST))
    jobs.wait_phase("ours", "Complete")
    assert not jobs.status("theirs") and not workloads(jobs)
    assert theirs in jobs.kubectl("get", "ddpjob", "theirs", "--output=wide")
    for patch in ({"managedBy": "ddpjob.io/operator"}, {"managedBy": None}):
        words = ("patch", "ddpjob", "theirs", "--namespace", jobs.namespace, "--type=merge")
        assert not jobs.cluster.succeeds(*words, f"--patch={json.dumps({'spec': patch})}")
