"""Code that pods fetch: an archive from an S3 server and a commit from a git server, both in the
cluster.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from ddpjob.client.manifests.build_manifest import JobRequest, build
from ddpjob.core.world import CODE_CONTAINER
from git_server import commit, git
from jobs import FAST, Jobs, Json
from test_buckets import BUCKET, KEYS, PORT, server
from testcluster import python_host

SCRIPT = """
import os
from pathlib import Path
import torch.distributed as dist
from lib.model import NAME

dist.init_process_group("gloo")
dist.barrier()
print(f"{NAME} in {os.getcwd()}", flush=True)
dist.destroy_process_group()
"""


def serve(jobs: Jobs, pod: Json, port: int) -> str:
    """Start a server's pod and a Service with the same name, and return the pod's address."""
    name = pod["metadata"]["name"]
    spec = {"selector": {"app": name}, "ports": [{"port": port}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
    jobs.cluster.apply(pod, service, namespace=jobs.namespace)
    jobs.kubectl("wait", "pod", name, "--for=condition=Ready", "--timeout=100s")
    address: str = jobs.read("api/v1", f"pods/{name}")["status"]["podIP"]

    def listens() -> bool:
        with suppress(OSError), socket.create_connection((address, port), 1):
            return True
        return False

    jobs.wait(f"the server {name}", listens)
    return address


def project(name: str) -> dict[str, str]:
    """Return the files of a project, by their paths."""
    return {"train.py": SCRIPT, "lib/__init__.py": "", "lib/model.py": f"NAME = {name!r}\n"}


def check_output(jobs: Jobs, name: str, text: str) -> None:
    jobs.wait_phase(name, "Complete", timeout=180)
    assert jobs.status(name)["restarts"]["counted"] == 0
    for index in (0, 1):
        assert f"{text} in /ddpjob-code\n" in jobs.kubectl("logs", f"{name}-{index}-0", "--container=trainer")


def test_a_folder_is_uploaded_to_a_bucket_and_runs_on_every_pod(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="pip install obstore")
    for place in (tmp_path / "s3" / "buckets" / BUCKET, tmp_path / "s3" / "sidecar"):
        place.mkdir(parents=True)
    address = serve(jobs, server(tmp_path / "s3"), PORT)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
    jobs.cluster.apply(secret, namespace=jobs.namespace)
    for name, value in {**KEYS, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    for path, text in project("from the bucket").items():
        (folder / path).write_text(text)
    (folder / "weights.bin").write_bytes(os.urandom(2_000_000))  # too large for a ConfigMap
    request = JobRequest(
        program=str(folder), image=python_host.IMAGE, name="packed", nodes=2, gpus=0,
        code=f"s3://{BUCKET}/code",
        settings={"code": {"endpoint": f"http://{address}:{PORT}", "secretName": "keys"}, "recovery": FAST,
                  "imagePullPolicy": "IfNotPresent", "podTemplate": python_host.overlay("trainer")},
    )  # fmt: skip
    [manifest] = build(request, local=False)
    assert manifest["spec"]["code"]["archive"].startswith(f"s3://{BUCKET}/code/")
    jobs.apply(manifest)
    check_output(jobs, "packed", "from the bucket")


def test_a_commit_is_cloned_into_every_pod_even_if_its_branch_has_moved(jobs: Jobs, tmp_path: Path) -> None:
    """An init container clones the repository. The chart's image for it is not in the test cluster,
    so podTemplate gives it this machine's git.
    """
    repository = tmp_path / "root" / "project"
    wanted = commit(repository, project("from git"))
    commit(repository, project("from a later commit"))
    git(repository, "update-server-info")  # this prepares git's dumb protocol, which needs only a web server
    pod = python_host.pod("git", ["python3", "-m", "http.server", "--directory=/repositories", "8000"])
    pod["spec"]["volumes"].append({"name": "root", "hostPath": {"path": str(repository.parent)}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "root", "mountPath": "/repositories"})
    serve(jobs, pod, 8000)
    template = python_host.overlay("trainer")
    [clone] = python_host.overlay(CODE_CONTAINER)["spec"]["containers"]
    template["spec"]["initContainers"] = [{**clone, "image": python_host.IMAGE}]
    code = {"git": {"url": "http://git:8000/project/.git", "ref": "main", "commit": wanted}}
    spec = {"image": python_host.IMAGE, "imagePullPolicy": "IfNotPresent", "nodes": 2, "gpusPerNode": 0,
            "script": "train.py", "code": code, "recovery": FAST, "podTemplate": template}  # fmt: skip
    jobs.apply({"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "cloned"}, "spec": spec})
    check_output(jobs, "cloned", "from git")
    said = jobs.kubectl("logs", "cloned-0-0", f"--container={CODE_CONTAINER}")
    assert f"code.git: commit {wanted} of http://git:8000/project/.git" in said
