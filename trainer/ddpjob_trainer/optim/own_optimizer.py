"""The user's own optimizer (`optim.name=package.module:name`), checked before training.

The optimizer must continue from a checkpoint as if there had been no restart. A checkpoint contains
`optimizer.state[parameter]`. Learning rates and other settings of a group come from the
configuration. An optimizer that counts its steps in `self.steps` or in a group would silently train
differently after each restart, so two copies of it take a few steps on small stand-ins for the
model's parameters:

    copy 1    step  step  save  step -> weights a
    copy 2                load  step -> weights b    refused unless a = b

The two copies draw different random numbers, because ranks would do so too.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpjob_trainer.data.randomness import seed_draws
from ddpjob_trainer.errors import ConfigError, TrainerError, first_line
from ddpjob_trainer.optim.optimizer_state import load_named_optimizer_state, named_optimizer_state
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from ddpjob_trainer.own_functions import explain, load_function

_SIDE = 4
"""Maximum length of a stand-in's dimensions."""
_CALL = "a call as name(groups, lr=..., weight_decay=...)"
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def build_own(name: str, groups: list[dict[str, Any]], lr: float, decay: float) -> torch.optim.Optimizer:
    """Return the optimizer that `name` builds for `groups`.

    Raises ConfigError if it could not continue from a checkpoint.
    """
    function = load_function("optim.name", name)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        wanted = [weight for group in groups for weight in group["params"]]
        with explain("optim.name", name, _CALL):
            found = function(groups, lr=lr, weight_decay=decay)
        if not isinstance(found, torch.optim.Optimizer):
            raise ConfigError(
                f"optim.name={name}: {_CALL} returned {type(found).__name__}; return a torch.optim.Optimizer"
            )
        held = [weight for group in found.param_groups for weight in group["params"]]
        if sorted(map(id, held)) != sorted(map(id, wanted)) or not all("lr" in group for group in found.param_groups):
            raise ConfigError(
                f"optim.name={name}: its param_groups must hold each given parameter once, and each group's lr, which"
                " the schedule sets; pass the groups to torch.optim.Optimizer.__init__"
            )
        return found

    _check_resumes(name, make, groups, lr)
    return make(groups)


def _check_resumes(name: str, make: Make, groups: list[dict[str, Any]], lr: float) -> None:
    """Raise ConfigError if a copy that loads the state of another one takes a different step."""

    def stand_in(weight: torch.Tensor) -> nn.Parameter:
        sides = [min(side, _SIDE) for side in weight.shape]
        values = torch.linspace(-1, 1, torch.Size(sides).numel(), dtype=weight.dtype).reshape(sides)
        return nn.Parameter(values.to(weight.device))

    def copies(source: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]:
        weights = [nn.Parameter(weight.detach().clone()) for weight in source]
        left = iter(weights)
        optimizer = make([{**group, "params": [next(left) for _ in group["params"]]} for group in groups])
        return optimizer, [(str(number), weight) for number, weight in enumerate(weights)]

    def step(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], number: int, seed: int) -> None:
        set_learning_rate(optimizer, (lr or 0.1) / number)
        for _, weight in named:
            weight.grad = torch.cos(number + 3 * weight.detach())
        with explain("optim.name", name, "step()"), seed_draws(seed):
            optimizer.step()

    first, named = copies([stand_in(weight) for group in groups for weight in group["params"]])
    for number in (1, 2):
        step(first, named, number, seed=number)
    content = io.BytesIO()
    try:
        torch.save(named_optimizer_state(first, named), content)
        content.seek(0)
        saved = torch.load(content, weights_only=True)
        second, loaded = copies([weight for _, weight in named])
        load_named_optimizer_state(second, loaded, saved)
    except TrainerError:
        raise
    except Exception as error:
        raise ConfigError(
            f"optim.name={name}: a checkpoint cannot hold its state ({first_line(error)}); keep tensors and numbers in"
            " self.state[parameter]"
        ) from error
    step(first, named, 3, seed=3)
    step(second, loaded, 3, seed=4)
    if any((one - other).any() for (_, one), (_, other) in zip(named, loaded, strict=True)):
        raise ConfigError(
            f"optim.name={name}: after a checkpoint is loaded, its next step differs, so a restart would change the"
            " training; keep all of its state in self.state[parameter], and do not draw random numbers"
        )
