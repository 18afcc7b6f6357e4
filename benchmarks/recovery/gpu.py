"""Measures copies of the state from a GPU, and a restart from such a copy.

    python -m benchmarks.recovery gpu [--states 100e6,500e6] [--seconds 6] [--cpu]

On one node with one GPU, measures the cost of copies after each step and with "auto" (see
copies.py). Then kills the worker, and measures the pause and the number of repeated steps: once
with copies after each step, and once with a checkpoint every five seconds instead. The benchmark
takes at most five minutes, and prints "not run" if torch does not find a GPU. `--cpu` tests the
benchmark itself, with states in main memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.marks import add_table_option, write_between
from benchmarks.recovery.copies import EACH, NONE, Cost, compare, keeping, table
from benchmarks.recovery.groups import Shape
from benchmarks.recovery.trace.account import keep_account
from benchmarks.recovery.trace.events import Kind
from benchmarks.recovery.trace.report import read_numbers, size
from benchmarks.recovery.trace.systems import kill_worker

LIMIT_SECONDS = 300.0
SAVE_SECONDS = 5.0
PATIENCE = 60.0
ALONE = Shape(nodes=1, minimum=1)


@dataclass(frozen=True)
class Restart:
    """The restart of a killed worker. `pause` is in seconds."""

    state: int
    every: str
    pause: float
    repeated: int


def restart(state: int, step: float, every: str, *more: str) -> Restart:
    """Kill the only worker after the first checkpoint, and measure the time until its successor
    takes a step.
    """
    options = (f"--state={state}", f"--step={step}", f"--save-seconds={SAVE_SECONDS}", *more)
    with keeping(every, ALONE, options) as group:
        group.wait("a checkpoint", (group.folder / "checkpoint.pt").exists, PATIENCE)
        time.sleep(SAVE_SECONDS / 2)
        before, killed = set(group.log.incarnations), time.time()
        kill_worker(group.folder, next(iter(group.nodes)))
        group.wait("a step after the restart", lambda: set(group.log.refresh().incarnations) - before, PATIENCE)
        time.sleep(3 * step)
        found = keep_account(group.log.refresh().incarnations, [(killed, Kind.CRASH)], 0.0, time.time()).seen[0]
        # All steps up to the newest one are repeated, although the log contains only the first few.
        made = max(one.last_step for number, one in group.log.incarnations.items() if number in before)
        first = min(one.first[0] for number, one in group.log.incarnations.items() if number not in before)
        return Restart(state, every, found.pause, max(0, made - first + 1))


def measure(states: list[float], step: float, seconds: float, limit: float, *more: str) -> str:
    """Return the tables. Parts that might exceed the limit are skipped and listed."""
    ends, longest = time.monotonic() + limit, 0.0
    costs, restarts, left_out = list[Cost](), list[Restart](), list[str]()
    parts: list[tuple[str, Callable[[], None]]] = []
    for state in map(int, states):

        def add_restart(every: str, state: int = state) -> None:
            restarts.append(restart(state, step, every, *more))

        def add_costs(state: int = state) -> None:
            costs.extend(compare(state, step, ALONE, 1, seconds, *more))

        parts += [(f"{size(state)}: restart with {every}", partial(add_restart, every)) for every in (EACH, NONE)]
        parts.append((f"{size(state)}: copies", add_costs))
    for name, act in parts:
        began = time.monotonic()
        if began + longest > ends:
            left_out.append(name)
            continue
        print(name, file=sys.stderr, flush=True)
        act()
        longest = max(longest, time.monotonic() - began)
    lines = ["| state | snapshots | pause s | repeated steps |", "| --- | --- | --- | --- |"]
    lines += [f"| {size(one.state)} | {one.every} | {one.pause:.2f} | {one.repeated} |" for one in restarts]
    lines += ["", f"Left out, because {limit:g} s were over: {', '.join(left_out)}."] if left_out else []
    return "\n\n".join([table(costs, seconds), "\n".join(lines)])


def why_not() -> str:
    """Return why a GPU cannot be measured; empty if it can."""
    import torch

    return "" if torch.cuda.is_available() else "torch does not find a GPU on this machine"


def main(arguments: list[str]) -> int:
    """Measure and print the tables. Return 0, even without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=read_numbers, default=[100e6, 500e6], metavar="BYTES,...")
    parser.add_argument("--step", type=float, default=0.05, help="seconds per step (default 0.05)")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per turn (default 6)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, help="seconds for the whole benchmark (default 300)"
    )
    parser.add_argument("--cpu", action="store_true", help="measure without a GPU")
    add_table_option(parser, "snapshots-gpu")
    options = parser.parse_args(arguments)
    if not options.cpu and (reason := why_not()):
        print(f"not run: {reason}")
        return 0
    more = () if options.cpu else ("--cuda",)
    text = measure(options.states, options.step, options.seconds, options.limit, *more)
    print(text)
    if options.table:
        write_between(options.table, "snapshots-gpu", text)
    return 0
