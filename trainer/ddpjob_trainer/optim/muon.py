"""Muon: SGD whose updates of matrices are orthogonalized.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

Problem: the updates that SGD and Adam compute for a matrix are dominated by a few directions, so
the matrix learns little in all other directions. Rule: replace an update with singular value
decomposition U S V by roughly U V, which changes all directions by the same amount. A decomposition
would be slow. `orthogonalize` therefore iterates a polynomial that moves each singular value into
the range from 0.7 to 1.2.

Example: a convolution with 64 outputs, 24 inputs and a 3x3 kernel is treated as a matrix of 64 x
216. Biases, normalization, and the matrices named in optim.muon_except are updated as in SGD.

The iterations consist of matrix products, so a matrix must be whole on the rank that updates it
(config/strategy_limits.py). Each rank computes the products from the same gradients. Ranks with
different kinds of devices would round differently, and their weights would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ddpjob_trainer.optim.grouped import GroupedOptimizer

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the polynomial a x + b x^3 + c x^5, which each iteration applies to the singular
values. Among the polynomials whose iteration converges, this one has the steepest slope at 0.
"""
_EPSILON = 1e-7


class Muon(GroupedOptimizer):
    """Applies Nesterov's momentum, then takes an orthogonalized step with each matrix.

    A weight with more than two dimensions is treated as a matrix (rows, all other dimensions).

        v = momentum * v + g        u = g + momentum * v
        matrices:                   w = (1 - rate * decay) * w - rate * scale * orthogonalize(u)
        groups with `orthogonal` false, with g + decay * w in place of g:  w = w - rate * u

    As in the authors' code, scale = max(1, rows / columns) ** 0.5 for matrices and 1 for
    convolutions. With `fixed_norm`, w is first scaled to the norm sqrt(rows), as in Jordan's
    airbench94_muon, and weight decay does not apply.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        momentum: float,
        weight_decay: float,
        steps: int,
        short: torch.dtype,
        *,
        fixed_norm: bool,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "orthogonal": True})
        self._steps, self._short, self._fixed_norm = steps, short, fixed_norm

    def _step_group(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        rate, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        gradients: Any = [weight.grad for weight in weights]
        if decay and not group["orthogonal"]:
            gradients = torch._foreach_add(gradients, weights, alpha=decay)
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, gradients)
        updates = torch._foreach_add(gradients, momenta, alpha=momentum)
        if not group["orthogonal"]:
            torch._foreach_add_(weights, updates, alpha=-rate)
            return
        for weight, update in zip(weights, updates, strict=True):
            step = orthogonalize(update.reshape(len(update), -1), self._steps, self._short)
            if self._fixed_norm:
                weight.mul_(len(weight) ** 0.5 / weight.norm().clamp(min=_EPSILON))
            elif decay:
                weight.mul_(1 - rate * decay)
            scale = max(1, len(weight) / weight.shape[1]) ** 0.5 if weight.ndim == 2 else 1.0
            weight.add_(step.reshape(weight.shape), alpha=-rate * scale)


def orthogonalize(matrix: torch.Tensor, steps: int, short: torch.dtype) -> torch.Tensor:
    """Return roughly U V for a matrix whose singular value decomposition is U S V.

    The result comes from `steps` Newton-Schulz iterations in the number format `short`.
    """
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    # Dividing by the norm makes all singular values at most 1, so the iterations converge.
    x = wide.to(short)
    x = x / (x.norm() + _EPSILON)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return (x if wide is matrix else x.T).to(matrix.dtype)
