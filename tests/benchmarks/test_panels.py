"""The data for charts of the dashboards: Grafana's queries, legends, tables and units."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from benchmarks.panels.board import Range, Series, answered, filled, legend, regions, rows, step_of, worded
from benchmarks.panels.scene import ACTS, LAST, MONITORING

SHOWN = Range(start=1003.0, end=1061.0, scrape=15)


def test_a_query_is_sent_in_the_form_that_grafana_uses() -> None:
    variables = [{"name": "namespace", "allValue": ".+"}, {"name": "job"}]
    expression = 'rate(x{namespace=~"$namespace", job="${job}"}[$__rate_interval]) + y[$__range]'
    asked = filled(expression, {"templating": {"list": variables}}, {"job": "a"}, SHOWN, 15)
    assert asked == 'rate(x{namespace=~".+", job="a"}[60s]) + y[58s]'
    with pytest.raises(KeyError):
        filled("x{a=$unknown}", {"templating": {"list": variables}}, {}, SHOWN, 15)


@pytest.mark.parametrize(("interval", "seconds"), [(None, 15), ("1m", 60)])
def test_a_panels_resolution_is_the_scrape_interval_or_the_panels_minimum(interval: str | None, seconds: int) -> None:
    assert step_of({} if interval is None else {"interval": interval}, SHOWN) == seconds


def test_a_series_has_a_value_or_a_gap_at_each_moment() -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def ask(path: str, **query: str) -> Any:
        asked.append((path, query))
        return {"result": [{"metric": {"job": "a"}, "values": [[1005, "1"], [1035, "3.5"]]}]}

    target = {"expr": "x", "legendFormat": "{{job}} of {{namespace}}"}
    found = answered(target, ask, {"templating": {"list": []}}, {}, SHOWN, 15)
    assert asked == [("query_range", {"query": "x", "start": "1005.0", "end": "1050.0", "step": "15"})]
    assert [(s.name, s.labels) for s in found] == [("a of ", {"job": "a"})]
    assert found[0].values[0::2] == [1, 3.5] and all(math.isnan(v) for v in found[0].values[1::2])
    assert legend("{{ pod }}", {"pod": "p"}) == "p"


def test_a_table_joins_the_responses_by_their_labels() -> None:
    panel = {
        "targets": [{"refId": "A"}, {"refId": "B"}],
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": {"Value #B": "speed"}}},
        ],
    }
    a, b = {"job": "a", "Time": "1"}, {"job": "b", "Time": "1"}
    answers = [
        ({"refId": "A"}, [Series("", a, [1.0]), Series("", b, [2.0])]),
        ({"refId": "B"}, [Series("", b, [20.0])]),
    ]
    assert rows(panel, answers) == (["job", "Value #A", "speed"], [["a", 1.0, ""], ["b", 2.0, 20.0]])


def test_an_annotation_marks_each_period_above_zero() -> None:
    assert regions([0, 1, 2, 0, math.nan, 3]) == [(1, 2), (5, 5)]
    assert regions([]) == []


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.5, "percentunit", "50 %"),
        (0.0123, "s", "12.3 ms"),
        (0, "s", "0 s"),
        (90, "s", "1.5 mins"),
        (172_800, "s", "2 days"),
        (1_500, "short", "1.5 K"),
        (-2e6, "reqps", "-2 M req/s"),
        (3.14159, "ops", "3.14 ops/s"),
        (math.nan, "s", "NaN"),
    ],
)
def test_values_are_written_with_their_units(value: float, unit: str, words: str) -> None:
    assert worded(value, unit) == words


def test_each_alert_is_fired_by_a_simulated_fault() -> None:
    alerts = [
        rule["alert"]
        for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    fired = [act.alert for act in (*ACTS, *LAST) if act.alert]
    assert sorted(fired) == sorted(alerts)
