"""The documentation of metrics, the alerts and the dashboards match the exported metrics. promtool
checks the alerts.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api.job_status import Phase
from ddpjob.api.schema import schema_of
from ddpjob.controller.job_metrics import FAILURES, SERIES
from ddpjob_runtime.coordinator import metrics as coordinator
from ddpjob_runtime.protocol import CoordinatorState, IncidentKind, Report
from ddpjob_trainer.config.sections import ReportConfig
from ddpjob_trainer.reporting.reporter import Machines, _values, _values_of
from ddpjob_trainer.reporting.sinks import prometheus as trainer
from ddpjob_trainer.reporting.sinks.sink import Run
from ddpjob_trainer.reporting.terminal import TrainingStatus
from machine import free_port
from prometheus_client import REGISTRY, generate_latest
from prometheus_programs import prometheus_programs

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "charts" / "ddpjob-operator" / "monitoring"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
METRICS = runpy.run_path(str(ROOT / "docs" / "generate_metrics.py"))
DASHBOARDS = runpy.run_path(str(ROOT / "docs" / "generate_dashboards.py"))
ALERTS: list[dict[str, Any]] = list(METRICS["alerts"]())
BOARDS = DASHBOARDS["BOARDS"]


def promtool(*words: str, given: str = "", folder: Path | None = None) -> None:
    command = [str(prometheus_programs() / "promtool"), *words]
    done = subprocess.run(
        command, input=given, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout


def exported() -> str:
    """Return the operator's response to Prometheus, without the process metrics that the Python
    client adds.
    """
    text = generate_latest(REGISTRY).decode()
    return "".join(line + "\n" for line in text.splitlines() if " python_" not in line and "ddpjob_" in line)


def a_report() -> str:
    progress = {"epoch": 1, "step": 2, "steps": 3, "loss": 0.5, "samplesPerSecond": 9.0, "eta": 60.0}
    own = {"checkpointTime": 1.7e9, "copyTime": 1.7e9, "copyBehind": 0, 'odd "name"\n\\': 1.0}
    report = Report(
        generation=1,
        state=CoordinatorState.RUNNING,
        nodes=2,
        min_nodes=2,
        backoff=(1.0, 2.0),
        world=2,
        progress={**progress, "metrics": own},
    )
    return coordinator.render(report, {IncidentKind.HANG: 2})


# --- the page


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert METRICS["PAGE"].read_text() == METRICS["render"](), "run: python docs/generate_metrics.py"


def test_the_page_lists_all_families_of_a_scrape() -> None:
    documented = {series for family in METRICS["operators"]() for series in family.series}
    scraped = set(re.findall(r"^(ddpjob_\w+)[{ ]", exported(), flags=re.MULTILINE))
    assert scraped and scraped <= documented
    made = {f"{each.name}_total" if each.type == "counter" else each.name for each in SERIES.describe()}
    assert made <= documented, "only the families of single jobs are missing, because there are no jobs"
    own = {family.name for family in METRICS["coordinators"]()} - {"ddpjob_last_recovery_seconds"}
    assert set(re.findall(r"^(ddpjob_\w+){", a_report(), flags=re.MULTILINE)) >= own - {"ddpjob_members"}


def test_the_page_lists_every_family_of_the_trainer(tmp_path: Path) -> None:
    """For every figure that the reporter passes to its sinks, the page has the labels that a scrape
    finds.
    """
    machines = Machines([1.0, 2.0], [1.0, 2.0], [0.1, 0.1], [1.0, 1.0], {"data": 0.1, "forward": 0.2})
    status = TrainingStatus(1, 2, 3, 4, 0.5, 0.1, 100.0, 60.0, 0.1, mfu=0.4, phases=machines.phases)
    given = {name: value or 0.0 for name, value in (_values(status) | _values_of(machines)).items()}
    sink = trainer.Prometheus(ReportConfig(prometheus_port=free_port()), Run(tmp_path, "run", {}, 0, 0))
    try:
        sink.write(3, {**dict.fromkeys(trainer._METRICS, 1.0), **given})
        families = [(family.samples[0].name, set(family.samples[0].labels)) for family in sink.collect()]
    finally:
        sink.close(complete=True)
    documented = {family.name: set(family.labels) for family in METRICS["trainers"]()}
    assert dict(families) == documented
    assert documented["ddpjob_train_rank_step_seconds"] == {*trainer.LABELS, "rank"}
    assert documented["ddpjob_train_phase_seconds"] == {*trainer.LABELS, "phase"}


def test_metric_names_follow_the_conventions_of_prometheus() -> None:
    promtool("check", "metrics", given=exported())
    promtool("check", "metrics", given=a_report())


def test_a_metric_name_has_the_same_meaning_everywhere() -> None:
    """Programs that export the same metric use the same name, type and job labels. The help may
    differ.
    """
    families = [f for source in ("operators", "coordinators", "trainers") for f in METRICS[source]()]
    kinds: dict[str, set[str]] = {}
    for family in families:
        kinds.setdefault(family.name, set()).add(family.kind)
        if family.name.startswith(("ddpjob_train_", "ddpjob_job_")):
            assert family.labels[:2] == ("namespace", "job_name"), family
    assert all(len(kind) == 1 for kind in kinds.values()), kinds


def test_the_podmonitor_drops_only_metrics_of_the_operator() -> None:
    template = (MONITORING.parent / "templates" / "metrics.yaml").read_text()
    (dropped,) = re.findall(r"regex: (ddpjob_\(.*\))", template)
    theirs = {f.name for source in ("coordinators", "trainers") for f in METRICS[source]()}
    assert not {name for name in theirs if re.fullmatch(dropped, name)}
    mine = {name for family in METRICS["operators"]() for name in family.series} - theirs
    assert {name for name in mine if not re.fullmatch(dropped, name)} == set()


def test_the_page_lists_the_reasons_of_failures() -> None:
    section = TROUBLESHOOTING.read_text().partition("## Condition Failed\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    assert {word for cell in cells for word in re.findall(r"`(\w+)`", cell)} == FAILURES


# --- alerts


def test_promtool_accepts_the_alerts_and_their_test_cases_pass(tmp_path: Path) -> None:
    promtool("check", "rules", str(MONITORING / "alerts.yaml"))
    shutil.copy(MONITORING / "alerts.yaml", tmp_path)
    shutil.copy(Path(__file__).parent / "alerts_test.yaml", tmp_path)
    promtool("test", "rules", "alerts_test.yaml", folder=tmp_path)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_meaning_a_runbook_and_cases(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    texts = rule["annotations"]
    assert texts["summary"] and texts["description"].endswith(".")
    page, _, anchor = texts["runbook_url"].partition("#")
    values = yaml.safe_load((MONITORING.parent / "values.yaml").read_text())
    assert page == values["metrics"]["rules"]["runbooks"] and anchor == rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in TROUBLESHOOTING.read_text()
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
    own = [c for case in cases for c in case["alert_rule_test"] if c["alertname"] == rule["alert"]]
    assert any(case["exp_alerts"] for case in own), "add a case in which the alert fires"
    if rule["alert"] != "DDPJobDefinitionOutdated":
        assert any(not case["exp_alerts"] for case in own), "add a case in which the alert does not fire"


def names(query: str) -> set[str]:
    return set(re.findall(r"\bddpjob_\w+", query))


QUERIES = {rule["alert"]: rule["expr"] for rule in ALERTS} | {
    f"{board.name}-{number}": query for board in BOARDS for number, query in enumerate(DASHBOARDS["queries"](board))
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES.keys())
def test_queries_of_alerts_and_dashboards_use_existing_metrics_and_labels(query: str) -> None:
    known = {series: family for family in METRICS["operators"]() for series in family.series}
    assert names(query) and names(query) <= known.keys()
    for name, labels in re.findall(r"(ddpjob_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)=", labels)) <= {*known[name].labels}, name


# --- dashboards


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_dashboard_equals_the_output_of_its_generator(board: Any) -> None:
    text = (MONITORING / "dashboards" / f"{board.name}.json").read_text()
    assert text == DASHBOARDS["render"](board), "run: python docs/generate_dashboards.py"
    made = json.loads(text)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in made["panels"]]
    assert len(set(places)) == len(places) and all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in made["panels"])
    assert all(target["expr"] for panel in made["panels"] for target in panel["targets"])
    used = set(re.findall(r"\$(\w+)", " ".join(DASHBOARDS["queries"](board))))
    given = {variable["name"] for variable in made["templating"]["list"]}
    assert used - {"__rate_interval", "__range"} <= given
    assert {path.stem for path in (MONITORING / "dashboards").glob("*.json")} == {b.name for b in BOARDS}


def test_links_in_notifications_select_the_job_on_its_dashboard() -> None:
    made = json.loads((MONITORING / "dashboards" / "job.json").read_text())
    chosen = {variable["name"] for variable in made["templating"]["list"]} - {"datasource"}
    chart = MONITORING.parent
    for page in (chart / "values.yaml", chart / "README.md", ROOT / "docs" / "notifications.md"):
        (query,) = re.findall(rf"/d/{made['uid']}\?([^\s\"]+)", page.read_text())
        assert set(re.findall(r"var-(\w+)=", query)) == chosen, page


# --- kube-state-metrics

_LABELS = {"commonLabels": dict, "labelsFromPath": dict}
_RESOURCE = _LABELS | {"metricNamePrefix": str, "groupVersionKind": dict, "metrics": list, "errorLogV": int}
_KINDS = {
    "Gauge": {"path": list, "labelsFromPath": dict, "valueFrom": list, "nilIsZero": bool},
    "StateSet": {"path": list, "labelsFromPath": dict, "valueFrom": list, "list": list, "labelName": str},
}
"""Fields and types of kube-state-metrics' `customresourcestate.Resource` that the configuration
uses.
"""


def test_the_configuration_of_kube_state_metrics_fits_its_types_and_the_definition() -> None:
    (resource,) = yaml.safe_load((MONITORING / "kube-state-metrics.yaml").read_text())["spec"]["resources"]
    assert resource["groupVersionKind"] == {"group": "ddpjob.io", "version": "v1alpha1", "kind": "DDPJob"}
    _typed(resource, _RESOURCE)
    assert resource["labelsFromPath"].keys() == {"namespace", "job_name"}
    named = [metric["name"] for metric in resource["metrics"]]
    assert len(set(named)) == len(named)
    for metric in resource["metrics"]:
        _typed(metric, _LABELS | {"name": str, "help": str, "each": dict})
        kind = metric["each"]["type"]
        own = metric["each"]["gauge" if kind == "Gauge" else "stateSet"]
        _typed(own, _KINDS[kind])
        found = _at(own["path"])
        for path in (*own.get("labelsFromPath", {}).values(), own.get("valueFrom", [])):
            _at(path, found)
        if kind == "StateSet":
            assert own["list"] == list(Phase)


def _typed(given: dict[str, Any], types: dict[str, type]) -> None:
    assert given.keys() <= types.keys(), given.keys() - types.keys()
    assert all(isinstance(value, types[name]) for name, value in given.items())


def _at(path: list[str], schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of a field of a DDPJob, or of a field below `schema`. For an array, return
    the schema of its items.
    """
    found = schema if schema is not None else {"properties": {"spec": schema_of("spec"), "status": schema_of("status")}}
    for name in path:
        found = found["properties"][name]
        found = found.get("items", found)
    return dict(found)
