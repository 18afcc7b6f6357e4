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
_REQUESTS = "ddpjob_operator_api_requests_total"
_NOT_SERVED = '"429|5..|none"'
"""Codes of requests that failed, as in the alert DDPJobApiErrors."""
_NOT_SHOWN = ("Time", "__name__", "container", "endpoint", "instance", "job", "pod", "service", "prometheus")
"""Table columns to hide: labels added by the scrape, which say nothing about the job."""


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` maps the legend of each series (in a table, the name of the column) to
    its query.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    text: str = ""
    stacked: bool = False
    look: str = "line"
    """`bars` shows events, with one bar per minute. `steps` shows values that change abruptly,
    without interpolation.
    """
    whole: bool = False
    """Whether the values are whole numbers."""
    red_from: float | None = None
    """Values of a stat or gauge from here on are red. Without thresholds, Grafana colours 80 and
    above red.
    """
    shows: str = "value_and_name"
    """What a stat shows: Grafana's `textMode`."""


@dataclass(frozen=True)
class Dashboard:
    name: str
    title: str
    panels: tuple[Panel, ...]
    variables: dict[str, str] = field(default_factory=dict)
    """The query for each variable's values, by name."""
    several: bool = True
    """Whether several values of a variable can be selected. If so, all are selected at first."""
    annotations: dict[str, str] = field(default_factory=dict)
    """A query for each annotation, by name. Times at which it is above 0 are marked."""


def quantiles(histogram: str) -> dict[str, str]:
    """Return queries for the median and the 90th percentile of a histogram over the displayed
    range.
    """
    rate = f"sum by (le) (increase({histogram}_bucket[$__range]))"
    return {name: f"histogram_quantile({share}, {rate})" for name, share in (("median", 0.5), ("90 %", 0.9))}


def events(counter: str, by: str = "") -> str:
    """Return a query for the number of events, by labels.

    Events that did not happen have no series, so the legend lists only those that did.
    """
    return f"sum{f' by ({by}) ' if by else ''}(increase({counter}[$__rate_interval])) > 0"


def of_job(metric: str) -> str:
    """Return a query for a metric of the displayed job.

    It takes the maximum, because the operator, the coordinator and the trainer may all export it.
    """
    return f"max({metric}{{{_JOB}}})"


_OPERATOR = Dashboard(
    "operator",
    "DDPJob / Operator",
    (
        Panel(
            "Shards",
            {"acted for": "sum(ddpjob_operator_leader)", "of": "max(ddpjob_operator_shards)"},
            kind="stat",
            width=4,
            text="Shards for which a replica acts, out of all shards.",
        ),
        Panel("Jobs", {"jobs": "sum(ddpjob_jobs)"}, kind="stat", width=4),
        Panel(
            "Unreachable coordinators",
            {"coordinators": 'sum(ddpjob_operator_coordinators{state="unreachable"})'},
            kind="stat",
            width=4,
            red_from=1,
        ),
        Panel(
            "Fields that the CRD lacks",
            {"fields": "max(ddpjob_operator_crd_missing_fields)"},
            kind="stat",
            width=4,
            red_from=1,
        ),
        Panel(
            "Versions",
            {"{{version}}, Python {{python_version}}": "sum by (version, python_version) (ddpjob_operator_build_info)"},
            kind="stat",
            width=8,
            text="Replicas by version. If two versions run for longer than an upgrade takes, the rollout hangs.",
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
        Panel("Jobs that wait", {"{{pod}}": "ddpjob_operator_queue_depth"}, whole=True),
        Panel("Longest wait", {"{{pod}}": "ddpjob_operator_queue_age_seconds"}, "s"),
        Panel("Longest turn of the loop", {"{{pod}}": "ddpjob_operator_longest_loop_turn_seconds"}, "s"),
        Panel(
            "Requests to the API server",
            {
                "{{verb}}": f"sum by (verb) (rate({_REQUESTS}{{code!~{_NOT_SERVED}}}[$__rate_interval]))",
                "not served: {{code}}": "sum by (code) "
                f"(rate({_REQUESTS}{{code=~{_NOT_SERVED}}}[$__rate_interval])) > 0",
            },
            "reqps",
            stacked=True,
        ),
        Panel(
            "Failed watches",
            {"{{resource}}": events("ddpjob_operator_watch_errors_total", "resource")},
            stacked=True,
            look="bars",
        ),
        Panel("Shards by replica", {"{{pod}}": "ddpjob_operator_leader"}, look="steps", whole=True),
        Panel("Coordinators", {"{{state}}": "sum by (state) (ddpjob_operator_coordinators)"}, stacked=True, whole=True),
    ),
)

_GOODPUT = (  # Extrapolated rates of new counters may give slightly more than 1.
    "clamp_max(sum{by}(rate(ddpjob_job_useful_seconds_total{{{of}}}[{over}])) / "
    "(sum{by}(rate(ddpjob_job_pod_seconds_total{{{of}}}[{over}])) > 0), 1)"
)
_FLEET_BOARD = Dashboard(
    "fleet",
    "DDPJob / Fleet",
    (
        Panel("Jobs by phase", {"{{phase}}": "sum by (phase) (ddpjob_jobs)"}, stacked=True, whole=True),
        Panel(
            "Goodput",
            {"goodput": _GOODPUT.format(by=" ", of=_FLEET, over="$__rate_interval")},
            "percentunit",
            text="The share of pod time in which new steps were taken. The rest went into starts, restarts, repeated "
            "steps, stalls and spares.",
        ),
        Panel(
            "Jobs started and finished",
            {
                "begun": events("ddpjob_jobs_created_total"),
                "complete": events("ddpjob_jobs_completed_total"),
                "failed: {{reason}}": events("ddpjob_jobs_failed_total", "reason"),
            },
            stacked=True,
            look="bars",
        ),
        Panel(
            "Restarts by cause",
            {"{{reason}}, counted: {{counted}}": events("ddpjob_restarts_total", "reason, counted")},
            stacked=True,
            look="bars",
        ),
        Panel("Start until all pods are placed", quantiles("ddpjob_time_to_pods_seconds"), "s", "stat", 6),
        Panel("Start until the group runs", quantiles("ddpjob_time_to_running_seconds"), "s", "stat", 6),
        Panel("Start until the first step", quantiles("ddpjob_time_to_first_step_seconds"), "s", "stat", 6),
        Panel("Steps lost per break", quantiles("ddpjob_lost_steps"), kind="stat", width=6),
        Panel(
            "Recovery by cause, median",
            {
                "{{reason}}": "histogram_quantile(0.5, sum by (le, reason)"
                " (increase(ddpjob_recovery_seconds_bucket[$__range]))) > 0"
            },
            "s",
            "bargauge",
        ),
        Panel("Nodes that train", {"nodes": f"sum(ddpjob_job_nodes_training{{{_FLEET}}})"}, whole=True),
        Panel(
            "Jobs that need attention",
            {
                "stalled": f"ddpjob_job_stalled{{{_FLEET}}} > 0",
                "failed": f"ddpjob_job_failed{{{_FLEET}}} > 0",
                "waits": f'ddpjob_job_phase{{{_FLEET}, phase=~"Pending|Starting|Restarting"}} > 0'
                f" or ddpjob_job_queue_not_served{{{_FLEET}}} > 0",
                "coordinator unreachable": f"ddpjob_job_coordinator_unreachable{{{_FLEET}}} > 0",
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
        Panel(
            "Phase", {"{{phase}}": f"max by (phase) (ddpjob_job_phase{{{_JOB}}})"}, kind="stat", width=4, shows="name"
        ),
        Panel("Restarts", {"restarts": of_job("ddpjob_job_restarts_total")}, kind="stat", width=4),
        Panel(
            "Budget spent",
            {"spent": f"{of_job('ddpjob_job_budget_spent_restarts')} / ({of_job('ddpjob_job_budget_restarts')} > 0)"},
            "percentunit",
            "stat",
            4,
            red_from=0.8,
        ),
        Panel(
            "Progress",
            {"done": f"{of_job('ddpjob_train_step')} / ({of_job('ddpjob_train_planned_steps')} > 0)"},
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
            text="The share of pod time in which new steps were taken, over the range shown.",
        ),
        Panel(
            "Newest checkpoint",
            {
                "on disk": f"time() - {of_job('ddpjob_train_checkpoint_timestamp_seconds')}",
                "in the bucket": f"time() - {of_job('ddpjob_train_copy_timestamp_seconds')}",
            },
            "s",
            "stat",
            4,
            text="Age of the newest checkpoint. With a bucket, only a copy there outlives the pods.",
        ),
        Panel("Loss", {"loss": of_job("ddpjob_train_loss")}),
        Panel("Speed", {"samples/s": of_job("ddpjob_train_samples_per_second")}),
        Panel("Step", {"step": of_job("ddpjob_train_step")}, text="Falls back to the checkpoint's step after a break."),
        Panel("Epoch", {"epoch": of_job("ddpjob_train_epoch")}),
        Panel(
            "Nodes",
            {
                "wanted": of_job("ddpjob_job_nodes_wanted"),
                "train": of_job("ddpjob_job_nodes_training"),  # Drawn over the line before it.
            },
            look="steps",
            whole=True,
        ),
        Panel(
            "What pods did",
            {
                "make new steps": f"sum(rate(ddpjob_job_useful_seconds_total{{{_JOB}}}[$__rate_interval]))",
                "exist": f"sum(rate(ddpjob_job_pod_seconds_total{{{_JOB}}}[$__rate_interval]))",
            },
            text="Average numbers of pods. The space between the lines is lost to starts, restarts, repeated steps, "
            "stalls and spares.",
        ),
        Panel(
            "Repeated work",
            {
                "steps": of_job("ddpjob_job_repeated_steps_total"),
                "restarts of unknown cost": of_job("ddpjob_job_unknown_repeats_total"),
            },
            look="steps",
            whole=True,
        ),
        Panel(
            "Steps at risk",
            {"steps": of_job("ddpjob_job_steps_at_risk")},
            text="Maximum number of complete steps that a loss would repeat.",
            look="steps",
            whole=True,
        ),
        Panel(
            "Stalled, or coordinator unreachable",
            {
                "stalled": of_job("ddpjob_job_stalled"),
                "coordinator unreachable": of_job("ddpjob_job_coordinator_unreachable"),
            },
            width=_WIDTH,
            look="steps",
            whole=True,
        ),
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
    """Return every PromQL expression of a dashboard, including those of its annotations."""
    return [q for panel in board.panels for q in panel.queries.values()] + list(board.annotations.values())


def render(board: Dashboard) -> str:
    """Return the dashboard in the form that Grafana imports."""
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
    custom: Json = {"stacking": {"mode": "normal"}, "fillOpacity": 70, "lineWidth": 0} if panel.stacked else {}
    custom |= {
        "line": {},
        "bars": {"drawStyle": "bars"},
        "steps": {"lineInterpolation": "stepAfter"},
    }[panel.look]
    made: Json = {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"textMode": panel.shows} if panel.kind == "stat" else {},
    }
    if panel.whole:
        made["fieldConfig"]["defaults"]["decimals"] = 0
    if panel.look == "bars":
        made["interval"] = "1m"  # With less, $__rate_interval is longer than a bar, so bars would share events.
    if panel.kind in ("stat", "bargauge"):
        red = [] if panel.red_from is None else [{"color": "red", "value": panel.red_from}]
        steps = [{"color": "green" if red else "blue", "value": None}, *red]
        made["fieldConfig"]["defaults"]["thresholds"] = {"mode": "absolute", "steps": steps}
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
    """Write the dashboards' files."""
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(render(board))


if __name__ == "__main__":
    main()
