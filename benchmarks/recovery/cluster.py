"""python -m benchmarks.recovery cluster MANIFEST --namespace NAMESPACE --folder FOLDER [--runs 20] [--cases ...]

Runs the cases of `python -m benchmarks.recovery` with pods on the current kubeconfig's cluster,
which must run the operator. Times are measured from the delete call to the first step of all ranks.
MANIFEST contains one DDPJob. Its `script` is the path of recovery/steps.py in the pods, and its
storage.checkpoints is a folder that this machine sees as FOLDER. The clocks must agree (one
machine, or NTP). The cases set the job's name, nodes, spares, elastic and recovery.mode.
"""

from __future__ import annotations

import argparse
import copy
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpjob.api.job_status import ConditionType, JobStatus, SlotState
from ddpjob.client.manifests.manifest_sources import BadInput, read_job
from kubernetes import client, config, watch

from benchmarks.recovery import interleaved
from benchmarks.recovery.cases import CASES, IMPORTS, Backend, Case, Shape, System, recovery
from benchmarks.recovery.digits import write_digits
from benchmarks.recovery.groups import Group, NotRecovered
from benchmarks.recovery.step_log import StepLog
from benchmarks.recovery.tables import FLOOR, Sample

Json = dict[str, Any]
GROUP, VERSION, PLURAL = "ddpjob.io", "v1alpha1", "ddpjobs"
NODE_LOST_AFTER = 10
"""recovery.nodeLostAfterSeconds in cases that disconnect a host from the network."""


class ClusterGroup(Group):
    """A DDPJob as a group, whose nodes are pods that the operator replaces."""

    def __init__(self, manifest: Json, namespace: str, folder: Path) -> None:
        super().__init__(folder, Shape())
        self.log = StepLog(folder)
        self.manifest, self.namespace = manifest, namespace
        self.name: str = manifest["metadata"]["name"]
        self.core, self.jobs = client.CoreV1Api(), client.CustomObjectsApi()
        self._seen: dict[str, float] = {}
        self._killed: set[str] = set()

    def start(self) -> None:
        self.follow()
        self.jobs.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.manifest)

    def pods(self, role: str) -> list[Any]:
        """Return the job's pods of this role."""
        selector = f"ddpjob.io/job={self.name},ddpjob.io/role={role}"
        found: list[Any] = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return found

    def spares_ready(self) -> int:
        status = self._status()
        if any(f"{self.name}-{index}-{slot.attempt}" in self._killed for index, slot in enumerate(status.slots)):
            return 0  # This status is from before the last kill.
        return status.spare

    def follows_another(self) -> bool:
        status = self._status()
        rendezvous = status.rendezvous
        return status.holds(ConditionType.RUNNING) and rendezvous.attempt > 0 and rendezvous.state is SlotState.RUNNING

    def _status(self) -> JobStatus:
        """Return the job's status.

        Its coordinator responds only to the operator and its members.
        """
        job = self.jobs.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.name)
        return JobStatus.read(job.get("status", {}))

    def check(self) -> None:
        """Raise NotRecovered if the job has failed."""
        failed = self._status().condition(ConditionType.FAILED)
        if failed is not None and failed.status:
            raise NotRecovered(f"lost: {failed.reason}: {failed.message[:300]}")

    def follow(self) -> None:
        """Record in a thread when each pod is first seen.

        Its creationTimestamp is too coarse, because it has whole seconds.
        """

        def note() -> None:
            stream = watch.Watch().stream(
                self.core.list_namespaced_pod,
                self.namespace,
                label_selector=f"ddpjob.io/job={self.name}",
                timeout_seconds=600,
            )
            for event in stream:
                self._seen.setdefault(event["object"].metadata.name, time.time())

        threading.Thread(target=note, daemon=True).start()

    def created(self, node: str) -> float | None:
        return self._seen.get(node)

    def kill(self, *names: str) -> float:
        """Force-delete the pods one after another, and return the Unix time just before the first
        deletion.
        """
        moment = time.time()
        self._killed.update(names)
        for name in names:
            self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        return moment

    def kill_coordinator(self) -> float:
        return self.kill(*(pod.metadata.name for pod in self.pods("coordinator")))

    def replace(self) -> None:
        """Do nothing, because the operator replaces pods."""

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
    """A cluster that runs the operator.

    `cut` and `heal`, if set, disconnect and reconnect a Kubernetes node.
    """

    name = "cluster"

    def __init__(self, manifest: Json, namespace: str, folder: Path, patience: float) -> None:
        self.manifest, self.namespace, self.folder, self.patience = manifest, namespace, folder, patience
        self.cut: Callable[[str], None] | None = None
        self.heal: Callable[[str], None] | None = None

    @contextmanager
    def group(self, system: System, shape: Shape, options: tuple[str, ...] = ()) -> Iterator[Group]:
        """Provide a group with its own folder below `folder`, once it trains."""
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
            shutil.rmtree(folder, ignore_errors=True)  # A pod that is still terminating may write to the folder.

    def floor(self) -> float:
        """Time a pod that imports torch, from its creation to its last line.

        The pod has the job's image and podTemplate.
        """
        name, spec = f"floor-{secrets.token_hex(3)}", self.manifest["spec"]
        body = copy.deepcopy(spec.get("podTemplate", {}).get("spec", {})) | {"restartPolicy": "Never"}
        trainer = next((one for one in body.setdefault("containers", []) if one["name"] == "trainer"), None)
        if trainer is None:
            body["containers"].append(trainer := {"name": "trainer"})
        trainer |= {"image": spec["image"], "command": ["python3", "-c", IMPORTS]}
        trainer["imagePullPolicy"] = spec.get("imagePullPolicy", "IfNotPresent")
        core = client.CoreV1Api()
        began = time.time()
        core.create_namespaced_pod(self.namespace, {"metadata": {"name": name}, "spec": body})
        try:
            while time.time() < began + self.patience:
                pod = core.read_namespaced_pod(name, self.namespace)
                if pod.status.phase in ("Succeeded", "Failed"):
                    return float(core.read_namespaced_pod_log(name, self.namespace)) - began
                time.sleep(0.1)
            raise NotRecovered(f"not within {self.patience:.0f} s: a pod that imports torch")
        finally:
            core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

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


