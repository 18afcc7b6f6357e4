"""Reports progress to metrics.jsonl, the terminal, the coordinator and the configured sinks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpjob_pod.metrics_log import METRICS, MetricsLog, wall_clock
from ddpjob_pod.pace import Pace
from ddpjob_pod.stragglers import Straggler, Stragglers

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import TrainingError
from ddpjob_trainer.evaluation.accumulate import Evaluation
from ddpjob_trainer.evaluation.result_files import FOLDER, EvaluationFiles
from ddpjob_trainer.reporting.progress_client import ProgressClient
from ddpjob_trainer.reporting.sinks.background import Sinks, check_report, open_sinks
from ddpjob_trainer.reporting.sinks.sink import Run
from ddpjob_trainer.reporting.terminal import Display, ProgressLines, Silent, TrainingStatus, duration

_ALIVE_SECONDS = 5.0
_RANKS = 64
"""Maximum number of ranks whose figures are reported one by one."""


@dataclass(frozen=True)
class Plan:
    """The size of a training run: its epochs, total steps, and training samples per epoch.

    `round` is the job's current round.
    """

    epochs: int
    steps: int
    samples: int
    round: int


@dataclass(frozen=True)
class Machines:
    """Figures of the ranks' machines since the last report.

    Each sequence has one figure per rank.

        own      seconds per step that a rank itself works; 0 if they cannot be measured
        even     seconds per step that a rank would work for an even share of the batch
        data     share of a rank's time that is spent waiting for data
        memory   peak number of bytes that a rank has used so far
        phases   seconds that this rank spends in each phase of a step
        flops    FLOPs per sample; 0 means unknown
        peak     FLOP/s of all devices together; 0 means unknown
        stages   as in `Strategy`
    """

    own: Sequence[float]
    even: Sequence[float]
    data: Sequence[float]
    memory: Sequence[float]
    phases: Mapping[str, float]
    flops: float = 0.0
    peak: float = 0.0
    stages: int = 1

    def mfu(self, samples_per_second: float) -> float | None:
        """Return the share of the devices' peak FLOP/s that training uses; None if unknown."""
        return samples_per_second * self.flops / self.peak if self.flops and self.peak else None

    def logged(self) -> dict[str, Any]:
        """Return the figures of the ranks, and the phases, for metrics.jsonl.

        If there are more than 64 ranks, only the figures of the first 64 are included.
        """
        columns = {"ownSeconds": self.own, "dataWaits": self.data, "memoryBytes": self.memory}
        ranks = {name: [float(f"{value:.4g}") for value in values[:_RANKS]] for name, values in columns.items()}
        return {"ranks": ranks, "phases": {name: float(f"{value:.4g}") for name, value in self.phases.items()}}


