"""Decisions in states that the simulation does not reach."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.job import QUEUE_LABEL, DDPJob
from ddpjob.api.job_classes import JobClasses
from ddpjob.api.job_status import ConditionType, JobStatus, Phase, SlotState
from ddpjob.core.decide import decide
from ddpjob.core.decision import (
    BLOCKED_POLL,
    POLL,
    CreateNode,
    Decision,
    DeletePod,
    MarkWorkload,
    NotifyCoordinator,
    Preparation,
)
from ddpjob.core.plan.slots import protocol_of
from ddpjob.core.status.conditions import with_condition
from ddpjob.core.world import ContainerView, HostView, PodView, Rejection, Role, WorkloadView, World
from ddpjob_runtime.protocol import VERSION, CoordinatorState, Incident, IncidentKind, Report

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OLD, OFFERED = "job-runtime-old", "job-runtime-new"
NEXT = VERSION + 1


def a_job(status: JobStatus | None = None, **fields: Any) -> DDPJob:
    spec = {"image": "image", "nodes": 2, **({} if "command" in fields else {"script": "train.py"}), **fields}
    job = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": spec})
    return replace(job, status=status or decide(job, World(runtime_offered=OFFERED), NOW).status)


@pytest.mark.parametrize("index", [-1, -9, 2, 2**40])
def test_an_incident_with_any_index_is_tolerated(index: int) -> None:
    """The coordinator runs in the user's image, so no report may make the decision or its events
    invalid.
    """
    job = a_job()
    incident = Incident(id=1, time=NOW, kind=IncidentKind.WORKER_FAILED, pod="job-0-0", index=index, exit_code=1)
    report = Report(
        generation=0,
        state=CoordinatorState.RESTARTING,
        nodes=2,
        min_nodes=2,
        backoff=(1.0, 60.0),
        incidents=(incident,),
    )
    pods = tuple(PodView(name=f"job-{i}-0", uid=f"{i}", role=Role.NODE, index=i, host=f"host-{i}") for i in range(2))
    decision = decide(job, World(pods=pods, report=report, runtime=OFFERED, runtime_offered=OFFERED), NOW)
    recorded = decision.status.restarts.recent[-1]
    assert (recorded.pod, recorded.node) == ("job-0-0", "")
    assert [e.reason for e in decision.events if e.warning][:1] == ["WorkerFailed"]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> DDPJob:
    """Return a job that this operator started. Then the operator is upgraded to an invented next
    version that supports both protocols.
    """
    job = a_job()
    monkeypatch.setattr("ddpjob_runtime.protocol.VERSION", NEXT)
    monkeypatch.setattr("ddpjob.core.plan.slots.SUPPORTED_PROTOCOLS", {VERSION, NEXT})
    return replace(job, status=replace(job.status, runtime=OLD))


def test_a_job_of_a_supported_protocol_survives_the_upgrade(pinned: DDPJob) -> None:
    job = pinned
    decision = decide(job, World(runtime=OLD, runtime_offered=OFFERED), NOW)
    assert decision.status.rendezvous.generation == job.status.rendezvous.generation
    assert (decision.status.runtime, decision.status.template_hash) == (OLD, job.status.template_hash)


def test_if_its_runtime_is_gone_all_pods_of_a_job_get_the_newest_one(pinned: DDPJob) -> None:
    """A single new pod would mount the newest runtime, and could not talk to its coordinator."""
    job = pinned
    decision = decide(job, World(runtime="", runtime_offered=OFFERED), NOW)
    assert decision.status.rendezvous.generation == job.status.rendezvous.generation + 1
    assert decision.status.template_hash.endswith(f"-{NEXT}") and decision.status.runtime == OFFERED


def test_the_next_generation_of_a_job_uses_the_protocol_of_its_runtime(pinned: DDPJob) -> None:
    job = pinned
    spec = replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True))
    pod = PodView(name="job-0-0", uid="0", role=Role.NODE)
    suspended = decide(replace(job, spec=spec), World(pods=(pod,), runtime=OLD, runtime_offered=OFFERED), NOW).status
    assert suspended.rendezvous.generation == job.status.rendezvous.generation + 1
    resumed = decide(replace(job, status=suspended), World(runtime=OLD, runtime_offered=OFFERED), NOW).status
    for status in (suspended, resumed):
        assert (status.runtime, protocol_of(status)) == (OLD, VERSION)


# --- other people's changes to a job
# ------------------------------------------------------------------------------


def a_pod(index: int, container: ContainerView | None = None, *, attempt: int = 0, **fields: Any) -> PodView:
    containers = {"trainer": container if container is not None else ContainerView(started=NOW)}
    name = f"job-{index}-{attempt}"
    values = {"uid": name, "role": Role.NODE, "host": f"n{index}", "created": NOW, "phase": "Running", **fields}
    return PodView(name=name, index=index, attempt=attempt, containers=containers, **values)


def after(job: DDPJob, *pods: PodView, **world: Any) -> Decision:
    """Return the decision one second later."""
    return decide(job, World(pods=pods, runtime=OFFERED, runtime_offered=OFFERED, **world), NOW + timedelta(seconds=1))


def running(job: DDPJob, *pods: PodView) -> DDPJob:
    """Return the job after its pods were seen running."""
    return replace(job, status=after(job, *pods).status)


EXITED_WELL = ContainerView(started=NOW, exit_code=0, reason="Completed", finished=NOW + timedelta(seconds=1))


def test_in_a_job_with_command_a_deleted_pod_has_not_finished() -> None:
    """Such a pod may save and exit with 0 on SIGTERM."""
    job = running(a_job(nodes=1, command=["train"]), a_pod(0))
    deleted = a_pod(0, EXITED_WELL, deleted_at=NOW + timedelta(seconds=30), phase="Succeeded")
    decision = after(job, deleted)
    assert not decision.status.terminal
    assert [(r.reason, r.counted) for r in decision.status.restarts.recent] == [("Deleted", False)]
    finished = after(job, a_pod(0, EXITED_WELL, phase="Succeeded"))
    assert finished.status.phase is Phase.COMPLETE
    seen = replace(job, status=replace(job.status, slots=(replace(job.status.slots[0], state=SlotState.SUCCEEDED),)))
    assert after(seen, deleted).status.phase is Phase.COMPLETE, "the pod had finished before it was deleted"


def refused(job: DDPJob, status: int, message: str) -> Decision:
    return after(job, rejections=(Rejection(object="Pod job-0-0", status=status, message=message),))


WEBHOOK = 'admission webhook "images.example.com" denied the request: the registry does not answer'
POLICY = "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: failed expression"


@pytest.mark.parametrize(
    ("status", "message"), [(400, WEBHOOK), (403, WEBHOOK), (422, POLICY), (403, "exceeded quota")]
)
def test_a_refusal_by_a_policy_never_fails_a_job(status: int, message: str) -> None:
    decision = refused(a_job(), status, message)
    scheduled = decision.status.condition(ConditionType.SCHEDULED)
    assert not decision.status.terminal
    assert scheduled is not None and scheduled.reason == "CreationRefused" and message in scheduled.message


def test_invalid_content_fails_only_a_job_that_has_never_run() -> None:
    message = "spec.containers[0].resources.requests: Invalid value: must be less than or equal to cpu limit"
    failed = refused(a_job(), 422, message).status.condition(ConditionType.FAILED)
    assert failed is not None and failed.reason == "InvalidPod"
    ran = running(a_job(), a_pod(0), a_pod(1))
    scheduled = refused(ran, 422, message).status.condition(ConditionType.SCHEDULED)
    assert scheduled is not None and scheduled.reason == "CreationRefused"


@pytest.mark.parametrize(
    ("pod", "field"), [("job-coordinator-0", "spec.rendezvous.resources"), ("job-0-0", "spec.resources")]
)
def test_a_refusal_by_a_limit_range_is_shown_with_its_field(pod: str, field: str) -> None:
    """The operator's own limits for the coordinator may be the ones that are too high."""
    message = "is forbidden: [maximum cpu usage per Container is 1, but limit is 2]"
    rejection = Rejection(object=f"Pod {pod}", status=403, message=message)
    scheduled = after(a_job(), rejections=(rejection,)).status.condition(ConditionType.SCHEDULED)
    assert scheduled is not None and f"but limit is 2]; the values come from {field}; retried" in scheduled.message


