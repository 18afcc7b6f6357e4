"""Augmentation whose randomness is a function of (seed, epoch, sample), never of the rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ddpjob_trainer.config.sections import DataConfig, Flip, Padding
from ddpjob_trainer.data.decode import Box
from ddpjob_trainer.data.randomness import derive, uniform, uniform_for_all
from ddpjob_trainer.errors import ConfigError

RANDAUGMENT = 0x52414E44
_ERASING, _CUTOUT = 0x45524153, 0x43555420


def pad(images: torch.Tensor, width: int, padding: Padding) -> torch.Tensor:
    """Return `images` (n, channels, height, width) with a border of `width` pixels on each side.

    Any dtype is supported. torch's own reflection supports only floats, so this function copies the
    reflected pixels by index.
    """
    if padding is Padding.ZEROS:
        return torch.nn.functional.pad(images, (width,) * 4)
    for axis in (2, 3):
        last = images.shape[axis] - 1
        places = torch.arange(-width, last + 1 + width, device=images.device).abs()
        images = images.index_select(axis, last - (last - places).abs())
    return images


def check_shift(shift: int, shape: Sequence[int]) -> None:
    """Raise ConfigError if `shift` is negative, or too large for images of this shape.

    `shape` is (channels, height, width).
    """
    if not 0 <= shift < min(shape[1:]):
        raise ConfigError(f"data.shift={shift}: must be from 0 to {min(shape[1:]) - 1} pixels")


class CropAndFlip:
    """Shifts images by up to `padding` pixels and, if `flip` is set, mirrors some of them.

    `border` determines the pixels that a shift brings in from outside the image. An image is
    mirrored with a probability of one half. With flip=alternating, the images to mirror are chosen
    once, for epoch 0. Even epochs mirror the chosen images, and odd epochs mirror all others, so
    two consecutive epochs show both sides of each image (Jordan, 94% on CIFAR-10 in 3.29 seconds,
    2024). He et al., Deep residual learning, 2015, section 4.2, use padding 4 for CIFAR.

    Every crop is a view of the padded set, so cropping a batch is a single gather operation on the
    device that holds the set.
    """

    def __init__(
        self,
        images: torch.Tensor,
        seed: int,
        *,
        padding: int,
        flip: bool | Flip,
        repeats: int = 1,
        border: Padding = Padding.ZEROS,
    ) -> None:
        """Pad the whole set of images, (n, channels, height, width) uint8.

        Each image has `repeats` versions, which are augmented differently.
        """
        count, channels, height, width = images.shape
        padded = pad(images, padding, border)
        plane, row = padded.stride(1), padded.stride(2)
        self._shifts = 2 * padding + 1
        size = (count, self._shifts, self._shifts, channels, height, width)
        self._crops = padded.as_strided(size, (padded.stride(0), row, 1, plane, row, 1))
        self._seed, self._flip, self._versions = seed, flip, count * repeats
        self._epoch = -1

    @classmethod
    def of(cls, config: DataConfig, images: torch.Tensor, padding: int, *, flip: bool = True) -> CropAndFlip:
        """Return the configured augmentation of `images`. Raises ConfigError.

        `padding` and `flip` are the defaults of data.shift and data.flip.
        """
        padding, flips = config.shift or padding, config.flip or flip
        check_shift(padding, images.shape[1:])
        return cls(images, config.seed, padding=padding, flip=flips, repeats=config.repeats, border=config.padding)

    def __call__(self, numbers: torch.Tensor, epoch: int) -> torch.Tensor:
        """Return the images that `numbers` select, as augmented in an epoch.

        The result is (n, channels, height, width) uint8. `numbers` are int64 (n,), on any device.
        In a set of `size` images, each number stands for a version of image `number % size`
        (data.repeats).
        """
        if epoch != self._epoch:
            self._draw(epoch)
        numbers = numbers.to(self._crops.device, non_blocking=True)
        crops = self._crops[numbers % len(self._crops), self._top[numbers], self._left[numbers]]
        return torch.where(self._mirrored[numbers], crops.flip(-1), crops) if self._flip else crops

    def _draw(self, epoch: int) -> None:
        """Draw an epoch's random numbers for the whole set.

        The numbers are drawn on the set's device, so no step has to transfer random numbers or wait
        for them.
        """
        draws = uniform_for_all(self._seed, epoch, self._versions, 3, self._crops.device)
        self._top, self._left = ((draws[:, i] * self._shifts).long() for i in (0, 1))
        if self._flip is Flip.ALTERNATING:
            draws = uniform_for_all(self._seed, 0, self._versions, 3, self._crops.device)
        self._mirrored = is_mirrored(draws[:, 2], self._flip, epoch).view(-1, 1, 1, 1)
        self._epoch = epoch


def is_mirrored(draws: torch.Tensor, flip: bool | Flip, epoch: int) -> torch.Tensor:
    """Return which images are mirrored in an epoch, given one random number per image.

    With flip=alternating, the random numbers must come from epoch 0.
    """
    return (draws < 0.5) ^ (flip is Flip.ALTERNATING and epoch % 2 == 1)


class RandAugment:
    """torchvision's RandAugment or TrivialAugment.

    All random choices depend only on the seed, the epoch and the sample.
    """

    def __init__(self, operations: int, magnitude: int) -> None:
        """Prepare RandAugment with `operations` per image. If `operations` is 0, use
        TrivialAugment.
        """
        from torchvision.transforms import v2

        self.operations, self.magnitude = operations, magnitude
        bilinear = v2.InterpolationMode.BILINEAR
        self._transform = (
            v2.RandAugment(operations, magnitude, interpolation=bilinear)
            if operations
            else v2.TrivialAugmentWide(interpolation=bilinear)
        )

    @classmethod
    def of(cls, config: DataConfig) -> RandAugment | None:
        """Return the configured augmentation, or None if it is off.

        Raises ConfigError for values that are out of range.
        """
        if config.trivialaugment:
            if config.randaugment_ops:
                raise ConfigError(
                    "data.trivialaugment cannot be combined with RandAugment"
                    f" (data.randaugment_ops={config.randaugment_ops}); leave one of them out"
                )
            return cls(0, 0)
        if config.randaugment_ops < 0:
            raise ConfigError(f"data.randaugment_ops={config.randaugment_ops}: must be at least 0; 2 is usual")
        if not 0 <= config.randaugment_magnitude <= 30:
            raise ConfigError(
                f"data.randaugment_magnitude={config.randaugment_magnitude}: must be from 0 to 30; 9 is usual"
            )
        return cls(config.randaugment_ops, config.randaugment_magnitude) if config.randaugment_ops else None

    @property
    def space(self) -> dict[str, tuple[Callable[[int, int, int], torch.Tensor | None], bool]]:
        """torchvision's operations, by name.

        Each operation has a function and a flag. The function maps (bins, height, width) to the
        possible magnitudes, or to None if the operation has no magnitude. The flag indicates
        whether the chosen magnitude may be negated.
        """
        return self._transform._AUGMENTATION_SPACE  # type: ignore[no-any-return]

    def __call__(self, image: torch.Tensor, seed: int, epoch: int, number: int) -> torch.Tensor:
        """Return the augmented image. `image` is (3, height, width) uint8."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(seed, epoch, number, RANDAUGMENT))
            augmented: torch.Tensor = self._transform(image)
        return augmented


