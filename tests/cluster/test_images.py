"""The contents of the real images, checked by programs that run in them."""

from __future__ import annotations

from typing import Any

import pytest
from testcluster import builder, processes
from testcluster.cluster import Cluster

pytestmark = pytest.mark.slow

COMPILE = """
import os, torch, torchvision, ddpjob_trainer
print(os.getuid(), os.access(os.getcwd(), os.W_OK), os.access(os.environ["HOME"], os.W_OK))
x = torch.linspace(0, 1, 64)
compiled = torch.compile(lambda x: (x.sin() + x.cos()).relu().sum(), fullgraph=True)
torch.testing.assert_close(compiled(x), (x.sin() + x.cos()).relu().sum())
from torch._dynamo.utils import counters
assert counters["inductor"]["fxgraph_cache_miss"] == 1, counters["inductor"]
print("compiled")
"""


def run(
    cluster: Cluster, namespace: str, image: builder.Image, command: list[str], node: str, **context: Any
) -> tuple[int, str]:
    """Run a command in an image, under the restricted security standard, and return the pod's exit
    code and log.
    """
    security = {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}, **context}
    container = {
        "name": "main",
        "image": image.tag,
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": security,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"},
        "spec": {"nodeName": node, "restartPolicy": "Never", "containers": [container]},
    }
    cluster.apply(pod, namespace=namespace)
    phase = ("get", "pod", "pod", "--namespace", namespace, "--output=jsonpath={.status.phase}")
    processes.wait_for("the pod to end", lambda: cluster.kubectl(*phase) in ("Succeeded", "Failed"), timeout=300)
    ended = cluster.kubectl_json("get", "pod", "pod", "--namespace", namespace)["status"]["containerStatuses"][0][
        "state"
    ]["terminated"]
    return ended["exitCode"], cluster.kubectl("logs", "pod", "--namespace", namespace)


def test_torch_compile_works_in_the_trainers_image(
    cluster: Cluster, trainer_image: builder.Image, namespace: str
) -> None:
    """The container runs as a user that the platform has chosen (in group 0)."""
    code, log = run(
        cluster, namespace, trainer_image, ["python3", "-c", COMPILE], "n1", runAsUser=1000680000, runAsGroup=0
    )
    assert (code, log.splitlines()[-2:]) == (0, ["1000680000 True True", "compiled"]), log


def test_the_trainers_image_has_its_own_user_and_no_packages_of_the_operator(
    cluster: Cluster, trainer_image: builder.Image, namespace: str
) -> None:
    program = (
        "import importlib.util as u, os; "
        "writable = [os.access(path, os.W_OK) for path in (os.getcwd(), os.environ['HOME'])]; "
        "print(os.getuid(), *writable, u.find_spec('kopf'))"
    )
    assert run(cluster, namespace, trainer_image, ["python3", "-c", program], "n2") == (0, "10001 True True None\n")


def test_the_trainers_image_has_tritons_build_tools(
    cluster: Cluster, trainer_image: builder.Image, namespace: str
) -> None:
    """Triton's launcher is a C extension, which is compiled when the first kernel runs on a GPU."""
    program = (
        "import pathlib, subprocess, sysconfig; "
        "source = pathlib.Path('module.c'); source.write_text('#include <Python.h>\\n'); "
        "headers = sysconfig.get_path('include'); "
        "subprocess.run(['gcc', '-shared', '-fPIC', '-I', headers, source, '-o', 'module.so'], check=True)"
    )
    code, log = run(cluster, namespace, trainer_image, ["python3", "-c", program], "n1")
    assert code == 0, log


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (["python3", "-c", "import torch"], "No module named 'torch'"),
        (["python3", "-m", "pip", "--version"], "No module named pip"),
        (["sh", "-c", "command -v gcc cc g++ c++ clang ld || echo no compiler; exit 1"], "no compiler"),
        (["sh", "-c", "touch /opt/venv/file || touch /etc/file"], "Permission denied"),
    ],
)
def test_the_operators_image_contains_only_what_it_needs(
    cluster: Cluster, operator_image: builder.Image, namespace: str, program: list[str], words: str
) -> None:
    code, log = run(cluster, namespace, operator_image, program, "n2")
    assert code != 0
    assert words in log


def test_the_operators_image_reports_missing_settings(
    cluster: Cluster, operator_image: builder.Image, namespace: str
) -> None:
    """The chart's Secret is missing, and the user has no name."""
    command = ["env", "DDPJOB_OPERATOR_LEASE_NAMESPACE=x", "python3", "-m", "ddpjob.controller"]
    code, log = run(
        cluster, namespace, operator_image, command, "n2", runAsUser=1000680000, readOnlyRootFilesystem=True
    )
    assert code == 2
    assert "DDPJOB_OPERATOR_KEY must be a secret of at least 16 characters" in log
    assert "The chart generates a secret" in log
