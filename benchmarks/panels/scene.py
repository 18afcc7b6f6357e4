"""The scene of the pictures: 15 minutes of two operator replicas, their jobs and their faults."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import CHECKOUT
from benchmarks.faults.proxy import Proxy
from benchmarks.faults.scene import command_job
from benchmarks.panels import defective
from benchmarks.processes import free_port
from benchmarks.testbed import Cluster, Jobs, OperatorProcess, PrometheusServer, install_crd, job, steps_job

MONITORING = CHECKOUT / "charts" / "ddpjob-operator" / "monitoring"
CRD = CHECKOUT / "charts" / "ddpjob-operator" / "crds" / "ddpjobs.ddpjob.io.yaml"
FIGURES = Path(__file__).parent / "figures.py"
NAMESPACE = "vision"
JOB = "digits"
"""The job shown in the single-job dashboard."""
REPLICAS = ("ddpjob-operator-a", "ddpjob-operator-b")
SCRAPE_SECONDS = 5
Json = dict[str, Any]


class Scene:
    """Two operator replicas behind a proxy, a Prometheus that scrapes them, and a namespace's
    jobs.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.proxy = Proxy(cluster.kubeconfig)
        self.jobs = Jobs(cluster, NAMESPACE)
        self.ports = {name: free_port() for name in REPLICAS}
        self.operators = {name: OperatorProcess(cluster, folder / f"{name}.log") for name in REPLICAS}
        self.prometheus = PrometheusServer(folder, configuration(folder, self.ports))
        self.short = 0
        """Number of started jobs that are meant to end."""

    def start_operator(self, name: str) -> None:
        self.operators[name].start(
            *(sys.executable, "-m", defective.__name__),
            KUBECONFIG=str(self.proxy.kubeconfig(self.folder)),
            DDPJOB_OPERATOR_ADDRESS="127.0.0.1",
            DDPJOB_OPERATOR_METRICS_PORT=str(self.ports[name]),
            DDPJOB_OPERATOR_LEASE_NAMESPACE=NAMESPACE,
            DDPJOB_OPERATOR_IDENTITY=name,
            PYTHONPATH=str(CHECKOUT),
        )

    def leader(self) -> str:
        """Return the replica that holds the Lease."""
        return self.jobs.kubectl("get", "lease", "ddpjob-operator", "--output=jsonpath={.spec.holderIdentity}").strip()

    def kill_pod(self, name: str) -> None:
        """Force-delete the pod of a job's last node."""
        label = ("get", "pods", f"--selector=ddpjob.io/job={name},ddpjob.io/role=node", "--output=name")
        self.jobs.kill(sorted(self.jobs.kubectl(*label).split())[-1].removeprefix("pod/"))

    def create(self, jobs: list[Json]) -> None:
        """Create many jobs at once, without waiting for the operator."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs})
        self.cluster.kubectl("create", "--namespace", NAMESPACE, "--filename=-", input_text=text)

    def fires(self, alert: str) -> bool:
        return bool(self.prometheus.ask("query", query=firing(alert))["result"])

    def wait_for_alert(self, name: str) -> None:
        self.jobs.wait(name, lambda: self.fires(name), timeout=150)

    def kill_operators(self) -> None:
        for operator in self.operators.values():
            operator.kill()

    def close(self) -> None:
        self.kill_operators()
        self.prometheus.stop()
        self.proxy.close()
        self.cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", "--ignore-not-found")
        pods = ("pods", "--all", "--namespace", NAMESPACE, "--grace-period=1", "--wait=false", "--ignore-not-found")
        self.cluster.kubectl("delete", *pods)


def firing(alert: str, job_name: str = "") -> str:
    """Return the query for a firing alert, of any job or only of this job."""
    job = f', job_name="{job_name}"' if job_name else ""
    return f'ALERTS{{alertname="{alert}", alertstate="firing"{job}}}'


def configuration(folder: Path, ports: dict[str, int]) -> Json:
    """Return the configuration of a Prometheus that scrapes the replicas.

    It includes the chart's alerts, which fire without waiting.
    """
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        rule.pop("for", None)
        rule.pop("keep_firing_for", None)
    (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": groups}))
    often = {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"}
    targets = [{"targets": [f"127.0.0.1:{port}"], "labels": {"pod": name}} for name, port in ports.items()]
    scraped = {"job_name": "ddpjob-operator", "honor_labels": True, "static_configs": targets}
    return {"global": often, "rule_files": ["alerts.yaml"], "scrape_configs": [scraped]}


# --- faults and jobs


def train(scene: Scene) -> None:
    """Run the built-in trainer on two nodes with a spare, and a plain script."""
    checkpoints = scene.folder / "checkpoints"
    checkpoints.mkdir()
    checkpoints.chmod(0o777)
    # With a fraction of a core each, they leave room for the other jobs.
    shared: Json = {
        "resources": {"limits": {"cpu": "600m"}, "requests": {"cpu": "10m"}},
        "scheduling": {"onePodPerNode": False},
        "recovery": {"mode": "Fast", "maxRestarts": 10},
    }
    words = ["--config", "digits", "train.epochs=900", "train.threads=1", "checkpoint.every_seconds=15"]
    words += ["optim.lr=0.002", "model.width=96"]  # The loss falls until the end.
    storage = {"checkpoints": {"hostPath": str(checkpoints), "shared": True}}
    scene.jobs.apply(job(JOB, module="ddpjob_trainer", args=words, spares=1, storage=storage, **shared))
    scene.jobs.apply(steps_job("plain", 10**7, "--sleep=0.5", scheduling=shared["scheduling"]))
    scene.jobs.wait_phase(JOB, "Running", timeout=180)


def reports(scene: Scene, name: str, *arguments: str, **spec: Json) -> None:
    """Run a single-pod job that reports figures."""
    one: Json = {"nodes": 1, "rendezvous": {"placement": "Master"}, **spec}
    scene.jobs.apply(job(name, script=str(FIGURES), args=list(arguments), **one))


def no_room(scene: Scene) -> None:
    made = command_job("no-room", "true")
    made["spec"]["podTemplate"]["spec"]["nodeSelector"] = {"nowhere": "yes"}
    scene.jobs.apply(made)


def on_host_network(scene: Scene) -> None:
    made = command_job("open", "sleep 3600")
    made["spec"]["podTemplate"]["spec"]["hostNetwork"] = True
    scene.jobs.apply(made)


def crash(scene: Scene) -> None:
    recovery = {"maxRestarts": 5, "backoff": {"initialSeconds": 5, "maxSeconds": 10}}
    spec: Json = {"recovery": recovery, "scheduling": {"onePodPerNode": False}}
    scene.jobs.apply(steps_job("crashes", 1000, "--raise-on-rank=1", **spec))


def refuse(scene: Scene) -> None:
    """Refuse half of the requests, and interrupt watches every five seconds, until alerts fire."""
    scene.proxy.refuse = 0.5
    try:
        for name in ("DDPJobWatchErrors", "DDPJobApiErrors"):
            while not scene.fires(name):
                scene.proxy.send_errors()
                time.sleep(5)
    finally:
        scene.proxy.refuse = 0.0


def kill_leader(scene: Scene) -> None:
    name = scene.leader()
    scene.operators[name].kill()
    time.sleep(20)
    scene.start_operator(name)


def stop_coordinator(scene: Scene) -> None:
    """Suspend the coordinator for 40 s."""
    uid = scene.jobs.kubectl("get", "ddpjob", "plain", "--output=jsonpath={.metadata.uid}").strip()
    found = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _belongs(folder, uid) and b"coordinator" in (folder / "cmdline").read_bytes()
    ]
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(40)
    for pid in found:
        os.kill(pid, signal.SIGCONT)


def _belongs(folder: Path, uid: str) -> bool:
    """Whether a process in /proc belongs to a job's pods."""
    try:
        return f"DDPJOB_UID={uid}".encode() in (folder / "environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def old_definition(scene: Scene) -> None:
    """Install the CRD without a status field, as an older release has it, until the replicas
    notice.

    Then install this release's CRD.
    """
    definition = yaml.safe_load(CRD.read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    del schema["properties"]["slots"]["items"]["properties"]["lostSince"]
    scene.cluster.kubectl("replace", "--filename=-", input_text=json.dumps(definition))
    scene.wait_for_alert("DDPJobDefinitionOutdated")
    time.sleep(10)
    install_crd(scene.cluster)


def slow_answers(scene: Scene) -> None:
    """Make each operator request take ten seconds, while 100 jobs need one or two requests each."""
    scene.proxy.delay = 10.0
    try:
        scene.create(resting_jobs("slow", 100))
        scene.wait_for_alert("DDPJobQueueSlow")
    finally:
        scene.proxy.delay = 0.0
    scene.jobs.kubectl("delete", "ddpjobs", "--selector=slow", "--wait=false")


def resting_jobs(label: str, count: int) -> list[Json]:
    """Return jobs that are suspended when they are created."""
    made = job("", nodes=1, script="train.py", runPolicy={"suspend": True})
    return [{**made, "metadata": {"name": f"{label}-{n}", "labels": {label: ""}}} for n in range(count)]


@dataclass(frozen=True)
class Act:
    """An event `at` seconds after the first job runs."""

    at: float
    what: str
    do: Callable[[Scene], None] = field(compare=False)
    alert: str = ""
    """The alert that it causes."""
    job: str = ""
    """The job whose alert it is."""


_KILLS = (60, 110, 160, 250, 325, 400, 470)
ACTS = (
    Act(0, "a job whose pods do not fit on any Kubernetes node", no_room, "DDPJobPendingLong", "no-room"),
    Act(5, "a job with `hangs: Report` whose script stops taking steps",
        lambda s: reports(s, "hangs", "--hang-after=30", recovery={"hangs": "Report"}), "DDPJobStalled", "hangs"),
    Act(15, "a job whose newest checkpoint is three hours old", lambda s: reports(s, "unsaved", "--saved-ago=10800"),
        "DDPJobCheckpointOld", "unsaved"),
    Act(20, "a job whose states do not fit into memory, half an hour after its newest checkpoint",
        lambda s: reports(s, "large", "--saved-ago=1800", "--snapshot-bytes=9e9"), "DDPJobWorkAtRisk", "large"),
    Act(25, "after two minutes, each step of a job takes four times as long",
        lambda s: reports(s, "slows", "--slow-after=120"), "DDPJobStraggler", "slows"),
    Act(30, "a job without a spare, with a rank that takes twice as long",
        lambda s: reports(s, "lags", "--slow-rank", procsPerNode=2), "DDPJobSlowRank", "lags"),
    Act(35, "a job whose pods are on the hosts' network, where no NetworkPolicy applies", on_host_network,
        "DDPJobNotIsolated", "open"),
    Act(100, "a script that fails at step 5 each time has spent four fifths of its restart budget", crash,
        "DDPJobBudgetNearlySpent", "crashes"),
    Act(100, "a script that fails at step 5 each time has spent its restart budget", lambda s: None, "DDPJobFailed",
        "crashes"),
    *(Act(at, "a pod of the job is force-deleted, seven times in total" if at == _KILLS[0] else "",
          lambda s: s.kill_pod(JOB), *(("DDPJobRestartLoop", JOB) if at == _KILLS[0] else ())) for at in _KILLS),
    Act(200, "the API server refuses half of all requests (429, 5xx), and interrupts all watches every 5 s", refuse,
        "DDPJobApiErrors"),
    Act(200, "the API server interrupts all watches every 5 s", lambda s: None, "DDPJobWatchErrors"),
    Act(300, "", lambda s: s.jobs.kill(f"{JOB}-coordinator-0")),
    Act(350, "the acting replica is killed (SIGKILL)", kill_leader, "DDPJobOperatorNotActing"),
    Act(430, "a coordinator is stopped for 40 s (SIGSTOP)", stop_coordinator, "DDPJobCoordinatorUnreachable", "plain"),
    Act(500, "the CRD of an older release is applied", old_definition, "DDPJobDefinitionOutdated"),
    Act(570, "a deliberate defect: reconciling one job raises an error",
        lambda s: s.create([command_job(defective.JOB, "true")]), "DDPJobReconcilesFail"),
    Act(575, "another defect: each reconcile of a job blocks the event loop for 3 s",
        lambda s: s.create([command_job(defective.BLOCKS, "sleep 3600")]), "DDPJobOperatorBlocked"),
    Act(590, "100 jobs are created while each response of the API server takes 10 s", slow_answers, "DDPJobQueueSlow"),
)  # fmt: skip
END = 740
"""Number of seconds shown in the pictures."""
LAST = (
    Act(END, "5,001 jobs are created", lambda s: s.create(resting_jobs("crowd", 5001)), "DDPJobsWithoutSeries"),
    Act(END, "both replicas are killed", Scene.kill_operators, "DDPJobOperatorDown"),
)
"""Events not shown in the pictures, in order."""
SHORT_EVERY = 45
"""Seconds between two jobs that end."""


@contextmanager
def scene(cluster: Cluster, folder: Path) -> Iterator[Scene]:
    """Provide the replicas and their Prometheus.

    At the end, only its data in the folder is kept.
    """
    install_crd(cluster)
    cluster.kubectl("create", "namespace", NAMESPACE)
    made = Scene(cluster, folder)
    try:
        for name in REPLICAS:
            made.start_operator(name)
        yield made
    finally:
        made.close()


def play(stage: Scene) -> Json:
    """Run all events.

    Return their times and names and the recorded range (`start` and `end`, in Unix seconds) for the
    drawing.
    """
    start = time.time()
    train(stage)
    began = time.time()
    waits = [*ACTS, *(Act(at, "", begin_short) for at in range(10, END - 60, SHORT_EVERY))]
    acts, threads = [], []
    for act in sorted(waits, key=lambda act: act.at):
        time.sleep(max(0.0, began + act.at - time.time()))
        if act.what:
            print(f"{act.at:4.0f} s: {act.what}", file=sys.stderr, flush=True)
            acts.append({"at": time.time(), "what": act.what, "alert": act.alert, "job": act.job})
        # Some events take a while, but they do not wait for each other.
        threads.append(threading.Thread(target=act.do, args=(stage,)))
        threads[-1].start()
    time.sleep(max(0.0, began + END - time.time()))
    for thread in threads:
        thread.join()
    end = time.time()
    for act in LAST:
        acts.append({"at": time.time(), "what": act.what, "alert": act.alert, "job": act.job})
        act.do(stage)
        stage.wait_for_alert(act.alert)
    return {"start": start, "end": end, "acts": acts, "namespace": NAMESPACE, "job_name": JOB}


def begin_short(stage: Scene) -> None:
    stage.short += 1
    stage.jobs.apply(command_job(f"short-{stage.short}", "sleep 20"))
