"""A real Prometheus scrapes the operator's metrics. Every query of the dashboards has data, and
every alert fires.
"""

from __future__ import annotations

import itertools
import math
import re
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ddpjob.api.job import DDPJob
from ddpjob.controller import job_metrics, operator_metrics
from ddpjob.controller.job_metrics import SERIES, JobAccounts
from ddpjob.controller.main import Operator
from ddpjob.controller.operator_settings import Settings
from ddpjob.engine.ports import JobKey
from machine import free_port, slowness
from prometheus_programs import PrometheusServer

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "charts" / "ddpjob-operator" / "monitoring"
DASHBOARDS = runpy.run_path(str(ROOT / "docs" / "generate_dashboards.py"))


def condition(kind: str, reason: str = "Reason") -> dict[str, Any]:
    moment = "2026-01-01T00:00:05Z"
    return {"type": kind, "status": "True", "reason": reason, "message": "", "lastTransitionTime": moment}


def running(
    reason: str = "GroupRuns", step: int = 1, restarts: int = 0, broke: bool = False, **progress: Any
) -> dict[str, Any]:
    """Return the status of a job of two training nodes."""
    one = {"time": "2026-01-01T00:10:00Z", "pod": "p", "message": "", "round": 1, "reason": "OOMKilled"}
    recent = [{**one, "counted": True, **({} if broke else {"seconds": 4.0})}] * min(restarts, 10)
    conditions = [condition("Scheduled"), condition("Running", reason)]
    return {
        "phase": "Restarting" if broke else "Running",
        "schema": 1,
        "startTime": "2026-01-01T00:00:00Z",
        "conditions": [*conditions, *([condition("Restarting")] if broke else [])],
        "nodes": {"active": 2, "ready": 2, "spare": 0},
        "slots": [{"attempt": 0, "state": "Running", "node": f"n{n}"} for n in range(2)],
        "trained": True,
        "progress": {"step": step, "steps": 100, "updatedAt": "2026-01-01T00:00:09Z", **progress},
        "restarts": {"total": restarts, "counted": restarts, "recent": recent},
    }


class Fleet:
    """Jobs in a leader's cache."""

    def __init__(self) -> None:
        self.accounts = JobAccounts()
        self._known: dict[str, DDPJob] = {}

    def becomes(self, name: str, status: dict[str, Any]) -> None:
        spec = {"image": "image", "nodes": 2, "script": "train.py"}
        meta = {"name": name, "namespace": "team", "uid": name}
        after = DDPJob.read({"metadata": meta, "spec": spec, "status": status})
        self.accounts.changed(self._known.get(name), after)
        self.accounts.acts_on(JobKey("team", name), acts=True)
        self._known[name] = after


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    made = Fleet()
    SERIES.begin(made.accounts)
    operator_metrics.LEADING.inc()
    operator = Operator(Settings(key=b"0123456789abcdef"), None, [], None)  # type: ignore[arg-type]
    queue = SimpleNamespace(depth=lambda: 3, age=lambda: 90.0)
    operator.leaders[0] = SimpleNamespace(queue=queue, report_watch=SimpleNamespace(count=lambda answers: 1))  # type: ignore[assignment]
    operator_metrics.MISSING_FIELDS.set(0)
    yield made
    operator.leaders.clear()
    operator_metrics.MISSING_FIELDS.set(0)
    operator_metrics.LEADING.set(0)
    SERIES.end(made.accounts)


