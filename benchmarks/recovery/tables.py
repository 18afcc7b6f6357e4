"""Samples as CSV and as a table in Markdown."""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

from cases import Sample

LAST_KILL = 10


class CsvFile:
    """Grows by one line per sample: what was measured is kept when the run is cut short."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", newline="") if path else None
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(Sample)]) if self._file else None
        if self._writer:
            self._writer.writeheader()

    def add(self, sample: Sample) -> None:
        """One more line."""
        if self._writer and self._file:
            seconds = "" if sample.seconds is None else f"{sample.seconds:.4f}"
            self._writer.writerow(asdict(sample) | {"seconds": seconds, "load": f"{sample.load:.2f}"})
            self._file.flush()


def read_csv(path: Path) -> list[Sample]:
    """What CsvFile has written."""
    with path.open(newline="") as file:
        return [
            Sample(
                row["case"], row["place"], row["victim"], int(row["round"]), int(row["kill"]),
                float(row["seconds"]) if row["seconds"] else None, row["outcome"], float(row["load"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def markdown(samples: Iterable[Sample], aims: dict[str, float | None]) -> str:
    """One row for each case; for stock torchrun one for each victim, since its fate depends on it."""
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        victim = sample.victim if sample.case.startswith("stock") else ""
        groups.setdefault((sample.case, sample.place, victim), []).append(sample)
    lines = ["| case | place | killed | runs | median s | worst s | aim s |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for (case, place, victim), found in groups.items():
        aim = aims.get(case)
        killed = victim or " and ".join(sorted({sample.victim for sample in found}))
        lines.append(f"| {case} | {place} | {killed} | {len(found)} | {_figures(found)} | {'' if aim is None else aim} |")
    lines += ["", f"{os.cpu_count()} cores; load average {_load([s for found in groups.values() for s in found])}."]
    lines += [line for (case, *_), found in groups.items() if case.endswith("row") for line in _row(case, found)]
    return "\n".join(lines)


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
    """Whether the last kill in a row costs what the first did."""
    first, last = ([s.seconds for s in samples if s.kill == kill and s.seconds is not None] for kill in (1, LAST_KILL))
    if not first or not last:
        return []
    ratio = statistics.median(last) / statistics.median(first)
    return [f"{case}: kill {LAST_KILL} in a row costs {ratio:.2f} times what kill 1 cost (medians of {len(first)} and {len(last)})."]
