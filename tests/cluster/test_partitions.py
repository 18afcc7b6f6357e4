"""Partitions of every kind, with clocks that differ by minutes. Two groups of one job must never
train at the same time.

A single job goes through all partitions. Each pod has its own network namespace, in which packets
are dropped. Two partitions take a minute each and run only if DDPJOB_TEST_PARTITIONS=1: a
coordinator that is partitioned from its members, and a dead kubelet whose containers keep running.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from borrowed import named, skip
from jobs import SCRIPTS, Jobs, Json, job
from test_nodes import alive
from testcluster import processes
from testcluster.cluster import Cluster

ALL = os.environ.get("DDPJOB_TEST_PARTITIONS") == "1"
NODE_LOST_AFTER = 5
GPU, CONTROL = "test.ddpjob.io/partitioned", "test.ddpjob.io/partitioned-control"


@dataclass
class Steps:
    """The steps that the processes of one round have written."""

    fence: tuple[int, int]
    ranks: int
    first: float
    last: float


class Partitioned:
    """A job with one pod each on n1 and n2, and its coordinator on n2."""

    name = "partitioned"

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self.jobs, self.cluster, self.folder = jobs, jobs.cluster, folder

    def start(self) -> None:
        for node in ("n1", "n2"):
            self.cluster.set_gpus(node, 1, GPU)
        self.cluster.set_gpus("n2", 1, CONTROL)
        made = job(
            self.name,
            script=str(SCRIPTS / "timed_steps.py"),
            gpusPerNode=1,
            procsPerNode=1,
            backend="gloo",
            gpuResource=GPU,
            recovery={"mode": "Fast", "nodeLostAfterSeconds": NODE_LOST_AFTER},
            rendezvous={"resources": {"limits": {CONTROL: 1}}},
            storage={"checkpoints": {"hostPath": str(self.folder), "shared": True}},
        )
        (trainer,) = made["spec"]["podTemplate"]["spec"]["containers"]
        trainer["env"] = [*trainer["env"], {"name": "PYTHONPATH", "value": str(SCRIPTS / "skewed")}]
        self.jobs.apply(made)
        self.jobs.wait_phase(self.name, "Running", timeout=180)
        self.trains_on()

    @property
    def status(self) -> Json:
        return self.jobs.status(self.name)

    def pod(self, role: str, index: int = 0) -> Json:
        """Return the newest pod of the role (and slot) that is not being deleted."""
        found = [
            pod
            for pod in self.jobs.pods(role).values()
            if pod["metadata"]["labels"].get("ddpjob.io/index", "0") == str(index)
            and "deletionTimestamp" not in pod["metadata"]
        ]
        return max(found, key=lambda pod: int(pod["metadata"]["labels"]["ddpjob.io/attempt"]))

    @contextmanager
    def dropping(self, pod: Json, *peers: str) -> Iterator[None]:
        """Drop packets between the pod and the addresses, in the pod's network namespace, which may
        end with the pod.
        """
        uid = pod["metadata"]["labels"]["ddpjob.io/job-uid"]
        enter = ["nsenter", f"--net=/proc/{alive(pod['metadata']['name'], uid)[0]}/ns/net", "iptables", "--wait"]
        rules = [(*way, peer) for peer in peers for way in (("INPUT", "--source"), ("OUTPUT", "--destination"))]
        try:
            for rule in rules:
                processes.run(*enter, "--append", *rule, "--jump", "DROP")
            yield
        finally:
            for rule in rules:
                processes.succeeds(*enter, "--delete", *rule, "--jump", "DROP")

    def lines(self) -> list[str]:
        """Return the lines of the script's own files, with their line ends."""
        files = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        return [line for path in files for line in path.read_text().splitlines(keepends=True)]

    def steps(self) -> list[Steps]:
        """Return the steps of each round, oldest first."""
        found: dict[tuple[int, int], Steps] = {}
        for line in self.lines():
            if not line.endswith("\n"):
                continue  # this line is still being written
            fence, ranks, at, _ = line.split()
            generation, number = map(int, fence.split("."))
            steps = found.setdefault(
                (generation, number), Steps((generation, number), int(ranks), float(at), float(at))
            )
            steps.first, steps.last = min(steps.first, float(at)), max(steps.last, float(at))
        return [found[fence] for fence in sorted(found)]

    def trains_on(self, round_before: tuple[int, int] = (-1, 0)) -> tuple[int, int]:
        """Wait for new steps in a later round, and return that round."""
        now = time.monotonic()
        later = lambda: [s for s in self.steps() if s.fence > round_before and s.last > now]  # noqa: E731
        self.jobs.wait(f"steps after round {round_before}", lambda: bool(later()), timeout=90)
        return later()[-1].fence

    def has_trained_alone(self) -> None:
        rounds = self.steps()
        assert all(steps.ranks == 2 for steps in rounds)
        for earlier, later in pairwise(rounds):
            assert earlier.last < later.first, f"round {later.fence} began while {earlier.fence} took steps: {rounds}"


