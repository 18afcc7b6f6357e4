"""The metrics of jobs: each event counts once, durations add up, and series are bounded and removed
with their job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.controller import job_metrics
from ddpjob.controller.job_metrics import JobAccounts, JobSeries
from ddpjob.engine.ports import JobKey
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric

SPEC = {"image": "image", "nodes": 2, "script": "train.py"}
KEY = JobKey("space", "job")


def job(status: dict[str, Any] | None = None, name: str = "job", uid: str = "uid", space: str = "space") -> DDPJob:
    return DDPJob.read({"metadata": {"name": name, "namespace": space, "uid": uid}, "spec": SPEC, "status": status})


def condition(kind: str, reason: str = "Reason", second: int = 0, holds: bool = True) -> dict[str, Any]:
    return {
        "type": kind,
        "status": str(holds),
        "reason": reason,
        "message": "",
        "lastTransitionTime": f"2026-01-01T00:00:{second:02}Z",
    }


def restart(reason: str = "OOMKilled", counted: bool = True, **more: Any) -> dict[str, Any]:
    at = {"time": "2026-01-01T00:00:30Z", "pod": "job-0-0", "message": "", "round": 1}
    return {**at, "reason": reason, "counted": counted, **more}


def running(step: int | None = None, restarts: tuple[dict[str, Any], ...] = (), **more: Any) -> dict[str, Any]:
    progress = {} if step is None else {"step": step, "updatedAt": "2026-01-01T00:00:09Z"}
    return {
        "phase": "Running",
        "schema": 1,
        "startTime": "2026-01-01T00:00:00Z",
        "conditions": [condition("Scheduled", second=2), condition("Running", "GroupRuns", second=5)],
        "nodes": {"active": 2, "ready": 2, "spare": 0},
        "slots": [{"attempt": 0, "state": "Running", "node": f"n{n}"} for n in range(2)],
        "trained": step is not None,
        "progress": progress,
        "restarts": {"total": len(restarts), "counted": len(restarts), "recent": list(restarts)},
        **more,
    }


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


class Counted:
    """Values counted since the creation of this object."""

    def __init__(self) -> None:
        self.before = self._all()

    @staticmethod
    def _all() -> dict[Any, float]:
        return {
            (s.name, *sorted(s.labels.items())): s.value
            for family in REGISTRY.collect()
            if family.type in ("counter", "histogram")
            for s in family.samples
            if s.name.endswith(("_total", "_count", "_sum")) and s.name.startswith("ddpjob_")
        }

    def __call__(self) -> dict[str, float]:
        changes = {key: now - self.before.get(key, 0.0) for key, now in self._all().items()}
        return {" ".join([key[0], *(v for _, v in key[1:])]): change for key, change in changes.items() if change}


class Job:
    """One job in a leader's cache."""

    def __init__(self, first: dict[str, Any] | None = None, acts: bool = True) -> None:
        self.seconds = 0.0
        self.accounts = JobAccounts(lambda: self.seconds)
        self.known: DDPJob | None = None
        self.becomes(first)
        self.accounts.acts_on(KEY, acts=acts)

    def becomes(self, status: dict[str, Any] | None, uid: str = "uid") -> None:
        after = job(status, uid=uid)
        self.accounts.changed(self.known, after)
        self.known = after


@pytest.fixture
def counted() -> Iterator[Counted]:
    yield Counted()


