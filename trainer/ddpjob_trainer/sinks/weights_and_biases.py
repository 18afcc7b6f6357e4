"""Weights & Biases: one run of theirs for all lives of ours; its id is kept in RUN/wandb.id."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ddpjob_trainer.sinks.base import ReportConfig, Run, Sink
from ddpjob_trainer.sinks.identity import kept

_FILE = "wandb.id"


class WeightsAndBiases:
    """Steps are logged as a value: W&B's own step count must not go back, and after a restart ours does."""

    def __init__(self, config: ReportConfig, run: Run) -> None:
        import wandb

        # The run's console stays the terminal's: capturing it would put a thread between us and every line.
        settings = wandb.Settings(console="off", silent=True)
        name = run.name
        identity = kept(run.folder / _FILE, lambda: secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=config.wandb, id=identity, name=name, resume="allow", dir=str(run.folder), config=dict(run.config), settings=settings
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row of history."""
        self._run.log({"step": step, **values})

    def close(self, complete: bool) -> None:
        """An unfinished run stays one that will be resumed."""
        self._run.finish(exit_code=0 if complete else 1)


def prepare(config: ReportConfig, run: Run) -> Callable[[], Sink]:
    """Import and open in the background."""
    return lambda: WeightsAndBiases(config, run)
