"""Ten classes of generated shapes, hard enough to show what each part of a recipe contributes.

The images do not need to be downloaded. Image n depends only on n, and has identical bits on any
machine and with any version of numpy. The computation uses only integers and those floating-point
operations that IEEE 754 rounds in exactly one way (+ - * / and comparisons). It avoids sines, and
sums in an unspecified order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.augment import CropAndFlip
from ddpjob_trainer.data.dataset import Normalize
from ddpjob_trainer.data.in_memory import Augment, MemoryData
from ddpjob_trainer.data.randomness import mix64, uniform
from ddpjob_trainer.errors import ConfigError

SIDE = 16
"""Side of an image, in pixels."""
TEST_SIZE = 2048
_FINE = 2 * SIDE
"""Shapes are drawn on a grid with this many points on each side. A pixel is the mean of four
points.
"""
_AT_ONCE = 256
"""Number of images drawn together, chosen so that their arrays fit into a CPU's cache."""
_SEED, _TEST, _CLUTTER = 0x53484150, 1 << 40, 2

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]


def _square(u: Floats, v: Floats, half: float) -> Bools:
    return np.maximum(np.abs(u), np.abs(v)) < half


def _disc(u: Floats, v: Floats, radius: float) -> Bools:
    return u * u + v * v < radius * radius


def _box(u: Floats, v: Floats, half_u: float, half_v: float) -> Bools:
    return (np.abs(u) < half_u) & (np.abs(v) < half_v)


CLASSES: dict[str, Callable[[Floats, Floats], Bools]] = {
    "disc": lambda u, v: _disc(u, v, 0.9),
    "ring": lambda u, v: _disc(u, v, 1.0) & ~_disc(u, v, 0.5),
    "square": lambda u, v: _square(u, v, 0.8),
    "frame": lambda u, v: _square(u, v, 0.9) & ~_square(u, v, 0.45),
    "triangle": lambda u, v: (v > -0.7) & (1.7 * np.abs(u) + v < 0.95),
    "half disc": lambda u, v: _disc(u, v + 0.4, 1.0) & (v > -0.4),
    "cross": lambda u, v: _box(u, v, 1.0, 0.3) | _box(u, v, 0.3, 1.0),
    "T": lambda u, v: _box(u, v - 0.65, 0.95, 0.3) | _box(u, v + 0.1, 0.3, 0.9),
    "angle": lambda u, v: _box(u + 0.6, v, 0.3, 0.9) | _box(u, v + 0.6, 0.9, 0.3),
    "two bars": lambda u, v: _box(u, np.abs(v) - 0.6, 0.95, 0.28),
}
"""Maps each class to a function. The function receives points (u, v), and returns whether each
point is inside the shape. The shape lies within [-1, 1] squared. A mirrored shape is also a rotated
shape of the same class, so flips preserve labels.
"""


def open_shapes(config: DataConfig, device: torch.device) -> MemoryData:
    """Return a data set of `data.size` training images and 2048 test images on the device.

    All images are different, and are kept as uint8.
    """
    if config.size < 1:
        raise ConfigError(f"data.size={config.size}: must be at least 1, for example 2048")
    if config.randaugment_ops or config.trivialaugment:
        key = "trivialaugment" if config.trivialaugment else "randaugment_ops"
        raise ConfigError(
            f"data.{key} has no effect with data.name=shapes, whose images are only shifted and "
            "flipped; leave it out, or try data.cutout"
        )
    train, test = draw(np.arange(config.size)), draw(np.arange(TEST_SIZE) + _TEST)
    images = torch.from_numpy(train[0]).to(device)
    augment: Augment | None = None
    if config.augment:
        augment = CropAndFlip.of(config, images, 2)
    return MemoryData(
        (images, torch.from_numpy(train[1]).to(device)),
        (torch.from_numpy(test[0]).to(device), torch.from_numpy(test[1]).to(device)),
        classes=len(CLASSES),
        normalize=Normalize(255.0, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), device),
        augment=augment,
        class_names=list(CLASSES),
    )