NO_DRIVER = "nvidia-container-cli: initialization error: driver not loaded"
NO_PYTHON = 'exec: "python3": executable file not found in $PATH: unknown'


def not_started(index: int, message: str, **fields: Any) -> PodView:
    end = ContainerView(exit_code=128, reason="StartError", message=message)
    return a_pod(index, end, phase="Failed", **fields)


def test_a_host_that_starts_no_containers_is_avoided_but_a_second_one_fails_a_job() -> None:
    job = a_job()
    decision = after(job, not_started(0, NO_DRIVER), a_pod(1))
    assert not decision.status.terminal
    assert [(r.reason, r.counted) for r in decision.status.restarts.recent] == [("StartError", False)]
    assert [n.node for n in decision.status.avoided_nodes] == ["n0"]
    again = replace(job, status=decision.status)
    same = after(again, not_started(0, NO_DRIVER, attempt=1), a_pod(1))
    assert not same.status.terminal
    other = after(again, not_started(0, NO_DRIVER, attempt=1, host="n7"), a_pod(1))
    failed = other.status.condition(ConditionType.FAILED)
    assert failed is not None and failed.reason == "InitFailure" and NO_DRIVER in failed.message


def test_an_image_without_the_program_fails_immediately() -> None:
    failed = after(a_job(), not_started(0, NO_PYTHON), a_pod(1)).status.condition(ConditionType.FAILED)
    assert failed is not None and failed.reason == "InitFailure" and NO_PYTHON in failed.message


