"""A break that causes several findings counts only once."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api.job_status import Condition, ConditionType, JobStatus, Restart, Restarts
from ddpjob.core.failures.classify import Cause
from ddpjob.core.failures.merge_causes import Attributed, Finding, attribute
from ddpjob.core.failures.policy import COUNTED

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def restart(cause: Cause, at: float, pod: str = "job-0-0", **fields: Any) -> Restart:
    return Restart(
        time=T0 + timedelta(seconds=at),
        pod=pod,
        index=int(pod[4]),
        reason=cause,
        message="why\ntrace",
        counted=cause in COUNTED,
        **fields,
    )


def end(cause: Cause, at: float, pod: str = "job-0-0", made_in: int = 0) -> Finding:
    return Finding(restart(cause, at, pod), made_in=made_in)


def incident(cause: Cause, at: float, pod: str = "job-0-0", **fields: Any) -> Finding:
    return Finding(restart(cause, at, pod, rank=0), **fields)


def status(*recent: Restart, broken: bool = False, seen_round: int = 0, round: int | None = None) -> JobStatus:
    condition = Condition(type=ConditionType.RESTARTING, status=broken, reason="a", message="b", since=T0, generation=1)
    number = max((r.round for r in recent), default=0) if round is None else round
    return JobStatus(conditions=(condition,), round=number, restarts=Restarts(recent=recent, seen_round=seen_round))


def summary(found: Attributed) -> list[tuple[str, str, bool, int]]:
    """Return (reason, pod, counted, round) of each record."""
    return [(str(r.reason), r.pod, r.counted, r.round) for r in found.restarts]


def test_a_pod_that_ends_alone_is_the_cause() -> None:
    found = attribute(status(), [end(Cause.EXIT_CODE, 0)], [], [])
    assert summary(found) == [("ExitCode", "job-0-0", True, 1)]
    assert found.seen_round == 0


def test_two_pods_that_run_out_of_memory_together_count_as_one_failure() -> None:
    ends = [end(Cause.OOM_KILLED, 1, "job-1-0"), end(Cause.OOM_KILLED, 0)]
    found = attribute(status(), ends, [], [])
    assert summary(found) == [("OOMKilled", "job-0-0", True, 1), ("OOMKilled", "job-1-0", False, 1)]
    assert found.restarts[1].message == "why (a consequence of OOMKilled of pod job-0-0)\ntrace"
    hang = replace(restart(Cause.HANG, 0, "job-0-0", round=1), pod="job", index=None)
    found_late = attribute(status(hang, broken=True), [end(Cause.EXIT_CODE, 1)], [], [])
    assert found_late.restarts[0].message == "why (a consequence of Hang)\ntrace", (
        "the cause is the group's restart, not a pod's"
    )
    later = replace(found.restarts[0], seconds=None)
    again = attribute(status(later, broken=True), [ends[0]], [], [])
    assert summary(again) == [("OOMKilled", "job-1-0", False, 1)], (
        "this holds even if the two ends are seen one after the other"
    )


def test_a_disrupted_pod_explains_the_failures_of_its_peers() -> None:
    found = attribute(status(), [end(Cause.EXIT_CODE, 0, "job-1-0"), end(Cause.PREEMPTED, 2)], [], [])
    assert summary(found) == [("Preempted", "job-0-0", False, 1), ("ExitCode", "job-1-0", False, 1)]
    assert [c.restart.reason for c in found.causes] == [Cause.PREEMPTED]


def test_a_deleted_pod_explains_the_incident_about_its_worker() -> None:
    found = attribute(status(), [end(Cause.DELETED, 1, "job-1-0")], [incident(Cause.WORKER_FAILED, 0)], [])
    assert summary(found) == [("Deleted", "job-1-0", False, 1), ("WorkerFailed", "job-0-0", False, 1)]
    assert found.seen_round == 1
    recorded = restart(Cause.DELETED, 1, "job-1-0", round=1, seconds=0.2)
    late = attribute(status(recorded), [], [incident(Cause.WORKER_FAILED, 0)], [])
    assert summary(late) == [("WorkerFailed", "job-0-0", False, 1)], "this holds even after the group runs again"
    assert late.seen_round == 1


def test_a_failure_well_before_the_deletion_of_its_pod_still_counts() -> None:
    found = attribute(status(), [end(Cause.DELETED, 4, "job-1-0")], [incident(Cause.WORKER_FAILED, 0)], [])
    assert sorted(summary(found)) == [("Deleted", "job-1-0", False, 2), ("WorkerFailed", "job-0-0", True, 1)]


def test_a_workers_failure_explains_the_end_of_its_pod() -> None:
    found = attribute(status(), [end(Cause.EXIT_CODE, 1)], [incident(Cause.WORKER_FAILED, 0)], [])
    assert summary(found) == [("WorkerFailed", "job-0-0", True, 1), ("ExitCode", "job-0-0", False, 1)]


def test_a_pod_out_of_memory_explains_the_failure_of_its_worker() -> None:
    found = attribute(status(), [end(Cause.OOM_KILLED, 1, "job-1-0")], [incident(Cause.WORKER_FAILED, 1)], [])
    assert summary(found) == [("OOMKilled", "job-1-0", True, 1), ("WorkerFailed", "job-0-0", False, 1)]


def test_a_break_has_only_one_incident() -> None:
    """The lost pod has been reported as PeerLost, so the next failure is a separate break, even if
    it follows soon.
    """
    recorded = restart(Cause.DELETED, 0, "job-1-0", round=1, seconds=0.2)
    seen = attribute(status(recorded), [], [], [("job-1-0", T0)])
    assert (summary(seen), seen.seen_round) == ([], 1)
    found = attribute(status(recorded, seen_round=1), [], [incident(Cause.WORKER_FAILED, 2)], [])
    assert summary(found) == [("WorkerFailed", "job-0-0", True, 2)]
    both = attribute(status(recorded), [], [incident(Cause.WORKER_FAILED, 2)], [("job-1-0", T0)])
    assert summary(both) == [("WorkerFailed", "job-0-0", True, 2)]


def test_a_failure_that_is_reported_before_the_loss_belongs_to_the_same_break() -> None:
    """If a coordinator is replaced in the middle of a break, the next one receives the failed
    worker first.
    """
    recorded = restart(Cause.NODE_LOST, 0, "job-1-0", round=1)
    lost, failed = [("job-1-0", T0 + timedelta(seconds=1.5))], incident(Cause.WORKER_FAILED, 1)
    found = attribute(status(recorded), [], [failed], lost)
    assert (summary(found), found.seen_round) == ([("WorkerFailed", "job-0-0", False, 1)], 1)
    more = attribute(status(recorded), [], [failed, incident(Cause.WORKER_FAILED, 2)], lost)
    assert summary(more) == [("WorkerFailed", "job-0-0", False, 1), ("WorkerFailed", "job-0-0", True, 2)]


def test_every_incident_of_the_coordinator_is_a_separate_break() -> None:
    found = attribute(
        status(), [], [incident(Cause.WORKER_FAILED, 0), incident(Cause.HANG, 1), incident(Cause.JOINED, 2)], []
    )
    assert summary(found) == [
        ("WorkerFailed", "job-0-0", True, 1),
        ("Hang", "job-0-0", True, 2),
        ("Joined", "job-0-0", False, 3),
    ]
    assert found.seen_round == 3


def test_a_pod_created_after_a_break_is_not_a_consequence_of_it() -> None:
    """So each failed replacement in a crash loop counts."""
    recorded = restart(Cause.EXIT_CODE, 0, round=3)
    found = attribute(status(recorded, broken=True), [end(Cause.EXIT_CODE, 2, "job-0-1", made_in=3)], [], [])
    assert summary(found) == [("ExitCode", "job-0-1", True, 4)]
    old = attribute(status(recorded, broken=True), [end(Cause.EXIT_CODE, 100, "job-1-0", made_in=2)], [], [])
    assert summary(old) == [("ExitCode", "job-1-0", False, 3)], "the group has not run since"
    healed = attribute(
        status(replace(recorded, seconds=9.0)), [end(Cause.EXIT_CODE, 100, "job-1-0", made_in=2)], [], []
    )
    assert summary(healed) == [("ExitCode", "job-1-0", True, 4)]


def test_planned_restarts_do_not_explain_failures() -> None:
    for cause in (Cause.JOINED, Cause.SCALED):
        recorded = restart(cause, 0, round=1)
        found = attribute(status(recorded, broken=True), [end(Cause.EXIT_CODE, 1)], [], [])
        assert summary(found) == [("ExitCode", "job-0-0", True, 2)]


def test_a_rule_that_fails_the_job_applies_only_to_causes() -> None:
    fatal = replace(end(Cause.EXIT_CODE, 1, "job-1-0"), fails="RuleFailed")
    fatal = replace(fatal, restart=replace(fatal.restart, counted=False))
    assert attribute(status(), [fatal], [], []).causes == (fatal,)
    explained = attribute(status(), [fatal, end(Cause.DELETED, 1)], [], [])
    assert [c.restart.reason for c in explained.causes] == [Cause.DELETED]


def test_a_program_that_cannot_start_is_never_a_consequence() -> None:
    missing = end(Cause.INIT_FAILURE, 1)
    missing = replace(missing, fails="InitFailure", restart=replace(missing.restart, counted=False))
    recorded = restart(Cause.DELETED, 0, "job-1-0", round=1)
    assert attribute(status(recorded, broken=True), [missing], [], []).causes == (missing,)
