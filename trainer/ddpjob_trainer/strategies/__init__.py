"""Ways in which ranks share a training, one file each. A new one: a subclass of Strategy, and a line in each of the two lists here."""

from __future__ import annotations

import enum
import importlib
from typing import TYPE_CHECKING

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.group import Group

if TYPE_CHECKING:
    from ddpjob_trainer.config import Config
    from ddpjob_trainer.strategies.base import Strategy


class StrategyName(enum.StrEnum):
    """The strategies by name."""

    SINGLE = "single"
    DP = "dp"
    DDP = "ddp"
    HOROVOD = "horovod"
    DEEPSPEED = "deepspeed"
    PARAMETER_SERVER = "parameter_server"
    FSDP = "fsdp"
    DDP_MP = "ddp_mp"
    PIPELINE = "pipeline"


_CLASSES = {
    StrategyName.SINGLE: "single:Single",
    StrategyName.DP: "dp:Dp",
    StrategyName.DDP: "ddp:Ddp",
    StrategyName.HOROVOD: "horovod:Horovod",
    StrategyName.DEEPSPEED: "deepspeed:DeepSpeed",
    StrategyName.PARAMETER_SERVER: "parameter_server:ParameterServer",
    StrategyName.FSDP: "fsdp:Fsdp",
    StrategyName.DDP_MP: "ddp_mp:DdpMp",
    StrategyName.PIPELINE: "pipeline:Pipeline",
}


def enter(config: Config) -> None:
    """Before ranks look at their environment: a strategy with a launcher of its own translates what that has set. Raises ConfigError."""
    if config.strategy is StrategyName.HOROVOD:
        from ddpjob_trainer.strategies import horovod

        horovod.enter()


def devices_per_rank(config: Config) -> int:
    """How many devices a process computes on."""
    return config.ddp_mp.devices if config.strategy is StrategyName.DDP_MP else 1


def open_strategy(config: Config, group: Group, device: torch.device) -> Strategy:
    """The strategy that the configuration names. Raises ConfigError when it does not fit the ranks or the configuration."""
    _check_that_ddp_applies(config)
    module, _, name = _CLASSES[config.strategy].partition(":")
    kind: type[Strategy] = getattr(importlib.import_module(f"ddpjob_trainer.strategies.{module}"), name)
    return kind(config, group, device)


def _check_that_ddp_applies(config: Config) -> None:
    name, ordered, hook = config.strategy, config.ddp.ordered, config.ddp.comm_hook
    if ordered and name in (StrategyName.HOROVOD, StrategyName.DEEPSPEED, StrategyName.PARAMETER_SERVER):
        raise ConfigError(f"ddp.ordered: strategy={name} adds gradients up by ranks; leave it out, or set strategy=ddp")
    if hook != "none" and name not in (StrategyName.DDP, StrategyName.DDP_MP):
        raise ConfigError(f"ddp.comm_hook={hook}: strategy={name} sends nothing through DDP; leave it out, or set strategy=ddp or ddp_mp")
