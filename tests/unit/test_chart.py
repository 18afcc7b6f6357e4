"""The chart as Helm renders it, without a cluster: its objects, values and notes."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api.merging import CLASS_FIELDS, QUEUE
from ddpjob.api.reader import read_manifests
from ddpjob.client.manifests.manifest_sources import checked
from ddpjob.controller.operator_settings import Settings, SettingsError

CHART = Path(__file__).parents[2] / "charts" / "ddpjob-operator"
BUILT = sorted(Path("~/.cache/ddpjob/cluster/bin").expanduser().glob("*/helm"))
HELM = shutil.which("helm") or next(map(str, BUILT), None)  # the test cluster's Helm, if it has been built
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not on PATH, and the test cluster's has not been built")
MONITORING = ",".join(
    f"metrics.{name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "rules", "dashboards")
)


def helm(*words: str) -> str:
    given = ("--namespace", "ml", "--set", "key.existingSecret=given", "--set", "watchNamespaces={one,two}")
    return subprocess.run([str(HELM), *words, *given], capture_output=True, text=True, check=True).stdout


def template(*words: str) -> str:
    """Render the chart with its default values, except for the values in `words`."""
    given = [str(HELM), "template", "mine", str(CHART), "--namespace", "ml", *words]
    return subprocess.run(given, capture_output=True, text=True, check=True).stdout


@needs_helm
def test_every_object_has_the_recommended_labels() -> None:
    rendered = helm("template", "mine", str(CHART), "--set", f"replicas=2,{MONITORING}")
    objects = [document for document in yaml.safe_load_all(rendered) if document]
    assert not [body for body in objects if "ddpjob-dashboard" in str(body)], "off by default"
    assert {body["kind"] for body in objects} >= {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}
    for body in objects:
        labels = body["metadata"]["labels"]
        names = ("name", "instance", "version", "managed-by")
        assert [labels.get(f"app.kubernetes.io/{name}") for name in names][:2] == ["ddpjob-operator", "mine"], body
        assert all(labels.get(f"app.kubernetes.io/{name}") for name in names) and "helm.sh/chart" in labels, body


@needs_helm
@pytest.mark.parametrize("release", ["2.x", "team.a", "mine-operator", "a" * 53])
def test_service_names_are_valid_for_every_release_name_that_helm_accepts(release: str) -> None:
    rendered = helm("template", release, str(CHART), "--set", f"dashboard.enabled=true,{MONITORING}")
    services = [o["metadata"]["name"] for o in yaml.safe_load_all(rendered) if o and o["kind"] == "Service"]
    assert len(services) == 2 and all(re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in services)


@needs_helm
def test_only_ddpjobs_own_series_are_scraped_from_users_pods() -> None:
    rendered = yaml.safe_load_all(helm("template", "mine", str(CHART), "--set", MONITORING))
    (monitor,) = [body for body in rendered if body and body["kind"] == "PodMonitor"]
    names = ("ddpjob_train_loss", "ddpjob_members", "ddpjob_job_failed", "kube_pod_info", "node_load1", "ALERTS")
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        rules = [rule for rule in endpoint["metricRelabelings"] if rule.get("sourceLabels") == ["__name__"]]
        patterns = {rule["action"]: re.compile(rule["regex"]) for rule in rules}
        kept = [n for n in names if patterns["keep"].fullmatch(n) and not patterns["drop"].fullmatch(n)]
        assert kept == ["ddpjob_train_loss", "ddpjob_members"]


@needs_helm
def test_the_notes_of_an_installation_work_without_the_checkout() -> None:
    notes = helm("install", "mine", str(CHART), "--dry-run=client").partition("NOTES:")[2]
    assert not re.search(r"(?:charts|examples|docs)/", notes) and "helm show crds" not in notes
    assert "rollout status deployment/mine-operator" in notes
    found = re.search(r"kubectl apply --namespace one -f - <<END\n(.*?)\nEND\n", notes, flags=re.DOTALL)
    assert found is not None
    [manifest] = read_manifests(found[1].replace("IMAGE", "pytorch/pytorch"), "the notes")
    assert checked(manifest)["spec"]["module"] == "torch.utils.collect_env"


@needs_helm
@pytest.mark.parametrize("before", ["0.0.1", "", None])
def test_the_notes_of_an_upgrade_ask_to_apply_the_crd_if_the_chart_changed(before: str | None, tmp_path: Path) -> None:
    """The notes depend on the label of the previous chart in the cluster, which this test sets.
    None means that only the values change.
    """
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"] if before is None else before
    previous = (
        f'dict "metadata" (dict "labels" (dict "helm.sh/chart" "ddpjob-operator-{version}"))' if version else "dict"
    )
    shutil.copytree(CHART, tmp_path / "chart")
    file = tmp_path / "chart" / "templates" / "NOTES.txt"
    changed, lookups = re.subn(r'lookup "apps/v1" .* \(.*\)(?= })', previous, file.read_text())
    assert lookups == 1
    file.write_text(changed.replace(".Release.IsUpgrade", "true"))
    notes = helm("install", "mine", str(tmp_path / "chart"), "--dry-run=client").partition("NOTES:")[2]
    assert ("helm show crds CHART --version" in notes) is (before is not None)
    assert "rollout status deployment/mine-operator" in notes and "Run a job" not in notes


def test_the_charts_metadata_matches_the_crd() -> None:
    """Artifact Hub shows these annotations."""
    notes = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    [shown] = yaml.safe_load(notes["artifacthub.io/crds"])
    definition = yaml.safe_load((CHART / "crds" / "ddpjobs.ddpjob.io.yaml").read_text())
    assert shown["name"] == definition["metadata"]["name"] and shown["kind"] == definition["spec"]["names"]["kind"]
    assert shown["version"] in [version["name"] for version in definition["spec"]["versions"]]
    for example in yaml.safe_load(notes["artifacthub.io/crdsExamples"]):
        [manifest] = read_manifests(yaml.safe_dump(example), "the example")
        assert checked(manifest)["kind"] == "DDPJob"


@needs_helm
def test_the_crd_can_be_extracted_from_the_chart() -> None:
    shown = subprocess.run([str(HELM), "show", "crds", str(CHART)], capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(shown)["metadata"]["name"] == "ddpjobs.ddpjob.io"


def dashboard(*words: str) -> dict[str, dict[str, Any]]:
    """Return the objects that the chart renders for the dashboard, by kind."""
    rendered = helm("template", "mine", str(CHART), "--set", "dashboard.enabled=true", *words)
    found = [body for body in yaml.safe_load_all(rendered) if body and body["metadata"]["name"].endswith("-dashboard")]
    assert all(body["metadata"]["labels"]["app.kubernetes.io/name"] == "ddpjob-dashboard" for body in found)
    return {body["kind"]: body for body in found}


LISTS_AND_MAPS = (
    "isolation.metricsFrom", "jobClasses", "nodeHealth.conditions", "nodeHealth.taints", "notify.receivers",
    "podLabels", "podAnnotations", "dashboard.hosts", "dashboard.namespaces", "watchNamespaces", "tolerations",
    "extraEnv", "extraVolumes", "extraVolumeMounts", "topologySpreadConstraints", "commonLabels",
    "podSecurityContext", "securityContext",
    *(f"metrics.{name}.labels" for name in ("serviceMonitor", "podMonitor", "rules", "dashboards")),
)  # fmt: skip


EVERY_VALUE = Path(__file__).with_name("chart_values.yaml")
VALUES = yaml.safe_load(EVERY_VALUE.read_text())
ALONE = {"watchNamespaces": ["one"], "serviceAccount.annotations": {"note": "hello"}}
"""Values that have no effect together with those of chart_values.yaml."""


def leaves(values: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the values by their paths, such as image.tag. A list or an empty map is a value."""
    if not isinstance(values, dict) or not values:
        return {".".join(path): values}
    return {name: leaf for key, value in values.items() for name, leaf in leaves(value, (*path, key)).items()}


