"""Real failures of every cause. `kubectl get` and `describe` must report each cause correctly and
immediately.

All jobs train at the same time. Each job misbehaves when its test requests it, and records the
time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import create_namespace, print_namespace, remove_namespace
from jobs import SCRIPTS, Jobs, Json, job
from operator_process import OperatorProcess
from testcluster import python_host
from testcluster.cluster import Cluster
from watching import Watch, at_once, phase, restart, restarts

GPU = "test.ddpjob.io/gpu"
PRIORITY = "test-ddpjob-urgent"


@dataclass
class Stage:
    """The namespace in which all the jobs run."""

    jobs: Jobs
    watch: Watch
    folder: Path

    def apply(self, name: str, do: str, rank: int, **spec: object) -> None:
        folder = self.folder / name
        folder.mkdir()
        # writable for any user of the image
        folder.chmod(0o777)
        args = ["--do", do, "--rank", str(rank), "--folder", "/checkpoints"]
        storage = {"checkpoints": {"hostPath": str(folder), "shared": True}}
        self.jobs.apply(job(name, script=str(SCRIPTS / "misbehave.py"), args=args, storage=storage, **spec))

    def go(self, name: str) -> None:
        """Make the job misbehave once it trains."""
        self.watch.first(name, phase("Running"), timeout=150)
        (self.folder / name / "go").touch()

    def fact(self, name: str) -> float:
        """Return the time at which the first rank misbehaved."""
        found = sorted((self.folder / name).glob("fact-*"))
        assert found, "no rank has misbehaved"
        return min(float(file.read_text()) for file in found)

    def describe(self, name: str) -> str:
        return self.jobs.kubectl("describe", "ddpjob", name)

    def event(self, name: str, reason: str) -> str:
        """Return the message of the job's event with that reason."""
        selector = f"--field-selector=reason={reason},involvedObject.name={name}"
        message = ""

        def written() -> bool:
            nonlocal message
            message = self.jobs.kubectl("get", "events", selector, "--output=jsonpath={.items[*].message}")
            return bool(message)

        self.jobs.wait(f"the event {reason} of {name}", written, timeout=10)
        return message


@pytest.fixture(scope="module")
def gpus(cluster: Cluster) -> Iterator[None]:
    """Offer a fictitious GPU on each node, so that a pod that needs one can preempt another."""
    for node in cluster.nodes[:2]:
        cluster.set_gpus(node, 1, GPU)
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": PRIORITY},
        "value": 1000,
    }
    cluster.apply(priority)
    yield
    cluster.kubectl("delete", "priorityclass", PRIORITY)
    for node in cluster.nodes[:2]:
        cluster.set_gpus(node, 0, GPU)


@pytest.fixture(scope="module")
def stage(
    cluster: Cluster,
    operator: OperatorProcess,
    gpus: None,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Stage]:
    namespace = f"causes-{secrets.token_hex(2)}"
    create_namespace(cluster, namespace)
    watch = Watch(cluster, namespace)
    made = Stage(Jobs(cluster, namespace), watch, tmp_path_factory.mktemp("causes"))
    before = request.session.testsfailed
    made.apply("exits", "exit", rank=1, recovery={"mode": "Fast"})
    made.apply("raises", "raise", rank=1, recovery={"maxRestarts": 0})
    made.apply("hungry", "allocate", rank=-1, resources={"limits": {"memory": "1Gi"}})
    made.apply("waits", "hang", rank=1, recovery={"mode": "Fast", "hangAfterSeconds": 5})
    made.apply("yields", "exit", rank=-1, gpusPerNode=1, gpuResource=GPU)
    made.jobs.apply(job("absent", image="ddpjob.test/no-such-image:1", script="x.py"))
    made.jobs.apply(job("broken", script=str(SCRIPTS / "broken_import.py"), recovery={"mode": "Fast"}))
    yield made
    watch.close()
    if request.session.testsfailed > before:
        print_namespace(cluster, namespace)
    remove_namespace(cluster, namespace)


def noticed_after(stage: Stage, name: str, reported: float) -> None:
    seconds = reported - stage.fact(name)
    print(f"{name}: reported {seconds:.2f} s after it happened")
    assert seconds < at_once()


def the_only_break(status: Json) -> Json:
    """Return the only counted restart. Fails the test if the break was not counted exactly once."""
    counted = [r for r in restarts(status) if r["counted"]]
    assert len(counted) == 1, restarts(status)
    assert status["restarts"]["counted"] == 1
    return counted[0]


