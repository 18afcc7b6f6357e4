"""Serves metrics for Prometheus on a port of rank 0.

Names follow Prometheus' conventions (base units, _total for counters, _ratio for shares).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.config.sections import ReportConfig
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.reporting.sinks.sink import Run, Sink

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LABELS = ("namespace", "job_name", "run")
"""Labels of all metrics, with the same names as labels of the operator and the coordinator. Outside
a job, the values of namespace and job_name are empty."""
_METRICS = {
    # Maps a metric's name in the sinks to (the metric's name in Prometheus, help text).
    "train/step": (
        "ddpjob_train_step",
        "Optimizer steps taken since training began; falls back to the checkpoint's step after a restart.",
    ),
    "train/epoch": ("ddpjob_train_epoch", "Current epoch, from 1."),
    "train/loss": ("ddpjob_train_loss", "Mean training loss since the last report."),
    "train/learning_rate": ("ddpjob_train_learning_rate", "Learning rate of the last step."),
    "train/images_per_second": ("ddpjob_train_samples_per_second", "Training samples per second of all ranks."),
    "train/data_wait": ("ddpjob_train_data_wait_ratio", "Share of time that rank 0 waited for data."),
    "train/eta_seconds": ("ddpjob_train_eta_seconds", "Estimated time until the last epoch is complete."),
    "train/gradient_norm": ("ddpjob_train_gradient_norm", "Norm of the last step's gradient before clipping."),
    "train/skipped_steps": (
        "ddpjob_train_skipped_steps",
        "Steps skipped because the loss or a gradient was not finite.",
    ),
    "train/corrupt_images": ("ddpjob_train_corrupt_images", "Images that could not be read."),
    "train/mfu": ("ddpjob_train_mfu_ratio", "Share of the devices' peak FLOP/s that the model uses."),
    "train/memory_bytes": (
        "ddpjob_train_memory_bytes",
        "Peak memory use of any rank: of its GPU or, on a CPU, of the machine.",
    ),
    "train/stragglers": (
        "ddpjob_train_stragglers",
        "Number of ranks that lag, so that all others wait for them at each step.",
    ),
    "train/world_size": ("ddpjob_train_world_size", "Number of ranks."),
    "train/restarts": ("ddpjob_train_restarts", "Restarts of the run so far."),
    "checkpoint/time": (
        "ddpjob_train_checkpoint_timestamp_seconds",
        "Unix time at which the newest checkpoint was written to disk.",
    ),
    "checkpoint/copied_time": (
        "ddpjob_train_copy_timestamp_seconds",
        "Unix time at which the newest checkpoint in checkpoint.url was saved.",
    ),
    "checkpoint/seconds": ("ddpjob_train_checkpoint_write_seconds", "Time taken to write the newest checkpoint."),
    "eval/loss": ("ddpjob_train_eval_loss", "Test loss of the newest evaluation."),
    "eval/accuracy": ("ddpjob_train_eval_accuracy_ratio", "Test accuracy (top-1) of the newest evaluation."),
    "eval/top5": ("ddpjob_train_eval_top5_accuracy_ratio", "Test accuracy (top-5) of the newest evaluation."),
    "eval/mae": (
        "ddpjob_train_eval_mean_absolute_error",
        "Mean of |predicted class - class| or, for a regression, of |score - target| in the newest evaluation.",
    ),
    "eval/rmse": (
        "ddpjob_train_eval_root_mean_squared_error",
        "Root mean square of score - target in the newest evaluation of a regression.",
    ),
    "eval/f1": ("ddpjob_train_eval_f1_ratio", "F1 of all decisions pooled (micro), of the newest evaluation."),
    "eval/macroAP": ("ddpjob_train_eval_macro_average_precision_ratio", "Average precision, mean over classes."),
    "eval/microAP": ("ddpjob_train_eval_micro_average_precision_ratio", "Average precision of all decisions pooled."),
    "eval/epoch": ("ddpjob_train_eval_epoch", "Number of complete epochs at the newest evaluation."),
}
_COUNTERS = ("train/skipped_steps", "train/corrupt_images", "train/restarts")

_BY_LABEL = {
    # In the sinks, the names of some metrics end in a rank or a phase. Maps the first part of such
    # a name to (the metric's name in Prometheus, the label for the rank or phase, help text).
    "train/rank_step_seconds/": (
        "ddpjob_train_rank_step_seconds",
        "rank",
        "Time that a rank works per step, without waiting for others (first 64 ranks).",
    ),
    "train/phase_seconds/": ("ddpjob_train_phase_seconds", "phase", "Time per step of rank 0, by phase."),
}


def _address() -> str:
    """Return the address on which the server listens.

    In a pod, this is the wildcard address, because requests from the network and from `kubectl
    port-forward` arrive at different addresses. Under `ddpjob run`, it is the loopback address.
    """
    pod = os.environ.get("POD_IP", "")
    wildcard = "::" if ":" in pod else "0.0.0.0"
    return pod if pod.startswith("127.") else wildcard


class Prometheus:
    """Holds the latest numbers until Prometheus scrapes them."""

    def __init__(self, config: ReportConfig, run: Run) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._newest: dict[str, float] = {"train/step": run.step, "train/restarts": run.restarts}
        self._labels = [(job := JobEnvironment.read()).namespace, job.name, run.name]
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(config.prometheus_port, _address(), registry=registry)
        except OSError as error:
            raise ConfigError(
                f"report.prometheus_port: cannot listen on port {config.prometheus_port} ({error.strerror});"
                " set a different port, or 0 for none"
            ) from error

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a scrape. prometheus-client's registry calls this."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in dict(self._newest).items():
            if name in _METRICS:
                kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                family = kind(*_METRICS[name], labels=LABELS)
                family.add_metric(self._labels, value)
                yield family
        for prefix, (exported, label, text) in _BY_LABEL.items():
            own = {name: value for name, value in self._newest.items() if name.startswith(prefix)}
            if own:
                family = GaugeMetricFamily(exported, text, labels=(*LABELS, label))
                for name, value in own.items():
                    family.add_metric([*self._labels, name.removeprefix(prefix)], value)
                yield family

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Store the latest numbers.

        The stored step never decreases, although a checkpoint may be reported after a later step.
        """
        self._newest = {**self._newest, **values, "train/step": max(step, self._newest["train/step"])}

    def close(self, complete: bool) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def prepare(config: ReportConfig, run: Run) -> Callable[[], Sink]:
    """Open the port, and return a function that returns the sink.

    The port is opened here and not in the background, because a port in use is a configuration
    error.
    """
    opened = Prometheus(config, run)
    return lambda: opened
