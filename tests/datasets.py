"""Small generated data sets in the real on-disk formats."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ddpjob_trainer.data.dataset import DataSet

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (60, 3072), dtype=np.uint8)
LABELS = RANDOM.integers(0, 10, 60)


def write_cifar_python(root: Path) -> None:
    """Write CIFAR-10's pickles: 5 x 10 training images, 10 test images."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        part = slice(10 * number, 10 * number + 10)
        batch = {
            "batch_label": name,
            "labels": LABELS[part].tolist(),
            "data": IMAGES[part],
            "filenames": [f"{i}.png" for i in range(10)],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def write_cifar_binary(root: Path) -> None:
    """Write CIFAR-10's binary version of the same images."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate([f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]):
        part = slice(10 * number, 10 * number + 10)
        (folder / name).write_bytes(np.hstack([LABELS[part, None].astype(np.uint8), IMAGES[part]]).tobytes())


def write_image_folder(root: Path, count: int = 6) -> None:
    """Write ImageNet's layout: train/ and val/, each with `count` JPEGs of different sizes in each
    of two classes.
    """
    from PIL import Image

    for split in ("train", "val"):
        for label, name in enumerate(("n01440764", "n01443537")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = RANDOM.integers(0, 128, (40 + 3 * number, 50, 3), dtype=np.uint8) + np.uint8(100 * label)
                Image.fromarray(pixels).save(root / split / name / f"{name}_{number}.JPEG")


def count_workers(opened: Callable[[], DataSet]) -> tuple[int, int]:
    """Return the number of a data set's workers while it is used, and right after it is dropped.

    Workers that only the garbage collector ends would remain, and it takes 5 s for each of them.
    """
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        data = opened()
        batches = data.train_batches([[3], [5], [7], [9]], 0)
        next(batches)
        used = set(multiprocessing.active_children()) - before
        del data, batches
        return len(used), len(set(multiprocessing.active_children()) - before)
    finally:
        gc.enable()