def test_pods_that_a_host_rejects_neither_count_nor_end_the_job() -> None:
    job = running(a_job(recovery={"maxRestarts": 0}), a_pod(0), a_pod(1))
    for attempt in range(5):
        rejected = a_pod(
            0,
            ContainerView(),
            attempt=attempt,
            phase="Failed",
            status_reason="UnexpectedAdmissionError",
            status_message="Pod Allocate failed due to no healthy devices",
        )
        job = replace(job, status=after(job, rejected, a_pod(1)).status)
        assert not job.status.terminal
    assert (job.status.restarts.counted, job.status.restarts.total) == (0, 5)
    assert [n.node for n in job.status.avoided_nodes] == ["n0"]
    assert job.status.slots[0].not_before is not None, "the next pod is delayed"


def test_a_pod_placed_repeatedly_on_a_host_that_is_down_backs_off() -> None:
    """The pod tolerates every taint and finds no room elsewhere, so it is lost as soon as it is
    placed.
    """
    job = running(a_job(), a_pod(0), a_pod(1))
    down = HostView(name="n0", ready=False, since=NOW - timedelta(hours=1), out_of_service=False)
    hosts = {"n0": down, "n1": HostView(name="n1", ready=True, since=NOW, out_of_service=False)}
    for attempt in range(2):
        assert job.status.slots[0].not_before is None, "the first loss does not delay the next pod"
        placed = a_pod(0, ContainerView(), attempt=attempt, phase="Pending")
        job = replace(job, status=after(job, placed, a_pod(1), hosts=hosts).status)
    assert [(r.reason, r.pod) for r in job.status.restarts.recent] == [("NodeLost", "job-0-0"), ("NodeLost", "job-0-1")]
    assert job.status.slots[0].not_before is not None, "the next pod is delayed"


def test_a_fast_clock_of_a_host_does_not_switch_off_the_back_off() -> None:
    job = a_job(nodes=1, recovery={"backoff": {"initialSeconds": 4, "maxSeconds": 60}})
    for attempt in range(3):
        end = ContainerView(exit_code=128, reason="StartError", finished=NOW + timedelta(minutes=5))
        failed = a_pod(0, end, attempt=attempt, phase="Failed", created=NOW)
        job = replace(job, status=after(job, failed).status)
    assert job.status.slots[0].failures > 1 and job.status.slots[0].not_before is not None


def test_setting_the_clock_back_does_not_prolong_a_back_off() -> None:
    job = a_job(nodes=1, command=["train"], recovery={"backoff": {"initialSeconds": 4, "maxSeconds": 60}})
    slot = replace(job.status.slots[0], attempt=2, reason="ExitCode", failures=2, not_before=NOW + timedelta(seconds=4))
    job = replace(job, status=replace(job.status, slots=(slot,)))
    world = World(runtime=OFFERED, runtime_offered=OFFERED, has_service=True)
    planned = [
        any(isinstance(action, CreateNode) for action in decide(job, world, NOW + timedelta(seconds=at)).actions)
        for at in (0, 3, 4, -3600)
    ]
    assert planned == [False, False, True, True]


@pytest.mark.parametrize(
    ("reason", "avoided"), [("UnexpectedAdmissionError", ["n9"]), ("OutOfcpu", ["n9"]), ("Evicted", [])]
)
@pytest.mark.parametrize("mode", ["Standard", "Fast"])
def test_a_host_that_rejects_the_coordinator_is_avoided(mode: str, reason: str, avoided: list[str]) -> None:
    job = a_job(recovery={"mode": mode})
    rejected = PodView(
        name="job-coordinator-0", uid="c", role=Role.COORDINATOR, host="n9", phase="Failed", status_reason=reason
    )
    decision = after(running(job, a_pod(0), a_pod(1)), rejected, a_pod(0), a_pod(1))
    assert [r.reason for r in decision.status.restarts.recent] == ["CoordinatorLost"]
    assert [n.node for n in decision.status.avoided_nodes] == avoided


