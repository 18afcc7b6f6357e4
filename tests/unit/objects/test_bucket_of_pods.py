"""storage.checkpoints.url in the built pods: a separate folder for each job, and credentials by
reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from built import PLATFORM, container, environment, job, node
from ddpjob.api.job_spec import Json
from ddpjob.objects.pods import build_coordinator

URL = "s3://models/runs"


def bucket(**more: Any) -> Json:
    return {"checkpoints": {"url": URL, **more}}


def variable(pod: Json, name: str) -> Json:
    return next((v for v in container(pod)["env"] if v["name"] == name), {})


def test_each_job_has_a_separate_folder_in_its_bucket() -> None:
    assert environment(node(storage=bucket()))["DDPJOB_CHECKPOINT_URL"] == f"{URL}/space/job"
    assert environment(node(storage=bucket(url=f"{URL}/")))["DDPJOB_CHECKPOINT_URL"] == f"{URL}/space/job"
    assert "DDPJOB_CHECKPOINT_URL" not in environment(node())
    mine = job(storage=bucket())
    others = [replace(mine, name="other"), replace(mine, namespace="space-job"), replace(mine, namespace="s")]
    folders = [PLATFORM.bucket_folder(one) for one in (mine, *others)]
    assert len(set(folders)) == 4 and PLATFORM.bucket_folder(replace(mine, uid="later")) == folders[0]


def test_each_pod_has_its_own_disk_and_needs_no_claim() -> None:
    pod = node(storage=bucket(mountPath="/mnt/here"))
    [volume] = [v for v in pod["spec"]["volumes"] if v["name"] == "ddpjob-checkpoints"]
    assert volume == {"name": "ddpjob-checkpoints", "emptyDir": {}}
    assert {"name": "ddpjob-checkpoints", "mountPath": "/mnt/here"} in container(pod)["volumeMounts"]
    variables = environment(pod)
    assert variables["DDPJOB_CHECKPOINT_SHARED"] == "0" and variables["DDPJOB_CHECKPOINT_DIR"] == "/mnt/here"
    assert job(storage=bucket()).claims == ()


def test_credentials_are_referenced_and_the_session_token_is_optional() -> None:
    pod = node(storage=bucket(secretName="keys", region="eu-central-1", endpoint="https://minio:9000"))
    assert variable(pod, "AWS_ACCESS_KEY_ID")["valueFrom"] == {
        "secretKeyRef": {"name": "keys", "key": "AWS_ACCESS_KEY_ID"}
    }
    assert "optional" not in variable(pod, "AWS_SECRET_ACCESS_KEY")["valueFrom"]["secretKeyRef"]
    assert variable(pod, "AWS_SESSION_TOKEN")["valueFrom"]["secretKeyRef"]["optional"] is True
    variables = environment(pod)
    assert variables["AWS_REGION"] == variables["AWS_DEFAULT_REGION"] == "eu-central-1"
    assert variables["AWS_ENDPOINT_URL"] == "https://minio:9000"


def test_without_a_secret_the_service_accounts_credentials_are_used() -> None:
    assert not [name for name in environment(node(storage=bucket())) if name.startswith("AWS_")]


def test_the_coordinator_gets_no_credentials() -> None:
    made = job(storage=bucket(secretName="keys"))
    assert "AWS_" not in str(build_coordinator(made, made.status, PLATFORM))
    master = node(storage=bucket(secretName="keys"), rendezvous={"placement": "Master"})
    assert "AWS_" not in str(container(master, "coordinator"))
