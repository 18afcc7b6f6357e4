"""The figures in status.progress."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, RendezvousStatus, Slot
from ddpjob.core.status.events import change_events
from ddpjob.core.status.shown_progress import began_again, duration, show_progress, show_stragglers, without_speed
from ddpjob.core.view import View
from ddpjob.core.world import PodView, Role, World
from ddpjob_runtime.protocol import CoordinatorState, Member, MemberState, Report, read_figures
from worlds import report, running, seen

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_figures_in_the_progress_are_formatted_for_display() -> None:
    reported = {
        "epoch": 3,
        "epochs": 10,
        "step": 45,
        "steps": 100,
        "loss": 0.31249,
        "samplesPerSecond": 1234.5,
        "eta": 754.2,
    }
    shown = show_progress({}, reported, NOW, at_once=False)
    assert shown["display"] == "epoch 3/10 45 %"
    assert shown["lossDisplay"] == "0.3125"
    assert shown["speedDisplay"] == "1,234/s"
    assert shown["eta"] == "12m34s"
    assert shown["percent"] == 45


def test_a_loss_of_minus_zero_is_shown_as_zero() -> None:
    """A loss of 0 can be the mean of negated logarithms of 1, which is -0."""
    assert show_progress({}, {"loss": -0.0}, NOW, at_once=False)["lossDisplay"] == "0"


@pytest.mark.parametrize("steps", [0, -1])
def test_zero_total_steps_have_no_percentage(steps: int) -> None:
    shown = show_progress({}, {"epoch": 1, "step": 45, "steps": steps}, NOW, at_once=False)
    assert "percent" not in shown and shown["display"] == "epoch 1 step 45"


@pytest.mark.parametrize(("step", "percent"), [(-5, 0), (101, 100)])
def test_the_percentage_is_from_0_to_100(step: int, percent: int) -> None:
    assert show_progress({}, {"step": step, "steps": 100}, NOW, at_once=False)["percent"] == percent


def test_the_speed_is_shown_in_steps_if_the_script_reports_no_samples() -> None:
    reported = {"step": 45, "metrics": {"stepsPerSecond": 9.961}}
    assert show_progress({}, reported, NOW, at_once=False)["speedDisplay"] == "9.96 steps/s"
    both = show_progress({}, {**reported, "samplesPerSecond": 80}, NOW, at_once=False)
    assert both["speedDisplay"] == "80/s"


@pytest.mark.parametrize("resumed", ["yes", "no", "unknown"])
def test_steps_are_counted_from_the_restart(resumed: str) -> None:
    """Regression: a script that starts from scratch each time looked like one that resumes."""
    shown = show_progress({}, {"step": 359, "resumed": "no"}, NOW, at_once=False)
    assert shown["display"] == "step 359" and not began_again(shown), "this is the job's first start"
    shown = show_progress(shown, {"step": 1, "resumed": "unknown"}, NOW, at_once=False)
    assert shown["display"] == "step 1 since the restart", "immediately"
    shown = show_progress(shown, {"step": 128, "resumed": resumed}, NOW + timedelta(seconds=9), at_once=False)
    assert (shown["display"], shown["stepsBefore"]) == ("step 128 since the restart", 359)
    said = {
        "yes": "",
        "no": "no state from the 359 earlier steps (see docs/own-scripts.md to make it resume)",
    }
    assert said.get(resumed, "it is unknown") in began_again(shown) and bool(began_again(shown)) is (resumed != "yes")
    own = show_progress(shown, {"step": 300}, NOW + timedelta(seconds=20), at_once=False)
    assert own["display"] == "step 300" and not began_again(own), "the script reports its own steps"


def test_a_new_coordinator_without_a_report_of_steps_keeps_the_shown_figures() -> None:
    """If a coordinator is lost in the last second of a job, no rank reports to the next one."""
    figures = {"epoch": 3, "step": 60, "steps": 60, "loss": 0.25, "samplesPerSecond": 80, "eta": 9}
    shown = show_progress({}, figures, NOW, at_once=False)
    lag = [{"rank": 1, "slowdown": 2.0}]
    environment = {"packages": {"torch": "2.6.0"}}
    later = show_progress({**shown, "stragglers": lag}, {"environment": environment}, NOW, at_once=True)
    assert later == {**without_speed(shown), "environment": environment}
    new_group = show_progress(later, {"step": 61}, NOW, at_once=True)
    assert (new_group["step"], new_group.get("loss"), new_group.get("speedDisplay")) == (61, None, None)


def test_progress_is_written_at_most_every_two_seconds() -> None:
    first = show_progress({}, {"step": 1}, NOW, at_once=False)
    assert show_progress(first, {"step": 2}, NOW + timedelta(seconds=1), at_once=False) is first
    assert show_progress(first, {"step": 2}, NOW + timedelta(seconds=1), at_once=True)["step"] == 2
    assert show_progress(first, {"step": 2}, NOW + timedelta(seconds=2), at_once=False)["step"] == 2
    for figure in ({"loss": 0.5}, {"samplesPerSecond": 3}, {"metrics": {"stepsPerSecond": 3}}):
        both = show_progress(first, {"step": 2, **figure}, NOW + timedelta(seconds=1), at_once=False)
        assert both["step"] == 2, "this is the first report of progress"
        assert show_progress(both, {"step": 3, **figure}, NOW + timedelta(seconds=2), at_once=False) is both
    assert show_progress(first, {"step": 1}, NOW + timedelta(seconds=9), at_once=False) is first, (
        "unchanged progress is not written"
    )


def test_invalid_numbers_in_progress_are_not_shown() -> None:
    shown = show_progress({}, {"step": 1, "loss": float("nan"), "samplesPerSecond": float("inf")}, NOW, at_once=False)
    assert set(shown) == {"step", "display", "lossDisplay", "updatedAt"}


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_shown_as_nan(loss: float | None) -> None:
    """The coordinator's report has null for it. An empty column looked like a missing report."""
    finite = show_progress({}, {"step": 1, "loss": 0.5}, NOW, at_once=False)
    shown = show_progress(finite, {"step": 2, "loss": loss}, NOW + timedelta(seconds=9), at_once=False)
    assert shown["lossDisplay"] == "nan" and "loss" not in shown
    assert "lossDisplay" not in show_progress({}, {"step": 1}, NOW, at_once=False), "the script reports no loss"
    alone = show_progress(finite, {"loss": loss}, NOW + timedelta(seconds=9), at_once=False)
    assert (alone["step"], alone["lossDisplay"], "loss" in alone) == (1, "nan", False), "from a new coordinator"


