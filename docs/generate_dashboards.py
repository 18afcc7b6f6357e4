"""Writes the Grafana dashboards of the chart: `python docs/generate_dashboards.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "charts" / "ddpjob-operator" / "monitoring" / "dashboards"
Json = dict[str, Any]
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_FLEET = 'namespace=~"$namespace"'
_JOB = 'namespace="$namespace", job_name="$job_name"'
_WIDTH = 24
_NOT_SHOWN = ("Time", "__name__", "container", "endpoint", "instance", "job", "pod", "service", "prometheus")
"""Columns of a table: labels of the scrape, which say nothing of the job."""


@dataclass(frozen=True)
class Panel:
    """One panel: its queries, each with the legend of its series, in a table the name of its column."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    text: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    name: str
    title: str
    panels: tuple[Panel, ...]
    variables: dict[str, str] = field(default_factory=dict)
    """By name: the query of its values."""
    several: bool = True
    """Whether a variable may have several values, and has all at first."""
    annotations: dict[str, str] = field(default_factory=dict)
    """By name: the query that is above 0 at the moments to mark."""


def quantiles(histogram: str) -> dict[str, str]:
    """The median and the 90th percentile of a histogram over the range shown."""
    rate = f"sum by (le) (increase({histogram}_bucket[$__range]))"
    return {name: f"histogram_quantile({share}, {rate})" for name, share in (("median", 0.5), ("90 %", 0.9))}


def of_job(metric: str) -> str:
    """A figure of the job shown; operator, coordinator and trainer may all export it."""
    return f"max({metric}{{{_JOB}}})"


_OPERATOR = Dashboard(
    "operator",
    "DDPJob / Operator",
    (
        Panel(
            "Shards for which a replica acts",
            {"acts": "sum(ddpjob_operator_leader)", "of": "max(ddpjob_operator_shards)"},
            kind="stat",
            width=4,
        ),
        Panel("Jobs", {"jobs": "sum(ddpjob_jobs)"}, kind="stat", width=4),
        Panel(
            "Coordinators out of reach",
            {"coordinators": 'sum(ddpjob_operator_coordinators{state="unreachable"})'},
            kind="stat",
            width=4,
        ),
        Panel("Fields that the CRD lacks", {"fields": "max(ddpjob_operator_crd_missing_fields)"}, kind="stat", width=4),
        Panel(
            "Versions",
            {"{{version}}, Python {{python_version}}": "sum by (version, python_version) (ddpjob_operator_build_info)"},
            kind="stat",
            width=8,
            text="Replicas by version: two of them for longer than an upgrade takes is a rollout that hangs.",
        ),
        Panel(
            "Reconciles",
            {
                "{{result}}": "sum by (result) "
                "(rate(ddpjob_operator_reconcile_duration_seconds_count[$__rate_interval]))"
            },
            "ops",
            stacked=True,
        ),
        Panel(
            "Duration of a reconcile",
            {
                name: f"histogram_quantile({share}, sum by (le) "
                "(rate(ddpjob_operator_reconcile_duration_seconds_bucket[$__rate_interval])))"
                for name, share in (("median", 0.5), ("99 %", 0.99))
            },
            "s",
        ),
        Panel("Jobs that wait", {"{{pod}}": "ddpjob_operator_queue_depth"}),
        Panel("Wait of the first", {"{{pod}}": "ddpjob_operator_queue_age_seconds"}, "s"),
        Panel(
            "Requests to the API server",
            {"{{verb}} {{code}}": "sum by (verb, code) (rate(ddpjob_operator_api_requests_total[$__rate_interval]))"},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Watches that failed",
            {"{{resource}}": "sum by (resource) (increase(ddpjob_operator_watch_errors_total[$__rate_interval]))"},
        ),
        Panel("Leader", {"{{pod}}": "ddpjob_operator_leader"}),
        Panel("Coordinators", {"{{state}}": "sum by (state) (ddpjob_operator_coordinators)"}, stacked=True),
    ),
)

