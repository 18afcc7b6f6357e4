"""The chart's rendered objects, and the operator that Helm installs from it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import create_namespace, remove_namespace
from ddpjob.controller.operator_shards import shard_of
from go_modules import folder_of
from install_fixtures import CHART, Release, helm, restricted_namespace
from jobs import FAST, Jobs, job, sleeping, steps_job
from machine import slowness
from testcluster import processes
from testcluster.cluster import Cluster
from testcluster.settings import CHECKOUT, ClusterError

Json = dict[str, Any]


# --- what it renders --------------------------------------------------------------------------------------------


def render(cluster: Cluster, *words: str) -> list[Json]:
    given = ("--namespace", "ddpjob-system", "--set", "key.existingSecret=given")
    text = helm(cluster, "template", "ddpjob", str(CHART), *given, *words)
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(documents: list[Json], *kinds: str) -> list[Json]:
    return [document for document in documents if document["kind"] in kinds]


def container(documents: list[Json]) -> Json:
    (deployment,) = of_kind(documents, "Deployment")
    found: Json = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


EVERY_VALUE = CHECKOUT / "tests" / "unit" / "chart_values.yaml"


def test_helm_lint_accepts_the_defaults_and_every_value(cluster: Cluster) -> None:
    for words in ((), ("--values", str(EVERY_VALUE)), ("--set", "watchNamespaces={one,two}")):
        assert "0 chart(s) failed" in helm(cluster, "lint", "--strict", str(CHART), *words)


def test_every_value_of_the_operator_has_its_effect(cluster: Cluster) -> None:
    """tests/unit/test_chart.py checks that the file contains every value, and that the dashboard's
    values have an effect.
    """
    rendered = render(cluster, "--values", str(EVERY_VALUE))
    documents = [body for body in rendered if body["metadata"]["name"] != "training-dashboard"]
    assert all(body["metadata"]["labels"]["cost-center"] == "research" for body in rendered)
    (deployment,) = of_kind(documents, "Deployment")
    pod = deployment["spec"]["template"]
    assert deployment["metadata"]["name"] == "training"
    assert deployment["spec"]["replicas"] == 5
    (sharded,) = of_kind(render(cluster, "--set", "shards=3"), "Deployment")
    assert sharded["spec"]["replicas"] == 3, "there is one Lease per shard"
    assert pod["metadata"]["labels"]["team"] == "ml"
    assert pod["metadata"]["annotations"]["note"] == "hello"
    spec = pod["spec"]
    assert spec["serviceAccountName"] == "given"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert spec["nodeSelector"] == {"pool": "system"}
    assert spec["tolerations"] == [{"key": "pool", "operator": "Exists"}]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["runtimeClassName"] == "gvisor"
    profile = {"type": "Localhost", "localhostProfile": "operator.json"}
    assert spec["securityContext"] == {"runAsNonRoot": False, "seccompProfile": profile}
    [spread] = spec["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["labelSelector"]) == ("zone", deployment["spec"]["selector"])
    operator = container(documents)
    digest = "0123456789abcdef" * 4
    assert operator["image"] == f"registry.example:5000/team/operator:v2@sha256:{digest}"
    assert deployment["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in operator["env"]
    (budget,) = of_kind(documents, "PodDisruptionBudget")
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    (policy,) = of_kind(documents, "NetworkPolicy")
    assert policy["spec"]["podSelector"] == deployment["spec"]["selector"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 9191}]
    assert operator["imagePullPolicy"] == "Always"
    assert operator["resources"] == {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    environment = {variable["name"]: variable for variable in operator["env"]}
    assert environment["DDPJOB_OPERATOR_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "given", "key": "key"}
    expected = {
        "WORKERS": "4",
        "CODE_IMAGE": "registry.example:5000/team/git:2",
        "NODE_CONDITIONS": '["GpuBroken=True"]',
        "NODE_TAINTS": '["example.com/broken"]',
        "SHARDS": "3",
        "LOG_LEVEL": "DEBUG",
        "HEALTH_PORT": "8181",
        "METRICS_PORT": "9191",
        "LEASE_NAMESPACE": "ddpjob-system",
        "RECEIVERS": '{"all":["*"],"team":["vision"]}',
        "RECEIVERS_FOLDER": "/etc/ddpjob/receivers",
        "NOTIFY_LINK": "https://grafana/{namespace}/{job}",
        "CLASSES": '{"h100":{"limits":{"maxNodes":4},"spec":{"image":"train:1"}}}',
        "METRICS_PEERS": '[{"namespaceSelector":{"matchLabels":{"team":"monitoring"}}}]',
    }
    assert {name: environment[f"DDPJOB_OPERATOR_{name}"]["value"] for name in expected} == expected
    assert operator["volumeMounts"] == [
        {"name": "receivers", "mountPath": "/etc/ddpjob/receivers", "readOnly": True},
        {"name": "ca", "mountPath": "/etc/ssl/ours", "readOnly": True},
    ]
    assert spec["volumes"] == [
        {"name": "receivers", "secret": {"secretName": "webhooks"}},
        {"name": "ca", "configMap": {"name": "our-ca"}},
    ]
    assert operator["securityContext"]["capabilities"] == {"drop": ["NET_RAW"]}
    assert not {"kueue.x-k8s.io", "scheduling.volcano.sh"} & {
        group for role in of_kind(documents, "ClusterRole") for rule in role["rules"] for group in rule["apiGroups"]
    }
    assert {document["kind"] for document in documents}.isdisjoint({"Secret", "ServiceAccount"})
    (monitor,) = of_kind(documents, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"] == [{"port": "metrics", "interval": "15s", "honorLabels": True}]
    (pods,) = of_kind(documents, "PodMonitor")
    assert pods["metadata"]["labels"]["release"] == "prometheus" and pods["spec"]["namespaceSelector"] == {"any": True}
    ports = {(e["port"], e["interval"], e["honorLabels"]) for e in pods["spec"]["podMetricsEndpoints"]}
    assert ports == {("coordinator", "20s", False), ("metrics", "20s", False)}
    (rules,) = of_kind(documents, "PrometheusRule")
    source = yaml.safe_load((CHART / "monitoring" / "alerts.yaml").read_text())["groups"]
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert [a["expr"] for a in alerts] == [rule["expr"] for group in source for rule in group["rules"]]
    assert alerts[0]["annotations"]["runbook_url"] == "https://wiki/ddpjob#ddpjobfailed"
    boards = [d for d in of_kind(documents, "ConfigMap") if "-dashboard-" in d["metadata"]["name"]]
    for board in boards:
        assert board["metadata"]["labels"]["grafana_dashboard"] == "ml"
        assert board["metadata"]["annotations"] == {"grafana_folder": "Training"}
        (name,) = board["data"]
        assert board["data"][name] == (CHART / "monitoring/dashboards" / name.removeprefix("ddpjob-")).read_text()
    assert len(boards) == 3


PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"


def test_the_definitions_of_the_prometheus_operator_accept_the_monitors_and_rules(cluster: Cluster) -> None:
    kinds = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    served = ",".join(f"{kind.lower()}s.monitoring.coreos.com" for kind in kinds)
    folder = folder_of(PROMETHEUS_OPERATOR) / "example" / "prometheus-operator-crd"
    files = [f"--filename={folder}/monitoring.coreos.com_{kind.lower()}s.yaml" for kind in kinds]
    try:
        cluster.kubectl("apply", "--server-side", *files)
        processes.wait_for("the API server to serve them", lambda: cluster.succeeds("get", served, "-A"), timeout=60)
        for values in (["--values", str(EVERY_VALUE)], ["--set", "watchNamespaces={one,two}"]):
            enabled = ",".join(f"metrics.{name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "rules"))
            bodies = of_kind(render(cluster, *values, "--set", enabled), *kinds)
            assert len(bodies) == 3
            for body in bodies:
                body["metadata"]["namespace"] = "default"
            words = ("create", "--dry-run=server", "--validate=strict", "--filename=-")
            cluster.kubectl(*words, input_text=yaml.safe_dump_all(bodies))
    finally:
        cluster.kubectl("delete", "--ignore-not-found", *files)


def test_jobs_of_chosen_namespaces_are_scraped_there(cluster: Cluster) -> None:
    documents = render(cluster, "--set", "metrics.podMonitor.enabled=true,watchNamespaces={one,two}")
    assert of_kind(documents, "PodMonitor")[0]["spec"]["namespaceSelector"] == {"matchNames": ["one", "two"]}
    assert not of_kind(documents, "PrometheusRule", "ConfigMap", "ServiceMonitor"), "these objects are off by default"


def test_the_operator_reads_every_variable_that_the_chart_sets(cluster: Cluster) -> None:
    """Each variable has the intended value."""
    from ddpjob.controller.operator_settings import PREFIX, Settings

    values = {"DDPJOB_OPERATOR_KEY": "k" * 48, "DDPJOB_OPERATOR_IDENTITY": "pod"}
    documents = render(cluster, "--set", "watchNamespaces={one,two}")
    assert not of_kind(documents, "PodDisruptionBudget"), "with one replica, a disruption budget would protect nothing"
    for variable in container(documents)["env"]:
        name = variable["name"].removeprefix(PREFIX)
        assert name.lower() in Settings.__dataclass_fields__ or name in (
            "NODE_CONDITIONS",
            "NODE_TAINTS",
            "NOTIFY_LINK",
            "RECEIVERS_FOLDER",
        )
        values.setdefault(variable["name"], variable.get("value", ""))
    settings = Settings.from_environment(values)
    assert settings.node_health.conditions and settings.node_health.taints
    assert settings.namespaces == ("one", "two")
    assert settings.metrics_peers == ()
    (deployment,) = of_kind(documents, "Deployment")
    assert settings.peer == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ddpjob-system"}},
        "podSelector": deployment["spec"]["selector"],
    }
    assert (settings.lease_namespace, settings.lease_name) == ("ddpjob-system", "ddpjob-operator")


def test_a_list_of_namespaces_needs_no_cluster_role(cluster: Cluster) -> None:
    """The Role has the same name in every release, so Helm refuses a second release for the
    namespace.
    """
    documents = render(cluster, "--set", "watchNamespaces={one,two}", "--set", "fullnameOverride=mine")
    assert not of_kind(documents, "ClusterRole", "ClusterRoleBinding")
    roles = {(role["metadata"]["namespace"], role["metadata"]["name"]) for role in of_kind(documents, "Role")}
    assert roles == {("one", "ddpjob-operator"), ("two", "ddpjob-operator"), ("ddpjob-system", "mine-lease")}
    assert {b["metadata"]["namespace"] for b in of_kind(documents, "RoleBinding")} == {"one", "two", "ddpjob-system"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replica=2", "additional properties 'replica' not allowed"),
        ("logLevel=LOUD", "/logLevel"),
        ("replicas=-1", "/replicas"),
        ("shards=0", "/shards"),
        ("image.tag=a b", "/image/tag"),
        ("watchNamespaces=one", "/watchNamespaces"),
        ("watchNamespaces={One}", "/watchNamespaces/0"),
        ("metrics.port=80", "/metrics/port"),
        ("metrics.rules.runbooks=wiki", "/metrics/rules/runbooks"),
        ("resources.limits.memory=lots", "/resources/limits/memory"),
        ("key.existing=mine", "/key"),
        ("key.existingSecret=", "set key.existingSecret=ddpjob-key"),
        ("image.digest=sha256:12", "/image/digest"),
        ("isolation.metricsFrom[0].pods=all", "/isolation/metricsFrom/0"),
        ("updateStrategy.type=Sudden", "/updateStrategy/type"),
        ("extraEnv[0].name=DDPJOB_OPERATOR_KEY", "/extraEnv/0/name"),
        ("podLabels.app\\.kubernetes\\.io/instance=mine", "remove it from podLabels"),
        ("serviceAccount.create=false", "serviceAccount.name"),
        ("notify.receivers.team={*}", "set notify.secretName"),
        ("notify.secretName=a,notify.receivers.team={Vision}", "/notify/receivers/team/0"),
        ("notify.link=example", "/notify/link"),
        ("metrics.port=0,metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.enabled"),
    ],
)
def test_an_invalid_value_of_the_chart_is_reported(cluster: Cluster, setting: str, words: str) -> None:
    with pytest.raises(ClusterError) as refused:
        render(cluster, "--set", setting)
    assert words in str(refused.value).replace(".", "/") or words in str(refused.value)


# --- for some namespaces ----------------------------------------------------------------------------------------


def can(release: Release, verb: str, resource: str, namespace: str | None = None, subresource: str = "") -> bool:
    """Return whether the operator may do this. `resource` may be a single object: TYPE/NAME."""
    account = f"system:serviceaccount:{release.namespace}:ddpjob-operator"
    where = ["--namespace", namespace] if namespace else ["--all-namespaces"]
    where += ["--subresource", subresource] if subresource else []
    try:
        return release.cluster.kubectl("auth", "can-i", verb, resource, "--as", account, *where).strip() == "yes"
    except ClusterError:  # kubectl exits with 1 if the answer is `no`
        return False


def ready(release: Release) -> bool:
    pods = release.pods()
    return bool(pods) and all(
        c["ready"] for pod in pods for c in pod["status"].get("containerStatuses", [{"ready": False}])
    )


@pytest.fixture
def jobs(cluster: Cluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace)


@pytest.fixture
def uninstalled(release: Release) -> Iterator[Release]:
    yield release
    release.uninstall()


def test_the_operator_runs_jobs_only_in_its_namespaces(uninstalled: Release, jobs: Jobs) -> None:
    """The operator has no rights over the whole cluster, not even to read the definition of
    DDPJob.
    """
    release = uninstalled
    release.install("--set", f"watchNamespaces={{{jobs.namespace}}}")
    jobs.apply(steps_job("one", 5, nodes=1, recovery=FAST))
    jobs.wait_phase("one", "Complete")
    assert can(release, "create", "pods", jobs.namespace)
    assert not can(release, "create", "pods", "default")
    assert not can(release, "list", "customresourcedefinitions.apiextensions.k8s.io")
    assert release.log().count("nodes are not watched") == 1, "the missing right is logged only once"
    assert "Traceback" not in release.log()


# --- for all namespaces, with the defaults ----------------------------------------------------------------------


ALLOWED = {
    "ddpjobs.ddpjob.io": {"get", "list", "watch", "delete"},
    "ddpjobs.ddpjob.io/status": {"update"},
    "pods": {"get", "list", "watch", "create", "delete", "patch"},
    "services": {"get", "list", "watch", "create"},
    "configmaps": {
        "get",
        "list",
        "watch",
        "create",
        "patch",
        "delete",
    },  # delete is needed for OpenShift's plugin, which is enabled
    "secrets": {"create"},
    "networkpolicies.networking.k8s.io": {"get", "list", "watch", "create"},
    "poddisruptionbudgets.policy": {"get", "list", "watch", "create"},
    "podgroups.scheduling.k8s.io": {"get", "list", "watch", "create", "delete"},
    "podgroups.scheduling.volcano.sh": {"get", "list", "watch", "create", "delete"},
    "workloads.kueue.x-k8s.io": {"get", "list", "watch", "create", "delete"},
    "workloads.kueue.x-k8s.io/status": {"update"},
    "resourceflavors.kueue.x-k8s.io": {"get"},
    "workloadpriorityclasses.kueue.x-k8s.io": {"get"},
    "priorityclasses.scheduling.k8s.io": {"get"},
    "leases.coordination.k8s.io": {"create"},
    "leases.coordination.k8s.io/ddpjob-jobs": {"get", "update"},
    "nodes": {"get", "list", "watch"},
    "persistentvolumeclaims": {"get", "create"},
    "events.events.k8s.io": {"create"},
    "customresourcedefinitions.apiextensions.k8s.io": {"list", "watch"},
}
FORBIDDEN = ("secrets", "deployments.apps", "namespaces", "serviceaccounts", "leases.coordination.k8s.io")


def test_the_operator_has_exactly_the_rights_that_it_uses(installed_operator: Release) -> None:
    """The rules and the API server's answers are both checked."""
    role = installed_operator.json("get", "clusterrole", "ddpjob-operator")
    rights: dict[str, set[str]] = {}
    for rule in role["rules"]:
        named = "".join(f"/{name}" for name in rule.pop("resourceNames", ()))
        assert rule.keys() == {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                kind, _, sub = resource.partition("/")
                name = ".".join(part for part in (kind, group) if part) + (f"/{sub}" if sub else "") + named
                rights.setdefault(name, set()).update(rule["verbs"])
    assert rights == ALLOWED
    bound = installed_operator.json("get", "clusterrolebindings")["items"]
    account = {"kind": "ServiceAccount", "name": "ddpjob-operator", "namespace": installed_operator.namespace}
    assert [b["metadata"]["name"] for b in bound if account in b.get("subjects", ())] == ["ddpjob-operator"]
    assert can(installed_operator, "create", "pods")
    for resource in FORBIDDEN:
        assert not can(installed_operator, "get", resource), resource
    assert can(installed_operator, "update", "ddpjobs.ddpjob.io", subresource="status")
    assert not can(installed_operator, "create", "pods", subresource="exec")


def test_the_operator_may_use_only_its_own_lease(installed_operator: Release) -> None:
    release = installed_operator
    assert can(release, "update", "leases.coordination.k8s.io/ddpjob-operator", release.namespace)
    for name in ("ddpjob-operator-0-of-2", "ddpjob-operator-9-of-10"):  # needed during an upgrade that changes `shards`
        assert can(release, "update", f"leases.coordination.k8s.io/{name}", release.namespace)
    assert not can(release, "update", "leases.coordination.k8s.io/other", release.namespace)
    assert not can(release, "get", "secrets", release.namespace)


def test_users_get_rights_through_the_built_in_roles(installed_operator: Release, namespace: str) -> None:
    cluster = installed_operator.cluster
    for role in ("edit", "view"):
        cluster.kubectl(
            "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}er", "--namespace", namespace
        )

    def may(user: str, verb: str, *resource: str) -> bool:
        program = (cluster.programs / "kubectl", "--kubeconfig", cluster.kubeconfig)
        return processes.succeeds(*program, "auth", "can-i", verb, *resource, "--as", user, "--namespace", namespace)

    for right in (
        ("editer", "create", "ddpjobs.ddpjob.io"),
        ("editer", "patch", "ddpjobs.ddpjob.io", "--subresource=scale"),
        ("viewer", "get", "ddpjobs.ddpjob.io"),
    ):
        processes.wait_for(f"the aggregated right {right}", lambda right=right: may(*right), timeout=30)
    assert not may("viewer", "create", "ddpjobs.ddpjob.io")
    assert not may("editer", "update", "ddpjobs.ddpjob.io", "--subresource=status")


def watches_begun(jobs: Jobs) -> int:
    """Return the number of watches of DDPJobs that the API server has received."""
    counts = (line for line in jobs.kubectl("get", "--raw=/metrics").splitlines() if '"ddpjobs"' in line)
    asked = (line for line in counts if line.startswith("apiserver_request_total") and 'verb="WATCH"' in line)
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in asked)


