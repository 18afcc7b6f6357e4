"""Computes the effective training time of a large job from the measured parts of a trace.

Effective time is the share of a job's time in which new steps are taken:

    E = (1 - c) * exp(-L * (p + r * s)),    L = nodes / time between the failures of one node

`c` is the share of a step that the system costs (copies, checkpoints, agreement). `p` is the mean
pause per failure, `r` the mean number of repeated steps, and `s` the time of a step; times are in
seconds. Failures are a Poisson process with rate L. If one occurs during a pause, the pause starts
over. A pause of d = p + r * s therefore takes (exp(L * d) - 1) / L on average until it ends without
another failure. Between two pauses, 1 / L of new work is done. The quotient is exp(-L * d).

p, r and c were measured with two nodes. The result does not include costs that grow with the number
of nodes, such as forming a larger group or a slower first step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.recovery.trace.events import Kind
from benchmarks.recovery.trace.play import Run
from benchmarks.recovery.trace.report import accounts, by_group, ideal_gap, size

NODES = (1000, 2000, 4000, 8000, 16_000)
NODE_DAYS = 264.0
"""Mean days between two failures of one node: 419 unexpected interruptions in 54 days on 2,048
nodes of eight GPUs (Llama 3, table 5).
"""
DAY = 86_400.0
FORMULA = """\
Effective time, the share of time in which new steps are taken, follows from the mean pause `p`, the mean
number of repeated steps `r`, the time of a step `s` and the share `c` of a step that a system costs:

```
E = (1 - c) * exp(-L * (p + r * s)),    L = nodes / time between failures of one node
```

A failure during a pause restarts it. The time to form a group of more than two nodes is not
included."""


@dataclass(frozen=True)
class Parts:
    """The measured parts of a system."""

    pause: float
    """Mean seconds per failure."""
    repeated: float
    """Mean number of repeated steps per failure."""
    cost: float
    """Share of a step that the system costs, from 0 to 1."""
    step: float
    """Time of a step in seconds."""

    def effective(self, nodes: int, node_days: float) -> float:
        """Return the share of time in which new steps are taken."""
        rate = nodes / (node_days * DAY)
        return (1 - self.cost) * math.exp(-rate * (self.pause + self.repeated * self.step))


def parts_of(runs: Sequence[Run], ideal: float) -> Parts | None:
    """Return a system's measured parts; None without a failure. Joins are not failures."""
    found = accounts(runs)
    seen = [one for account in found for one in account.seen if one.kind is not Kind.JOIN]
    if not seen:
        return None
    mean = statistics.fmean(account.mean_gap for account in found)
    return Parts(
        statistics.fmean(one.pause for one in seen), statistics.fmean(one.repeated for one in seen),
        max(0.0, 1 - ideal / mean) if mean else 0.0, ideal,
    )  # fmt: skip


def table(runs: Sequence[Run], node_days: float) -> str:
    """Return the effective time of each system at each number of nodes."""
    heads = ["state", "system", "mean pause s", "mean repeated steps", "step s", "cost of a step"]
    heads += [f"{nodes:,} nodes" for nodes in NODES]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for (state, _), of_group in by_group(runs).items():
        ideal = ideal_gap(of_group)
        for system, own in of_group.items():
            if (parts := parts_of(own, ideal)) is None:
                continue
            cells = [size(state), system, f"{parts.pause:.2f}", f"{parts.repeated:.1f}", f"{parts.step:.3f}"]
            cells += [f"{parts.cost:.1%}", *(f"{parts.effective(nodes, node_days):.2%}" for nodes in NODES)]
            lines.append(f"| {' | '.join(cells)} |")
    hours = [24 * node_days / nodes for nodes in (NODES[0], NODES[-1])]
    rate = (
        f"One failure per node every {node_days:g} days is one failure of the job every {hours[0]:.1f} h "
        f"({NODES[0]:,} nodes) to {hours[1]:.1f} h ({NODES[-1]:,} nodes)."
    )
    return "\n".join([FORMULA, "", *lines, "", rate])
