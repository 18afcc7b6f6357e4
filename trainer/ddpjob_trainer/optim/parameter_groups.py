"""Divides a model's parameters into groups with their own learning rate and weight decay.

Four properties decide a parameter's group: whether weight decay applies to it
(`optim.decay_norm_and_bias`), whether muon updates it as sgd does (`optim.muon_except`), its depth
(`optim.layer_decay`), and the first pattern of `optim.groups` that its name matches. The learning
rate of a group is the schedule's rate, multiplied by one factor for the depth and one for the
pattern.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ddpjob_trainer.config import patterns
from ddpjob_trainer.config.sections import OptimConfig, OptimizerName
from ddpjob_trainer.errors import ConfigError

_NEVER_DECAYED = frozenset(
    {"class_token", "cls_token", "dist_token", "pos_embedding", "pos_embed", "relative_position_bias_table"}
    | {"layer_scale"}
)
"""The last parts of tensor names that torchvision's and timm's recipes exclude from weight decay,
in addition to biases and normalization. These tensors are not matrices, so muon does not
orthogonalize them.
"""
_SCALE = "lr_scale"
"""Key under which a parameter group stores its factor for the schedule's learning rate. timm uses
the same key."""


@dataclass(frozen=True)
class GroupRule:
    """One item of optim.groups. `decay` is None if the item does not change the weight decay."""

    pattern: str
    rate: float
    decay: float | None

    @classmethod
    def read(cls, text: str) -> GroupRule:
        """Parse an item of the form PATTERN=RATE or PATTERN=RATE/DECAY.

        Raises ConfigError if `text` does not have this form, or if a number is negative or not
        finite.
        """
        pattern, _, values = text.rpartition("=")
        rate, slash, decay = values.partition("/")
        try:
            numbers = [float(rate), *([float(decay)] if slash else [])]
            if not pattern or not all(math.isfinite(number) and number >= 0 for number in numbers):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"optim.groups={text}: must be PATTERN=RATE or PATTERN=RATE/DECAY with numbers of at least 0, for"
                " example head.*=10 or *.bias=2/0"
            ) from None
        return cls(pattern, numbers[0], numbers[1] if slash else None)


def check_rules(config: OptimConfig, names: Sequence[str], model: str) -> str:
    """Check optim.groups, and return a description of its effect for the log.

    `names` are the trained parameters of the whole model. Raises ConfigError if a pattern matches
    no parameter, or only parameters that earlier patterns have already matched.
    """
    left, found = list(names), []
    for rule in map(GroupRule.read, config.groups):
        matching = set(patterns.select("optim.groups", rule.pattern, names, model))
        count = len(matching.intersection(left))
        if not count:
            raise ConfigError(
                f"optim.groups: earlier patterns select all parameters that {rule.pattern!r} matches; "
                "move this pattern before them"
            )
        left = [name for name in left if name not in matching]
        decay = "" if rule.decay is None else f" and weight decay {rule.decay:g}"
        found.append(f"{count} tensors match {rule.pattern} ({rule.rate:g} times the learning rate{decay})")
    return f"optim.groups: {', '.join(found)}, {len(left)} others"


def divide(
    config: OptimConfig,
    named: Iterable[tuple[str, torch.nn.Parameter]],
    depths: Mapping[str, int] | None,
) -> list[dict[str, Any]]:
    """Return the parameter groups.

    Groups with weight decay come before groups without it, and shallow groups before deep groups.
    If the model has n depths, the learning rate at depth d is the schedule's rate, multiplied by
    optim.layer_decay^(n - 1 - d).
    """
    own: dict[str, Any] = {} if config.decay_norm_and_bias else {"weight_decay": 0.0}
    names = frozenset[str]() if config.decay_norm_and_bias else _NEVER_DECAYED
    if config.name == OptimizerName.LARS:
        own["adapt"] = False
    muon, plainly = config.name == OptimizerName.MUON, {"orthogonal": False, "momentum": config.momentum}
    rules = [GroupRule.read(text) for text in config.groups]
    by_depth = depths if depths is not None and config.layer_decay != 1 else {}
    deepest = max(by_depth.values(), default=0)
    members: dict[tuple[bool, bool, int, int], list[torch.nn.Parameter]] = {}
    for name, weight in named:
        last = name.rpartition(".")[2]
        apart = bool(own) and (weight.ndim <= 1 or last in names)
        rule = next((number for number, it in enumerate(rules) if fnmatchcase(name, it.pattern)), len(rules))
        vector = weight.ndim <= 1 or last in _NEVER_DECAYED
        plain = muon and (vector or any(fnmatchcase(name, pattern) for pattern in config.muon_except))
        members.setdefault((apart, plain, by_depth.get(name, 0), rule), []).append(weight)
    groups = []
    for (apart, plain, depth, number), weights in sorted(members.items(), key=lambda item: item[0]):
        group: dict[str, Any] = {"params": weights, **(own if apart else {}), **(plainly if plain else {})}
        if by_depth or rules:
            group[_SCALE] = config.layer_decay ** (deepest - depth) if by_depth else 1.0
        if number < len(rules):
            group[_SCALE] *= rules[number].rate
            if (decay := rules[number].decay) is not None:
                group["weight_decay"] = decay
        groups.append(group)
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group to `rate` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(_SCALE, 1.0)
