"""A data set of encoded images in a folder or in tar shards.

A pool of processes reads and decodes images, and the device normalizes them.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, tee
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ddpjob_trainer.config.sections import Corrupt, DataConfig, Decoder
from ddpjob_trainer.data.augment import RandAugment, resized_crop_box
from ddpjob_trainer.data.corrupt import Warnings
from ddpjob_trainer.data.dali import DaliDecoder
from ddpjob_trainer.data.dataset import IMAGENET_MEAN, IMAGENET_STD, UNREADABLE, Batch, DataSet, Normalize, fingerprint
from ddpjob_trainer.data.decode import Box, UnreadableImage, crop, middle
from ddpjob_trainer.data.pool import Chunk, Pool, Request
from ddpjob_trainer.data.randomness import uniform
from ddpjob_trainer.errors import ConfigError, DataError

_DRAWS = 41
_MOST_EARLY_SIZES = 3
"""Maximum number of sizes in data.early_sizes. Together with data.image_size, this allows 4 image
sizes. Ranks may have micro-batches of two different sizes, which makes 8 shapes, and torch.compile
gives up after 8 shapes.
"""
# Errors that are the machine's fault, not an image's. EIO is not among them, because a single bad
# sector may cause it. An image that causes EIO counts as corrupt. If a whole mount fails,
# data.corrupt_limit ends the training.
_FILES, _MACHINE = (errno.EMFILE, errno.ENFILE), (errno.ESTALE, errno.ENOMEM)


class Encoded(Protocol):
    """The encoded images of a training or test set. Images are numbered from 0."""

    labels: npt.NDArray[np.int64]

    def name(self, number: int) -> str:
        """Return a name by which the user can find the image."""

    def read(self, numbers: list[int]) -> list[bytes | OSError]:
        """Return each image's bytes, or an OSError for an image that cannot be read."""

    def identity(self) -> npt.NDArray[np.uint8]:
        """Return bytes that identify which image has which number.

        The bytes do not depend on where the files are.
        """


