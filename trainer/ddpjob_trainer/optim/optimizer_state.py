"""Stores an optimizer's state by parameter name, so that any strategy can load it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ddpjob_trainer.distributed.dtensors import is_sharded


def named_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: list[tuple[str, nn.Parameter]]
) -> dict[str, Any]:
    """Return an optimizer's state, keyed by parameter name instead of parameter number."""
    state = {name: optimizer.state[parameter] for name, parameter in parameters if parameter in optimizer.state}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": state, "groups": groups}


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: list[tuple[str, nn.Parameter]],
    state: dict[str, Any],
    frozen: Collection[str] = (),
) -> None:
    """Load a result of `named_optimizer_state`, except for weights that are now `frozen`.

    Raises KeyError or ValueError if the state belongs to different parameters.
    """
    names = {parameter: name for name, parameter in parameters}
    numbered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    saved = {name: values for name, values in state["state"].items() if name not in frozen}
    if unknown := set(saved) - set(numbered):
        raise KeyError(f"the optimizer's state has {', '.join(sorted(unknown)[:3])}, which the model does not have")
    # Saved learning rates, decays and so on are not used. The configuration determines these
    # values, and may have changed.
    groups, first = [], 0
    for group in optimizer.param_groups:
        groups.append({**group, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    own = dict(parameters)
    if isinstance(optimizer, torch.optim.SGD) and any(
        isinstance(values.get("momentum_buffer"), torch.Tensor) for values in saved.values()
    ):
        # A weight that was frozen when the state was saved has no momentum. Fused SGD requires
        # momentum for all weights or for none, so such a weight gets the initial value, zero.
        saved = {name: saved.get(name) or {"momentum_buffer": torch.zeros_like(own[name])} for name in numbered}
    by_number = {
        number: {key: laid_out_as(value, own[name]) for key, value in saved[name].items()}
        for number, name in enumerate(numbered)
        if name in saved
    }
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def laid_out_as(value: Any, weight: torch.Tensor) -> Any:
    """Return `value`, a gradient or moment of `weight`, in the memory layout of `weight`.

    Fused optimizers need this, because they traverse both tensors in memory order. A value with a
    different shape is returned unchanged.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != weight.shape or is_sharded(weight):
        return value
    if value.stride() == weight.stride():
        return value
    return torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)
