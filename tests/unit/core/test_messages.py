"""Messages for users are true and written in plain English."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from ddpjob.api.job_status import ConditionType, JobStatus, Phase, SlotState
from ddpjob.core.decision import Creation, NotifyCoordinator
from ddpjob.core.failures.classify import without_wait
from ddpjob.core.status.messages import count, event_text, put_cause_first
from ddpjob.core.world import ContainerView
from ddpjob_runtime.protocol import (
    EXIT_INIT_FAILURE,
    Command,
    CoordinatorState,
    Incident,
    IncidentKind,
    MemberState,
    Overdue,
    Recovery,
)
from worlds import COORDINATOR, NOW, job_of, later, pod, report, running, seen


def message(status: JobStatus, kind: ConditionType) -> str:
    condition = status.condition(kind)
    assert condition is not None
    return condition.message


def test_nouns_in_messages_agree_with_their_numbers() -> None:
    assert [count(n, "pod") for n in (0, 1, 2)] == ["0 pods", "1 pod", "2 pods"]
    assert message(running(1)[0].status, ConditionType.RUNNING) == "1 node trains"
    assert message(running(2)[0].status, ConditionType.RUNNING) == "2 nodes run together"
    job, _ = seen(job_of(1), 1, (pod(0), COORDINATOR), report(CoordinatorState.FORMING, MemberState.READY))
    assert message(job.status, ConditionType.RUNNING) == "1 of 1 node runs and is joining the rendezvous"
    job, pods = running(1)
    job, _ = seen(job, 3, pods, replace(report(CoordinatorState.FORMING), attempt=1))
    said = "1 of 1 node runs and continues to train while it connects to a new coordinator"
    assert message(job.status, ConditionType.RUNNING) == said
    job, _ = seen(job_of(2, elastic={"minNodes": 1}), 1, (), None)
    assert message(job.status, ConditionType.RUNNING) == "0 of 2 nodes run, 1 is needed"
    job, _ = seen(job_of(1), 1, (), None)
    assert message(job.status, ConditionType.SCHEDULED) == "0 of 1 pod is scheduled"


def test_a_message_about_the_end_of_a_job_does_not_announce_a_wait() -> None:
    text = "rank 0 ended with exit code 1: boom; waits 2 s\nTraceback\nboom"
    assert without_wait(text) == "rank 0 ended with exit code 1: boom\nTraceback\nboom"
    job, pods = running(1, recovery={"maxRestarts": 0})
    failed = Incident(1, later(3), IncidentKind.WORKER_FAILED, "job-0-0", 0, 0, message="boom", backoff_seconds=2.0)
    reported = report(CoordinatorState.RESTARTING, MemberState.READY, incidents=(failed,))
    job, decision = seen(job, 3, pods, reported)
    assert job.status.phase is Phase.FAILED
    kept = [restart.message for restart in job.status.restarts.recent]
    texts = [message(job.status, ConditionType.FAILED), *kept, *(e.message for e in decision.events)]
    assert not [text for text in texts if "waits" in text]


def test_an_unreachable_coordinator_is_reported_with_its_time_and_by_one_event() -> None:
    job, pods = running(2)
    events = []
    for at in range(10, 200, 10):
        job, decision = seen(job, at, pods, None)
        events += [e for e in decision.events if e.reason == "CoordinatorUnreachable"]
        assert "has not answered the operator since 2026-01-01T00:00:10Z" in message(job.status, ConditionType.RUNNING)
    assert [e.warning for e in events] == [True]
    assert "port 29401" in events[0].message and "neither counted nor shown" in events[0].message


def test_an_unusable_report_is_explained_with_its_time_and_by_one_event() -> None:
    job, pods = running(2)
    why, events = "the response has more than 165888 bytes", []
    for at in range(10, 200, 10):
        job, decision = seen(job, at, pods, None, report_refused=why)
        events += [e for e in decision.events if e.reason == "CoordinatorUnreachable"]
        said = message(job.status, ConditionType.RUNNING)
        assert f"since 2026-01-01T00:00:10Z: its report cannot be used ({why})" in said and "reach port" not in said
    assert [e.warning for e in events] == [True] and why in events[0].message


def test_a_coordinator_without_a_kubernetes_node_is_not_reported_as_unreachable() -> None:
    """Otherwise, an alert and an event would make an administrator check the operator's network."""
    no_room = replace(COORDINATOR, host="", address="", containers={}, phase="Pending", unschedulable="0/3 nodes")
    for coordinator in ((), (no_room,)):
        job, events = job_of(2), []
        for at in range(1, 200, 10):
            job, decision = seen(job, at, (pod(0), pod(1), *coordinator), None)
            events += [e for e in decision.events if e.reason == "CoordinatorUnreachable"]
            condition = job.status.condition(ConditionType.RUNNING)
            assert condition is not None and condition.reason == "NodesMissing"
            assert condition.message == "2 of 2 nodes run; the coordinator's pod has not been scheduled yet"
        assert not events


