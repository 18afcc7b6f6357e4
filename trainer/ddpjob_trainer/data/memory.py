"""Data sets held on the training device as uint8 images: augmentation in whole batches there, no worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ddpjob_trainer.data.source import Batch, Normalise

Augment = Callable[[torch.Tensor, int], torch.Tensor]
"""Sample numbers (n,) int64 on the device and the epoch -> images (n, channels, height, width) uint8."""


class MemoryData:
    """Images (n, channels, height, width) uint8 and labels (n,) int64, for training and test, all on one device."""

    def __init__(
        self,
        train: tuple[torch.Tensor, torch.Tensor],
        test: tuple[torch.Tensor, torch.Tensor],
        *,
        classes: int,
        normalise: Normalise,
        augment: Augment | None,
    ) -> None:
        self._train, self._test, self._augment, self._normalise = train, test, augment, normalise
        channels, height, width = train[0].shape[1:]
        self.shape = (int(channels), int(height), int(width))
        self.classes = classes
        self.class_names: list[str] | None = None
        self.train_size, self.test_size = len(train[1]), len(test[1])

    def train_batches(self, parts: Iterable[list[int]], epoch: int) -> Iterator[Batch]:
        """One augmented batch per list of sample numbers."""
        images, labels = self._train
        for part in parts:
            numbers = torch.tensor(part, dtype=torch.int64).to(labels.device, non_blocking=True)
            taken = images[numbers] if self._augment is None else self._augment(numbers, epoch)
            yield Batch(self._normalise(taken), labels[numbers])

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """One batch per list of test sample numbers."""
        images, labels = self._test
        for part in parts:
            numbers = torch.tensor(part, dtype=torch.int64).to(labels.device, non_blocking=True)
            yield Batch(self._normalise(images[numbers]), labels[numbers])
