"""Writes docs/metrics.md from the exported metrics and the alerts: `python
docs/generate_metrics.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ddpjob.controller import job_metrics, operator_metrics
from ddpjob_runtime.coordinator import metrics as coordinator
from ddpjob_trainer.reporting.sinks import prometheus as trainer
from prometheus_client.metrics import MetricWrapperBase

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "metrics.md"
CASES = DOCS.parent / "tests" / "unit" / "monitoring" / "alerts_test.yaml"
ALERTS = DOCS.parent / "charts" / "ddpjob-operator" / "monitoring" / "alerts.yaml"

_HEAD = """\
# Metrics and alerts

Generated from the code by `python docs/generate_metrics.py`. Do not edit this page.
[Monitoring](monitoring.md) explains how to scrape these metrics, and has dashboards and alerts.

Every series about a job has the labels `namespace` and `job_name`. The operator, the coordinator
and the trainer may all export a metric under the same name. To get one value for each job, use
`max by (namespace, job_name) (...)`.
"""
_OPERATOR = """\
## The operator

Each replica of the operator serves these metrics on `metrics.port` (9090). A job's events are
counted only by the replica that acts for the job. When a replica restarts, its counters start at 0.
To count events across replicas and restarts, sum `rate` or `increase` over the replicas.

At most {most} jobs have their own series. The series of a deleted job disappear. Replicas also
export the standard metrics of a Python process, `process_...` and `python_...`.
"""
_COORDINATOR = """\
## The coordinators

Each job's coordinator serves these metrics on the port `rendezvous.port` + 1 (by default 29401).
In the pod, the port is named `coordinator`.
"""
_TRAINER = """\
## The built-in trainer

If `report.prometheus_port` is set, rank 0 serves these metrics on that port.
"""
_ALERTS = """\
## Alerts

`charts/ddpjob-operator/monitoring/alerts.yaml` defines these alerts.
[Troubleshooting](troubleshooting.md#alerts) explains what to do about each of them. The last column
names a case in `tests/unit/monitoring/alerts_test.yaml` in which the alert fires. Most alerts have
also been triggered by faults in real pods ([monitoring](monitoring.md#alerts)).
"""


@dataclass(frozen=True)
class Family:
    name: str
    """The name as in a query, without the suffixes of a histogram."""
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names under which a query finds the metric."""
        ends = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(f"{self.name}{end}" for end in ends)


def operators() -> list[Family]:
    """Return the operator's metrics, which are registered when its modules are imported."""
    own = [m for module in (operator_metrics, job_metrics) for m in vars(module).values()]
    families = [_family(m) for m in own if isinstance(m, MetricWrapperBase)]
    for made in job_metrics.SERIES.describe():
        families.append(_described(made.name, made.type, made._labelnames, made.documentation))
    return sorted(families, key=lambda f: f.name)


def _family(metric: MetricWrapperBase) -> Family:
    return _described(metric._name, metric._type, metric._labelnames, metric._documentation)


def _described(name: str, kind: str, labels: tuple[str, ...], text: str) -> Family:
    return Family(f"{name}_total" if kind == "counter" else name, kind, tuple(labels), text)


def coordinators() -> list[Family]:
    """Return a coordinator's metrics."""
    own = job_metrics.JOB_LABELS
    return [
        Family(
            name,
            coordinator.kind_of(name),
            (*own, coordinator.LABELS[name]) if name in coordinator.LABELS else own,
            text,
        )
        for name, text in coordinator.FAMILIES.items()
    ]


def trainers() -> list[Family]:
    """Return the built-in trainer's metrics."""
    single = [
        _described(name, "counter" if own in trainer._COUNTERS else "gauge", trainer.LABELS, text.rstrip("."))
        for own, (name, text) in trainer._METRICS.items()
    ]
    return single + [
        Family(name, "gauge", (*trainer.LABELS, label), text.rstrip("."))
        for name, label, text in trainer._BY_LABEL.values()
    ]


def alerts() -> Iterator[dict[str, Any]]:
    """Yield the alert rules of all groups."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def case_of(alert: str) -> str:
    """Return the name of the first test case in which the alert fires."""
    cases = yaml.safe_load(CASES.read_text())["tests"]
    return next(
        str(case["name"])
        for case in cases
        if any(check["alertname"] == alert and check["exp_alerts"] for check in case["alert_rule_test"])
    )


def render() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for head, families in (
        (_OPERATOR.format(most=f"{job_metrics.MOST_JOBS:,}"), operators()),
        (_COORDINATOR, coordinators()),
        (_TRAINER, trainers()),
    ):
        rows = ["| metric | type | labels | unit | meaning |", "| --- | --- | --- | --- | --- |"]
        rows += [
            f"| `{f.name}` | {f.kind} | {', '.join(f'`{label}`' for label in f.labels)} | {unit(f.name)} |"
            f" {cell(f.text)} |"
            for f in families
        ]
        parts.append(head + "\n" + "\n".join(rows) + "\n")
    rows = ["| alert | severity | after | when | case |", "| --- | --- | --- | --- | --- |"]
    for rule in alerts():
        name, severity = rule["alert"], rule["labels"]["severity"]
        link = f"[{name}](troubleshooting.md#{name.lower()})"
        when, case = rule["annotations"]["summary"], cell(case_of(name))
        rows.append(f"| {link} | {severity} | {rule.get('for', 'immediately')} | {when} | {case} |")
    return "\n".join([*parts, _ALERTS + "\n" + "\n".join(rows) + "\n"])


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


def unit(name: str) -> str:
    """Return a metric's base unit, derived from the end of its name."""
    name = name.removesuffix("_total")
    if name.endswith("_timestamp_seconds"):
        return "Unix seconds"
    found = re.search(r"_(seconds|ratio|steps?|nodes|restarts)$", name)
    if name.endswith("_per_second"):
        return "1/s"
    return {"ratio": "0 to 1", "step": "steps"}.get(found[1], found[1]) if found else ""


if __name__ == "__main__":
    PAGE.write_text(render())
