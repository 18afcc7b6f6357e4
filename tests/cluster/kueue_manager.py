"""Kueue's real controller manager in the test cluster, built from its Go module and installed from
its own manifests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import kueue_crds
import pytest
import yaml
from kueue_crds import Json
from testcluster import binaries, processes, python_host
from testcluster.cluster import Cluster
from testcluster.settings import ClusterError, Settings

VARIABLE = "DDPJOB_TEST_KUEUE"
ACCOUNT = 65532
"""The user of Kueue's image."""
EXTERNAL = "DDPJob.v1alpha1.ddpjob.io"
_SAME = ("sigs.k8s.io/controller-runtime@v0.24.1", "github.com/fsnotify/fsnotify@v1.9.0")
"""Modules that are set to the versions Kueue needs, because Helm requires newer ones or Kubernetes
is compiled with others.
"""
_INTEGRATIONS = "sigs.k8s.io/kueue/pkg/controller/jobs"
_FRAMEWORKS = {"job": "batch/job", "pod": "pod"}
"""The Kueue integrations to build, with their Go packages. Ray, Kubeflow and the others would
account for most of the compilation.
"""
_CONFIGURATION = "controller_manager_config.yaml"


def program(settings: Settings) -> Path:
    """Return the manager of DDPJOB_TEST_KUEUE, or build one if it is 1. Skip the test if it is not
    set.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        pytest.skip(
            f"{VARIABLE} is not set; write 1 to build Kueue's manager (slow), or the path of an existing program"
        )
    if text == "1":
        return build(settings)
    path = Path(text).resolve()
    if not os.access(path, os.X_OK):
        pytest.fail(
            f"{VARIABLE}={text}: no such program; write the path of Kueue's manager, or 1 to build it", pytrace=False
        )
    return path


def build(settings: Settings) -> Path:
    """Build the manager within the cluster's Go module and with its flags, so that Go can use
    Kubernetes' packages from its cache.
    """
    key = hashlib.sha256(repr((binaries.key(), kueue_crds.VERSION, _SAME, _FRAMEWORKS)).encode()).hexdigest()[:16]
    made = settings.cache / "bin" / f"kueue-{key}"
    if made.is_file():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=".building-") as temporary:
        folder = Path(temporary)
        shutil.copy(binaries.MODULE / "go.mod", folder)
        sums = {
            *(binaries.MODULE / "go.sum").read_text().splitlines(),
            *(kueue_crds.module() / "go.sum").read_text().splitlines(),
        }
        (folder / "go.sum").write_text("".join(f"{line}\n" for line in sorted(sums)))
        main = (kueue_crds.module() / "cmd" / "kueue" / "main.go").read_text()
        chosen = "\n\t_ ".join(f'"{_INTEGRATIONS}/{name}"' for name in _FRAMEWORKS)
        (folder / "main.go").write_text(main.replace(f'"{_INTEGRATIONS}"', chosen))
        edits = [f"-require=sigs.k8s.io/kueue@{kueue_crds.VERSION}"]
        edits += [f"-replace={pin.split('@')[0]}={pin}" for pin in _SAME]
        _go(folder, "mod", "edit", *edits)
        flags = [flag for flag in binaries.FLAGS if not flag.startswith("-mod=")]
        _go(folder, "build", "-mod=mod", *flags, "-o", "manager", ".")
        (folder / "manager").chmod(0o755)
        (folder / "manager").rename(made)
    return made


def _go(folder: Path, *words: str) -> None:
    environment = {**os.environ, **binaries.ENVIRONMENT}
    done = subprocess.run(["go", *words], cwd=folder, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        pytest.fail(f"go {words[0]} of Kueue's manager failed:\n{done.stderr[-4000:]}", pytrace=False)


def _manifests(cluster: Cluster, manager: Path) -> list[Json]:
    """Return the manifests of Kueue's `config/default`: permissions, webhooks, certificates and
    configuration.

    They are changed in three ways: the program comes from this machine's disk, its resource
    requests fit a small cluster, and the API that shows users the order of a queue is left out.
    """
    rendered = cluster.kubectl("kustomize", str(kueue_crds.module() / "config" / "default"))
    found: list[Json] = [it for it in yaml.safe_load_all(rendered) if it and it["kind"] != "APIService"]
    for it in found:
        if it["kind"] == "ConfigMap" and _CONFIGURATION in it["data"]:
            settings = yaml.safe_load(it["data"][_CONFIGURATION])
            settings["featureGates"] = {"VisibilityOnDemand": False}
            settings["integrations"] = {"frameworks": [*_FRAMEWORKS.values()], "externalFrameworks": [EXTERNAL]}
            it["data"][_CONFIGURATION] = yaml.safe_dump(settings)
        if it["kind"] == "Deployment":
            pod = it["spec"]["template"]["spec"]
            [container] = pod["containers"]
            pod["securityContext"]["runAsUser"] = ACCOUNT
            container |= {"image": python_host.IMAGE, "imagePullPolicy": "Never", "resources": {}}
            container["volumeMounts"].append({"name": "manager", "mountPath": "/manager", "readOnly": True})
            pod["volumes"].append({"name": "manager", "hostPath": {"path": str(manager), "type": "File"}})
    return found + _rights()


def _rights() -> list[Json]:
    """Return the permission to read DDPJobs, as in the documentation."""
    page = (Path(__file__).parents[2] / "docs" / "queues.md").read_text()
    [block] = [it.split("```")[0] for it in page.split("```yaml\n")[1:] if "kind: ClusterRole\n" in it]
    return list(yaml.safe_load_all(block))


def install(cluster: Cluster, manager: Path) -> None:
    """Install Kueue's manager, and wait until its webhooks respond."""
    found = _manifests(cluster, manager)
    # There are two steps: first the CRDs and the namespace, then the objects that need them.
    for first in (True, False):
        _apply(cluster, [it for it in found if (it["kind"] in ("CustomResourceDefinition", "Namespace")) == first])
    wait_ready(cluster)


