"""LARS, for large batches: SGD with a learning rate per layer.

You, Gitman, Ginsburg: Large batch training of ConvNets, 2017.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ddpjob_trainer.optim.grouped import GroupedOptimizer


class Lars(GroupedOptimizer):
    """SGD with momentum that scales the step of each parameter as in the paper's algorithm 1.

        local = trust * |w| / (|g| + decay * |w|)
        v = momentum * v + rate * local * (g + decay * w)
        w = w - v

    `local` is 1 in a group whose `adapt` is false, and for a parameter whose values or gradients
    are all 0.
    """

    def __init__(
        self, parameters: Iterable[Any], lr: float, momentum: float, weight_decay: float, trust: float
    ) -> None:
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": True}
        )

    def _step_group(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        momenta = [self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight)) for weight in weights]
        steps = torch._foreach_add([weight.grad for weight in weights], weights, alpha=group["weight_decay"])  # type: ignore[misc]
        if group["adapt"]:
            torch._foreach_mul_(steps, self._local_rates(group, weights))
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, steps, alpha=group["lr"])
        torch._foreach_sub_(weights, momenta)

    @staticmethod
    def _local_rates(group: dict[str, Any], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = torch._foreach_norm(weights)
        slopes = torch._foreach_norm([weight.grad for weight in weights])  # type: ignore[misc]
        rates = []
        for size, slope in zip(sizes, slopes, strict=True):
            local = group["trust"] * size / (slope + group["weight_decay"] * size)
            rates.append(torch.where((size > 0) & (slope > 0), local, torch.ones_like(local)))
        return rates