def test_a_job_without_step_reports_counts_as_trained_after_ten_minutes() -> None:
    usage = a_pod(0, ContainerView(started=NOW, exit_code=2, reason="Error"), phase="Failed")
    job = running(a_job(nodes=1, command=["train"]), a_pod(0))
    failed = after(job, usage).status.condition(ConditionType.FAILED)
    assert failed is not None and failed.reason == "ConfigurationError"
    later = NOW + timedelta(minutes=11)
    world = World(pods=(a_pod(0),), runtime=OFFERED, runtime_offered=OFFERED)
    job = replace(job, status=decide(job, world, later).status)
    restarted = decide(job, replace(world, pods=(usage,)), later)
    assert not restarted.status.terminal and restarted.status.restarts.counted == 1


def test_a_job_is_polled_often_only_while_it_waits_for_time_to_pass() -> None:
    """A thousand jobs at rest must not keep the operator busy."""
    job, pods = a_job(), (a_pod(0), a_pod(1))
    coordinator = PodView(name="job-coordinator-0", uid="c", role=Role.COORDINATOR, host="n2", address="10.0.0.1")
    there: dict[str, Any] = {"has_service": True, "has_budget": True, "report_seconds": 10.0}
    job = running(job, *pods, coordinator)
    hosts = {f"n{i}": HostView(name=f"n{i}", ready=True, since=NOW, out_of_service=False) for i in range(3)}
    assert after(job, *pods, coordinator, **there).wake == 10
    assert after(job, *pods, coordinator, **there, hosts=hosts).wake == 10
    for silent in ("n1", "n2"):  # the hosts of a member and of the coordinator
        down = hosts | {silent: replace(hosts[silent], ready=False)}
        assert after(job, *pods, coordinator, **there, hosts=down).wake == POLL
    assert after(job, pods[0], coordinator, **there).wake == POLL, "a pod is being replaced"
    assert after(job, *pods, coordinator, **there | {"report_seconds": 0.0}).wake == POLL, (
        "the coordinator's report is not being watched"
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_a_disruption_budget_is_created_as_soon_as_a_pod_runs(wanted: bool) -> None:
    job = a_job(scheduling={"disruptionBudget": wanted})
    waits, runs = (a_pod(0, ContainerView()), a_pod(1, ContainerView())), (a_pod(0), a_pod(1, ContainerView()))
    assert Preparation.BUDGET not in after(job, *waits).actions, "no pod has any progress yet that could be lost"
    assert (Preparation.BUDGET in after(job, *runs).actions) == wanted
    assert Preparation.BUDGET not in after(job, *runs, has_budget=True).actions


def test_the_endpoint_of_a_coordinator_with_an_ipv6_address_has_brackets() -> None:
    coordinator = PodView(
        name="job-coordinator-0", uid="c", role=Role.COORDINATOR, host="n2", address="fd00::1", phase="Running",
        containers={"coordinator": ContainerView(started=NOW)},
    )  # fmt: skip
    rendezvous = after(a_job(), a_pod(0), a_pod(1), coordinator).status.rendezvous
    assert rendezvous is not None and rendezvous.endpoint == "[fd00::1]:29401"


# --- large jobs -------------------------------------------------------------------------------------------------


def large_loss(lost: int = 37) -> Decision:
    """Return the decision for a job that has lost this many of its 100 pods at once."""
    job = a_job(nodes=100, recovery={"mode": "Fast"})
    coordinator = PodView(
        name="job-coordinator-0",
        uid="c",
        role=Role.COORDINATOR,
        address="10.0.0.1",
        containers={"coordinator": ContainerView(started=NOW)},
    )
    pods = [a_pod(i) for i in range(100)]
    job = running(job, *pods, coordinator)
    assert job.status.slots[99].state is SlotState.RUNNING
    return after(job, *pods[lost:], coordinator)


def test_many_lost_pods_are_reported_in_one_message() -> None:
    [notified] = [a for a in large_loss().actions if isinstance(a, NotifyCoordinator) and a.verb == "gone"]
    assert notified.body["pods"] == [f"job-{i}-0" for i in range(37)]


def test_many_restarts_of_the_same_kind_are_reported_by_one_event() -> None:
    events = [e for e in large_loss().events if e.reason == "Deleted"]
    assert len(events) == 1
    assert events[0].message.startswith("37 pods: Deleted (not counted): job-0-0, job-1-0, job-2-0")
    assert len(events[0].message.encode()) <= 1000
    few = [e for e in large_loss(lost=3).events if e.reason == "Deleted"]
    assert [e.message.split()[1] for e in few] == ["job-0-0", "job-1-0", "job-2-0"]


def test_a_pod_that_disappears_is_attributed_to_its_last_known_reason() -> None:
    """If a node is drained, the operator may see only the pod's end."""
    job = running(a_job(), a_pod(0), a_pod(1))
    for fields, container, reason, counted in (
        ({"disruption": "EvictionByEvictionAPI"}, None, "Evicted", False),
        ({"phase": "Failed"}, ContainerView(started=NOW, exit_code=137, reason="OOMKilled"), "OOMKilled", True),
        (
            {
                "phase": "Failed",
                "status_reason": "Evicted",
                "status_message": 'Usage of EmptyDir volume "s" exceeds the limit "1Gi". ',
            },
            None,
            "StorageExceeded",
            True,
        ),
        ({"deleted_at": NOW}, ContainerView(started=NOW, exit_code=143), "Deleted", False),
        ({}, None, "Deleted", False),
    ):
        last = a_pod(0, container, **fields)
        recorded = after(job, a_pod(1), departed=(last,)).status.restarts.recent
        assert [(r.reason, r.counted) for r in recorded] == [(reason, counted)]


def test_a_pod_that_lost_its_labels_is_not_reported_as_certainly_deleted() -> None:
    job = running(a_job(), a_pod(0), a_pod(1))
    for last, message in (
        ((a_pod(0),), "pod job-0-0 was deleted, or its labels were removed"),
        ((a_pod(0, deleted_at=NOW),), "pod job-0-0 was deleted"),
        ((), "pod job-0-0 was deleted"),
    ):
        assert [r.message for r in after(job, a_pod(1), departed=last).status.restarts.recent] == [message]


def test_a_suspended_job_is_polled_until_its_pods_are_gone() -> None:
    job = running(a_job(), a_pod(0), a_pod(1))
    job = replace(job, spec=replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True)))
    ending = after(job, a_pod(0, deleted_at=NOW))
    suspended = ending.status.condition(ConditionType.SUSPENDED)
    assert ending.wake is not None and suspended is not None
    assert suspended.message == "1 pod still terminating"
    assert after(replace(job, status=ending.status)).wake is None


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        ({"host": "", "phase": "Pending"}, "a finalizer holds it"),
        ({}, "a finalizer holds it, or its Kubernetes node n0 is unreachable"),
    ],
)
def test_a_suspended_job_reports_which_pod_should_have_ended(placed: dict[str, str], why: str) -> None:
    job = running(a_job(), a_pod(0), a_pod(1))
    job = replace(job, spec=replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True)))
    held = a_pod(0, deleted_at=NOW - timedelta(seconds=9), **placed)
    suspended = after(job, a_pod(1, deleted_at=NOW), held).status.condition(ConditionType.SUSPENDED)
    assert suspended is not None
    said = "2 pods still terminating; pod job-0-0 should have ended by 2025-12-31T23:59:51Z"
    assert suspended.message == f"{said}, but {why}"


