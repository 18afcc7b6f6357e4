"""Writes the runs of a trace as JSON lines, as a Markdown table and as a picture."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.recovery.trace.account import Account, Seen
from benchmarks.recovery.trace.events import Kind
from benchmarks.recovery.trace.play import Run

COLORS = {
    "ddpjob": "#2471a3", "ddpjob-spare": "#1b4f72", "ddpjob-no-snapshots": "#7fb3d5", "torchft": "#d68910",
    "torchft-tuned": "#f4d03f", "stock": "#c0392b",
}  # fmt: skip
NOTES = """\
Median / worst. An ideal step takes as long as the fastest system's mean step between failures. A repeated step
counts as useful once. A pause is the time between the steps of two groups, minus the usual gap."""
Group = tuple[int, float]
"""State size in bytes and step time in seconds. Only runs with the same values can be compared."""


def append(path: Path, run: Run) -> None:
    """Append a run to a file, so that an interrupted benchmark keeps its measurements."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def read(path: Path) -> list[Run]:
    """Read the runs from a file written by `append`."""
    return [_run(json.loads(line)) for line in path.read_text().splitlines()]


def _run(line: dict[str, Any]) -> Run:
    if (account := line["account"]) is not None:
        seen = tuple(Seen(**{**one, "kind": Kind(one["kind"])}) for one in account["seen"])
        line["account"] = Account(**{**account, "seen": seen})
    return Run(**line)


def by_group(runs: Iterable[Run]) -> dict[Group, dict[str, list[Run]]]:
    """Return the runs by state and step, then by system."""
    found: dict[Group, dict[str, list[Run]]] = {}
    for run in runs:
        found.setdefault((run.state, run.step), {}).setdefault(run.system, []).append(run)
    return dict(sorted(found.items()))


def accounts(runs: Iterable[Run]) -> list[Account]:
    """Return the accounts of the runs that did not fail."""
    return [run.account for run in runs if run.account is not None]


def ideal_gap(of_group: dict[str, list[Run]]) -> float:
    """Return the seconds of an ideal step: the mean step of the fastest system, between failures."""
    gaps = [
        statistics.fmean(account.mean_gap for account in found)
        for runs in of_group.values()
        if (found := accounts(runs))
    ]
    return min(gaps, default=0.0)


def size(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def read_numbers(text: str) -> list[float]:
    """Parse comma-separated numbers."""
    return [float(word) for word in text.split(",")]


def table(runs: Sequence[Run]) -> str:
    """Return one row per system, with the median and the worst of each figure."""
    kinds = [kind for kind in Kind if any(seen.kind is kind for a in accounts(runs) for seen in a.seen)]
    heads = ["state", "step s", "system", "runs", "failures", "useful steps per ideal step", "step ms"]
    heads += [f"pause s, {kind}" for kind in kinds] + ["repeated steps", "whole restarts"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for (state, step), of_group in by_group(runs).items():
        ideal = ideal_gap(of_group)
        for system, own in of_group.items():
            cells = [size(state), f"{step:g}", system, str(len(own)), *_cells(own, ideal, kinds)]
            lines.append(f"| {' | '.join(cells)} |")
    loads = [run.load for run in runs]
    load = f"load average {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}" if loads else ""
    lines += ["", f"{NOTES} {os.cpu_count()} cores; {load}."]
    return "\n".join(lines + [f"{run.system}, round {run.round}: {run.note}" for run in runs if run.note])


def _cells(runs: Sequence[Run], ideal: float, kinds: Sequence[Kind]) -> list[str]:
    found = accounts(runs)
    restarts = str(sum(run.whole_restarts for run in runs))
    if not found:
        return ["0", "did not train", "", *[""] * len(kinds), "", restarts]
    seen = [one for account in found for one in account.seen]
    ratios = [account.per_ideal(ideal) for account in found]
    useful = f"{statistics.median(ratios):.2%} / {min(ratios):.2%}"
    gaps = [1000 * account.gap for account in found]
    pauses = [pause_cell([one for one in seen if one.kind is kind]) for kind in kinds]
    repeated = [one.repeated for one in seen]
    steps = f"{statistics.median(repeated):g} / {max(repeated)}" if repeated else ""
    return [str(len(seen)), useful, f"{statistics.median(gaps):.1f}", *pauses, steps, restarts]


def pause_cell(seen: Sequence[Seen]) -> str:
    """Return the median and the worst pause. A group that stood still until the next failure is
    marked.
    """
    if not seen:
        return ""
    pauses = [one.pause for one in seen]
    lost = sum(not one.recovered for one in seen)
    return f"{statistics.median(pauses):.2f} / {max(pauses):.2f}" + (f"; {lost} not recovered" if lost else "")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw useful steps, pauses and repeated steps, with medians as bars and the worst values as
    ticks.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows: list[tuple[str, str, list[Account], float]] = []
    for (state, step), of_group in by_group(runs).items():
        ideal = ideal_gap(of_group)
        for system, own in of_group.items():
            if found := accounts(own):
                rows.append((f"{system}, {size(state)}, {step:g} s", system, found, ideal))
    rows.reverse()
    panels: list[tuple[str, str, Callable[[list[Account], float], list[float]], Callable[[list[float]], float]]] = [
        ("useful steps per ideal step, %", "linear", lambda a, i: [100 * one.per_ideal(i) for one in a], min),
        ("pause, s", "symlog", lambda a, i: [seen.pause for one in a for seen in one.seen], max),
        ("repeated steps per failure", "symlog", lambda a, i: [float(s.repeated) for one in a for s in one.seen], max),
    ]
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(10, 1.6 + 0.3 * len(rows)), layout="constrained")
    figure.supxlabel("bars: median, marks: worst", fontsize="small")
    for axis, (title, scale, values, worst) in zip(axes, panels, strict=True):
        for row, (_, system, found, ideal) in enumerate(rows):
            if numbers := values(found, ideal):
                axis.barh(row, statistics.median(numbers), color=COLORS.get(system, "#909497"), height=0.7)
                axis.plot([worst(numbers)], [row], marker="|", color="black", markersize=9)
        axis.set_xscale(scale)
        if title == "pause, s":
            longest = axis.get_xlim()[1]
            axis.set_xticks(ticks := [tick for tick in (0, 0.5, 1, 2, 5, 10, 30, 60, 120) if tick <= longest])
            axis.set_xticklabels([f"{tick:g}" for tick in ticks])
        axis.set_xlim(left=0)
        axis.set_xlabel(title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [title for title, *_ in rows], fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
