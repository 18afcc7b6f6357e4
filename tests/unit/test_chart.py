"""The chart as Helm renders it, without a cluster: labels, monitoring, and what a user reads after the installation."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ddpjob.api.reader import read_manifests
from ddpjob.client.manifest_sources import checked

CHART = Path(__file__).parents[2] / "charts" / "ddpjob-operator"
BUILT = sorted(Path("~/.cache/ddpjob/cluster/bin").expanduser().glob("*/helm"))
HELM = shutil.which("helm") or next(map(str, BUILT), None)  # that of the test cluster, where it was built
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm on PATH, and the test cluster's is not built")
MONITORING = ",".join(
    f"metrics.{name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "rules", "dashboards")
)


def helm(*words: str) -> str:
    given = ("--namespace", "ml", "--set", "key.existingSecret=given", "--set", "watchNamespaces={one,two}")
    return subprocess.run([str(HELM), *words, *given], capture_output=True, text=True, check=True).stdout


@needs_helm
def test_every_object_has_the_recommended_labels() -> None:
    rendered = helm("template", "mine", str(CHART), "--set", f"replicas=2,{MONITORING}")
    objects = [document for document in yaml.safe_load_all(rendered) if document]
    assert {body["kind"] for body in objects} >= {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}
    for body in objects:
        labels = body["metadata"]["labels"]
        names = ("name", "instance", "version", "managed-by")
        assert [labels.get(f"app.kubernetes.io/{name}") for name in names][:2] == ["ddpjob-operator", "mine"], body
        assert all(labels.get(f"app.kubernetes.io/{name}") for name in names) and "helm.sh/chart" in labels, body


@needs_helm
def test_a_users_pod_adds_no_series_of_others_to_prometheus() -> None:
    rendered = yaml.safe_load_all(helm("template", "mine", str(CHART), "--set", MONITORING))
    (monitor,) = [body for body in rendered if body and body["kind"] == "PodMonitor"]
    names = ("ddpjob_train_loss", "ddpjob_members", "ddpjob_job_failed", "kube_pod_info", "node_load1", "ALERTS")
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        rules = [rule for rule in endpoint["metricRelabelings"] if rule.get("sourceLabels") == ["__name__"]]
        patterns = {rule["action"]: re.compile(rule["regex"]) for rule in rules}
        kept = [n for n in names if patterns["keep"].fullmatch(n) and not patterns["drop"].fullmatch(n)]
        assert kept == ["ddpjob_train_loss", "ddpjob_members"]


@needs_helm
@pytest.mark.parametrize("upgrade", [False, True])
def test_the_notes_work_without_the_checkout(upgrade: bool, tmp_path: Path) -> None:
    template = (CHART / "templates" / "NOTES.txt").read_text()
    if upgrade:  # Helm says it of a release in a cluster; here the condition is set.
        shutil.copytree(CHART, tmp_path / "chart")
        template = template.replace("if .Release.IsUpgrade", "if true")
        (tmp_path / "chart" / "templates" / "NOTES.txt").write_text(template)
    chart = tmp_path / "chart" if upgrade else CHART
    notes = helm("install", "mine", str(chart), "--dry-run=client").partition("NOTES:")[2]
    assert not re.search(r"(?:charts|examples|docs)/", notes)
    assert ("helm show crds CHART --version" in notes) is upgrade
    assert "rollout status deployment/mine-operator" in notes
    found = re.search(r"kubectl apply --namespace one -f - <<END\n(.*?)\nEND\n", notes, flags=re.DOTALL)
    assert found is not None
    [manifest] = read_manifests(found[1].replace("IMAGE", "pytorch/pytorch"), "the notes")
    assert checked(manifest)["spec"]["module"] == "torch.utils.collect_env"


@needs_helm
def test_the_definition_can_be_taken_from_the_chart() -> None:
    shown = subprocess.run([str(HELM), "show", "crds", str(CHART)], capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(shown)["metadata"]["name"] == "ddpjobs.ddpjob.io"
