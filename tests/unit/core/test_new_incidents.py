"""How incidents in the coordinator's report become findings."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, Slot
from ddpjob.controller.pod_views import read_pod
from ddpjob.core.failures.classify import explain_end
from ddpjob.core.failures.new_incidents import find_new_incidents
from ddpjob.core.view import View
from ddpjob.core.world import World
from ddpjob_runtime.coordinator.first_cause import Finish, Source, WorkerFailure, first_cause
from ddpjob_runtime.protocol import CoordinatorState, Incident, IncidentKind, Report

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def view_of(incident: Incident) -> View:
    job = DDPJob.read(
        {
            "metadata": {"name": "job", "namespace": "space", "uid": "uid"},
            "spec": {"image": "image", "script": "train.py", "nodes": 2},
        }
    )
    status = JobStatus(slots=(Slot(node="first"), Slot(node="second")))
    report = Report(0, CoordinatorState.RESTARTING, 2, 2, (1.0, 60.0), incidents=(incident,))
    return View(job, replace(status, rendezvous=replace(status.rendezvous, generation=0)), World(report=report), NOW)


@pytest.mark.parametrize(("index", "node"), [(None, ""), (0, "first"), (1, "second"), (2, ""), (-1, ""), (-3, "")])
def test_an_incident_is_attributed_to_the_node_of_its_slot(index: int | None, node: str) -> None:
    incident = Incident(1, NOW, IncidentKind.WORKER_FAILED, pod="job-0-0", index=index, exit_code=1)
    assert [f.restart.node for f in find_new_incidents(view_of(incident)).findings] == [node]


@pytest.mark.parametrize(
    ("limited", "said"),
    [
        (None, "more memory than spec.resources.limits.memory allows"),
        ("cpu, memory request for container trainer", "more memory than spec.resources.limits.memory allows"),
        ("memory limit for container sidecar", "more memory than spec.resources.limits.memory allows"),
        (
            "cpu request for container trainer; cpu, memory limit for container trainer",
            "more memory than 256Mi, the default of the namespace's LimitRange; set spec.resources.limits.memory",
        ),
    ],
)
def test_a_memory_limit_set_by_the_namespace_is_reported_as_such(limited: str | None, said: str) -> None:
    """Regression: a job without limits was advised to raise a limit that it does not have."""
    labels = {"ddpjob.io/role": "node", "ddpjob.io/index": "0", "ddpjob.io/job-uid": "uid"}
    annotations = {"kubernetes.io/limit-ranger": f"LimitRanger plugin set: {limited}"} if limited else {}
    container = {"name": "trainer", "resources": {"limits": {"memory": "256Mi"}}}
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    pod = read_pod(
        {
            "metadata": {"name": "job-0-0", "uid": "u", "labels": labels, "annotations": annotations},
            "spec": {"containers": [container], "nodeName": "n0"},
            "status": {"containerStatuses": [{"name": "trainer", "state": ended}]},
        }
    )
    view = view_of(Incident(1, NOW, IncidentKind.OOM_KILLED, pod="job-0-0", index=0, rank=0, message="SIGKILL"))
    view = replace(view, world=replace(view.world, pods=(pod,)))
    (finding,) = find_new_incidents(view).findings
    assert said in finding.restart.message
    assert said in explain_end(pod).message


@pytest.mark.parametrize(("procs", "ranks"), [(1, "rank 1"), (2, "ranks 2 to 3")])
def test_workers_that_exit_before_the_others_are_reported_with_their_ranks(procs: int, ranks: str) -> None:
    """An example is a rank with fewer batches than its peers."""
    verdict = first_cause(
        [WorkerFailure(Source("job-0-0", 0), 0, 0, 1, None, "Connection reset by peer", "", 9.0)],
        [],
        [Finish(Source("job-1-0", 1), 7.0, node=1)],
        None,
    )
    assert verdict is not None
    view = view_of(Incident(1, NOW, verdict.kind, **verdict.details))
    view = replace(view, job=replace(view.job, spec=replace(view.job.spec, procs_per_node=procs)))
    (finding,) = find_new_incidents(view).findings
    assert finding.restart.message == f"{ranks} in pod job-1-0 ended with exit code 0 before the other ranks"


@pytest.mark.parametrize(
    ("signal", "written", "said"),
    [
        (None, "ended with exit code 5", "ended with exit code 5"),
        (None, "SystemExit: 5", "ended with exit code 5: SystemExit: 5"),
        ("SIGSEGV", "killed by signal SIGSEGV", "ended with signal SIGSEGV"),
        (
            "SIGABRT",
            "killed by signal SIGABRT: a library aborted the process",
            "ended with signal SIGABRT: a library aborted the process",
        ),
        ("signal 37", "killed by signal 37", "ended with signal 37"),
        (None, "ended with exit code 5 before the others", "ended with exit code 5 before the others"),
    ],
)
def test_a_failure_in_the_report_becomes_only_one_finding(signal: str | None, written: str, said: str) -> None:
    ended = Incident(1, NOW, IncidentKind.WORKER_FAILED, "job-0-0", 0, 0, 0, 5, signal, written)
    assert [f.restart.message for f in find_new_incidents(view_of(ended)).findings] == [f"rank 0 in pod job-0-0 {said}"]


FULL = "; /dev/shm was probably full: raise storage.sharedMemory"


@pytest.mark.parametrize(
    ("signal", "written"),
    [
        ("SIGBUS", "killed by signal SIGBUS"),
        (
            None,
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's"
            " workers are out of shared memory. Please try to raise your shared memory limit.",
        ),
        (
            None,
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
        ),
        (None, "RuntimeError: unable to write to file </torch_7_1_0>: No space left on device (28)"),
    ],
)
def test_a_rank_that_found_dev_shm_full_is_reported_with_advice_to_enlarge_it(signal: str | None, written: str) -> None:
    incident = Incident(1, NOW, IncidentKind.WORKER_FAILED, "job-0-0", 0, 0, 0, 1, signal, written)
    (finding,) = find_new_incidents(view_of(incident)).findings
    said = f"signal {signal}" if signal else f"exit code 1: {written}"
    assert finding.restart.message == f"rank 0 in pod job-0-0 ended with {said}{FULL}"
    disk = replace(incident, signal=None, message="OSError: [Errno 28] No space left on device: '/checkpoints/a'")
    assert "/dev/shm" not in find_new_incidents(view_of(disk)).findings[0].restart.message


@pytest.mark.parametrize(
    ("failures", "everywhere"),
    [
        ([(0, "bad 0", 7), (1, "bad 1", 7)], True),
        ([(0, "bad 0", 7), (1, "bad 1", 7.3)], True),
        ([(0, "bad", 7)], False),
        ([(0, "bad", 7), (0, "bad", 7)], False),
        ([(0, "bad", 7), (1, "worse", 7)], False),
        ([(0, "bad", 7), (1, "bad", 7), (1, "worse", 7)], False),
        ([(0, "bad", 7), (1, "Connection reset by peer", 7.1)], False),
        ([(0, "bad", 7), (1, "bad", 7), (1, "worse", 7.3)], True),
    ],
)
def test_an_error_in_ranks_of_several_pods_counts_as_an_error_everywhere(
    failures: list[tuple[int, str, float]], everywhere: bool
) -> None:
    """Digits are ignored, because they may be specific to a rank. An error after 7.01, when the
    others were asked to stop, may be a consequence.
    """
    trace = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n'
    found = [
        WorkerFailure(Source(f"job-{pod}-0", pod), number, 0, 1, None, f"ValueError: {said}", trace, at)
        for number, (pod, said, at) in enumerate(failures)
    ]
    verdict = first_cause(found, [], [], 7.01)
    assert verdict is not None
    (finding,) = find_new_incidents(view_of(Incident(1, NOW, verdict.kind, **verdict.details))).findings
    assert finding.restart.everywhere is everywhere