def test_a_job_completes_and_appears_in_metrics_and_events(installed_operator: Release, jobs: Jobs) -> None:
    before = watches_begun(jobs)
    jobs.apply(steps_job("one", 5, nodes=1, recovery=FAST))
    jobs.wait_phase("one", "Complete")
    assert watches_begun(jobs) - before < 20, "a watch continues after its events"
    assert "ddpjob.io/operator" in jobs.kubectl(
        "get", "events.events.k8s.io", "--output=jsonpath={.items[*].reportingController}"
    )
    assert "Traceback" not in installed_operator.log()
    for pod in installed_operator.pods():
        assert [c["restartCount"] for c in pod["status"]["containerStatuses"]] == [0]
        address = f"{pod['status']['podIP']}:9090"
        scraped = processes.run("curl", "--silent", "--fail", "--noproxy", "*", f"http://{address}/metrics")
        figures = dict(line.rsplit(" ", 1) for line in scraped.splitlines() if not line.startswith("#"))
        for name in ("jobs_created_total", "jobs_completed_total", "time_to_pods_seconds_count"):
            assert float(figures[f"ddpjob_{name}"]) >= 1, name
        own = f'job_name="one",namespace="{jobs.namespace}"'
        assert figures[f'ddpjob_job_phase{{{own},phase="Complete"}}'] == "1.0"
        assert 0 < float(figures[f"ddpjob_job_pod_seconds_total{{{own}}}"]) < 600
        assert f"ddpjob_job_useful_seconds_total{{{own}}}" in figures