def draw(numbers: npt.NDArray[np.int64]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Return the images (n, 3, SIDE, SIDE) uint8 and labels (n,) int64 with the given numbers.

    Numbers of test images begin at 2**40.
    """
    labels = numbers % len(CLASSES)
    parts = [numbers[first : first + _AT_ONCE] for first in range(0, len(numbers), _AT_ONCE)]
    return np.concatenate([_draw(part) for part in parts]), labels


def _draw(numbers: npt.NDArray[np.int64]) -> Bytes:
    draws = iter(uniform(_SEED, 0, numbers, 80).T[:, :, None, None])

    def between(low: float, high: float) -> Floats:
        """Return one random number from `low` to `high` per image, (n, 1, 1)."""
        number: Floats = low + (high - low) * next(draws)
        return number

    def colour() -> Floats:
        """Return a random colour per image, (n, 3, 1, 1), from 0 to 1."""
        return np.stack([next(draws) for _ in range(3)], axis=1)

    def plane(centre_x: Floats, centre_y: Floats, size: Floats) -> tuple[Floats, Floats]:
        """Return each grid point's coordinates in a plane that is randomly rotated for each image.

        Both coordinates are (n, _FINE, _FINE). The plane's origin is at (`centre_x`, `centre_y`),
        and its unit is `size` pixels.
        """
        slope, sign = between(-1.0, 1.0), np.where(next(draws) < 0.5, 1.0, -1.0)
        cosine = sign * (1 - slope * slope) / (1 + slope * slope)
        sine = sign * 2 * slope / (1 + slope * slope)
        x, y = (points[None, None, :] - centre_x) / size, (points[None, :, None] - centre_y) / size
        return cosine * x + sine * y, cosine * y - sine * x

    points, middle = (np.arange(_FINE) + 0.5) / 2, SIDE / 2
    ground, other = colour(), 0.5 * (colour() - 0.5)
    u, _ = plane(between(0.0, SIDE), between(0.0, SIDE), between(2.0, 6.0))
    stripes = np.where(next(draws) < 0.5, np.abs(u % 2.0 - 1.0), u % 2.0 < 1.0)
    canvas = ground + other * stripes[:, None]
    for _ in range(_CLUTTER):
        u, v = plane(between(0.0, SIDE), between(0.0, SIDE), between(0.8, 2.5))
        piece = np.where(next(draws) < 0.5, _disc(u, v, 1.0), _box(u, v, 1.0, 0.4))
        canvas = np.where(piece[:, None], colour(), canvas)

    u, v = plane(middle + between(-2.0, 2.0), middle + between(-2.0, 2.0), between(4.5, 6.5))
    v = v * between(1.0, 1.3)
    inside = np.zeros(u.shape, dtype=bool)
    for label, shape in enumerate(CLASSES.values()):
        own = numbers % len(CLASSES) == label
        inside[own] = shape(u[own], v[own])
    # Each channel of the shape's colour is 0.3 to 0.7 above that of the background, with values
    # that wrap around at 1. This makes the shape visible.
    canvas = np.where(inside[:, None], (ground + 0.3 + 0.4 * colour()) % 1.0, canvas)
    u, v = plane(between(0.0, SIDE), between(0.0, SIDE), between(1.0, 1.8))
    canvas = np.where(_box(u, v, 8.0, 0.6)[:, None], colour(), canvas)  # A bar covers part of the shape.

    pixels = (canvas[..., ::2, ::2] + canvas[..., 1::2, ::2] + canvas[..., ::2, 1::2] + canvas[..., 1::2, 1::2]) / 4
    return np.clip(np.rint(pixels * 255.0 + _noise(numbers)), 0, 255).astype(np.uint8)


def _noise(numbers: npt.NDArray[np.int64]) -> Floats:
    """Return noise (n, 3, SIDE, SIDE) with a standard deviation of 12 out of 255 levels.

    The sum of four random bytes gives an approximately normal distribution.
    """
    places = np.arange(3 * SIDE * SIDE, dtype=np.uint64)
    keys = mix64(numbers.astype(np.uint64) + np.uint64(_SEED))
    words = mix64(keys[:, None] + (places[None, :] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    total = sum(((words >> np.uint64(shift)) & np.uint64(255)).astype(np.int64) for shift in (0, 8, 16, 24))
    return ((np.asarray(total) - 510) * (1 / 12)).reshape(len(numbers), 3, SIDE, SIDE)
