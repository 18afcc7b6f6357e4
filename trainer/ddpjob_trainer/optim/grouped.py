"""A base class for optimizers that update all weights of a parameter group together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer that calls `_step_group` for each group that has weights with a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with all parameter groups."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step_group(group, weights)

    @abstractmethod
    def _step_group(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        """Update `weights`, all of which belong to `group`, and their optimizer states."""
