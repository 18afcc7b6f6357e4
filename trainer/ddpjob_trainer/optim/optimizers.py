"""Optimizers, and the learning rate as a pure function of the samples consumed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer.config.sections import OptimConfig, OptimizerName, ScheduleName
from ddpjob_trainer.distributed.dtensors import is_sharded
from ddpjob_trainer.errors import ConfigError


def build_optimizer(
    config: OptimConfig,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    depths: Mapping[str, int] | None = None,
) -> torch.optim.Optimizer:
    """Return the configured optimizer for named parameters.

    Parameters without weight decay get a separate group. `depths` covers all the model's parameters
    (`model.depths`), including frozen ones, for optim.layer_decay; each depth gets separate groups.
    Raises ConfigError for values out of range.
    """
    check(config)
    named = list(parameters)
    weights = [weight for _, weight in named]
    groups = _groups(config, named)
    if depths is not None and config.layer_decay != 1:
        groups = _by_depth(config.layer_decay, groups, named, depths)
    # On the CPU, fused kernels take half the time for SGD and a fifth for AdamW (11 million
    # weights, one core). torch does not support fused SGD for DTensors (fsdp), which it updates one
    # by one by default.
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
        case OptimizerName.SGD:
            return torch.optim.SGD(
                groups, lr=rate, momentum=config.momentum, nesterov=config.nesterov, weight_decay=decay, **kernels
            )


_NEVER_DECAYED = frozenset(
    {"class_token", "cls_token", "dist_token", "pos_embedding", "pos_embed", "relative_position_bias_table"}
    | {"layer_scale"}
)
"""Final components of tensor names that torchvision's and timm's recipes exclude from weight decay,
in addition to biases and normalization.
"""


def _groups(config: OptimConfig, named: list[tuple[str, torch.nn.Parameter]]) -> list[dict[str, Any]]:
    own: dict[str, Any] = {} if config.decay_norm_and_bias else {"weight_decay": 0.0}
    if config.name is OptimizerName.LARS:
        own["adapt"] = False
    if not own:
        return [{"params": [weight for _, weight in named]}]
    names = frozenset() if config.decay_norm_and_bias else _NEVER_DECAYED
    apart = [weight.ndim <= 1 or name.rpartition(".")[2] in names for name, weight in named]
    groups = [
        {"params": [weight for (_, weight), other in zip(named, apart, strict=True) if not other]},
        {"params": [weight for (_, weight), other in zip(named, apart, strict=True) if other], **own},
    ]
    return [group for group in groups if group["params"]]


_SCALE = "lr_scale"
"""A parameter group's key for its share of the schedule's learning rate. timm uses the same key."""


def _by_depth(
    decay: float,
    groups: list[dict[str, Any]],
    named: list[tuple[str, torch.nn.Parameter]],
    depths: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Divide each group by depth, deepest last.

    At depth d of n, the rate is decay^(n - 1 - d) times the schedule's.
    """
    names = {weight: name for name, weight in named}
    deepest = max(depths.values())
    divided = []
    for group in groups:
        for depth in sorted({depths[names[weight]] for weight in group["params"]}):
            own = [weight for weight in group["params"] if depths[names[weight]] == depth]
            divided.append({**group, "params": own, _SCALE: decay ** (deepest - depth)})
    return divided


def check(config: OptimConfig) -> None:
    """Raise ConfigError for invalid values."""
    for key in (
        "lr",
        "weight_decay",
        "momentum",
        "trust_coefficient",
        "clip_norm",
        "warmup_epochs",
        "gamma",
        "end_factor",
    ):
        if not (math.isfinite(value := getattr(config, key)) and value >= 0):
            raise ConfigError(f"optim.{key}={value}: must be a finite number of at least 0")
    if config.nesterov and config.momentum == 0:
        raise ConfigError("optim.nesterov: needs optim.momentum above 0; set it to 0.9, or leave optim.nesterov out")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(
            f"optim.betas={list(config.betas)}: must be two numbers from 0 to below 1, for example [0.9, 0.999]"
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
        if not (0 < config.rise < 1 and 0 < config.start_factor <= 1):
            raise ConfigError(
                f"optim.rise={config.rise} must be between 0 and 1, optim.start_factor={config.start_factor} above 0"
                " and at most 1, for example optim.rise=0.3 optim.start_factor=0.04"
            )


@dataclass(frozen=True)
class Position:
    """The position of a step in the training, in samples.

    Learning rates therefore do not depend on earlier steps' batches. `consumed` samples over all
    epochs were taken before the step; an epoch has `size` samples, and a full step takes `batch`.
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
        """The number of samples in the whole training."""
        return self.size * self.epochs


def learning_rate(config: OptimConfig, at: Position) -> float:
    """Return the learning rate for the step at a position.

    With equal steps, it is the same as with torch's schedulers. cosine: Loshchilov and Hutter,
    SGDR, 2016. one_cycle: Smith and Topin, Super-convergence, 2018, in the form of torch's
    OneCycleLR.
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
        case ScheduleName.COSINE:
            done = min(1.0, (at.consumed - warmup) / max(1.0, at.total - warmup))
            return _cosine(config.lr, 0.0, done)
        # The rate peaks at `top` and has fallen when the last step begins.
        case ScheduleName.ONE_CYCLE:
            first, last = config.lr * config.start_factor, config.lr * config.end_factor
            top = config.rise * at.total - at.length
            if at.consumed < top:
                return _cosine(first, config.lr, at.consumed / top)
            return _cosine(config.lr, last, min(1.0, (at.consumed - top) / (at.total - at.length - top)))


def _cosine(start: float, end: float, done: float) -> float:
    """Interpolate from `start` to `end` along half a cosine wave; `done` is from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every parameter group's learning rate; groups by depth get their shares of the rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(_SCALE, 1.0)