class ImageData(DataSet):
    """A data set of encoded images, which are decoded on demand.

    Training images get a random resized crop, a random flip and, if configured, RandAugment. Test
    images are cropped to their center. An image that cannot be decoded is replaced with a copy of
    another image in its batch. The copy has the label UNREADABLE and therefore weight zero.
    """

    def __init__(
        self,
        config: DataConfig,
        device: torch.device,
        train: Encoded,
        test: Encoded,
        classes: int,
        class_names: list[str] | None = None,
    ) -> None:
        for key, least in (("image_size", 1), ("test_image_size", 0)):
            if getattr(config, key) < least:
                raise ConfigError(f"data.{key}={getattr(config, key)}: must be at least {least}")
        if not 0 < config.test_crop <= 1:
            raise ConfigError(f"data.test_crop={config.test_crop}: must be above 0 and at most 1, for example 0.875")
        if not 0 <= config.corrupt_limit <= 1:
            raise ConfigError(
                f"data.corrupt_limit={config.corrupt_limit}: must be a fraction between 0 and 1, such as 0.01"
            )
        self._config, self._device, self._train, self._test = config, device, train, test
        self.classes, self.class_names = classes, class_names
        self.shape = (3, config.image_size, config.image_size)
        self._side = partial(_side, _sizes(config))
        self._test_size = config.test_image_size or config.image_size
        self.train_size, self.test_size = len(train.labels), len(test.labels)
        # Pixels are copied to a GPU on a separate stream, because a copy on the training stream
        # would wait for earlier steps. The separate stream has not been tested on GPUs.
        self._copies: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.normalize: Normalize = Normalize(255.0, IMAGENET_MEAN, IMAGENET_STD, device)
        self._randaugment = RandAugment.of(config) if config.augment else None
        self._warnings = Warnings()
        # The test set has its own pool, so that the next epoch's first batches are ready when an
        # evaluation ends.
        self._pool, self._test_pool = (Pool(self._read, config.workers, pinned=device.type != "cpu") for _ in range(2))
        self._dali = self._open_dali() if config.decoder is Decoder.DALI and config.augment else None

    def train_stream(self, parts: Iterable[tuple[int, list[int]]]) -> Iterator[Batch]:
        """Yield an augmented training batch for each (epoch, numbers) pair in `parts`."""
        # The requests must not refer to `self`. The pool refers to the requests, so this would form
        # the reference cycle that `Pool` describes.
        augment, side = self._config.augment, self._side
        requests = (Request(False, epoch if augment else None, part, side(epoch)) for epoch, part in parts)
        return self._load(self._train, requests, self._pool.run if self._dali is None else self._dali.run)

    def shape_in(self, epoch: int) -> tuple[int, int, int]:
        """Return the shape of an epoch's training images, which depends on data.early_sizes."""
        side = self._side(epoch)
        return 3, side, side

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield a test batch for each list of sample numbers."""
        return self._load(
            self._test, (Request(True, None, part, self._test_size) for part in parts), self._test_pool.run
        )

    def fingerprint(self) -> int:
        """Return a hash of all labels and of the names of files and classes."""
        names = os.fsencode("\n".join(self.class_names or []))
        sets = (self._train, self._test)
        return fingerprint(names, *(part for each in sets for part in (each.labels, each.identity())))

    # ------------------------------------------------------------ in the training process

    def _load(
        self,
        source: Encoded,
        requests: Iterator[Request],
        run: Callable[[Iterator[Request]], Iterator[list[Chunk]]],
    ) -> Iterator[Batch]:
        asked, answered = tee(requests)
        for chunks in run(asked):
            yield self._batch(source, next(answered), chunks)

    def _batch(self, source: Encoded, request: Request, chunks: list[Chunk]) -> Batch:
        numbers, side = request.numbers, request.side
        samples = _samples(source, numbers)
        labels = torch.from_numpy(source.labels[samples])
        done, bad = 0, list[int]()
        # Chunks from DALI are already on the GPU, and safe to use on the training stream.
        apart = self._copies if all(chunk.pixels.device.type == "cpu" for chunk in chunks) else None
        with torch.cuda.stream(apart) if apart else nullcontext():
            pixels = torch.empty(len(numbers), 3, side, side, dtype=torch.uint8, device=self._device)
            for chunk in chunks:
                pixels[done : done + len(chunk.pixels)].copy_(chunk.pixels, non_blocking=True)
                for index, reason in chunk.unreadable:
                    bad.append(done + index)
                    self._report(source.name(samples[done + index]), reason)
                done += len(chunk.pixels)
        if apart:
            trains = torch.cuda.current_stream(self._device)
            trains.wait_stream(apart)
            # Without `record_stream`, the memory could be reused while the training stream still
            # reads the pixels.
            pixels.record_stream(trains)
        if bad:
            whole = next((index for index in range(len(numbers)) if index not in bad), None)
            pixels[bad] = 0 if whole is None else pixels[whole].clone()
            labels[bad] = UNREADABLE
        return Batch(self.normalize(pixels), labels.to(self._device, non_blocking=True), len(bad))

    def _report(self, name: str, reason: str) -> None:
        if self._config.corrupt is Corrupt.STOP:
            raise DataError(f"image {name} cannot be read ({reason}); remove or replace it, or set data.corrupt=skip")
        self._warnings.skipped(name, reason)

    def _open_dali(self) -> DaliDecoder:
        if self._randaugment is not None:
            raise ConfigError(
                "data.decoder=dali does not support RandAugment; set data.decoder=auto, or data.randaugment_ops=0"
            )

        def choose(request: Request, index: int) -> tuple[Callable[[int, int], Box], bool]:
            assert request.epoch is not None
            draws = uniform(self._config.seed, request.epoch, np.array(request.numbers[index : index + 1]), _DRAWS)[0]
            return partial(resized_crop_box, draws[:40].reshape(10, 4)), bool(draws[40] < 0.5)

        def read(numbers: list[int]) -> list[bytes | OSError]:
            return self._train.read(_samples(self._train, numbers))

        return DaliDecoder(read, choose, self._read, workers=self._config.workers, device=self._device)

    # ------------------------------------------------------------ in a worker

    def _read(self, request: Request) -> Chunk:
        source = self._test if request.test else self._train
        pixels = torch.empty(len(request.numbers), 3, request.side, request.side, dtype=torch.uint8)
        unreadable: list[tuple[int, str]] = []
        numbers = np.array(request.numbers, dtype=np.int64)
        samples = _samples(source, request.numbers)
        draws = None if request.epoch is None else uniform(self._config.seed, request.epoch, numbers, _DRAWS)
        for index, content in enumerate(source.read(samples)):
            try:
                if isinstance(content, OSError):
                    _refuse_machine(content, source.name(samples[index]))
                    raise UnreadableImage(str(content.strerror or content))
                if draws is None:
                    pixels[index] = middle(content, request.side, self._config.test_crop)
                else:
                    pixels[index] = self._augment_image(content, draws[index], request, index)
            except UnreadableImage as error:
                unreadable.append((index, str(error)))
        return Chunk(pixels, unreadable)

    def _augment_image(
        self, content: bytes, draws: npt.NDArray[np.float64], request: Request, index: int
    ) -> torch.Tensor:
        boxes = draws[:40].reshape(10, 4)
        pixels = crop(content, lambda height, width: resized_crop_box(boxes, height, width), request.side)
        if draws[40] < 0.5:
            pixels = pixels.flip(-1)
        if self._randaugment is None or request.epoch is None:
            return pixels
        return self._randaugment(pixels, self._config.seed, request.epoch, request.numbers[index])


def _sizes(config: DataConfig) -> list[tuple[int, float]]:
    """Return (side, end) for each size in data.early_sizes and, finally, for data.image_size.

    Images have the side `side` until `end` epochs are complete. Raises ConfigError.
    """
    text = f"data.early_sizes={','.join(config.early_sizes)}"
    pairs = [re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", size) for size in config.early_sizes]
    sizes: list[tuple[int, float]] = [(int(pair[1]), int(pair[2])) for pair in pairs if pair]
    if len(sizes) < len(pairs):
        raise ConfigError(f"{text}: each size must be SIDE:EPOCHS; write, for example, 128:6,160:12")
    whole = [*sizes, (config.image_size, math.inf)]
    for (side, epochs), (larger, later) in pairwise([(0, 0.0), *whole]):
        if side >= larger or epochs >= later:
            raise ConfigError(
                f"{text}: sides and epochs must increase, and all sides must be below "
                f"data.image_size={config.image_size}; write, for example, 128:6,160:12"
            )
    if len(sizes) > _MOST_EARLY_SIZES:
        raise ConfigError(f"{text}: must have at most {_MOST_EARLY_SIZES} sizes, because each is compiled separately")
    return whole


def _side(sizes: list[tuple[int, float]], epoch: int) -> int:
    return next(side for side, epochs in sizes if epoch < epochs)


def _samples(source: Encoded, numbers: list[int]) -> list[int]:
    """Return the samples to which these versions belong (data.repeats)."""
    size = len(source.labels)
    return [number % size for number in numbers]


def _refuse_machine(error: OSError, name: str) -> None:
    """Raise DataError if `error` is the machine's fault, not the image's.

    If images were skipped because of such an error, training would use different data.
    """
    if error.errno in _FILES:
        raise DataError(
            f"image {name} cannot be read ({error.strerror}); raise the limit on open files (ulimit "
            "-n, or the limit of the container)"
        )
    if error.errno in _MACHINE:
        raise DataError(
            f"image {name} cannot be read ({error.strerror}); repair this node's disk, volume or memory, and"
            " start again"
        )