def key_of(release: Release) -> bytes:
    return base64.b64decode(release.json("get", "secret", "ddpjob-operator-key")["data"]["key"])


def test_the_key_survives_an_upgrade_and_a_new_installation(installed_operator: Release) -> None:
    release = installed_operator
    key = key_of(release)
    assert len(key) == 48
    notes = release.install("--set", "logLevel=DEBUG")
    assert "rollout status" in notes and "helm show crds" not in notes, (
        "only values have changed, so the key is the same"
    )
    assert key_of(release) == key
    release.uninstall()
    assert key_of(release) == key
    release.install()
    assert key_of(release) == key


def test_uninstalling_leaves_running_jobs_alone(installed_operator: Release, jobs: Jobs) -> None:
    """Pods continue to train without an operator. A newly installed operator continues with the
    same pods.
    """
    release = installed_operator
    jobs.apply(steps_job("long", 300, nodes=1, recovery=FAST))
    jobs.wait_phase("long", "Running")
    pods = {name: pod["metadata"]["uid"] for name, pod in jobs.pods().items()}
    release.uninstall()
    step = jobs.step("long")
    time.sleep(3)
    assert {
        name: pod["metadata"]["uid"] for name, pod in jobs.pods().items() if pod["status"]["phase"] == "Running"
    } == pods
    release.install()
    jobs.wait("progress of the same pods", lambda: jobs.step("long") > step + 20)
    jobs.wait_phase("long", "Complete")
    assert {name: pod["metadata"]["uid"] for name, pod in jobs.pods().items()} == pods
    assert jobs.status("long")["restarts"]["counted"] == 0


