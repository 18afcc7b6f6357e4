"""Data sets held in memory as uint8 images: augmentation in whole batches, no worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from ddpjob_trainer.data.source import Batch

Augment = Callable[[torch.Tensor, int, "np.ndarray[tuple[int], np.dtype[np.int64]]"], torch.Tensor]


class MemoryData:
    """Images (n, channels, height, width) uint8 and labels (n,) int64, for training and test; `mean` and `std` are per channel."""

    def __init__(
        self,
        train: tuple[torch.Tensor, torch.Tensor],
        test: tuple[torch.Tensor, torch.Tensor],
        *,
        classes: int,
        scale: float,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: Augment | None,
    ) -> None:
        self._train, self._test, self._augment = train, test, augment
        channels, height, width = train[0].shape[1:]
        self.shape = (int(channels), int(height), int(width))
        self.classes = classes
        self.train_size, self.test_size = len(train[1]), len(test[1])
        self._scale = scale
        self._mean = torch.tensor(mean).view(1, -1, 1, 1)
        self._std = torch.tensor(std).view(1, -1, 1, 1)

    def train_batches(self, parts: Iterable[list[int]], epoch: int) -> Iterator[Batch]:
        """One augmented batch per list of sample numbers."""
        for part in parts:
            images, labels = self._train[0][part], self._train[1][part]
            if self._augment is not None and part:
                images = self._augment(images, epoch, np.asarray(part, dtype=np.int64))
            yield Batch(self._normalise(images), labels)

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """One batch per list of test sample numbers."""
        for part in parts:
            yield Batch(self._normalise(self._test[0][part]), self._test[1][part])

    def _normalise(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float().div_(self._scale).sub_(self._mean)).div_(self._std)