def test_the_start_of_a_job_is_counted_and_timed_by_the_times_in_its_status(counted: Counted) -> None:
    one = Job()
    assert counted() == {}, "the operator has not begun to work on it"
    one.becomes({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"})
    one.becomes(running())
    one.becomes(running(step=1))
    one.becomes(running(step=2))
    assert counted() == {
        "ddpjob_jobs_created_total": 1,
        "ddpjob_time_to_pods_seconds_count": 1,
        "ddpjob_time_to_pods_seconds_sum": 2,
        "ddpjob_time_to_running_seconds_count": 1,
        "ddpjob_time_to_running_seconds_sum": 5,
        "ddpjob_time_to_first_step_seconds_count": 1,
        "ddpjob_time_to_first_step_seconds_sum": 9,
    }


def test_a_restarted_operator_counts_no_event_twice(counted: Counted) -> None:
    """Existing counts were exported before, so only later changes are new."""
    complete = running(7, (restart(seconds=1.0),), conditions=[condition("Complete")], phase="Complete")
    for found in (running(5), complete):
        Job(found)
    assert counted() == {}


def test_a_job_managed_by_another_controller_is_not_reported_as_waiting(counted: Counted) -> None:
    accounts = JobAccounts()
    theirs = {**SPEC, "managedBy": "kueue.x-k8s.io/multikueue"}
    metadata = {"name": "job", "namespace": "space", "uid": "uid"}
    accounts.changed(None, DDPJob.read({"metadata": metadata, "spec": theirs}))
    accounts.acts_on(KEY, acts=True)
    found = scraped(accounts)
    assert not [name for name in found if name.startswith("ddpjob_job_")]
    assert found["ddpjob_jobs"][("Pending",)] == 0


def test_jobs_of_a_different_operator_are_counted_by_that_operator(counted: Counted) -> None:
    other = Job(acts=False)
    other.becomes({"phase": "Pending"})
    other.becomes({"phase": "Failed", "conditions": [condition("Failed", "InvalidPod")]})
    assert counted() == {} and other.accounts.jobs() == []


def test_a_job_refused_by_its_class_has_failed_for_that_reason(counted: Counted) -> None:
    one = Job({"phase": "Pending"})
    one.becomes({"phase": "Failed", "conditions": [condition("Failed", "ClassRefused")]})
    assert counted() == {"ddpjob_jobs_failed_total ClassRefused": 1}
    assert scraped(one.accounts)["ddpjob_job_failed"] == {("space", "job", "ClassRefused"): 1}


def test_a_restart_counts_once_and_its_recovery_counts_when_it_is_complete(counted: Counted) -> None:
    one = Job(running(130))
    broken = running(134, (restart(),), conditions=[condition("Restarting", "OOMKilled")], phase="Restarting")
    one.becomes(broken)
    one.becomes({**broken, "observedGeneration": 2})
    assert counted() == {"ddpjob_restarts_total true OOMKilled": 1}
    one.becomes(running(134, (restart(seconds=3.5),)))
    assert value("ddpjob_lost_steps_count") == counted.before.get(("ddpjob_lost_steps_count",), 0.0), (
        "the duration is not known yet"
    )
    one.becomes(running(101, (restart(seconds=3.5),)))
    one.becomes(running(99, (restart(seconds=3.5),)))
    assert counted() == {
        "ddpjob_restarts_total true OOMKilled": 1,
        "ddpjob_recovery_seconds_count OOMKilled": 1,
        "ddpjob_recovery_seconds_sum OOMKilled": 3.5,
        "ddpjob_lost_steps_count": 1,
        "ddpjob_lost_steps_sum": 33,
    }


def test_restarts_that_the_status_no_longer_lists_are_counted_too(counted: Counted) -> None:
    many = tuple(restart("Evicted", counted=False, seconds=1.0) for _ in range(10))
    one = Job(running(1, many))
    twelve = running(1, many)
    twelve["restarts"]["total"] = 22 + 2
    one.becomes(twelve)
    assert counted() == {
        "ddpjob_restarts_total false Evicted": 10,
        "ddpjob_restarts_total false Other": 4,
        "ddpjob_recovery_seconds_count Evicted": 10,
        "ddpjob_recovery_seconds_sum Evicted": 10,
    }


def test_planned_restarts_and_lost_coordinators_are_not_recoveries(counted: Counted) -> None:
    one = Job(running(10))
    scaled = restart("Scaled", counted=False, seconds=2.0)
    lost = restart("CoordinatorLost", counted=False, seconds=0.0, round=0)
    one.becomes(running(10, (scaled, lost)))
    one.becomes(running(4, (scaled, lost)))
    assert counted() == {
        "ddpjob_restarts_total false Scaled": 1,
        "ddpjob_restarts_total false CoordinatorLost": 1,
    }


@pytest.mark.parametrize(("reason", "label"), [("RestartBudgetSpent", "RestartBudgetSpent"), ("Made-up", "Other")])
def test_only_known_reasons_become_labels(counted: Counted, reason: str, label: str) -> None:
    one = Job(running(1))
    one.becomes({"phase": "Failed", "conditions": [condition("Failed", reason)]})
    two = Job(running(1))
    two.becomes({"phase": "Complete", "conditions": [condition("Complete", "Finished")]})
    assert counted() == {f"ddpjob_jobs_failed_total {label}": 1, "ddpjob_jobs_completed_total": 1}


def test_an_unknown_cause_creates_no_series(counted: Counted) -> None:
    one = Job(running(1))
    one.becomes(running(1, (restart("x" * 200, seconds=1.0),)))
    assert set(counted()) == {
        "ddpjob_restarts_total true Other",
        "ddpjob_recovery_seconds_count Other",
        "ddpjob_recovery_seconds_sum Other",
    }


# --- series of single jobs


def scraped(*accounts: JobAccounts) -> dict[str, dict[tuple[str, ...], float]]:
    series = JobSeries()
    for term in accounts:
        series.begin(term)
    families: list[Metric] = list(series.collect())
    for term in accounts:
        series.end(term)
    assert not any(f.samples for f in series.collect() if f.name.startswith("ddpjob_job_")), (
        "the series end with the operator's term"
    )
    return {f.name: {tuple(s.labels.values()): s.value for s in f.samples} for f in families if f.samples}


def test_the_time_of_pods_and_of_training_adds_up() -> None:
    one = Job({"phase": "Pending"})
    one.seconds = 100
    one.becomes(running(1))
    one.seconds = 160  # two nodes train for 60 s
    one.becomes(running(1, (restart(),), conditions=[condition("Running"), condition("Restarting")]))
    one.seconds = 170  # two pods wait for 10 s
    one.becomes(running(2, (restart(seconds=10.0),)))
    one.seconds = 200  # 30 s without a change of the status
    found, own = scraped(one.accounts), ("space", "job")
    assert found["ddpjob_job_pod_seconds"] == {own: 2 * (60 + 10 + 30)}
    assert found["ddpjob_job_useful_seconds"] == {own: 2 * (60 + 30)}
    one.becomes({**running(2), "phase": "Complete", "conditions": [condition("Complete")]})
    one.seconds = 900
    assert scraped(one.accounts)["ddpjob_job_pod_seconds"] == {own: 200}, "the job has ended"


def test_time_before_the_first_step_and_in_repeated_steps_is_not_useful_time() -> None:
    own, one = ("space", "job"), Job({**running(), "trained": False})
    one.becomes({**running(), "trained": False})

    def after(passed: float, step: int | None, **restarted: Any) -> None:
        one.seconds += passed
        status = running(step, (restart(**restarted),) if restarted else (), round=bool(restarted))
        one.becomes(status | {"restarts": status["restarts"] | {"repeatedSteps": 7, "unknownRepeats": 1}})

    after(10, 1)  # compiled its model until here
    after(60, 40, round=1)  # new steps until here
    after(5, 40, round=1, seconds=4.0, continuedFrom="memory", repeatedSteps=3)
    after(20, 40, round=1, seconds=4.0, continuedFrom="memory", repeatedSteps=3, repeatedSeconds=19.5)
    after(100, 90, round=1, seconds=4.0, continuedFrom="memory", repeatedSteps=3, repeatedSeconds=19.5)
    found = scraped(one.accounts)
    assert found["ddpjob_job_pod_seconds"] == {own: 2 * 195} and found["ddpjob_job_useful_seconds"] == {own: 2 * 160}
    assert found["ddpjob_job_repeated_steps"] == {own: 7} and found["ddpjob_job_unknown_repeats"] == {own: 1}


def test_only_a_training_group_has_steps_at_risk_and_refused_snapshots_are_shown() -> None:
    own, one = ("space", "job"), Job({**running(1), "progress": {"step": 1, "stepsAtRisk": 4}})
    found = scraped(one.accounts)
    assert found["ddpjob_job_steps_at_risk"] == {own: 4} and found["ddpjob_job_snapshots_refused"] == {own: 0}
    refused = condition("SnapshotsHeld", "NoRoom", holds=False)
    broken = {"conditions": [condition("Running"), condition("Restarting"), refused]}
    one.becomes({**running(1), "progress": {"step": 1, "stepsAtRisk": 4}, **broken})
    found = scraped(one.accounts)
    assert "ddpjob_job_steps_at_risk" not in found and found["ddpjob_job_snapshots_refused"] == {own: 0}
    one.becomes(running(1, conditions=[condition("Running"), refused]))
    found = scraped(one.accounts)
    assert found["ddpjob_job_snapshots_refused"] == {own: 1}


def test_a_slow_rank_that_is_not_replaced_has_a_series_while_the_group_trains() -> None:
    own, one = ("space", "job"), Job(running(2))
    assert scraped(one.accounts)["ddpjob_job_slow_rank"] == {own: 0}
    slow = condition("RanksKeepPace", "SlowRank", holds=False)
    one.becomes(running(2, conditions=[condition("Running"), slow]))
    assert scraped(one.accounts)["ddpjob_job_slow_rank"] == {own: 1}
    one.becomes(running(2, conditions=[condition("Running"), condition("Restarting"), slow]))
    assert scraped(one.accounts)["ddpjob_job_slow_rank"] == {own: 0}


def test_a_stalled_job_does_not_count_as_training() -> None:
    one = Job(running(1))
    one.becomes(running(1, conditions=[condition("Running", "StepOverdue")]))
    one.seconds = 50
    found, own = scraped(one.accounts), ("space", "job")
    assert found["ddpjob_job_stalled"] == {own: 1}
    assert found["ddpjob_job_pod_seconds"] == {own: 100} and found["ddpjob_job_useful_seconds"] == {own: 0}


def test_a_job_that_does_not_train_has_no_speed_series() -> None:
    """Otherwise a sum over jobs would include speeds from before a break or a suspension."""
    progress = {"step": 4, "samplesPerSecond": 10.5}
    one = Job(running(4, progress=progress))
    assert scraped(one.accounts)["ddpjob_train_samples_per_second"] == {("space", "job"): 10.5}
    for away in ([condition("Running"), condition("Restarting")], [condition("Suspended")]):
        one.becomes(running(4, conditions=away, progress=progress))
        found = scraped(one.accounts)
        assert "ddpjob_train_samples_per_second" not in found and found["ddpjob_train_step"] == {("space", "job"): 4}


@pytest.mark.parametrize(("reason", "shown"), [("Queued", 0), ("QueueNotServed", 1)])
def test_a_queue_that_no_controller_serves_is_distinguished_from_a_full_one(reason: str, shown: int) -> None:
    found = scraped(Job({"phase": "Queued", "conditions": [condition("Suspended", reason)]}).accounts)
    assert found["ddpjob_job_queue_not_served"] == {("space", "job"): shown}


def test_progress_of_a_hostile_script_adds_no_labels_and_no_series() -> None:
    hostile = {"step": "many", "loss": float("inf"), "epoch": True, "metrics": {f"m{n}": n for n in range(100)}}
    progress = {**hostile, "samplesPerSecond": 10.5, "checkpointTime": 1}
    progress["metrics"]["checkpointTime"] = 1.7e9
    found = scraped(Job(running(1, progress=progress)).accounts)
    trained = {name: series for name, series in found.items() if name.startswith("ddpjob_train_")}
    own = ("space", "job")
    assert trained == {
        "ddpjob_train_samples_per_second": {own: 10.5},
        "ddpjob_train_checkpoint_timestamp_seconds": {own: 1.7e9},
    }


def test_a_deleted_jobs_series_end_and_those_of_a_successor_begin_at_0() -> None:
    one = Job(running(1))
    one.seconds = 10
    one.becomes(running(1), uid="another")
    assert scraped(one.accounts)["ddpjob_job_pod_seconds"] == {("space", "job"): 0}
    one.accounts.changed(one.known, None)
    assert not any(name.startswith("ddpjob_job_") for name in scraped(one.accounts))


def test_jobs_beyond_a_limit_have_no_series_and_running_jobs_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_metrics, "MOST_JOBS", 3)
    accounts = JobAccounts()
    for number in range(5):
        ended = {"phase": "Complete", "conditions": [condition("Complete")]} if number < 3 else running(1)
        accounts.changed(None, job(ended, name=f"job-{number}"))
        accounts.acts_on(JobKey("space", f"job-{number}"), acts=True)
    found = scraped(accounts)
    assert found["ddpjob_job_phase"].keys() == {
        ("space", "job-3", "Running"),
        ("space", "job-4", "Running"),
        ("space", "job-0", "Complete"),
    }
    assert found["ddpjob_jobs"][("Complete",)] == 3 and found["ddpjob_jobs"][("Failed",)] == 0
    assert found["ddpjob_operator_jobs_without_series"] == {(): 2}


def test_a_namespace_with_many_jobs_does_not_displace_the_series_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_metrics, "MOST_JOBS", 6)
    accounts = JobAccounts()
    ended = {"phase": "Complete", "conditions": [condition("Complete")]}
    for space, count, status in (("a", 9, running(1)), ("b", 2, running(1)), ("c", 1, running(1)), ("d", 1, ended)):
        for number in range(count):
            accounts.changed(None, job(status, name=f"job-{number}", space=space))
            accounts.acts_on(JobKey(space, f"job-{number}"), acts=True)
    shown = [key[:2] for key in scraped(accounts)["ddpjob_job_phase"]]
    first = [("a", "job-0"), ("b", "job-0"), ("c", "job-0"), ("a", "job-1"), ("b", "job-1")]
    assert shown == [*first, ("a", "job-2")], "finished jobs come after unfinished jobs of any namespace"


