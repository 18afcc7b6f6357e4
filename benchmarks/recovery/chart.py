"""python benchmarks/recovery chart [-o FILE.png] [--csv FILE] [--seconds 150] [--from FILE.csv]

Images per second over time with the kills marked, for stock torchrun, Standard and Fast with a spare under one schedule of kills.
Each killed node is started anew at once. The last kill takes rank 0's node (under stock torchrun: the one that hosts the store).
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from pathlib import Path

from cases import ELASTIC, SPARE, WHOLE, Loopback, Shape, System
from groups import Group, NotRecovered

KILLS = ((20.0, 2), (75.0, 2), (95.0, 2), (115.0, 1))
"""(second, number for `pick`: even for the last rank's node, odd for rank 0's)"""
BATCH = 64
BIN = 0.5
"""Seconds."""
PANELS: tuple[tuple[System, str, Shape], ...] = (
    (System.STOCK, "stock torchrun, elastic 1:2", ELASTIC),
    (System.STANDARD, "DDPJob, recovery.mode: Standard", WHOLE),
    (System.FAST, "DDPJob, recovery.mode: Fast, one spare", SPARE),
)
Curve = dict[float, float]


def curve(system: System, shape: Shape, seconds: float) -> Curve:
    """second -> images/s in the half second from there. A step counts when the first of its ranks has made it, repeated ones once."""
    with Loopback(60).group(system, shape, ()) as group:
        began = time.time()
        for moment, number in KILLS:
            time.sleep(max(0.0, began + moment - time.time()))
            try:
                kill(group, number)
            except NotRecovered as error:
                print(f"{system}: {error}", file=sys.stderr)
                break
        time.sleep(max(0.0, began + seconds - time.time()))
        made: dict[int, float] = {}
        for life in group.log.refresh().lives.values():
            for rank, times in life.steps.items():
                for number, when in enumerate(times, life.first[rank]):
                    made[number] = min(when, made.get(number, when))
    counts = Counter(int((when - began) // BIN) for when in made.values())
    return {number * BIN: counts[number] * BATCH / BIN for number in range(int(seconds / BIN))}


def kill(group: Group, number: int) -> None:
    """A node and its successor; under stock torchrun there may be nothing left to kill."""
    group.check()
    life = group.log.refresh().newest
    assert life is not None
    node, _ = group.pick(life, number)
    if node in group.nodes:
        group.kill(node)
    group.replace()


def draw(curves: dict[System, Curve], path: Path) -> None:
    """One panel below the other, one time axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    top = max(max(values.values()) for values in curves.values())
    figure, panels = plt.subplots(len(PANELS), 1, sharex=True, sharey=True, figsize=(9, 5.2), layout="constrained")
    for panel, (system, title, _) in zip(panels, PANELS, strict=True):
        values = curves[system]
        panel.fill_between(
            list(values), list(values.values()), step="post", color="#c0392b" if system is System.STOCK else "#2471a3", alpha=0.75
        )
        for moment, number in KILLS:
            panel.axvline(moment, color="black", linestyle="--", linewidth=1)
            panel.annotate(
                "rank 0's node killed" if number % 2 else "node killed", (moment, 1.0), xycoords=("data", "axes fraction"),
                xytext=(3, -3), textcoords="offset points", fontsize=7, verticalalignment="top",
            )  # fmt: skip
        panel.set_title(title, loc="left", fontsize=9)
        panel.set_ylabel("images/s")
        panel.set_ylim(0, 1.25 * top)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    panels[-1].set_xlim(0, max(max(values) for values in curves.values()))
    figure.savefig(path, dpi=150)


def read(path: Path) -> dict[System, Curve]:
    """What `write` has written."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {system: {float(row["second"]): float(row[system]) for row in rows} for system in System}


def write(path: Path, curves: dict[System, Curve]) -> None:
    """One line for each half second."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["second", *System])
        writer.writerows([second, *(curves[system][second] for system in System)] for second in curves[System.STOCK])


def main(arguments: list[str]) -> int:
    """0 when the chart was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("recovery.png"), metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="where the curves go")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="draw these curves, measure nothing")
    parser.add_argument("--seconds", type=float, default=150.0)
    options = parser.parse_args(arguments)
    curves = read(options.source) if options.source else {system: curve(system, shape, options.seconds) for system, _, shape in PANELS}
    if options.csv:
        write(options.csv, curves)
    draw(curves, options.output)
    return 0