def test_a_job_waits_and_reports_it_if_its_image_cannot_be_pulled(stage: Stage) -> None:
    """The registry does not respond, which is not the job's fault."""

    def held(status: Json) -> bool:
        running = next((c for c in status.get("conditions", ()) if c["type"] == "Running"), {})
        return running.get("reason") in ("ErrImagePull", "ImagePullBackOff")

    _, status = stage.watch.first("absent", held)
    running = next(c for c in status["conditions"] if c["type"] == "Running")
    assert "ddpjob.test/no-such-image:1" in running["message"]
    assert status["phase"] == "Pending"
    assert not restarts(status)
    assert "no-such-image" in stage.describe("absent")
    assert all(pod.endswith("-0") for pod in stage.jobs.pods()), "no pod has a second attempt"


def test_a_script_that_cannot_be_imported_is_not_retried(stage: Stage) -> None:
    _, status = stage.watch.first("broken", phase("Failed"), timeout=150)
    failed = next(c for c in status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "InitFailure"
    assert "No module named 'numppy'" in failed["message"] and "broken_import.py" in failed["message"]
    assert status["restarts"]["counted"] <= 1
    assert "numppy" in stage.describe("broken") and "numppy" in stage.event("broken", "InitFailure")


def test_the_exit_code_of_a_failed_worker_is_reported(stage: Stage) -> None:
    stage.go("exits")
    reported, status = stage.watch.first("exits", restart("WorkerFailed"))
    noticed_after(stage, "exits", reported)
    broken = the_only_break(status)
    assert (broken["rank"], broken["counted"]) == (1, True)
    assert "ended with exit code 7" in broken["message"]
    assert "exit code 7" in stage.describe("exits") and "exit code 7" in stage.event("exits", "WorkerFailed")
    stage.watch.first("exits", phase("Complete"))


def test_the_traceback_of_the_rank_that_raised_is_reported(stage: Stage) -> None:
    stage.go("raises")
    reported, status = stage.watch.first("raises", phase("Failed"))
    noticed_after(stage, "raises", reported)
    failed = next(c for c in status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "RestartBudgetSpent" and "recovery.maxRestarts is 0" in failed["message"]
    assert "rank 1 in pod raises-" in failed["message"]
    for text in (failed["message"], stage.describe("raises"), stage.event("raises", "RestartBudgetSpent")):
        assert "ValueError: the weights have gone to lunch" in text
        assert 'misbehave.py", line' in text
    assert status["restarts"]["counted"] == 1, "the other rank's connection error is a consequence"


def test_a_memory_limit_that_both_pods_reach_is_reported_once(stage: Stage) -> None:
    stage.go("hungry")
    reported, status = stage.watch.first("hungry", restart("OOMKilled"))
    # The recorded time is the time of the kill, a few seconds after the ranks began to allocate.
    print(f"hungry: reported {reported - stage.fact('hungry'):.2f} s after it began to allocate")
    _, status = stage.watch.first("hungry", phase("Complete"), timeout=120)
    assert the_only_break(status)["reason"] == "OOMKilled"
    assert len(list((stage.folder / "hungry").glob("fact-*"))) == 2, "both pods reached the limit"
    assert "spec.resources.limits.memory" in the_only_break(status)["message"]
    assert "OOMKilled" in stage.describe("hungry") and stage.event("hungry", "OOMKilled")


def test_a_hang_is_reported_with_the_stacks_of_all_ranks(stage: Stage) -> None:
    stage.go("waits")
    reported, status = stage.watch.first("waits", restart("Hang"))
    # there is no step for 5 s, and collecting the stacks takes up to 3 s
    seconds = reported - stage.fact("waits")
    print(f"waits: reported {seconds:.2f} s after it happened")
    assert 5 <= seconds < 5 + 3 + at_once()
    message = the_only_break(status)["message"]
    assert "wait_for_godot" in message and "rank 0" in message and "rank 1" in message
    assert "wait_for_godot" in stage.describe("waits") and "wait_for_godot" in stage.event("waits", "Hang")
    _, status = stage.watch.first("waits", phase("Complete"))
    assert the_only_break(status)["reason"] == "Hang"


def test_the_preemption_of_a_pod_is_reported(stage: Stage) -> None:
    stage.watch.first("yields", phase("Running"), timeout=150)
    urgent = python_host.pod("urgent", ["sleep", "3"], priorityClassName=PRIORITY)
    urgent["spec"]["containers"][0]["resources"] = {"limits": {GPU: 1}}
    began = time.time()
    stage.jobs.apply(urgent)
    reported, status = stage.watch.first("yields", restart("Preempted"))
    print(f"yields: reported {reported - began:.2f} s after a pod with a higher priority was created")
    assert reported - began < at_once()
    assert [r["counted"] for r in restarts(status)] == [False]
    assert "Preempted" in stage.describe("yields") and stage.event("yields", "Preempted")
    stage.watch.first("yields", lambda s: s.get("phase") == "Running" and s["round"] == status["round"], timeout=90)
