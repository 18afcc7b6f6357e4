"""The generated shapes are the same images on any machine. Each image depends only on its
number.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.data.shapes import CLASSES, SIDE, TEST_SIZE, draw
from ddpjob_trainer.errors import ConfigError

TEST_BEGINS = 1 << 40


def opened(*keys: str) -> DataSet:
    return open_data(config.load(None, ["data.name=shapes", *keys]).data)


def test_the_generated_images_are_the_same_on_every_machine() -> None:
    """They are bit-identical. The digest is from the time when the recipe's figures were
    measured.
    """
    numbers = np.concatenate([np.arange(300), np.arange(300) + TEST_BEGINS])
    images, labels = draw(numbers)
    assert images.shape == (600, 3, SIDE, SIDE) and images.dtype == np.uint8
    assert labels.tolist() == (numbers % 10).tolist()
    assert (
        hashlib.sha256(images.tobytes()).hexdigest()
        == "530d0bc0ec47f2f427aa635a0af361b7eaaa7ceee0b7c2a288e7426f14600da9"
    )


def test_an_image_depends_only_on_its_number() -> None:
    whole, _ = draw(np.arange(300))
    some, labels = draw(np.array([299, 7, 256, 7]))
    assert np.array_equal(some, whole[[299, 7, 256, 7]]) and labels.tolist() == [9, 7, 6, 7]
    few, many = (
        opened("data.size=20", "data.augment=false"),
        opened("data.size=40", "data.seed=3", "data.augment=false"),
    )
    for one, other in zip(few.train_batches([[3, 19]], 0), many.train_batches([[3, 19]], 5), strict=True):
        assert torch.equal(one.images, other.images)
    for one, other in zip(few.test_batches([[0, 2047]]), many.test_batches([[0, 2047]]), strict=True):
        assert torch.equal(one.images, other.images) and one.labels.tolist() == [6, 3]
    assert few.fingerprint() != many.fingerprint() and few.test_size == TEST_SIZE


def test_no_test_image_is_a_training_image() -> None:
    train, test = draw(np.arange(500))[0], draw(np.arange(500) + TEST_BEGINS)[0]
    assert len({image.tobytes() for image in (*train, *test)}) == 1000


@pytest.mark.parametrize("name", CLASSES)
def test_the_mirror_image_of_a_shape_has_the_same_class(name: str) -> None:
    """Each shape has a mirror axis, so a flip keeps the label. Its other rotations are drawn
    equally often.
    """
    line = (np.arange(200) + 0.5) / 75 - 200 / 150
    u, v = np.meshgrid(line, line)
    shape = CLASSES[name]
    inside = shape(u, v)
    assert 0.1 < inside.mean() < 0.6
    assert np.array_equal(inside, shape(-u, v)) or np.array_equal(inside, shape(v, u))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["data.size=0"], r"data.size=0: must be at least 1"),
        (
            ["data.trivialaugment=true"],
            r"data.trivialaugment has no effect with data.name=shapes, whose images are only shifted and flipped",
        ),
        (
            ["data.randaugment_ops=2"],
            r"data.randaugment_ops has no effect with data.name=shapes, whose images are only shifted and flipped",
        ),
    ],
)
def test_invalid_settings_of_generated_shapes_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(*keys)
