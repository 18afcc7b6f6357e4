"""storage.data.url in the built pods: the folder of the data, and keys by reference."""

from __future__ import annotations

from typing import Any

from built import PLATFORM, container, environment, job, node
from ddpjob.api.job_spec import Json
from ddpjob.objects.pods import build_coordinator

URL = "s3://sets/a"


def data(**more: Any) -> Json:
    return {"data": {"url": URL, **more}}


def mount(pod: Json) -> Json:
    found: Json = next(m for m in container(pod)["volumeMounts"] if m["name"] == "ddpjob-data")
    return found


def volume(pod: Json) -> Json:
    found: Json = next(v for v in pod["spec"]["volumes"] if v["name"] == "ddpjob-data")
    return found


def test_without_a_cache_each_pod_has_a_volume_that_restricted_namespaces_allow() -> None:
    pod = node(storage=data())
    assert volume(pod) == {"name": "ddpjob-data", "emptyDir": {}}
    assert mount(pod) == {"name": "ddpjob-data", "mountPath": "/data"}
    assert environment(pod)["DDPJOB_DATA_DIR"] == "/data" and environment(pod)["DDPJOB_DATA_URL"] == URL


def test_a_caches_folder_is_named_after_namespace_and_source() -> None:
    pod = node(storage=data(cache="/var/cache/ddpjob", mountPath="/mnt/d"))
    assert volume(pod)["hostPath"] == {"path": "/var/cache/ddpjob", "type": "DirectoryOrCreate"}
    assert mount(pod)["mountPath"] == "/mnt/d" and "readOnly" not in mount(pod)
    folders = [
        mount(node(storage=data(cache="/c", **more)))["subPath"]
        for more in ({}, {"url": f"{URL}/"}, {"url": "s3://sets/b"}, {"endpoint": "https://minio:9000"})
    ]
    assert folders[0] == folders[1] and len(set(folders)) == 3
    assert all(folder.startswith("space/") and ".." not in folder for folder in folders)


def test_keys_for_the_data_have_variable_names_that_other_tools_ignore() -> None:
    pod = node(storage=data(secretName="keys", region="eu-central-1", endpoint="https://minio:9000"))
    variables = {v["name"]: v for v in container(pod)["env"]}
    assert variables["DDPJOB_DATA_AWS_ACCESS_KEY_ID"]["valueFrom"] == {
        "secretKeyRef": {"name": "keys", "key": "AWS_ACCESS_KEY_ID"}
    }
    assert variables["DDPJOB_DATA_AWS_SESSION_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
    assert not [name for name in variables if name.startswith("AWS_")]
    assert variables["DDPJOB_DATA_REGION"]["value"] == "eu-central-1"
    assert variables["DDPJOB_DATA_ENDPOINT"]["value"] == "https://minio:9000"


def test_the_coordinator_gets_neither_data_nor_keys() -> None:
    made = job(storage=data(secretName="keys"))
    assert "DDPJOB_DATA" not in str(build_coordinator(made, made.status, PLATFORM))


def test_a_volume_with_data_is_mounted_unchanged() -> None:
    pod = node(storage={"data": {"hostPath": "/d", "subPath": "s"}})
    assert volume(pod)["hostPath"] == {"path": "/d"}
    assert mount(pod) == {"name": "ddpjob-data", "mountPath": "/data", "subPath": "s", "readOnly": True}
    assert "DDPJOB_DATA_URL" not in environment(pod)
