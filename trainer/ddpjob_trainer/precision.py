"""Number formats of the arithmetic: what the model computes in, what the optimizer works on, and how losses are scaled."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Update:
    """What became of an optimizer step: the gradient's norm before clipping, and whether the step was left out (not finite)."""

    norm: float
    skipped: bool


class Precision:
    """float32 throughout."""

    def convert(self, model: nn.Module) -> nn.Module:
        """The model in the formats that it computes in; before it is wrapped."""
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """For the forward pass and the loss."""
        return nullcontext()

    def parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer works on, by the model's names."""
        return list(model.named_parameters())

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a loss, scaled."""
        torch.autograd.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Update:
        """Unscale, clip, step; nothing but the first when a gradient is not finite. The same on every rank whose gradients are."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        skipped = not torch.isfinite(torch.tensor(norm)).item()
        if not skipped:
            optimizer.step()
        return Update(norm, bool(skipped))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
