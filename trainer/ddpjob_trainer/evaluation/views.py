"""Test-time augmentation: the mean of a model's scores over several versions of an image.

The mean weights the versions as airbench does (Jordan, 2024). Shifts reflect the border, as torch's
padding mode `reflect` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddpjob_trainer.config.sections import Padding, Views
from ddpjob_trainer.data.augment import pad
from ddpjob_trainer.errors import ConfigError

Scores = Callable[[torch.Tensor], torch.Tensor]
"""A function that returns the scores (n, ...) of images (n, channels, height, width)."""


def over_views(scores: Scores, views: Views, shape: tuple[int, ...]) -> Scores:
    """Return a function that computes the mean of `scores` over versions of each image.

    `views` selects the versions. The mean is computed in float32. Raises ConfigError if inputs of
    `shape` are not images.
    """
    if views is Views.NONE:
        return scores
    if len(shape) != 3 or min(shape[1:]) < 2:
        raise ConfigError(
            f"eval.tta={views.value} needs images (channels, height, width), but the data's samples "
            f"have the shape {shape}; leave out eval.tta"
        )

    def mirrored(images: torch.Tensor) -> torch.Tensor:
        return 0.5 * scores(images).float() + 0.5 * scores(images.flip(-1)).float()

    def shifted(images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        padded = pad(images, 1, Padding.REFLECT)
        corners = padded[:, :, :height, :width], padded[:, :, 2:, 2:]
        moved = torch.stack([mirrored(corner.contiguous()) for corner in corners]).mean(0)
        return 0.5 * mirrored(images) + 0.5 * moved

    return mirrored if views is Views.MIRROR else shifted
