"""Where training stands, told to RUN/metrics.jsonl, the terminal, the job's coordinator, and the sinks that are asked for."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_trainer.atomic import write_all
from ddpjob_trainer.coordinator import CoordinatorLink, wall_clock
from ddpjob_trainer.display import Display, Status, duration, open_display
from ddpjob_trainer.group import Group
from ddpjob_trainer.history import METRICS
from ddpjob_trainer.metrics.files import FOLDER, EvaluationFiles
from ddpjob_trainer.metrics.tally import Evaluation
from ddpjob_trainer.sinks import Run, Sinks, open_sinks
from ddpjob_trainer.sinks.base import check_report

if TYPE_CHECKING:
    from ddpjob_trainer.config import Config


@dataclass(frozen=True)
class Plan:
    """The whole of a training: epochs, steps in all, training samples in an epoch; and the round of restarts it is in."""

    epochs: int
    steps: int
    samples: int
    round: int


class MetricsLog:
    """Appends JSON lines to RUN/metrics.jsonl, which outlives restarts. `lives`: how many it tells of so far."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS
        content = path.read_bytes() if path.exists() else b""
        self.lives = content.count(b'{"event": "start"')
        self._path, self._file = path, path.open("ab", buffering=0)
        self._cut = bool(content) and not content.endswith(b"\n")  # A writer was killed in the middle of a line.
        self._warned = False

    def write(self, event: str, **fields: Any) -> None:
        """One line: what happened, when, and its numbers (those that are not finite as null: JSON knows no NaN).

        On a full disk lines are lost, told of once, and training goes on.
        """
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()}
        line = json.dumps({"event": event, "time": wall_clock()} | finite) + "\n"
        try:
            write_all(self._file, (("\n" if self._cut else "") + line).encode())
            self._cut = False
        except OSError as error:
            self._cut = True
            if not self._warned:
                print(f"warning: {self._path} cannot be written ({error.strerror}): lines are lost", file=sys.stderr, flush=True)
            self._warned = True


