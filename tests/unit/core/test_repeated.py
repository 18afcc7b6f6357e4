"""Steps that restarts repeat: they are counted once per restart, are unknown without a report, and
do not count as new work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import ConditionType, JobStatus, Restart
from ddpjob.core.follow.recording import record
from ddpjob.core.status.conditions import with_condition
from ddpjob.core.status.repeated import current_restart, makes_new_steps
from ddpjob.core.world import ContainerView, PodView
from ddpjob_runtime.protocol import CoordinatorState, MemberState, Recovery
from worlds import NOW, later, report, running, seen

KEPT = {"step": 90, "source": "memory", "made": 91}


class Restarted:
    """A job whose group broke once and has formed again. It has not reported yet where training
    continued.
    """

    def __init__(self, cause: str = "OOMKilled") -> None:
        found: tuple[DDPJob, tuple[PodView, ...]] = running(2)
        self.job, self.pods = found
        self.look(10, 1, {"step": 91})
        self.breaks(20, cause)

    @property
    def status(self) -> JobStatus:
        return self.job.status

    def breaks(self, at: float, cause: str = "OOMKilled", *consequences: str) -> None:
        number = self.status.round + 1
        restarts = [
            Restart(
                time=later(at), pod="job-0-0", reason=each, message="", counted=False, round=number, consequence=n > 0
            )
            for n, each in enumerate((cause, *consequences))
        ]
        status = record(self.status, restarts)
        status = with_condition(status, ConditionType.RESTARTING, True, cause, "", later(at))
        self.job = replace(self.job, status=status)

    def look(self, at: float, number: int, progress: dict[str, Any], down: bool = False, pause: float = 1.5) -> None:
        """Show the operator the report of a running group. `down` means that the group has taken no
        step yet; `pause` is the coordinator's measurement of the last one.
        """
        recovery = Recovery(down_since=later(20)) if down else Recovery(last_seconds=pause)
        states = [MemberState.RUNNING] * 2
        last = report(CoordinatorState.RUNNING, *states, round=number, progress=progress, recovery=recovery)
        self.job, decision = seen(self.job, at, self.pods, last)
        self.events = [event.reason for event in decision.events]

    def told(self) -> str:
        condition = self.status.condition(ConditionType.RESTARTING)
        return "" if condition is None else condition.message


def test_repeated_steps_and_their_seconds_are_counted_only_once() -> None:
    one = Restarted()
    one.look(22, 2, {"start": KEPT}, down=True)
    one.look(23, 2, {"start": KEPT, "step": 91})
    assert (one.status.restarts.repeated_steps, one.status.restarts.repeated_seconds) == (1, 0)
    for at in (24, 30):
        one.look(at, 2, {"start": {**KEPT, "seconds": 0.4}, "step": 100})
        counts = one.status.restarts
        assert (counts.repeated_steps, counts.repeated_seconds, counts.unknown_repeats) == (1, 0.4, 0)
    [restart] = one.status.restarts.recent
    assert (restart.repeated_steps, restart.repeated_seconds, restart.continued_from) == (1, 0.4, "memory")


def test_the_condition_shows_repeated_steps_even_if_they_are_reported_late() -> None:
    one = Restarted()
    one.look(22, 2, {}, down=True)
    assert one.told() == "the group runs again"
    one.look(23, 2, {"start": KEPT}, down=True)
    assert one.told() == "the group runs again; 1 step repeated (from memory)"


def test_the_report_of_the_broken_round_does_not_apply_to_the_next_one() -> None:
    one = Restarted()
    one.look(22, 2, {"start": KEPT, "step": 95})
    one.breaks(40)
    one.look(41, 2, {"start": KEPT, "step": 95})
    assert one.status.restarts.recent[-1].continued_from == "" and one.status.restarts.repeated_steps == 1


def test_a_pause_that_began_before_the_operator_saw_the_break_counts_in_full() -> None:
    """The operator may have been without rights, or away, while the group was broken."""
    one = Restarted()
    one.look(22, 2, {"start": KEPT, "step": 95}, pause=112.3)
    assert one.status.restarts.recent[-1].seconds == 112.3
    one.breaks(300)
    one.look(301, 2, {"start": KEPT, "step": 95}, down=True)
    one.breaks(305)
    one.look(310, 3, {"start": KEPT, "step": 96}, pause=11.0)
    assert [r.seconds for r in one.status.restarts.recent] == [112.3, 10.0, 5.0], "the pause began with the first break"


def test_a_script_that_reports_nothing_has_repeated_an_unknown_number_of_steps() -> None:
    one = Restarted()
    one.look(22, 2, {}, down=True)
    assert one.status.restarts.unknown_repeats == 0, "the workers have not started yet"
    for at in (23, 24, 30):
        one.look(at, 2, {"step": 50})
    assert one.status.restarts.unknown_repeats == 1 and one.status.restarts.recent[-1].continued_from == "unknown"
    assert one.told() == "the group runs again", "the event claims nothing about repeated steps"
    one.look(31, 2, {"start": {**KEPT, "seconds": 1}, "step": 51})
    assert (one.status.restarts.unknown_repeats, one.status.restarts.repeated_steps) == (0, 1), (
        "the script's report was late"
    )


def test_if_the_last_step_is_not_known_the_repeated_steps_are_unknown_and_not_0() -> None:
    one = Restarted()
    one.look(23, 2, {"start": {"step": 40, "source": "storage"}, "step": 41})
    assert (one.status.restarts.unknown_repeats, one.status.restarts.repeated_steps) == (1, 0)
    assert one.status.restarts.recent[-1].repeated_steps is None
    assert one.told() == "the group runs again; an unknown number of steps repeated (from a checkpoint)"


def test_resuming_a_job_does_not_change_the_repeated_steps_of_earlier_restarts() -> None:
    one = Restarted()
    one.look(24, 2, {"start": {**KEPT, "seconds": 0.4}, "step": 100})
    before = one.status.restarts
    one.job = replace(one.job, status=replace(one.status, start_time=later(50)))
    one.look(60, 3, {"start": {"step": 100, "source": "storage"}, "step": 101})
    assert replace(one.status.restarts, seen_start="") == replace(before, seen_start="")
    assert makes_new_steps(one.status), "the job has trained before"


def test_repeated_steps_are_counted_even_if_the_list_of_restarts_overflows() -> None:
    one = Restarted()
    one.breaks(40, "NodeLost", *["PeerLost"] * 15)
    one.look(42, 3, {"start": {**KEPT, "seconds": 0.4}, "step": 92})
    counts = one.status.restarts
    assert (counts.repeated_steps, counts.repeated_seconds) == (1, 0.4) and len(counts.recent) == 10


def test_snapshots_that_do_not_fit_are_reported_once_and_the_report_is_withdrawn() -> None:
    one = Restarted()
    one.look(22, 2, {"snapshotBytes": 3 * 2**30, "step": 91})
    shown = one.status.condition(ConditionType.SNAPSHOTS_HELD)
    assert shown is not None and (shown.status, shown.reason) == (False, "NoRoom")
    assert "need 3.0 GiB" in shown.message and one.events.count("NoRoom") == 1
    one.look(23, 2, {"snapshotBytes": 3 * 2**30, "step": 92})
    assert one.status.condition(ConditionType.SNAPSHOTS_HELD) == shown and "NoRoom" not in one.events
    one.look(24, 2, {"stepsAtRisk": 4, "step": 93})
    held = one.status.condition(ConditionType.SNAPSHOTS_HELD)
    assert held is not None and held.status and held.message == "losing a pod would repeat at most 4 steps"


def test_a_finished_job_has_no_steps_at_risk() -> None:
    one = Restarted()
    one.look(22, 2, {"snapshotBytes": 3 * 2**30, "step": 91})
    one.look(24, 2, {"stepsAtRisk": 4, "step": 93})
    done = ContainerView(started=NOW, exit_code=0, reason="Completed", finished=later(30))
    one.pods = tuple(replace(pod, phase="Succeeded", containers={"trainer": done}) for pod in one.pods)
    one.look(31, 2, {"stepsAtRisk": 4, "step": 100})
    assert one.status.holds(ConditionType.COMPLETE) and one.status.progress["step"] == 100
    assert one.status.condition(ConditionType.SNAPSHOTS_HELD) is None and "stepsAtRisk" not in one.status.progress


def restarted(**fields: Any) -> JobStatus:
    known = Restart(time=NOW, pod="p", reason="OOMKilled", message="", counted=True, round=1, **fields)
    return record(JobStatus(trained=True), [known])


@pytest.mark.parametrize(
    ("status", "new"),
    [
        (JobStatus(), False),
        (JobStatus(trained=True), True),
        (restarted(), False),
        (restarted(seconds=1.0), True),
        (restarted(seconds=1.0, continued_from="memory", repeated_steps=0), True),
        (restarted(seconds=1.0, continued_from="memory", repeated_steps=3), False),
        (restarted(seconds=1.0, continued_from="memory", repeated_steps=3, repeated_seconds=0.2), True),
        (restarted(seconds=1.0, continued_from="storage"), True),
    ],
)
def test_only_steps_beyond_the_furthest_one_are_new(status: JobStatus, new: bool) -> None:
    assert makes_new_steps(status) is new


def test_a_lost_coordinator_that_did_not_end_the_round_is_not_a_current_restart() -> None:
    lost = Restart(time=NOW, pod="c", reason="CoordinatorLost", message="", counted=False, seconds=0.0)
    assert current_restart(record(JobStatus(), [lost])) is None
