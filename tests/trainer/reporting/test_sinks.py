"""Metrics reach TensorBoard, Prometheus, W&B and MLflow. A restart continues the same run, and no
sink disturbs training.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import socket
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ddpjob_trainer import config
from ddpjob_trainer.config.sections import ReportConfig
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.evaluation.accumulate import Evaluation
from ddpjob_trainer.evaluation.curves import Curves
from ddpjob_trainer.reporting.sinks import background
from ddpjob_trainer.reporting.sinks.background import open_sinks
from ddpjob_trainer.reporting.sinks.sink import Run
from listening import listening
from machine import free_port, slowness
from ranks import TINY, good, metrics, run, stop_at

LIVES = ((0, False), (4, True))
"""Each is (the step after which it resumes, whether it completes the training). The second one
repeats steps 5 and 6.
"""


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer at a stop, because the first import of a sink takes a long time on a busy
    machine.
    """
    monkeypatch.setattr(background, "_STOPPING_SECONDS", 60.0)


def a_run(folder: Path, step: int = 0) -> Run:
    return Run(folder, "name", {"optim.lr": 0.1, "data.dir": None}, step, restarts=1 if step else 0)


def written_by(deadline: float, file: Path, word: bytes) -> None:
    """Wait until `word` is in the file. W&B's own process may write it after `finish` has
    returned.
    """
    while word not in file.read_bytes():
        assert time.monotonic() < deadline, file.read_bytes()
        time.sleep(0.1)


def two_lives(folder: Path, report: ReportConfig) -> None:
    for step, complete in LIVES:
        sinks = open_sinks(report, a_run(folder, step))
        for number in range(step + 1, step + 7):
            sinks.write(number, {"train/loss": number + step / 10, "train/gradient_norm": None})
        sinks.close(complete)


@pytest.mark.usefixtures("patient")
def test_tensorboard_replaces_the_steps_that_a_restart_repeats(tmp_path: Path, capfd: Any) -> None:
    need("tensorboard")
    two_lives(tmp_path, ReportConfig(tensorboard=True))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    rows = [(event.step, round(event.value, 3)) for event in found.Scalars("train/loss")]
    assert rows == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)] + [(step, step + 0.4) for step in range(5, 11)]
    assert found.Tags()["scalars"] == ["train/loss"]
    assert "warning" not in capfd.readouterr().err