def test_a_pod_whose_image_cannot_be_pulled_is_reported_in_both_modes() -> None:
    why = ContainerView(waiting_reason="ErrImagePull", waiting_message="dial tcp: lookup registry: no such host")
    for mode in ("Standard", "Fast"):
        for waiting in ("coordinator", "node"):
            coordinator = replace(COORDINATOR, phase="Pending", containers={"coordinator": why})
            node = pod(0, why, phase="Pending")
            pods = (pod(0), coordinator) if waiting == "coordinator" else (node, COORDINATOR)
            job, decision = seen(job_of(1, recovery={"mode": mode}), 1, pods, None)
            condition = job.status.condition(ConditionType.RUNNING)
            assert condition is not None and condition.reason == "ErrImagePull"
            assert "lookup registry" in condition.message
            assert [e.reason for e in decision.events if e.warning] == ["ErrImagePull"]


def test_repeated_attempts_to_pull_an_image_are_one_event() -> None:
    job, events = job_of(1), []
    for at in range(1, 200, 10):
        reason = ("ErrImagePull", "ImagePullBackOff")[at // 10 % 2]
        waits = ContainerView(waiting_reason=reason, waiting_message="dial tcp: lookup registry: no such host")
        job, decision = seen(job, at, (pod(0, waits, phase="Pending"), COORDINATOR), None)
        events += [e.reason for e in decision.events if e.warning]
        assert f": {reason}: " in message(job.status, ConditionType.RUNNING)
    assert events == ["ErrImagePull"]


def test_an_overdue_step_causes_one_event_even_if_its_report_comes_and_goes() -> None:
    job, pods = running(2)
    events, messages = [], set()
    for at in range(10, 2000, 10):
        since = later(1000 if at > 1500 else 5).replace(microsecond=900_000) + timedelta(seconds=at % 3)
        overdue = Overdue(since, "rank 0 in all_reduce (train.py:7)", "rank 0:\nCurrent thread")
        running_all = report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * 2, overdue=overdue)
        job, decision = seen(job, at, pods, None if at % 200 > 100 else running_all)
        condition = job.status.condition(ConditionType.RUNNING)
        assert condition is not None and condition.status
        if condition.reason == "StepOverdue":
            messages.add(condition.message)
        else:
            assert "completed no step since 2026-01-01T00:" in condition.message
        events += [(at, e.warning) for e in decision.events if e.reason == "StepOverdue"]
    assert events == [(10, True), (1600, True)] and len(messages) == 2, "two steps"


def test_nodes_whose_ranks_form_no_group_are_not_said_to_train_together() -> None:
    job, pods = running(2)
    for at, progress in ((5, {"ungrouped": True}), (6, {"ungrouped": True}), (7, {})):
        reported = report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * 2, progress={"step": at, **progress})
        job, decision = seen(job, at, pods, reported)
        condition = job.status.condition(ConditionType.RUNNING)
        assert condition is not None and condition.status
        assert condition.reason == ("NoGroup" if progress else "GroupRuns")
        assert ("each rank trains a separate model" in condition.message) is bool(progress)
        assert [e.reason for e in decision.events if e.warning] == (["NoGroup"] if at == 5 else [])


def test_nodes_are_said_to_train_together_only_once_their_ranks_communicate() -> None:
    """A script that forms a group may still train the ranks separately."""
    job, pods = running(2)
    for progress, said in (({"step": 1}, "2 nodes run together"), ({"exchanging": True}, "2 nodes train as one group")):
        two = [MemberState.RUNNING] * 2
        job, _ = seen(job, 5, pods, report(CoordinatorState.RUNNING, *two, progress=progress))
        assert message(job.status, ConditionType.RUNNING) == said


def test_uncountable_steps_are_reported_to_a_job_with_a_hang_limit() -> None:
    for recovery in ({"hangAfterSeconds": 60}, {}):
        job, pods = running(2, recovery=recovery)
        reported = report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * 2, progress={"uncountable": True})
        job, _ = seen(job, 5, pods, reported)
        said = message(job.status, ConditionType.RUNNING)
        assert said.startswith("2 nodes run together")
        assert ("this script's steps cannot be counted" in said) is bool(recovery)