DEFAULTS = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))


def chosen(path: str) -> Any:
    """Return the value at a path of chart_values.yaml, or None."""
    found = VALUES
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def test_every_value_of_the_chart_is_tested_with_a_value_that_is_not_its_default() -> None:
    """A new value of the chart needs a line in chart_values.yaml."""
    assert [path for path in DEFAULTS if path not in ALONE and chosen(path) in (None, DEFAULTS[path])] == []


@pytest.mark.slow
@needs_helm
def test_every_value_of_the_chart_has_an_effect() -> None:
    """With any single value changed, the chart renders other objects or refuses the values."""

    def outcome(*words: str) -> str:
        try:
            return template("--set", "key.existingSecret=given", *words)
        except subprocess.CalledProcessError as refused:
            return str(refused.stderr)

    every, idle = ("--values", str(EVERY_VALUE)), list[str]()
    usual = {(): outcome(), every: outcome(*every)}
    for path, default in DEFAULTS.items():
        base, value = ((), ALONE[path]) if path in ALONE else (every, default)
        if outcome(*base, "--set-json", f"{path}={json.dumps(value)}") == usual[base]:
            idle.append(path)
    assert idle == ["key.existingSecret"], "`outcome` must set the key, because Helm sees no cluster here"


@needs_helm
def test_a_list_or_map_without_a_value_counts_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if, for example, all classes below `jobClasses:` are commented out."""
    nothing = ",".join(f"{name}=null" for name in LISTS_AND_MAPS)
    rendered = yaml.safe_load_all(
        template("--set", f"key.existingSecret=given,dashboard.enabled=true,{MONITORING},{nothing}")
    )
    objects = [document for document in rendered if document]
    (operator,) = [o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"] == "mine-operator"]
    for variable in operator["spec"]["template"]["spec"]["containers"][0]["env"]:
        if "valueFrom" not in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    monkeypatch.setenv("DDPJOB_OPERATOR_KEY", "0123456789abcdef")
    settings = Settings.from_environment()
    assert settings.metrics_peers == settings.namespaces == settings.node_health.taints == ()
    assert not settings.classes.classes and not settings.receivers.namespaces


@needs_helm
def test_a_class_in_the_values_reaches_the_operator_unchanged() -> None:
    """The kubelet expands variables in the operator's environment. $$(RANK) is an escaped variable
    for the jobs' pods.
    """
    command = ["sh", "-c", "echo $$(RANK) $(KUBERNETES_SERVICE_HOST) $HOME; kill $$$$"]
    spec = {"podTemplate": {"spec": {"initContainers": [{"name": "first", "image": "busybox", "command": command}]}}}
    rendered = template(
        "--set", "key.existingSecret=given", "--set-json", f"jobClasses={json.dumps({'a': {'spec': spec}})}"
    )
    (operator,) = [body for body in yaml.safe_load_all(rendered) if body and body["kind"] == "Deployment"]
    environment = {v["name"]: v.get("value") for v in operator["spec"]["template"]["spec"]["containers"][0]["env"]}

    def expanded(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}.get(found[1], found[0])

    value = re.sub(r"\$\$|\$\(([^)]*)\)", expanded, environment["DDPJOB_OPERATOR_CLASSES"])
    assert json.loads(value) == {"a": {"spec": spec}}


@needs_helm
@pytest.mark.parametrize(
    "name", ["image.repository", "replicas", "shards", "workers", "logLevel", "healthPort", "metrics.port",
             "metrics.rules.runbooks", "dashboard.port", "dashboard.apiServerPorts", "image", "notify", "metrics",
             "metrics.podMonitor", "metrics.podMonitor.interval", "metrics.serviceMonitor.interval", "queues",
             "networkPolicy", "rbac"],
)  # fmt: skip
def test_a_missing_value_that_is_not_a_list_or_map_is_reported(name: str) -> None:
    """Otherwise, `replicas:` would mean no replicas, and `apiServerPorts:` would mean all ports."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template("--set", f"key.existingSecret=given,{name}=null")
    assert f"missing property '{name.rpartition('.')[2]}'" in refused.value.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("metrics.port=8080", "metrics.port: 8080 is also healthPort"),
        ("healthPort=9090", "metrics.port: 9090 is also healthPort"),
        ("metrics.port=0,metrics.rules.enabled=true", "metrics.rules.enabled: metrics.port is 0"),
        (
            "networkPolicy.enabled=true,metrics.serviceMonitor.enabled=true",
            "networkPolicy.enabled: isolation.metricsFrom is empty",
        ),
        ("nodeHealth.conditions={GpuUnhealthy=True,Re*=True}", "a healthy node has Ready=True, which Re*=True matches"),
        ("nodeHealth.conditions={MemoryPressure=False}", "a healthy node has MemoryPressure=False"),
    ],
)
def test_conflicting_values_are_reported(values: str, words: str) -> None:
    """With such values, for example one port for two servers, the operator would exit whenever it
    starts.
    """
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template("--set", f"key.existingSecret=given,{values}")
    assert words in refused.value.stderr


