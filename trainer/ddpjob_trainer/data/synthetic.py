"""Generated images: one pattern per class plus noise, as a function of seed and sample number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.dataset import Batch, DataSet, fingerprint
from ddpjob_trainer.data.randomness import derive
from ddpjob_trainer.errors import ConfigError

_NOISE_IMAGES = 61


class SyntheticData(DataSet):
    """A data set in which sample i shows the pattern for class i % classes, plus noise.

    The noise is one of 61 prepared images. The data is learnable, can have any shape, and takes
    little memory.
    """

    def __init__(self, config: DataConfig, device: torch.device) -> None:
        if len(config.shape) != 3 or min(config.shape) < 1:
            raise ConfigError(
                f"data.shape={list(config.shape)}: must be [channels, height, width], for example [3, 32, 32]"
            )
        if config.classes < 1 or config.size < 1:
            raise ConfigError(f"data.classes={config.classes} and data.size={config.size} must be at least 1")
        if config.randaugment_ops or config.trivialaugment:
            key, name = ("trivialaugment", "Trivial") if config.trivialaugment else ("randaugment_ops", "Rand")
            raise ConfigError(
                f"data.{key}: {name}Augment needs uint8 images, but synthetic images are float; leave out data.{key}"
            )
        self.shape = (config.shape[0], config.shape[1], config.shape[2])
        self.classes = config.classes
        self.class_names: list[str] | None = None
        self.train_size, self.test_size = config.size, max(1, config.size // 4)
        self._seed = config.seed
        generator = torch.Generator().manual_seed(derive(config.seed, config.classes))
        self._patterns = torch.randn(config.classes, *self.shape, generator=generator).to(device)
        self._noise = torch.randn(_NOISE_IMAGES, *self.shape, generator=generator).to(device)

    def train_stream(self, parts: Iterable[tuple[int, list[int]]]) -> Iterator[Batch]:
        """Yield a training batch for each (epoch, numbers) pair in `parts`.

        The images are the same in every epoch.
        """
        return (self._batch(part, 0) for _, part in parts)

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield a test batch for each list of sample numbers."""
        return (self._batch(part, self.train_size) for part in parts)

    def fingerprint(self) -> int:
        """Return a hash of the settings that determine the images.

        The images themselves are not hashed, because their bits depend on how the CPU computes
        them.
        """
        return fingerprint(repr((self._seed, self.classes, self.shape, self.train_size)).encode())

    def _batch(self, part: list[int], offset: int) -> Batch:
        numbers = torch.tensor(part, dtype=torch.int64).to(self._patterns.device, non_blocking=True)
        numbers = numbers % self.train_size + offset
        labels = numbers % self.classes
        return Batch(self._patterns[labels] + self._noise[numbers * 7919 // self.classes % _NOISE_IMAGES], labels)
