"""Augmentation whose randomness is a function of (seed, epoch, sample), so that it does not change with the number of ranks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from ddpjob_trainer.randomness import uniform


def crop_and_flip(images: torch.Tensor, seed: int, epoch: int, samples: npt.NDArray[np.int64], *, padding: int, flip: bool) -> torch.Tensor:
    """Each image shifted by up to `padding` pixels (zeros come in) and, if `flip`, mirrored with probability one half.

    images: (n, channels, height, width); samples: their numbers (n,).
    He et al., Deep residual learning, 2015, section 4.2: padding 4 for CIFAR.
    """
    count, channels, height, width = images.shape
    draws = torch.from_numpy(uniform(seed, epoch, samples, 3))
    top = (draws[:, 0] * (2 * padding + 1)).long()
    left = (draws[:, 1] * (2 * padding + 1)).long()
    columns = torch.arange(width).expand(count, width)
    if flip:
        columns = torch.where((draws[:, 2] < 0.5)[:, None], columns.flip(1), columns)
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + columns
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    numbers, planes = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[numbers, planes, rows[:, None, :, None], columns[:, None, None, :]]


def resized_crop_box(draws: npt.NDArray[np.float64], height: int, width: int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random crop of 8 to 100 % of the area, sides from 3:4 to 4:3; draws: (10, 4) uniform numbers.

    Szegedy et al., Going deeper with convolutions, 2014; as torchvision's RandomResizedCrop, ten tries and then the middle.
    """
    for area_draw, ratio_draw, top_draw, left_draw in draws:
        area = height * width * (0.08 + 0.92 * area_draw)
        ratio = math.exp(math.log(3 / 4) + ratio_draw * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w