@pytest.mark.usefixtures("patient")
def test_wandb_offline_continues_the_same_run_after_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    need("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    two_lives(tmp_path, ReportConfig(wandb="project"))
    assert "warning: Weights" not in capfd.readouterr().err
    identity = (tmp_path / "wandb.id").read_text().strip()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    for file, word in zip(files, (b"optim.lr", b"train/loss"), strict=True):
        written_by(time.monotonic() + 20, file, word)


@pytest.mark.usefixtures("patient")
def test_mlflow_continues_the_same_run_after_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    need("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlflow"
    two_lives(tmp_path, ReportConfig(mlflow=uri, mlflow_experiment="trials"))
    assert "warning: MLflow" not in capfd.readouterr().err
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("trials")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "name")
    assert found.data.params["optim.lr"] == "0.1"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted({each.step for each in history}) == list(range(1, 11))


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(
    ("pod", "address"),
    [("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "0.0.0.0"), ("fd00::7", "::"), (None, "0.0.0.0")],
)
def test_prometheus_can_scrape_over_the_network_unless_ddpjob_run_started_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pod: str | None, address: str
) -> None:
    need("prometheus_client")
    monkeypatch.delenv("POD_IP", raising=False)
    if pod:
        monkeypatch.setenv("POD_IP", pod)
    port = free_port()
    sinks = open_sinks(ReportConfig(prometheus_port=port), a_run(tmp_path))
    assert (address, port) in listening([os.getpid()])
    sinks.close(complete=True)


def test_prometheus_serves_the_newest_values_and_releases_the_port(tmp_path: Path) -> None:
    need("prometheus_client")
    port = free_port()
    sinks = open_sinks(ReportConfig(prometheus_port=port), a_run(tmp_path, step=4))
    assert scrape(port) == {"ddpjob_train_step": 4, "ddpjob_train_restarts_total": 1}
    sinks.write(10, {"train/loss": 0.25, "train/data_wait": 0.5, "eval/accuracy": 0.75, "no/such": 1})
    sinks.write(9, {"checkpoint/time": 1.7e9})
    deadline = time.monotonic() + 10
    while "ddpjob_train_checkpoint_timestamp_seconds" not in (seen := scrape(port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen == {
        "ddpjob_train_step": 10,
        "ddpjob_train_restarts_total": 1,
        "ddpjob_train_loss": 0.25,
        "ddpjob_train_data_wait_ratio": 0.5,
        "ddpjob_train_eval_accuracy_ratio": 0.75,
        "ddpjob_train_checkpoint_timestamp_seconds": 1.7e9,
    }
    sinks.close(complete=True)
    with pytest.raises(OSError):
        scrape(port)


def test_metric_names_follow_the_conventions() -> None:
    import re

    from ddpjob_trainer.reporting.sinks.prometheus import _METRICS

    names = [name for name, _ in _METRICS.values()]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"ddpjob_train_[a-z0-9_]+", name) for name in names)
    assert all(text.endswith(".") for _, text in _METRICS.values())


def test_every_figure_of_an_evaluation_has_a_metric() -> None:
    from ddpjob_trainer.reporting.sinks.prometheus import _METRICS

    curves = Curves([], 0.5, 0.5, [], None)
    whole = Evaluation(loss=1, accuracy=1, top5=1, mae=1, samples=1, curves=curves, rmse=1, f1=1)
    assert [name for name in whole.scalars() if f"eval/{name}" not in _METRICS] == []


# ------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("values", "package", "message"),
    [
        (
            {"tensorboard": True},
            "tensorboard",
            r"report\.tensorboard: TensorBoard needs .*pip install tensorboard, or leave",
        ),
        ({"wandb": "p"}, "wandb", r"report\.wandb: Weights & Biases needs .*pip install wandb"),
        ({"mlflow": "sqlite:///x"}, "mlflow", r"report\.mlflow: MLflow needs .*pip install mlflow"),
        (
            {"prometheus_port": 9400},
            "prometheus_client",
            r"report\.prometheus_port: Prometheus needs .*pip install prometheus-client",
        ),
    ],
)
def test_a_missing_package_of_a_sink_is_reported(
    values: dict[str, Any], package: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    with pytest.raises(ConfigError, match=message):
        background.check_report(ReportConfig(**values))


def test_invalid_settings_of_sinks_are_reported(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(ConfigError, match=r"report\.prometheus_port=70000: must be a port"):
        background.check_report(ReportConfig(prometheus_port=70000))
    for steps in ("[5]", "[0, 2]", "[3, 0]"):
        with pytest.raises(ConfigError, match=r"report\.profile_steps=.*: must be \[START, COUNT\]"):
            background.check_report(config.load(None, [f"report.profile_steps={steps}"]).report)
    remedies = {"straggler_factor": "1.5, or 0", "straggler_seconds": "30", "peak_flops": "989e12, or 0"}
    wrong: dict[str, list[float]] = {"straggler_factor": [1, 0.5], "straggler_seconds": [], "peak_flops": []}
    for key, values in wrong.items():
        for value in [*values, -1.0, math.nan, math.inf]:
            message = rf"report\.{key}={value}: must be .* for example {re.escape(remedies[key])}"
            with pytest.raises(ConfigError, match=message):
                background.check_report(replace(ReportConfig(), **{key: value}))
        background.check_report(replace(ReportConfig(), **{key: 0}))
        background.check_report(replace(ReportConfig(), **{key: 1.01}))
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on port {port} .*set a different port"):
            open_sinks(ReportConfig(prometheus_port=port), a_run(tmp_path))
        open_sinks(ReportConfig(prometheus_port=port), a_run(tmp_path, step=4)).close(complete=True)
    assert f"cannot listen on port {port}" in capfd.readouterr().err, "this does not end a restarted run"


class Broken:
    """A sink that fails when it receives the third number."""

    def __init__(self) -> None:
        self.taken = 0

    def write(self, step: int, values: Any) -> None:
        self.taken += 1
        if self.taken > 2:
            raise SystemExit("the server is gone")

    def close(self, complete: bool) -> None:
        raise AssertionError("the sink must not be used after it has failed")


def test_a_sink_that_fails_is_reported_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from ddpjob_trainer.reporting.sinks import tensorboard

    need("tensorboard")
    monkeypatch.setattr(tensorboard, "prepare", lambda report, run: Broken)
    good(2, [*TINY, f"checkpoint.dir={tmp_path}", "report.tensorboard=true"])
    assert len(metrics(tmp_path / "run", "step")) == 16
    warnings = [line for line in capfd.readouterr().err.splitlines() if "TensorBoard" in line]
    assert warnings == ["warning: TensorBoard failed: SystemExit: the server is gone; training continues without it"]


class Stuck:
    """A sink that never returns."""

    def write(self, step: int, values: Any) -> None:
        time.sleep(1000)

    def close(self, complete: bool) -> None:
        pass


def test_a_sink_that_hangs_does_not_delay_training(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(background, "_STOPPING_SECONDS", 0.2)
    sinks = background.Sinks([background._Background("Slow", Stuck)])
    began = time.monotonic()
    for step in range(background._WAITING_RECORDS + 50):
        sinks.write(step, {"train/loss": 1.0})
    sinks.close(complete=False)
    assert time.monotonic() - began < 5 * slowness()
    assert capfd.readouterr().err.count("warning: Slow") == 1


def test_a_run_sends_all_of_its_events_to_a_sink(tmp_path: Path) -> None:
    """A real run has two incarnations. The test reads its events from TensorBoard's files."""
    need("tensorboard")
    arguments = [*TINY, f"checkpoint.dir={tmp_path}", "report.tensorboard=true", "eval.pr=binned"]
    assert [end.code for end in run(1, arguments, prepare=stop_at(3))] == [75]
    good(2, arguments)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == list(range(1, 17))
    assert [event.value for event in found.Scalars("train/world_size")][-1] == 2
    assert [event.value for event in found.Scalars("train/restarts")][-1] == 1
    assert [event.step for event in found.Scalars("eval/macroAP")] == [8, 16]
    accuracies = [event.value for event in found.Scalars("eval/accuracy")]
    assert accuracies == pytest.approx([row["accuracy"] for row in metrics(tmp_path / "run", "eval")])
