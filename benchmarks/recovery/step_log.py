"""What the ranks of steps.py wrote: lives, who had which rank, and when all ranks had made their first step of a life."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass
class Life:
    """One group of ranks: step times of each rank, seconds since 1970."""

    world: int
    steps: dict[int, list[float]] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    """rank -> number of the first step it made"""

    @property
    def formed(self) -> float | None:
        """When the last of all ranks had made its first step; None as long as one has not."""
        if len(self.steps) < self.world:
            return None
        return max(times[0] for times in self.steps.values())

    @property
    def began(self) -> float:
        """When the first rank had made its first step."""
        return min(times[0] for times in self.steps.values())

    @property
    def last(self) -> float:
        """The last step of any rank."""
        return max(times[-1] for times in self.steps.values())


class StepLog:
    """The step logs of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lives: dict[int, Life] = {}
        self._read: dict[Path, int] = {}

    def refresh(self) -> StepLog:
        """Read what is new. A line that is not complete yet is left for the next time."""
        for path in self.folder.glob("steps-*.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            complete = text.rfind("\n") + 1
            self._read[path] = self._read.get(path, 0) + len(text[:complete].encode())
            for line in text[:complete].splitlines():
                self._take(json.loads(line))
        return self

    def _take(self, row: dict[str, float]) -> None:
        life = self.lives.setdefault(int(row["life"]), Life(int(row["world"])))
        life.steps.setdefault(int(row["rank"]), []).append(row["t"])
        life.nodes[int(row["rank"])] = str(row["node"])
        life.first.setdefault(int(row["rank"]), int(row["step"]))

    @property
    def newest(self) -> Life | None:
        """The life that was formed last."""
        formed = [life for life in self.lives.values() if life.formed is not None]
        return max(formed, key=lambda life: life.began, default=None)

    def first_step_after(self, moment: float, world: int) -> float | None:
        """When all ranks of a life of this world that began after `moment` had made their first step."""
        times = [life.formed for life in self.lives.values() if life.world == world and life.began > moment]
        return min((time for time in times if time is not None), default=None)

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time without a step of any one rank between the two moments, in the life that is newest."""
        assert self.newest is not None
        gaps = [0.0]
        for times in self.newest.steps.values():
            inside = [begin, *(time for time in times if begin <= time <= end), end]
            gaps += [after - before for before, after in pairwise(inside)]
        return max(gaps)
