"""The files and commands on the platform pages are valid for Helm, the CRD and the operator."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api.job import DDPJob
from ddpjob.client.manifests.manifest_sources import read_job
from ddpjob.controller.operator_settings import Settings
from test_chart import CHART, HELM, needs_helm, template

DOCS = CHART.parents[1] / "docs"
TEAM, AIR_GAPPED = ((DOCS / f"{name}.md").read_text() for name in ("set-up-a-team", "air-gapped"))
Json = dict[str, Any]


def block(page: str, first: str) -> str:
    """Return the only code block of the page that begins with `first`."""
    [found] = [text for text in re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if first in text[:80]]
    return str(found)


def rendered(page: str, tmp_path: Path) -> list[Json]:
    (tmp_path / "values.yaml").write_text(block(page, "# values.yaml").replace("REGISTRY", "registry.example.com/ml"))
    words = ("--values", str(tmp_path / "values.yaml"), "--set", "key.existingSecret=given")
    return [body for body in yaml.safe_load_all(template(*words)) if body]


def images(body: Any) -> set[str]:
    """Return all images in an object, at any depth."""
    if isinstance(body, dict):
        own = {value for key, value in body.items() if key == "image" and isinstance(value, str)}
        return own.union(*map(images, body.values()))
    return set().union(*map(images, body)) if isinstance(body, list) else set()


@needs_helm
def test_the_files_for_a_team_are_valid_and_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered(TEAM, tmp_path)
    of_team = {body["kind"]: body for body in yaml.safe_load_all(block(TEAM, "# team.yaml"))}
    (tmp_path / "job.yaml").write_text(block(TEAM, "kind: DDPJob"))
    manifest = read_job(tmp_path / "job.yaml")
    deployments = {b["metadata"]["name"]: b for b in objects if b["kind"] == "Deployment"}
    assert deployments.keys() == {"mine-operator", "mine-operator-dashboard"}
    for variable in deployments["mine-operator"]["spec"]["template"]["spec"]["containers"][0]["env"]:
        if "valueFrom" not in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    monkeypatch.setenv("DDPJOB_OPERATOR_KEY", "k" * 16)
    settings = Settings.from_environment()

    job = DDPJob.read({**manifest, "metadata": {**manifest["metadata"], "uid": "uid"}})
    offer = settings.classes.offer(job)
    assert offer.job_class is not None and offer.problems == ()
    receiver = offer.job_class.spec["notify"]["receiver"]
    assert job.namespace in settings.receivers.namespaces[receiver]
    assert f"--from-literal={receiver}=" in TEAM and "create secret generic webhooks" in TEAM

    assert of_team["Namespace"]["metadata"]["name"] == job.namespace
    for kind in ("LocalQueue", "ResourceQuota", "RoleBinding"):
        assert of_team[kind]["metadata"]["namespace"] == job.namespace
    queue, quota = of_team["LocalQueue"], of_team["ClusterQueue"]
    assert offer.job_class.queue == queue["metadata"]["name"]
    assert queue["spec"]["clusterQueue"] == quota["metadata"]["name"]
    [group] = quota["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    assert flavor["name"] == of_team["ResourceFlavor"]["metadata"]["name"]
    amounts = {resource["name"]: resource["nominalQuota"] for resource in flavor["resources"]}
    assert list(amounts) == group["coveredResources"], "Kueue requires this order"
    assert amounts[job.spec.gpu_resource] == job.spec.pods * job.spec.gpus_per_node

    role = of_team["RoleBinding"]["roleRef"]["name"]
    added = [b for b in objects if b["metadata"]["labels"].get(f"rbac.authorization.k8s.io/aggregate-to-{role}")]
    assert any("create" in rule["verbs"] and rule["resources"] == ["ddpjobs"] for b in added for rule in b["rules"])


@needs_helm
def test_the_command_lists_every_image_of_the_chart(tmp_path: Path) -> None:
    command = block(AIR_GAPPED, "helm template")
    path = f"{Path(str(HELM)).parent}{os.pathsep}{os.environ['PATH']}"
    listed = subprocess.run(
        [str(shutil.which("bash")), "-c", command],
        env={**os.environ, "CHART": str(CHART), "PATH": path}, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    objects = list(yaml.safe_load_all(template("--set", "key.existingSecret=any,dashboard.enabled=true")))
    assert set(listed) == images(objects) and len(listed) == 1


@needs_helm
def test_the_values_for_a_mirror_apply_to_both_deployments(tmp_path: Path) -> None:
    objects = rendered(AIR_GAPPED, tmp_path)
    assert {image.partition(":")[0] for image in images(objects)} == {"registry.example.com/ml/ddpjob-operator"}
    (tmp_path / "values.yaml").write_text(block(AIR_GAPPED, "# values.yaml"))
    words = ("--values", str(tmp_path / "values.yaml"), "--set", "image.repository=a/b,dashboard.enabled=true")
    text = template(*words, "--set", "key.existingSecret=given,metrics.rules.enabled=true")
    pods = [b["spec"]["template"]["spec"] for b in yaml.safe_load_all(text) if b and b["kind"] == "Deployment"]
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "registry"}]] * 2
    assert "runbook_url: https://docs.example.com/ddpjob/troubleshooting.html#ddpjobfailed" in text
