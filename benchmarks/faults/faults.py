"""Control-plane faults. Each lasts for a few seconds and is then undone."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.scene import Problem, Scene, command_job, pause
from benchmarks.testbed import processes

POLICY = "ddpjob-faults-deny-pods"
MANY, PENDING = 100, 200
"""How often the operator is killed, and the number of jobs at a failover."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    `bring` causes it, and returns the seconds until the operator acted again, or None if they must
    be measured with a new job.
    """

    name: str
    seconds: float
    bring: Callable[[Scene, float], float | None]


def api_stopped(scene: Scene, seconds: float) -> None:
    scene.signal_program("kube-apiserver", signal.SIGSTOP)
    try:
        pause(seconds)
    finally:
        scene.signal_program("kube-apiserver", signal.SIGCONT)


def api_killed(scene: Scene, seconds: float) -> None:
    scene.restart_api(lambda: pause(seconds))


def compacted(scene: Scene, seconds: float) -> None:
    """Restart the API server without the history that the operator's watches need (410 Gone)."""

    def compact() -> None:
        header = scene.etcd("kv/range", {"key": "AA=="})["header"]
        scene.etcd("kv/compaction", {"revision": header["revision"], "physical": True})
        pause(seconds)

    before = scene.proxy.gone
    scene.restart_api(compact)
    scene.jobs.wait("a watch that has expired", lambda: scene.proxy.gone > before, timeout=30)


def refused(scene: Scene, seconds: float) -> float:
    """Refuse a third of the requests.

    A pod lost during that time must be replaced before the refusals stop.
    """
    before, scene.proxy.refuse = scene.proxy.refused, 1 / 3
    try:
        replacement = scene.kill_pod("standard")
        took = scene.wait_pod(replacement)
        pause(seconds)
        # At rest, there are few requests other than for the Lease.
        scene.jobs.wait("refused requests", lambda: scene.proxy.refused - before >= 5, timeout=90)
    finally:
        scene.proxy.refuse = 0.0
    return took


def silent(scene: Scene, seconds: float) -> float:
    """Lose a pod that no watch reports.

    The launchers and the coordinator notice the loss; the operator notices it at its next list.
    """
    if scene.proxy.silence_watches() < 6:
        raise Problem("almost no watch was open")
    began = time.monotonic()
    scene.wait_pod(scene.kill_pod("standard"), timeout=150)
    return time.monotonic() - began


def watch_errors(scene: Scene, seconds: float) -> None:
    if scene.proxy.send_errors() < 6:
        raise Problem("almost no watch was open")


def dns_down(scene: Scene, seconds: float) -> float:
    """Suspend DNS while a job starts.

    The job gets its pods, and runs once names are resolved again.
    """
    scene.signal_program("coredns", signal.SIGSTOP)
    try:
        took = scene.probe()
        pause(seconds)
    finally:
        scene.signal_program("coredns", signal.SIGCONT)
    return took


def clocks(scene: Scene, seconds: float) -> float:
    """Set kubelets' clocks a minute ahead, then a minute behind. A pod is lost each time."""
    took = 0.0
    for shift in (60, -60):
        scene.proxy.shift = shift
        try:
            took = max(took, scene.wait_pod(scene.kill_pod("standard")))
            pause(seconds / 2)
        finally:
            scene.proxy.shift = 0
    return took


def denied(scene: Scene, seconds: float) -> float:
    """Make a policy deny all pods in the namespace while a pod is lost."""
    created = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "matchConstraints": {"resourceRules": [created]},
            "validations": [{"expression": "false", "message": "no"}],
        },
    }  # fmt: skip
    selector = {"matchLabels": {"kubernetes.io/metadata.name": scene.namespace}}
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": POLICY},
        "spec": {
            "policyName": POLICY, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": selector},
        },
    }  # fmt: skip
    scene.cluster.apply(policy, binding)
    try:
        trial = ("run", "trial", "--image=none", "--dry-run=server", "--namespace", scene.namespace)
        processes.wait_for("the policy", lambda: not scene.cluster.succeeds(*trial), timeout=60)
        replacement = scene.kill_pod("standard")
        scene.jobs.wait("the condition", lambda: scene.jobs.condition("standard", "Scheduled").get("status") == "False")
        pause(seconds)
        if scene.jobs.status("standard")["phase"] == "Failed":
            raise Problem("the job failed")
    finally:
        kinds = "validatingadmissionpolicybinding,validatingadmissionpolicy"
        scene.cluster.kubectl("delete", kinds, POLICY)
    return scene.wait_pod(replacement, timeout=120)


def over_quota(scene: Scene, seconds: float) -> float:
    """Lose a pod under a quota that does not admit new pods, and then under a quota smaller than
    the number of existing pods.
    """
    hard = {"pods": "0"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "faults"}, "spec": {"hard": hard}}
    scene.cluster.apply(quota, namespace=scene.namespace)
    try:
        used = (
            "get",
            "resourcequota",
            "faults",
            "--namespace",
            scene.namespace,
            "--output=jsonpath={.status.used.pods}",
        )
        processes.wait_for("the quota", lambda: bool(scene.cluster.kubectl(*used).strip()), timeout=60)
        replacement = scene.kill_pod("standard")
        scene.jobs.wait("the condition", lambda: "quota" in json.dumps(scene.jobs.condition("standard", "Scheduled")))
        pause(seconds)
    finally:
        scene.jobs.kubectl("delete", "resourcequota", "faults")
    return scene.wait_pod(replacement, timeout=120)


