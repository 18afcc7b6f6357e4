"""Which notifications a job's receiver gets, and what they contain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import NotifyEvent
from ddpjob.api.job_status import ConditionType, NotificationState
from ddpjob.core.decide import decide
from ddpjob.core.decision import Decision, DeleteJob, DeletePod, NotifyCoordinator, SendNotification
from ddpjob.core.world import ContainerView, NotificationOutcome, World
from ddpjob_runtime.protocol import CoordinatorState, Incident, IncidentKind, MemberState
from worlds import COORDINATOR, NOW, job_of, later, pod, report, running

TEAM = {"notify": {"receiver": "team"}}


def decided(job: DDPJob, at: float, world: World, **more: object) -> tuple[DDPJob, Decision]:
    values = {"runtime": "r", "runtime_offered": "r", "receivers": frozenset({"team"}), **more}
    decision = decide(job, replace(world, **values), later(at))
    return replace(job, status=decision.status), decision


def sent(decision: Decision) -> list[SendNotification]:
    return [action for action in decision.actions if isinstance(action, SendNotification)]


def ended_pods(exit_code: int) -> World:
    over = ContainerView(started=NOW, exit_code=exit_code, finished=later(5))
    phase = "Succeeded" if exit_code == 0 else "Failed"
    return World(pods=(*(pod(i, over, phase=phase) for i in range(2)), COORDINATOR), has_service=True, has_budget=True)


def completed(**spec: object) -> tuple[DDPJob, Decision]:
    job, _ = running(2, **{**TEAM, **spec})
    return decided(job, 6, ended_pods(0))


def failing(job: DDPJob, number: int, message: str = "ValueError: lunch") -> tuple[DDPJob, Decision]:
    """Report this many worker failures one after the other, as the coordinator does."""
    incidents = tuple(
        Incident(id=n, time=later(n), kind=IncidentKind.WORKER_FAILED, pod=f"job-{n % 2}-0", index=n % 2, exit_code=1,
                 message=message)
        for n in range(1, number + 1)
    )  # fmt: skip
    state = replace(report(CoordinatorState.RESTARTING, *[MemberState.RUNNING] * 2), incidents=incidents)
    world = World(pods=(pod(0), pod(1), COORDINATOR), report=state, has_service=True, has_budget=True)
    return decided(job, 10 + number, world)


def test_a_jobs_end_and_its_pending_notification_are_written_immediately() -> None:
    job, decision = completed()
    [entry] = job.status.notifications
    assert (entry.event, entry.id, entry.state) == (NotifyEvent.COMPLETE, "uid.Complete.0", NotificationState.PENDING)
    [send] = sent(decision)
    assert (send.id, send.receiver, send.body["event"], send.body["state"]) == (
        entry.id,
        "team",
        "Complete",
        "Complete",
    )


def test_the_loss_in_a_notification_is_rounded() -> None:
    job, _ = running(2, **TEAM)
    job = replace(job, status=replace(job.status, progress={"step": 41200, "loss": 0.7123847603797913}))
    [send] = sent(decided(job, 6, ended_pods(0))[1])
    assert send.body["progress"] == {"step": 41200, "loss": 0.7123847603797913}
    assert "step 41200, loss 0.7124\n" in send.body["text"]


def test_a_notification_is_sent_until_its_outcome_is_known() -> None:
    job, _ = completed()
    job, again = decided(job, 20, ended_pods(0))
    assert [s.id for s in sent(again)] == ["uid.Complete.0"] and again.wake is not None
    job, after = decided(job, 21, ended_pods(0), outcomes={"uid.Complete.0": NotificationOutcome(delivered=True)})
    assert job.status.notifications[0].state is NotificationState.DELIVERED and not sent(after)
    _, later_on = decided(job, 500, ended_pods(0))
    assert not sent(later_on) and later_on.status == job.status


def test_an_abandoned_notification_is_reported_by_an_event() -> None:
    job, _ = completed()
    job, decision = decided(
        job, 20, ended_pods(0), outcomes={"uid.Complete.0": NotificationOutcome(delivered=False, message="m")}
    )
    assert [(e.warning, e.reason, e.message) for e in decision.events] == [
        (True, "NotificationGivenUp", "Complete to team: m")
    ]
    assert (job.status.notifications[0].state, job.status.notifications[0].message) == (NotificationState.GIVEN_UP, "m")


def test_a_job_is_not_deleted_before_its_receiver_is_notified() -> None:
    job, decision = completed(runPolicy={"ttlSecondsAfterFinished": 0})
    job, decision = decided(job, 100, World())
    assert not any(isinstance(a, DeleteJob) for a in decision.actions) and decision.wake is not None
    _, decision = decided(job, 101, World(), outcomes={"uid.Complete.0": NotificationOutcome(delivered=True)})
    assert any(isinstance(a, DeleteJob) for a in decision.actions)


def test_the_pods_of_a_failed_job_end_although_its_receiver_is_unreachable() -> None:
    job, pods = running(2, **TEAM, runPolicy={"ttlSecondsAfterFinished": 0, "activeDeadlineSeconds": 10})
    world = World(pods=pods, has_service=True, has_budget=True)
    job, decision = decided(job, 20, world)
    assert job.status.holds(ConditionType.FAILED) and any(isinstance(a, NotifyCoordinator) for a in decision.actions)
    _, decision = decided(job, 60, world)
    assert {a.name for a in decision.actions if isinstance(a, DeletePod)} == {"job-0-0", "job-1-0"}


def test_only_requested_notifications_are_sent() -> None:
    job, decision = completed(notify={"receiver": "team", "events": ["Failed"]})
    assert not job.status.notifications and not sent(decision)


def test_events_from_before_notifications_were_enabled_are_not_sent() -> None:
    job, _ = completed()
    silent = replace(job, status=replace(job.status, notifications=()))
    _, decision = decided(silent, 20, ended_pods(0))
    assert not sent(decision) and not decision.status.notifications


def test_no_notification_is_sent_after_the_field_is_removed() -> None:
    job, _ = completed()
    job = replace(job, spec=replace(job.spec, notify=None))
    _, decision = decided(job, 20, ended_pods(0))
    assert not sent(decision) and not decision.status.notifications


@pytest.mark.parametrize(("allowed", "first"), [(10, 8), (5, 4), (3, 2), (2, 1), (1, 1)])
def test_one_notification_warns_that_restarts_are_nearly_used_up(allowed: int, first: int) -> None:
    job, _ = running(2, **TEAM, recovery={"maxRestarts": allowed})
    sent_after = []
    for number in range(1, allowed + 1):
        job, decision = failing(job, number)
        sent_after += [number] if any(s.id for s in sent(decision) if number not in sent_after) else []
        assert job.status.restarts.counted == number
        assert bool(job.status.notifications) == (number >= first)
    [entry] = job.status.notifications
    assert entry.event is NotifyEvent.BUDGET_NEARLY_SPENT and entry.id == f"uid.BudgetNearlySpent.{first}.1"
    job, decision = failing(job, allowed + 1)
    assert [(n.event, n.state) for n in job.status.notifications][-1] == (NotifyEvent.FAILED, NotificationState.PENDING)


def test_a_limit_raised_and_lowered_within_a_round_causes_a_new_notification() -> None:
    """The notification needs a new id, because a receiver may drop an id that it knows."""
    job, _ = running(2, **TEAM, recovery={"maxRestarts": 1})
    job, decision = failing(job, 1)
    ids, outcomes = [s.id for s in sent(decision)], dict[str, NotificationOutcome]()
    for at, allowed in ((20, 10), (30, 1)):
        outcomes |= {id: NotificationOutcome(delivered=True) for id in ids}
        counts = replace(job.status.restarts, allowed=job.spec.recovery.max_restarts)  # as in the written status
        spec = replace(job.spec, recovery=replace(job.spec.recovery, max_restarts=allowed))
        job = replace(job, spec=spec, generation=job.generation + 1, status=replace(job.status, restarts=counts))
        job, decision = decided(job, at, World(pods=(pod(0), pod(1), COORDINATOR)), outcomes=outcomes)
        ids += [s.id for s in sent(decision)]
    assert len(ids) == 2 and ids[0] != ids[1]
    assert job.status.notifications[0].state is NotificationState.PENDING


def test_a_budget_of_0_is_not_reported_as_nearly_spent_before_any_failure() -> None:
    job, _ = running(2, **TEAM, recovery={"maxRestarts": 1})
    assert not job.status.notifications


# --- a receiver that the namespace may not use ------------------------------------------------------------------


def test_an_unknown_receiver_is_reported_at_the_start_and_has_no_other_effect() -> None:
    job = job_of(2, **TEAM)
    job, decision = decided(job, 1, World(), receivers=frozenset({"other"}))
    condition = job.status.condition(ConditionType.NOTIFIES)
    assert condition is not None and not condition.status and condition.reason == "ReceiverUnknown"
    assert 'spec.notify.receiver: "team"' in condition.message and "(other)" in condition.message
    assert [e.reason for e in decision.events].count("ReceiverUnknown") <= 1
    assert any(not isinstance(a, SendNotification) for a in decision.actions), "the job starts anyway"
    job, _ = decided(job, 2, World())
    assert job.status.condition(ConditionType.NOTIFIES) is None


def test_nothing_is_sent_to_a_receiver_that_the_namespace_may_not_use() -> None:
    job, _ = running(2, **TEAM)
    job, decision = decided(job, 6, ended_pods(0), receivers=frozenset())
    assert not sent(decision) and job.status.notifications[0].state is NotificationState.GIVEN_UP
    assert "NotificationGivenUp" in [e.reason for e in decision.events]


# --- the message ------------------------------------------------------------------------------------------------


def body_of(message: str, **world: object) -> dict[str, object]:
    job, _ = running(2, **TEAM, recovery={"maxRestarts": 1})
    _, decision = failing(job, 1, message)
    return dict(sent(decision)[0].body)


def test_a_notification_has_everything_that_its_reader_needs() -> None:
    body = body_of("ValueError: lunch")
    assert (body["job"], body["namespace"], body["uid"], body["state"]) == ("job", "space", "uid", "Restarting")
    assert body["reason"] == "BudgetNearlySpent" and "1 of 1 restart is used up" in str(body["message"])
    assert "ValueError: lunch" in str(body["message"]) and body["restarts"] == {"counted": 1, "total": 1, "max": 1}
    assert str(body["text"]).startswith("DDPJob space/job: BudgetNearlySpent (BudgetNearlySpent); restarts 1/1")


@pytest.mark.parametrize(
    "hostile",
    ["<!channel> <https://evil.example|click>", "```\n<!here>", "@channel @here @all", "\x1b[2J\u202e", "x" * 100_000],
)
def test_strings_from_the_script_cannot_mention_users_or_hide_text(hostile: str) -> None:
    body = body_of(hostile)
    text = str(body["text"])
    assert len(text.encode()) < 4000 and len(str(body["message"]).encode()) <= 1000
    assert "<" not in text and ">" not in text
    assert text.count("```") == 2 and text.rstrip().endswith("```")
    assert not any(f"@{word}" in text for word in ("channel", "here", "all"))
    assert not any(c in text for c in "\x1b\u202e")
