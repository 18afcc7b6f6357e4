"""A job whose data is in a bucket, on an S3 server in the cluster. The pods of a node fetch the
data only once, even if the server fails.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from jobs import SCRIPTS, Jobs, Json, job
from s3_server import serving
from test_buckets import BUCKET, KEYS, PORT, server

obstore = pytest.importorskip("obstore", reason="pip install obstore")
SIZES = {"train/a.bin": 3_000_000, "train/b.bin": 70_000, "labels.txt": 100}


def start_server(jobs: Jobs, objects: Path) -> None:
    jobs.cluster.apply(server(objects), namespace=jobs.namespace)


def fill(place: Path, objects: Path) -> dict[str, bytes]:
    """Write the objects in the server's own format to its folder, as if they had been uploaded."""
    contents = {name: os.urandom(size) for name, size in SIZES.items()}
    with serving(place) as local:
        store = obstore.store.S3Store(
            local.folder.name, endpoint=f"http://127.0.0.1:{local.port}", region="us-east-1",
            client_options={"allow_http": True}, access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip
        for name, content in contents.items():
            obstore.put(store, f"sets/a/{name}", content, use_multipart=False)
        shutil.copytree(local.folder, objects / "buckets" / BUCKET)
        shutil.copytree(place / "sidecar" / local.folder.name, objects / "sidecar" / BUCKET)
    return contents


def data_job(name: str, **data: object) -> Json:
    place = {"url": f"s3://{BUCKET}/sets/a", "endpoint": f"http://s3:{PORT}", "secretName": "keys", **data}
    spread = {"onePodPerNode": False}
    return job(name, script=str(SCRIPTS / "data_names.py"), storage={"data": place}, scheduling=spread)


def test_the_pods_of_a_node_share_the_data_that_one_of_them_has_fetched(jobs: Jobs, tmp_path: Path) -> None:
    objects, cache = tmp_path / "s3", tmp_path / "cache"
    contents = fill(tmp_path / "local", objects)
    service = {"selector": {"app": "s3"}, "ports": [{"port": PORT}]}
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s3"}, "spec": service}
    jobs.cluster.apply(body, namespace=jobs.namespace)

    # First the Secret is missing, then the server is unreachable.
    jobs.apply(data_job("first", cache=str(cache)))
    jobs.wait("the condition", lambda: "data.secretName needs" in jobs.condition("first", "Running").get("message", ""))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
    jobs.cluster.apply(secret, namespace=jobs.namespace)
    away = "waiting for the bucket with the data"
    jobs.wait("the wait", lambda: away in jobs.condition("first", "Running").get("message", ""), timeout=180)
    start_server(jobs, objects)
    jobs.wait_phase("first", "Complete", timeout=300)
    assert jobs.status("first")["restarts"]["counted"] == 0

    # The test's nodes share one disk, as the pods of one node do, so the second pod has fetched
    # nothing.
    [folder] = (cache / jobs.namespace).iterdir()
    assert {name: (folder / name).read_bytes() for name in SIZES} == contents
    said = [jobs.kubectl("logs", f"first-{index}-0", "--container=trainer") for index in (0, 1)]
    assert all("/data has labels.txt train/a.bin train/b.bin" in text for text in said), said
    assert sum("all were present" in text for text in said) == 1, said

    # without a cache, each pod has its own disk
    jobs.apply(data_job("second"))
    jobs.wait_phase("second", "Complete", timeout=300)
    said = [jobs.kubectl("logs", f"second-{index}-0", "--container=trainer") for index in (0, 1)]
    assert all("3 of 3 objects" in text and "/data has labels.txt" in text for text in said), said

    # A Secret with other keys fails a job immediately; the error contains the field's name.
    jobs.cluster.apply({**secret, "stringData": {**KEYS, "AWS_SECRET_ACCESS_KEY": "no"}}, namespace=jobs.namespace)
    jobs.apply(data_job("third"))
    jobs.wait_phase("third", "Failed", timeout=180)
    failed = jobs.condition("third", "Failed")
    assert failed["reason"] == "InitFailure" and "storage.data.secretName" in failed["message"], failed