@pytest.mark.parametrize("trained", [True, False])
def test_only_a_job_that_has_trained_is_said_to_continue_when_it_resumes(*, trained: bool) -> None:
    job = running(a_job(), a_pod(0), a_pod(1))
    job = replace(job, status=replace(job.status, trained=trained))
    asked = replace(job, spec=replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True)))
    suspended = after(asked, a_pod(0), a_pod(1))
    assert [e.message for e in suspended.events] == [
        "runPolicy.suspend is true: pods are deleted, and checkpoints are kept"
    ]
    resumed = after(replace(job, status=suspended.status))
    said = "training continues from the newest checkpoint" if trained else "runPolicy.suspend is false"
    assert [e.message for e in resumed.events if e.reason == "Resumed"] == [said]


def test_a_suspended_job_has_no_speed_and_no_time_left() -> None:
    """Regression: kubectl and all other views showed the group's last report for the whole
    suspension.
    """
    job = running(a_job(), a_pod(0), a_pod(1))
    reported = {"step": 7, "samplesPerSecond": 9.0, "eta": 60.0, "metrics": {"stepsPerSecond": 3.0, "lr": 0.1}}
    last = Report(0, CoordinatorState.RUNNING, 2, 2, (1.0, 60.0), progress=reported)
    job = replace(job, status=after(job, a_pod(0), a_pod(1), report=last).status)
    assert job.status.progress["speedDisplay"] == "9/s"
    job = replace(job, spec=replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True)))
    for report in (last, None):
        job = replace(job, status=after(job, a_pod(0, deleted_at=NOW), report=report).status)
        shown = {name: value for name, value in job.status.progress.items() if name != "updatedAt"}
        assert shown == {"step": 7, "metrics": {"lr": 0.1}, "display": "step 7"}


