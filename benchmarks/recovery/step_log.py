"""The step logs of steps.py: incarnations of the process group, their ranks and their steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass
class Incarnation:
    """One process group, with the step times of each rank in Unix seconds."""

    world: int
    steps: dict[int, list[float]] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    """The number of each rank's first step."""
    processor: dict[int, list[float]] = field(default_factory=dict)
    """CPU seconds of each rank at each step, if the script logs them."""
    moments: dict[int, dict[str, float]] = field(default_factory=dict)
    """When each rank's `launcher` and `process` began, torch was `imported` and the group was
    `formed`."""

    @property
    def formed(self) -> float | None:
        """When the last rank had taken its first step; None while a rank has not taken one."""
        if len(self.steps) < self.world:
            return None
        return max(times[0] for times in self.steps.values())

    @property
    def began(self) -> float:
        """When the first rank had taken its first step."""
        return min(times[0] for times in self.steps.values())

    @property
    def last(self) -> float:
        """Time of the last step of any rank."""
        return max(times[-1] for times in self.steps.values())

    @property
    def last_step(self) -> int:
        """The number of the last step of any rank."""
        return max(self.first[rank] + len(times) - 1 for rank, times in self.steps.items())


class StepLog:
    """The step logs of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incarnations: dict[int, Incarnation] = {}
        self._read: dict[Path, int] = {}

    def refresh(self) -> StepLog:
        """Read new lines. An incomplete line is left for the next call."""
        for path in self.folder.glob("steps-*.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            complete = text.rfind("\n") + 1
            self._read[path] = self._read.get(path, 0) + len(text[:complete].encode())
            for line in text[:complete].splitlines():
                self._take(json.loads(line))
        return self

    def _take(self, row: dict[str, Any]) -> None:
        incarnation = self.incarnations.setdefault(int(row["incarnation"]), Incarnation(int(row["world"])))
        # A quorum of torchft counts a new member from its second step on.
        incarnation.world = max(incarnation.world, int(row["world"]))
        if "moments" in row:
            incarnation.moments[int(row["rank"])] = row["moments"]
            return
        incarnation.steps.setdefault(int(row["rank"]), []).append(row["t"])
        incarnation.processor.setdefault(int(row["rank"]), []).append(row.get("cpu", 0.0))
        incarnation.nodes[int(row["rank"])] = str(row["node"])
        incarnation.first.setdefault(int(row["rank"]), int(row["step"]))

    @property
    def newest(self) -> Incarnation | None:
        """The most recently formed incarnation."""
        formed = [one for one in self.incarnations.values() if one.formed is not None]
        return max(formed, key=lambda one: one.began, default=None)

    def first_after(self, moment: float, world: int) -> Incarnation | None:
        """Return the first incarnation of `world` ranks after `moment` in which all ranks took a
        step.
        """
        complete = [one for one in self.incarnations.values() if one.world == world and one.formed is not None]
        return min((one for one in complete if one.began > moment), key=lambda one: one.formed or 0.0, default=None)

    def longest_gap(self, begin: float, end: float) -> float:
        """Return the longest time (s) without a step for any rank of the newest incarnation."""
        assert self.newest is not None
        gaps = [0.0]
        for times in self.newest.steps.values():
            inside = [begin, *(time for time in times if begin <= time <= end), end]
            gaps += [after - before for before, after in pairwise(inside)]
        return max(gaps)
