"""The history of a run by incarnation, as recorded in RUN/metrics.jsonl."""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpjob_pod.metrics_log import METRICS

from ddpjob_trainer.errors import TrainerError

_OF_EVERY_JOB = ("run", "checkpoints", "")
"""Folder names that occur in every job. Such names do not distinguish runs, so they are not used as
titles.
"""


@dataclass
class History:
    """A run's history. Times are in seconds since the first line in metrics.jsonl."""

    title: str = ""
    incarnations: list[dict[str, Any]] = field(default_factory=list)
    """The first line of each incarnation."""
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    """The lines about steps, in one list for each incarnation."""
    evaluated: list[list[dict[str, Any]]] = field(default_factory=list)
    """The lines about evaluations, in one list for each incarnation."""
    end: float = 0.0
    """The time of the last line."""

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines about evaluations in all incarnations."""
        return [row for rows in self.evaluated for row in rows]

    @property
    def restarts(self) -> int:
        """Number of restarts.

        If a later job continues in the folder, its first start does not count as a restart.
        """
        return sum(map(_is_restart, self.incarnations, self.incarnations[1:]))

    @property
    def gaps(self) -> list[tuple[float, float, bool]]:
        """The gaps between incarnations that took steps.

        Each entry is (time of the last step before the gap, time of the first step after the gap,
        whether the incarnation after the gap is a restart).
        """
        found = []
        parts = list(zip(self.incarnations, self.steps, strict=True))
        for (first, before), (second, after) in pairwise(parts):
            if before and after:
                found.append((before[-1]["time"], after[0]["time"], _is_restart(first, second)))
        return found

    @property
    def worlds(self) -> list[tuple[float, float, int]]:
        """The incarnations that took a step.

        Each entry is (time of the start, time of the last step, number of ranks).
        """
        return [
            (incarnation["time"], steps[-1]["time"], int(incarnation["world"]))
            for incarnation, steps in zip(self.incarnations, self.steps, strict=True)
            if steps
        ]


def _is_restart(before: dict[str, Any], start: dict[str, Any]) -> bool:
    return bool(before.get("run") == start.get("run"))


def read(run: Path) -> History:
    """Return the history of a run.

    `run` is the run's metrics file, its folder, or its checkpoint folder. Raises TrainerError if
    the run has no metrics.
    """
    path = run / METRICS if run.is_dir() else run
    if run.is_dir() and not path.is_file():
        # `run` is a checkpoint.dir, or the `checkpoints` folder in a run folder.
        folder = run.resolve()
        near = [folder / "run", *([folder.parent] if folder.name == "checkpoints" else [])]
        path = next((place / METRICS for place in near if (place / METRICS).is_file()), path)
    if not path.is_file():
        raise TrainerError(
            f"{path} does not exist; pass the run folder, which contains {METRICS}; training prints the folder in its "
            "first line"
        )
    folder = path.resolve().parent
    named = next((place for place in (folder, *folder.parents) if place.name not in _OF_EVERY_JOB), folder)
    history = History(title=named.name)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TrainerError(f"{path} cannot be read: {error.strerror}") from error
    began = None
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # A writer was killed in the middle of this line.
        if not isinstance(row, dict) or not {"event", "time"} <= row.keys():
            continue  # The line is not from a run's file.
        began = row["time"] if began is None else began
        row["time"] -= began
        history.end = max(history.end, row["time"])
        _sort_in(history, row)
    _place_epochs(history)
    if not any(history.steps):
        raise TrainerError(f"{path} has no steps yet; wait until the run has trained some steps")
    return history


def _sort_in(history: History, row: dict[str, Any]) -> None:
    if row["event"] == "start":
        history.incarnations.append(row)
        history.steps.append([])
        history.evaluated.append([])
    elif row["event"] == "step" and history.steps and "step" in row:
        history.steps[-1].append(row)
    elif row["event"] == "eval" and history.steps and "step" in row:
        history.evaluated[-1].append(row)


def _place_epochs(history: History) -> None:
    """Give each line its position in epochs: a step in the middle of the second epoch is at 1.5.

    A line without an epoch gets the position of the last step before it. Fractional epochs, as
    reported by Hugging Face's Trainer, are used as they are.
    """
    rows = [row for part in history.steps for row in part if isinstance(row.get("epoch"), (int, float))]
    known = {row["step"]: row["epoch"] for row in rows}
    steps = sorted(known)
    if all(epoch == int(epoch) for epoch in known.values()):
        known = _spread(steps, known)
    for part in (*history.steps, *history.evaluated):
        for row in part:
            at = bisect.bisect_right(steps, row["step"]) - 1
            if at >= 0:
                row["epochs"] = known[steps[at]]


def _spread(steps: list[int], epochs: dict[int, float]) -> dict[int, float]:
    """Return each step's position in epochs, with the steps of each epoch spread evenly.

    `epochs` maps each step to its epoch. The last epoch may be unfinished, so it is assumed to be
    at least as long as the previous epoch.
    """
    ends: dict[float, int] = {}
    for step in steps:
        ends[epochs[step]] = step
    order, length = sorted(ends), 1
    begin = 0 if order[:1] == [1] else min(steps, default=1) - 1
    spans: dict[float, tuple[int, int]] = {}
    for epoch in order:
        length = max(ends[epoch] - begin, length if epoch == order[-1] else 1, 1)
        spans[epoch], begin = (begin, length), ends[epoch]
    return {
        step: epoch - 1 + min(1.0, max(0.0, (step - spans[epoch][0]) / spans[epoch][1]))
        for step, epoch in epochs.items()
    }
