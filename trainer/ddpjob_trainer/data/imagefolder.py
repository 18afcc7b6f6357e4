"""ImageNet's layout: train/ and val/ with one folder of images per class. Listed as torchvision's ImageFolder does, without its import."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ddpjob_trainer.data.images import ImageData
from ddpjob_trainer.data.source import DataConfig, existing_folder
from ddpjob_trainer.errors import DataError

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_REMEDY = "put train/CLASS/ and val/CLASS/ folders of images there"


class Folder:
    """The images of one class folder after the other, in the order of their names. Raises DataError."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise DataError(f"data folder {root} does not exist (data.dir): {_REMEDY}")
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        listed = [_images(root / name) for name in self.classes]
        if not all(listed) or not listed:
            empty = [name for name, paths in zip(self.classes, listed, strict=True) if not paths]
            which = f"class folders without any: {', '.join(empty[:5])}" if empty else "it has no class folders"
            raise DataError(f"data folder {root} holds no images in class folders ({which}): {_REMEDY}")
        # One array, not a list: a list's reference counts would make each worker copy the memory of all its names.
        self._paths = np.array([os.fsencode(path) for paths in listed for path in paths])
        self.labels = np.repeat(np.arange(len(listed), dtype=np.int64), [len(paths) for paths in listed])

    def name(self, number: int) -> str:
        """The file's path."""
        return os.fsdecode(self._paths[number])

    def read(self, numbers: list[int]) -> list[bytes | OSError]:
        """The files' content."""
        return [_content(self.name(number)) for number in numbers]


def _images(folder: Path) -> list[str]:
    walked = sorted((root, names) for root, _, names in os.walk(folder, followlinks=True, onerror=_refuse))
    return [f"{root}/{name}" for root, names in walked for name in sorted(names) if name.lower().endswith(_EXTENSIONS)]


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed is not empty."""
    raise error


def _content(path: str) -> bytes | OSError:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        return error


def open_folders(root: Path) -> tuple[Folder, Folder]:
    """train/ and val/, whose classes must be the same. Raises DataError."""
    train, test = Folder(root / "train"), Folder(root / "val")
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(f"{root}/train and {root}/val have different class folders (in one only: {', '.join(odd[:5])}): {_REMEDY}")
    return train, test


def open_folder(config: DataConfig, device: torch.device) -> ImageData:
    """The data set in `data.dir`. Raises DataError."""
    train, test = open_folders(existing_folder(config, _REMEDY))
    data = ImageData(config, device, train, test, len(train.classes))
    data.class_names = train.classes
    return data
