"""Folders of images as ImageNet has them: train/CLASS/*.jpg and val/CLASS/*.jpg, read and decoded by worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ddpjob_trainer.data.augment import resized_crop_box
from ddpjob_trainer.data.source import Batch, DataConfig, existing_folder
from ddpjob_trainer.errors import ConfigError, DataError
from ddpjob_trainer.randomness import uniform

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DRAWS = 41


class ImageFolderData:
    """Training: random resized crop and flip; test: shorter side to 256/224 of the size, middle crop. Raises DataError."""

    def __init__(self, config: DataConfig) -> None:
        remedy = "put train/CLASS/ and val/CLASS/ folders of images there"
        if config.image_size < 1 or config.workers < 0:
            raise ConfigError(f"data.image_size={config.image_size} must be at least 1, data.workers={config.workers} at least 0")
        root = existing_folder(config, remedy)
        train, test = _listing(root / "train", remedy), _listing(root / "val", remedy)
        if train.classes != test.classes:
            odd = sorted(set(train.classes) ^ set(test.classes))
            raise DataError(f"{root}/train and {root}/val have different class folders (in one only: {', '.join(odd[:5])}): {remedy}")
        self._config = config
        self._train, self._test = list(train.samples), list(test.samples)
        self.classes = len(train.classes)
        self.shape = (3, config.image_size, config.image_size)
        self.train_size, self.test_size = len(self._train), len(self._test)
        self._mean, self._std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))

    def train_batches(self, parts: Iterable[list[int]], epoch: int) -> Iterator[Batch]:
        """One augmented batch per list of sample numbers."""
        return self._load(_Images(self._train, self._config, epoch if self._config.augment else None), list(parts))

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """One batch per list of test sample numbers."""
        return self._load(_Images(self._test, self._config, None), list(parts))

    def _load(self, images: _Images, parts: list[list[int]]) -> Iterator[Batch]:
        workers = min(self._config.workers, len(parts))
        loader = DataLoader(
            images,
            batch_sampler=_Parts(parts),
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=2 if workers else None,
        )
        batches = iter(loader)
        while (batch := _next(batches)) is not None:
            pixels, labels = batch
            yield Batch((pixels.float().div_(255) - self._mean).div_(self._std) if len(labels) else torch.empty(0, *self.shape), labels)


def _next(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor] | None:
    try:
        return next(batches, None)
    except DataError as error:  # A worker process wraps the sentence in its traceback.
        raise DataError(str(error).strip().rsplit("DataError: ", 1)[-1]) from error


class _Images(Dataset[tuple[torch.Tensor, int]]):
    """Image files by number; `epoch` None: no augmentation."""

    def __init__(self, samples: list[tuple[str, int]], config: DataConfig, epoch: int | None) -> None:
        self._samples, self._size, self._seed, self._epoch = samples, config.image_size, config.seed, epoch

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[number]
        return torch.from_numpy(self._pixels(path, number)).permute(2, 0, 1), label

    def _pixels(self, path: str, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        from PIL import Image

        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError) as error:
            raise DataError(f"image {path} cannot be read ({error}): remove or replace it") from error
        if self._epoch is None:
            return np.array(_middle(image, self._size))
        draws = uniform(self._seed, self._epoch, np.array([number]), _DRAWS)[0]
        top, left, height, width = resized_crop_box(draws[:40].reshape(10, 4), image.height, image.width)
        box = (left, top, left + width, top + height)
        pixels = np.array(image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box))
        return pixels[:, ::-1].copy() if draws[40] < 0.5 else pixels


def _middle(image: Any, size: int) -> Any:
    """The middle square of `size` pixels after the shorter side was brought to 256/224 of it."""
    from PIL import Image

    side = min(image.width, image.height) * size / round(size * 256 / 224)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


class _Parts:
    """The lists of sample numbers that one rank reads, as the loader's batch sampler."""

    def __init__(self, parts: list[list[int]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _collate(items: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.tensor([label for _, label in items], dtype=torch.int64)
    return (torch.stack([pixels for pixels, _ in items]) if items else torch.empty(0, dtype=torch.uint8)), labels


def _listing(folder: Path, remedy: str) -> Any:
    """torchvision's listing of class folders. Raises DataError."""
    from torchvision.datasets import ImageFolder

    if not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist (data.dir): {remedy}")
    try:
        return ImageFolder(str(folder))
    except FileNotFoundError as error:
        raise DataError(f"data folder {folder} holds no images in class folders: {remedy} ({error})") from error