def spent(seconds: int, held: int = 16, **more: Any) -> dict[str, Any]:
    use = {"gpuUse": {"held": held, "since": "2026-01-01T00:00:00Z"}} if held else {}
    return running(1, gpuSeconds=seconds, **use, **more)


def test_gpu_seconds_match_the_jobs_status_and_add_up_by_queue(counted: Counted) -> None:
    own, queue = ("space", "job"), {"queue": {"workload": "w", "uid": "u", "clusterQueue": "gpus"}}
    one = Job(spent(100))
    one.becomes(spent(130))
    one.becomes(spent(190, **queue))
    one.becomes(spent(250, held=0, **queue))
    one.becomes(spent(250, held=0))
    found = scraped(one.accounts)
    assert found["ddpjob_job_gpu_seconds"] == {own: 250} and "ddpjob_job_gpus" not in found
    gained = {name: n for name, n in counted().items() if name.startswith("ddpjob_gpu")}
    assert gained == {"ddpjob_gpu_seconds_total space ": 30, "ddpjob_gpu_seconds_total space gpus": 120}
    assert "ddpjob_job_gpu_seconds" not in scraped(Job(running(1)).accounts), "a job on the CPU has no GPU seconds"
    assert scraped(Job(spent(0)).accounts)["ddpjob_job_gpus"] == {own: 16}


def test_the_number_of_queues_with_gpu_seconds_is_bounded(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_metrics, "_payers", {("a", ""), ("b", "")})
    monkeypatch.setattr(job_metrics, "MOST_PAYERS", 3)
    for number, queue in enumerate(("one", "two", "three")):
        one = Job(spent(100))
        one.becomes(spent(110 + number, queue={"workload": "w", "uid": "u", "clusterQueue": queue}))
    gained = {name: n for name, n in counted().items() if name.startswith("ddpjob_gpu")}
    assert gained == {"ddpjob_gpu_seconds_total space one": 10, "ddpjob_gpu_seconds_total Other Other": 23}