def test_steps_before_the_loss_of_a_coordinator_are_remembered() -> None:
    """Regression: a counted script that began again at step 0 then looked like its first start."""
    shown = show_progress({}, {"step": 359, "resumed": "no"}, NOW, at_once=False)
    shown = show_progress(shown, {"updatedAt": None}, NOW + timedelta(seconds=9), at_once=False)
    shown = show_progress(shown, {"step": 1, "resumed": "no"}, NOW + timedelta(seconds=20), at_once=False)
    assert shown["display"] == "step 1 since the restart" and "359 earlier steps" in began_again(shown)


def test_durations_in_the_progress_are_formatted() -> None:
    assert [duration(s) for s in (0, 59.4, 60, 3599, 3660, 90000)] == [
        "0s",
        "59s",
        "1m00s",
        "59m59s",
        "1h01m",
        "25h00m",
    ]


@pytest.mark.parametrize("written", ["8999-01-01T00:00:00Z", "2026-02-30T00:00:00Z", "never", "2026-01-01T00:00:00", 3])
def test_an_impossible_duration_does_not_hide_other_progress(written: Any) -> None:
    fresh = show_progress({"step": 1, "updatedAt": written}, {"step": 2}, NOW, at_once=False)
    assert (fresh["step"], fresh["updatedAt"]) == (2, "2026-01-01T00:00:00Z")


# ------------------------------------------------------------ lagging ranks