class Prometheus(PrometheusServer):
    """A server that scrapes the operator twice a second and evaluates its alerts, which fire
    without delay.
    """

    def __init__(self, folder: Path, target: int, stop_operator: Callable[[], None]) -> None:
        self.stop_operator = stop_operator
        groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        for rule in rules:
            rule.pop("for", None)
            rule.pop("keep_firing_for", None)
        self.alerts = {rule["alert"] for rule in rules}
        (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": groups}))
        job = {"job_name": "ddpjob-operator", "honor_labels": True}
        static = [{"targets": [f"127.0.0.1:{target}"], "labels": {"pod": "operator-0", "namespace": "ddpjob"}}]
        often = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        scraped = [{**job, "static_configs": static}]
        super().__init__(folder, {"global": often, "rule_files": ["alerts.yaml"], "scrape_configs": scraped})

    def query(self, query: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=query)["result"]
        return found

    def firing(self) -> set[tuple[str, str]]:
        """Return the names of the firing alerts, each with its job's name."""
        alerts = self.ask("alerts")["alerts"]
        return {(a["labels"]["alertname"], a["labels"].get("job_name", "")) for a in alerts if a["state"] == "firing"}

    def wait_for(self, what: str, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 30 * slowness()
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if holds():
                    return
            except OSError:  # the server does not listen yet
                pass
            assert time.monotonic() < deadline, f"{what}: not true in time; firing: {self.firing()}"
            time.sleep(0.2)

    def wait_for_scrapes(self, count: int) -> None:
        """Wait for this many more successful scrapes."""
        self.wait_for("the first scrape", self.scrapes)
        before = self.scrapes()
        self.wait_for(f"{count} scrapes", lambda: self.scrapes() >= before + count)

    def scrapes(self) -> float:
        found = self.query("count_over_time(ddpjob_operator_leader[1h])")
        return float(found[0]["value"][1]) if found else 0.0


@pytest.fixture
def prometheus(tmp_path: Path, fleet: Fleet) -> Iterator[Prometheus]:
    port = free_port()
    server = operator_metrics.serve(port, "127.0.0.1")
    stopped = False

    def stop_operator() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            server.shutdown()
            server.server_close()

    made = Prometheus(tmp_path, port, stop_operator)
    try:
        yield made
    finally:
        made.stop()
        stop_operator()


def play_faults(fleet: Fleet) -> None:
    """Simulate faults of jobs between two scrapes."""
    fleet.becomes("good", running(step=30, restarts=1, broke=True))
    fleet.becomes("good", running(step=30, restarts=1))
    fleet.becomes(
        "good",
        running(step=21, restarts=1, loss=0.5, epoch=2, stepsAtRisk=3, samplesPerSecond=100.0, metrics=copied(60)),
    )
    fleet.becomes("old", running(step=9, samplesPerSecond=100.0, metrics=saved(3 * 3600)))
    slow, pace = running(step=9, samplesPerSecond=10.0), {**condition("RanksKeepPace", "SlowRank"), "status": "False"}
    fleet.becomes("slow", {**slow, "conditions": [*slow["conditions"], pace]})
    large = {**condition("SnapshotsHeld", "NoRoom"), "status": "False"}
    fleet.becomes("large", {**(plain := running()), "conditions": [*plain["conditions"], large]})
    open_to_all = {**condition("Isolated", "PolicyRefused"), "status": "False"}
    fleet.becomes("open", {**(plain := running()), "conditions": [*plain["conditions"], open_to_all]})
    fleet.becomes("stalled", running("StepOverdue"))
    fleet.becomes("deaf", running("CoordinatorUnreachable"))
    fleet.becomes("bad", {"phase": "Failed", "conditions": [condition("Failed", "RestartBudgetSpent")]})
    fleet.becomes("done", {"phase": "Complete", "conditions": [condition("Complete", "Finished")]})
    for name in ("waits", "begins"):
        fleet.becomes(name, {"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"})
    fleet.becomes("begins", running())
    for _ in range(50):
        operator_metrics.RECONCILE_SECONDS.labels("done").observe(0.01)
        operator_metrics.API_REQUESTS.labels("PUT", "200").inc()
    # shown on the dashboard, but too few for an alert
    operator_metrics.API_REQUESTS.labels("PUT", "503").inc()
    operator_metrics.WATCH_ERRORS.labels("pods").inc()


def play_faults_of_the_operator() -> None:
    operator_metrics.LEADING.set(0)
    operator_metrics.MISSING_FIELDS.set(2)
    operator_metrics.LONGEST_TURN.set(5)
    for _ in range(20):
        operator_metrics.RECONCILE_SECONDS.labels("failed").observe(0.01)
        operator_metrics.API_REQUESTS.labels("PUT", "503").inc()
        operator_metrics.WATCH_ERRORS.labels("pods").inc()


def saved(seconds_ago: float) -> dict[str, float]:
    return {"checkpointTime": time.time() - seconds_ago}


def copied(seconds_ago: float) -> dict[str, float]:
    return saved(seconds_ago) | {"copyTime": time.time() - seconds_ago}


def concrete(query: str) -> str:
    """Run a query as Grafana sends it, for the healthy job."""
    # The range is longer than Grafana's. Past events have no series, and on a busy machine the
    # faults would soon be out of range.
    values = {"__rate_interval": "1h", "__range": "1h", "job_name": "good"}
    query = re.sub(r'=~"\$namespace"', '=~".*"', query).replace("$namespace", "team")
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], query)