@pytest.mark.parametrize(("seconds", "sent"), [(2, False), (6, True), (29, False)])
def test_the_coordinator_stops_a_deleted_pod_that_does_not_end(seconds: int, sent: bool) -> None:
    """A signal that arrives while a container starts is lost. Regression: such a pod stayed for its
    whole grace period.
    """
    coordinator = PodView(
        name="job-coordinator-0",
        uid="c",
        role=Role.COORDINATOR,
        host="n9",
        address="10.0.0.9",
        containers={"coordinator": ContainerView(started=NOW)},
    )
    job = running(a_job(), a_pod(0), a_pod(1), coordinator)
    suspended = replace(job, spec=replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True)))
    leaving = a_pod(0, deleted_at=NOW + timedelta(seconds=1 + 30 - seconds))
    for each in (suspended, job):
        sends = [a for a in after(each, leaving, a_pod(1), coordinator).actions if isinstance(a, NotifyCoordinator)]
        told = [(a.endpoint.partition(":")[0], a.body["pods"]) for a in sends if a.verb == "leave"]
        assert told == ([("10.0.0.9", ["job-0-0"])] if sent else [])


def test_a_finished_job_has_no_time_left() -> None:
    job = running(a_job(), a_pod(0), a_pod(1))
    reported = {"step": 7, "eta": 60.0, "metrics": {"stepsPerSecond": 3.0}}
    last = Report(0, CoordinatorState.RUNNING, 2, 2, (1.0, 60.0), progress=reported)
    job = replace(job, status=after(job, a_pod(0), a_pod(1), report=last).status)
    assert job.status.progress["eta"] == "1m00s"
    ended = after(job, *(a_pod(n, EXITED_WELL, phase="Succeeded") for n in (0, 1)), report=last).status
    assert ended.holds(ConditionType.COMPLETE)
    assert "eta" not in ended.progress and ended.progress["speedDisplay"] == "3 steps/s"


@pytest.mark.parametrize("message", ["", "can't open file 'train.py'"])
def test_no_restart_is_counted_if_a_job_fails_immediately(message: str) -> None:
    """Regression: both pods' ends were counted as restarts, although nothing restarted."""
    job = running(a_job(recovery={"maxRestarts": 0}), a_pod(0), a_pod(1))
    exited = ContainerView(started=NOW, exit_code=2, reason="Error", message=message, finished=NOW)
    status = after(job, a_pod(0, exited, phase="Failed"), a_pod(1, exited, phase="Failed")).status
    assert status.phase is Phase.FAILED and status.restarts.recent, "the failures are listed anyway"
    assert (status.restarts.total, status.restarts.uncounted) == (0, 0)
    assert "+" not in status.write(job.spec)["restarts"]["display"]


def test_a_complete_job_is_scheduled_even_if_a_spare_never_had_a_node() -> None:
    """Regression: `kubectl wait --for=condition=Scheduled` reported a fault for each job whose
    spare never had a node.
    """
    spare = a_pod(2, ContainerView(), role=Role.SPARE, host="", phase="Pending", unschedulable="0/2 nodes")
    job = running(a_job(spares=1), a_pod(0), a_pod(1), spare)
    assert not job.status.holds(ConditionType.SCHEDULED)
    ended = after(job, *(a_pod(n, EXITED_WELL, phase="Succeeded") for n in (0, 1)), spare).status
    assert ended.holds(ConditionType.COMPLETE) and ended.holds(ConditionType.SCHEDULED)


def test_a_job_that_is_created_suspended_has_no_pods_to_delete() -> None:
    job = a_job(JobStatus(), runPolicy={"suspend": True})
    assert [e.message for e in after(job).events] == ["runPolicy.suspend is true: no pods are created"]


def test_a_suspended_job_has_no_preflight_result() -> None:
    """The group that forms when the job resumes has other pods and its own preflight."""
    job = running(a_job(preflight={}), a_pod(0), a_pod(1))
    passed = with_condition(job.status, ConditionType.PREFLIGHT_PASSED, True, "LinksChecked", "12 GB/s", NOW)
    policy = replace(job.spec.run_policy, suspend=True)
    suspended = after(replace(job, status=passed, spec=replace(job.spec, run_policy=policy)))
    assert suspended.status.condition(ConditionType.PREFLIGHT_PASSED) is None


