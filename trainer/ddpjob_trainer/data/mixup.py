"""Mixup and CutMix, which mix images of a micro-batch in pairs, together with their labels.

The micro-batch's key determines the mixing ratio, the rectangle and the choice between the two
methods. An image's position in the micro-batch determines its partner. Therefore, the mixed images
are the same on any number of ranks. As in torchvision.transforms.v2.MixUp and CutMix, an image's
partner is the previous image, and the first image's partner is the last.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.dataset import UNREADABLE, Batch
from ddpjob_trainer.data.randomness import derive
from ddpjob_trainer.data.sampler import Micro

_STREAM = 0x6D6978


def is_wanted(config: DataConfig) -> bool:
    """Return whether mixup or cutmix is configured."""
    return config.mixup > 0 or config.cutmix > 0


def samples_for(config: DataConfig, micro: Micro) -> list[int]:
    """Return the samples whose images are needed for a micro-batch.

    If images are mixed and ranks share micro-batches, each part also needs the partner of its first
    sample. In the result, this partner comes immediately before the first sample.
    """
    if not is_wanted(config) or not micro.parts:
        return micro.samples
    numbers, taken = [], 0
    for part in micro.parts:
        numbers += [part.before, *micro.samples[taken : taken + part.count]]
        taken += part.count
    return numbers


def mix_micro(config: DataConfig, batch: Batch, micro: Micro, classes: int) -> Batch:
    """Return a micro-batch with mixed images and labels.

    `batch` contains the samples that `samples_for` returns. If the micro-batch consists of parts,
    each part is mixed as it would be in its whole micro-batch.
    """
    if not is_wanted(config) or not micro.parts:
        return mix(config, batch, micro.key, classes)
    images, labels = [], []
    for part, own in zip(micro.parts, batch.split([1 + part.count for part in micro.parts]), strict=True):
        mixed = mix(config, own, part.key, classes)
        images.append(mixed.images[1:])
        labels.append(mixed.labels[1:])
    partners = [0, *(1 + part.count for part in micro.parts[:-1])]
    borrowed = int((batch.labels[list(accumulate(partners))] == UNREADABLE).sum()) if batch.unreadable else 0
    return Batch(torch.cat(images), torch.cat(labels), batch.unreadable - borrowed)


def mix(config: DataConfig, batch: Batch, key: int, classes: int) -> Batch:
    """Mix the batch's images and labels. If mixing is off, return the batch unchanged.

    The new labels are shares of classes, (n, classes). An unreadable image is not mixed, and its
    shares are 0. An image with an unreadable partner is not mixed either.
    """
    if not is_wanted(config) or not len(batch.labels):
        return batch
    generator = np.random.Generator(np.random.Philox(derive(key, _STREAM)))
    whole = generator.random() < 0.5 if config.mixup > 0 and config.cutmix > 0 else config.mixup > 0
    share = float(generator.beta(config.mixup, config.mixup) if whole else generator.beta(config.cutmix, config.cutmix))
    partner = batch.images.roll(1, 0)
    readable = batch.labels != UNREADABLE
    if whole:
        images = torch.lerp(partner, batch.images, share)
    else:
        top, bottom, left, right = _rectangle(generator, 1 - share, *batch.images.shape[2:])
        images = batch.images.clone()
        images[:, :, top:bottom, left:right] = partner[:, :, top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (images.shape[2] * images.shape[3])
    shares = torch.nn.functional.one_hot(batch.labels.clamp(min=0), classes).float() * readable[:, None]
    labels = torch.lerp(shares.roll(1, 0), shares, share)
    if batch.unreadable:
        alone = ~readable | ~readable.roll(1, 0)
        images = torch.where(alone[:, None, None, None], batch.images, images)
        labels = torch.where(alone[:, None], shares, labels)
    return replace(batch, images=images, labels=labels)


def _rectangle(generator: np.random.Generator, area: float, height: int, width: int) -> tuple[int, int, int, int]:
    """Return (top, bottom, left, right) of a random rectangle in an image.

    The rectangle's area is about the fraction `area` of the image. The rectangle's center can be
    anywhere in the image, and any part outside the image is cut off.
    """
    row, column = int(generator.integers(height)), int(generator.integers(width))
    half = 0.5 * area**0.5
    down, across = int(half * height), int(half * width)
    return max(0, row - down), min(height, row + down), max(0, column - across), min(width, column + across)