@pytest.mark.parametrize(
    "key", [f"{'node.kubernetes.io/'[:n]}{end}" for n in range(1, 20) for end in ("", "*")]
    + ["node.kubernetes.io/unschedulable", "nodes", "node-health*", "node.kubernetes.iox/gpu", "*"],
)  # fmt: skip
def test_the_chart_accepts_exactly_the_taints_that_the_operator_accepts(key: str) -> None:
    """Otherwise the operator would crash because of a name that `helm upgrade` has accepted."""
    signals = json.loads((CHART / "values.schema.json").read_text())["properties"]["nodeHealth"]["properties"]
    schema = signals["taints"]["items"]
    is_taken = re.search(schema["pattern"], key) and not re.search(schema["not"]["pattern"], key)
    with contextlib.nullcontext() if is_taken else pytest.raises(SettingsError):
        Settings.from_environment({"DDPJOB_OPERATOR_KEY": "k" * 16, "DDPJOB_OPERATOR_NODE_TAINTS": json.dumps([key])})


@pytest.mark.parametrize(
    ("repository", "taken"),
    [("ghcr.io/ddpjob/operator", True), ("registry.example:5000/team/operator", True), ("operator", True),
     ("ghcr.io/Owner/operator", False), ("host:5000/Team/operator", False), ("a:5000", False), ("a/b:1.2", False)],
)  # fmt: skip
def test_the_operators_image_has_a_name_that_the_kubelet_accepts(repository: str, taken: bool) -> None:
    """The kubelet accepts no capitals after the registry's name."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["image"]["properties"]["repository"]
    assert bool(re.search(schema["pattern"], repository)) is taken


@pytest.mark.parametrize(
    ("image", "taken"),
    [("docker.io/alpine/git:2.49.1", True), (f"mirror:5000/git@sha256:{'0' * 64}", True), ("git:1", True),
     ("Mirror.example/git", True), ("docker.io/Alpine/git", False), ("git::2", False), ("git:", False)],
)  # fmt: skip
def test_the_image_with_git_has_a_name_that_the_kubelet_accepts(image: str, taken: bool) -> None:
    """Otherwise, every job with code from Git would fail because of InvalidImageName."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["codeImage"]
    assert bool(re.search(schema["pattern"], image)) is taken