@pytest.mark.parametrize("suspend", [True, False], ids=["suspended", "another generation"])
def test_a_pod_kept_by_a_finalizer_does_not_keep_the_coordinator(*, suspend: bool) -> None:
    """An example is a pod that was never placed, so that no kubelet will ever report its end."""
    job = running(a_job(), a_pod(0), a_pod(1))
    policy = replace(job.spec.run_policy, suspend=suspend)
    rendezvous = replace(job.status.rendezvous, generation=1)
    job = replace(job, spec=replace(job.spec, run_policy=policy), status=replace(job.status, rendezvous=rendezvous))
    coordinator = PodView(name="job-coordinator-0", uid="c", role=Role.COORDINATOR, host="n9", phase="Running")

    def is_kept(deleted_at: datetime) -> bool:
        kept = a_pod(0, ContainerView(), phase="Pending", host="", deleted_at=deleted_at)
        return DeletePod("job-coordinator-0", "c") not in after(job, kept, coordinator).actions

    assert is_kept(NOW + timedelta(seconds=30))
    assert not is_kept(NOW - timedelta(seconds=30))


def test_a_finished_job_retries_the_notification_of_kueue_only_rarely() -> None:
    """The request may be refused for a long time."""
    ended = with_condition(a_job().status, ConditionType.COMPLETE, True, "Finished", "", NOW)
    decision = after(a_job(ended), workloads=(WorkloadView(name="w", uid="u"),))
    assert [type(action) for action in decision.actions] == [MarkWorkload]
    assert decision.wake == BLOCKED_POLL


def test_the_quota_of_a_finished_job_is_released_when_its_pods_have_ended() -> None:
    failed = with_condition(a_job().status, ConditionType.FAILED, True, "DeadlineExceeded", "", NOW)
    job, request = a_job(failed), (WorkloadView(name="w", uid="u"),)
    ending = after(job, a_pod(0, deleted_at=NOW + timedelta(seconds=30)), workloads=request)
    assert not ending.actions and ending.wake == POLL
    silent = after(job, a_pod(0, deleted_at=NOW - timedelta(seconds=5)), workloads=request)
    assert [type(action) for action in silent.actions] == [MarkWorkload], "the pod's host does not report its end"
    over = a_pod(0, EXITED_WELL, phase="Failed", deleted_at=NOW + timedelta(seconds=30))
    assert [type(action) for action in after(job, over, workloads=request).actions] == [MarkWorkload]


def test_the_name_of_a_pod_that_disappeared_unseen_is_not_reused() -> None:
    job = a_job()
    assert {a.attempt for a in after(job).actions if isinstance(a, CreateNode)} == {0}
    coordinator = PodView(name="job-coordinator-0", uid="c", role=Role.COORDINATOR)
    decision = after(job, a_pod(1), departed=(a_pod(0, ContainerView(), phase="Pending"), coordinator))
    assert {(r.pod, r.reason) for r in decision.status.restarts.recent} == {
        ("job-0-0", "Deleted"),
        ("job-coordinator-0", "CoordinatorLost"),
    }
    assert (decision.status.slots[0].attempt, decision.status.rendezvous.generation) == (1, 1)


@pytest.mark.parametrize("job", [a_job(), a_job(command=["train"])], ids=["script", "command"])
def test_a_pod_whose_init_container_failed_is_kept_with_its_log(job: DDPJob) -> None:
    """The main container never starts. The kubelet has ended the whole pod already, so it need not
    be deleted.
    """
    waiting = ContainerView(waiting_reason="PodInitializing")
    fetch = ContainerView(started=NOW, exit_code=4, reason="Error", message="no such bucket")
    failed = a_pod(0, waiting, phase="Failed", init_containers={"fetch": fetch})
    world = World(pods=(failed, a_pod(1, ContainerView(started=NOW))), runtime=OFFERED, runtime_offered=OFFERED)
    decision = decide(job, world, NOW + timedelta(seconds=5))
    [restart] = decision.status.restarts.recent
    assert restart.message == "init container fetch of pod job-0-0 ended with exit code 4: no such bucket"
    assert failed.name not in [action.name for action in decision.actions if isinstance(action, DeletePod)]
    over = decide(a_job(recovery={"maxRestarts": 0}), world, NOW + timedelta(seconds=5))
    assert over.status.phase is Phase.FAILED
    assert failed.name not in [action.name for action in over.actions if isinstance(action, DeletePod)]


