"""Encoded images (a folder of files, tar shards) as a data set: read and decoded by a pool of processes, normalised on the device."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ddpjob_trainer.data.augment import RandAugment, resized_crop_box
from ddpjob_trainer.data.corrupt import Warnings
from ddpjob_trainer.data.dali import DaliDecoder
from ddpjob_trainer.data.decode import Box, UnreadableImage, crop, middle
from ddpjob_trainer.data.pool import Chunk, Pool, Request
from ddpjob_trainer.data.source import UNREADABLE, Batch, Corrupt, DataConfig, Decoder, Normalise
from ddpjob_trainer.errors import ConfigError, DataError
from ddpjob_trainer.randomness import uniform

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DRAWS = 41
# Errors of the machine, not of an image. EIO may be one bad sector: it counts as a corrupt image, and data.corrupt_limit ends a sick mount.
_FILES, _MACHINE = (errno.EMFILE, errno.ENFILE), (errno.ESTALE, errno.ENOMEM)


class Encoded(Protocol):
    """The files of a training or a test set, by sample number."""

    labels: npt.NDArray[np.int64]

    def name(self, number: int) -> str:
        """How the user finds the image."""

    def read(self, numbers: list[int]) -> list[bytes | OSError]:
        """The images' bytes; an OSError stands for one that cannot be read."""


class ImageData:
    """Training: random resized crop, flip, RandAugment if it is configured; test: the middle of the image.

    An image that cannot be decoded becomes a copy of another of its batch, and its label UNREADABLE: it weighs nothing.
    """

    def __init__(self, config: DataConfig, device: torch.device, train: Encoded, test: Encoded, classes: int) -> None:
        if config.image_size < 1 or config.workers < 0:
            raise ConfigError(f"data.image_size={config.image_size} must be at least 1, data.workers={config.workers} at least 0")
        if not 0 <= config.corrupt_limit <= 1:
            raise ConfigError(f"data.corrupt_limit: {config.corrupt_limit} is no share; write a number from 0 to 1, such as 0.01")
        self._config, self._device, self._train, self._test = config, device, train, test
        self.classes = classes
        self.class_names: list[str] | None = None
        self.shape = (3, config.image_size, config.image_size)
        self.train_size, self.test_size = len(train.labels), len(test.labels)
        self._normalise = Normalise(255.0, _MEAN, _STD, device)
        self._randaugment = RandAugment.of(config) if config.augment else None
        self._warnings = Warnings()
        self._pool = Pool(self._read, config.workers, pinned=device.type != "cpu")
        self._dali = self._open_dali() if config.decoder is Decoder.DALI and config.augment else None

    def train_batches(self, parts: Iterable[list[int]], epoch: int) -> Iterator[Batch]:
        """One augmented batch per list of sample numbers."""
        return self._load(self._train, False, parts, epoch if self._config.augment else None)

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """One batch per list of test sample numbers."""
        return self._load(self._test, True, parts, None)

    # ------------------------------------------------------------ in the training process

    def _load(self, source: Encoded, test: bool, parts: Iterable[list[int]], epoch: int | None) -> Iterator[Batch]:
        taken: list[list[int]] = []

        def requests() -> Iterator[Request]:
            for part in parts:
                taken.append(part)
                yield Request(test, epoch, part)

        run = self._pool.run if test or self._dali is None else self._dali.run
        for chunks in run(requests()):
            yield self._batch(source, taken.pop(0), chunks)

    def _batch(self, source: Encoded, numbers: list[int], chunks: list[Chunk]) -> Batch:
        pixels = torch.empty(len(numbers), *self.shape, dtype=torch.uint8, device=self._device)
        labels = torch.from_numpy(source.labels[numbers])
        done, bad = 0, list[int]()
        for chunk in chunks:
            pixels[done : done + len(chunk.pixels)].copy_(chunk.pixels, non_blocking=True)
            for place, reason in chunk.unreadable:
                bad.append(done + place)
                self._tell(source.name(numbers[done + place]), reason)
            done += len(chunk.pixels)
        if bad:
            whole = next((place for place in range(len(numbers)) if place not in bad), None)
            pixels[bad] = 0 if whole is None else pixels[whole].clone()
            labels[bad] = UNREADABLE
        return Batch(self._normalise(pixels), labels.to(self._device, non_blocking=True), len(bad))

    def _tell(self, name: str, reason: str) -> None:
        if self._config.corrupt is Corrupt.STOP:
            raise DataError(f"image {name} cannot be read ({reason}): remove or replace it, or set data.corrupt=skip")
        self._warnings.skipped(name, reason)

    def _open_dali(self) -> DaliDecoder:
        if self._randaugment is not None:
            raise ConfigError("data.decoder=dali: RandAugment works on what the workers decode; set data.decoder=auto or leave it out")

        def choose(request: Request, place: int) -> tuple[Callable[[int, int], Box], bool]:
            assert request.epoch is not None
            draws = uniform(self._config.seed, request.epoch, np.array(request.numbers[place : place + 1]), _DRAWS)[0]
            return partial(resized_crop_box, draws[:40].reshape(10, 4)), bool(draws[40] < 0.5)

        size, workers = self._config.image_size, self._config.workers
        return DaliDecoder(self._train.read, choose, self._read, size=size, workers=workers, device=self._device)

    # ------------------------------------------------------------ in a worker

    def _read(self, request: Request) -> Chunk:
        source, size = self._test if request.test else self._train, self._config.image_size
        pixels = torch.empty(len(request.numbers), *self.shape, dtype=torch.uint8)
        unreadable: list[tuple[int, str]] = []
        numbers = np.array(request.numbers, dtype=np.int64)
        draws = None if request.epoch is None else uniform(self._config.seed, request.epoch, numbers, _DRAWS)
        for place, content in enumerate(source.read(request.numbers)):
            try:
                if isinstance(content, OSError):
                    _refuse_machine(content, source.name(request.numbers[place]))
                    raise UnreadableImage(str(content.strerror or content))
                if request.epoch is None or draws is None:
                    pixels[place] = middle(content, size)
                else:
                    pixels[place] = self._augmented(content, draws[place], request.epoch, request.numbers[place])
            except UnreadableImage as error:
                unreadable.append((place, str(error)))
        return Chunk(pixels, unreadable)

    def _augmented(self, content: bytes, draws: npt.NDArray[np.float64], epoch: int, number: int) -> torch.Tensor:
        boxes = draws[:40].reshape(10, 4)
        pixels = crop(content, lambda height, width: resized_crop_box(boxes, height, width), self._config.image_size)
        if draws[40] < 0.5:
            pixels = pixels.flip(-1)
        return self._randaugment(pixels, self._config.seed, epoch, number) if self._randaugment else pixels


def _refuse_machine(error: OSError, name: str) -> None:
    """Raises DataError for what is no fault of the image: to leave out all that are met meanwhile would train on something else."""
    if error.errno in _FILES:
        raise DataError(f"image {name} cannot be read ({error.strerror}): raise the limit of open files (ulimit -n, or the container's)")
    if error.errno in _MACHINE:
        raise DataError(f"image {name} cannot be read ({error.strerror}): mend this node's disk, volume or memory, and start again")