def test_the_chart_accepts_only_fields_that_a_class_may_set() -> None:
    """Otherwise, the operator could not start because of a typo that `helm upgrade` has
    accepted.
    """
    classes = json.loads((CHART / "values.schema.json").read_text())["properties"]["jobClasses"]
    schema = classes["additionalProperties"]["properties"]

    def paths(part: dict[str, Any], prefix: str = "") -> set[str]:
        assert part["additionalProperties"] is False
        fields = part["properties"].items()
        return {
            path for name, below in fields for path in (paths(below, f"{prefix}{name}.") if below else {prefix + name})
        }

    assert paths(schema["spec"]) == set(CLASS_FIELDS)
    assert set(schema["fixed"]["items"]["enum"]) == {*CLASS_FIELDS, QUEUE}


MANY = ["n" * 60] * 20


@needs_helm
@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"notify": {"secretName": "s", "receivers": {f"r{n}": MANY for n in range(100)}}}, "notify.receivers"),
        ({"jobClasses": {f"c{n}": {"namespaces": MANY} for n in range(100)}}, "jobClasses"),
    ],
    ids=["receivers", "classes"],
)
def test_values_too_large_for_the_operators_environment_are_reported(values: Any, name: str, tmp_path: Path) -> None:
    """Linux does not start a program with a variable of more than 128 KiB."""
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template("--set", "key.existingSecret=given", "--values", str(tmp_path / "values.yaml"))
    assert f"{name}: 1" in refused.value.stderr and "accepts at most 100000" in refused.value.stderr


@needs_helm
@pytest.mark.parametrize(("interval", "taken"), [("1m30s", True), ("500ms", True), ("1s1m", False), ("0s", False)])
def test_an_interval_must_be_a_prometheus_duration(interval: str, taken: bool) -> None:
    words = f"key.existingSecret=given,metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.interval={interval}"
    if taken:
        assert f"interval: {interval}," in template("--set", words)
    else:
        with pytest.raises(subprocess.CalledProcessError, match="returned non-zero"):
            template("--set", words)


