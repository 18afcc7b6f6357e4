"""Invalid input on a real cluster: each case has a clear message, and nothing is created or
lost.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import FAST, Jobs, job, steps_job
from testcluster.settings import ClusterError


def claim(name: str, mode: str) -> dict[str, object]:
    spec = {"accessModes": [mode], "storageClassName": "none", "resources": {"requests": {"storage": "1Mi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodez": 2}, 'unknown field "nodez"'),
        ({"nodes": 0}, "spec.nodes"),
        ({"command": ["bash"]}, "exactly one of"),
    ],
)
def test_kubectl_apply_refuses_invalid_manifests(jobs: Jobs, change: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        jobs.apply(steps_job("bad", **change))
    assert not jobs.kubectl("get", "ddpjobs", "--output=name").strip()


def test_an_image_that_cannot_be_pulled_is_reported_by_a_condition(jobs: Jobs) -> None:
    """The registry may recover, so the job waits and reports this. Only its own deadline ends the
    wait.
    """
    jobs.apply(
        job(
            "noimage",
            image="registry.invalid/no/such:1",
            imagePullPolicy="Always",
            script="train.py",
            podTemplate={},
            runPolicy={"activeDeadlineSeconds": 20},
        )
    )
    jobs.wait("the reason", lambda: "Pull" in jobs.condition("noimage", "Running").get("reason", ""), timeout=20)
    assert "registry.invalid/no/such:1" in jobs.condition("noimage", "Running")["message"]
    jobs.wait_phase("noimage", "Failed", timeout=60)
    failed = jobs.condition("noimage", "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert "ImagePull" in failed["message"] and "registry.invalid/no/such:1" in failed["message"]
    assert jobs.status("noimage")["restarts"]["counted"] == 0


def test_an_image_without_python_is_reported(jobs: Jobs) -> None:
    jobs.apply(job("nopython", script="train.py", podTemplate={}))
    jobs.wait_phase("nopython", "Failed", timeout=40)
    failed = jobs.condition("nopython", "Failed")
    assert failed["reason"] == "InitFailure"
    assert "python3" in failed["message"]


def test_a_script_that_does_not_exist_is_reported(jobs: Jobs) -> None:
    jobs.apply(job("noscript", script="/workspace/tarin.py"))
    jobs.wait_phase("noscript", "Failed", timeout=60)
    failed = jobs.condition("noscript", "Failed")
    assert failed["reason"] == "InitFailure"
    assert "/workspace/tarin.py" in failed["message"]
    assert jobs.status("noscript")["restarts"]["counted"] == 0, "the job is not retried"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            {"spec": {"nodeSelecter": {"a": "b"}}},
            "spec.podTemplate.spec.nodeSelecter: no such field; did you mean nodeSelector?",
        ),
        ({"spec": {"restartPolicy": "Always"}}, "spec.podTemplate.spec.restartPolicy: the operator sets this field"),
        (
            {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
            "containers[0].image: the operator sets this field; use",
        ),
    ],
)
def test_a_faulty_pod_template_is_reported(jobs: Jobs, template: dict[str, object], message: str) -> None:
    jobs.apply(steps_job("template", podTemplate=template))
    jobs.wait_phase("template", "Failed", timeout=15)
    failed = jobs.condition("template", "Failed")
    assert failed["reason"] == "InvalidPodTemplate"
    assert message in failed["message"]
    assert not jobs.pods() and not jobs.pods("coordinator"), "nothing is created"


def test_a_pod_that_the_api_server_refuses_is_reported(jobs: Jobs) -> None:
    jobs.apply(steps_job("refused", resources={"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}))
    jobs.wait_phase("refused", "Failed", timeout=15)
    assert "must be less than or equal to cpu limit" in jobs.condition("refused", "Failed")["message"]


def test_a_checkpoint_folder_that_is_not_writable_fails_the_job(jobs: Jobs, tmp_path: Path) -> None:
    checkpoints = {"hostPath": str(tmp_path), "shared": True, "readOnly": True}
    args = ["--config", "digits", "train.epochs=1"]
    jobs.apply(
        job(
            "readonly",
            module="ddpjob_trainer",
            args=args,
            storage={"checkpoints": checkpoints},
            recovery={"maxRestarts": 0},
        )
    )
    jobs.wait_phase("readonly", "Failed", timeout=90)
    message = jobs.condition("readonly", "Failed")["message"]
    assert "/checkpoints" in message and ("write" in message or "read-only" in message.lower())


def test_an_empty_data_folder_is_reported(jobs: Jobs, tmp_path: Path) -> None:
    args = ["data.name=cifar10", "train.epochs=1"]
    jobs.apply(
        job(
            "nodata",
            module="ddpjob_trainer",
            args=args,
            storage={"data": {"hostPath": str(tmp_path)}},
            recovery={"maxRestarts": 0},
        )
    )
    jobs.wait_phase("nodata", "Failed", timeout=90)
    assert "/data" in jobs.condition("nodata", "Failed")["message"]


def test_a_volume_attached_to_another_node_is_reported_until_it_is_released(jobs: Jobs) -> None:
    jobs.cluster.apply(claim("single", "ReadWriteOnce"), namespace=jobs.namespace)
    jobs.apply(steps_job("volume", 5, recovery=FAST, storage={"checkpoints": {"claimName": "single"}}))
    jobs.wait(
        "the condition", lambda: jobs.condition("volume", "Scheduled").get("reason") == "VolumeSingleNode", timeout=10
    )
    message = jobs.condition("volume", "Scheduled")["message"]
    assert "ReadWriteMany" in message and "spec.nodes is 2" in message
    assert not jobs.pods() and not jobs.pods("coordinator"), "nothing is created"
    jobs.kubectl("delete", "pvc", "single")
    jobs.wait("the next reason", lambda: jobs.condition("volume", "Scheduled")["reason"] == "ClaimNotFound", timeout=20)
    jobs.cluster.apply(claim("single", "ReadWriteMany"), namespace=jobs.namespace)
    jobs.wait("pods, once the claim is right", lambda: len(jobs.pods()) == 2, timeout=20)


def test_too_few_machines_for_one_pod_per_machine_are_reported_by_a_condition(jobs: Jobs) -> None:
    jobs.apply(steps_job("crowd", 5, nodes=5, recovery=FAST))
    jobs.wait_unschedulable("crowd", "set scheduling.onePodPerNode to false")