def test_the_second_replica_takes_over_when_the_first_is_killed(installed_operator: Release, jobs: Jobs) -> None:
    release = installed_operator
    release.install("--set", "replicas=2")
    processes.wait_for("two pods ready", lambda: len(release.pods()) == 2 and ready(release), timeout=60)
    processes.wait_for(
        "a holder of the Lease",
        lambda: release.holder() in {pod["metadata"]["name"] for pod in release.pods()},
        timeout=30,
    )
    first = release.holder()
    release.kubectl("delete", "pod", first, "--force", "--grace-period=0")
    began = time.monotonic()
    processes.wait_for("another holder", lambda: release.holder() not in ("", first), timeout=60)
    # The Lease of a dead replica expires after 10 s, and is tried every 2 s.
    assert time.monotonic() - began < 20 * slowness()
    jobs.apply(steps_job("after", 5, nodes=1, recovery=FAST))
    jobs.wait_phase("after", "Complete")


def test_with_three_shards_and_one_replica_killed_no_action_is_repeated(
    installed_operator: Release, cluster: Cluster, namespace: str
) -> None:
    """In each shard, a job loses its operator and then a pod. After the return to a single shard,
    one replica acts for all jobs.
    """
    release, leases = installed_operator, [f"ddpjob-operator-{shard}-of-3" for shard in range(3)]
    release.install("--set", "shards=3")
    processes.wait_for("a replica per shard", lambda: len({*map(release.holder, leases)} - {""}) == 3, timeout=90)
    with contextlib.ExitStack() as stack:
        shares: dict[int, Jobs] = {}
        for number in itertools.count():
            name = f"{namespace}-{number}"
            if shard_of(name, 3) not in shares:
                create_namespace(cluster, name)
                stack.callback(remove_namespace, cluster, name)
                shares[shard_of(name, 3)] = Jobs(cluster, name)
            if len(shares) == 3:
                break
        for share in shares.values():
            share.apply(job("sleeps", nodes=1, command=sleeping()))
        for share in shares.values():
            share.wait_phase("sleeps", "Running")

        dead = release.holder(leases[1])
        release.kubectl("delete", "pod", dead, "--force", "--grace-period=0")
        for share in shares.values():
            share.kill("sleeps-0-0")
        for share in shares.values():
            share.wait("one pod in place of the lost one", lambda s=share: list(s.pods()) == ["sleeps-0-1"])
            share.wait_phase("sleeps", "Running")
            assert len(share.status("sleeps")["restarts"]["recent"]) == 1
        assert dead not in map(release.holder, leases)

        release.install("--set", "shards=1", "--set", "replicas=1")
        processes.wait_for("one replica", lambda: release.holder() and len(release.pods()) == 1, timeout=90)
        for share in shares.values():
            share.kill("sleeps-0-1")
        for share in shares.values():
            share.wait("one pod in place of the lost one", lambda s=share: list(s.pods()) == ["sleeps-0-2"])