def namespace_deleted(scene: Scene, seconds: float) -> None:
    """Delete a namespace with jobs while one of them is being created."""
    name = scene.create_namespace("faults-deleted")
    scene.cluster.apply(command_job("running", "sleep 1000"), namespace=name)
    pods = ("get", "pod", "running-0-0", "--namespace", name)
    scene.jobs.wait("a pod there", lambda: scene.cluster.succeeds(*pods))
    scene.cluster.apply(*(command_job(f"new-{n}", "sleep 1000") for n in range(5)), namespace=name)
    scene.cluster.kubectl("delete", "namespace", name, "--wait=false")
    gone = ("get", "namespace", name)
    scene.jobs.wait("the deletion of the namespace", lambda: not scene.cluster.succeeds(*gone), timeout=120)


def operator_killed(scene: Scene, seconds: float, kills: int = MANY) -> float:
    """Kill the operator at random times, while jobs are created, run and finish.

    No object may exist twice.
    """
    chance, names = random.Random(17), list[str]()
    for number in range(kills):
        if number % 5 == 0:
            names.append(f"killed-{number}-{chance.randrange(10**6)}")
            scene.jobs.apply(command_job(names[-1], "sleep 2", nodes=2))
        scene.operator.kill()
        scene.start_operator()
        time.sleep(chance.uniform(0.3, 3.0))
    began = time.monotonic()
    for name in names:
        scene.jobs.wait_phase(name, "Complete", timeout=180)
        status = scene.jobs.status(name)
        if status["restarts"]["total"] or [s["attempt"] for s in status["slots"]] != [0, 0]:
            raise Problem(f"{name} was restarted: {status}")
    took = time.monotonic() - began
    scene.jobs.kubectl("delete", "ddpjobs", *names, "--wait=false")
    return took


def failover(scene: Scene, seconds: float, jobs: int = PENDING) -> float:
    """Kill the leader of two replicas while many jobs have unschedulable pods."""
    scene.operator.kill()
    replicas = {}
    lease = {"DDPJOB_OPERATOR_LEASE_NAMESPACE": scene.namespace, "DDPJOB_OPERATOR_LEASE_NAME": "faults"}
    try:
        for name in ("one", "two"):
            replicas[name] = scene.another_operator(name)
            scene.start_operator(replicas[name], DDPJOB_OPERATOR_IDENTITY=name, **lease)
        many = [command_job(f"pending-{number}", "true") for number in range(jobs)]
        for manifest in many:
            manifest["spec"]["podTemplate"]["spec"]["nodeSelector"] = {"nowhere": "yes"}
        scene.cluster.apply(*many, namespace=scene.namespace)
        scene.jobs.wait("their pods", lambda: len(_pending(scene)) == jobs, timeout=240)
        before = _pending(scene)
        holder = ("get", "lease", "faults", "--output=jsonpath={.spec.holderIdentity}")
        replicas.pop(scene.jobs.kubectl(*holder).strip()).kill()
        began = time.monotonic()
        scene.probe(timeout=120)
        took = time.monotonic() - began
        if _pending(scene) != before:
            raise Problem("pods of waiting jobs were replaced")
        if scene.jobs.kubectl(*holder).strip() not in replicas:
            raise Problem("the other replica does not hold the Lease")
    finally:
        for operator in scene.others:
            operator.kill()
        scene.jobs.kubectl(
            "delete", "ddpjobs", *(f"pending-{n}" for n in range(jobs)), "--wait=false", "--ignore-not-found"
        )
        scene.start_operator()
    return took


def _pending(scene: Scene) -> set[str]:
    found = scene.jobs.kubectl(
        "get", "pods", "--output=jsonpath={range .items[*]}{.metadata.name}/{.metadata.uid} {end}"
    )
    return {name for name in found.split() if name.startswith("pending-")}


FAULTS = (
    Fault("API server stopped (SIGSTOP)", 60, api_stopped),
    Fault("API server killed, started again", 60, api_killed),
    Fault("etcd compacted while watches are old (410 Gone)", 5, compacted),
    Fault("a third of all requests refused (429, 5xx)", 30, refused),
    Fault("watches silent, but open", 0, silent),
    Fault("ERROR events in all watches", 0, watch_errors),
    Fault("DNS down while a job starts", 20, dns_down),
    Fault("nodes' clocks a minute ahead, then behind", 20, clocks),
    Fault("an admission policy denies all pods", 60, denied),
    Fault("ResourceQuota exhausted, then lifted", 30, over_quota),
    Fault("a namespace deleted with its jobs", 0, namespace_deleted),
    Fault(f"operator killed {MANY} times", 0, operator_killed),
    Fault(f"failover between two replicas, {PENDING} jobs", 0, failover),
)
