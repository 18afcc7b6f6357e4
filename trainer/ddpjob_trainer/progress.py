"""Where training stands, told to three places: RUN/metrics.jsonl, the terminal, the job's coordinator."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob_trainer.coordinator import CoordinatorLink, wall_clock
from ddpjob_trainer.display import Display, Status, duration, open_display
from ddpjob_trainer.evaluate import Evaluation
from ddpjob_trainer.group import Group

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Plan:
    """The whole of a training: epochs, steps in all, training samples in an epoch; and the round of restarts it is in."""

    epochs: int
    steps: int
    samples: int
    round: int


class MetricsLog:
    """Appends JSON lines to RUN/metrics.jsonl, which outlives restarts."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS
        cut = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file = path.open("a", encoding="utf-8")
        if cut:  # A writer was killed in the middle of a line.
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """One line: what happened, when, and its numbers (those that are not finite as null: JSON knows no NaN)."""
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()}
        self._file.write(json.dumps({"event": event, "time": wall_clock()} | finite) + "\n")
        self._file.flush()


class Progress:
    """Measures speed and tells. `writes`: this rank keeps the metrics log; rank 0 also prints and posts."""

    def __init__(self, plan: Plan, run_dir: Path, group: Group, *, writes: bool, interval: float) -> None:
        self._plan, self._group = plan, group
        self._log = MetricsLog(run_dir) if writes else None
        self._display: Display = open_display(group.rank == 0, interval)
        self._link = CoordinatorLink.from_env() if group.rank == 0 else None
        self._window_began = time.perf_counter()
        self._waited = 0.0
        self._last: Status | None = None
        self._evaluation: Evaluation | None = None

    def start(self, step: int, epoch: int) -> None:
        """A life of the job begins after `step` steps."""
        self._write("start", step=step, epoch=epoch, world=self._group.world)
        where = f"going on after step {step} of {self._plan.steps}, in epoch {epoch}" if step else f"{self._plan.steps} steps to do"
        self._display.note(f"training on {self._group.world} rank(s): {where}")

    def restart_clock(self) -> None:
        """Leave what has passed since the last report out of the speed (evaluation, checkpoint)."""
        self._window_began, self._waited = time.perf_counter(), 0.0

    def waited(self, seconds: float) -> None:
        """So long did this rank wait for its batch."""
        self._waited += seconds

    def report(self, *, epoch: int, step: int, loss: float, learning_rate: float, samples: int, samples_left: int) -> None:
        """`samples` were trained on since the last report, with mean loss `loss`."""
        elapsed = max(1e-9, time.perf_counter() - self._window_began)
        speed = samples / elapsed
        if self._last is not None and self._last.samples_per_second > 0:
            smooth = 0.7 * self._last.samples_per_second + 0.3 * speed
        else:
            smooth = speed
        accuracy = self._evaluation.accuracy if self._evaluation else None
        status = Status(
            epoch=epoch,
            epochs=self._plan.epochs,
            step=step,
            steps=self._plan.steps,
            loss=loss,
            learning_rate=learning_rate,
            samples_per_second=smooth,
            eta=samples_left / smooth,
            data_wait=min(1.0, self._waited / elapsed),
            accuracy=accuracy,
        )
        self._last = status
        self._write(
            "step",
            epoch=epoch,
            step=step,
            loss=loss,
            lr=learning_rate,
            samplesPerSecond=round(speed, 2),
            eta=round(status.eta, 1),
            dataWait=round(status.data_wait, 4),
        )
        self._display.show(status)
        self._post(status)
        self.restart_clock()

    def evaluated(self, epoch: int, step: int, evaluation: Evaluation) -> None:
        """The test set's result after epoch `epoch`."""
        self._evaluation = evaluation
        self._write("eval", epoch=epoch, step=step, loss=evaluation.loss, accuracy=evaluation.accuracy)
        self._display.note(f"epoch {epoch}/{self._plan.epochs}: test accuracy {evaluation.accuracy:.2%}, test loss {evaluation.loss:.4f}")
        if self._last is not None:
            self._post(self._last)

    def checkpoint(self, step: int, seconds: float) -> None:
        """A checkpoint was saved."""
        self._write("checkpoint", step=step, seconds=round(seconds, 4))

    def stopped(self, step: int) -> None:
        """All ranks agreed to stop after `step` steps."""
        self._write("stop", step=step)
        self._display.note(f"stopped by SIGTERM after step {step}; a checkpoint is saved")

    def end(self, step: int, seconds: float) -> None:
        """Training is complete."""
        self._write("end", step=step)
        accuracy = f", test accuracy {self._evaluation.accuracy:.2%}" if self._evaluation else ""
        self._display.note(f"done: {self._plan.epochs} epochs, {step} steps{accuracy}, {duration(seconds)} in this life of the job")

    def close(self) -> None:
        """Post what is left and leave the terminal alone."""
        self._display.close()
        if self._link is not None:
            self._link.close()

    def _write(self, event: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.write(event, round=self._plan.round, **fields)

    def _post(self, status: Status) -> None:
        if self._link is None:
            return
        metrics = {"learningRate": status.learning_rate, "dataWait": round(status.data_wait, 4)}
        if self._evaluation is not None:
            metrics |= {"accuracy": self._evaluation.accuracy, "testLoss": self._evaluation.loss}
        self._link.post(
            {
                "epoch": status.epoch,
                "epochs": status.epochs,
                "step": status.step,
                "steps": status.steps,
                "loss": status.loss,
                "samplesPerSecond": round(status.samples_per_second, 2),
                "eta": round(status.eta, 1),
                "metrics": metrics,
            }
        )