def open_log(run_dir: Path) -> MetricsLog:
    """Return the run's metrics log. Raises TrainingError if the log cannot be appended to."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return MetricsLog(run_dir)
    except OSError as error:
        raise TrainingError(
            f"{run_dir / METRICS} cannot be opened for appending ({error.strerror}); make it "
            f"readable and writable for uid {os.getuid()}, or set train.run_dir to a different folder"
        ) from error


class Reporter:
    """Measures the speed of training, and reports progress.

    If `writes` is true, this rank writes metrics.jsonl. Rank 0 also prints progress, posts it to
    the coordinator, and passes it to the sinks.
    """

    def __init__(
        self,
        plan: Plan,
        config: Config,
        group: Group,
        *,
        writes: bool,
        class_names: Sequence[str] | None = None,
        device: str = "cpu",
        model: str = "",
    ) -> None:
        """Check the sinks, and open the log and the display.

        `device` and its `model` appear in the first line that is printed. Raises ConfigError if a
        configured sink is not available.
        """
        check_report(config.report)
        self._plan, self._config, self._group = plan, config, group
        self._device = f"{device}, {model}" if model else device
        self._log = open_log(config.run_dir) if writes else None
        self.restarts = max(plan.round, self._log.incarnations if self._log else 0)
        self._display: Display = open_display(
            group.rank == 0, config.train.print_seconds, config.run_dir.resolve().name
        )
        self._link = ProgressClient.from_env() if group.rank == 0 else None
        self._stragglers = Stragglers(config.report.straggler_factor, config.report.straggler_seconds)
        self._lagging: tuple[Straggler, ...] = ()
        self._activity: str | None = None
        self._alive = float("-inf")
        self._sinks = Sinks([])
        self._files = EvaluationFiles(config.run_dir / FOLDER, config.eval, class_names) if group.rank == 0 else None
        self._window_began = time.perf_counter()
        self._waited = 0.0
        # Number of samples on which this process has trained, and the seconds spent on these
        # samples, without evaluations and checkpoints.
        self._samples, self._seconds = 0, 0.0
        self._pace = Pace(least=1)
        self._pace.add(0, 0.0)
        self._last: TrainingStatus | None = None
        self._evaluation: Evaluation | None = None
        self._checkpoint_time: float | None = None
        self.copies: Mapping[str, float] = {}
        """Figures about the copies of checkpoints in checkpoint.url (copyStep, copyTime,
        copyBehind).
        """

    def start(
        self,
        step: int,
        left: int,
        epoch: int,
        warning: str = "",
        precision: str = "float32",
        notes: Sequence[str] = (),
    ) -> None:
        """Report that an incarnation begins after `step` steps, with `left` steps remaining.

        If training is slow, `warning` states why. `precision` is the dtype of computations, and
        `notes` contains other useful facts. `step + left` becomes the total number of steps,
        because a restart with a different batch size may change the total. If the checkpoint has
        more complete epochs than are configured, its number of complete epochs becomes the total
        number of epochs.
        """
        wanted, trained = self._plan.epochs, epoch - 1
        self._plan = replace(self._plan, steps=step + left, epochs=max(wanted, trained))
        world = self._group.world
        self._write("start", step=step, epoch=epoch, world=world, restarts=self.restarts, precision=precision)
        if not step:
            where = f"{self._plan.steps} steps to train"
        elif left:
            where = f"resuming after step {step} of {self._plan.steps}, in epoch {epoch}"
        else:
            where = (
                f"nothing is left to train, because the checkpoint of step {step} has {trained} complete epoch(s) and"
                f" train.epochs={wanted}; raise train.epochs to continue, or set a different checkpoint.dir to start"
                " over"
            )
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        folders = f"run folder {self._config.run_dir}, checkpoints {self._config.checkpoint_dir}"
        self._display.note(f"{ranks} on {self._device}, in {precision}: {where}; {folders}")
        if precision != "float32":
            self._display.note(f"computing in {precision} where that is safe; set amp.level=O0 for float32")
        for note in notes:
            self._display.note(note)
        if warning:
            self._display.note(f"warning: {warning}")
        if self._group.rank == 0:
            run = Run(self._config.run_dir, self._config.train.name, self._config.flat(), step, self.restarts)
            self._sinks = open_sinks(self._config.report, run)
            self._sinks.write(step, {"train/world_size": self._group.world, "train/restarts": self.restarts})

    def restart_clock(self) -> None:
        """Exclude the time since the last report from the measured speed.

        Call this after an evaluation or a checkpoint, for example.
        """
        self._window_began, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Report `activity` while training pauses for it within this context.

        Without the report, the pause would look like a hang.
        """
        if self._link is None:
            yield
            return
        self._activity = activity
        self._link.post_activity(activity)
        try:
            yield
        finally:
            self._activity = None
            self._link.post_activity(None)

    def alive(self) -> None:
        """Report that the current activity is making progress, but at most every few seconds."""
        if self._link is not None and self._activity is not None and time.monotonic() - self._alive > _ALIVE_SECONDS:
            self._alive = time.monotonic()
            self._link.post_activity(self._activity, again=True)

    def waited(self, seconds: float) -> None:
        """Add `seconds` to the time that this rank has spent waiting for its batches."""
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
        machines: Machines | None = None,
    ) -> None:
        """Report training on `samples` samples since the last report, with the mean loss `loss`.

        `samples_left` samples remain until the end of training.
        """
        self._note_stragglers(machines)
        elapsed = max(1e-9, time.perf_counter() - self._window_began)
        speed = samples / elapsed
        self._samples, self._seconds = self._samples + samples, self._seconds + elapsed
        self._pace.add(self._samples, self._seconds)
        smooth = self._pace.per_second or speed
        status = TrainingStatus(
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
            stragglers=self._lagging,
            mfu=machines.mfu(smooth) if machines is not None else None,
            memory=max(machines.memory) if machines is not None else 0.0,
            phases=machines.phases if machines is not None else {},
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
            **_optional(status),
            **(machines.logged() if machines is not None else {}),
            **({"stragglers": _as_numbers(self._lagging)} if self._lagging else {}),
        )
        self._display.show(status)
        self._post(status)
        self._sinks.write(step, _values(status) | _values_of(machines))
        self.restart_clock()

    def _note_stragglers(self, machines: Machines | None) -> None:
        """Update the list of stragglers, and print a warning about each new one."""
        if machines is None:
            return
        before = {straggler.rank for straggler in self._lagging}
        step = sum(machines.phases.values())
        self._lagging = self._stragglers.add(time.monotonic(), machines.own, machines.even, machines.stages, step)
        for straggler in self._lagging:
            if straggler.rank not in before:
                waits = machines.data[straggler.rank]
                why = f", and it spends {waits:.0%} of the time waiting for data" if waits > 0.2 else ""
                self._display.note(
                    f"warning: rank {straggler.rank} lags: its own work per step takes {straggler.slowdown:.1f} "
                    f"times as long as the median rank's{' in its stage' * (machines.stages > 1)}, so all others "
                    f"wait for it{why}"
                )
        if self._link is not None:
            self._link.post_stragglers(_as_numbers(self._lagging))

    def evaluated(self, epoch: int, step: int, evaluation: Evaluation) -> None:
        """Report the result of the evaluation after epoch `epoch`."""
        self._evaluation = evaluation
        lost = {"unreadable": evaluation.unreadable} if evaluation.unreadable else {}
        self._write("eval", epoch=epoch, step=step, **evaluation.scalars(), **lost)
        curve = f", average precision {evaluation.curves.macro:.4f}" if evaluation.curves else ""
        results = f"{_found(evaluation)}test loss {evaluation.loss:.4f}{curve}"
        self._display.note(f"epoch {epoch}/{self._plan.epochs}: {results}")
        if evaluation.unreadable:
            self._display.note(
                f"warning: {evaluation.unreadable} test images could not be read; the result covers the other"
                f" {evaluation.samples}"
            )
        if evaluation.nonfinite:
            self._display.note(
                f"warning: the model's output is not finite for {evaluation.nonfinite} of {evaluation.samples}"
                " test samples"
            )
        if self._last is not None:
            self._post(self._last)
        self._sinks.write(
            step, {f"eval/{name}": value for name, value in evaluation.scalars().items()} | {"eval/epoch": epoch}
        )
        if self._files is not None:
            try:
                self._files.write(f"epoch-{epoch:03}", evaluation, epoch=epoch, step=step)
            except OSError as error:
                where = error.filename or self._config.run_dir / FOLDER
                self._display.note(
                    f"warning: {where} cannot be written ({error.strerror or error}), so this evaluation's files "
                    "are missing"
                )

    def checkpoint(self, step: int, seconds: float) -> None:
        """Report that a checkpoint is on disk, and that writing it took `seconds`."""
        self._checkpoint_time = wall_clock()
        self._write("checkpoint", step=step, seconds=round(seconds, 4))
        self._sinks.write(step, {"checkpoint/time": self._checkpoint_time, "checkpoint/seconds": seconds})

    def copied(self, step: int) -> None:
        """Report that the checkpoint from step `step` has been copied to checkpoint.url."""
        self._write("copied", step=step)
        self._sinks.write(step, {"checkpoint/copied_time": self.copies.get("copyTime", wall_clock())})
        if self._last is not None:
            self._post(self._last)

    def post_copies(self, copies: Mapping[str, float]) -> None:
        """Post the state of the checkpoints' copies in checkpoint.url, independently of steps.

        May be called from any thread.
        """
        if self._link is not None:
            self._link.post_copies(dict(copies))

    def post_memory(self, figures: dict[str, Any]) -> None:
        """Post `figures` about the training states that the nodes keep in memory.

        The first figures include the step at which training continued. Later, only changes are
        posted.
        """
        if self._link is not None and figures:
            self._link.add(figures)

    def skipped(self, step: int, text: str, samples: dict[int, list[int]]) -> None:
        """Report that step `step` was skipped on all ranks, for the reason in `text`.

        `samples` maps each rank whose loss was not finite to its sample numbers.
        """
        self._write("skipped", step=step, samples=samples)
        self._display.note(f"warning: {text}")

    def stopped(self, step: int) -> None:
        """Report that all ranks agreed to stop after `step` steps."""
        self._write("stop", step=step)
        self._display.note(f"stopped by SIGTERM after step {step}; its checkpoint is saved")
        self._sinks.close(complete=False)

    def ended_early(self, epoch: int, names: Sequence[str]) -> None:
        """Report that the callbacks `names` end the training after epoch `epoch`."""
        self._plan = replace(self._plan, epochs=epoch)
        self._display.note(f"train.callbacks: {', '.join(names)} ends training after epoch {epoch}")

    def end(self, step: int, seconds: float) -> None:
        """Report that training is complete. This incarnation took `seconds`."""
        self._write("end", step=step)
        found = f", {_found(self._evaluation)}".removesuffix(", ") if self._evaluation else ""
        self._display.note(
            f"done: {self._plan.epochs} epochs, {step} steps{found}, {duration(seconds)} in this incarnation"
        )
        if self._last is None and self._link is not None:
            # Nothing was left to train, so no progress has been posted. Without this post, the job
            # would show neither epoch nor accuracy.
            epochs, metrics = self._plan.epochs, self._scalars()
            self._link.post({"epoch": epochs, "epochs": epochs, "step": step, "steps": step, "metrics": metrics})
        self._sinks.close(complete=True)
        if self._files is not None:
            self._files.wait()

    def close(self) -> None:
        """Post the remaining reports, and restore the terminal."""
        self._display.close()
        if self._link is not None:
            self._link.close()

    def _write(self, event: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.write(event, round=self._plan.round, **fields)

    def _scalars(self) -> dict[str, float]:
        """Return the numbers of the latest evaluation, keyed by name in the job's metrics."""
        if self._evaluation is None:
            return {}
        scalars = self._evaluation.scalars()
        return {"testLoss": scalars.pop("loss"), **scalars}

    def _post(self, status: TrainingStatus) -> None:
        if self._link is None:
            return
        metrics = {"learningRate": status.learning_rate, "dataWait": round(status.data_wait, 4), **_optional(status)}
        if self._checkpoint_time is not None:
            metrics["checkpointTime"] = round(self._checkpoint_time)
        metrics |= {**self.copies, **self._scalars()}
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


def _found(evaluation: Evaluation) -> str:
    """Return the main results of an evaluation as text that ends in a comma and a space.

    The main results are the accuracy or, for a regression, the errors. The text is empty if the
    evaluation has neither.
    """
    if evaluation.accuracy is not None:
        return f"test accuracy {evaluation.accuracy:.2%}, "
    return "" if evaluation.mae is None else f"test mae {evaluation.mae:.4f}, test rmse {evaluation.rmse:.4f}, "


def _optional(status: TrainingStatus) -> dict[str, float]:
    """Return the optional numbers that are present, keyed by name in metrics.jsonl."""
    norm = {} if status.gradient_norm is None else {"gradientNorm": status.gradient_norm}
    skipped = {"skippedSteps": status.skipped_steps} if status.skipped_steps else {}
    share = {} if status.mfu is None else {"mfu": round(status.mfu, 4)}
    return {**norm, **share, **skipped, **({"corruptImages": status.corrupt_images} if status.corrupt_images else {})}


def _values(status: TrainingStatus) -> dict[str, float | None]:
    """Return the numbers of a status, keyed by name in the sinks."""
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
        "train/stragglers": len(status.stragglers),
        "train/memory_bytes": status.memory,
        **({} if status.mfu is None else {"train/mfu": status.mfu}),
        **{f"train/phase_seconds/{name}": seconds for name, seconds in status.phases.items()},
    }


def _values_of(machines: Machines | None) -> dict[str, float | None]:
    """Return each rank's own seconds per step, keyed by name in the sinks.

    If there are more than 64 ranks, only the first 64 are included.
    """
    own = machines.own[:_RANKS] if machines is not None and any(machines.own) else []
    return {f"train/rank_step_seconds/{rank}": seconds for rank, seconds in enumerate(own)}


def _as_numbers(stragglers: Sequence[Straggler]) -> list[dict[str, float]]:
    return [found.as_figures() for found in stragglers]


def open_display(first_rank: bool, interval: float, title: str) -> Display:
    """Return the display for this rank.

    Rank 0 gets the live view on a TTY, and plain lines elsewhere. All other ranks get a silent
    display.
    """
    if not first_rank:
        return Silent()
    if not sys.stdout.isatty():
        return ProgressLines(interval)
    # Importing rich takes a tenth of a second.
    from ddpjob_trainer.reporting.live_view import LiveView

    return LiveView(title)