class RandomErasing:
    """torchvision's RandomErasing, for normalized images.

    All random choices depend only on the seed, the epoch and the sample.
    """

    _SCALE, _RATIO = (0.02, 0.33), (0.3, 3.3)

    def __init__(self, probability: float, seed: int) -> None:
        from torchvision.transforms import RandomErasing as Erasing

        self._choose, self._probability, self._seed = Erasing.get_params, probability, seed

    def __call__(self, images: torch.Tensor, numbers: list[int], epoch: int) -> torch.Tensor:
        """Fill a random rectangle in some of the images with 0, the mean colour, in place.

        `images` are (n, channels, height, width), and `numbers` are their sample numbers.
        """
        chosen = uniform(derive(self._seed, _ERASING), epoch, np.array(numbers, dtype=np.int64), 1)[:, 0]
        shape = torch.empty(images.shape[1:], device="meta")
        inside = [np.zeros((len(numbers), side), dtype=bool) for side in images.shape[2:]]
        with torch.random.fork_rng(devices=[]):
            for index in np.flatnonzero(chosen < self._probability).tolist():
                torch.default_generator.manual_seed(derive(self._seed, epoch, numbers[index], _ERASING))
                top, left, height, width, value = self._choose(shape, self._SCALE, self._RATIO, [0.0])
                if value is not shape:  # A rectangle that fits into the image was found.
                    inside[0][index, top : top + height] = inside[1][index, left : left + width] = True
        return _erase(images, *map(torch.from_numpy, inside))


