"""CIFAR-10 and CIFAR-100, in both official versions: binary and python (pickles).

Formats: https://www.cs.toronto.edu/~kriz/cifar.html. Only downloads use torchvision, because
importing it takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.config.sections import DataConfig, DataName
from ddpjob_trainer.data.augment import CropAndFlip, RandAugment
from ddpjob_trainer.data.batch_augment import BatchAugment
from ddpjob_trainer.data.cifar_batch import MOST_BYTES, read_batch
from ddpjob_trainer.data.dataset import Normalize, existing_folder
from ddpjob_trainer.data.in_memory import Augment, MemoryData
from ddpjob_trainer.errors import DataError

_PIXELS = 3 * 32 * 32
Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Layout:
    """The names of the files in a data set's archives, and the layout of a record."""

    python_folder: str
    binary_folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    binary_train: tuple[str, ...]
    binary_test: tuple[str, ...]
    label_key: str
    label_bytes: int
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

_LAYOUTS = {
    DataName.CIFAR10: _Layout(
        "cifar-10-batches-py",
        "cifar-10-batches-bin",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        ("test_batch.bin",),
        "labels",
        1,
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    DataName.CIFAR100: _Layout(
        "cifar-100-python",
        "cifar-100-binary",
        ("train",),
        ("test",),
        ("train.bin",),
        ("test.bin",),
        "fine_labels",
        2,
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
}


def open_cifar(config: DataConfig, device: torch.device) -> MemoryData:
    """Return the whole data set as uint8 images on the device.

    `data.dir` is the folder of the unpacked archive or the folder that contains it. Raises
    DataError.
    """
    layout = _LAYOUTS[DataName(config.name)]
    found = _find(config.dir, layout)
    if found is None and config.download:
        _download(config)
        found = _find(config.dir, layout)
    if found is None:
        remedy = (
            "unpack the official archive there, so that the folder contains "
            f"{layout.python_folder}/{layout.train[0]} or "
            f"{layout.binary_folder}/{layout.binary_train[0]}, or set data.download=true"
        )
        folder = existing_folder(config, remedy)
        raise DataError(f"data folder {folder} does not contain {config.name} (data.dir): {remedy}")
    folder, binary = found
    read = _read_binary if binary else _read_pickles
    train = read(folder, layout.binary_train if binary else layout.train, layout)
    test = read(folder, layout.binary_test if binary else layout.test, layout)
    train, test = ((images.to(device), labels.to(device)) for images, labels in (train, test))
    return MemoryData(
        train,
        test,
        classes=layout.classes,
        normalize=Normalize(255.0, layout.mean, layout.std, device),
        augment=_augmentation(config, train[0]) if config.augment else None,
        class_names=_CIFAR10_NAMES if config.name == DataName.CIFAR10 else None,
    )


def _augmentation(config: DataConfig, images: torch.Tensor) -> Augment:
    """Return an augmentation that crops and flips images, and applies RandAugment if configured."""
    crop_and_flip = CropAndFlip.of(config, images, 4)
    if (randaugment := RandAugment.of(config)) is None:
        return crop_and_flip
    return BatchAugment(crop_and_flip, images, randaugment, config.seed, len(images) * config.repeats)


def _find(root: Path | None, layout: _Layout) -> tuple[Path, bool] | None:
    """Return the first folder with a training file, and whether its files are binary.

    Return None if there is no such folder.
    """
    if root is None:
        return None
    for folder in (root / layout.python_folder, root / layout.binary_folder, root):
        if (folder / layout.train[0]).is_file():
            return folder, False
        if (folder / layout.binary_train[0]).is_file():
            return folder, True
    return None


def _present(folder: Path, names: tuple[str, ...]) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"data folder {folder} lacks {', '.join(missing)}; unpack the official archive again")
    return [folder / name for name in names]


def _read_binary(folder: Path, names: tuple[str, ...], layout: _Layout) -> Part:
    size = layout.label_bytes + _PIXELS
    images, labels = [], []
    for path in _present(folder, names):
        content = np.frombuffer(_content(path), dtype=np.uint8)
        if not len(content) or len(content) % size:
            raise DataError(
                f"{path} is truncated ({len(content)} bytes, not a multiple of the record size {size}); unpack"
                " the archive again"
            )
        records = content.reshape(-1, size)
        labels.append(records[:, layout.label_bytes - 1].astype(np.int64))
        images.append(records[:, layout.label_bytes :])
    return _joined(folder, images, labels, layout)


def _read_pickles(folder: Path, names: tuple[str, ...], layout: _Layout) -> Part:
    images, labels = [], []
    for path in _present(folder, names):
        try:
            part, part_labels = read_batch(_content(path), "data", layout.label_key)
        except ValueError as error:
            raise DataError(
                f"{path} is not a valid CIFAR batch ({error}); unpack the archive again, or use the "
                "data set's binary version, which does not contain pickles"
            ) from error
        if part.dtype != np.uint8 or part.ndim != 2 or part.shape[1] != _PIXELS or part_labels.shape != (len(part),):
            raise DataError(
                f"{path} contains {part.dtype} of shape {part.shape} with {part_labels.size} labels, "
                f"but must contain uint8 of shape (n, {_PIXELS}) with n labels; unpack the archive "
                "again"
            )
        if not len(part):
            raise DataError(f"{path} has no records; unpack the archive again")
        images.append(part)
        labels.append(part_labels.astype(np.int64))
    return _joined(folder, images, labels, layout)


def _content(path: Path) -> bytes:
    """Return the content of a file in the archive.

    Raises DataError if the file is too large to be valid, because reading it could fill the memory.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes, but no file in the archive is larger than {MOST_BYTES:,}; unpack the archive"
            " again"
        )
    return path.read_bytes()


def _joined(folder: Path, images: list[Any], labels: list[Any], layout: _Layout) -> Part:
    all_labels = np.concatenate(labels)
    if len(odd := all_labels[(all_labels < 0) | (all_labels >= layout.classes)]):
        last = layout.classes - 1
        raise DataError(
            f"{folder}: label {odd[0]} is outside 0..{last}, so this is not the data set that data.name selects"
        )
    return torch.from_numpy(np.concatenate(images).reshape(-1, 3, 32, 32)), torch.from_numpy(all_labels)


def _download(config: DataConfig) -> None:
    """Download the archive with torchvision, which verifies its MD5 checksum.

    A lock ensures that only one process at a time downloads into a folder.
    """
    import fcntl

    import torchvision

    if config.dir is None:
        raise DataError("data.download=true needs a folder to download into; set data.dir (or DDPJOB_DATA_DIR)")
    kind = torchvision.datasets.CIFAR10 if config.name == DataName.CIFAR10 else torchvision.datasets.CIFAR100
    try:
        config.dir.mkdir(parents=True, exist_ok=True)
        with (config.dir / ".download.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _find(config.dir, _LAYOUTS[DataName(config.name)]) is None:
                kind(str(config.dir), download=True)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{config.name} cannot be downloaded into {config.dir}: {error}. Unpack the official archive there yourself"
        ) from error