def has_data(prometheus: Prometheus, query: str) -> bool:
    found = prometheus.query(query)
    return bool(found) and any(sample["value"][1] != "NaN" for sample in found)


@pytest.mark.slow
def test_queries_have_data_and_alerts_fire_for_their_faults(
    prometheus: Prometheus, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "old", "slow", "loop", "stalled", "deaf", "bad", "done", "large", "open"):
        fleet.becomes(name, running(samplesPerSecond=100.0))
    for name in ("waits", "begins"):
        fleet.becomes(name, {})
    operator_metrics.WATCH_ERRORS.labels("pods")
    for labels in (("PUT", "200"), ("PUT", "503")):
        operator_metrics.API_REQUESTS.labels(*labels)
    # The number of scrapes for which DDPJobStraggler fires is nine times the number before the
    # fault. A scrape takes 0.5 s.
    prometheus.wait_for_scrapes(max(4, math.ceil(7 * slowness())))
    assert {name for name, _ in prometheus.firing()} <= {"DDPJobPendingLong", "DDPJobQueueSlow"}

    for restarts in range(1, 9):  # One after the other, because simultaneous ones count as one restart.
        fleet.becomes("loop", running(restarts=restarts))
        prometheus.wait_for_scrapes(2)  # The first scrape may get a page that was rendered before.
    play_faults(fleet)
    expected = {
        ("DDPJobFailed", "bad"),
        ("DDPJobStalled", "stalled"),
        ("DDPJobRestartLoop", "loop"),
        ("DDPJobBudgetNearlySpent", "loop"),
        ("DDPJobCheckpointOld", "old"),
        ("DDPJobWorkAtRisk", "large"),
        ("DDPJobPendingLong", "waits"),
        ("DDPJobStraggler", "slow"),
        ("DDPJobSlowRank", "slow"),
        ("DDPJobCoordinatorUnreachable", "deaf"),
        ("DDPJobNotIsolated", "open"),
        ("DDPJobQueueSlow", ""),
    }
    prometheus.wait_for("the alerts of jobs", lambda: expected <= prometheus.firing())
    assert prometheus.firing() == expected, "and no other alert fires"
    queries = itertools.chain.from_iterable(DASHBOARDS["queries"](board) for board in DASHBOARDS["BOARDS"])
    empty = [query for query in queries if not has_data(prometheus, concrete(query))]
    assert not empty, "\n".join(empty)
    found = prometheus.query('ddpjob_job_phase{job_name="good"}')
    assert [sample["metric"]["namespace"] for sample in found] == ["team"], (
        "the label is the job's namespace, not the target's"
    )

    play_faults_of_the_operator()
    monkeypatch.setattr(job_metrics, "MOST_JOBS", 5)
    wanted = prometheus.alerts - {name for name, _ in expected} - {"DDPJobOperatorDown"}
    prometheus.wait_for("the operator's alerts", lambda: wanted <= {name for name, _ in prometheus.firing()})
    prometheus.stop_operator()
    prometheus.wait_for("no operator", lambda: ("DDPJobOperatorDown", "") in prometheus.firing())
