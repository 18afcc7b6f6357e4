"""What a data set is to the training loop, and the choice of one by name."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
    SYNTHETIC = "synthetic"


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """The data set and how it is dealt out."""

    name: DataName = DataName.DIGITS
    """digits: 1797 real images of 8x8 pixels that ship in scikit-learn. cifar10, cifar100: the folders that the official archives
    unpack to (python or binary version). imagefolder: train/ and val/ with one folder of images per class. synthetic: made here."""
    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_DATA_DIR"))
    """Folder of the data set (not needed for digits and synthetic)."""
    batch: int = 128
    """Global batch: samples per optimizer step over all ranks together, whatever their number."""
    micro_batches: int = 0
    """Micro-batches that a global batch falls into, whatever the number of ranks: normalisation statistics, dropout and mixed images are of
    one micro-batch, so that any number of ranks computes the same. 0: where the model or the augmentation has any of these, the number
    of ranks (times train.accumulate) with which the run began; else samples are dealt out evenly, which comes to the same."""
    seed: int = 0
    """Order, augmentation and initial weights are functions of it."""
    augment: bool = True
    """Random shift for digits, crop and flip for CIFAR, random resized crop and flip for image folders."""
    download: bool = False
    """Fetch CIFAR into data.dir when it is not there (needs internet)."""
    image_size: int = 224
    """imagefolder: side of the square images the model sees."""
    workers: int = 2
    """imagefolder: processes per rank that read and decode images; 0: the training process does."""
    shape: tuple[int, ...] = (3, 32, 32)
    """synthetic: channels, height, width."""
    classes: int = 10
    """synthetic: number of classes."""
    size: int = 2048
    """synthetic: number of training images; the test set has a quarter of it."""


@dataclass(frozen=True)
class Batch:
    """`images`: float32 (n, channels, height, width), normalised; `labels`: int64 (n,). n may be 0."""

    images: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        if device.type == "cpu":
            return self
        return Batch(self.images.to(device, non_blocking=True), self.labels.to(device, non_blocking=True))


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


def open_data(config: DataConfig) -> DataSet:
    """The data set that `config` names. Raises DataError naming the path and the remedy, ConfigError for values that make no sense."""
    if config.batch < 1:
        raise ConfigError(f"data.batch: {config.batch} is less than 1; give the number of samples per step over all ranks")
    match config.name:
        case DataName.DIGITS:
            from ddpjob_trainer.data.digits import open_digits

            return open_digits(config)
        case DataName.CIFAR10 | DataName.CIFAR100:
            from ddpjob_trainer.data.cifar import open_cifar

            return open_cifar(config)
        case DataName.IMAGEFOLDER:
            from ddpjob_trainer.data.imagefolder import ImageFolderData

            return ImageFolderData(config)
        case DataName.SYNTHETIC:
            from ddpjob_trainer.data.synthetic import SyntheticData

            return SyntheticData(config)


def existing_folder(config: DataConfig, remedy: str) -> Path:
    """`data.dir`, which must be a folder with something in it. Raises DataError with the remedy."""
    if config.dir is None:
        raise DataError(f"data.name={config.name.value} needs data.dir (or DDPJOB_DATA_DIR): {remedy}")
    if not config.dir.is_dir():
        raise DataError(f"data folder {config.dir} does not exist (data.dir): {remedy}")
    if not any(config.dir.iterdir()):
        raise DataError(f"data folder {config.dir} is empty (data.dir): {remedy}")
    return config.dir
