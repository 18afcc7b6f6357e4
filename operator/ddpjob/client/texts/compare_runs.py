"""Compares jobs in a table: results, arguments, code, packages and resources.

Each row has one cell per job. Arguments are compared by name, regardless of their order and form.
For example, `--lr 0.1` and `--lr=0.1` belong to the row `--lr`, and `optim.lr=0.1` belongs to the
row `optim.lr`, all with the value 0.1. A job without the argument has an empty cell.

Readers look for differences, so `Row.differs` marks rows whose cells are not all equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import JobStatus
from ddpjob.client.texts.job_text import phase, took
from ddpjob.client.texts.run_record import record_of
from ddpjob.core.view import is_number

MOST_RUNS = 6
"""Maximum number of jobs whose curves can be told apart."""
_MOST_ARGUMENTS = 200
_MOST_METRICS = 40
_LONGEST = 300
_NEGATIVE = re.compile(r"-[0-9.]")


@dataclass(frozen=True)
class Row:
    """A row of the table, which shows one property of all the jobs being compared."""

    label: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def compare(bodies: Sequence[Json], now: datetime) -> list[Row]:
    """Return the rows of the table.

    A property that none of the jobs has gets no row. The fields of a job can contain any values, so
    they are not trusted.
    """
    found = [dict(_properties(body, now)) for body in bodies]
    labels = list(dict.fromkeys(label for properties in found for label in properties))
    order = sorted(labels, key=lambda label: _KINDS.index(label[0]))
    rows = [Row(label, tuple(each.get((kind, label), "") for each in found)) for kind, label in order]
    return [row for row in rows if any(row.values)]


_KINDS = ("result", "argument", "code", "resource")


def _properties(body: Json, now: datetime) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the properties of a job as pairs ((kind, label), text)."""
    spec = body.get("spec") or {}
    for label, text in _results(body, now):
        yield ("result", label), _short(text)
    for label, text in arguments(spec.get("args")).items():
        yield ("argument", label), text
    program = spec.get("command") or spec.get("module") or spec.get("script") or ""
    yield ("code", "program"), _short(" ".join(map(str, program)) if isinstance(program, list) else program)
    yield ("code", "image"), _short(spec.get("image", ""))
    for label, text in record_of(body):
        yield ("code", label), text
    for label, field in _RESOURCES.items():
        value = spec.get(field)
        yield ("resource", label), _short(value) if value not in (None, 0) else ""
    nodes, procs = spec.get("nodes", 1), spec.get("procsPerNode", spec.get("gpusPerNode")) or 1
    if is_number(nodes) and is_number(procs) and not spec.get("command"):
        yield ("resource", "world size"), _short(nodes * procs)
    yield ("resource", "recovery mode"), _short((spec.get("recovery") or {}).get("mode", ""))


_RESOURCES = {"nodes": "nodes", "GPUs per node": "gpusPerNode", "processes per node": "procsPerNode",
              "class": "className", "queue": "queue"}  # fmt: skip


def _results(body: Json, now: datetime) -> Iterator[tuple[str, str]]:
    status = JobStatus.read(body.get("status") or {})
    progress = status.progress
    yield "state", phase(body)
    yield "runtime", took(body, now)
    for label, name in (("step", "step"), ("epoch", "epoch"), ("loss", "lossDisplay"), ("speed", "speedDisplay")):
        yield label, str(progress.get(name, ""))
    metrics = progress.get("metrics")
    numbers = metrics if isinstance(metrics, dict) else {}
    for name, value in sorted(numbers.items())[:_MOST_METRICS]:
        if is_number(value) and name != "stepsPerSecond":
            yield str(name), f"{value:.2%}" if name == "accuracy" and 0 <= value <= 1 else f"{value:.5g}"
    yield "restarts", str(status.restarts.total)
    yield "repeated steps", str(status.restarts.repeated_steps or "")


def arguments(words: object) -> dict[str, str]:
    """Return a program's arguments as a mapping from names to values.

    Arguments without a name are called `argument 1`, `argument 2`, and so on.
    """
    given = [str(word) for word in words[:_MOST_ARGUMENTS]] if isinstance(words, list) else []
    found: dict[str, list[str]] = {}
    at, unnamed = 0, 0
    while at < len(given):
        word, at = given[at], at + 1
        name, equals, value = word.partition("=")
        if equals and name and " " not in name:
            pass
        elif word.startswith("-") and word != "--":
            follows = at < len(given) and (not given[at].startswith("-") or _NEGATIVE.match(given[at]))
            follows = bool(follows) and not re.match(r"[\w.]+=", given[at])
            name, value, at = word, given[at] if follows else "yes", at + follows
        else:
            unnamed += 1
            name, value = f"argument {unnamed}", word
        found.setdefault(_short(name), []).append(_short(value))
    return {name: ", ".join(values)[:_LONGEST] for name, values in found.items()}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