class Cutout:
    """Sets a square in each normalized image to 0, the mean colour.

    The center of the square can be anywhere in the image, so part of the square may lie outside.
    DeVries and Taylor, Improved regularization of convolutional neural networks with Cutout, 2017.
    """

    def __init__(self, side: int, seed: int) -> None:
        self._half, self._seed = side // 2, seed

    def __call__(self, images: torch.Tensor, numbers: list[int], epoch: int) -> torch.Tensor:
        """Set a random square in each image to 0, in place.

        `images` are (n, channels, height, width), and `numbers` are their sample numbers.
        """
        draws = torch.from_numpy(uniform(derive(self._seed, _CUTOUT), epoch, np.array(numbers, dtype=np.int64), 2))
        inside = []
        for axis, side in enumerate(images.shape[2:]):
            center, places = (draws[:, axis] * side).long()[:, None], torch.arange(side)[None]
            inside.append((places >= center - self._half) & (places < center + self._half))
        return _erase(images, *inside)


def _erase(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Set to 0, in place, the pixels whose row and column are both selected.

    The masks `rows` (n, height) and `columns` (n, width) select the rows and columns of each image.
    """
    rows, columns = (inside.to(images.device, non_blocking=True) for inside in (rows, columns))
    return images.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


Eraser = Callable[[torch.Tensor, list[int], int], torch.Tensor]
"""A function that erases parts of normalized images in place. Its arguments are the images, (n,
channels, height, width), their sample numbers, and the epoch.
"""


def build_erasers(config: DataConfig, shape: tuple[int, ...]) -> list[Eraser]:
    """Return the configured functions that erase parts of images.

    `shape` is the shape of an input. Raises ConfigError for an invalid value, and for erasing if
    the inputs are not images.
    """
    if not 0 <= config.erase <= 1:
        raise ConfigError(f"data.erase={config.erase}: must be a probability, for example 0.1, or 0 for none")
    if config.cutout < 0 or config.cutout % 2:
        raise ConfigError(f"data.cutout={config.cutout}: must be an even number of pixels, for example 16, or 0")
    for key in ("erase", "cutout"):
        if getattr(config, key) and len(shape) != 3:
            raise ConfigError(
                f"data.{key}={getattr(config, key)} needs images (channels, height, width), but the "
                f"inputs of data.name={config.name} have the shape {shape}; leave out data.{key}"
            )
    cutout: list[Eraser] = [Cutout(config.cutout, config.seed)] if config.cutout else []
    return [*cutout, RandomErasing(config.erase, config.seed)] if config.erase else cutout


def resized_crop_box(draws: npt.NDArray[np.float64], height: int, width: int) -> Box:
    """Return a random crop with 8 to 100 % of the area and an aspect ratio from 3:4 to 4:3.

    `draws` are (10, 4) uniform numbers, enough for ten attempts. If no attempt yields a crop that
    fits into the image, the result is the center of the image. torchvision's RandomResizedCrop does
    the same (Szegedy et al., Going deeper with convolutions, 2014).
    """
    for area_draw, ratio_draw, top_draw, left_draw in draws:
        area = height * width * (0.08 + 0.92 * area_draw)
        ratio = math.exp(math.log(3 / 4) + ratio_draw * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1)), h, w)
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return Box((height - h) // 2, (width - w) // 2, h, w)
