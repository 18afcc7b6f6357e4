"""Mixup and CutMix: images of a micro-batch are mixed in pairs, and their labels with them.

Lambda, the rectangle and the choice between the two are functions of the micro-batch's key, the partners of the
position in it: the same on any number of ranks. As in torchvision.transforms.v2.MixUp and CutMix, the partner is the
image before (the first one's is the last).
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


def wanted(config: DataConfig) -> bool:
    """Whether images are mixed at all."""
    return config.mixup > 0 or config.cutmix > 0


def samples_for(config: DataConfig, micro: Micro) -> list[int]:
    """The samples whose images a micro-batch needs: its own and, before each of its parts, the first one's partner."""
    if not wanted(config) or not micro.parts:
        return micro.samples
    numbers, taken = [], 0
    for part in micro.parts:
        numbers += [part.before, *micro.samples[taken : taken + part.count]]
        taken += part.count
    return numbers


def mix_micro(config: DataConfig, batch: Batch, micro: Micro, classes: int) -> Batch:
    """`mix` of a micro-batch whose `samples_for` are in `batch`: each part as in its whole micro-batch."""
    if not wanted(config) or not micro.parts:
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
    """The batch with mixed images and labels (n, classes) that are shares of classes; unchanged when mixing is off.

    An image that could not be read takes no part: its shares are 0, and its partner stays unmixed.
    """
    if not wanted(config) or not len(batch.labels):
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
    """(top, bottom, left, right) of a rectangle of about `area` of the image, centered anywhere, cut at the borders."""
    row, column = int(generator.integers(height)), int(generator.integers(width))
    half = 0.5 * area**0.5
    down, across = int(half * height), int(half * width)
    return max(0, row - down), min(height, row + down), max(0, column - across), min(width, column + across)
