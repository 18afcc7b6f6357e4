"""The operator keeps each job's status in memory, and users cannot make it larger than a fixed
limit.
"""

from __future__ import annotations

from ddpjob.api.job_status import ConditionType, JobStatus, Restart
from ddpjob.core.failures.avoided_nodes import RECENT
from ddpjob.core.follow.recording import record
from ddpjob.core.status.conditions import MESSAGE_LIMIT, with_condition
from worlds import later


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    said = "begin" + "x" * 100_000 + "end"
    status = with_condition(JobStatus(), ConditionType.RUNNING, True, "R", said, later(0))
    [condition] = status.conditions
    assert len(condition.message) <= MESSAGE_LIMIT
    assert condition.message.startswith("begin") and condition.message.endswith("end")


def test_only_the_last_of_many_restarts_are_kept() -> None:
    restarts = [Restart(time=later(n), pod="p", reason="Hang", message="m", counted=True) for n in range(500)]
    recent = record(JobStatus(), restarts).restarts.recent
    assert len(recent) == RECENT and recent[-1].time == later(499)
