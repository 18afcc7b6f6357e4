"""python benchmarks/recovery overhead [--windows 40] [--csv FILE] [--table FILE]

What a step costs under the launchers, against stock torchrun: the same script, without sleep, in groups that run by turns. A group whose
turn it is not is frozen with all its processes, agents and coordinator too, so that nothing of it takes part.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import statistics
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from cases import Loopback, Shape, System
from groups import Coordinated, Group, NotRecovered
from marks import write_between
from tree import descendants

WINDOW = 1.5
"""Seconds of a turn: three groups, and nobody is silent for as long as a coordinator bears it."""
SETTLE = 0.3
"""Seconds of a turn that are not counted: caches are cold."""
OPTIONS = ("--sleep=0", "--save-every=0", "--width=512", "--batch=256")


def processes(group: Group) -> list[int]:
    """All of a group."""
    roots = list(group.nodes.values())
    if isinstance(group, Coordinated) and group.coordinator is not None:
        roots.append(group.coordinator)
    return [pid for root in roots for pid in (root.pid, *descendants(root.pid))]


def send(group: Group, number: signal.Signals) -> None:
    """A signal to all of a group."""
    for pid in processes(group):
        os.kill(pid, number)


def turn(group: Group) -> float:
    """The group runs alone for a while: the median of rank 0's steps, in seconds. Raises NotRecovered when it did not go on as before."""
    send(group, signal.SIGCONT)
    began = time.time()
    time.sleep(WINDOW)
    send(group, signal.SIGSTOP)
    life = group.log.refresh().newest
    times = [moment for moment in life.steps[0] if moment > began + SETTLE] if life and len(group.log.lives) == 1 else []
    if len(times) < 2:
        raise NotRecovered(
            f"{type(group).__name__}: the group was frozen for some seconds and did not go on as before (logs in {group.folder})"
        )
    return statistics.median(after - before for before, after in pairwise(times))


def measure(windows: int, patience: float) -> list[dict[System, float]]:
    """For each window the median step of each system; stock torchrun's is the mean of its turns before and after the others'.

    The order never changes: a group that waited for four turns would have been silent for too long.
    """
    place, turns = Loopback(patience), list[dict[System, float]]()
    with ExitStack() as stack:
        groups: dict[System, Group] = {}
        for system in System:
            groups[system] = stack.enter_context(place.group(system, Shape(), OPTIONS))
        for group in groups.values():
            send(group, signal.SIGSTOP)
            stack.callback(send, group, signal.SIGCONT)
        for _ in range(windows + 2):
            turns.append({system: turn(groups[system]) for system in System})
    return [
        before | {System.STOCK: (before[System.STOCK] + after[System.STOCK]) / 2}
        for before, after in pairwise(turns[1:])  # The first is not counted.
    ]


def table(rows: list[dict[System, float]]) -> str:
    """Medians, and the median of the ratios within each window with its 95 % interval."""
    lines = ["| under | step ms (median) | against stock torchrun | 95 % interval |", "| --- | --- | --- | --- |"]
    for system in System:
        ratios = sorted(row[system] / row[System.STOCK] - 1 for row in rows)
        low, high = interval(ratios)
        against = "" if system is System.STOCK else f"{statistics.median(ratios):+.2%} | {low:+.2%} to {high:+.2%}"
        name = "stock torchrun" if system is System.STOCK else system
        lines.append(f"| {name} | {statistics.median(row[system] for row in rows) * 1000:.3f} | {against or ' | '} |")
    return "\n".join([*lines, "", f"{len(rows)} windows of {WINDOW} s; {os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}."])


def interval(ordered: list[float]) -> tuple[float, float]:
    """Of a median, by the ranks of the binomial distribution (normal approximation)."""
    half = 0.98 * len(ordered) ** 0.5
    middle = len(ordered) / 2
    return ordered[max(0, int(middle - half))], ordered[min(len(ordered) - 1, int(middle + half))]


def main(arguments: list[str]) -> int:
    """0 when it was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40, help="turns of each group (default 40)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="where the single measurements go")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="put the table between the marks <!-- overhead: begin/end --> of a document"
    )
    options = parser.parse_args(arguments)
    rows = measure(options.windows, 60)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["window", *System])
            writer.writerows([number, *(f"{row[system]:.6f}" for system in System)] for number, row in enumerate(rows, 1))
    text = table(rows)
    print(text)
    if options.table:
        write_between(options.table, "overhead", text)
    return 0
