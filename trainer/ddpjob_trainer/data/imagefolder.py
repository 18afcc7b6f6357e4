"""ImageNet's layout: train/ and val/, each with one folder of images per class.

Images are in the same order as in torchvision's ImageFolder, but torchvision is not imported.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.dataset import existing_folder
from ddpjob_trainer.data.decode import MOST_BYTES
from ddpjob_trainer.data.images import ImageData
from ddpjob_trainer.data.listing import listing
from ddpjob_trainer.errors import DataError

_REMEDY = "put train/CLASS/ and val/CLASS/ folders of images there"


class Folder:
    """The images of a training or test set, ordered by the names of their class folders.

    Creating a `Folder` raises DataError if there are no class folders, or if a class folder has no
    images.
    """

    def __init__(self, root: Path, kept_in: Path | None = None) -> None:
        """List the images below `root`. For `kept_in`, see `listing`."""
        if not root.is_dir():
            raise DataError(f"data folder {root} does not exist (data.dir): {_REMEDY}")
        found = listing(root, kept_in)
        self.classes = [os.fsdecode(name) for name in found.classes.tolist()]
        self.labels = found.labels()
        images = np.bincount(self.labels, minlength=len(self.classes))
        if not self.classes or not images.all():
            empty = [name for name, count in zip(self.classes, images, strict=True) if not count]
            found_there = f"class folders without images ({', '.join(empty[:5])})" if empty else "no class folders"
            raise DataError(f"data folder {root} has {found_there}: {_REMEDY}")
        self._paths = found.paths(root)
        self._root = os.fsencode(root)

    def name(self, number: int) -> str:
        """Return the path of an image."""
        return os.fsdecode(self._paths[number])

    def identity(self) -> npt.NDArray[np.uint8]:
        """Return the paths of all images, relative to the root and padded to the same length."""
        return self._paths.view(np.uint8).reshape(len(self._paths), -1)[:, len(self._root) + 1 :]

    def read(self, numbers: list[int]) -> list[bytes | OSError]:
        """Return each image's content, or an OSError for an image that cannot be read."""
        return [_content(self.name(number)) for number in numbers]


def _content(path: str) -> bytes | OSError:
    """Return the content of an image, or the error that prevents reading it.

    Only regular files of limited size are read. Opening a pipe would wait for a writer, and a
    sparse file can claim to have terabytes.
    """
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):
            return OSError(errno.EINVAL, "it is not a regular file")
        if found.st_size > MOST_BYTES:
            return OSError(errno.EFBIG, f"it has {found.st_size:,} bytes; the limit is {MOST_BYTES:,}")
        return Path(path).read_bytes()
    except OSError as error:
        return error


def open_folders(root: Path, kept_in: Path | None = None) -> tuple[Folder, Folder]:
    """Return the images in train/ and val/, which must have the same classes.

    Raises DataError.
    """
    train, test = Folder(root / "train", kept_in), Folder(root / "val", kept_in)
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(
            f"{root}/train and {root}/val have different class folders (in one only: {', '.join(odd[:5])}): {_REMEDY}"
        )
    return train, test


def open_folder(config: DataConfig, device: torch.device) -> ImageData:
    """Return the data set in the folder `data.dir`. Raises DataError."""
    train, test = open_folders(existing_folder(config, _REMEDY), config.index)
    return ImageData(config, device, train, test, len(train.classes), train.classes)
