"""The history of a run by incarnation, as recorded in RUN/metrics.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_pod.metrics_log import METRICS

from ddpjob_trainer.errors import TrainerError


@dataclass
class History:
    """A run's history. Times are in seconds since the first line."""

    title: str = ""
    incarnations: list[dict[str, Any]] = field(default_factory=list)
    """The start line of each incarnation."""
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    """The step lines of each incarnation."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    end: float = 0.0
    """Time of the last line."""

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(time of the last step, time of the next step) around each restart."""
        found = []
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if before and after:
                found.append((before[-1]["time"], after[0]["time"]))
        return found

    @property
    def worlds(self) -> list[tuple[float, float, int]]:
        """(from, to, number of ranks) of each incarnation that took a step."""
        return [
            (incarnation["time"], steps[-1]["time"], int(incarnation["world"]))
            for incarnation, steps in zip(self.incarnations, self.steps, strict=True)
            if steps
        ]


def read(run: Path) -> History:
    """Return the history of a run, given its file, its folder or its checkpoint folder.

    Raises TrainerError if the run has no metrics.
    """
    path = run / METRICS if run.is_dir() else run
    if run.is_dir() and not path.is_file() and (run / "run" / METRICS).is_file():
        path = run / "run" / METRICS  # `run` is a checkpoint.dir.
    if not path.is_file():
        raise TrainerError(
            f"{path} does not exist; name the run folder, which contains {METRICS} and which training names in its "
            "first line"
        )
    folder = path.resolve().parent
    history = History(title=folder.parent.name if folder.name == "run" else folder.name)
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
    if not any(history.steps):
        raise TrainerError(f"{path} has no steps yet; wait until the run has trained some steps")
    return history


def _sort_in(history: History, row: dict[str, Any]) -> None:
    if row["event"] == "start":
        history.incarnations.append(row)
        history.steps.append([])
    elif row["event"] == "step" and history.steps and row.get("loss") is not None:
        history.steps[-1].append(row)
    elif row["event"] == "eval":
        history.evaluations.append(row)