@pytest.mark.parametrize(("code", "phase"), [(78, Phase.FAILED), (1, Phase.RESTARTING)])
def test_a_commit_that_a_repository_lacks_ends_the_job_and_a_silent_server_does_not(code: int, phase: Phase) -> None:
    waiting = ContainerView(waiting_reason="PodInitializing")
    clone = ContainerView(
        started=NOW, exit_code=code, reason="Error", message="code.git: https://h/p has no commit 1f2e"
    )
    failed = a_pod(0, waiting, phase="Failed", init_containers={"ddpjob-code": clone})
    world = World(pods=(failed, a_pod(1, ContainerView(started=NOW))), runtime=OFFERED, runtime_offered=OFFERED)
    status = decide(a_job(), world, NOW + timedelta(seconds=5)).status
    assert status.phase is phase
    if phase is Phase.FAILED:
        [condition] = [c for c in status.conditions if c.type == "Failed"]
        assert condition.reason == "InitFailure" and "https://h/p has no commit 1f2e" in condition.message
    other = a_pod(0, waiting, phase="Failed", init_containers={"mine": clone})
    world = replace(world, pods=(other, world.pods[1]))
    assert decide(a_job(), world, NOW + timedelta(seconds=5)).status.phase is Phase.RESTARTING


@pytest.mark.parametrize(("code", "phase"), [(42, Phase.FAILED), (2, Phase.RESTARTING)])
def test_a_rule_for_an_exit_code_also_applies_to_init_containers(code: int, phase: Phase) -> None:
    job = a_job(recovery={"rules": [{"cause": "ExitCode", "exitCodes": [42], "action": "Fail"}]})
    fetch = ContainerView(started=NOW, exit_code=code, reason="Error")
    failed = a_pod(0, ContainerView(waiting_reason="PodInitializing"), phase="Failed", init_containers={"fetch": fetch})
    decision = after(job, failed, a_pod(1, ContainerView(started=NOW)))
    assert decision.status.phase is phase


def test_a_sidecar_that_outlives_the_program_is_stopped_with_its_pod() -> None:
    job = a_job()
    ended = a_pod(0, ContainerView(started=NOW, exit_code=1, reason="Error"), phase="Running")
    sidecar = replace(ended, containers={**ended.containers, "logger": ContainerView(started=NOW)})
    world = World(pods=(sidecar,), runtime=OFFERED, runtime_offered=OFFERED)
    assert DeletePod(ended.name, ended.uid) in decide(job, world, NOW + timedelta(seconds=5)).actions


def test_a_sidecar_of_a_finished_program_does_not_outlive_a_suspension() -> None:
    """The sidecar would hold the pod's GPUs in a job that reports no running pods."""
    job = running(a_job(command=["train"]), a_pod(0), a_pod(1))
    job = replace(job, spec=replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True)))
    ended = a_pod(0, EXITED_WELL)
    sidecar = replace(ended, containers={**ended.containers, "logger": ContainerView(started=NOW)})
    suspended = after(job, sidecar, a_pod(1))
    assert {a.name for a in suspended.actions if isinstance(a, DeletePod)} == {"job-0-0", "job-1-0"}
    job = replace(job, status=suspended.status)

    def said(pod: PodView, **world: Any) -> str:
        condition = after(job, pod, **world).status.condition(ConditionType.SUSPENDED)
        return condition.message if condition is not None else ""

    assert said(replace(sidecar, deleted_at=NOW)) == "1 pod still terminating"
    down = {"n0": HostView(name="n0", ready=False, since=NOW, out_of_service=False)}
    assert said(replace(sidecar, deleted_at=NOW), hosts=down).startswith("no pods are running"), (
        "no kubelet would confirm that the pod has ended"
    )
    assert said(ended).startswith("no pods are running")


def new_job(label: str = "", **spec: Any) -> DDPJob:
    meta = {"name": "job", "namespace": "space", "uid": "uid", "labels": {QUEUE_LABEL: label} if label else {}}
    return DDPJob.read({"metadata": meta, "spec": {"image": "image", "nodes": 2, "script": "train.py", **spec}})


FAULTY = World(problems=("a fault",))


def test_a_job_that_failed_for_its_faulty_template_fails_only_once() -> None:
    job = new_job()
    first = decide(job, FAULTY, NOW)
    assert first.status.phase is Phase.FAILED
    again = decide(replace(job, status=first.status), FAULTY, NOW + timedelta(minutes=1))
    assert (again.status, again.events) == (first.status, ())


def test_a_new_job_with_a_faulty_template_fails_even_if_it_is_suspended() -> None:
    assert decide(new_job(runPolicy={"suspend": True}), FAULTY, NOW).status.phase is Phase.FAILED


def test_a_class_is_recorded_before_its_job_requests_quota() -> None:
    """The class may change the number and shape of the pods for which the quota is requested."""
    job = new_job("queue", className="team")
    offer = JobClasses.read({"team": {}}).offer(job)
    decision = decide(job, World(offer=offer, serves_queues=True), NOW)
    assert decision.status.job_class is not None and decision.actions == () and decision.wake == 0.0