_GOODPUT = (
    "sum{by}(rate(ddpjob_job_training_seconds_total{{{of}}}[{over}])) / "
    "(sum{by}(rate(ddpjob_job_pod_seconds_total{{{of}}}[{over}])) > 0)"
)
_FLEET_BOARD = Dashboard(
    "fleet",
    "DDPJob / Fleet",
    (
        Panel("Jobs by phase", {"{{phase}}": "sum by (phase) (ddpjob_jobs)"}, stacked=True),
        Panel(
            "Goodput",
            {"goodput": _GOODPUT.format(by=" ", of=_FLEET, over="$__rate_interval")},
            "percentunit",
            text="Training seconds / pod seconds: what is missing went into starts, restarts, stalls and spares.",
        ),
        Panel(
            "Jobs begun and ended",
            {
                "begun": "sum(increase(ddpjob_jobs_created_total[$__rate_interval]))",
                "complete": "sum(increase(ddpjob_jobs_completed_total[$__rate_interval]))",
                "failed: {{reason}}": "sum by (reason) (increase(ddpjob_jobs_failed_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Restarts by cause",
            {
                "{{reason}}, counted: {{counted}}": "sum by (reason, counted)"
                " (increase(ddpjob_restarts_total[$__rate_interval]))"
            },
            stacked=True,
        ),
        Panel("Start until all pods are placed", quantiles("ddpjob_time_to_pods_seconds"), "s", "stat", 6),
        Panel("Start until the group runs", quantiles("ddpjob_time_to_running_seconds"), "s", "stat", 6),
        Panel("Start until the first step", quantiles("ddpjob_time_to_first_step_seconds"), "s", "stat", 6),
        Panel("Steps lost by a break", quantiles("ddpjob_lost_steps"), kind="stat", width=6),
        Panel(
            "Recovery by cause, median",
            {
                "{{reason}}": "histogram_quantile(0.5, sum by (le, reason)"
                " (increase(ddpjob_recovery_seconds_bucket[$__range])))"
            },
            "s",
            "bargauge",
        ),
        Panel("Nodes that train", {"nodes": f"sum(ddpjob_job_nodes_training{{{_FLEET}}})"}),
        Panel(
            "Jobs that need somebody",
            {
                "stalled": f"ddpjob_job_stalled{{{_FLEET}}} > 0",
                "failed": f"ddpjob_job_failed{{{_FLEET}}} > 0",
                "waits": f'ddpjob_job_phase{{{_FLEET}, phase=~"Pending|Starting"}} > 0',
                "coordinator out of reach": f"ddpjob_job_coordinator_unreachable{{{_FLEET}}} > 0",
            },
            kind="table",
            width=_WIDTH,
        ),
        Panel(
            "Goodput of single jobs",
            {"goodput": "sort(" + _GOODPUT.format(by=" by (namespace, job_name) ", of=_FLEET, over="$__range") + ")"},
            "percentunit",
            "table",
            _WIDTH,
        ),
    ),
    variables={"namespace": "label_values(ddpjob_job_phase, namespace)"},
)

_JOB_BOARD = Dashboard(
    "job",
    "DDPJob / One job",
    (
        Panel("Phase", {"{{phase}}": f"max by (phase) (ddpjob_job_phase{{{_JOB}}})"}, kind="stat", width=4),
        Panel("Restarts", {"restarts": of_job("ddpjob_job_restarts_total")}, kind="stat", width=4),
        Panel(
            "Budget spent",
            {"spent": f"{of_job('ddpjob_job_budget_spent_restarts')} / ({of_job('ddpjob_job_budget_restarts')} > 0)"},
            "percentunit",
            "stat",
            4,
        ),
        Panel(
            "Progress",
            {"done": f"{of_job('ddpjob_train_step')} / {of_job('ddpjob_train_planned_steps')}"},
            "percentunit",
            "stat",
            4,
        ),
        Panel(
            "Goodput",
            {"goodput": _GOODPUT.format(by=" ", of=_JOB, over="$__range")},
            "percentunit",
            "stat",
            4,
            text="Training seconds / pod seconds over the range shown.",
        ),
        Panel(
            "Age of the newest checkpoint",
            {"age": f"time() - {of_job('ddpjob_train_checkpoint_timestamp_seconds')}"},
            "s",
            "stat",
            4,
        ),
        Panel("Loss", {"loss": of_job("ddpjob_train_loss")}),
        Panel("Speed", {"samples/s": of_job("ddpjob_train_samples_per_second")}),
        Panel("Step", {"step": of_job("ddpjob_train_step")}, text="Falls back to the checkpoint's after a break."),
        Panel("Epoch", {"epoch": of_job("ddpjob_train_epoch")}),
        Panel(
            "Nodes",
            {
                "train": of_job("ddpjob_job_nodes_training"),
                "wanted": of_job("ddpjob_job_nodes_wanted"),
            },
        ),
        Panel(
            "What pods did",
            {
                "train": f"sum(rate(ddpjob_job_training_seconds_total{{{_JOB}}}[$__rate_interval]))",
                "exist": f"sum(rate(ddpjob_job_pod_seconds_total{{{_JOB}}}[$__rate_interval]))",
            },
            text="Pods on average: the space between the lines is lost to starts, restarts, stalls and spares.",
        ),
        Panel("Stalled", {"stalled": of_job("ddpjob_job_stalled")}),
        Panel("Coordinator out of reach", {"unreachable": of_job("ddpjob_job_coordinator_unreachable")}),
    ),
    variables={
        "namespace": "label_values(ddpjob_job_phase, namespace)",
        "job_name": 'label_values(ddpjob_job_phase{namespace="$namespace"}, job_name)',
    },
    several=False,
    annotations={"Restarts": f"max(changes(ddpjob_job_restarts_total{{{_JOB}}}[$__rate_interval])) > 0"},
)
BOARDS = (_OPERATOR, _FLEET_BOARD, _JOB_BOARD)


def queries(board: Dashboard) -> list[str]:
    """Every PromQL expression of a dashboard, those of its annotations as well."""
    return [q for panel in board.panels for q in panel.queries.values()] + list(board.annotations.values())


def render(board: Dashboard) -> str:
    """The dashboard as Grafana imports it."""
    panels, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(board.panels, start=1):
        if x + panel.width > _WIDTH:
            x, y = 0, y + height
        height = 4 if panel.kind == "stat" else 8
        panels.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": height}))
        x += panel.width
    made = {
        "uid": f"ddpjob-{board.name}",
        "title": board.title,
        "tags": ["ddpjob"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(board, name) for name in board.variables)]},
        "annotations": {
            "list": [
                {
                    "name": name,
                    "datasource": _SOURCE,
                    "enable": True,
                    "expr": query,
                    "iconColor": "red",
                    "titleFormat": name,
                }
                for name, query in board.annotations.items()
            ]
        },
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


def _panel(number: int, panel: Panel, place: Json) -> Json:
    instant = panel.kind in ("table", "stat", "bargauge")
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend,
            **({"instant": True, "range": False} if instant else {}),
            **({"format": "table"} if panel.kind == "table" else {}),
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 20} if panel.stacked else {}
    made: Json = {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"textMode": "value_and_name"} if panel.kind == "stat" else {},
    }
    if panel.title == "Loss":
        del made["fieldConfig"]["defaults"]["min"]
    if panel.kind == "table":
        many = len(targets) > 1
        names = {f"Value #{t['refId']}" if many else "Value": t["legendFormat"] for t in targets}
        tidy = {"renameByName": names, "excludeByName": dict.fromkeys(_NOT_SHOWN, True)}
        made["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": tidy}]
    return made | ({"description": panel.text} if panel.text else {})


def _datasource() -> Json:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(board: Dashboard, name: str) -> Json:
    many: Json = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": board.variables[name], "refId": name},
        "refresh": 2,
        "sort": 1,
        **(many if board.several else {}),
    }


def main() -> None:
    """Overwrite the files."""
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(render(board))


if __name__ == "__main__":
    main()
