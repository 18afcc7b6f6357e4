"""Measures the cost of copying the state into a node's memory.

    python -m benchmarks.recovery overhead --snapshots [--rounds 5] [--states ...] [--steps ...]

Compares `recovery.snapshots` auto and 1 with none, on two nodes, for each state size and step time.
Turns alternate between none, auto, none, 1, none, and so on. Each turn is a new group, which is
measured after a few steps and compared with the preceding and following turns without copies. A
group cannot be frozen between turns, because "auto" measures time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ddpjob_runtime import protocol

from benchmarks.marks import write_between
from benchmarks.recovery.groups import Fast, NotRecovered, Shape, training
from benchmarks.recovery.step_log import Incarnation
from benchmarks.recovery.trace.report import size
from benchmarks.recovery.trace.systems import TRAINING

NONE, AUTO, EACH = "none", "auto", "1"
"""Values of `recovery.snapshots`."""


class Keeping(Fast):
    """A group in Fast mode whose nodes keep the state in memory after every `every` steps."""

    script = TRAINING

    def __init__(self, folder: Path, shape: Shape, options: tuple[str, ...], every: str) -> None:
        super().__init__(folder, shape, options)
        shared = Path("/dev/shm")
        self._every = every
        self._memory = Path(tempfile.mkdtemp(prefix="ddpjob-copies-", dir=shared if shared.is_dir() else None))

    def _identity(self, pod: str) -> dict[str, str]:
        if self._every == NONE or pod.startswith("coordinator"):
            return super()._identity(pod)
        (memory := self._memory / pod).mkdir(exist_ok=True)
        kept = {"DDPJOB_SNAPSHOT_FOLDER": str(memory), "DDPJOB_SNAPSHOT_STEPS": self._every}
        return {**super()._identity(pod), **kept}

    def at_risk(self) -> int | None:
        """Return how many complete steps a loss would repeat, as recorded by the workers."""
        risk = self._report().get("progress", {}).get(protocol.AT_RISK)
        return None if risk is None else int(risk)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._memory, ignore_errors=True)


def keeping(every: str, shape: Shape, options: tuple[str, ...]) -> AbstractContextManager[Keeping]:
    """Provide a group that trains."""
    return training(lambda folder: Keeping(folder, shape, options, every))


@dataclass(frozen=True)
class Turn:
    """The result of a turn: seconds per step. `at_risk` is the number of steps between copies."""

    wall: float
    processor: float
    at_risk: int | None


def take_turn(every: str, shape: Shape, options: tuple[str, ...], seconds: float) -> Turn:
    """Let a group train for `seconds` seconds, and measure rank 0."""
    with keeping(every, shape, options) as group:
        began = time.time()
        time.sleep(seconds)
        newest = group.log.refresh().newest
        assert newest is not None
        return measured(newest, began, group.at_risk())


def measured(incarnation: Incarnation, began: float, at_risk: int | None) -> Turn:
    """Return the means of rank 0's steps since `began`. A median would hide rare copies.

    Raises NotRecovered if there are too few.
    """
    times, processor = incarnation.steps[0], incarnation.processor[0]
    inside = [number for number, when in enumerate(times) if when >= began]
    if len(inside) < 3:
        raise NotRecovered("fewer than three steps in a turn; increase --seconds")
    first, last = inside[0], inside[-1]
    steps = last - first
    return Turn((times[last] - times[first]) / steps, (processor[last] - processor[first]) / steps, at_risk)


@dataclass(frozen=True)
class Cost:
    """A turn with copies, compared with the turns without copies before and after it."""

    state: int
    step: float
    every: str
    turn: Turn
    without: Turn

    @property
    def wall(self) -> float:
        """Additional time of a step, as a share of its time without copies."""
        return self.turn.wall / self.without.wall - 1

    @property
    def processor(self) -> float:
        """Additional CPU time of rank 0, as a share of a step's time without copies."""
        return (self.turn.processor - self.without.processor) / self.without.wall


def compare(state: int, step: float, shape: Shape, rounds: int, seconds: float, *more: str) -> list[Cost]:
    """Return the costs of auto and of 1 in each round."""
    options = (f"--state={state}", f"--step={step}", "--save-seconds=1000000", *more)
    settings = [NONE, *[every for _ in range(rounds) for copied in (AUTO, EACH) for every in (copied, NONE)]]
    turns = [take_turn(every, shape, options, seconds) for every in settings]
    return [
        Cost(state, step, settings[number], turns[number], _between(turns[number - 1], turns[number + 1]))
        for number in range(1, len(turns), 2)
    ]


def _between(before: Turn, after: Turn) -> Turn:
    return Turn((before.wall + after.wall) / 2, (before.processor + after.processor) / 2, None)


def table(costs: Sequence[Cost], seconds: float) -> str:
    """Return medians, and the worst round."""
    lines = [
        "| state | step s | snapshots | steps at risk | step ms without | longer by, median / worst |"
        " more CPU time, median / worst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[int, float, str], list[Cost]] = {}
    for cost in costs:
        groups.setdefault((cost.state, cost.step, cost.every), []).append(cost)
    for (state, step, every), own in groups.items():
        risks = [cost.turn.at_risk for cost in own if cost.turn.at_risk is not None]
        cells = [size(state), f"{step:g}", every, f"{statistics.median(risks):g}" if risks else "unknown"]
        cells.append(f"{1000 * statistics.median(cost.without.wall for cost in own):.1f}")
        for figures in ([cost.wall for cost in own], [cost.processor for cost in own]):
            cells.append(f"{statistics.median(figures):+.2%} / {max(figures):+.2%}")
        lines.append(f"| {' | '.join(cells)} |")
    rounds = max((len(own) for own in groups.values()), default=0)
    load = f"load average {os.getloadavg()[0]:.1f}"
    lines += ["", f"{rounds} rounds, turns of {seconds:g} s; {os.cpu_count()} cores; {load}. Shares of a step's time."]
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Measure the cost on this machine's CPUs, and print the table. Return 0."""
    costs = [
        cost
        for state in options.states
        for step in options.steps
        for cost in compare(int(state), step, Shape(), options.rounds, options.seconds)
    ]
    text = table(costs, options.seconds)
    print(text)
    if options.table:
        write_between(options.table, "snapshots", text)
    return 0
