"""Makes data sets in the real formats from crops and flips of scikit-learn's two photographs.

Random noise is unsuitable because it compresses badly, and the time to decode a JPEG grows with its
size.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

DIFFERENT = 600
"""Number of distinct images. Additional JPEGs are hard links to them."""


def photographs() -> list[Image.Image]:
    """Return scikit-learn's two photographs, 640x427."""
    from sklearn.datasets import load_sample_image

    return [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]


def picture(sources: list[Image.Image], random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Return a random part of a random photograph."""
    source = sources[random.integers(len(sources))]
    zoom = random.uniform(0.5, 1.0)
    across, down = source.width * zoom, source.height * zoom
    left, top = random.uniform(0, source.width - across), random.uniform(0, source.height - down)
    image = source.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, left + across, top + down))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return ImageEnhance.Brightness(image).enhance(random.uniform(0.7, 1.3))


def cifar10(root: Path, count: int) -> None:
    """Write CIFAR-10's pickles with `count` training images in five files, and 500 test images.

    At most DIFFERENT images in a file are distinct.
    """
    folder, random, sources = root / "cifar-10-batches-py", np.random.default_rng(0), photographs()
    folder.mkdir(parents=True)
    each = -(-count // 5)
    for name, size in (*((f"data_batch_{number}", each) for number in range(1, 6)), ("test_batch", 500)):
        images = [
            np.asarray(picture(sources, random, 32, 32)).transpose(2, 0, 1).reshape(-1)
            for _ in range(min(size, DIFFERENT))
        ]
        content = {"labels": random.integers(0, 10, size).tolist(), "data": np.resize(images, (size, 3 * 32 * 32))}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(number) for number in range(10)]}))


def jpegs(root: Path, count: int) -> None:
    """Write train/ and val/ in ImageNet's layout, with ten classes.

    There are `count` training JPEGs of 500x375 or 375x500 at quality 90.
    """
    random, sources = np.random.default_rng(0), photographs()
    for part, size in (("train", count), ("val", 20)):
        made: list[Path] = []
        for number in range(size):
            path = root / part / f"class-{number % 10}" / f"{number:06d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            if number < DIFFERENT:
                shape = (500, 375) if random.random() < 0.75 else (375, 500)
                picture(sources, random, *shape).save(path, quality=90)
                made.append(path)
            else:
                os.link(made[number % len(made)], path)
