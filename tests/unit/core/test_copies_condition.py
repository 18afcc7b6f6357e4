"""The condition CheckpointsCopied, based on the script's reports of copies in a bucket and on a
missing Secret.
"""

from __future__ import annotations

from typing import Any

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import Condition, ConditionType
from ddpjob.core.world import ContainerView, PodView
from ddpjob_runtime.protocol import CoordinatorState, MemberState
from worlds import COORDINATOR, job_of, pod, report, running, seen

BUCKET: Json = {"checkpoints": {"url": "s3://models/runs", "secretName": "keys"}}


class Looks:
    """A training job whose script sends these reports."""

    def __init__(self, **spec: Any) -> None:
        self.at = 60.0
        found: tuple[DDPJob, tuple[PodView, ...]] = running(2, **spec)
        self.job, self.pods = found
        self.events: list[str] = []

    def after(self, seconds: float, metrics: Any = None) -> Condition | None:
        self.at += seconds
        progress = {"step": int(self.at), "metrics": {} if metrics is None else metrics}
        states = [MemberState.RUNNING] * 2
        last = report(CoordinatorState.RUNNING, *states, progress=progress)
        self.job, decision = seen(self.job, self.at, self.pods, last)
        self.events = [event.reason for event in decision.events]
        return decision.status.condition(ConditionType.CHECKPOINTS_COPIED)


def test_copies_that_arrive_need_no_condition() -> None:
    looks = Looks(storage=BUCKET)
    for behind in (0, 30, 599, 0):
        assert looks.after(600, {"copyBehind": behind, "copyStep": 7}) is None


def test_late_uploads_are_reported_once_and_the_report_is_withdrawn() -> None:
    looks = Looks(storage=BUCKET)
    shown = looks.after(5, {"copyBehind": 601, "copyStep": 1200, "copyTime": 1})
    assert shown is not None and (shown.status, shown.reason) == (False, "CopiesBehind")
    assert "no checkpoint has reached s3://models/runs for more than 10 minutes" in shown.message
    assert "latest: step 1200" in shown.message
    assert looks.events == ["CopiesBehind"]
    again = looks.after(60, {"copyBehind": 661, "copyStep": 1200})
    assert again == shown and looks.events == [], "an unchanged message must not cause a write"
    assert looks.after(60) == shown, "a report without figures about copies changes nothing"
    healed = looks.after(5, {"copyBehind": 0, "copyStep": 1900})
    assert healed is not None and (healed.status, healed.reason) == (True, "Copied")


def test_a_program_that_copies_nothing_is_reported() -> None:
    looks = Looks(storage=BUCKET)
    assert looks.after(1600) is None
    shown = looks.after(300)
    assert shown is not None and (shown.status, shown.reason) == (False, "NoCopies")
    assert "ddpjob_report.restore_checkpoint and copy_checkpoint" in shown.message
    assert Looks().after(7200) is None, "a job without a bucket has no such condition"


def test_invalid_figures_about_copies_are_ignored() -> None:
    looks = Looks(storage=BUCKET)
    assert looks.after(5, {"copyBehind": True, "copyStep": "x"}) is None
    assert looks.after(5, ["copyBehind"]) is None
    shown = looks.after(5, {"copyBehind": 1e300, "copyStep": None})
    assert shown is not None and "none since this start" in shown.message


def test_a_missing_secret_is_reported_with_its_keys() -> None:
    said = 'secret "keys" not found'
    waits = ContainerView(waiting_reason="CreateContainerConfigError", waiting_message=said)
    pods = (pod(0, waits, phase="Pending"), pod(1), COORDINATOR)
    _, decision = seen(job_of(2, storage=BUCKET), 5, pods, None)
    shown = decision.status.condition(ConditionType.RUNNING)
    assert shown is not None and shown.reason == "CreateContainerConfigError"
    assert said in shown.message
    assert "Secret keys in namespace space with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in shown.message
    other = ContainerView(waiting_reason="CreateContainerConfigError", waiting_message='secret "wandb" not found')
    _, decision = seen(job_of(2, storage=BUCKET), 5, (pod(0, other), pod(1), COORDINATOR), None)
    unrelated = decision.status.condition(ConditionType.RUNNING)
    assert unrelated is not None and "secretName" not in unrelated.message
