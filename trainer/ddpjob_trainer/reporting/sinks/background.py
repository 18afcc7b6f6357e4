"""Keeps sinks from disturbing training. Each sink has its own thread, and an error ends only that
sink.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping

from ddpjob_trainer.config.sections import ReportConfig
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.reporting.sinks.sink import Run, Sink

_WAITING_RECORDS, _CLOSING_SECONDS, _STOPPING_SECONDS = 1000, 60.0, 5.0


class _Background:
    """Runs a sink in its own thread.

    If the sink cannot keep up or raises an error, one warning is printed, and the sink is not
    called again.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name, self._make = name, make
        self._records: queue.Queue[tuple[int, Mapping[str, float]] | bool] = queue.Queue(_WAITING_RECORDS)
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._gone.is_set():
            try:
                self._records.put_nowait((step, values))
            except queue.Full:
                self._give_up(f"does not keep up: {_WAITING_RECORDS} records are waiting")

    def begin_close(self, complete: bool) -> None:
        try:
            self._records.put_nowait(complete)
        except queue.Full:
            self._gone.set()

    def end_close(self, seconds: float) -> None:
        if not self._gone.is_set():
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._give_up("did not finish in time")

    def _work(self) -> None:
        try:
            sink = self._make()
            while not self._gone.is_set():
                record = self._records.get()
                if isinstance(record, bool):
                    sink.close(record)
                    return
                sink.write(*record)
        # A library may raise anything, even SystemExit, which must not end the training.
        except BaseException as error:
            self._give_up(f"failed: {type(error).__name__}: {str(error).strip()[:300]}")

    def _give_up(self, why: str) -> None:
        if not self._gone.is_set():
            self._gone.set()
            print(f"warning: {self._name} {why}; training continues without it", file=sys.stderr, flush=True)


class Sinks:
    """All sinks of a run. Ranks other than rank 0 have no sinks."""

    def __init__(self, parts: list[_Background]) -> None:
        self._parts = parts

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Pass `values`, the numbers after `step` steps, to the sinks, without waiting for them.

        The numbers have names such as train/loss. Values that are None are omitted.
        """
        known = {name: float(value) for name, value in values.items() if value is not None}
        for part in self._parts:
            part.write(step, known)

    def close(self, complete: bool) -> None:
        """Close the sinks. Wait for them up to 60 s, or up to 5 s if training was stopped."""
        deadline = time.monotonic() + (_CLOSING_SECONDS if complete else _STOPPING_SECONDS)
        for part in self._parts:
            part.begin_close(complete)
        for part in self._parts:
            part.end_close(max(0.0, deadline - time.monotonic()))
        self._parts = []


# Maps the name of a sink to (function that returns whether the sink is configured, package to
# import, package to install, module with the function `prepare(config, run)`).
_KINDS: dict[str, tuple[Callable[[ReportConfig], bool], str, str, str]] = {
    "TensorBoard": (
        lambda report: report.tensorboard,
        "tensorboard",
        "tensorboard",
        "ddpjob_trainer.reporting.sinks.tensorboard",
    ),
    "Prometheus": (
        lambda report: report.prometheus_port > 0,
        "prometheus_client",
        "prometheus-client",
        "ddpjob_trainer.reporting.sinks.prometheus",
    ),
    "Weights & Biases": (lambda report: bool(report.wandb), "wandb", "wandb", "ddpjob_trainer.reporting.sinks.wandb"),
    "MLflow": (lambda report: bool(report.mlflow), "mlflow", "mlflow", "ddpjob_trainer.reporting.sinks.mlflow"),
}
_KEYS = {"TensorBoard": "tensorboard", "Prometheus": "prometheus_port", "Weights & Biases": "wandb", "MLflow": "mlflow"}


def check_report(config: ReportConfig) -> None:
    """Raise ConfigError if a sink's package is missing or a setting in `report` is invalid.

    Every rank calls this before training.
    """
    if not 0 <= config.prometheus_port < 65536:
        raise ConfigError(
            f"report.prometheus_port={config.prometheus_port}: must be a port, for example 9400, or 0 for none"
        )
    if config.profile_steps and (len(config.profile_steps) != 2 or min(config.profile_steps) < 1):
        raise ConfigError(
            f"report.profile_steps={list(config.profile_steps)}: must be [START, COUNT], both at least 1, for"
            " example [20, 5]"
        )
    _check_limits(config)
    for name, (wanted, package, install, _) in _KINDS.items():
        if wanted(config) and importlib.util.find_spec(package) is None:
            key = f"report.{_KEYS[name]}"
            raise ConfigError(
                f"{key}: {name} needs a package that is not installed; run pip install {install}, or leave {key} out"
            )


def _check_limits(config: ReportConfig) -> None:
    factor, seconds, peak = config.straggler_factor, config.straggler_seconds, config.peak_flops
    if factor != 0 and not (math.isfinite(factor) and factor > 1):
        raise ConfigError(
            f"report.straggler_factor={factor}: must be above 1, for example 1.5, or 0 to report no stragglers"
        )
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"report.straggler_seconds={seconds}: must be a finite number of at least 0, for example 30")
    if not (math.isfinite(peak) and peak >= 0):
        raise ConfigError(
            f"report.peak_flops={peak}: must be a finite number of at least 0, for example 989e12, or 0 to look"
            " it up by the GPU's name"
        )


def open_sinks(config: ReportConfig, run: Run) -> Sinks:
    """Return the configured sinks, which open in the background.

    Raises ConfigError as `check_report` does, and also if the port of a sink is in use when the run
    starts for the first time. If the port is in use after a restart, training continues without
    that sink.
    """
    check_report(config)
    parts = []
    for name, (wanted, _, _, module) in _KINDS.items():
        if not wanted(config):
            continue
        try:
            prepared: Callable[[], Sink] = importlib.import_module(module).prepare(config, run)
        except ConfigError as error:
            if not run.restarts:
                raise
            print(f"warning: {error}; training continues without {name}", file=sys.stderr, flush=True)
            continue
        parts.append(_Background(name, prepared))
    return Sinks(parts)
