"""MLflow: a single MLflow run for all incarnations. The run's id is kept in RUN/mlflow.id."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddpjob_trainer.config.sections import ReportConfig
from ddpjob_trainer.reporting.sinks.sink import Run, Sink, kept

_FILE = "mlflow.id"


class MLflow:
    """Logs to MLflow through its client, which does not keep process-wide state."""

    def __init__(self, config: ReportConfig, run: Run) -> None:
        # With this setting, MLflow reports an unreachable server after one minute instead of ten.
        # MLflow reads the environment at each request.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client: Any = MlflowClient(tracking_uri=config.mlflow)
        self._id = kept(run.folder / _FILE, lambda: self._create(config.mlflow_experiment, run.name))
        self._client.update_run(self._id, status="RUNNING")
        already = self._client.get_run(self._id).data.params
        new = [Param(key, str(value)[:500]) for key, value in run.config.items() if key not in already]
        for start in range(0, len(new), 100):  # 100 is the server's limit per request.
            self._client.log_batch(self._id, params=new[start : start + 100])

    def _create(self, experiment: str, name: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        return str(self._client.create_run(number, run_name=name).info.run_id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self, complete: bool) -> None:
        """End the MLflow run. A run that was stopped is SCHEDULED until its next incarnation."""
        self._client.set_terminated(self._id, status="FINISHED" if complete else "SCHEDULED")


def prepare(config: ReportConfig, run: Run) -> Callable[[], Sink]:
    """Return a function that imports and opens MLflow, to be called in the background."""
    return lambda: MLflow(config, run)