@pytest.mark.parametrize("when", ["told", "told in the last report", "never"])
def test_ranks_that_formed_no_group_are_still_reported_after_the_jobs_end(when: str) -> None:
    job, pods = running(2)
    if when == "told":
        members = [MemberState.RUNNING] * 2
        reported = report(CoordinatorState.RUNNING, *members, progress={"step": 5, "ungrouped": True})
        job, _ = seen(job, 5, pods, reported)
    done = ContainerView(started=NOW, exit_code=0, reason="Completed", finished=later(8))
    ended = (*(pod(index, done, phase="Succeeded") for index in range(2)), COORDINATOR)
    last = {"step": 9, "ungrouped": True} if when == "told in the last report" else {"step": 9}
    succeeded = replace(report(CoordinatorState.SUCCEEDED, progress=last), world=2)
    job, decision = seen(job, 9, ended, succeeded if when != "told" else None)
    complete = job.status.condition(ConditionType.COMPLETE)
    assert complete is not None and complete.status
    assert ("each of them trained a separate model" in complete.message) is (when != "never")
    assert complete.message in [e.message for e in decision.events]


def test_a_script_that_started_from_scratch_is_still_reported_after_the_jobs_end() -> None:
    job, pods = running(2)
    two = [MemberState.RUNNING] * 2
    job, _ = seen(job, 5, pods, report(CoordinatorState.RUNNING, *two, progress={"step": 359, "resumed": "no"}))
    done = ContainerView(started=NOW, exit_code=0, reason="Completed", finished=later(8))
    ended = (*(pod(index, done, phase="Succeeded") for index in range(2)), COORDINATOR)
    for resumed in ("no", "yes"):
        progress = {"step": 300, "resumed": resumed}
        job_ended, _ = seen(job, 9, ended, replace(report(CoordinatorState.SUCCEEDED, progress=progress), world=2))
        said = "but after the last restart the script seems to have started again from step 0, because"
        assert (said in message(job_ended.status, ConditionType.COMPLETE)) is (resumed == "no")


def test_a_program_that_cannot_start_causes_one_event_and_no_restart() -> None:
    """Regression: two pods found the error at once, and the column showed "+2", as if it had been
    retried twice.
    """
    job, _ = seen(job_of(2), 1, (pod(0), pod(1), COORDINATOR), report(CoordinatorState.FORMING))
    ended = ContainerView(
        started=NOW, exit_code=EXIT_INIT_FAILURE, finished=later(2), message='{"message": "no numppy"}'
    )
    job, decision = seen(job, 3, (*(pod(i, ended, phase="Failed") for i in range(2)), COORDINATOR), None)
    assert message(job.status, ConditionType.FAILED).endswith("cannot start: no numppy")
    assert [e.reason for e in decision.events] == ["InitFailure"]
    assert job.status.write(job.spec)["restarts"]["display"] == "0/10"
    assert [r.reason for r in job.status.restarts.recent] == ["InitFailure"] * 2, (
        "the event has the details of each pod"
    )


def test_a_job_whose_pods_have_finished_is_not_shown_as_starting() -> None:
    job, pods = running(2)
    done = ContainerView(started=NOW, exit_code=0, reason="Completed", finished=later(3))
    succeeded = replace(report(CoordinatorState.SUCCEEDED), world=2)
    for reported in (succeeded, None):
        after, _ = seen(job, 3, (pod(0, done, phase="Succeeded"), *pods[1:]), reported)
        assert (after.status.phase, after.status.slots[0].state) == (Phase.RUNNING, SlotState.SUCCEEDED)
    first, _ = seen(job, 3, pods, succeeded)
    assert message(first.status, ConditionType.RUNNING) == "training has finished; the remaining pods are terminating"
    stuck, _ = seen(after, 50, (pod(0, done, phase="Succeeded"), *pods[1:]), None)
    assert not stuck.status.terminal
    stuck, _ = seen(stuck, 64, (pod(0, done, phase="Succeeded"), *pods[1:]), None)
    assert stuck.status.phase is Phase.COMPLETE, "if one pod exits with 0, all have finished"


def test_the_end_of_a_short_job_causes_no_warning() -> None:
    """The job finished before the operator saw it run."""
    pods = (pod(0), pod(1), COORDINATOR)
    job, _ = seen(job_of(2), 1, pods, report(CoordinatorState.FORMING, MemberState.READY, MemberState.READY))
    job, decision = seen(job, 2, pods, replace(report(CoordinatorState.SUCCEEDED), world=2))
    assert message(job.status, ConditionType.RUNNING) == "training has finished; the remaining pods are terminating"
    assert [e.message for e in decision.events if e.warning] == []


