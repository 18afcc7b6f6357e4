"""Fixtures that install the operator with Helm, as users do, with the image of the checkout."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from machine import slowness
from testcluster import builder, processes
from testcluster.cluster import Cluster
from testcluster.settings import CHECKOUT, Settings

CHART = CHECKOUT / "charts" / "ddpjob-operator"
TRAINER_IMAGE = "ghcr.io/ddpjob/trainer:0.1.0"
"""The image name in the examples."""
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}


def helm(cluster: Cluster, *words: str, timeout: float = 180) -> str:
    """Return the standard output of a helm command. Raises ClusterError with its error output."""
    return processes.run(
        cluster.programs / "helm", *words, env={**os.environ, **cluster.environment()}, timeout=timeout
    )


@dataclass(frozen=True)
class Release:
    """An installation of the chart."""

    cluster: Cluster
    image: builder.Image
    namespace: str
    name: str = "ddpjob"

    def install(self, *words: str) -> str:
        """Install or upgrade, and wait until the operator is ready. `words` are additional
        arguments for helm.
        """
        repository, _, tag = self.image.tag.rpartition(":")
        chosen = (
            "--set",
            f"image.repository={repository}",
            "--set",
            f"image.tag={tag}",
            "--set",
            "image.pullPolicy=Never",
            "--set",  # OpenShift's admission plugin is enabled in the test cluster
            "rbac.deleteConfigMaps=true",
        )
        return helm(
            self.cluster,
            "upgrade",
            "--install",
            self.name,
            str(CHART),
            "--namespace",
            self.namespace,
            "--wait",
            f"--timeout={120 * slowness():.0f}s",
            *chosen,
            *words,
        )

    def uninstall(self) -> None:
        helm(self.cluster, "uninstall", self.name, "--namespace", self.namespace, "--wait", "--ignore-not-found")

    def kubectl(self, *words: str) -> str:
        return self.cluster.kubectl(*words, "--namespace", self.namespace)

    def json(self, *words: str) -> Any:
        return json.loads(self.kubectl(*words, "--output=json"))

    def pods(self) -> list[dict[str, Any]]:
        """Return the operator's pods, except those that are being deleted."""
        found = self.json("get", "pods", "--selector=app.kubernetes.io/name=ddpjob-operator")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def log(self) -> str:
        return self.kubectl("logs", "--selector=app.kubernetes.io/name=ddpjob-operator", "--prefix", "--tail=-1")

    def holder(self, lease: str = "ddpjob-operator") -> str:
        """Return the name of the pod that holds the Lease."""
        return self.kubectl("get", "lease", lease, "--ignore-not-found", "--output=jsonpath={.spec.holderIdentity}")


def restricted_namespace(cluster: Cluster, name: str) -> None:
    """Create a namespace that refuses pods without the strictest security context."""
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, *(f"{key}={value}" for key, value in RESTRICTED.items()))


@pytest.fixture(scope="module")
def release(cluster: Cluster, operator_image: builder.Image, request: pytest.FixtureRequest) -> Iterator[Release]:
    """Yield a release that is not installed yet, in its own restricted namespace. It is removed
    after the module's tests.
    """
    made = Release(cluster, operator_image, f"ddpjob-system-{secrets.token_hex(2)}")
    restricted_namespace(cluster, made.namespace)
    yield made
    if request.session.testsfailed:
        print(f"---- the operator in {made.namespace}\n" + made.log())
    made.uninstall()
    cluster.kubectl("delete", "namespace", made.namespace, "--wait=false")


@pytest.fixture(scope="module")
def installed_operator(release: Release) -> Release:
    """Install the chart for all namespaces with its default values and the image of the checkout.

    It serves the tests of a module. They must not also use the fixture `operator`, because two
    operators would act on the same jobs.
    """
    release.install()
    return release


@pytest.fixture(scope="session")
def trainer_image(cluster: Cluster, image_tools: Settings) -> builder.Image:
    """Load the Dockerfile's target `trainer` into the first two nodes, under its name in the
    examples.
    """
    image = builder.build_image(image_tools, "trainer", TRAINER_IMAGE)
    cluster.load_image(image, cluster.nodes[:2])
    return image
