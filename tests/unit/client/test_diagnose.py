"""The advice of `ddpjob doctor`. Its findings in a cluster are in tests/cluster/test_cli.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
from ddpjob.cli.main import main
from ddpjob.client.backends.api_server import ApiServer
from ddpjob.client.texts import diagnose_machine
from ddpjob.client.texts.diagnose import OPERATOR_RIGHTS, _operators, _rights
from ddpjob.client.texts.diagnose_machine import checks_of_machine
from ddpjob.local.local_platform import NoFreePorts
from ddpjob.missing_package import installed_version


class Refusing:
    """An API server that permits nothing."""

    def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        return {"status": {"allowed": False}}


def test_a_user_who_lacks_rights_is_not_advised_to_use_a_role_without_them() -> None:
    """If watchNamespaces is set, the built-in role edit has no rights on DDPJobs."""
    (check,) = _rights(cast("ApiServer", Refusing()), "vision")
    assert check.ok is False and "you are not permitted to get ddpjobs" in check.what
    assert "get configmaps (for rerun with code)" in check.what
    assert (
        "ClusterRole edit in namespace vision" in check.remedy and "the chart's watchNamespaces is set" in check.remedy
    )


class Deployed:
    """An API server with one operator, installed by the chart of this client's release."""

    def __init__(self, image: str, watched: str = "", replicas: int = 2, **status: Any) -> None:
        self.image, self.watched, self.replicas, self.status = image, watched, replicas, status
        self.denied: tuple[str, ...] = ()

    def request(self, method: str, path: str, *, body: dict[str, Any]) -> dict[str, Any]:
        assert path.endswith("/subjectaccessreviews") and body["spec"]["user"] == "system:serviceaccount:n:default"
        asked = body["spec"]["resourceAttributes"]
        return {"status": {"allowed": f"{asked['verb']} {asked['resource']}" not in self.denied}}

    def items(self, path: str, query: dict[str, str], **_: object) -> list[dict[str, Any]]:
        labels = {"app.kubernetes.io/version": installed_version()}
        env = [{"name": "DDPJOB_OPERATOR_NAMESPACES", "value": self.watched}]
        pod = {"spec": {"containers": [{"image": self.image, "env": env}]}}
        meta = {"namespace": "n", "name": "o", "labels": labels, "generation": 2}
        return [{"metadata": meta, "spec": {"template": pod, "replicas": self.replicas}, "status": self.status}]


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("registry.example.com:5000/ml/ddpjob-operator:v9.8.7", "9.8.7"),
        (f"ddpjob-operator:9.8.7-ours@sha256:{'a' * 64}", "9.8.7-ours"),
        ("registry.example.com:5000/ddpjob-operator:latest", installed_version()),
        (f"10.0.0.1:5000/ddpjob-operator@sha256:{'a' * 64}", installed_version()),
    ],
)
def test_the_operators_version_is_taken_from_its_images_tag(image: str, version: str) -> None:
    """image.tag may be a different release from the chart, whose version is the label of the
    Deployment.
    """
    _, check = _operators(cast("ApiServer", Deployed(image)), "vision")
    assert check.what == f"operator n/o: version {version}" and check.ok is (version == installed_version())


