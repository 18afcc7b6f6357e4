"""The result of one kill, and its output as CSV and as a Markdown table."""

from __future__ import annotations

import csv
import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

FLOOR = "floor"
"""The case without a kill, which measures how long a node takes to start without this project."""
LAST_KILL = 10


@dataclass(frozen=True)
class Sample:
    """One kill. `seconds` is None if the group did not recover, and `outcome` describes the
    observation.
    """

    case: str
    backend: str
    victim: str
    round: int
    kill: int
    seconds: float | None
    outcome: str
    load: float
    phases: dict[str, float] = field(default_factory=dict)
    """The seconds of each phase; see phases.py."""


class CsvFile:
    """A CSV file that grows by one row per sample, so that an interrupted run keeps its results."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", newline="") if path else None
        self._writer = csv.DictWriter(self._file, [column.name for column in fields(Sample)]) if self._file else None
        if self._writer:
            self._writer.writeheader()

    def add(self, sample: Sample) -> None:
        """Append a row."""
        if self._writer and self._file:
            seconds = "" if sample.seconds is None else f"{sample.seconds:.4f}"
            phases = json.dumps({name: round(value, 4) for name, value in sample.phases.items()})
            self._writer.writerow(asdict(sample) | {"seconds": seconds, "load": f"{sample.load:.2f}", "phases": phases})
            self._file.flush()


def read_csv(path: Path) -> list[Sample]:
    """Read the samples from a file written by CsvFile."""
    with path.open(newline="") as file:
        return [
            Sample(
                row["case"], row["backend"], row["victim"], int(row["round"]), int(row["kill"]),
                float(row["seconds"]) if row["seconds"] else None, row["outcome"], float(row["load"]),
                json.loads(row["phases"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def markdown(samples: Iterable[Sample], targets: dict[str, float | None]) -> str:
    """Return one row per case.

    Stock torchrun has one row per victim, because the outcome depends on it.
    """
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        victim = sample.victim if sample.case.startswith("stock") else ""
        groups.setdefault((sample.case, sample.backend, victim), []).append(sample)
    floors = {backend: _median(found) for (case, backend, _), found in groups.items() if case == FLOOR}
    lines = [
        "| case | runs on | killed | runs | median s | worst s | target s | times the floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (case, backend, victim), found in groups.items():
        target = targets.get(case)
        killed = victim or " and ".join(sorted({sample.victim for sample in found}))
        floor, median = floors.get(backend), _median(found)
        times = f"{median / floor:.2f}" if floor and median is not None else ""
        cells = [case, backend, killed, len(found), _figures(found), "" if target is None else target, times]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"{os.cpu_count()} cores; load average {_load([s for found in groups.values() for s in found])}."]
    lines += [line for (case, *_), found in groups.items() if case.endswith("row") for line in _row(case, found)]
    return "\n".join(lines)


def _median(samples: list[Sample]) -> float | None:
    seconds = [sample.seconds for sample in samples if sample.seconds is not None]
    return statistics.median(seconds) if seconds else None


def _figures(samples: list[Sample]) -> str:
    seconds = [sample.seconds for sample in samples if sample.seconds is not None]
    lost = [sample.outcome for sample in samples if sample.seconds is None]
    if not seconds:
        return f"{lost[0].partition(' (')[0]} | "
    worst = f"{max(seconds):.2f}" + (f"; {len(lost)} not recovered" if lost else "")
    return f"{statistics.median(seconds):.2f} | {worst}"


def _load(samples: list[Sample]) -> str:
    loads = [sample.load for sample in samples]
    return f"{min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}" if loads else "unknown"


def _row(case: str, samples: list[Sample]) -> list[str]:
    """Return a line that compares the last of the consecutive kills with the first."""
    first, last = ([s.seconds for s in samples if s.kill == kill and s.seconds is not None] for kill in (1, LAST_KILL))
    if not first or not last:
        return []
    ratio = statistics.median(last) / statistics.median(first)
    return [
        f"{case}: kill {LAST_KILL} in a row costs {ratio:.2f} times as much as kill 1"
        f" (medians of {len(first)} and {len(last)})."
    ]
