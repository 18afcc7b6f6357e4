"""A step's normalization, model and loss as one region, which torch.compile compiles as a whole.

Problem: if only the model is compiled, the other parts of a step still launch their kernels one by
one, and a batch of a different size makes torch compile everything again. The last batch of each
epoch has such a size, and so does the last batch of an evaluation.

Rule: a region is compiled for the sizes of a full batch only. All other batches run eagerly, with
the same weights. Padding them instead would change the statistics of batch normalization.

Example: with 203 samples and data.batch=32, an epoch has six compiled steps of 32 samples and one
eager step of 11 samples. Training and evaluation are compiled once each, and never again.

In reduce-overhead mode, torch replays a region as CUDA graphs. The optimizer stays outside the
region, because its fused kernels take only one launch, and because its learning rate is a plain
number, which is not part of a graph.

Rejected: `torch.compile(optimizer.step)` with a tensor as the learning rate. torch 2.15 does not
compile fused optimizers: the graph breaks, nothing is compiled, and a step of SGD takes 0.19 ms of
host time instead of 0.14 ms (62 weights, as in ResNet-18). Compiled optimizers need foreach
kernels, which take twice as long on the CPU. On the CPU, SGD compiles two graphs in all, whether
its changing rate is a tensor or a number, and AdamW accepts a tensor only on GPUs. A graph of the
whole step would save at most the time of the optimizer's step and of the gradients' norm, 0.35 ms
of host time together. The possible gain has not been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from ddpjob_trainer.config.sections import CompileMode
from ddpjob_trainer.optim.loss import Loss

BACKEND = "inductor"
"""The backend with which torch.compile generates code. Tests that only count compilations set a
faster backend."""


def compiler_options(mode: bool | CompileMode, *, dynamic: bool | None) -> dict[str, Any]:
    """Return the arguments that torch.compile needs for the setting `model.compile`."""
    options: dict[str, Any] = {"backend": BACKEND, "dynamic": dynamic}
    return {**options, "mode": mode.value} if isinstance(mode, CompileMode) else options


class StepRegion(nn.Module):
    """Maps a batch to its sum of losses. Full-size batches run compiled; all others run eagerly."""

    def __init__(self, model: nn.Module, criterion: Loss, mode: bool | CompileMode) -> None:
        super().__init__()
        self.model, self._criterion = model, criterion
        self._normalize: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._sizes: Collection[int] = ()
        self._tested = 0
        self._fast_losses = torch.compile(self._losses, **compiler_options(mode, dynamic=False))
        self._fast_scores = torch.compile(self._scores, **compiler_options(mode, dynamic=False))

    def fix(
        self, sizes: Collection[int], tested: int, normalize: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        """Set the sizes of full batches in training (`sizes`) and in evaluation (`tested`).

        If `normalize` is given, images are passed to it before they are passed to the model.
        """
        self._sizes, self._tested, self._normalize = sizes, tested, normalize

    def forward(self, images: torch.Tensor, labels: torch.Tensor, unreadable: int = 0) -> torch.Tensor:
        """Return a batch's sum of losses."""
        if len(images) in self._sizes and not unreadable:
            return self._fast_losses(images, labels)
        return self._losses(images, labels, unreadable)

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        """Return the model's output for images, in memory that later calls do not overwrite."""
        if len(images) != self._tested:
            return self._scores(images)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self._fast_scores(images).clone()

    def _losses(self, images: torch.Tensor, labels: torch.Tensor, unreadable: int = 0) -> torch.Tensor:
        return self._criterion.total(self._scores(images), labels, unreadable)

    def _scores(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model(images if self._normalize is None else self._normalize(images))
        return scores
