"""Creates optimizers, and computes the learning rate as a pure function of the samples consumed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer.config.sections import OptimConfig, OptimizerName, ScheduleName
from ddpjob_trainer.distributed.dtensors import is_sharded
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.own_schedule import own_factor
from ddpjob_trainer.optim.parameter_groups import divide


def build_optimizer(
    config: OptimConfig,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    depths: Mapping[str, int] | None = None,
    computed_in: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Return the configured optimizer for `parameters`, which are pairs (name, parameter).

    `depths` maps the name of each of the model's parameters, including frozen parameters, to its
    depth (`model.depths`). optim.layer_decay needs the depths; see `parameter_groups`.
    `computed_in` is the number format that the model computes in. Raises ConfigError for values out
    of range.
    """
    check(config)
    named = list(parameters)
    weights = [weight for _, weight in named]
    groups = divide(config, named, depths)
    # On the CPU, fused kernels need half the time of unfused kernels for SGD, and a fifth for AdamW
    # (11 million weights, one core). Choose foreach kernels for DTensors (strategy=fsdp), because
    # torch does not have a fused SGD for DTensors, and its default kernels update DTensors one by
    # one.
    parts = any(is_sharded(weight) for weight in weights)
    kernels: dict[str, Any] = (
        {"foreach": True} if parts else {"fused": all(weight.device.type in ("cpu", "cuda") for weight in weights)}
    )
    rate, decay = config.lr, config.weight_decay
    match config.name:
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(
                groups, lr=rate, betas=(config.betas[0], config.betas[1]), weight_decay=decay, **kernels
            )
        case OptimizerName.LARS:
            from ddpjob_trainer.optim.lars import Lars

            return Lars(groups, rate, config.momentum, decay, config.trust_coefficient)
        case OptimizerName.LAMB:
            from ddpjob_trainer.optim.lamb import Lamb

            return Lamb(groups, rate, (config.betas[0], config.betas[1]), decay)
        case OptimizerName.MUON:
            from ddpjob_trainer.optim.muon import Muon

            # If the model computes in float32, Muon's iterations use float32 too. With bfloat16,
            # gradients that differ only in the order of their sums could be rounded to different
            # values.
            short = computed_in if computed_in is torch.float32 else torch.bfloat16
            return Muon(
                groups, rate, config.muon_momentum, decay, config.muon_steps, short, fixed_norm=config.muon_fixed_norm
            )
        case OptimizerName.SGD:
            return torch.optim.SGD(
                groups, lr=rate, momentum=config.momentum, nesterov=config.nesterov, weight_decay=decay, **kernels
            )
        case _:
            from ddpjob_trainer.optim.own_optimizer import build_own

            return build_own(config.name, groups, rate, decay)


def check(config: OptimConfig) -> None:
    """Raise ConfigError for invalid values in the section `optim`."""
    for key in (
        "lr",
        "weight_decay",
        "momentum",
        "muon_momentum",
        "trust_coefficient",
        "clip_norm",
        "warmup_epochs",
        "gamma",
        "end_factor",
    ):
        if not (math.isfinite(value := getattr(config, key)) and value >= 0):
            raise ConfigError(f"optim.{key}={value}: must be a finite number of at least 0")
    if config.nesterov and config.momentum == 0:
        raise ConfigError("optim.nesterov needs optim.momentum above 0; set it to 0.9, or leave optim.nesterov out")
    if config.muon_steps < 1:
        raise ConfigError(f"optim.muon_steps={config.muon_steps}: must be at least 1; 5 is usual")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(
            f"optim.betas={list(config.betas)}: must be two numbers that are at least 0 and below 1, for example"
            " [0.9, 0.999]"
        )
    for key in ("label_smoothing", "ema_decay"):
        if not 0 <= (value := getattr(config, key)) < 1:
            raise ConfigError(f"optim.{key}={value}: must be at least 0 and below 1; 0 turns it off")
    if not 0 < config.layer_decay <= 1:
        raise ConfigError(
            f"optim.layer_decay={config.layer_decay}: must be above 0 and at most 1, for example 0.75, or 1 for the"
            " same learning rate everywhere"
        )
    if config.schedule is ScheduleName.ONE_CYCLE:
        if config.warmup_epochs:
            raise ConfigError(
                "optim.warmup_epochs: optim.schedule=one_cycle has its own warm-up; set optim.rise, and"
                " optim.warmup_epochs=0"
            )
        if not 0 < config.rise < 1:
            raise ConfigError(f"optim.rise={config.rise}: must be between 0 and 1, for example 0.3")
        if not 0 < config.start_factor <= 1:
            raise ConfigError(
                f"optim.start_factor={config.start_factor}: must be above 0 and at most 1, for example 0.04"
            )


@dataclass(frozen=True)
class Position:
    """A step's position in training, in samples.

    A learning rate that is computed from this position does not depend on the batch sizes of
    earlier steps. `consumed` is the number of samples that all earlier steps took, over all epochs.
    An epoch has `size` samples, and a full step takes `batch` samples.
    """

    consumed: int
    size: int
    batch: int
    epochs: int

    @property
    def length(self) -> int:
        """The number of samples in a full step."""
        return min(self.batch, self.size)

    @property
    def total(self) -> int:
        """The number of samples in the whole run."""
        return self.size * self.epochs


def learning_rate(config: OptimConfig, at: Position) -> float:
    """Return the learning rate for the step at the position `at`.

    If all steps have the same size, the rate is the same as with torch's schedulers. cosine:
    Loshchilov and Hutter, SGDR, 2016. one_cycle: Smith and Topin, Super-convergence, 2018, in the
    form of torch's OneCycleLR.
    """
    warmup = config.warmup_epochs * at.size
    if at.consumed < warmup:
        return config.lr * min(1.0, (at.consumed + at.length) / warmup)
    match config.schedule:
        case ScheduleName.CONSTANT:
            return config.lr
        case ScheduleName.STEP:
            passed = sum(at.consumed >= milestone * at.size for milestone in config.milestones)
            return float(config.lr * config.gamma**passed)
        case ScheduleName.COSINE | ScheduleName.LINEAR:
            done = min(1.0, (at.consumed - warmup) / max(1.0, at.total - warmup))
            return config.lr * (1 - done) if config.schedule is ScheduleName.LINEAR else _cosine(config.lr, 0.0, done)
        # The rate peaks at `top`, and has reached its final value when the last step begins.
        case ScheduleName.ONE_CYCLE:
            first, last = config.lr * config.start_factor, config.lr * config.end_factor
            top = config.rise * at.total - at.length
            if at.consumed < top:
                return _cosine(first, config.lr, at.consumed / top)
            return _cosine(config.lr, last, min(1.0, (at.consumed - top) / (at.total - at.length - top)))
        case _:
            return config.lr * own_factor(config.schedule, at.consumed / at.size, at.epochs)


def _cosine(start: float, end: float, done: float) -> float:
    """Interpolate from `start` to `end` along half a cosine wave; `done` goes from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))
