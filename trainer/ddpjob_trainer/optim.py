"""Optimizers, and the learning rate as a pure function of the step."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ddpjob_trainer.errors import ConfigError


class OptimizerName(enum.StrEnum):
    """The optimizers by name."""

    SGD = "sgd"
    ADAMW = "adamw"


class ScheduleName(enum.StrEnum):
    """The learning rate schedules by name."""

    COSINE = "cosine"
    STEP = "step"
    CONSTANT = "constant"


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: OptimizerName = OptimizerName.SGD
    """sgd (with momentum) or adamw."""
    lr: float = 0.1
    """Highest learning rate."""
    momentum: float = 0.9
    """sgd: momentum."""
    nesterov: bool = False
    """sgd: Nesterov's form of momentum."""
    weight_decay: float = 5e-4
    """sgd: L2 penalty; adamw: decoupled decay."""
    schedule: ScheduleName = ScheduleName.COSINE
    """cosine: to zero over the whole training; step: times optim.gamma at each of optim.milestones; constant."""
    warmup_epochs: float = 0.0
    """Linear rise from zero to optim.lr over so many epochs (fractions allowed)."""
    milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    """step: epochs at which the rate falls."""
    gamma: float = 0.1
    """step: factor at each milestone."""


def build_optimizer(config: OptimConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `config`. Raises ConfigError for values out of range."""
    for key, value in (("lr", config.lr), ("weight_decay", config.weight_decay), ("momentum", config.momentum)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"optim.{key}: {value} is not a finite number of at least 0")
    if config.name is OptimizerName.ADAMW:
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    if config.nesterov and config.momentum == 0:
        raise ConfigError("optim.nesterov: needs optim.momentum above 0; set it to 0.9, or leave optim.nesterov out")
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay)


def learning_rate(config: OptimConfig, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The rate for the step number `step` (from 0), of `total_steps` in all. Loshchilov and Hutter, SGDR, 2016, for the cosine."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.lr * (step + 1) / math.ceil(warmup)
    match config.schedule:
        case ScheduleName.CONSTANT:
            return config.lr
        case ScheduleName.STEP:
            passed = sum(step >= milestone * steps_per_epoch for milestone in config.milestones)
            return float(config.lr * config.gamma**passed)
        case ScheduleName.COSINE:
            done = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
            return config.lr * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
