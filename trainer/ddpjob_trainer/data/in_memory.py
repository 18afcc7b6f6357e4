"""Data sets that are kept on the training device as uint8 images and need no worker processes.

Whole batches are augmented on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ddpjob_trainer.data.dataset import Batch, DataSet, Normalize, fingerprint

_LOOKED_AT = 1024
"""The fingerprint covers the pixels of about this many images in each set. It also covers all
labels.
"""

Augment = Callable[[torch.Tensor, int], torch.Tensor]
"""A function that augments images. Its arguments are the numbers of samples or versions, (n,) int64
in main memory, and the epoch. Its result is a new tensor of images, (n, channels, height, width)
uint8 or float32, with values from 0 to 255.
"""


class MemoryData(DataSet):
    """A data set that keeps its images and labels on one device.

    The images are (n, channels, height, width) uint8.
    """

    def __init__(
        self,
        train: tuple[torch.Tensor, torch.Tensor],
        test: tuple[torch.Tensor, torch.Tensor],
        *,
        classes: int,
        normalize: Normalize,
        augment: Augment | None,
        class_names: list[str] | None = None,
    ) -> None:
        self._train, self._test, self._augment = train, test, augment
        self.normalize: Normalize = normalize
        channels, height, width = train[0].shape[1:]
        self.shape = (int(channels), int(height), int(width))
        self.classes, self.class_names = classes, class_names
        self.train_size, self.test_size = len(train[1]), len(test[1])

    def train_stream(self, parts: Iterable[tuple[int, list[int]]]) -> Iterator[Batch]:
        """Yield an augmented training batch for each (epoch, numbers) pair in `parts`."""
        images, labels = self._train
        for epoch, part in parts:
            numbers = torch.tensor(part, dtype=torch.int64)
            own = (numbers % self.train_size).to(labels.device, non_blocking=True)
            taken = images[own] if self._augment is None else self._augment(numbers, epoch)
            yield Batch(self.normalize(taken), labels[own])

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield a test batch for each list of sample numbers."""
        images, labels = self._test
        for part in parts:
            numbers = torch.tensor(part, dtype=torch.int64).to(labels.device, non_blocking=True)
            yield Batch(self.normalize(images[numbers]), labels[numbers])

    def fingerprint(self) -> int:
        """Return a hash of all labels and of the pixels of about a thousand images per set."""
        return fingerprint(
            *(
                part.cpu().numpy()
                for images, labels in (self._train, self._test)
                for part in (labels, images[:: max(1, len(images) // _LOOKED_AT)])
            )
        )
