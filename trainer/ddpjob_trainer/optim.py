"""Optimizers, and the learning rate as a pure function of the step."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer.dtensors import is_sharded
from ddpjob_trainer.errors import ConfigError


class OptimizerName(enum.StrEnum):
    """The optimizers by name."""

    SGD = "sgd"
    ADAMW = "adamw"
    LARS = "lars"


class ScheduleName(enum.StrEnum):
    """The learning rate schedules by name."""

    COSINE = "cosine"
    STEP = "step"
    ONE_CYCLE = "one_cycle"
    CONSTANT = "constant"


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: OptimizerName = OptimizerName.SGD
    """sgd (with momentum), adamw, or lars: sgd for large batches, each layer's rate in proportion to its weights."""
    lr: float = 0.1
    """Highest learning rate."""
    momentum: float = 0.9
    """sgd, lars: momentum."""
    nesterov: bool = False
    """sgd: Nesterov's form of momentum."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """adamw: how slowly the means of gradients and of their squares change."""
    trust_coefficient: float = 0.001
    """lars: length of a step as a share of the weights' length, at a rate of 1."""
    weight_decay: float = 5e-4
    """sgd, lars: L2 penalty; adamw: decoupled decay."""
    decay_norm_and_bias: bool = True
    """false: no weight decay for biases and the weights of normalisation (parameters of one dimension). lars leaves these to plain sgd."""
    clip_norm: float = 0.0
    """Gradients (all together, unscaled) longer than this are shortened to it; 0: never."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes."""
    ema_decay: float = 0.0
    """Above 0, such as 0.999: a moving average of the weights is kept, and evaluated in their place; in checkpoints beside them."""
    schedule: ScheduleName = ScheduleName.COSINE
    """cosine: to zero over the whole training; step: times optim.gamma at each of optim.milestones; one_cycle: a rise and a longer fall,
    both as a cosine (torch's OneCycleLR; momentum stays as it is); constant."""
    warmup_epochs: float = 0.0
    """Linear rise from zero to optim.lr over so many epochs (fractions allowed). one_cycle has its own."""
    milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    """step: epochs at which the rate falls."""
    gamma: float = 0.1
    """step: factor at each milestone."""
    rise: float = 0.3
    """one_cycle: share of the training in which the rate rises."""
    start_factor: float = 0.04
    """one_cycle: the first rate as a share of optim.lr."""
    end_factor: float = 4e-6
    """one_cycle: the last rate as a share of optim.lr."""


def build_optimizer(config: OptimConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `config`; a group of its own for the parameters of one dimension where they are treated otherwise.

    Raises ConfigError for values out of range.
    """
    check(config)
    weights = list(parameters)
    groups = _groups(config, weights)
    # The fused kernels of the CPU take half the time for SGD and a fifth for AdamW (11 million weights, one core).
    # torch has no fused SGD for DTensors (fsdp), and by itself steps through these weight by weight.
    parts = any(is_sharded(weight) for weight in weights)
    kernels: dict[str, Any] = {"foreach": True} if parts else {"fused": all(weight.device.type in ("cpu", "cuda") for weight in weights)}
    rate, decay = config.lr, config.weight_decay
    match config.name:
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(groups, lr=rate, betas=(config.betas[0], config.betas[1]), weight_decay=decay, **kernels)
        case OptimizerName.LARS:
            from ddpjob_trainer.lars import Lars

            return Lars(groups, rate, config.momentum, decay, config.trust_coefficient)
        case OptimizerName.SGD:
            return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, nesterov=config.nesterov, weight_decay=decay, **kernels)


def _groups(config: OptimConfig, weights: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    own: dict[str, Any] = {} if config.decay_norm_and_bias else {"weight_decay": 0.0}
    if config.name is OptimizerName.LARS:
        own["adapt"] = False
    if not own:
        return [{"params": weights}]
    groups = [{"params": [w for w in weights if w.ndim > 1]}, {"params": [w for w in weights if w.ndim <= 1], **own}]
    return [group for group in groups if group["params"]]


def check(config: OptimConfig) -> None:
    """Raises ConfigError for values that make no sense."""
    for key in ("lr", "weight_decay", "momentum", "trust_coefficient", "clip_norm", "warmup_epochs", "gamma", "end_factor"):
        if not (math.isfinite(value := getattr(config, key)) and value >= 0):
            raise ConfigError(f"optim.{key}: {value} is not a finite number of at least 0")
    if config.nesterov and config.momentum == 0:
        raise ConfigError("optim.nesterov: needs optim.momentum above 0; set it to 0.9, or leave optim.nesterov out")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(f"optim.betas: {list(config.betas)} is not two numbers from 0 to below 1; write for example [0.9, 0.999]")
    for key in ("label_smoothing", "ema_decay"):
        if not 0 <= (value := getattr(config, key)) < 1:
            raise ConfigError(f"optim.{key}: {value} is not from 0 to below 1; 0 leaves it out")
    if config.schedule is ScheduleName.ONE_CYCLE:
        if config.warmup_epochs:
            raise ConfigError("optim.warmup_epochs: optim.schedule=one_cycle rises by itself; set optim.rise, and optim.warmup_epochs=0")
        if not (0 < config.rise < 1 and 0 < config.start_factor <= 1):
            raise ConfigError(
                f"optim.rise={config.rise} has to be between 0 and 1, optim.start_factor={config.start_factor} above 0 and 1 at most;"
                f" write for example optim.rise=0.3 optim.start_factor=0.04"
            )


def learning_rate(config: OptimConfig, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The rate for the step number `step` (from 0), of `total_steps` in all.

    cosine: Loshchilov and Hutter, SGDR, 2016. one_cycle: Smith and Topin, Super-convergence, 2018, in the form of torch's OneCycleLR.
    """
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
            return _cosine(config.lr, 0.0, done)
        case ScheduleName.ONE_CYCLE:
            first, last, top = config.lr * config.start_factor, config.lr * config.end_factor, config.rise * total_steps - 1
            if step < top:
                return _cosine(first, config.lr, step / top)
            return _cosine(config.lr, last, min(1.0, (step - top) / (total_steps - 1 - top)))


def _cosine(start: float, end: float, done: float) -> float:
    """From `start` to `end` along half a cosine wave; `done` from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
