"""The real images: their size and their user. For an unchanged checkout, nothing is built."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from machine import slowness
from testcluster import builder, processes
from testcluster.cluster import Cluster
from testcluster.settings import ClusterError, Settings

pytestmark = pytest.mark.slow


def log_of(cluster: Cluster, namespace: str, image: str, command: list[str], node: str) -> str:
    """Return the output of a pod that runs an image under a restricted security context."""
    security = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": security,
    }
    spec: dict[str, Any] = {"nodeName": node, "restartPolicy": "Never", "containers": [container]}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}, namespace=namespace)
    phase = ("get", "pod", "pod", "--namespace", namespace, "--output=jsonpath={.status.phase}")
    processes.wait_for("the pod to end", lambda: cluster.kubectl(*phase) in ("Succeeded", "Failed"), timeout=120)
    return cluster.kubectl("logs", "pod", "--namespace", namespace)


def test_the_operators_image_is_small_and_runs_without_privileges(
    cluster: Cluster, operator_image: builder.Image, namespace: str
) -> None:
    assert operator_image.size <= 250e6
    code = "import importlib.util as u, os, kopf, ddpjob.controller; print(os.getuid(), u.find_spec('torch'))"
    assert log_of(cluster, namespace, operator_image.tag, ["python3", "-c", code], "n2") == "10001 None\n"


def test_an_unchanged_image_is_not_loaded_again(
    cluster: Cluster, operator_image: builder.Image, image_tools: Settings
) -> None:
    again = builder.build_image(image_tools, "operator", operator_image.tag)
    assert again.manifest == operator_image.manifest
    start = time.monotonic()
    cluster.load_image(again)
    assert time.monotonic() - start < 5 * slowness()


def test_a_failed_build_shows_the_command_and_its_output(image_tools: Settings, tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE} AS broken\nRUN echo said-before-the-end; exit 3\n")
    with pytest.raises(
        ClusterError, match=r"(?s)building ddpjob.test/broken:1 failed.*build-broken.log.*said-before-the-end"
    ):
        builder.build_image(image_tools, "broken", "ddpjob.test/broken:1", dockerfile=dockerfile)
