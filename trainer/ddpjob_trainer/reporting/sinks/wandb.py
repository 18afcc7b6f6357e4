"""Weights & Biases: a single W&B run for all incarnations. The run's id is kept in RUN/wandb.id."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ddpjob_trainer.config.sections import ReportConfig
from ddpjob_trainer.reporting.sinks.sink import Run, Sink, kept

_FILE = "wandb.id"


class WeightsAndBiases:
    """Logs the trainer's step as a metric.

    W&B's own step count must not decrease, but the trainer's step decreases after a restart.
    """

    def __init__(self, config: ReportConfig, run: Run) -> None:
        import wandb

        # Do not let W&B capture the console, because W&B would route every line through a thread.
        settings = wandb.Settings(console="off", silent=True)
        name = run.name
        identity = kept(run.folder / _FILE, lambda: secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=config.wandb,
            id=identity,
            name=name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers after one step as a row of the run's history."""
        self._run.log({"step": step, **values})

    def close(self, complete: bool) -> None:
        """Finish the W&B run. An incomplete run remains resumable."""
        self._run.finish(exit_code=0 if complete else 1)


def prepare(config: ReportConfig, run: Run) -> Callable[[], Sink]:
    """Return a function that imports and opens W&B, to be called in the background."""
    return lambda: WeightsAndBiases(config, run)