def test_a_coordinator_whose_pod_has_no_address_is_reported_in_plain_english() -> None:
    without = replace(COORDINATOR, address="")
    job, _ = seen(job_of(1), 1, (pod(0), without), None)
    said = "the coordinator, whose pod has no address yet, has not answered the operator since 2026-01-01T00:00:01Z"
    assert message(job.status, ConditionType.RUNNING) == f"1 of 1 node runs; {said}"
    job, _ = seen(job, 3, (pod(0), without), None)
    assert message(job.status, ConditionType.RUNNING) == f"1 of 1 node runs; {said}"


def test_a_finished_job_stays_finished_when_its_pods_and_report_are_gone() -> None:
    job, pods = running(2)
    job, _ = seen(job, 3, pods[1:], replace(report(CoordinatorState.SUCCEEDED), world=2))
    assert [slot.state for slot in job.status.slots] == [SlotState.LOST, SlotState.RUNNING], "no pod is replaced"
    job, decision = seen(job, 4, (), None)
    assert job.status.phase is Phase.COMPLETE and not any(isinstance(a, Creation) for a in decision.actions)


def test_pods_that_finish_before_the_others_are_reported() -> None:
    job, pods = running(2)
    for nodes, procs, who in (
        (2, 1, "pod job-1-0 (rank 1) has"),
        (2, 2, "pod job-1-0 (ranks 2 to 3) has"),
        (4, 1, "pod job-1-0 (rank 1) and 2 more pods have"),
    ):
        job, pods = running(nodes, procsPerNode=procs)
        reported = report(CoordinatorState.RUNNING, MemberState.RUNNING, *[MemberState.FINISHED] * (nodes - 1))
        job, _ = seen(job, 3, pods, reported)
        assert f"{who} already ended with exit code 0" in message(job.status, ConditionType.RUNNING)


def test_no_recovery_is_reported_after_a_join_or_before_the_next_step() -> None:
    for kind, pod_name, text in (
        (IncidentKind.JOINED, "job-1-0", "2 nodes train again, after a planned restart: Joined"),
        (IncidentKind.WORKER_FAILED, "job-1-0", "2 nodes train again, after job-1-0 broke the group"),
    ):
        job, pods = running(2)
        incident = Incident(1, later(3), kind, pod_name, 1, 1, exit_code=1, message="boom")
        job, _ = seen(
            job, 3, pods, report(CoordinatorState.RESTARTING, *[MemberState.READY] * 2, incidents=(incident,))
        )
        down = Recovery(None, later(3))
        two = [MemberState.RUNNING] * 2
        job, decision = seen(job, 5, pods, report(CoordinatorState.RUNNING, *two, incidents=(incident,), recovery=down))
        assert [e.message for e in decision.events if e.reason == "Running"] == [text]
        assert job.status.restarts.recent[-1].seconds is None
        up = report(CoordinatorState.RUNNING, *two, incidents=(incident,), recovery=Recovery(2.75, None))
        job, decision = seen(job, 6, pods, up)
        assert job.status.restarts.recent[-1].seconds == 2.75
        assert not [e for e in decision.events if e.reason == "Running"]


def test_repeated_steps_that_become_known_late_are_reported_by_an_event() -> None:
    job, pods = running(2)
    incident = Incident(1, later(3), IncidentKind.WORKER_FAILED, "job-1-0", 1, 1, exit_code=1, message="boom")
    job, _ = seen(job, 3, pods, report(CoordinatorState.RESTARTING, *[MemberState.READY] * 2, incidents=(incident,)))

    def at(seconds: int, recovery: Recovery, **figures: object) -> list[str]:
        nonlocal job
        two = [MemberState.RUNNING] * 2
        now = report(CoordinatorState.RUNNING, *two, incidents=(incident,), recovery=recovery, **figures)
        job, decision = seen(job, seconds, pods, now)
        return [e.message for e in decision.events if e.reason == "Recovered"]

    assert at(5, Recovery(None, later(3))) == []
    start = {"step": 40, "made": 45, "source": "memory"}
    recovered = at(6, Recovery(2.75, None), progress={"step": 41, "start": start})
    text = "the first step was completed 2.75 s after job-1-0 broke the group; 5 steps repeated (from memory)"
    assert recovered == [text]
    assert at(7, Recovery(2.75, None), progress={"step": 42, "start": start}) == []


