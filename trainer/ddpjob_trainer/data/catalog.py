"""Chooses a data set by name and imports only that data set's module."""

from __future__ import annotations

import math
import os

import torch

from ddpjob_trainer.config.sections import DataConfig, DataName, Flip, Padding
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.errors import ConfigError, DataError

_SHIFTED = (DataName.CIFAR10, DataName.CIFAR100, DataName.SHAPES, DataName.DIGITS)
"""Names of the data sets whose training images are shifted at random."""


def open_data(config: DataConfig, device: torch.device | None = None) -> DataSet:
    """Return the data set named by `config`, with batches on `device` (default: the CPU).

    Raises ConfigError for invalid values, and a DataError with the path and the remedy for data
    that cannot be read.
    """
    if config.batch < 1:
        raise ConfigError(
            f"data.batch={config.batch}: must be at least 1; it is the number of samples in a step, over all ranks"
        )
    if config.micro_batches < 0:
        raise ConfigError(f"data.micro_batches={config.micro_batches}: must be at least 0; 0 is the default")
    if not 1 <= config.repeats <= config.batch:
        raise ConfigError(
            f"data.repeats={config.repeats}: must be from 1 to data.batch={config.batch}; 3 or 4 is "
            "usual, and 1 means one version of each sample"
        )
    if config.repeats > 1 and not (config.augment or config.erase or config.cutout):
        raise ConfigError(
            f"data.repeats={config.repeats} has no effect with data.augment=false, because all "
            "versions of a sample are the same; set data.augment=true, or leave out data.repeats"
        )
    if config.stretch and not 1 <= config.stretch < math.inf:
        raise ConfigError(
            f"data.stretch={config.stretch}: must be a finite number of at least 1; 1.25, for "
            "example, lets a rank process 1.25 micro-batches at once"
        )
    for key, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)):
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ConfigError(
                f"data.{key}={alpha}: must be a finite number of at least 0, for example 0.2, or 0 for none"
            )
    if config.early_sizes and not config.size_key:
        raise ConfigError(
            f"data.early_sizes has no effect with data.name={config.name}; use it only with imagefolder or shards"
        )
    _check_shift_and_flip(config)
    try:
        return _open(config, device or torch.device("cpu"))
    except OSError as error:
        raise DataError(
            f"{error.filename or config.dir} cannot be read ({error.strerror or error}); make "
            f"everything in data.dir readable for uid {os.geteuid()}, and check that the volume "
            "responds"
        ) from error


def _check_shift_and_flip(config: DataConfig) -> None:
    """Raise ConfigError if a key about shifts, flips or normalization has no effect."""
    own, shifted = ":" in config.name, config.augment and config.name in _SHIFTED
    sided = shifted and config.name != DataName.DIGITS and config.flip is Flip.ALTERNATING
    bordered = bool(own and config.shift) or shifted
    used = {"shift": own or shifted, "padding": bordered, "flip": own or sided, "mean": own, "std": own}
    for key, is_used in used.items():
        if getattr(config, key) not in (0, (), Padding.ZEROS) and not is_used:
            off = " with data.augment=false" * (not config.augment) or " without data.shift" * own
            raise ConfigError(f"data.{key} has no effect with data.name={config.name}{off}; leave it out")


def _open(config: DataConfig, device: torch.device) -> DataSet:
    if ":" in config.name:
        from ddpjob_trainer.data.own import OwnData

        return OwnData(config, device)
    match DataName(config.name):
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
        case DataName.SHAPES:
            from ddpjob_trainer.data.shapes import open_shapes

            return open_shapes(config, device)
        case DataName.SYNTHETIC:
            from ddpjob_trainer.data.synthetic import SyntheticData

            return SyntheticData(config, device)
