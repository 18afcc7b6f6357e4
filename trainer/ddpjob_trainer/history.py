"""What RUN/metrics.jsonl tells of a run, life by life."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_trainer.errors import TrainerError

METRICS = "metrics.jsonl"


@dataclass
class History:
    """Times in seconds since the first line."""

    title: str = ""
    lives: list[dict[str, Any]] = field(default_factory=list)
    """The start line of each life."""
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    """The step lines of each life."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    end: float = 0.0
    """Time of the last line."""

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(last sign of life, next step) around each restart."""
        found = []
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if before and after:
                found.append((before[-1]["time"], after[0]["time"]))
        return found

    @property
    def worlds(self) -> list[tuple[float, float, int]]:
        """(from, to, number of ranks) of each life that made a step."""
        return [(life["time"], steps[-1]["time"], int(life["world"])) for life, steps in zip(self.lives, self.steps, strict=True) if steps]


def read(run: Path) -> History:
    """Raises TrainerError when the run has no metrics."""
    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        raise TrainerError(f"{path} does not exist: name the folder of a run, the one that holds {METRICS}")
    folder = path.resolve().parent
    history = History(title=folder.parent.name if folder.name == "run" else folder.name)
    began = None
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # A writer was killed in the middle of this line.
        began = row["time"] if began is None else began
        row["time"] -= began
        history.end = max(history.end, row["time"])
        _sort_in(history, row)
    if not any(history.steps):
        raise TrainerError(f"{path} holds no step yet: let the run train for some steps first")
    return history


def _sort_in(history: History, row: dict[str, Any]) -> None:
    if row["event"] == "start":
        history.lives.append(row)
        history.steps.append([])
    elif row["event"] == "step" and history.steps and row["loss"] is not None:
        history.steps[-1].append(row)
    elif row["event"] == "eval":
        history.evaluations.append(row)
