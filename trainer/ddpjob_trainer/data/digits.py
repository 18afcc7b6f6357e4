"""The optical digits that ship with scikit-learn (1797 real images, 8x8, 17 grey levels)."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch

from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.augment import CropAndFlip
from ddpjob_trainer.data.dataset import Normalize
from ddpjob_trainer.data.in_memory import MemoryData
from ddpjob_trainer.data.randomness import mix64
from ddpjob_trainer.errors import ConfigError, DataError

_TEST_SHARE = 0.2


def open_digits(config: DataConfig, device: torch.device) -> MemoryData:
    """Return a data set with 80 % of the digits for training and 20 % for testing.

    Each class is split in this ratio. The split never changes.
    """
    if config.randaugment_ops or config.trivialaugment:
        key = "trivialaugment" if config.trivialaugment else "randaugment_ops"
        name = "TrivialAugment" if config.trivialaugment else "RandAugment"
        raise ConfigError(f"data.{key}: {name} needs colour images, but digits are grey; leave out data.{key}")
    images, labels = read_digits()
    test = _test_mask(labels.numpy())
    train_images = images[~test].to(device)
    return MemoryData(
        (train_images, labels[~test].to(device)),
        (images[test].to(device), labels[test].to(device)),
        classes=10,
        normalize=Normalize(16.0, (0.3053,), (0.3761,), device),
        augment=CropAndFlip.of(config, train_images, 1, flip=False) if config.augment else None,
    )


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) uint8 with values 0..16, and labels (1797,) int64.

    This function reads scikit-learn's file without importing scikit-learn. The import would take a
    second in every process.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "data.name=digits needs the data file that ships with scikit-learn; run pip install scikit-learn"
        )
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(
            f"{path} is missing from the installed scikit-learn; run pip install --force-reinstall scikit-learn"
        )
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    images = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
    return images, torch.from_numpy(table[:, -1].astype(np.int64))


def _test_mask(labels: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
    mask = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        order = np.argsort(mix64(members.astype(np.uint64)))
        mask[members[order[: round(len(members) * _TEST_SHARE)]]] = True
    return torch.from_numpy(mask)
