"""A job's lifecycle on the cluster: success, failure, suspend and resume, scaling, deadline,
clean-up, deletion.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest
from jobs import FAST, Jobs, job, sleeping, steps_job
from testcluster.settings import ClusterError


def patch(jobs: Jobs, name: str, **spec: object) -> None:
    jobs.kubectl("patch", "ddpjob", name, "--type=merge", "--patch", json.dumps({"spec": spec}))


def running_pods(jobs: Jobs) -> list[str]:
    return [
        n
        for role in ("node", "coordinator")
        for n, p in jobs.pods(role).items()
        if p["status"]["phase"] in ("Pending", "Running")
    ]


def test_a_job_is_suspended_and_resumed(jobs: Jobs) -> None:
    jobs.apply(steps_job("pause", 1000, nodes=1))
    jobs.wait_phase("pause", "Running")
    patch(jobs, "pause", runPolicy={"suspend": True})
    jobs.wait_phase("pause", "Suspended")
    jobs.wait("the end of all pods", lambda: not running_pods(jobs), timeout=40)
    assert jobs.condition("pause", "Running")["status"] == "False"
    patch(jobs, "pause", args=["--steps=5"])
    patch(jobs, "pause", runPolicy={"suspend": False})
    jobs.wait_phase("pause", "Complete")
    status = jobs.status("pause")
    assert status["progress"]["step"] == 5, "changes made while suspended are applied"
    assert (status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 0)


def test_an_autoscaler_and_kubectl_scale_change_an_elastic_job_in_place(jobs: Jobs) -> None:
    spread = {"scheduling": {"onePodPerNode": False}, "elastic": {"minNodes": 1, "maxNodes": 3}}
    jobs.apply(steps_job("scaled", 100000, nodes=1, recovery=FAST, **spread))
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "scaled"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "name": "scaled"},
            "minReplicas": 2,
            "maxReplicas": 4,
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
                }
            ],
        },
    }
    jobs.apply(scaler)
    # Without metrics, the autoscaler still enforces its minimum. It checks every 15 s.
    jobs.wait("two nodes by the autoscaler", lambda: world(jobs, "scaled") == "2/2", timeout=90)
    conditions = {
        c["type"]: c
        for c in jobs.cluster.kubectl_json("get", "hpa", "scaled", "-n", jobs.namespace)["status"]["conditions"]
    }
    assert conditions["AbleToScale"]["status"] == "True", conditions
    jobs.kubectl("delete", "hpa", "scaled")
    jobs.kubectl("scale", "ddpjob", "scaled", "--replicas=3")
    jobs.wait("three nodes", lambda: world(jobs, "scaled") == "3/3")
    jobs.kubectl("scale", "ddpjob", "scaled", "--replicas=1")
    jobs.wait("one node", lambda: world(jobs, "scaled") == "1/1")
    status = jobs.status("scaled")
    assert [slot["attempt"] for slot in status["slots"]] == [0], "the first pod has survived all changes"
    assert status["rendezvous"]["generation"] == 0
    assert status["restarts"]["counted"] == 0
    log = jobs.kubectl("logs", "scaled-0-0")
    assert all(f"rank 0 of {nodes} begins" in log for nodes in (1, 2, 3))
    with pytest.raises(ClusterError, match="maxNodes"):
        jobs.kubectl("scale", "ddpjob", "scaled", "--replicas=4")


def world(jobs: Jobs, name: str) -> str:
    """Return the value that `kubectl get` shows under Nodes, once the group runs."""
    status = jobs.status(name)
    return str(status["nodes"]["display"]) if status.get("phase") == "Running" else ""


def test_a_job_is_ended_by_its_deadline_and_removed_after_its_time_to_live(jobs: Jobs) -> None:
    policy = {"activeDeadlineSeconds": 8, "ttlSecondsAfterFinished": 6}
    jobs.apply(steps_job("late", 1000, nodes=1, recovery=FAST, runPolicy=policy))
    jobs.wait_phase("late", "Failed", timeout=40)
    started, ended = (datetime.fromisoformat(jobs.status("late")[key]) for key in ("startTime", "completionTime"))
    assert ended - started >= timedelta(seconds=8)
    assert jobs.condition("late", "Failed")["reason"] == "DeadlineExceeded"
    jobs.wait("the job's end", lambda: "late" not in jobs.kubectl("get", "ddpjobs", "--output=name"), timeout=40)
    jobs.wait(
        "the end of its objects",
        lambda: not jobs.pods() and "late" not in jobs.kubectl("get", "services", "--output=name"),
        60,
    )


def test_the_clean_pod_policy_decides_which_pods_are_deleted(jobs: Jobs) -> None:
    sidecar = {
        "name": "shadow",
        "image": job("x")["spec"]["image"],
        "imagePullPolicy": "IfNotPresent",
        "command": sleeping(),
    }
    for policy in ("None", "All"):
        manifest = steps_job(f"clean-{policy.lower()}", 3, nodes=1, recovery=FAST, runPolicy={"cleanPodPolicy": policy})
        template = manifest["spec"]["podTemplate"]["spec"]
        mounts = template["containers"][0]["volumeMounts"]
        template["containers"] = [*template["containers"], sidecar | {"volumeMounts": mounts}]
        jobs.apply(manifest)
    jobs.wait_phase("clean-none", "Complete")
    jobs.wait_phase("clean-all", "Complete")
    jobs.wait("the end of the cleaned pods", lambda: sorted(jobs.pods()) == ["clean-none-0-0"], timeout=60)
    assert jobs.pods()["clean-none-0-0"]["status"]["phase"] == "Running", (
        "with None, the sidecar is left running, because only the trainer determines the end"
    )


def test_a_job_with_placement_master_survives_the_loss_of_its_master(jobs: Jobs) -> None:
    jobs.apply(steps_job("classic", 120, rendezvous={"placement": "Master"}))
    jobs.wait_phase("classic", "Running")
    assert not jobs.pods("coordinator")
    jobs.kill("classic-0-0")
    jobs.wait_phase("classic", "Complete", timeout=120)
    assert jobs.status("classic")["restarts"]["counted"] == 0
    jobs.wait("the end of all pods", lambda: not running_pods(jobs), timeout=40)
    assert "rank" in jobs.kubectl("logs", "classic-0-1", "--container=trainer")


def test_any_command_gets_the_variables_that_torchrun_sets(jobs: Jobs) -> None:
    script = steps_job("x")["spec"]["script"]
    command = ["/bin/sh", "-c", f"exec python3 -m torch.distributed.run {script} --steps=120"]
    jobs.apply(job("shell", command=command))
    jobs.wait_phase("shell", "Running")
    jobs.kill("shell-0-0")
    jobs.wait_phase("shell", "Complete", timeout=120)
    status = jobs.status("shell")
    assert (status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 1)


def test_a_deleted_job_leaves_nothing_behind_and_its_name_can_be_reused(jobs: Jobs) -> None:
    jobs.apply(steps_job("again", 1000, nodes=1, recovery=FAST))
    jobs.wait_phase("again", "Running")
    jobs.kubectl("delete", "ddpjob", "again", "--wait=true")
    jobs.apply(steps_job("again", 5, nodes=1, recovery=FAST))
    jobs.wait_phase("again", "Complete", timeout=120)
    jobs.kubectl("delete", "ddpjob", "again")
    jobs.wait(
        "the end of its objects",
        lambda: not jobs.pods() and "again" not in jobs.kubectl("get", "services,configmaps", "--output=name"),
    )
