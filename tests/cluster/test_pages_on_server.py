"""Dry runs on a real API server of the objects on the documentation's pages, and of the objects
that the chart renders with the pages' values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kueue_crds
import pytest
import yaml
from conftest import new_namespace
from install_fixtures import CHART, helm
from operator_process import install_crd
from testcluster.cluster import Cluster
from testcluster.settings import CHECKOUT

Json = dict[str, Any]
PAGES = [*sorted(CHECKOUT.glob("*.md")), *sorted(CHECKOUT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOREIGN = ("argoproj.io/",)
"""Groups whose definitions the test cluster does not have."""


def objects(page: Path) -> list[Json]:
    """Return the Kubernetes objects in a page's blocks of YAML."""
    documents = [body for block in BLOCK.findall(page.read_text()) for body in yaml.safe_load_all(block)]
    whole = [body for body in documents if isinstance(body, dict) and {"apiVersion", "kind", "metadata"} <= body.keys()]
    return [body for body in whole if not body["apiVersion"].startswith(FOREIGN)]


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[tuple[Cluster, str]]:
    """Yield the cluster with the definitions of DDPJob and Kueue, and a namespace."""
    install_crd(cluster)
    kueue_crds.install(cluster)
    with new_namespace(cluster, "pages") as name:
        yield cluster, name
    kueue_crds.remove(cluster)


def dry_run(api: tuple[Cluster, str], bodies: list[Json]) -> None:
    """Apply the objects in a dry run. Their namespaces may not exist, so objects with a namespace
    are applied to the test's. Unknown fields are errors.
    """
    cluster, namespace = api
    for body in bodies:
        if "namespace" in body["metadata"]:
            body["metadata"]["namespace"] = namespace
    listed = {"apiVersion": "v1", "kind": "List", "items": bodies}
    words = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    cluster.kubectl(*words, "--namespace", namespace, "--filename=-", input_text=json.dumps(listed))


@pytest.mark.parametrize("page", [page for page in PAGES if objects(page)], ids=lambda page: page.stem)
def test_the_api_server_accepts_the_objects_on_a_page(api: tuple[Cluster, str], page: Path) -> None:
    dry_run(api, objects(page))


@pytest.mark.parametrize("page", ["set-up-a-team", "air-gapped"])
def test_the_api_server_accepts_the_chart_with_the_values_on_a_page(
    api: tuple[Cluster, str], page: str, tmp_path: Path
) -> None:
    [values] = [
        block for block in BLOCK.findall((CHECKOUT / f"docs/{page}.md").read_text()) if block.startswith("# values")
    ]
    file = tmp_path / "values.yaml"
    file.write_text(values.replace("REGISTRY", "registry.example.com/ml"))
    words = ("--set", "key.existingSecret=given", "--set", "fullnameOverride=pages-operator", "--values", str(file))
    text = helm(api[0], "template", "pages", str(CHART), "--namespace", api[1], *words)
    dry_run(api, [body for body in yaml.safe_load_all(text) if body])
