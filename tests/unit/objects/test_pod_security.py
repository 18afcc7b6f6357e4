"""The pods and the Pod Security Standards: the profile `restricted` by default, and what
podTemplate may relax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from built import PLATFORM, container, job
from ddpjob.api.job_spec import Json
from ddpjob.objects.pods import as_non_root, build_coordinator, build_node

ROOT = Path(__file__).parents[3]
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def violations(pod: Json) -> Iterator[str]:
    """Yield the violations of the profile `restricted` (v1.36) that fields of Linux pods can
    have.
    """
    spec = pod["spec"]
    context = spec.get("securityContext", {})
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    for volume in spec.get("volumes", ()):
        if not volume.keys() - {"name"} <= VOLUMES:
            yield f"volume {volume['name']}"
    for one in [*spec["containers"], *spec.get("initContainers", ())]:
        own = one.get("securityContext", {})
        if own.get("privileged"):
            yield f"{one['name']}: privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{one['name']}: allowPrivilegeEscalation"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield f"{one['name']}: capabilities"
        if own.get("runAsNonRoot", context.get("runAsNonRoot")) is not True:
            yield f"{one['name']}: runAsNonRoot"
        if own.get("runAsUser", context.get("runAsUser")) == 0:
            yield f"{one['name']}: runAsUser"
        profile = own.get("seccompProfile", context.get("seccompProfile", {}))
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{one['name']}: seccompProfile"
        if any(port.get("hostPort") for port in one.get("ports", ())):
            yield f"{one['name']}: hostPort"


def pods(**spec: Any) -> list[Json]:
    made = job(**spec)
    nodes = [build_node(made, made.status, PLATFORM, index, 0) for index in (0, 1)]
    return [*nodes, build_coordinator(made, made.status, PLATFORM)]


@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
def test_pods_are_restricted_except_for_the_user_that_the_image_chooses(placement: str) -> None:
    """Many images run as root. If the namespace forbids that, the pod is created with
    runAsNonRoot.
    """
    storage = {"data": {"claimName": "data"}, "checkpoints": {"claimName": "saved"}}
    for pod in pods(rendezvous={"placement": placement}, storage=storage):
        assert {v.partition(": ")[2] for v in violations(pod)} == {"runAsNonRoot"}
        restricted = as_non_root(pod)
        assert restricted is not None and not list(violations(restricted))


def test_pods_get_no_service_account_token() -> None:
    for pod in pods():
        assert pod["spec"]["automountServiceAccountToken"] is False and "serviceAccountName" not in pod["spec"]


def test_the_user_in_the_template_is_kept() -> None:
    for context in ({"runAsNonRoot": False}, {"runAsUser": 0}, {"runAsUser": 1000, "runAsNonRoot": True}):
        for pod in pods(podTemplate={"spec": {"securityContext": context}}):
            assert pod["spec"]["securityContext"] == context | {"seccompProfile": {"type": "RuntimeDefault"}}
            assert as_non_root(pod) is None


def test_a_user_in_the_template_does_not_keep_the_pod_out_of_a_restricted_namespace() -> None:
    """Pod Security requires runAsNonRoot even if the user is not root (docs/pod-security.md)."""
    for pod in pods(podTemplate={"spec": {"securityContext": {"runAsUser": 10001, "runAsGroup": 0, "fsGroup": 10001}}}):
        restricted = as_non_root(pod)
        assert restricted is not None and restricted["spec"]["securityContext"]["runAsUser"] == 10001
        assert not list(violations(restricted))


def test_the_template_can_relax_the_defaults() -> None:
    template = {
        "spec": {
            "securityContext": {"seccompProfile": {"type": "Unconfined"}},
            "containers": [
                {
                    "name": "trainer",
                    "securityContext": {
                        "allowPrivilegeEscalation": True,
                        "capabilities": {"drop": [], "add": ["SYS_NICE"]},
                    },
                }
            ],
        }
    }
    for pod in pods(podTemplate=template):
        context = pod["spec"]["containers"][0]["securityContext"]
        assert context == {"allowPrivilegeEscalation": True, "capabilities": {"drop": [], "add": ["SYS_NICE"]}}
        assert pod["spec"]["securityContext"] == {"seccompProfile": {"type": "Unconfined"}}


@pytest.mark.parametrize(
    "context",
    [{"privileged": True}, {"capabilities": {"add": ["SYS_ADMIN"]}}, {"capabilities": {"add": ["CAP_SYS_ADMIN"]}}],
)
def test_no_default_contradicts_a_privilege_in_the_template(context: Json) -> None:
    """The API server refuses allowPrivilegeEscalation: false in combination with such a
    privilege.
    """
    template = {"spec": {"containers": [{"name": "trainer", "securityContext": context}]}}
    for pod in pods(podTemplate=template):
        given = pod["spec"]["containers"][0]["securityContext"]
        assert given.get("allowPrivilegeEscalation", True) or not (given.get("privileged") or "SYS_ADMIN" in str(given))


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, {"cpu": "2", "memory": "2Gi"}),
        ({"requests": {"cpu": "500m", "memory": "3Gi"}}, {"cpu": "2", "memory": "3Gi"}),
        ({"requests": {"cpu": 4, "memory": "900M"}}, {"cpu": 4, "memory": "2Gi"}),
        ({"limits": {"memory": "1Gi"}}, {"cpu": "2", "memory": "1Gi"}),
        (
            {"limits": {"cpu": "1", "memory": "512Mi", "example.com/x": 1}},
            {"cpu": "1", "memory": "512Mi", "example.com/x": 1},
        ),
    ],
)
def test_the_coordinator_states_requests_and_limits(given: Json, limits: Json) -> None:
    """A ResourceQuota may require them, and a LimitRange adds nothing to them."""
    pod = pods(rendezvous={"resources": given})[2]
    resources = container(pod, "coordinator")["resources"]
    assert resources["limits"] == limits and resources["requests"].keys() >= {"cpu", "memory"}


@pytest.mark.parametrize(
    ("given", "requests"),
    [
        ({"requests": {"memory": "1Gi"}}, {"cpu": "50m", "memory": "1Gi"}),
        ({"requests": {"cpu": "1"}}, {"cpu": "1", "memory": "400Mi"}),
        ({"requests": {"memory": "1Gi"}, "limits": {"cpu": "1"}}, {"memory": "1Gi"}),
        ({"requests": {}}, {"cpu": "50m", "memory": "400Mi"}),
    ],
)
def test_an_unset_limit_does_not_become_the_coordinators_request(given: Json, requests: Json) -> None:
    """If a container has no request, Kubernetes uses its limit, which would be 2 CPUs for a process
    that mostly waits.
    """
    pod = pods(rendezvous={"resources": given})[2]
    assert container(pod, "coordinator")["resources"]["requests"] == requests


def test_the_images_of_this_repository_run_as_a_numeric_user() -> None:
    """The kubelet cannot tell from a user name that the user is not root."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    for name in ("operator", "trainer"):
        [stage] = [s for s in stages if s.splitlines()[0].endswith(f" AS {name}")]
        users = re.findall(r"^USER (\S+)$", stage, flags=re.MULTILINE)
        assert users and re.fullmatch(r"[1-9]\d*:\d+", users[-1]), f"{name}: {users}"
