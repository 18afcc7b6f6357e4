"""Chooses a strategy by name and imports only that strategy's module."""

from __future__ import annotations

import importlib

import torch

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import StrategyName
from ddpjob_trainer.distributed.devices import devices_per_rank
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.strategies.strategy import Strategy

_CLASSES = {
    StrategyName.SINGLE: "ddpjob_trainer.strategies.single:Single",
    StrategyName.DP: "ddpjob_trainer.strategies.contrib.dp:Dp",
    StrategyName.DDP: "ddpjob_trainer.strategies.ddp:Ddp",
    StrategyName.HOROVOD: "ddpjob_trainer.strategies.contrib.horovod:Horovod",
    StrategyName.DEEPSPEED: "ddpjob_trainer.strategies.contrib.deepspeed:DeepSpeed",
    StrategyName.PARAMETER_SERVER: "ddpjob_trainer.strategies.contrib.parameter_server:ParameterServer",
    StrategyName.FSDP: "ddpjob_trainer.strategies.fsdp:Fsdp",
    StrategyName.DDP_MP: "ddpjob_trainer.strategies.contrib.ddp_mp:DdpMp",
    StrategyName.PIPELINE: "ddpjob_trainer.strategies.pipeline:Pipeline",
}


def enter(config: Config) -> None:
    """Translate the environment variables of a strategy's own launcher into torchrun's.

    Must run before a rank reads its environment variables. Raises ConfigError if Horovod is
    missing, or runs in its own elastic mode.
    """
    if config.strategy is StrategyName.HOROVOD:
        from ddpjob_trainer.strategies.contrib import horovod

        horovod.enter()


def computes_on(config: Config, device: torch.device) -> int:
    """Return the number of devices on which a process computes, if `device` is the first of them.

    On the CPU, the result is 1, because the whole CPU is a single device.
    """
    if device.type == "cpu":
        return 1
    if config.strategy is StrategyName.DP:
        return max(1, int(getattr(torch, device.type).device_count()))
    return devices_per_rank(config)


def open_strategy(config: Config, group: Group, device: torch.device) -> Strategy:
    """Return an instance of the strategy that the configuration names.

    Raises ConfigError if the strategy does not suit the number of ranks or the other settings.
    """
    module, _, name = _CLASSES[config.strategy].partition(":")
    kind: type[Strategy] = getattr(importlib.import_module(module), name)
    return kind(config, group, device)