def network_cut(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Disconnect a Kubernetes node that runs a pod of the group, but not its coordinator."""
    assert isinstance(backend, Cluster) and backend.cut and backend.heal
    with backend.group(case.system, case.shape) as group:
        assert isinstance(group, ClusterGroup)
        spared = {pod.spec.node_name for pod in group.pods("coordinator")}
        nodes = [pod.spec.node_name for pod in group.pods("node") if pod.spec.node_name not in spared]
        if not nodes:
            raise NotRecovered(
                "all pods run on the coordinator's Kubernetes node, so there is no other node to disconnect"
            )
        moment = time.time()
        backend.cut(nodes[0])
        try:
            seconds, where = recovery(group, moment, case.shape.nodes, backend.patience)
            yield case.sample(backend, "network", round_, seconds, phases=where)
        finally:
            backend.heal(nodes[0])


# In Standard mode, a replacement pod is ready before the group would continue without it.
ELSEWHERE = ("standard-shrink", "fast-slow-rank")
ON_CLUSTER = tuple(
    case for case in CASES if case.name == FLOOR or (case.system is not System.STOCK and case.name not in ELSEWHERE)
)
CUT = Case("fast-network-cut", NODE_LOST_AFTER + 4.0, network_cut, System.FAST, slow=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("manifest", type=Path, metavar="MANIFEST")
    made.add_argument("--namespace", default="default", help="an existing namespace (default: default)")
    made.add_argument("--folder", type=Path, required=True, help="the folder that the pods see as storage.checkpoints")
    interleaved.add_options(made, ON_CLUSTER)
    return made


def main(arguments: list[str]) -> int:
    """Return the exit code of interleaved.run, or 2 on bad input."""
    options = parser().parse_args(arguments)
    try:
        manifest = read_job(options.manifest)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    config.load_kube_config()
    backend = Cluster(manifest, options.namespace, options.folder, options.patience)
    return interleaved.run(backend, ON_CLUSTER, options)