def test_a_restart_whose_repeated_steps_stay_unknown_causes_one_event() -> None:
    job, pods = running(2)
    incident = Incident(1, later(3), IncidentKind.WORKER_FAILED, "job-1-0", 1, 1, exit_code=1, message="boom")
    job, _ = seen(job, 3, pods, report(CoordinatorState.RESTARTING, *[MemberState.READY] * 2, incidents=(incident,)))
    reasons = []
    for step in range(5):
        two = [MemberState.RUNNING] * 2
        up = report(CoordinatorState.RUNNING, *two, incidents=(incident,), recovery=Recovery(2.75, None))
        job, decision = seen(job, 5 + step, pods, replace(up, progress={"step": 41 + step}))
        reasons += [event.reason for event in decision.events]
    assert reasons == ["Running"]


def test_a_hang_of_the_group_is_not_attributed_to_a_pod_or_kubernetes_node() -> None:
    """Regression: the hang was attributed to pod 0, whose node was avoided after three hangs, and
    the event reported a replacement.
    """
    job, pods = running(2, recovery={"hangAfterSeconds": 60, "maxRestarts": 9})
    two = [MemberState.RUNNING] * 2
    step, hangs = {"progress": {"step": 7}}, list[Incident]()
    for number in (1, 2, 3):
        at = 100 * number
        hangs.append(Incident(number, later(at), IncidentKind.HANG, message="no step for 60 s: rank 1 in f (t.py:1)"))
        broken = report(CoordinatorState.RESTARTING, *[MemberState.READY] * 2, incidents=tuple(hangs))
        job, decision = seen(job, at, pods, broken)
        (event,) = [e for e in decision.events if e.reason == "Hang"]
        assert event.message == f"{hangs[-1].message} (counts against recovery.maxRestarts)"
        assert not [a for a in decision.actions if isinstance(a, NotifyCoordinator) and a.verb == Command.GONE]
        again = report(CoordinatorState.RUNNING, *two, incidents=tuple(hangs), recovery=Recovery(2.75, None), **step)
        job, decision = seen(job, at + 3, pods, again)
        (event,) = [e for e in decision.events if e.reason == "Running"]
        assert event.message == "2 nodes train again, 2.75 s after the group broke: Hang"
    assert {(r.index, r.node) for r in job.status.restarts.recent} == {(None, "")} and not job.status.avoided_nodes


def test_findings_after_a_jobs_end_do_not_change_its_status() -> None:
    job, _ = running(2, recovery={"maxRestarts": 3})
    done = ContainerView(started=NOW, exit_code=0, reason="Completed", finished=later(3))
    job, _ = seen(job, 3, tuple(pod(i, done, phase="Succeeded") for i in range(2)), None)
    assert job.status.phase is Phase.COMPLETE
    written = job.status.write(job.spec)
    other = job_of(7, recovery={"maxRestarts": 9}).spec
    again = JobStatus.read(written).write(other)
    assert (again["nodes"], again["restarts"]) == (written["nodes"], written["restarts"])
    assert (written["nodes"]["display"], written["restarts"]["display"]) == ("2/2", "0/3")


def test_a_change_of_size_is_recorded_only_once() -> None:
    job, pods = running(2)
    smaller = replace(job, spec=job_of(1).spec, generation=2)
    smaller, _ = seen(smaller, 3, pods, report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * 2))
    joined = Incident(1, later(4), IncidentKind.JOINED, "job-0-0", 0, 0, message="the group becomes smaller")
    reported = report(CoordinatorState.RESTARTING, MemberState.READY, incidents=(joined,))
    smaller, _ = seen(smaller, 5, (pods[0], COORDINATOR), reported)
    assert [r.reason for r in smaller.status.restarts.recent] == ["Scaled"]
    assert smaller.status.restarts.seen_incident == 1


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ("rank 1 in pod j-0-0 ended with exit code 1: E: x", "E: x (rank 1 in pod j-0-0 ended with exit code 1; f)"),
        (
            "rank 1 in pod p ended with signal SIGSEGV: E; waits 2 s\ntrace",
            "E (rank 1 in pod p ended with signal SIGSEGV; waits 2 s; f)\ntrace",
        ),
        ("pod p ended with exit code 137 (128 + SIGKILL): E", "E (pod p ended with exit code 137 (128 + SIGKILL); f)"),
        ("rank 1 in pod p ended with exit code 7", "rank 1 in pod p ended with exit code 7 (f)"),
        ("pod p was deleted", "pod p was deleted (f)"),
    ],
)
def test_an_events_message_begins_with_the_cause_and_ends_with_the_details(recorded: str, shown: str) -> None:
    assert put_cause_first(recorded, "f") == shown == event_text(recorded, "f")
