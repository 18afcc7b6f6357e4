"""The interface of a data set, and parts common to all data sets."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.sampler import Micro
from ddpjob_trainer.errors import ConfigError, DataError

UNREADABLE = -100
"""Label of an unreadable image; cross entropy ignores this label (its `ignore_index`)."""

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's colour channels, for pixel values from 0 to 1."""


class Targets(enum.Enum):
    """The kinds of targets that a data set can have."""

    CLASSES = "class numbers"
    VALUES = "float values"
    NUMBERS = "several whole numbers per sample"


@dataclass(frozen=True)
class Batch:
    """Images and labels that go through a model together, on the data set's device.

    `images` are float32 (n, channels, height, width), normalized. `labels` are class numbers, int64
    (n,), or, if images are mixed, shares of classes (n, classes). For the user's own data, `images`
    are inputs (n, ...), and `labels` are targets (n, ...); see `Targets`. n may be 0.

    `unreadable` is the number of images that could not be read. These images have weight zero,
    because their label is UNREADABLE or all their shares are 0.
    """

    images: torch.Tensor
    labels: torch.Tensor
    unreadable: int = 0

    def split(self, sizes: list[int]) -> list[Batch]:
        """Divide the batch into consecutive parts with these `sizes`.

        Each part keeps the whole batch's number of unreadable images.
        """
        pieces = zip(torch.split(self.images, sizes), torch.split(self.labels, sizes), strict=True)
        return [Batch(images, labels, self.unreadable) for images, labels in pieces]


class MicroBatches(Protocol):
    """This rank's micro-batches in one step. Their data is loaded on demand."""

    def __len__(self) -> int:
        """Return the number of micro-batches."""

    def __iter__(self) -> Iterator[tuple[Micro, Batch]]:
        """Yield each micro-batch once, in order."""


class Normalize:
    """Normalizes uint8 pixels x to float32 values (x / scale - mean) / std, on the device.

    Images are (n, channels, height, width). `mean` and `std` have one value per channel.
    """

    def __init__(self, scale: float, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.scale, self.mean, self.std = scale, mean, std
        spread = torch.tensor(std, dtype=torch.float64)
        self._factor = (1 / (scale * spread)).float().view(1, -1, 1, 1).to(device)
        self._offset = (-torch.tensor(mean, dtype=torch.float64) / spread).float().view(1, -1, 1, 1).to(device)
        self.deferred = False
        """Whether calls return images unchanged, because a compiled step calls `apply` instead."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalized images, or the images themselves if normalization is deferred."""
        return images if self.deferred else images.float().mul_(self._factor).add_(self._offset)

    def apply(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalized images as a new tensor."""
        return images.float() * self._factor + self._offset


class DataSet(Protocol):
    """A training set and a test set of labelled images, which are read by sample number.

    All batches are on the same device. `shape` is the shape of an image, (channels, height, width),
    but the user's own data may have any shape. `class_names` lists the names in the order of class
    numbers; None means that classes have no names. If targets are floats, `classes` is the number
    of values per target. `whole_numbers` indicates whether inputs are whole numbers, such as
    tokens. `normalize` maps pixels to inputs; None means that the data set already stores inputs.
    """

    targets: Targets = Targets.CLASSES
    whole_numbers: bool = False
    normalize: Normalize | None = None

    shape: tuple[int, ...]
    classes: int
    class_names: list[str] | None
    train_size: int
    test_size: int

    def train_stream(self, parts: Iterable[tuple[int, list[int]]]) -> Iterator[Batch]:
        """Yield an augmented training batch for each (epoch, numbers) pair in `parts`.

        If a pair has no numbers, the batch is empty. Each number is `sample + repeat * train_size`
        (data.repeats). Which image is used depends only on `sample`, but the image's augmentation
        also depends on `repeat`.

        The stream remains usable while test batches are read. If reading is slow, the data set
        reads ahead of the consumer.
        """

    def shape_in(self, epoch: int) -> tuple[int, ...]:
        """Return the shape of an epoch's training images, which is `shape` by default."""
        return self.shape

    def train_batches(self, parts: Iterable[list[int]], epoch: int) -> Iterator[Batch]:
        """Yield the batches of `train_stream` for a single epoch."""
        return self.train_stream((epoch, part) for part in parts)

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield a test batch for each list of sample numbers, without augmentation."""

    def defer_normalization(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Stop normalizing images, and return the normalization that the caller must apply.

        Return None if the data set already stores inputs, which need no normalization.
        """
        if self.normalize is None:
            return None
        self.normalize.deferred = True
        return self.normalize.apply

    def fingerprint(self) -> int:
        """Return a hash of the data.

        Two data sets have the same hash if each sample number stands for the same image and label
        in both data sets.
        """


def describe(data: DataSet) -> dict[str, Any]:
    """Return a description of the data for programs that use the model.

    Checkpoints contain this description. A program converts the pixels of each channel to inputs by
    `(pixels / scale - mean) / std`.
    """
    found = data.normalize
    pixels = {} if found is None else {"scale": found.scale, "mean": list(found.mean), "std": list(found.std)}
    names = None if data.class_names is None else list(data.class_names)
    described = {"shape": list(data.shape), "classes": data.classes, "names": names}
    return {**described, "whole_numbers": data.whole_numbers, **pixels}


def fingerprint(*parts: bytes | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """Return a 63-bit hash of several byte strings and arrays.

    The hash also depends on where each string or array ends.
    """
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        content = part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes()
        whole.update(len(content).to_bytes(8, "little"))
        whole.update(content)
    return int.from_bytes(whole.digest(), "little") >> 1


def existing_folder(config: DataConfig, remedy: str) -> Path:
    """Return the folder `data.dir`, which must exist and must not be empty.

    Raises DataError, with `remedy`, if data.dir is not set, does not exist, is empty, or is not a
    folder.
    """
    if config.dir is None:
        raise DataError(f"data.name={config.name} needs data.dir (or DDPJOB_DATA_DIR): {remedy}")
    if not config.dir.is_dir():
        raise DataError(f"data folder {config.dir} does not exist (data.dir): {remedy}")
    if not any(config.dir.iterdir()):
        raise DataError(f"data folder {config.dir} is empty (data.dir): {remedy}")
    return config.dir


def check_probabilities(targets: torch.Tensor) -> None:
    """Raise ConfigError if a target of binary cross entropy is not a probability."""
    low, high = (float(targets.min()), float(targets.max())) if len(targets) else (0.0, 1.0)
    if low < 0 or high > 1:
        raise ConfigError(
            f"optim.loss=bce: a target is {low if low < 0 else high:g}; make all targets "
            "probabilities from 0 to 1, or set optim.loss=mse"
        )
