"""The whole configuration: one section per owner. Precedence: argument, file, environment, default."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ddpjob_trainer import fields
from ddpjob_trainer.checkpoints import CheckpointConfig
from ddpjob_trainer.data import DataConfig
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.fields import from_env
from ddpjob_trainer.metrics.tally import EvalConfig
from ddpjob_trainer.models import ModelConfig
from ddpjob_trainer.optim import OptimConfig
from ddpjob_trainer.precision import AmpConfig
from ddpjob_trainer.preflight import PreflightConfig
from ddpjob_trainer.sinks import ReportConfig
from ddpjob_trainer.strategies import StrategyName
from ddpjob_trainer.strategies.ddp import DdpConfig
from ddpjob_trainer.strategies.ddp_mp import DdpMpConfig
from ddpjob_trainer.strategies.deepspeed import DeepSpeedConfig
from ddpjob_trainer.strategies.fsdp import FsdpConfig
from ddpjob_trainer.strategies.horovod import HorovodConfig
from ddpjob_trainer.strategies.pipeline import PipelineConfig


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """The run as a whole."""

    name: str = "train"
    """Name of the run; its folder is ./runs/NAME when neither train.run_dir nor checkpoint.dir is given."""
    epochs: int = 10
    """Passes over the training set."""
    run_dir: Path | None = None
    """Folder of metrics.jsonl and the ledger; default: CHECKPOINT_DIR/run."""
    backend: str = dataclasses.field(default="auto", metadata=from_env("DDPJOB_BACKEND"))
    """auto, nccl, gloo, hccl, xccl or mpi. auto takes the accelerator that is there, else the CPU with gloo."""
    timeout_seconds: float = 600.0
    """A collective that takes longer fails."""
    threads: int = 0
    """CPU threads per rank; 0: an equal share of the cores."""
    log_every: int = 10
    """Steps between two reports of progress."""
    print_seconds: float = 5.0
    """Shortest time between two lines of progress where the output is no terminal."""
    eval_every: int = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    eval_batch: int = 512
    """Test samples per rank and forward pass."""
    accumulate: int = 1
    """Portions in which a rank goes through its part of a global batch: less memory, gradients are exchanged once for all of them."""
    nonfinite_limit: int = 3
    """A step whose loss or gradient is not finite is left out on all ranks, and told; so many in a row end the training."""
    ledger: bool = False
    """Write down which samples each step took, on each rank; `python -m ddpjob_trainer ledger RUN` checks them."""


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class Config:
    """Everything a run depends on."""

    strategy: StrategyName = StrategyName.DDP
    """How ranks share the training. ddp: each has the whole model, gradients are averaged; one rank alone trains as it is. single: one
    process, one device. dp: one process, several devices. fsdp: each rank keeps a part of the weights and of the optimizer's state.
    ddp_mp: each process spreads its model over several devices. pipeline: ranks are stages of the model, micro-batches pass through them.
    horovod, deepspeed: by these libraries, which are installed apart. parameter_server: rank 0 steps, the others compute gradients."""
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    amp: AmpConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    report: ReportConfig
    preflight: PreflightConfig
    ddp: DdpConfig
    fsdp: FsdpConfig
    ddp_mp: DdpMpConfig
    pipeline: PipelineConfig
    horovod: HorovodConfig
    deepspeed: DeepSpeedConfig

    @property
    def checkpoint_dir(self) -> Path:
        """checkpoint.dir, else RUN/checkpoints."""
        return self.checkpoint.dir or self.run_dir / "checkpoints"

    @property
    def run_dir(self) -> Path:
        """train.run_dir, else CHECKPOINT_DIR/run, else ./runs/NAME."""
        if self.train.run_dir is not None:
            return self.train.run_dir
        return self.checkpoint.dir / "run" if self.checkpoint.dir is not None else Path("runs") / self.train.name

    def flat(self) -> dict[str, Any]:
        """Dotted keys to plain values, for the checkpoint."""
        return {field.key: _plain(self, field.key) for field in fields.walk(Config)}


def _plain(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def load(config_file: str | None, arguments: list[str], base: Mapping[str, Any] | None = None) -> Config:
    """The configuration of `--config FILE key=value ...`; FILE may be the name of one that ships (digits, cifar10, imagenet).

    `base`: dotted keys that file and arguments go before. Raises ConfigError naming the key and the remedy.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = [("checkpoint", base or {})]
    if config_file is not None:
        path = _find(config_file)
        layers.append((str(path), fields.read_file(path)))
    layers.append(("argument", fields.read_arguments(arguments)))
    config = fields.build(Config, *layers)
    for key in ("epochs", "log_every", "eval_every", "eval_batch", "timeout_seconds", "accumulate"):
        if getattr(config.train, key) <= 0:
            raise ConfigError(f"train.{key}: {getattr(config.train, key)} is not above 0")
    if config.model.sync_batchnorm:
        _check_synchronised(config)
    return config


def _check_synchronised(config: Config) -> None:
    fixed = {"data.micro_batches": config.data.micro_batches, "ddp.ordered": config.ddp.ordered}
    for key, value in {**fixed, "data.mixup": config.data.mixup, "data.cutmix": config.data.cutmix}.items():
        if value:
            raise ConfigError(
                f"model.sync_batchnorm: takes statistics of all ranks' samples together, and {key} needs fixed micro-batches;"
                f" leave {key} out, or model.sync_batchnorm (statistics of micro-batches are the same on any number of ranks too)"
            )


def shipped() -> list[str]:
    """Names of the configurations that come with the package."""
    folder = resources.files("ddpjob_trainer") / "configs"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _find(name: str) -> Path:
    path = Path(name)
    if path.exists() or "/" in name or "." in name:
        return path
    if name not in shipped():
        names = ", ".join(shipped())
        raise ConfigError(f"--config {name}: no such file, and no configuration of that name ships; write a path or one of {names}")
    return Path(str(resources.files("ddpjob_trainer") / "configs" / f"{name}.yaml"))