def lagging(stragglers: Any, *, shown: Any = (), state: CoordinatorState = CoordinatorState.RUNNING) -> View:
    """Return a view of a job of two nodes with two ranks each."""
    body = {"image": "image", "script": "train.py", "nodes": 2, "procsPerNode": 2}
    job = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": body})
    pods = [PodView(name=f"job-{n}-0", uid=f"{n}", role=Role.NODE, index=n, host=("", "host")[n]) for n in (0, 1)]
    members = tuple(Member(pod, MemberState.RUNNING, rank=rank) for rank, pod in ((0, "job-1-0"), (1, "job-0-0")))
    figures = read_figures({"step": 3, "stragglers": stragglers}, "progress")
    report = Report(0, state, 2, 2, (1.0, 60.0), progress=figures, members=members)
    progress = {"stragglers": list(shown)} if shown else {}
    status = JobStatus(slots=(Slot(), Slot()), rendezvous=RendezvousStatus(nodes=2), progress=progress)
    return View(job, status, World(pods=tuple(pods), report=report), NOW)


def test_a_lagging_rank_is_shown_with_its_pod() -> None:
    found = show_stragglers(lagging([{"rank": 1, "slowdown": 1.84}, {"rank": 2, "slowdown": 2}]))
    assert found == [
        {"rank": 2, "pod": "job-0-0", "slowdown": 2.0, "since": "2026-01-01T00:00:00Z"},
        {"rank": 1, "pod": "job-1-0", "node": "host", "slowdown": 1.8, "since": "2026-01-01T00:00:00Z"},
    ]
    shown = show_progress({}, {"step": 3}, NOW, at_once=False, stragglers=found)
    assert shown["stragglers"] == found
    assert "stragglers" not in show_progress(shown, {"step": 4}, NOW + timedelta(seconds=9), at_once=False)


@pytest.mark.parametrize(
    "reported",
    [
        "x",
        {},
        [1, None, "a", [], {}],
        [{"rank": 4, "slowdown": 2}],  # There are four ranks.
        [{"rank": -1, "slowdown": 2}],
        [{"rank": True, "slowdown": 2}],
        [{"rank": 1.5, "slowdown": 2}],
        [{"rank": "1", "slowdown": 2}],
        [{"rank": 1, "slowdown": float("nan")}],
        [{"rank": 1, "slowdown": 0.5}],
        [{"rank": 1}],
    ],
)
def test_a_lag_of_an_unknown_rank_is_not_shown(reported: Any) -> None:
    assert show_stragglers(lagging(reported)) == []


def test_the_displayed_values_of_a_lag_are_bounded() -> None:
    many = [{"rank": rank % 4, "slowdown": 1e18} for rank in range(1000)]
    found = show_stragglers(lagging(many))
    assert [entry["rank"] for entry in found] == [0, 1, 2, 3] and {entry["slowdown"] for entry in found} == {1000.0}
    assert len(read_figures({"stragglers": [{"rank": n, "slowdown": 2} for n in range(99)]}, "")["stragglers"]) == 8


def test_a_lagging_rank_is_shown_for_a_minute_and_causes_one_event() -> None:
    """A script whose reports alternate causes one event per minute, not one per report."""
    status, events = JobStatus(), 0
    for second in range(0, 300, 2):
        now = NOW + timedelta(seconds=second)
        view = lagging([{"rank": 1, "slowdown": 2}] if second % 4 else [], shown=status.progress.get("stragglers", ()))
        found = show_stragglers(replace(view, now=now))
        after = replace(status, progress={"stragglers": found} if found else {})
        events += len(change_events(status, after))
        status = after
    assert 4 <= events <= 6
    assert found, "the last report is younger than a minute"
    (event,) = change_events(JobStatus(), after)
    assert event.warning and event.reason == "RankLags"
    later = lagging([], shown=found)
    assert show_stragglers(replace(later, now=NOW + timedelta(minutes=10))) == [], "the rank is not shown for longer"


