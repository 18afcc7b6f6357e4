"""The whole configuration, one section per subject.

Precedence: argument, file, environment, default.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpjob_trainer.config import loader, strategy_limits
from ddpjob_trainer.config.sections import (
    AmpConfig,
    CheckpointConfig,
    DataConfig,
    DdpConfig,
    DdpMpConfig,
    DeepSpeedConfig,
    EvalConfig,
    FsdpConfig,
    HorovodConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    PreflightConfig,
    ReportConfig,
    StrategyName,
    TrainConfig,
)
from ddpjob_trainer.errors import ConfigError

_LONGEST_TIMEOUT = 30 * 86400
"""Maximum value of train.timeout_seconds. Timers reject infinite and much longer timeouts."""
_SHIPPED = Path(__file__).parent / "shipped"


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class Config:
    """All settings of a run."""

    strategy: StrategyName = StrategyName.DDP
    """How ranks share the training. ddp: each rank has the whole model, and gradients are averaged
    over ranks; a single rank trains without DDP's wrapper. fsdp: each rank keeps a shard of the
    weights and of the optimizer state. pipeline: each rank is a stage of the model, and
    micro-batches pass through the stages. single: one process, one device. The following strategies
    have less support. dp: one process with several devices. ddp_mp: each process spreads its model
    over several devices. horovod, deepspeed: training with these libraries, which must be installed
    separately. parameter_server: rank 0 updates the weights, and the other ranks compute gradients.
    """
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
        """The folder of checkpoints: `checkpoint.dir` or, by default, `run_dir`/checkpoints."""
        return self.checkpoint.dir or self.run_dir / "checkpoints"

    @property
    def run_dir(self) -> Path:
        """The folder of the run.

        This is `train.run_dir` or, if that is not set, `checkpoint.dir`/run. If neither is set, it
        is ./runs/NAME, where NAME is `train.name`.
        """
        if self.train.run_dir is not None:
            return self.train.run_dir
        return self.checkpoint.dir / "run" if self.checkpoint.dir is not None else Path("runs") / self.train.name

    def flat(self) -> dict[str, Any]:
        """Return all values by dotted key, in the plain types that checkpoints store."""
        return {field.key: _plain(self, field.key) for field in loader.walk(Config)}


def _plain(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def load(config_file: str | None, arguments: list[str], base: Mapping[str, Any] | None = None) -> Config:
    """Load and check the configuration that `--config FILE key=value ...` describes.

    FILE is a path or the name of a configuration in the package, such as digits. `base` maps dotted
    keys to values, which the file and the arguments override. Raises a ConfigError that names the
    key and the remedy.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = [("checkpoint", base or {})]
    if config_file is not None:
        path = _find(config_file)
        layers.append((str(path), loader.read_file(path)))
    layers.append(("argument", loader.read_arguments(arguments)))
    config = loader.build(Config, *layers)
    config.data.check()
    config.optim.check()
    for key in ("epochs", "log_every", "eval_batch", "timeout_seconds", "accumulate"):
        if getattr(config.train, key) <= 0:
            raise ConfigError(f"train.{key}={getattr(config.train, key)}: must be above 0")
    if config.train.timeout_seconds > _LONGEST_TIMEOUT:
        raise ConfigError(
            f"train.timeout_seconds={config.train.timeout_seconds:g}: must be at most a month ({_LONGEST_TIMEOUT});"
            " write, for example, 1800"
        )
    if not -(2**63) <= config.data.seed < 2**63:
        raise ConfigError(f"data.seed={config.data.seed}: must fit into 64 bits; write a smaller number")
    if config.train.accumulate > 1 and config.data.micro_batches:
        raise ConfigError(
            f"train.accumulate={config.train.accumulate} has no effect with"
            f" data.micro_batches={config.data.micro_batches}, which already divides the global batch; raise "
            f"data.micro_batches, and leave out train.accumulate"
        )
    evaluated, saved = config.train.eval_every, config.checkpoint.every_epochs
    if evaluated < 0:
        raise ConfigError(f"train.eval_every={evaluated}: must be at least 0; 0 means never")
    if config.checkpoint.keep_best and not evaluated:
        raise ConfigError(
            "checkpoint.keep_best needs evaluations, but train.eval_every=0 turns them off; set "
            "train.eval_every=1, or leave out checkpoint.keep_best"
        )
    if config.checkpoint.keep_best and saved > 0 and evaluated % saved:
        raise ConfigError(
            f"checkpoint.keep_best: with train.eval_every={evaluated} and "
            f"checkpoint.every_epochs={saved}, some evaluated epochs are not saved, so the best one "
            "may be lost; set checkpoint.every_epochs=1, or set train.eval_every to a multiple of "
            f"{saved}"
        )
    if config.model.pretrained and config.checkpoint.load is not None:
        raise ConfigError(
            f"model.pretrained={config.model.pretrained}: checkpoint.load={config.checkpoint.load} replaces all"
            " weights; leave out one of the two"
        )
    if config.model.sync_batchnorm:
        _check_synchronized(config)
    strategy_limits.check(config, config.strategy)
    return config


def _check_synchronized(config: Config) -> None:
    data = config.data
    fixed = {f"data.{key}": getattr(data, key) for key in ("micro_batches", "mixup", "cutmix", "batch_transform")}
    for key, value in {**fixed, "ddp.ordered": config.ddp.ordered}.items():
        if value:
            raise ConfigError(
                f"model.sync_batchnorm computes statistics over all ranks' samples, but {key} needs "
                "fixed micro-batches; leave out one of these keys (without model.sync_batchnorm, "
                "each micro-batch has its own statistics, whatever the number of ranks)"
            )


def shipped() -> list[str]:
    """Return the names of the configurations that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def _find(name: str) -> Path:
    path = Path(name)
    # A name such as cifar10 may belong to a folder as well as a configuration, so only a file
    # counts as a path.
    if path.is_file() or "/" in name or "." in name:
        return path
    if name not in shipped():
        names = ", ".join(shipped())
        raise ConfigError(
            f"--config {name}: there is no such file or built-in configuration; use a path or one of {names}"
        )
    return _SHIPPED / f"{name}.yaml"
