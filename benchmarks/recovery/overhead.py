"""python -m benchmarks.recovery overhead [--windows 40] [--csv FILE] [--table FILE]
python -m benchmarks.recovery overhead --snapshots [--rounds 5] [--states 80e3,100e6] [--steps 0.05,0.5] [--table FILE]

Measures the overhead per step of each launcher, compared with stock torchrun. Every group runs the
same script, without pauses between steps, and the groups take turns. While one group runs, the
others are frozen, including their agents and coordinators, so that they use no CPU time.
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

from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import descendants
from benchmarks.recovery import copies
from benchmarks.recovery.cases import Loopback, Shape, System
from benchmarks.recovery.groups import Coordinated, Group, NotRecovered
from benchmarks.recovery.trace.report import read_numbers

WINDOW = 1.5
"""Length of a turn in seconds. With three groups, it is short enough that no coordinator gives up a
frozen member.
"""
SETTLE = 0.3
"""Seconds at the start of a turn that do not count, because caches are cold."""
OPTIONS = ("--sleep=0", "--save-every=0", "--width=512", "--batch=256")


def processes(group: Group) -> list[int]:
    """Return the process ids of a group, its agents and its coordinator."""
    roots = list(group.nodes.values())
    if isinstance(group, Coordinated) and group.coordinator is not None:
        roots.append(group.coordinator)
    return [pid for root in roots for pid in (root.pid, *descendants(root.pid))]


def send(group: Group, number: signal.Signals) -> None:
    """Send a signal to all processes of a group."""
    for pid in processes(group):
        os.kill(pid, number)


def turn(group: Group) -> float:
    """Let the group run alone, and return rank 0's median step in seconds.

    Raises NotRecovered if training did not continue.
    """
    send(group, signal.SIGCONT)
    began = time.time()
    time.sleep(WINDOW)
    send(group, signal.SIGSTOP)
    incarnation = group.log.refresh().newest
    times = (
        [moment for moment in incarnation.steps[0] if moment > began + SETTLE]
        if incarnation and len(group.log.incarnations) == 1
        else []
    )
    if len(times) < 2:
        raise NotRecovered(
            f"{type(group).__name__}: training did not continue after the group was frozen (logs in {group.folder})"
        )
    return statistics.median(after - before for before, after in pairwise(times))


def measure(windows: int, patience: float) -> list[dict[System, float]]:
    """Return each system's median step per window.

    For stock torchrun, the value is the mean of its turns before and after the others' turns. The
    order is fixed, because a group frozen for four turns would be silent for too long.
    """
    backend, turns = Loopback(patience), list[dict[System, float]]()
    with ExitStack() as stack:
        groups: dict[System, Group] = {}
        for system in System:
            groups[system] = stack.enter_context(backend.group(system, Shape(), OPTIONS))
        for group in groups.values():
            send(group, signal.SIGSTOP)
            stack.callback(send, group, signal.SIGCONT)
        for _ in range(windows + 2):
            turns.append({system: turn(groups[system]) for system in System})
    return [
        before | {System.STOCK: (before[System.STOCK] + after[System.STOCK]) / 2}
        for before, after in pairwise(turns[1:])  # The first window is a warm-up.
    ]


def table(rows: list[dict[System, float]]) -> str:
    """Return medians, and the median ratio to stock torchrun within a window with 95 % interval."""
    lines = ["| system | step ms (median) | against stock torchrun | 95 % interval |", "| --- | --- | --- | --- |"]
    for system in System:
        ratios = sorted(row[system] / row[System.STOCK] - 1 for row in rows)
        low, high = interval(ratios)
        against = "" if system is System.STOCK else f"{statistics.median(ratios):+.2%} | {low:+.2%} to {high:+.2%}"
        name = "stock torchrun" if system is System.STOCK else system
        lines.append(f"| {name} | {statistics.median(row[system] for row in rows) * 1000:.3f} | {against or ' | '} |")
    return "\n".join(
        [
            *lines,
            "",
            f"{len(rows)} windows of {WINDOW} s; {os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}.",
        ]
    )


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the median's 95 % interval from order statistics (binomial, normal approximation)."""
    half = 0.98 * len(ordered) ** 0.5
    middle = len(ordered) / 2
    return ordered[max(0, int(middle - half))], ordered[min(len(ordered) - 1, int(middle + half))]


def main(arguments: list[str]) -> int:
    """Measure and print the table. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40, help="turns per group (default 40)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement to this file")
    parser.add_argument("--snapshots", action="store_true", help="measure copies into memory instead; see copies.py")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with --snapshots (default 5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per turn with --snapshots (default 20)")
    parser.add_argument("--states", type=read_numbers, default=[80e3, 100e6, 500e6], metavar="BYTES,...")
    parser.add_argument("--steps", type=read_numbers, default=[0.05, 0.5], metavar="SECONDS,...")
    add_table_option(parser, "overhead", " (snapshots with --snapshots)")
    options = parser.parse_args(arguments)
    if options.snapshots:
        return copies.main(options)
    rows = measure(options.windows, 60)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["window", *System])
            writer.writerows(
                [number, *(f"{row[system]:.6f}" for system in System)] for number, row in enumerate(rows, 1)
            )
    text = table(rows)
    print(text)
    if options.table:
        write_between(options.table, "overhead", text)
    return 0
