"""Reads a dashboard's JSON as Grafana does: panels, queries with filled-in variables, results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Labels = dict[str, str]


@dataclass(frozen=True)
class Range:
    """The displayed time range in Unix seconds, and the seconds between scrapes."""

    start: float
    end: float
    scrape: int

    def moments(self, step: int) -> list[float]:
        """Return the times that Grafana requests, which are multiples of the step."""
        first = math.ceil(self.start / step)
        return [float(number * step) for number in range(first, int(self.end / step) + 1)]


@dataclass(frozen=True)
class Series:
    """A line in a panel. `values` has a value per time, NaN if missing; an instant query has only
    one.
    """

    name: str
    labels: Labels
    values: list[float]


def step_of(panel: Json, shown: Range) -> int:
    """Return the seconds between two values.

    This is the scrape interval, or the panel's minimum if that is longer.
    """
    least = panel.get("interval", "")
    return max(shown.scrape, 60 * int(least.removesuffix("m")) if least else 0)


def filled(expression: str, board: Json, variables: Labels, shown: Range, step: int) -> str:
    """Return a query in the form that Grafana sends.

    A variable with several values gets all of them; the other variables are in `variables`.
    """
    found = {
        "__rate_interval": f"{max(step + shown.scrape, 4 * shown.scrape)}s",
        "__range": f"{round(shown.end - shown.start)}s",
        **{v["name"]: v.get("allValue") or variables.get(v["name"], "") for v in board["templating"]["list"]},
    }
    return re.sub(r"\$\{?(\w+)\}?", lambda match: found[match[1]], expression)


def legend(pattern: str, labels: Labels) -> str:
    """Replace `{{label}}` as in legendFormat."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), pattern)


def answered(target: Json, ask: Any, board: Json, variables: Labels, shown: Range, step: int) -> list[Series]:
    """Return the series for one of a panel's queries.

    `ask(path, **query)` is a PrometheusServer's method.
    """
    query = filled(target["expr"], board, variables, shown, step)
    if target.get("instant"):
        found = ask("query", query=query, time=str(shown.end))["result"]
        samples = [(each["metric"], [float(each["value"][1])]) for each in found]
    else:
        moments = shown.moments(step)
        asked = {"start": str(moments[0]), "end": str(moments[-1]), "step": str(step)}
        found = ask("query_range", query=query, **asked)["result"]
        samples = [(each["metric"], _on(moments, step, each["values"])) for each in found]
    return [Series(legend(target["legendFormat"], labels), labels, values) for labels, values in samples]


def _on(moments: list[float], step: int, values: Iterable[tuple[float, str]]) -> list[float]:
    made = [math.nan] * len(moments)
    for moment, value in values:
        made[round((float(moment) - moments[0]) / step)] = float(value)
    return made


def rows(panel: Json, answers: list[tuple[Json, list[Series]]]) -> tuple[list[str], list[list[Any]]]:
    """Return a table's columns and rows after the transformations "merge" and "organize"."""
    many = len(panel["targets"]) > 1
    merged: list[dict[str, Any]] = []
    for target, series in answers:
        for one in series:
            new = {**one.labels, f"Value #{target['refId']}" if many else "Value": one.values[0]}
            fit = (row for row in merged if all(row.get(key, value) == value for key, value in new.items()))
            row = next(fit, None)
            if row is None:
                merged.append(new)
            else:
                row |= new
    (tidy,) = (t["options"] for t in panel["transformations"] if t["id"] == "organize")
    keys = dict.fromkeys(key for row in merged for key in row if not tidy["excludeByName"].get(key))
    order = sorted(keys, key=lambda key: key.startswith("Value"))
    table = [[row.get(key, "") for key in order] for row in merged]
    return [tidy["renameByName"].get(key, key) for key in order], table


def regions(values: list[float]) -> list[tuple[int, int]]:
    """Return the first and last index of each run of annotation values above 0."""
    found: list[tuple[int, int]] = []
    for index, value in enumerate(values):
        if value > 0:
            if found and found[-1][1] == index - 1:
                found[-1] = (found[-1][0], index)
            else:
                found.append((index, index))
    return found


_TIMES = (("day", 86400.0), ("hour", 3600.0), ("min", 60.0))
_AFTER = {"s": "s", "ops": "ops/s", "reqps": "req/s"}


def worded(value: float, unit: str) -> str:
    """Format a value with its unit, as Grafana does."""
    if math.isnan(value):
        return "NaN"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for name, seconds in _TIMES:
            if abs(value) >= seconds:
                return f"{value / seconds:.3g} {name}s"
        return f"{value:.3g} s" if abs(value) >= 1 or not value else f"{1000 * value:.3g} ms"
    large = next(((value / size, end) for size, end in ((1e6, " M"), (1e3, " K")) if abs(value) >= size), (value, ""))
    return f"{large[0]:.3g}{large[1]} {_AFTER.get(unit, '')}".strip()