WHOLE = {"observedGeneration": 2, "readyReplicas": 2, "updatedReplicas": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        (
            {"updatedReplicas": 1, "unavailableReplicas": 1},
            "1 of 2 have the newest revision, 1 unavail",
        ),
        ({"readyReplicas": 1}, "1 of 2 replicas are ready"),
        ({"observedGeneration": 1}, "have the newest revision"),
        ({"conditions": [{"type": "Progressing", "status": "False", "reason": "Late", "message": "m"}]}, "(Late: m)"),
        ({"conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "F", "message": "m"}]}, "(F: m)"),
    ],
)
def test_a_rollout_that_is_stuck_is_reported(change: dict[str, Any], said: str) -> None:
    """The new replica is in a crash loop, while two earlier replicas are ready."""
    check, _ = _operators(cast("ApiServer", Deployed("o:1.2.3", **{**WHOLE, **change})), "vision")
    assert check.ok is (not said) and said in check.what


@pytest.mark.parametrize(("watched", "denied"), [("", "create networkpolicies"), ("", "watch nodes"), ("b", "")])
def test_rights_that_the_operator_lacks_are_reported(watched: str, denied: str) -> None:
    """For example, because somebody has shortened its ClusterRole by hand."""
    deployed = Deployed("o:1.2.3", watched, **WHOLE)
    deployed.denied = (denied or "get pods",)
    said = [check for check in _operators(cast("ApiServer", deployed), "vision") if "service account" in check.what]
    assert [check.ok for check in said] == ([False] if denied else [])
    assert not said or f"default is not permitted to {denied} in namespace vision" in said[0].what


def test_doctor_checks_only_rights_that_the_chart_always_grants() -> None:
    rules = (Path(__file__).parents[3] / "charts/ddpjob-operator/templates/_helpers.tpl").read_text()
    for group, resource, subresource, verbs in OPERATOR_RIGHTS:
        what = f"{resource}/{subresource}" if subresource else resource
        found = re.search(rf"apiGroups: \[\"?{group}\"?\]\n  resources: \[{what}\]\n  verbs: \[([a-z, ]+)", rules)
        assert found and set(verbs) == set(found[1].split(", ")), what


@pytest.mark.parametrize(
    ("replicas", "change", "remedy", "logs"),
    [
        (2, {"readyReplicas": 0}, "kubectl describe pods -n n -l app", True),
        (2, {"conditions": [{"type": "ReplicaFailure", "status": "True"}]}, "correct the error that it reports", False),
        (0, {"readyReplicas": 0, "updatedReplicas": 0}, "value replicas to at least 1", False),
    ],
)
def test_the_advice_names_logs_only_if_the_operator_has_pods(
    replicas: int, change: dict[str, Any], remedy: str, logs: bool
) -> None:
    """A pod that admission has refused has never existed."""
    deployed = Deployed("o:1.2.3", replicas=replicas, **{**WHOLE, **change})
    check, _ = _operators(cast("ApiServer", deployed), "vision")
    assert check.ok is False and remedy in check.remedy and ("kubectl logs" in check.remedy) is logs


@pytest.mark.parametrize(("watched", "well"), [("", True), ("a, vision", True), ("a,b", False)])
def test_a_namespace_that_no_operator_watches_is_reported(watched: str, well: bool) -> None:
    checks = list(_operators(cast("ApiServer", Deployed("o:1.2.3", watched, **WHOLE)), "vision"))
    said = "no operator acts on the jobs in namespace vision; the operators watch only a, b"
    assert any(check.what == said and check.ok is False for check in checks) is not well


def test_an_unreachable_cluster_has_its_own_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config").write_text(
        '{"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}], "current-context": "c",'
        ' "users": [{"name": "u", "user": {}}], "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}'
    )
    assert main(["--kubeconfig", str(tmp_path / "config"), "doctor"]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("ok    client ") and "https://127.0.0.1:9 (context c) does not answer" in err


def test_doctor_checks_this_machine_if_there_is_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.setattr(diagnose_machine, "_TORCH", 'print(\'["2.9", "", true, []]\')')
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert "no cluster: " in err and 'in Python, Client("local")' in err and "checking this machine" in err
    assert [line.split()[1].rstrip(":") for line in out.splitlines()] == [
        *("client", "system", "torch", "GPUs", "shared", "ports", "disk")
    ]
    assert "torch 2.9, without CUDA" in out and str(tmp_path) in out
    assert main(["doctor", "--cluster"]) == 3


def test_each_fault_of_a_machine_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", "/proc/1/runs")
    monkeypatch.setattr(diagnose_machine, "usable_gpus", lambda: ("0", "1"))
    monkeypatch.setattr(diagnose_machine, "_LITTLE_DISK", 2**70)
    monkeypatch.setattr(diagnose_machine, "free_ports", no_ports)
    monkeypatch.setattr(diagnose_machine, "_TORCH", "import torch_that_is_not_there")
    found = {check.what.split(":")[0]: check for check in checks_of_machine(tmp_path / "none")}
    assert "No module named" in found["torch"].what and "pip install torch" in found["torch"].remedy
    assert [found[what].ok for what in ("shared memory", "ports")] == [False, False]
    assert "--shm-size" in found["shared memory"].remedy and "ss -ltn" in found["ports"].remedy
    assert found["disk"].ok is False and "DDPJOB_RUNS" in found["disk"].remedy
    monkeypatch.setattr(diagnose_machine, "_TORCH", 'print(\'["2.9", "12.8", true, []]\')')
    (gpus,) = (check for check in checks_of_machine() if check.what.startswith("GPUs"))
    assert gpus.ok is False and "nvidia-smi lists 2" in gpus.what and "driver" in gpus.remedy


def no_ports() -> None:
    raise NoFreePorts("end programs that listen there (`ss -ltn` lists them)")