def test_swapped_ranks_do_not_inherit_a_lag() -> None:
    view = lagging([{"rank": 2, "slowdown": 2}])
    shown = show_stragglers(view)
    assert [entry["pod"] for entry in shown] == ["job-0-0"]
    assert view.report is not None
    swapped = tuple(replace(m, rank=1 - m.rank) for m in view.report.members if m.rank is not None)
    next_round = replace(view.report, members=swapped, round=2, progress={"step": 3})
    status = replace(view.status, progress={"step": 3, "stragglers": shown})
    later = replace(view, status=status, world=replace(view.world, report=next_round), now=NOW + timedelta(seconds=5))
    assert show_stragglers(later) == [], "the minute applies to the pod, not to the rank"
    again = replace(next_round, progress=view.report.progress)
    (entry,) = show_stragglers(replace(later, world=replace(view.world, report=again)))
    assert (entry["pod"], entry["since"]) == ("job-1-0", "2026-01-01T00:00:05Z")
    (event,) = change_events(status, JobStatus(progress={"stragglers": [entry]}))
    assert "rank 2 (job-1-0" in event.message


def test_a_lasting_lag_causes_one_event_with_pod_and_node() -> None:
    first = show_stragglers(lagging([{"rank": 1, "slowdown": 2}]))
    (event,) = change_events(JobStatus(), JobStatus(progress={"stragglers": first}))
    assert event.reason == "RankLags"
    assert event.message == (
        "in each step, rank 1 (job-1-0 on Kubernetes node host) takes 2.0 times as long as the median rank for its "
        "own work, "
        "and all other ranks wait for it"
    )
    two = show_stragglers(lagging([{"rank": 1, "slowdown": 2}, {"rank": 2, "slowdown": 2}]))
    (event,) = change_events(JobStatus(), JobStatus(progress={"stragglers": two}))
    assert event.message.endswith("as the median rank for their own work, and all other ranks wait for them")
    view = replace(lagging([{"rank": 1, "slowdown": 3}], shown=first), now=NOW + timedelta(hours=1))
    later = show_stragglers(view)
    assert later[0]["slowdown"] == 3 and later[0]["since"] == first[0]["since"]
    assert change_events(JobStatus(progress={"stragglers": first}), JobStatus(progress={"stragglers": later})) == []


def test_no_lagging_rank_is_shown_while_the_group_does_not_run() -> None:
    for state in (CoordinatorState.RESTARTING, CoordinatorState.FORMING):
        assert show_stragglers(lagging([{"rank": 1, "slowdown": 2}], state=state)) == []


@pytest.mark.parametrize(
    "state", [None, *(state for state in CoordinatorState if state is not CoordinatorState.RUNNING)]
)
def test_no_lagging_rank_of_a_finished_or_hanging_job_is_shown(state: CoordinatorState | None) -> None:
    """This holds even within the minute, and without a report."""
    shown = show_stragglers(lagging([{"rank": 1, "slowdown": 2}]))
    view = lagging([{"rank": 1, "slowdown": 2}], shown=shown, state=state or CoordinatorState.RUNNING)
    view = view if state else replace(view, world=replace(view.world, report=None))
    assert show_stragglers(view) == []
    before = {"step": 3, "stragglers": shown, "updatedAt": "2026-01-01T00:00:00Z"}
    after = show_progress(before, view.reported_progress, NOW, at_once=True, stragglers=show_stragglers(view))
    assert after["step"] == 3 and "stragglers" not in after


def test_a_suspended_job_has_no_lagging_ranks() -> None:
    job, pods = running(2)
    lags = {"step": 5, "stragglers": [{"rank": 1, "slowdown": 2.0}]}
    job, _ = seen(job, 10, pods, replace(report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * 2), progress=lags))
    assert [entry["rank"] for entry in job.status.progress["stragglers"]] == [1]
    job = replace(job, spec=replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True)))
    job, _ = seen(job, 11, pods, None)
    assert "stragglers" not in job.status.progress and job.status.progress["step"] == 5


def test_a_lone_surrogate_in_a_name_is_escaped() -> None:
    """Regression: the API server stored a different character, so each reconcile saw the progress
    as changed.
    """
    shown = show_progress({}, {"step": 1, "eta": "\ud800", "metrics": {"a\ud800": 2.0}}, NOW, at_once=True)
    assert shown["metrics"] == {"a\\ud800": 2.0} and shown["eta"] == "\\ud800"