@needs_helm
@pytest.mark.parametrize("value", ["isolation.metricsFrom", "dashboard.ingressFrom"])
@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({"namespaceSelector": {"matchLabel": {"team": "monitoring"}}}, "'matchLabel' not allowed"),
        ({"namespaceSelector": {"team": "monitoring"}}, "'team' not allowed"),
        ({"podSelector": {"matchLabels": {"tier": 1}}}, "got number, want string"),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "Is"}]}}, "operator"),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "In"}]}}, "missing property 'values'"),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": []}]}}, "minItems"),
        ({"podSelector": {"matchExpressions": [{"key": "team", "operator": "Exists", "values": ["a"]}]}}, "maxItems"),
        ({"podSelector": {"matchLabels": {"team": "a b"}}}, "matchLabels/team"),
        ({"ipBlock": {"cidr": "10.0.0.0"}}, "cidr"),
        ({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, "maxProperties"),
        ({"namespaceSelector": {}, "podSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}, ""),
        ({"ipBlock": {"cidr": "fd00::/8", "except": ["fd00:1::/32"]}}, ""),
    ],
)
def test_a_faulty_network_policy_peer_is_reported(value: str, peer: Any, words: str) -> None:
    """Otherwise, the API server would refuse each job's policy and leave the job unprotected, or
    drop the field and admit all peers.
    """
    given = ("--set", "key.existingSecret=given,dashboard.enabled=true", "--set-json", f"{value}={json.dumps([peer])}")
    if not words:
        assert template(*given)
        return
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template(*given)
    assert words in refused.value.stderr and f"/{value.replace('.', '/')}/0" in refused.value.stderr


def test_a_faulty_address_of_a_metrics_peer_does_not_end_the_isolation_of_jobs() -> None:
    """The schema cannot tell that 10.0.0.1/8 has address bits beyond its prefix, for which the API
    server would refuse the NetworkPolicy of each job.
    """

    def peers(block: dict[str, Any]) -> tuple[Any, ...]:
        given = {"DDPJOB_OPERATOR_METRICS_PEERS": json.dumps([{"podSelector": {}}, {"ipBlock": block}])}
        return Settings.from_environment({"DDPJOB_OPERATOR_KEY": "k" * 16, **given}).metrics_peers

    cleared = {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}
    assert peers({"cidr": "10.0.0.1/8", "except": ["10.1.2.3/16"]}) == ({"podSelector": {}}, {"ipBlock": cleared})
    for wrong in ({"cidr": "10.0.0.0/33"}, {"cidr": "10.0.0.0/8", "except": ["ten"]}, {}):
        with pytest.raises(SettingsError, match="METRICS_PEERS has ipBlock"):
            peers(wrong)


@pytest.mark.parametrize(
    "given",
    [("METRICS_PEERS", text) for text in ('[{"ipBlock": null}]', '[{"ipBlock": []}]', "[null]", '["a"]', "null")]
    + [("METRICS_PEERS", '[{"ipBlock": {"cidr": "10.0.0.0/8", "except": 1}}]')]
    + [(name, "null") for name in ("NODE_CONDITIONS", "NODE_TAINTS", "RECEIVERS", "CLASSES")],
)
def test_a_malformed_json_setting_is_named_at_the_start(given: tuple[str, str]) -> None:
    """The chart's schema refuses such values, but others may set the operator's variables."""
    name, value = given
    with pytest.raises(SettingsError, match=f"DDPJOB_OPERATOR_{name}=.*: must be "):
        Settings.from_environment({"DDPJOB_OPERATOR_KEY": "k" * 16, f"DDPJOB_OPERATOR_{name}": value})


@pytest.mark.parametrize("name", ["HEALTH_PORT", "METRICS_PORT", "WORKERS"])
@pytest.mark.parametrize("value", ["9999999", "9" * 5000, "-1", "\u00b2"])
def test_a_number_out_of_range_is_named_at_the_start(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"DDPJOB_OPERATOR_{name}=.*: must be an integer from 0 to "):
        Settings.from_environment({"DDPJOB_OPERATOR_KEY": "k" * 16, f"DDPJOB_OPERATOR_{name}": value})


@needs_helm
def test_a_name_that_looks_like_a_number_stays_a_string() -> None:
    """A namespace may be called 2026, but the API server refuses an object whose namespace is a
    number.
    """
    names = (
        "key.existingSecret",
        "priorityClassName",
        "serviceAccount.name",
        "dashboard.tlsSecret",
        "notify.secretName",
    )
    chosen = ",".join(f"{name}={2000 + number}" for number, name in enumerate(names))
    rendered = template(
        "--set", "dashboard.enabled=true", "--set-string", f"watchNamespaces={{2026}},{chosen}", "--namespace", "2027"
    )

    def numbers(body: Any) -> list[str]:
        if isinstance(body, list):
            return [found for one in body for found in numbers(one)]
        if not isinstance(body, dict):
            return []
        own = [f"{key}: {value}" for key, value in body.items() if isinstance(value, int) and 2000 <= value < 2100]
        return own + [found for value in body.values() for found in numbers(value)]

    assert numbers(list(yaml.safe_load_all(rendered))) == []
    assert all(f'"{2000 + number}"' in rendered for number in range(len(names))), "each value is rendered"
    assert 'namespace: "2026"' in rendered and 'namespace: "2027"' in rendered


@needs_helm
def test_the_dashboard_has_no_rights() -> None:
    found = dashboard()
    assert found.keys() == {"ServiceAccount", "Service", "NetworkPolicy", "Deployment"}, (
        "there is no Role, binding or Secret"
    )
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False is found["ServiceAccount"]["automountServiceAccountToken"]
    assert pod["volumes"] == [{"name": "ca", "configMap": {"name": "kube-root-ca.crt"}}]
    rendered = helm("template", "mine", str(CHART), "--set", "dashboard.enabled=true")
    bound = [body for body in yaml.safe_load_all(rendered) if body and body["kind"].endswith("RoleBinding")]
    assert bound and "mine-operator-dashboard" not in str(bound)


@needs_helm
def test_the_dashboard_is_not_selected_as_a_pod_of_the_operator() -> None:
    """The operator's Deployment, Service and disruption budget, and the jobs' policies, select pods
    by labels.
    """
    labels = dashboard()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    rendered = helm("template", "mine", str(CHART), "--set", "dashboard.enabled=true,replicas=2")
    for body in yaml.safe_load_all(rendered):
        if body and body["metadata"]["name"] in ("mine-operator", "mine-operator-metrics"):
            spec = body.get("spec", {})
            chosen = spec.get("selector", {})
            chosen = chosen.get("matchLabels", chosen)
            assert not chosen or not chosen.items() <= labels.items(), body["kind"]


@needs_helm
def test_the_dashboard_admits_the_peers_that_the_values_name() -> None:
    policy = dashboard()["NetworkPolicy"]["spec"]
    # The API server drops an empty list, so comparison tools would always report a change.
    assert "ingress" not in policy and policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": port} for port in (443, 6443)]}]
    peer = '[{"podSelector": {"matchLabels": {"app": "proxy"}}}]'
    given = dashboard("--set-json", f"dashboard.ingressFrom={peer}", "--set", "dashboard.port=9999")
    assert given["NetworkPolicy"]["spec"]["ingress"] == [
        {"from": yaml.safe_load(peer), "ports": [{"protocol": "TCP", "port": 9999}]}
    ]


@needs_helm
def test_every_value_of_the_dashboard_has_an_effect() -> None:
    values = "dashboard.hosts={jobs.example.com},dashboard.namespaces={two,three},dashboard.tlsSecret=pages"
    found = dashboard("--set", values)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["DDPJOB_DASHBOARD_HOSTS"] == '["jobs.example.com"]'
    assert yaml.safe_load(environment["DDPJOB_DASHBOARD_NAMESPACES"]) == ["two", "three", "one"]
    assert (
        environment["DDPJOB_DASHBOARD_TLS"] == "/tls"
        and {"name": "tls", "secret": {"secretName": "pages"}} in (pod["volumes"])
    )
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert found["Service"]["spec"]["ports"] == [{"name": "https", "port": 443, "targetPort": "pages"}]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] and context["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    notes = helm("install", "mine", str(CHART), "--dry-run=client", "--set", "dashboard.enabled=true")
    assert "port-forward service/mine-operator-dashboard 8300:http\n" in notes


def test_the_oldest_kubernetes_that_the_chart_supports_is_tested() -> None:
    """The version matches DDPJOB_CLUSTER_KUBERNETES=oldest."""
    named = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].removeprefix(">=").split(".")[:2]
    pins = (CHART.parents[1] / "tests" / "cluster" / "oldest" / "go.mod").read_text()
    assert f"require k8s.io/kubernetes v{'.'.join(named)}." in pins


