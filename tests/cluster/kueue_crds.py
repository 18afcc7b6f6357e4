"""Kueue's definitions in the test cluster, from its Go module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from go_modules import folder_of
from testcluster import processes
from testcluster.cluster import Cluster

Json = dict[str, Any]
VERSION = "v0.19.0"
API = "kueue.x-k8s.io/v1beta2"


def module() -> Path:
    """Return the folder of Kueue's module, which Go downloads once. Skip the test if the download
    fails.
    """
    return folder_of(f"sigs.k8s.io/kueue@{VERSION}")


def install(cluster: Cluster) -> None:
    """Install Kueue's CRDs and wait until they are served. The conversion webhook is left out,
    because only one version is used.
    """
    folder = module() / "config" / "components" / "crd" / "bases"
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(folder))
    listing = ("get", "workloads.kueue.x-k8s.io,localqueues.kueue.x-k8s.io,resourceflavors.kueue.x-k8s.io", "-A")
    processes.wait_for("the API server to serve Workloads", lambda: cluster.succeeds(*listing), timeout=60)


def remove(cluster: Cluster) -> None:
    """Remove the CRDs together with all their objects."""
    names = [yaml.safe_load(path.read_text())["metadata"]["name"] for path in module().glob("config/**/bases/*.yaml")]
    cluster.kubectl("delete", "customresourcedefinition", "--ignore-not-found", *names, timeout=300)


def flavor(name: str, labels: Json) -> Json:
    """Return a ResourceFlavor for the Kubernetes nodes with these labels."""
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": {"nodeLabels": labels}}
