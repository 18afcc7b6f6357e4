"""python -m benchmarks.recovery chart [-o FILE.png] [--csv FILE] [--seconds 150] [--from FILE.csv]

Draws images per second over time, for stock torchrun, Standard, and Fast with a spare, under the
same schedule of kills, which are marked. Every killed node is replaced immediately. The last kill
takes rank 0's node, which under stock torchrun hosts the store.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.recovery.cases import ELASTIC, SPARE, WHOLE, Loopback, Shape, System
from benchmarks.recovery.groups import Group, NotRecovered

KILLS = ((20.0, 2), (75.0, 2), (95.0, 2), (115.0, 1))
"""(second, `number` for Group.pick). Even numbers pick the last rank's node, odd ones rank 0's."""
BATCH = 64
BIN = 0.5
"""Resolution of the curves, in seconds."""
PANELS: tuple[tuple[System, str, Shape], ...] = (
    (System.STOCK, "stock torchrun, elastic 1:2", ELASTIC),
    (System.STANDARD, "DDPJob, recovery.mode: Standard", WHOLE),
    (System.FAST, "DDPJob, recovery.mode: Fast, one spare", SPARE),
)
Curve = dict[float, float]


def curve(system: System, shape: Shape, seconds: float) -> Curve:
    """Return the images per second in each bin.

    A step counts once, when the first rank has taken it.
    """
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
        for incarnation in group.log.refresh().incarnations.values():
            for rank, times in incarnation.steps.items():
                for number, when in enumerate(times, incarnation.first[rank]):
                    made[number] = min(when, made.get(number, when))
    counts = Counter(int((when - began) // BIN) for when in made.values())
    return {number * BIN: counts[number] * BATCH / BIN for number in range(int(seconds / BIN))}


def kill(group: Group, number: int) -> None:
    """Kill a node and replace it. Under stock torchrun there may be no node left to kill."""
    group.check()
    incarnation = group.log.refresh().newest
    assert incarnation is not None
    node, _ = group.pick(incarnation, number)
    if node in group.nodes:
        group.kill(node)
    group.replace()


def draw(curves: dict[System, Curve], path: Path) -> None:
    """Draw one panel per system, on a common time axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    top = max(max(values.values()) for values in curves.values())
    figure, panels = plt.subplots(len(PANELS), 1, sharex=True, sharey=True, figsize=(9, 5.2), layout="constrained")
    for panel, (system, title, _) in zip(panels, PANELS, strict=True):
        values = curves[system]
        panel.fill_between(
            list(values),
            list(values.values()),
            step="post",
            color="#c0392b" if system is System.STOCK else "#2471a3",
            alpha=0.75,
        )
        for moment, number in KILLS:
            panel.axvline(moment, color="black", linestyle="--", linewidth=1)
            panel.annotate(
                "rank 0's node killed" if number % 2 else "node killed", (moment, 1.0),
                xycoords=("data", "axes fraction"), xytext=(3, -3), textcoords="offset points",
                fontsize=7, verticalalignment="top",
            )  # fmt: skip
        panel.set_title(title, loc="left", fontsize=9)
        panel.set_ylabel("images/s")
        panel.set_ylim(0, 1.25 * top)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    panels[-1].set_xlim(0, max(max(values) for values in curves.values()))
    figure.savefig(path, dpi=150)


def read(path: Path) -> dict[System, Curve]:
    """Read the curves from a file written by `write`."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {system: {float(row["second"]): float(row[system]) for row in rows} for system in System}


def write(path: Path, curves: dict[System, Curve]) -> None:
    """Write one row per bin."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["second", *System])
        writer.writerows([second, *(curves[system][second] for system in System)] for second in curves[System.STOCK])


def main(arguments: list[str]) -> int:
    """Draw the chart, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("recovery.png"),
        metavar="FILE",
        help="file of the chart (default recovery.png)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the curves to this file")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="draw the curves in this file instead of measuring"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="length of each curve (default 150)")
    options = parser.parse_args(arguments)
    curves = (
        read(options.source)
        if options.source
        else {system: curve(system, shape, options.seconds) for system, _, shape in PANELS}
    )
    if options.csv:
        write(options.csv, curves)
    draw(curves, options.output)
    return 0