def _apply(cluster: Cluster, manifests: list[Json], *words: str) -> None:
    text = yaml.safe_dump_all(manifests)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", *words, input_text=text)


def wait_ready(cluster: Cluster) -> None:
    """Wait until a webhook responds. Before that, the API server refuses the objects that it
    validates.
    """

    def answers() -> bool:
        try:
            _apply(cluster, [kueue_crds.flavor("any", {})], "--dry-run=server")
        except ClusterError:
            return False
        return True

    processes.wait_for("the webhooks of Kueue's manager", answers, timeout=180)


def kill(cluster: Cluster) -> None:
    """Kill the manager, and wait until the pod that replaces it responds."""
    select = ("--namespace=kueue-system", "--selector=control-plane=controller-manager")
    cluster.kubectl("delete", "pods", *select, "--force", "--grace-period=0")
    wait_ready(cluster)


def remove(cluster: Cluster, manager: Path) -> None:
    """Remove the manager. Webhooks are removed first, because without a manager the objects that
    they validate cannot be changed. Finalizers follow.
    """
    found = _manifests(cluster, manager)
    _delete(cluster, [it for it in found if it["kind"].endswith("WebhookConfiguration") or it["kind"] == "Deployment"])
    for plural in ("workloads", "localqueues", "clusterqueues", "resourceflavors", "topologies"):
        kind = f"{plural}.kueue.x-k8s.io"
        for it in cluster.kubectl_json("get", kind, "--all-namespaces")["items"]:
            where = [f"--namespace={it['metadata']['namespace']}"] if "namespace" in it["metadata"] else []
            free = '--patch={"metadata": {"finalizers": null}}'
            cluster.kubectl("patch", kind, it["metadata"]["name"], *where, "--type=merge", free)
    _delete(cluster, found)


def _delete(cluster: Cluster, manifests: list[Json]) -> None:
    text = yaml.safe_dump_all(manifests)
    cluster.kubectl("delete", "--ignore-not-found", "--filename=-", input_text=text, timeout=300)
