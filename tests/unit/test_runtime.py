"""The runtime as the operator ships it, and the words of its protocol that others must repeat."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ddpjob.api.types import DDPJob
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import build_coordinator, build_node
from ddpjob.objects.service import build_runtime, runtime_name
from ddpjob_runtime import protocol

ROOT = Path(__file__).parents[2]
PLATFORM = Platform(operator_key=b"key")
JOB = DDPJob.read(
    {
        "metadata": {"name": "job", "namespace": "space", "uid": "uid"},
        "spec": {"image": "image", "script": "train.py", "nodes": 2},
        "status": {"runtime": "job-runtime-12345678"},
    }
)


def mounted(folder: Path, pod: dict[str, Any]) -> Path:
    """The runtime as the kubelet mounts it for this pod."""
    [volume] = [v["configMap"] for v in pod["spec"]["volumes"] if "configMap" in v]
    assert volume["name"] == JOB.status.runtime
    data = build_runtime(JOB)["data"]
    for item in volume["items"]:
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data.pop(item["key"]))
    assert not data, "every file is mounted"
    return folder


@pytest.mark.parametrize("program", ["coordinator", "launcher"])
def test_the_mounted_files_are_a_package_that_runs(tmp_path: Path, program: str) -> None:
    pod = (
        build_coordinator(JOB, JOB.status, PLATFORM)
        if program == "coordinator"
        else build_node(JOB, JOB.status, PLATFORM, 0, 0)
    )
    folder = mounted(tmp_path, pod)
    [command] = [c["command"] for c in pod["spec"]["containers"]]
    assert command[0] == "python3" and command[1].startswith("/opt/ddpjob/") and command[2] == program
    local = [sys.executable, "-I", command[1].replace("/opt/ddpjob", str(folder)), *command[2:]]
    done = subprocess.run(local, capture_output=True, text=True, timeout=60, cwd="/", env={"PATH": os.environ["PATH"]})
    expected = {
        "coordinator": "the following arguments are required: --port, --nodes",
        "launcher": "environment variables missing: DDPJOB_COORDINATOR",
    }
    assert expected[program] in done.stderr and "Traceback" not in done.stderr


def test_the_config_map_is_one_that_kubernetes_takes() -> None:
    manifest = build_runtime(JOB)
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) for key in manifest["data"])
    assert sum(map(len, manifest["data"].values())) < 2**19, "half of what a ConfigMap may hold"
    assert manifest["metadata"]["name"] == runtime_name() and re.fullmatch(r"ddpjob-runtime-\w{8}", runtime_name())


def constants(path: str) -> dict[str, Any]:
    """Constants of a module, without importing it."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("trainer/ddpjob_trainer/lifecycle/signals.py", "EXIT_STEPPED_ASIDE"),
        ("trainer/ddpjob_trainer/lifecycle/fence.py", "EXIT_FENCED"),
        ("runtime/ddpjob_runtime/worker.py", "EXIT_STEPPED_ASIDE"),
    ],
)
def test_exit_codes_are_the_protocol_s(path: str, name: str) -> None:
    """The trainer and the worker's entry point do without the protocol."""
    assert constants(path)[name] == getattr(protocol, name)


@pytest.mark.parametrize(
    "path", ["trainer/ddpjob_trainer/reporting/progress_client.py", "runtime/ddpjob_runtime/worker.py"]
)
def test_progress_is_posted_where_the_coordinator_takes_it(path: str) -> None:
    posted = set(re.findall(r"/v1/\w+", (ROOT / path).read_text()))
    assert posted == {protocol.Command.PROGRESS.path}
