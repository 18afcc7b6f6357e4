"""The user's own optimizer (`optim.name=package.module:name`), checked before training.

The optimizer must continue from a checkpoint as if there had been no restart. A checkpoint contains
only `optimizer.state[parameter]`. Learning rates and other settings of a group come from the
configuration. An optimizer that counts its steps in `self.steps` or in a group would silently train
differently after each restart. To detect this, copies of the optimizer take 40 steps on small
stand-ins for the model's parameters:

    copy 1    step 1 ... 7  save  step 8 ... 17  save  step 18 ... 40
    copy 2                  load  step 8 ...           step 18 ... 40    refused at the first step
    copy 3                                       load  step 18 ... 40    that differs from copy 1

The check loads twice because an optimizer may act only every seventh step. For such an optimizer,
the first load comes after a whole period, so this load alone would not show an error. State that
takes effect only after step 40 is not detected. The copies get different random numbers, as ranks
would.
"""

from __future__ import annotations

import io
import math
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
"""Maximum length of each dimension in a stand-in."""
_LOADS, _STEPS = (7, 17), 40
_RATE = 0.1
"""Learning rate for the first step in the check. The user's own rate may be too small to move the
stand-ins.
"""
_CALL = "the call name(groups, lr=..., weight_decay=...)"
_OF_STEPS = {"params", "lr"}
"""Keys in a parameter group that are not compared because the trainer sets them."""
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
_Copy = tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]


def build_own(name: str, groups: list[dict[str, Any]], lr: float, decay: float) -> torch.optim.Optimizer:
    """Return the optimizer that the user's function `name` builds for `groups`.

    Raises ConfigError if the optimizer could not continue from a checkpoint.
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
                f"optim.name={name}: param_groups must contain each given parameter once, and each group needs "
                "an lr, which the schedule sets; pass the groups to torch.optim.Optimizer.__init__"
            )
        return found

    _check_resumes(name, make, groups)
    return make(groups)


def _check_resumes(name: str, make: Make, groups: list[dict[str, Any]]) -> None:
    """Raise ConfigError if loading a checkpoint changes the steps that the optimizer takes."""

    def stand_ins(weights: list[torch.Tensor]) -> list[nn.Parameter]:
        # One stand-in for each kind of parameter is enough. Copying all parameters of a ResNet-50
        # would take seconds at each start.
        kinds = dict.fromkeys((tuple(min(side, _SIDE) for side in it.shape), it.dtype, it.device) for it in weights)
        return [
            nn.Parameter(torch.linspace(-1, 1, math.prod(sides), dtype=dtype).reshape(sides).to(device))
            for sides, dtype, device in kinds
        ]

    def copy(source: list[nn.Parameter]) -> _Copy:
        weights = [nn.Parameter(weight.detach().clone()) for weight in source]
        left = iter(weights)
        optimizer = make([{**group, "params": [next(left) for _ in group["params"]]} for group in groups])
        return optimizer, [(str(number), weight) for number, weight in enumerate(weights)]

    def resume(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]) -> _Copy:
        content = io.BytesIO()
        try:
            torch.save(named_optimizer_state(optimizer, named), content)
            content.seek(0)
            saved = torch.load(content, weights_only=True)
            other, loaded = copy([weight for _, weight in named])
            load_named_optimizer_state(other, loaded, saved)
        except TrainerError:
            raise
        except Exception as error:
            raise ConfigError(
                f"optim.name={name}: a checkpoint cannot hold its state ({first_line(error)}); keep tensors and"
                " numbers in self.state[parameter]"
            ) from error
        return other, loaded

    def step(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], number: int, seed: int) -> None:
        set_learning_rate(optimizer, _RATE / number)
        for _, weight in named:
            weight.grad = torch.cos(number + 3 * weight.detach())
        with explain("optim.name", name, "step()"), seed_draws(seed):
            optimizer.step()

    groups = [{**group, "params": stand_ins(group["params"])} for group in groups]
    first = copy([weight for group in groups for weight in group["params"]])
    resumed: dict[int, _Copy] = {}
    for number in range(1, _STEPS + 1):
        step(*first, number, seed=number)
        for loaded, other in resumed.items():
            step(*other, number, seed=_STEPS * loaded + number)
            if not _are_same(first, other):
                raise ConfigError(
                    f"optim.name={name}: step {number} differs after a checkpoint of step {loaded} is loaded, so "
                    "a restart would change the training; keep the optimizer's whole state in "
                    "self.state[parameter], and do not draw random numbers"
                )
        if number in _LOADS:
            resumed[number] = resume(*first)


def _are_same(one: _Copy, other: _Copy) -> bool:
    """Return whether two copies have the same weights and settings.

    Their learning rates are not compared.
    """

    def settings(optimizer: torch.optim.Optimizer) -> str:
        groups = [{key: plain(group[key]) for key in group.keys() - _OF_STEPS} for group in optimizer.param_groups]
        return repr([sorted(group.items()) for group in groups])

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return list(map(plain, value)) if isinstance(value, list | tuple) else value

    pairs = zip(one[1], other[1], strict=True)
    same = all(
        torch.equal(first.detach().nan_to_num(), second.detach().nan_to_num()) for (_, first), (_, second) in pairs
    )
    return same and settings(one[0]) == settings(other[0])
