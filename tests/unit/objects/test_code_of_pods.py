"""code.archive in the built pods: its folder, the launcher's variables, and keys by reference."""

from __future__ import annotations

from built import PLATFORM, container, environment, job, node
from ddpjob.objects.pods import build_coordinator

DIGEST = "sha256:" + "0a" * 32
CODE = {"archive": "s3://team/code/a.tar.gz", "digest": DIGEST}


def test_code_is_unpacked_to_the_pods_disk_and_the_script_starts_there() -> None:
    pod = node(code=CODE)
    assert {"name": "ddpjob-code", "emptyDir": {}} in pod["spec"]["volumes"]
    assert {"name": "ddpjob-code", "mountPath": "/ddpjob-code"} in container(pod)["volumeMounts"]
    assert container(pod)["workingDir"] == "/ddpjob-code"
    found = environment(pod)
    assert (found["DDPJOB_CODE_URL"], found["DDPJOB_CODE_DIGEST"]) == (CODE["archive"], DIGEST)
    assert found["DDPJOB_CODE_DIR"] == "/ddpjob-code"
    assert container(node(code=CODE, workingDir="/ddpjob-code/src"))["workingDir"] == "/ddpjob-code/src"


def test_keys_for_the_code_have_variable_names_that_no_tool_reads() -> None:
    pod = node(code={**CODE, "secretName": "keys", "region": "eu-1", "endpoint": "https://minio:9000"})
    variables = {variable["name"]: variable for variable in container(pod)["env"]}
    assert variables["DDPJOB_CODE_AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "keys"
    assert variables["DDPJOB_CODE_REGION"]["value"] == "eu-1"
    assert variables["DDPJOB_CODE_ENDPOINT"]["value"] == "https://minio:9000"
    assert not [name for name in variables if name.startswith("AWS_")]
    made = job(code={**CODE, "secretName": "keys"})
    assert "DDPJOB_CODE" not in str(build_coordinator(made, made.status, PLATFORM))


def test_a_job_without_code_has_unchanged_pods() -> None:
    assert (
        "ddpjob-code" not in str(node()) and "DDPJOB_CODE" not in str(node()) and "workingDir" not in container(node())
    )
