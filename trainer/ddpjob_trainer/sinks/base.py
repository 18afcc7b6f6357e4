"""What a sink is, and how sinks are kept from disturbing training: each works in a thread of its own, and a failure ends only the sink."""

from __future__ import annotations

import importlib
import importlib.util
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpjob_trainer.errors import ConfigError

_WAITING_RECORDS, _CLOSING_SECONDS, _STOPPING_SECONDS = 1000, 60.0, 5.0


@dataclass(kw_only=True, slots=True, frozen=True)
class ReportConfig:
    """Where rank 0 reports to, beside RUN/metrics.jsonl and the terminal; and the profile. A sink that fails never stops training."""

    tensorboard: bool = False
    """Event files for TensorBoard in RUN/tensorboard (pip install tensorboard)."""
    prometheus_port: int = 0
    """Serve metrics for Prometheus at this port of rank 0, under /metrics (pip install prometheus-client); 0: not."""
    wandb: str = ""
    """Weights & Biases: name of the project; empty: not (pip install wandb). WANDB_MODE, WANDB_API_KEY and WANDB_ENTITY count as ever."""
    mlflow: str = ""
    """MLflow: URI of the tracking server or store, such as http://host:5000 or sqlite:///mlflow.db; empty: not (pip install mlflow)."""
    mlflow_experiment: str = "ddpjob"
    """MLflow: name of the experiment."""
    profile_steps: tuple[int, ...] = ()
    """torch.profiler from step START on for COUNT steps, written [START, COUNT]: a trace of each rank for chrome://tracing or Perfetto, and
    a table of the operators that take most time, in RUN/profile. Step START - 1 warms the profiler up; COUNT steps are kept in memory."""


@dataclass(frozen=True)
class Run:
    """What sinks know of a run: its folder and name, its configuration, the step it goes on from, and how many lives it had before."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    step: int
    restarts: int


class Sink(Protocol):
    """Takes numbers by name. Methods may raise anything and may be slow."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after global step `step`."""

    def close(self, complete: bool) -> None:
        """The run's life is over; `complete`: its training as well."""


class _Background:
    """A sink in its own thread. What it cannot keep up with is dropped; its first error is told, and then it is left alone."""

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
                self._give_up(f"takes nothing in, and {_WAITING_RECORDS} records wait for it")

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
        except BaseException as error:  # A foreign library may raise anything, SystemExit too; none of it is the training's business.
            self._give_up(f"failed: {type(error).__name__}: {str(error).strip()[:300]}")

    def _give_up(self, why: str) -> None:
        if not self._gone.is_set():
            self._gone.set()
            print(f"warning: {self._name} {why}; training goes on without it", file=sys.stderr, flush=True)


class Sinks:
    """All sinks of a run; none on ranks other than 0."""

    def __init__(self, parts: list[_Background]) -> None:
        self._parts = parts

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Numbers after `step` steps, by names such as train/loss; None is left out. Returns at once."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        for part in self._parts:
            part.write(step, known)

    def close(self, complete: bool) -> None:
        """Let them finish: for 60 s at most, and 5 s where the training was told to stop."""
        deadline = time.monotonic() + (_CLOSING_SECONDS if complete else _STOPPING_SECONDS)
        for part in self._parts:
            part.begin_close(complete)
        for part in self._parts:
            part.end_close(max(0.0, deadline - time.monotonic()))
        self._parts = []


# name: (is it wanted, package to import, package to install, module whose `open_sink(config, run)` makes it)
_KINDS: dict[str, tuple[Callable[[ReportConfig], bool], str, str, str]] = {
    "TensorBoard": (lambda report: report.tensorboard, "tensorboard", "tensorboard", "tensorboard"),
    "Prometheus": (lambda report: report.prometheus_port > 0, "prometheus_client", "prometheus-client", "prometheus"),
    "Weights & Biases": (lambda report: bool(report.wandb), "wandb", "wandb", "weights_and_biases"),
    "MLflow": (lambda report: bool(report.mlflow), "mlflow", "mlflow", "mlflow"),
}
_KEYS = {"TensorBoard": "tensorboard", "Prometheus": "prometheus_port", "Weights & Biases": "wandb", "MLflow": "mlflow"}


def check_report(config: ReportConfig) -> None:
    """Raises ConfigError when a package is missing or a value makes no sense; every rank may call, before training."""
    if not 0 <= config.prometheus_port < 65536:
        raise ConfigError(f"report.prometheus_port: {config.prometheus_port} is no port; write for example 9400, or 0 for none")
    if config.profile_steps and (len(config.profile_steps) != 2 or min(config.profile_steps) < 1):
        raise ConfigError(f"report.profile_steps: {list(config.profile_steps)} is not [START, COUNT] from 1 on; write for example [20, 5]")
    for name, (wanted, package, install, _) in _KINDS.items():
        if wanted(config) and importlib.util.find_spec(package) is None:
            key = f"report.{_KEYS[name]}"
            raise ConfigError(f"{key}: {name} needs a package that is not installed; pip install {install}, or leave {key} out")


def open_sinks(config: ReportConfig, run: Run) -> Sinks:
    """The sinks that are asked for, opening in the background.

    Raises ConfigError as `check_report`, or when the port cannot be had at a first start; a restart goes on without.
    """
    check_report(config)
    parts = []
    for name, (wanted, _, _, module) in _KINDS.items():
        if not wanted(config):
            continue
        try:
            prepared: Callable[[], Sink] = importlib.import_module(f"ddpjob_trainer.sinks.{module}").prepare(config, run)
        except ConfigError as error:
            if not run.restarts:
                raise
            print(f"warning: {error}; training goes on without {name}", file=sys.stderr, flush=True)
            continue
        parts.append(_Background(name, prepared))
    return Sinks(parts)