class Progress:
    """Measures speed and tells. `writes`: this rank keeps the metrics log; rank 0 also prints, posts, and feeds the sinks."""

    def __init__(self, plan: Plan, config: Config, group: Group, *, writes: bool, class_names: Sequence[str] | None = None) -> None:
        """Raises ConfigError when a sink is asked for that cannot be had."""
        check_report(config.report)
        self._plan, self._config, self._group = plan, config, group
        self._log = MetricsLog(config.run_dir) if writes else None
        self.restarts = max(plan.round, self._log.lives if self._log else 0)
        self._display: Display = open_display(group.rank == 0, config.train.print_seconds, config.run_dir.resolve().name)
        self._link = CoordinatorLink.from_env() if group.rank == 0 else None
        self._sinks = Sinks([])
        self._files = EvaluationFiles(config.run_dir / FOLDER, config.eval, class_names) if group.rank == 0 else None
        self._window_began = time.perf_counter()
        self._waited = 0.0
        self._last: Status | None = None
        self._evaluation: Evaluation | None = None
        self._checkpoint_time: float | None = None

    def start(self, step: int, epoch: int, onlookers: int = 0) -> None:
        """A life of the job begins after `step` steps; `onlookers` ranks have no samples."""
        self._write("start", step=step, epoch=epoch, world=self._group.world, restarts=self.restarts)
        where = f"going on after step {step} of {self._plan.steps}, in epoch {epoch}" if step else f"{self._plan.steps} steps to do"
        self._display.note(f"training on {self._group.world} rank(s): {where}")
        if onlookers:
            self._display.note(
                f"warning: {onlookers} of them look on: a global batch has no more parts to share out (data.micro_batches, data.batch);"
                " fewer ranks are as fast"
            )
        if self._group.rank == 0:
            run = Run(self._config.run_dir, self._config.train.name, self._config.flat(), step, self.restarts)
            self._sinks = open_sinks(self._config.report, run)
            self._sinks.write(step, {"train/world_size": self._group.world, "train/restarts": self.restarts})

    def restart_clock(self) -> None:
        """Leave what has passed since the last report out of the speed (evaluation, checkpoint)."""
        self._window_began, self._waited = time.perf_counter(), 0.0

    def waited(self, seconds: float) -> None:
        """So long did this rank wait for its batch."""
        self._waited += seconds

    def report(
        self,
        *,
        epoch: int,
        step: int,
        loss: float,
        learning_rate: float,
        samples: int,
        samples_left: int,
        gradient_norm: float | None = None,
        skipped_steps: int = 0,
        corrupt_images: int = 0,
    ) -> None:
        """`samples` were trained on since the last report, with mean loss `loss`."""
        elapsed = max(1e-9, time.perf_counter() - self._window_began)
        speed = samples / elapsed
        before = self._last.samples_per_second if self._last is not None else 0.0
        smooth = 0.7 * before + 0.3 * speed if before > 0 else speed
        status = Status(
            epoch=epoch,
            epochs=self._plan.epochs,
            step=step,
            steps=self._plan.steps,
            loss=loss,
            learning_rate=learning_rate,
            samples_per_second=smooth,
            eta=samples_left / smooth if smooth > 0 else 0.0,
            data_wait=min(1.0, self._waited / elapsed),
            accuracy=self._evaluation.accuracy if self._evaluation else None,
            gradient_norm=gradient_norm,
            skipped_steps=skipped_steps,
            corrupt_images=corrupt_images,
            world=self._group.world,
            restarts=self.restarts,
            checkpoint_time=self._checkpoint_time,
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
            **_odd(status),
        )
        self._display.show(status)
        self._post(status)
        self._sinks.write(step, _values(status))
        self.restart_clock()

    def evaluated(self, epoch: int, step: int, evaluation: Evaluation) -> None:
        """The test set's result after epoch `epoch`."""
        self._evaluation = evaluation
        lost = {"unreadable": evaluation.unreadable} if evaluation.unreadable else {}
        self._write("eval", epoch=epoch, step=step, **evaluation.scalars(), **lost)
        curve = f", average precision {evaluation.curves.macro:.4f}" if evaluation.curves else ""
        results = f"test accuracy {evaluation.accuracy:.2%}, test loss {evaluation.loss:.4f}{curve}"
        self._display.note(f"epoch {epoch}/{self._plan.epochs}: {results}")
        if evaluation.nonfinite:
            self._display.note(f"warning: the model's output is not finite for {evaluation.nonfinite} of {evaluation.samples} test samples")
        if self._last is not None:
            self._post(self._last)
        self._sinks.write(step, {f"eval/{name}": value for name, value in evaluation.scalars().items()} | {"eval/epoch": epoch})
        if self._files is not None:
            try:
                self._files.write(f"epoch-{epoch:03}", evaluation, epoch=epoch, step=step)
            except OSError as error:
                where = error.filename or self._config.run_dir / FOLDER
                self._display.note(f"warning: {where} cannot be written ({error.strerror or error}): the files of this evaluation are lost")

    def checkpoint(self, step: int, seconds: float) -> None:
        """A checkpoint is on disk."""
        self._checkpoint_time = wall_clock()
        self._write("checkpoint", step=step, seconds=round(seconds, 4))
        self._sinks.write(step, {"checkpoint/time": self._checkpoint_time, "checkpoint/seconds": seconds})

    def skipped(self, step: int, text: str, samples: dict[int, list[int]]) -> None:
        """Step `step` was left out on all ranks; `samples` by rank that saw a loss that is not finite."""
        self._write("skipped", step=step, samples=samples)
        self._display.note(f"warning: {text}")

    def stopped(self, step: int) -> None:
        """All ranks agreed to stop after `step` steps."""
        self._write("stop", step=step)
        self._display.note(f"stopped by SIGTERM after step {step}; a checkpoint is saved")
        self._sinks.close(complete=False)

    def end(self, step: int, seconds: float) -> None:
        """Training is complete."""
        self._write("end", step=step)
        accuracy = f", test accuracy {self._evaluation.accuracy:.2%}" if self._evaluation else ""
        self._display.note(f"done: {self._plan.epochs} epochs, {step} steps{accuracy}, {duration(seconds)} in this life of the job")
        self._sinks.close(complete=True)
        if self._files is not None:
            self._files.wait()

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
        metrics = {"learningRate": status.learning_rate, "dataWait": round(status.data_wait, 4), **_odd(status)}
        if self._evaluation is not None:
            scalars = self._evaluation.scalars()
            metrics |= {"testLoss": scalars.pop("loss"), **scalars}
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


def _odd(status: Status) -> dict[str, float]:
    """What is told only when there is some, by its name in metrics.jsonl."""
    norm = {} if status.gradient_norm is None else {"gradientNorm": status.gradient_norm}
    skipped = {"skippedSteps": status.skipped_steps} if status.skipped_steps else {}
    return {**norm, **skipped, **({"corruptImages": status.corrupt_images} if status.corrupt_images else {})}


def _values(status: Status) -> dict[str, float | None]:
    """For the sinks."""
    return {
        "train/step": status.step,
        "train/epoch": status.epoch,
        "train/loss": status.loss,
        "train/learning_rate": status.learning_rate,
        "train/images_per_second": status.samples_per_second,
        "train/data_wait": status.data_wait,
        "train/eta_seconds": status.eta,
        "train/gradient_norm": status.gradient_norm,
        "train/skipped_steps": status.skipped_steps,
        "train/corrupt_images": status.corrupt_images,
        "train/world_size": status.world,
        "train/restarts": status.restarts,
    }
