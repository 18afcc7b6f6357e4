"""Writes reported figures to a file in the checkpoint folder, from which curves are drawn."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.metrics_log import METRICS, MetricsLog
from ddpjob_pod.outbox import INTERVAL_SECONDS, Outbox

from ddpjob_report import link

FOLDER = "run"
"""Name of the subfolder of the checkpoint folder that holds the curves."""
SHORTEST_PAUSE = 0.5
"""Minimum pause between two lines, in seconds. The first lines are this far apart."""
LINES_PER_LIFE = 2000
"""The pause between two lines is the time since the script began, divided by this number, but at
least SHORTEST_PAUSE. A week of training writes about 15,000 lines.
"""
_NOT_OF_A_STEP = ("epochs", "steps", "eta", "metrics", "accuracy")


class CurveFile(Outbox):
    """Writes the curves in its own thread. If the folder hangs, only lines of the file are lost,
    and posts to the coordinator continue.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder / FOLDER, time.monotonic()
        super().__init__("ddpjob-curves")

    def _work(self) -> None:
        # Do not create the folder. If its volume were not mounted, the new folder would be on the
        # node's own disk.
        while not self._folder.parent.is_dir():
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, timeout=INTERVAL_SECONDS):
                    return
        try:
            self._folder.mkdir(exist_ok=True)
            log = MetricsLog(self._folder)
        except OSError as error:
            where = self._folder / METRICS
            sys.stderr.write(f"ddpjob_report: cannot write to {where} ({error.strerror}), so no curves are kept\n")
        else:
            self._write_lines(log)

    def _write_lines(self, log: MetricsLog) -> None:
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
                    log.write("start", step=step, world=int(os.environ.get("WORLD_SIZE", "1")))
                _write_step(log, step, figures)
            with self._changed:
                pause = max(SHORTEST_PAUSE, (time.monotonic() - self._began) / LINES_PER_LIFE)
                self._changed.wait_for(lambda: self._closing, timeout=pause)


def _write_step(log: MetricsLog, step: int, figures: dict[str, Any]) -> None:
    """Write the line for a step. If the figures contain an accuracy, also write a line with the
    result of an evaluation.
    """
    metrics = figures.get("metrics", {})
    known = {name: value for name, value in {**metrics, **figures}.items() if name not in _NOT_OF_A_STEP}
    log.write("step", **{**known, "step": step})
    if "accuracy" in metrics:
        log.write("eval", step=step, accuracy=metrics["accuracy"])


_file: CurveFile | None = None


def add(figures: dict[str, Any]) -> None:
    """Queue the figures for the curves, if this is rank 0 of a job with a checkpoint folder."""
    global _file
    if _file is None:
        folder = JobEnvironment.read().checkpoint_dir if link.is_reporting() else ""
        if not folder:
            return
        _file = CurveFile(Path(folder))
    _file.add(figures)


def close() -> None:
    """Write the figures that are still queued. Later figures are not written."""
    if _file is not None:
        _file.close()