def test_no_page_recommends_an_upgrade_with_reuse_values() -> None:
    """--reuse-values leaves out values that the previous chart did not have."""
    root = CHART.parents[1]
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *CHART.glob("*.md"), CHART / "templates" / "NOTES.txt"]
    assert [page.name for page in pages if " --reuse-values" in page.read_text()] == []


@needs_helm
@pytest.mark.parametrize("delete", [None, False, True])
@pytest.mark.parametrize(("values", "kind"), [("queues.kueue=true", "ClusterRole"), ("watchNamespaces={one}", "Role")])
def test_the_operator_may_delete_config_maps_only_if_the_values_allow_it(
    values: str, kind: str, delete: bool | None
) -> None:
    """OpenShift's OwnerReferencesPermissionEnforcement requires that right from every client that
    adds an owner.
    """
    chosen = "" if delete is None else f",rbac.deleteConfigMaps={str(delete).lower()}"
    rendered = yaml.safe_load_all(template("--set", f"key.existingSecret=given,{values}{chosen}"))
    (role,) = [b for b in rendered if b and (b["kind"], b["metadata"]["name"]) == (kind, "ddpjob-operator")]
    (verbs,) = [rule["verbs"] for rule in role["rules"] if rule["resources"] == ["configmaps"]]
    assert verbs == ["get", "list", "watch", "create", "patch", *(["delete"] if delete else [])]


@needs_helm
@pytest.mark.parametrize(("name", "group"), [("kueue", "kueue.x-k8s.io"), ("volcano", "scheduling.volcano.sh")])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_role_grants_access_to_queues_only_if_the_values_allow_it(name: str, group: str, wanted: bool) -> None:
    """A namespace administrator may not create a Role with rights that they do not hold."""
    values = f"key.existingSecret=given,watchNamespaces={{one}},queues.{name}={str(wanted).lower()}"
    rendered = yaml.safe_load_all(template("--set", values))
    (role,) = [b for b in rendered if b and (b["kind"], b["metadata"]["name"]) == ("Role", "ddpjob-operator")]
    assert any(group in rule["apiGroups"] for rule in role["rules"]) is wanted


def operators_policy(*values: str) -> dict[str, Any] | None:
    """Return the spec of the NetworkPolicy that the chart renders for the operator's pods."""
    words = (word for value in values for word in ("--set-json" if "[" in value else "--set", value))
    found = yaml.safe_load_all(template("--set", "key.existingSecret=given,dashboard.enabled=true", *words))
    policies = [o for o in found if o and (o["kind"], o["metadata"]["name"]) == ("NetworkPolicy", "mine-operator")]
    return policies[0]["spec"] if policies else None


