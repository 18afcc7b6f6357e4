"""A job whose checkpoints are only in a bucket, on an S3 server in the cluster. Pods, disks and the
server fail.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ddpjob_trainer.commands.check_ledger import read, verify
from jobs import Jobs, Json, training_job
from s3_server import program
from testcluster import python_host

pytest.importorskip("obstore", reason="pip install obstore")
PORT, BUCKET = 7070, "models"
KEYS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test"}


def server(folder: Path) -> Json:
    """Run the S3 server as a pod, with its objects in a folder on this machine."""
    gateway = program()
    command = [str(gateway), "--port", f":{PORT}", "posix", "--sidecar", "/s3/sidecar", "/s3/buckets"]
    pod = python_host.pod("s3", command)
    main = pod["spec"]["containers"][0]
    main["env"] += [{"name": "ROOT_ACCESS_KEY_ID", "value": KEYS["AWS_ACCESS_KEY_ID"]},
                    {"name": "ROOT_SECRET_ACCESS_KEY", "value": KEYS["AWS_SECRET_ACCESS_KEY"]}]  # fmt: skip
    for name, host, path in (("objects", folder, "/s3"), ("gateway", gateway.parent, str(gateway.parent))):
        pod["spec"]["volumes"].append({"name": name, "hostPath": {"path": str(host)}})
        main["volumeMounts"].append({"name": name, "mountPath": path})
    return pod


@contextmanager
def cordoned(jobs: Jobs, node: str) -> Iterator[None]:
    jobs.cluster.kubectl("cordon", node)
    try:
        yield
    finally:
        jobs.cluster.kubectl("uncordon", node)


def rows(records: Path, *events: str) -> list[Json]:
    """Return both ranks' records of these events in all incarnations, in order. Each rank is the
    first one on its node.
    """
    path = records / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["event"] in events]


def starts(records: Path) -> list[int]:
    return [row["step"] for row in rows(records, "start")]


def metrics(jobs: Jobs) -> Json:
    found: Json = jobs.status("bucket").get("progress", {}).get("metrics", {})
    return found


def test_training_is_exact_even_if_pods_and_the_server_are_lost(jobs: Jobs, tmp_path: Path) -> None:
    objects, records = tmp_path / "s3", tmp_path / "records"
    for folder in (objects / "buckets" / BUCKET, objects / "sidecar", records):
        folder.mkdir(parents=True)
    jobs.cluster.apply(server(objects), namespace=jobs.namespace)
    service = {"selector": {"app": "s3"}, "ports": [{"port": PORT}]}
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s3"}, "spec": service}
    jobs.cluster.apply(body, namespace=jobs.namespace)
    place = {"url": f"s3://{BUCKET}/runs", "endpoint": f"http://s3:{PORT}", "secretName": "keys"}
    arguments = ["--config", "digits", "train.ledger=true", "train.epochs=30", "train.log_every=1"]
    saving = ["checkpoint.every_steps=10", "checkpoint.every_seconds=0", "checkpoint.keep=2", "train.run_dir=/records"]
    jobs.apply(training_job(
        "bucket", *arguments, *saving, scheduling={"onePodPerNode": False},
        storage={"checkpoints": place, "data": {"hostPath": str(records), "mountPath": "/records", "readOnly": False}},
    ))  # fmt: skip

    # First the Secret is missing.
    jobs.wait("the condition", lambda: "secretName needs" in jobs.condition("bucket", "Running").get("message", ""))
    assert jobs.condition("bucket", "Running")["reason"] == "CreateContainerConfigError"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
    jobs.cluster.apply(secret, namespace=jobs.namespace)
    jobs.wait("some copies", lambda: metrics(jobs).get("copyStep", 0) >= 20, timeout=180)

    # Then rank 0's pod is lost with its disk.
    lost = jobs.pods()["bucket-0-0"]["spec"]["nodeName"]
    with cordoned(jobs, lost):
        jobs.kill("bucket-0-0")
        jobs.wait("its replacement", lambda: len(starts(records)) == 4, timeout=240)
        assert jobs.pods()["bucket-0-1"]["spec"]["nodeName"] != lost

    # Then the server is down for a while. A job that starts without a server waits for it, but this
    # job has already uploaded a checkpoint, so it keeps training.
    jobs.wait("a copy by the second incarnation", lambda: rows(records, "start", "copied")[-1]["event"] == "copied")
    taken = len(rows(records, "step"))
    jobs.kubectl("delete", "pod", "s3", "--force", "--grace-period=0")
    jobs.wait("steps without it", lambda: len(rows(records, "step")) >= taken + 50, timeout=240)
    jobs.wait("a status from that time", lambda: metrics(jobs)["copyStep"] < jobs.step("bucket"))
    jobs.cluster.apply(server(objects), namespace=jobs.namespace)
    jobs.wait_phase("bucket", "Complete", timeout=400)

    assert jobs.status("bucket")["restarts"]["counted"] == 0
    lives = read([records])
    assert len(lives) == 2
    verify(lives)
    losses = defaultdict[int, set[float]](set)
    for row in rows(records, "step"):
        losses[row["step"]].add(row["loss"])
    assert all(len(found) == 1 for found in losses.values()), "steps that were taken twice have the same loss"
    assert min(starts(records)[2:]) >= 20, "training continued from a copy"
    there = objects / "buckets" / BUCKET / "runs" / jobs.namespace / "bucket" / "complete"
    steps = sorted(int(path.stem.rpartition("-")[2]) for path in there.iterdir())
    assert len(steps) == 2 and steps[-1] == max(losses) == metrics(jobs)["copyStep"]