def test_a_second_operator_for_a_watched_namespace_is_refused(uninstalled: Release, namespace: str) -> None:
    """Helm checks this without rights over the whole cluster. The operator for all namespaces
    detects the second one.
    """
    uninstalled.install("--set", f"watchNamespaces={{{namespace}}}")
    second = Release(uninstalled.cluster, uninstalled.image, namespace, "other")
    with pytest.raises(ClusterError, match=r'Role "ddpjob-operator".*(exists|owned|ownership|conflict)'):
        second.install("--set", f"watchNamespaces={{default,{namespace}}}")
    second.uninstall()
    with pytest.raises(ClusterError, match=f"the release {uninstalled.namespace}/ddpjob already watches the namespace"):
        second.install()
    uninstalled.uninstall()
    # as if Argo CD had applied the manifests
    second.kubectl("create", "role", "ddpjob-operator", "--verb=get", "--resource=pods")
    try:
        with pytest.raises(ClusterError, match="an operator that was not installed with Helm already watches the"):
            second.install()
    finally:
        second.kubectl("delete", "role", "ddpjob-operator")  # otherwise the next test's release would be refused
    second.uninstall()


def test_an_installation_under_a_different_name_keeps_the_key(installed_operator: Release) -> None:
    release = installed_operator
    key = key_of(release)
    release.install("--set", "fullnameOverride=renamed")
    renamed = release.json("get", "secret", "renamed-key")["data"]["key"]
    release.install()
    assert base64.b64decode(renamed) == key_of(release) == key


