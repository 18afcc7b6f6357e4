"""The training loss of a micro-batch."""

from __future__ import annotations

import torch
from torch import nn


def loss_sum(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of cross entropies in float32.

    logits (n, classes); labels: class numbers (n,), or shares of classes (n, classes). Label smoothing (Szegedy et al. 2015) takes
    `smoothing` of each label and spreads it over all classes. `weights` (n,) multiply samples' losses. A label of -100, and a row of shares
    that are all 0, weighs nothing.
    """
    if labels.is_floating_point() and smoothing:
        # Not torch's: that would give a row without shares some.
        labels = labels * (1 - smoothing) + labels.sum(1, keepdim=True) * (smoothing / labels.shape[1])
        smoothing = 0.0
    if weights is None:
        return nn.functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=smoothing)
    return (nn.functional.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing) * weights).sum()
