"""What a data set is to the training loop, and the choice of one by name."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from ddpjob_trainer.errors import ConfigError, DataError
from ddpjob_trainer.fields import from_env


class DataName(enum.StrEnum):
    """The data sets by name."""

    DIGITS = "digits"
    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"
    IMAGEFOLDER = "imagefolder"
    SHARDS = "shards"
    SYNTHETIC = "synthetic"


class Corrupt(enum.StrEnum):
    """What becomes of an image that cannot be decoded."""

    SKIP = "skip"
    STOP = "stop"


class Decoder(enum.StrEnum):
    """What decodes training images."""

    AUTO = "auto"
    DALI = "dali"


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """The data set and how it is dealt out."""

    name: DataName = DataName.DIGITS
    """digits: 1797 real images of 8x8 pixels that ship in scikit-learn. cifar10, cifar100: the folders that the official archives
    unpack to (python or binary version). imagefolder: train/ and val/ with one folder of images per class. shards: train/ and val/ with tar
    files of KEY.jpg and KEY.cls (WebDataset's layout), as `python -m ddpjob_trainer shards` makes them. synthetic: made here."""
    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_DATA_DIR"))
    """Folder of the data set (not needed for digits and synthetic)."""
    url: str | None = None
    """shards: where train/ and val/ are when data.dir does not hold them, such as s3://bucket/imagenet or https://host/imagenet; s3 and gs
    need s3fs or gcsfs installed. Images are read by byte range."""
    index: Path | None = None
    """shards: folder of the list of all images, made at the first start. Default: beside local shards, else ~/.cache/ddpjob_trainer."""
    batch: int = 128
    """Global batch: samples per optimizer step over all ranks together, whatever their number."""
    micro_batches: int = 0
    """Micro-batches that a global batch falls into, whatever the number of ranks: normalisation statistics, dropout and mixed images are of
    one micro-batch, so that any number of ranks computes the same. 0: where the model or the augmentation has any of these, the number
    of ranks (times train.accumulate) with which the run began; else samples are dealt out evenly, which comes to the same."""
    seed: int = 0
    """Order, augmentation and initial weights are functions of it."""
    augment: bool = True
    """Random shift for digits, crop and flip for CIFAR, random resized crop and flip for image folders and shards."""
    randaugment_ops: int = 0
    """CIFAR, image folders, shards: RandAugment's operations per image (Cubuk et al., 2019), usually 2; 0: none."""
    randaugment_magnitude: int = 9
    """RandAugment's strength, 0 to 30."""
    mixup: float = 0.0
    """Mixup's alpha (Zhang et al., 2017), usually 0.2: images of a micro-batch are blended in pairs, and their labels; 0: not at all."""
    cutmix: float = 0.0
    """CutMix's alpha (Yun et al., 2019), usually 1: a rectangle comes from another image of the micro-batch; 0: not at all. With mixup as
    well, each micro-batch gets one of the two, with probability one half."""
    download: bool = False
    """Fetch CIFAR into data.dir when it is not there (needs internet)."""
    image_size: int = 224
    """imagefolder, shards: side of the square images the model sees."""
    workers: int = 2
    """imagefolder, shards: processes per rank that read and decode images; 0: the training process does."""
    decoder: Decoder = Decoder.AUTO
    """imagefolder, shards: auto: libjpeg-turbo in the workers. dali: NVIDIA DALI in data.workers threads, on the GPU where there is one;
    the same crops, other rounding. Not with RandAugment."""
    corrupt: Corrupt = Corrupt.SKIP
    """imagefolder, shards: an image that cannot be decoded is named and weighs nothing (skip), or ends the training (stop)."""
    corrupt_limit: float = 0.01
    """imagefolder, shards: training ends when a larger share of the training images than this could not be decoded in an epoch."""
    shape: tuple[int, ...] = (3, 32, 32)
    """synthetic: channels, height, width."""
    classes: int = 10
    """synthetic: number of classes."""
    size: int = 2048
    """synthetic: number of training images; the test set has a quarter of it."""


UNREADABLE = -100
"""Label of an image that could not be read: cross entropy leaves it out (its `ignore_index`)."""


@dataclass(frozen=True)
class Batch:
    """`images`: float32 (n, channels, height, width), normalised; `labels`: int64 (n,), or shares of classes (n, classes) when images are
    mixed. n may be 0. `unreadable` of the images weigh nothing: their label is UNREADABLE, or all their shares are 0."""

    images: torch.Tensor
    labels: torch.Tensor
    unreadable: int = 0

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        if self.images.device == device:
            return self
        return replace(self, images=self.images.to(device, non_blocking=True), labels=self.labels.to(device, non_blocking=True))


class Normalise:
    """uint8 (n, channels, height, width) -> float32 (x / scale - mean) / std, on the device; mean and std are per channel."""

    def __init__(self, scale: float, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        spread = torch.tensor(std, dtype=torch.float64)
        self._factor = (1 / (scale * spread)).float().view(1, -1, 1, 1).to(device)
        self._offset = (-torch.tensor(mean, dtype=torch.float64) / spread).float().view(1, -1, 1, 1).to(device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The normalised images."""
        return images.float().mul_(self._factor).add_(self._offset)


class DataSet(Protocol):
    """A training and a test set of labelled images, read by sample number."""

    shape: tuple[int, int, int]
    classes: int
    train_size: int
    test_size: int

    def train_batches(self, parts: Iterable[list[int]], epoch: int) -> Iterator[Batch]:
        """One augmented batch per list of sample numbers; an empty list gives an empty batch."""

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """One batch per list of test sample numbers, not augmented."""


def open_data(config: DataConfig, device: torch.device | None = None) -> DataSet:
    """The data set that `config` names; its batches are on `device` (default: the CPU).

    Raises DataError naming the path and the remedy, ConfigError for values that make no sense.
    """
    if config.batch < 1:
        raise ConfigError(f"data.batch: {config.batch} is less than 1; give the number of samples per step over all ranks")
    if config.micro_batches < 0:
        raise ConfigError(f"data.micro_batches: {config.micro_batches} is less than 0; write for example 8, or 0 for the default")
    for key, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)):
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ConfigError(f"data.{key}: {alpha} is not a finite number of at least 0; write for example 0.2, or 0 for none")
    try:
        return _open(config, device or torch.device("cpu"))
    except OSError as error:
        raise DataError(
            f"{error.filename or config.dir} cannot be read ({error.strerror or error}):"
            f" make all of data.dir readable for uid {os.geteuid()}, and see that its volume answers"
        ) from error


def _open(config: DataConfig, device: torch.device) -> DataSet:
    match config.name:
        case DataName.DIGITS:
            from ddpjob_trainer.data.digits import open_digits

            return open_digits(config, device)
        case DataName.CIFAR10 | DataName.CIFAR100:
            from ddpjob_trainer.data.cifar import open_cifar

            return open_cifar(config, device)
        case DataName.IMAGEFOLDER:
            from ddpjob_trainer.data.imagefolder import open_folder

            return open_folder(config, device)
        case DataName.SHARDS:
            from ddpjob_trainer.data.shards import open_shards

            return open_shards(config, device)
        case DataName.SYNTHETIC:
            from ddpjob_trainer.data.synthetic import SyntheticData

            return SyntheticData(config, device)


def existing_folder(config: DataConfig, remedy: str) -> Path:
    """`data.dir`, which must be a folder with something in it. Raises DataError with the remedy."""
    if config.dir is None:
        raise DataError(f"data.name={config.name.value} needs data.dir (or DDPJOB_DATA_DIR): {remedy}")
    if not config.dir.is_dir():
        raise DataError(f"data folder {config.dir} does not exist (data.dir): {remedy}")
    if not any(config.dir.iterdir()):
        raise DataError(f"data folder {config.dir} is empty (data.dir): {remedy}")
    return config.dir