def test_an_operator_moved_together_with_its_key_continues_with_the_same_pods(
    installed_operator: Release, jobs: Jobs, tmp_path: Path
) -> None:
    """The operator moves to a different namespace and name, as docs/upgrade.md describes."""
    first = installed_operator
    jobs.apply(steps_job("long", 300, nodes=1, recovery=FAST))
    jobs.wait_phase("long", "Running")
    pods = {name: pod["metadata"]["uid"] for name, pod in jobs.pods().items()}
    second = Release(first.cluster, first.image, f"{first.namespace}-new", "moved")
    restricted_namespace(second.cluster, second.namespace)
    try:
        (tmp_path / "key").write_bytes(key_of(first))
        second.kubectl("create", "secret", "generic", "ddpjob-key", f"--from-file={tmp_path / 'key'}")
        first.uninstall()
        step = jobs.step("long")
        second.install("--skip-crds", "--set", "key.existingSecret=ddpjob-key")
        chosen = ("--field-selector", "metadata.name=ddpjob-jobs")
        second.cluster.kubectl("delete", "lease", "--all-namespaces", *chosen)
        jobs.wait("progress of the same pods", lambda: jobs.step("long") > step + 20)
        jobs.wait_phase("long", "Complete")
        assert {name: pod["metadata"]["uid"] for name, pod in jobs.pods().items()} == pods
        assert jobs.status("long")["restarts"]["counted"] == 0
    finally:
        second.uninstall()
        second.cluster.kubectl("delete", "namespace", second.namespace, "--wait=false")
        first.install()


def test_a_second_operator_for_the_whole_cluster_is_refused(installed_operator: Release, namespace: str) -> None:
    second = Release(installed_operator.cluster, installed_operator.image, namespace, "other")
    with pytest.raises(ClusterError, match=r'ClusterRole "ddpjob-operator".*(exists|owned|ownership|conflict)'):
        second.install()
    second.uninstall()
