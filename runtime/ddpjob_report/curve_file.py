"""Keeps reported figures in the checkpoint folder, for `ddpjob plot` and the dashboard.

The built-in trainer writes the same lines to the same file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_report import link

NAME = "run/metrics.jsonl"
SHORTEST_PAUSE = 0.5
"""How many seconds are between two lines at the beginning."""
LINES_PER_LIFE = 2000
"""A pause is the script's running time divided by this, once that exceeds SHORTEST_PAUSE. A week
takes some 15,000 lines."""
_NOT_OF_A_STEP = ("epochs", "steps", "eta", "metrics", "accuracy")


class CurveFile(link.Outbox):
    """Writes independently of what is sent, so that a folder that hangs costs only its lines."""

    def __init__(self, folder: Path) -> None:
        self._path, self._began = folder / NAME, time.monotonic()
        super().__init__("ddpjob-curves")

    def _work(self) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            # "a" with one line per write: a killed writer loses only the last line.
            with self._path.open("ab", buffering=0) as file:
                if file.tell() and not _ends_with_newline(self._path):
                    file.write(b"\n")
                self._write_lines(file)
        except OSError as error:
            sys.stderr.write(f"ddpjob_report: {self._path}: {error.strerror}: no curves are kept from here on\n")

    def _write_lines(self, file: Any) -> None:
        started = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: "step" in self._pending or self._closing)
                figures, self._pending = self._pending, {}
            if "step" not in figures:
                return
            if figures["step"] is not None:
                step = int(figures["step"])
                if not started:
                    started = True
                    file.write(_line("start", {"step": step, "world": int(os.environ.get("WORLD_SIZE", "1"))}))
                file.write(b"".join(_lines_of(step, figures)))
            with self._changed:
                pause = max(SHORTEST_PAUSE, (time.monotonic() - self._began) / LINES_PER_LIFE)
                self._changed.wait_for(lambda: self._closing, timeout=pause)


def _lines_of(step: int, figures: dict[str, Any]) -> list[bytes]:
    """Return the lines of a step, and of its accuracy as an evaluation."""
    metrics = figures.get("metrics", {})
    known = {name: value for name, value in {**metrics, **figures}.items() if name not in _NOT_OF_A_STEP}
    lines = [_line("step", {"loss": None, **known, "step": step})]
    if "accuracy" in metrics:
        lines.append(_line("eval", {"step": step, "accuracy": metrics["accuracy"]}))
    return lines


def _line(event: str, fields: dict[str, Any]) -> bytes:
    # The line's own names come last, because a metric may have any name.
    return (json.dumps({**fields, "event": event, "time": round(time.time(), 3)}) + "\n").encode()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


_file: CurveFile | None = None


def add(figures: dict[str, Any]) -> None:
    """Keep the figures, if this is rank 0 of a job that has a checkpoint folder."""
    global _file
    if _file is None:
        folder = JobEnvironment.read().checkpoint_dir
        # Not created: without the volume's mount it would be on the node's own disk.
        if not folder or not Path(folder).is_dir() or not link.is_reporting():
            return
        _file = CurveFile(Path(folder))
    _file.add(figures)


def close() -> None:
    """Write the remaining figures. Nothing is written afterwards."""
    if _file is not None:
        _file.close()
