"""python benchmarks/recovery cluster MANIFEST --namespace NAMESPACE --folder FOLDER [--runs 20] [--cases ...] [--csv FILE]

The same cases with pods, on the cluster of the current kubeconfig with the operator running. From the delete call to the first step of all
ranks. MANIFEST holds one DDPJob whose `script` is recovery/steps.py as the pods see it, and whose storage.checkpoints is a folder that this
machine sees as FOLDER, by the same clock (one machine, or NTP). Its name, nodes, spares, elastic and recovery.mode are set by the cases.
"""

from __future__ import annotations

import argparse
import ast
import copy
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import interleaved
from cases import CASES, Case, Place, Sample, Shape, System, recovery
from ddpjob.cli.run import BadInput, read_job
from digits import write_digits
from groups import Group, NotRecovered
from kubernetes import client, config
from step_log import StepLog
from urllib3.exceptions import HTTPError

Json = dict[str, Any]
GROUP, VERSION, PLURAL = "ddpjob.io", "v1alpha1", "ddpjobs"
NODE_LOST_AFTER = 10
"""Seconds, in the case that cuts a node's network."""


class ClusterGroup(Group):
    """A DDPJob. Nodes are its pods; the operator replaces them."""

    def __init__(self, manifest: Json, namespace: str, folder: Path) -> None:
        super().__init__(folder, Shape())
        self.log = StepLog(folder)
        self.manifest, self.namespace = manifest, namespace
        self.name: str = manifest["metadata"]["name"]
        self.core, self.jobs = client.CoreV1Api(), client.CustomObjectsApi()

    def start(self) -> None:
        self.jobs.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.manifest)

    def pods(self, role: str) -> list[Any]:
        """The job's pods of this role."""
        selector = f"ddpjob.io/job={self.name},ddpjob.io/role={role}"
        found: list[Any] = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return found

    def report(self) -> Json:
        """The coordinator's, through the API server."""
        for pod in self.pods("coordinator"):
            port = next(p.container_port for c in pod.spec.containers for p in c.ports or () if p.name == "coordinator")
            try:
                text = self.core.connect_get_namespaced_pod_proxy_with_path(f"{pod.metadata.name}:{port}", self.namespace, "status")
                found: Json = ast.literal_eval(text)  # The client gives the parsed JSON as Python's text.
            except (client.ApiException, HTTPError):
                continue  # It starts or ends.
            return found
        return {}

    def check(self) -> None:
        """Raises NotRecovered when the job has failed."""
        status = self.jobs.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.name).get("status", {})
        for condition in status.get("conditions", ()):
            if condition["type"] == "Failed" and condition["status"] == "True":
                raise NotRecovered(f"lost: {condition['reason']}: {condition['message'][:300]}")

    def kill(self, *names: str) -> float:
        """Deleted by force, one right after the other."""
        moment = time.time()
        for name in names:
            self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        return moment

    def kill_coordinator(self) -> float:
        return self.kill(*(pod.metadata.name for pod in self.pods("coordinator")))

    def replace(self) -> None:
        """The operator does."""

    def close(self) -> None:
        """Delete the job and its pods."""
        self.jobs.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.name)
        selector = f"ddpjob.io/job={self.name}"
        for pod in self.core.list_namespaced_pod(self.namespace, label_selector=selector).items:
            try:
                self.core.delete_namespaced_pod(pod.metadata.name, self.namespace, grace_period_seconds=0)
            except client.ApiException as error:
                if error.status != 404:
                    raise


class Cluster:
    """Where the operator runs; `cut` and `heal`, if given, part a Kubernetes node from the network."""

    name = "cluster"

    def __init__(self, manifest: Json, namespace: str, folder: Path, patience: float) -> None:
        self.manifest, self.namespace, self.folder, self.patience = manifest, namespace, folder, patience
        self.cut: Callable[[str], None] | None = None
        self.heal: Callable[[str], None] | None = None

    @contextmanager
    def group(self, system: System, shape: Shape, options: tuple[str, ...] = ()) -> Iterator[Group]:
        """In a folder of its own below `folder`."""
        name = f"recovery-{secrets.token_hex(3)}"
        folder = self.folder / name
        folder.mkdir()
        folder.chmod(0o777)
        write_digits(folder)
        group = ClusterGroup(self._job(name, system, shape, options), self.namespace, folder)
        group.shape = shape
        group.start()
        try:
            group.settle()
            yield group
        finally:
            group.close()
            shutil.rmtree(folder, ignore_errors=True)  # A pod that is still ending may write.

    def _job(self, name: str, system: System, shape: Shape, options: tuple[str, ...]) -> Json:
        job = copy.deepcopy(self.manifest)
        job["metadata"] = {"name": name, "namespace": self.namespace}
        job.pop("status", None)
        spec = job["spec"]
        spec["nodes"], spec["spares"] = shape.nodes, shape.spares
        if shape.minimum < shape.nodes:
            spec["elastic"] = {"minNodes": shape.minimum}
        spec["recovery"] = {**spec.get("recovery", {}), "mode": str(system)}
        if self.cut:
            spec["recovery"]["nodeLostAfterSeconds"] = NODE_LOST_AFTER
        spec["args"] = [f"{spec['storage']['checkpoints']['mountPath']}/{name}", *options]
        return job


def network_cut(case: Case, place: Place, round_: int) -> Iterator[Sample]:
    """The network of a Kubernetes node is cut, which holds a pod of the group and not its coordinator."""
    assert isinstance(place, Cluster) and place.cut and place.heal
    with place.group(case.system, case.shape) as group:
        assert isinstance(group, ClusterGroup)
        spared = {pod.spec.node_name for pod in group.pods("coordinator")}
        nodes = [pod.spec.node_name for pod in group.pods("node") if pod.spec.node_name not in spared]
        if not nodes:
            raise NotRecovered("all pods came to the coordinator's node: nothing to cut")
        moment = time.time()
        place.cut(nodes[0])
        try:
            yield case.sample(place, "network", round_, recovery(group, moment, case.shape.nodes, place.patience))
        finally:
            place.heal(nodes[0])


# In Standard a pod's replacement is there before the group would go on without it.
ON_CLUSTER = tuple(case for case in CASES if case.system is not System.STOCK and case.name != "standard-shrink")
CUT = Case("fast-network-cut", NODE_LOST_AFTER + 4.0, network_cut, System.FAST, slow=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("manifest", type=Path, metavar="MANIFEST")
    made.add_argument("--namespace", default="default", help="an existing namespace (default: default)")
    made.add_argument("--folder", type=Path, required=True, help="what the pods see as storage.checkpoints")
    interleaved.add_options(made, ON_CLUSTER)
    return made


def main(arguments: list[str]) -> int:
    """As the loopback's."""
    options = parser().parse_args(arguments)
    try:
        manifest = read_job(options.manifest)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    config.load_kube_config()
    place = Cluster(manifest, options.namespace, options.folder, options.patience)
    return interleaved.run(place, ON_CLUSTER, options)