@pytest.fixture
def partitioned(jobs: Jobs, cluster: Cluster, tmp_path: Path) -> Iterator[Partitioned]:
    if named():
        skip("drops packets of pods and stops a kubelet")
    tmp_path.chmod(0o777)
    made = Partitioned(jobs, tmp_path)
    made.start()
    yield made
    for node in ("n1", "n2"):
        cluster.set_gpus(node, 0, GPU)
        cluster.set_gpus(node, 0, CONTROL)


def test_two_groups_never_train_at_the_same_time_despite_partitions_and_clock_errors(partitioned: Partitioned) -> None:
    stage, began = partitioned, time.monotonic()

    def note(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s: {what}")

    stamps = [line.split() for line in stage.lines()]
    skews = sorted({round(float(wall) - float(at) - (time.time() - time.monotonic())) for _, _, at, wall in stamps})
    assert [skews[0], skews[-1]] == [-120, 0]

    operator_and_coordinator(stage)
    note("operator and coordinator were apart")
    if ALL:
        coordinator_and_members(stage)
        note("coordinator and members were apart")
    half_of_the_members(stage)
    note("half of the members were apart")
    if ALL:
        a_kubelet(stage)
        note("a kubelet was dead, its containers running")
    stage.trains_on()
    stage.has_trained_alone()
    assert stage.status["restarts"]["counted"] == 0


def operator_and_coordinator(stage: Partitioned) -> None:
    number, coordinator = stage.trains_on(), stage.pod("coordinator")
    with stage.dropping(coordinator, stage.cluster.settings.addresses.door_host):
        time.sleep(NODE_LOST_AFTER + 2)
        assert stage.trains_on() == number
    assert stage.pod("coordinator")["metadata"]["uid"] == coordinator["metadata"]["uid"], (
        "the partition must have no consequences"
    )


def coordinator_and_members(stage: Partitioned) -> None:
    number, before = stage.trains_on(), stage.status["restarts"].get("total", 0)
    members = [stage.pod("node", index)["status"]["podIP"] for index in (0, 1)]
    with stage.dropping(stage.pod("coordinator"), *members):
        stage.jobs.wait("the next coordinator", lambda: stage.status["rendezvous"].get("attempt", 0) == 1, timeout=90)
        assert stage.trains_on() == number, "members must keep training without a coordinator"
    stage.jobs.wait_phase(stage.name, "Running")
    assert stage.trains_on() == number, "the members are still in their round"
    assert [slot["attempt"] for slot in stage.status["slots"]] == [0, 0]
    assert stage.status["restarts"]["total"] <= before + 1


def half_of_the_members(stage: Partitioned) -> None:
    number, lost = stage.trains_on(), stage.pod("node", 1)
    others = [stage.pod("node", 0)["status"]["podIP"], stage.pod("coordinator")["status"]["podIP"]]
    with stage.dropping(lost, *others, stage.cluster.settings.addresses.dns):
        stage.trains_on(number)
    assert stage.pod("node", 1)["metadata"]["name"] != lost["metadata"]["name"]


def a_kubelet(stage: Partitioned) -> None:
    """Stop the kubelet of the host with a node and the coordinator. Their containers keep running
    with a working network.
    """
    number, nodes = stage.trains_on(), [stage.pod("node", index) for index in (0, 1)]
    (left,) = [pod["metadata"] for pod in nodes if pod["spec"]["nodeName"] == "n2"]
    stage.cluster.set_gpus("n1", 2, GPU)
    stage.cluster.set_gpus("n1", 1, CONTROL)
    programs = processes.recorded(stage.cluster.settings)
    (kubelet,) = [program for program in programs if program.name == "n2-kubelet"]
    os.kill(kubelet.pid, signal.SIGSTOP)
    try:
        stage.trains_on(number)
        stage.jobs.wait("a coordinator elsewhere", lambda: stage.pod("coordinator")["spec"].get("nodeName") != "n2")
    finally:
        os.kill(kubelet.pid, signal.SIGCONT)
    uid = left["labels"]["ddpjob.io/job-uid"]
    processes.wait_for("the end of the pod that was left", lambda: not alive(left["name"], uid), timeout=60)
    processes.wait_for("n2 to be Ready", lambda: "n2" in stage.cluster.ready_nodes(), timeout=60)