@needs_helm
def test_only_the_metrics_peers_can_connect_to_the_operators_pods() -> None:
    peer = '[{"podSelector": {"matchLabels": {"app": "prometheus"}}}]'
    admitted = (f"isolation.metricsFrom={peer}", "networkPolicy.enabled=true")
    assert operators_policy() is None, "off by default"
    assert operators_policy(*admitted, "metrics.port=9999") == {
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "ddpjob-operator", "app.kubernetes.io/instance": "mine"}
        },
        "policyTypes": ["Ingress"],
        "ingress": [{"from": json.loads(peer), "ports": [{"protocol": "TCP", "port": 9999}]}],
    }
    for closed in (("networkPolicy.enabled=true",), (*admitted, "metrics.port=0")):
        policy = operators_policy(*closed)
        # The API server drops an empty list, so comparison tools would always report a change.
        assert policy is not None and "ingress" not in policy and policy["policyTypes"] == ["Ingress"]


@needs_helm
def test_the_security_page_lists_every_write_permission() -> None:
    text = (
        (CHART.parents[1] / "SECURITY.md").read_text().partition("### A compromised operator")[2].partition("RBAC")[0]
    )
    rendered = yaml.safe_load_all(template("--set", "key.existingSecret=given"))
    (role,) = [b for b in rendered if b and b["kind"] == "ClusterRole" and b["metadata"]["name"] == "ddpjob-operator"]
    named = {"poddisruptionbudgets": "disruption budgets"}
    for rule in role["rules"]:
        for resource in rule["resources"]:
            if {"create", "update", "patch", "delete"} & set(rule["verbs"]) and "/" not in resource:
                assert re.search(named.get(resource, resource), text, re.IGNORECASE), resource
            if "patch" in rule["verbs"]:
                assert re.search(rf"patch (and delete )?{resource}", text, re.IGNORECASE), resource


PACKAGE = runpy.run_path(str(CHART.parents[1] / "scripts" / "package_chart.py"))["package"]
DIGEST = f"sha256:{'0123456789abcdef' * 4}"


@needs_helm
def test_the_chart_of_a_release_refers_to_its_image_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(str(HELM)).parent}:/usr/bin:/bin")
    PACKAGE(DIGEST, tmp_path)
    [packed] = tmp_path.glob("ddpjob-operator-*.tgz")
    words = [str(HELM), "template", "mine", str(packed), "--set", "key.existingSecret=given,dashboard.enabled=true"]
    rendered = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    deployments = [body for body in yaml.safe_load_all(rendered) if body and body["kind"] == "Deployment"]
    images = [body["spec"]["template"]["spec"]["containers"][0]["image"] for body in deployments]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert images == [f"{values['image']['repository']}:{version}@{DIGEST}"] * 2
    with tarfile.open(packed) as archive:
        taken = archive.extractfile("ddpjob-operator/values.yaml")
        assert taken is not None
        assert yaml.safe_load(taken) == {**values, "image": {**values["image"], "digest": DIGEST}}


@pytest.mark.parametrize("digest", ["", "sha256:12", f"{DIGEST}\n", DIGEST.upper()])
def test_a_chart_is_not_packaged_with_an_invalid_digest(digest: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not the digest of an image; write sha256: and 64 hexadecimal digits"):
        PACKAGE(digest, tmp_path)
    assert not list(tmp_path.iterdir())


def operators_pod(values: dict[str, Any], tmp_path: Path, name: str = "mine-operator") -> dict[str, Any]:
    """Return the pod template that the chart renders for a Deployment."""
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    rendered = template(
        "--set", "key.existingSecret=given,dashboard.enabled=true", "--values", str(tmp_path / "values.yaml")
    )
    deployments = [o for o in yaml.safe_load_all(rendered) if o and o["kind"] == "Deployment"]
    [found] = [o for o in deployments if o["metadata"]["name"] == name]
    template_of_pod: dict[str, Any] = found["spec"]["template"]
    return template_of_pod


@needs_helm
def test_common_labels_are_on_every_object_and_pod(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"commonLabels": {"team": "ml", "cost-center": "4711"}}))
    chosen = f"replicas=2,dashboard.enabled=true,networkPolicy.enabled=true,{MONITORING}"
    peer = 'isolation.metricsFrom=[{"podSelector": {}}]'
    rendered = helm(
        "template", "mine", str(CHART), "--values", str(tmp_path / "values.yaml"), "--set", chosen, "--set-json", peer
    )
    objects = [body for body in yaml.safe_load_all(rendered) if body]
    labelled = [body["metadata"] for body in objects]
    labelled += [body["spec"]["template"]["metadata"] for body in objects if body["kind"] == "Deployment"]
    assert len(objects) > 15 and len(labelled) == len(objects) + 2
    for metadata in labelled:
        assert {"team": "ml", "cost-center": "4711"}.items() <= metadata["labels"].items(), metadata
    selectors = [body["spec"]["selector"] for body in objects if body["kind"] in ("Deployment", "Service")]
    assert "team" not in str(selectors), "a changed label must not change a Deployment's selector"


