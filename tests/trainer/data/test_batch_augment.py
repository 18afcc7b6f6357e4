"""RandAugment, TrivialAugment and erasing for whole batches: the same pixels as for single images,
with few kernel launches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.augment import CropAndFlip, RandAugment, RandomErasing
from ddpjob_trainer.data.batch_augment import BatchAugment
from ddpjob_trainer.data.randomness import derive, derive_for_all, twister_words
from torch.utils._python_dispatch import TorchDispatchMode

SEED, EPOCH = 3, 2
_NO_LAUNCH = (
    *("view", "split", "slice", "select", "expand", "unbind", "unsqueeze", "empty", "detach", "as_strided"),
    "lift_fresh",  # torch.from_numpy
)


class Launches(TorchDispatchMode):
    """Counts operations that read or write tensors on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, found = func.overloadpacket.__name__, [*args, result]
        tensors = [value for value in found if isinstance(value, torch.Tensor)]
        if any(value.device.type == self._device for value in tensors) and not any(part in name for part in _NO_LAUNCH):
            self.names.append(name)
        return result


def pictures() -> torch.Tensor:
    """Return images of shape (600, 3, 32, 32): noise, flat colours, few colours and parts of a
    photograph.
    """
    from sklearn.datasets import load_sample_image

    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (200, 3, 32, 32))
    flat = random.integers(0, 256, (60, 3, 1, 1)) + np.zeros((60, 3, 32, 32), int)
    few = random.integers(100, 104, (140, 3, 32, 32))
    few[::4, :, 2:, :] = 103  # Fewer than 255 pixels have smaller values, so equalize leaves these images unchanged.
    photograph = load_sample_image("china.jpg").transpose(2, 0, 1)
    corners = random.integers(0, 380, (200, 2))
    parts = [photograph[:, y : y + 32, x : x + 32] for y, x in corners]
    return torch.from_numpy(np.concatenate([noise, flat, few, np.stack(parts)])).byte()


def both(keys: dict[str, Any], images: torch.Tensor, versions: int) -> tuple[CropAndFlip, RandAugment, BatchAugment]:
    crop = CropAndFlip(images, SEED, padding=4, flip=True, repeats=versions)
    single = RandAugment.of(DataConfig(**keys))
    assert single is not None
    return crop, single, BatchAugment(crop, images, single, SEED, versions * len(images))


@pytest.mark.parametrize(
    ("keys", "versions"),
    [
        ({"randaugment_ops": 2}, 2),
        ({"randaugment_ops": 3, "randaugment_magnitude": 20}, 1),
        ({"trivialaugment": True}, 6),
    ],
)
def test_augmenting_a_batch_gives_the_same_pixels_as_augmenting_each_image(keys: dict[str, Any], versions: int) -> None:
    images = pictures()
    crop, single, whole = both(keys, images, versions)
    numbers = torch.randperm(versions * len(images), generator=torch.Generator().manual_seed(1))
    crops = crop(numbers, EPOCH)
    wrong = []
    for part, before in zip(numbers.split(250), crops.split(250), strict=True):
        found = whole(part, EPOCH)
        wanted = torch.stack(
            [single(image, SEED, EPOCH, number) for image, number in zip(before, part.tolist(), strict=True)]
        )
        wrong += [n for n, a, b in zip(part.tolist(), found, wanted, strict=True) if not torch.equal(a, b.float())]
    assert wrong == []


def test_batches_of_one_image_and_of_none_can_be_augmented() -> None:
    crop, single, whole = both({"randaugment_ops": 2}, pictures(), 1)
    for number in range(20):
        one = torch.tensor([number])
        assert torch.equal(whole(one, EPOCH)[0], single(crop(one, EPOCH)[0], SEED, EPOCH, number).float())
    assert whole(torch.tensor([], dtype=torch.int64), EPOCH).shape == (0, 3, 32, 32)


def test_the_random_numbers_come_from_torchs_generator() -> None:
    numbers = np.arange(50)
    seeds = derive_for_all(SEED, EPOCH, numbers, 77)
    assert seeds.tolist() == [derive(SEED, EPOCH, int(number), 77) for number in numbers]
    words = twister_words(seeds, 700)
    for seed, own in zip(seeds.tolist(), words.T.tolist(), strict=True):
        drawn = torch.randint(1 << 27, (700,), generator=torch.Generator().manual_seed(seed))
        assert drawn.tolist() == [word % (1 << 27) for word in own]


@pytest.mark.parametrize("keys", [{"randaugment_ops": 2}, {"trivialaugment": True}])
def test_a_batch_of_128_takes_at_most_60_launches(keys: dict[str, Any]) -> None:
    """For single images, RandAugment needed 5,350 operations."""
    crop, _, whole = both(keys, pictures(), 1)
    numbers = torch.arange(128)
    whole(numbers, EPOCH)
    with Launches("cpu") as alone:
        crop(numbers, EPOCH)
    with Launches("cpu") as taken:
        whole(numbers, EPOCH)
    assert len(taken.names) - len(alone.names) <= 60, sorted(taken.names)


def test_erasing_takes_a_few_launches_on_the_device() -> None:
    """The rectangles are drawn in main memory. A meta tensor stands in for the device's."""
    images = torch.empty(128, 3, 32, 32, device="meta")
    with Launches("meta") as taken:
        RandomErasing(1.0, SEED)(images, list(range(128)), EPOCH)
    assert len(taken.names) <= 6, taken.names
