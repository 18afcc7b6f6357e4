"""LAMB, for large batches: Adam with a learning rate per layer.

You et al.: Large batch optimization for deep learning, training BERT in 76 minutes, 2019.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ddpjob_trainer.optim.grouped import GroupedOptimizer

_EPSILON = 1e-6


class Lamb(GroupedOptimizer):
    """Follows algorithm 2 of the paper, with Adam's bias correction.

    Apex's FusedLAMB and timm's Lamb do the same.

        m = b1 * m + (1 - b1) * g        v = b2 * v + (1 - b2) * g * g
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + 1e-6) + decay * w
        w = w - rate * (|w| / |u|) * u

    The ratio |w| / |u| is replaced by 1 if |w| or |u| is 0, and in a group without weight decay
    (normalization, biases).
    """

    def __init__(self, parameters: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step_group(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        first, second = group["betas"]
        states = [self.state[weight] for weight in weights]
        for state, weight in zip(states, weights, strict=True):
            if not state:
                state.update(
                    step=torch.zeros(()), exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight)
                )
            state["step"] += 1
        means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        gradients = [weight.grad for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - first)  # type: ignore[arg-type]
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)  # type: ignore[arg-type]
        counts = [float(state["step"]) for state in states]
        lengths = torch._foreach_div(squares, [1 - second**count for count in counts])
        torch._foreach_sqrt_(lengths)
        torch._foreach_add_(lengths, _EPSILON)
        steps = torch._foreach_div(means, [1 - first**count for count in counts])
        torch._foreach_div_(steps, lengths)
        if group["weight_decay"]:
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
            torch._foreach_mul_(steps, self._ratios(weights, steps))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])

    @staticmethod
    def _ratios(weights: list[torch.Tensor], steps: Any) -> list[torch.Tensor]:
        ratios = []
        for size, length in zip(torch._foreach_norm(weights), torch._foreach_norm(steps), strict=True):
            ratios.append(torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size)))
        return ratios
