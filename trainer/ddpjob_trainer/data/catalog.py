"""Chooses a data set by name and imports only that data set's module."""

from __future__ import annotations

import math
import os

import torch

from ddpjob_trainer.config.sections import DataConfig, DataName
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.errors import ConfigError, DataError


def open_data(config: DataConfig, device: torch.device | None = None) -> DataSet:
    """Return the data set that `config` names, with batches on `device` (default: the CPU).

    Raises a DataError that names the path and the remedy, and ConfigError for invalid values.
    """
    if config.batch < 1:
        raise ConfigError(
            f"data.batch: {config.batch} is less than 1; give the number of samples per step over all ranks"
        )
    if config.micro_batches < 0:
        raise ConfigError(
            f"data.micro_batches: {config.micro_batches} is less than 0; write for example 8, or 0 for the default"
        )
    if not 1 <= config.repeats <= config.batch:
        raise ConfigError(
            f"data.repeats: {config.repeats} is not from 1 to data.batch={config.batch}; 3 or 4 is usual, 1 takes each"
            " sample once"
        )
    if config.repeats > 1 and not (config.augment or config.erase or config.cutout):
        raise ConfigError(
            f"data.repeats={config.repeats}: with data.augment=false all versions of a sample are the same; set"
            " data.augment=true, or leave it out"
        )
    if not 1 <= config.stretch < math.inf:
        raise ConfigError(
            f"data.stretch: {config.stretch} is not a finite number of at least 1; with 1.25 a rank may process a "
            f"quarter more samples at once than a micro-batch has"
        )
    for key, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)):
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ConfigError(
                f"data.{key}: {alpha} is not a finite number of at least 0; write for example 0.2, or 0 for none"
            )
    try:
        return _open(config, device or torch.device("cpu"))
    except OSError as error:
        raise DataError(
            f"{error.filename or config.dir} cannot be read ({error.strerror or error}):"
            f" make all of data.dir readable for uid {os.geteuid()}, and check that its volume responds"
        ) from error


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