@needs_helm
def test_pod_values_apply_to_both_deployments(tmp_path: Path) -> None:
    """Additions to the security contexts keep the rest, so that the Pod Security Standard is
    still met.
    """
    values = {
        "runtimeClassName": "gvisor",
        "podSecurityContext": {"runAsUser": 1000, "seLinuxOptions": {"level": "s0:c1"}},
        "securityContext": {"runAsGroup": 2000},
    }
    for name in ("mine-operator", "mine-operator-dashboard"):
        pod = operators_pod(values, tmp_path, name)["spec"]
        assert pod["runtimeClassName"] == "gvisor"
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "runAsUser": 1000,
            "seLinuxOptions": {"level": "s0:c1"},
        }
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "runAsGroup": 2000,
        }


@needs_helm
@pytest.mark.parametrize("secret", ["", "hooks"])
def test_additional_volumes_are_mounted_into_the_operator(secret: str, tmp_path: Path) -> None:
    values = {
        "notify": {"secretName": secret},
        "extraVolumes": [{"name": "ca", "configMap": {"name": "company-ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/company", "readOnly": True}],
    }
    pod = operators_pod(values, tmp_path)["spec"]
    own = ["receivers"] if secret else []
    assert [volume["name"] for volume in pod["volumes"]] == [*own, "ca"]
    assert [mount["name"] for mount in pod["containers"][0]["volumeMounts"]] == [*own, "ca"]
    assert pod["volumes"][-1] == values["extraVolumes"][0]
    shown = operators_pod(values, tmp_path, "mine-operator-dashboard")["spec"]
    assert [volume["name"] for volume in shown["volumes"]] == ["ca"] and "company-ca" not in str(shown)


@needs_helm
def test_a_spread_constraint_replaces_the_default_and_selects_the_operator(tmp_path: Path) -> None:
    given = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {"matchLabels": {"app.kubernetes.io/name": "ddpjob-operator", "app.kubernetes.io/instance": "mine"}}
    pod = operators_pod({"replicas": 2, "topologySpreadConstraints": [given]}, tmp_path)["spec"]
    assert pod["topologySpreadConstraints"] == [{**given, "labelSelector": own}]
    mine = {**given, "labelSelector": {"matchLabels": {"a": "b"}}}
    pod = operators_pod({"topologySpreadConstraints": [mine]}, tmp_path)["spec"]
    assert pod["topologySpreadConstraints"] == [mine]
    default = operators_pod({"replicas": 2}, tmp_path)["spec"]["topologySpreadConstraints"]
    assert [constraint["topologyKey"] for constraint in default] == ["kubernetes.io/hostname"]


@needs_helm
@pytest.mark.parametrize(
    ("value", "given", "words"),
    [
        ("commonLabels", {"team": 1}, "/commonLabels/team"),
        ("commonLabels", {"team": "a b"}, "/commonLabels/team"),
        ("commonLabels", {"app.kubernetes.io/name": "x"}, "the chart sets the label app.kubernetes.io/name itself"),
        ("runtimeClassName", True, "/runtimeClassName"),
        ("podSecurityContext", {"runAsUser": "1000"}, "/podSecurityContext/runAsUser"),
        ("podSecurityContext", {"runAsNonroot": True}, "'runAsNonroot' not allowed"),
        ("securityContext", {"privileged": "no"}, "/securityContext/privileged"),
        ("securityContext", {"capabilities": {"drop": "ALL"}}, "/securityContext/capabilities/drop"),
        ("topologySpreadConstraints", {"maxSkew": 1}, "/topologySpreadConstraints"),
        ("topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "zone"}], "missing property 'whenUnsatisfiable'"),
        ("extraVolumes", [{"name": "ca"}], "/extraVolumes/0"),
        ("extraVolumes", [{"name": "receivers", "emptyDir": {}}], "/extraVolumes/0/name"),
        ("extraVolumeMounts", [{"name": "ca", "path": "/ca"}], "missing property 'mountPath'"),
        ("extraVolumeMounts", [{"name": "ca", "mountPath": "ca"}], "/extraVolumeMounts/0/mountPath"),
    ],
)
def test_a_mistake_in_a_value_of_pods_is_reported(value: str, given: Any, words: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template("--set", "key.existingSecret=given", "--set-json", f"{value}={json.dumps(given)}")
    assert words in refused.value.stderr
