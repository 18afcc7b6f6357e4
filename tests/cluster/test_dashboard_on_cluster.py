"""The chart's dashboard on a real cluster: two viewers with different rights, and no access without
a token.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from conftest import create_namespace, remove_namespace
from install_fixtures import Release
from machine import slowness
from testcluster import processes
from testcluster.cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dashboard(release: Release) -> Release:
    release.install("--set", "dashboard.enabled=true")
    return release


@pytest.fixture
def teams(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Create two namespaces, each with a suspended job and an account with the role view. Yield
    each namespace's token.
    """
    names = [f"team-{letter}-{secrets.token_hex(2)}" for letter in "ab"]
    tokens = {}
    for name in names:
        create_namespace(cluster, name)
        cluster.kubectl("create", "serviceaccount", "viewer", "--namespace", name)
        cluster.kubectl("create", "rolebinding", "viewer", "--clusterrole=view", f"--serviceaccount={name}:viewer",
                        "--namespace", name)  # fmt: skip
        spec = {"image": "none.example/none", "script": "none.py", "runPolicy": {"suspend": True}}
        body = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": f"job-of-{name}"}}
        cluster.apply({**body, "spec": spec}, namespace=name)
        tokens[name] = cluster.kubectl("create", "token", "viewer", "--namespace", name).strip()
    yield tokens
    for name in names:
        remove_namespace(cluster, name)


@contextlib.contextmanager
def forwarded(release: Release) -> Iterator[str]:
    """Yield the dashboard's address through `kubectl port-forward`, as a user's browser would open
    it.
    """
    program = [str(release.cluster.programs / "kubectl"), "--kubeconfig", str(release.cluster.kubeconfig)]
    where = ["--namespace", release.namespace, "port-forward", "service/ddpjob-operator-dashboard", ":http"]
    with subprocess.Popen([*program, *where], stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", forward.stdout.readline())
            assert found is not None
            yield f"http://localhost:{found[1]}"
        finally:
            forward.terminate()


def ask(url: str, token: str = "", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(
        url, headers={**headers, **({"Authorization": f"Bearer {token}"} if token else {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=60 * slowness()) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_two_viewers_see_only_their_own_namespaces(dashboard: Release, teams: dict[str, str]) -> None:
    first, second = teams
    with forwarded(dashboard) as address:
        processes.wait_for(
            "the aggregated right to view jobs", lambda: ask(address, teams[first])[0] == 200, timeout=60
        )
        for own, other in ((first, second), (second, first)):
            status, page = ask(address, teams[own])
            assert status == 200 and f"job-of-{own}" in page and f"job-of-{other}" not in page
            assert f"as system:serviceaccount:{own}:viewer" in page
            assert ask(f"{address}/jobs/{own}/job-of-{own}", teams[own])[0] == 200
            status, page = ask(f"{address}/jobs/{other}/job-of-{other}", teams[own])
            assert status == 404 and "none.example" not in page
        for token in ("", "made-up", teams[first][:-4] + "AAAA"):
            for path in ("/", f"/jobs/{first}/job-of-{first}", f"/jobs/{first}/job-of-{first}/manifest"):
                status, page = ask(address + path, token)
                assert status == 401 and "none.example" not in page
        dashboard.cluster.kubectl("delete", "rolebinding", "viewer", "--namespace", first)
        began = time.monotonic()
        processes.wait_for("the end of the first one's right", lambda: ask(address, teams[first])[0] == 403, timeout=60)
        print(f"a revoked right stopped working after {time.monotonic() - began:.1f} s")
        assert ask(address, teams[second])[0] == 200


def test_the_dashboards_pod_has_no_credentials_and_its_account_no_rights(dashboard: Release) -> None:
    (pod,) = dashboard.json("get", "pods", "--selector=app.kubernetes.io/name=ddpjob-dashboard")["items"]
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == ["/ca"], "the pod has no token and no Secret"
    code = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io/serviceaccount/token'))"
    name = pod["metadata"]["name"]
    there = dashboard.cluster.kubectl("exec", name, "--namespace", dashboard.namespace, "--", "python3", "-c", code)
    assert there.strip() == "False"
    account = f"system:serviceaccount:{dashboard.namespace}:ddpjob-operator-dashboard"
    program = [dashboard.cluster.programs / "kubectl", "--kubeconfig", dashboard.cluster.kubeconfig]
    for resource in ("ddpjobs.ddpjob.io", "pods", "secrets", "configmaps"):
        asked = (*program, "auth", "can-i", "list", resource, "--as", account, "--namespace", dashboard.namespace)
        assert not processes.succeeds(*asked), resource
