"""The ingredients of published recipes equal their reference implementations on the same random
draws, and the recipes can be built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.config.sections import DataConfig, OptimConfig
from ddpjob_trainer.data.augment import Cutout, RandAugment, RandomErasing, build_erasers
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import Batch
from ddpjob_trainer.data.decode import middle
from ddpjob_trainer.data.randomness import derive, uniform
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.loss import Loss
from PIL import Image
from ranks import TINY, final_losses, good

SEED, EPOCH = 3, 2


def photographs() -> torch.Tensor:
    from sklearn.datasets import load_sample_image

    return torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[:, 100:164, 200:264].contiguous()


def test_trivialaugment_matches_torchvision() -> None:
    from torchvision.transforms import v2

    ours = RandAugment.of(DataConfig(trivialaugment=True))
    theirs = v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR)
    assert ours is not None
    changed = 0
    for number in range(40):
        state = torch.get_rng_state()
        found = ours(photographs(), SEED, EPOCH, number)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(derive(SEED, EPOCH, number, 0x52414E44))
        assert torch.equal(found, theirs(photographs()))
        changed += not torch.equal(found, photographs())
    assert changed > 20
    with pytest.raises(ConfigError, match=r"data.trivialaugment cannot be combined with RandAugment"):
        RandAugment.of(DataConfig(trivialaugment=True, randaugment_ops=2))


def test_random_erasing_matches_torchvision() -> None:
    from torchvision.transforms import RandomErasing as Theirs

    numbers = list(range(400))
    images = torch.randn(400, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    found = RandomErasing(0.25, SEED)(images.clone(), numbers, EPOCH)
    chosen = uniform(derive(SEED, 0x45524153), EPOCH, np.array(numbers), 1)[:, 0] < 0.25
    assert 70 < chosen.sum() < 130
    for number in numbers:
        torch.manual_seed(derive(SEED, EPOCH, number, 0x45524153))
        wanted = images[number]
        if chosen[number]:
            top, left, height, width, value = Theirs.get_params(wanted, (0.02, 0.33), (0.3, 3.3), [0.0])
            wanted = wanted.clone()
            wanted[:, top : top + height, left : left + width] = value
        assert torch.equal(found[number], wanted), number
    some = [7, 3, 250]
    assert torch.equal(RandomErasing(0.25, SEED)(images[some].clone(), some, EPOCH), found[some]), "in any batch"


def test_cutout_matches_the_code_of_its_paper() -> None:
    """The paper's code cuts a square around a uniformly drawn center and clips it at the
    borders.
    """
    images = torch.ones(50, 3, 32, 20)
    found = Cutout(16, SEED)(images.clone(), list(range(50)), EPOCH)
    draws = uniform(derive(SEED, 0x43555420), EPOCH, np.arange(50), 2)
    for number in range(50):
        y, x = int(draws[number, 0] * 32), int(draws[number, 1] * 20)
        mask = np.ones((32, 20), np.float32)
        mask[np.clip(y - 8, 0, 32) : np.clip(y + 8, 0, 32), np.clip(x - 8, 0, 20) : np.clip(x + 8, 0, 20)] = 0.0
        assert torch.equal(found[number], torch.from_numpy(mask).expand(3, 32, 20))


@pytest.mark.parametrize(
    ("keys", "shape", "message"),
    [
        ({"erase": 1.5}, (3, 8, 8), r"data.erase=1.5: must be a probability"),
        ({"erase": 0.1}, (5,), r"data.erase=0.1 needs images"),
        ({"cutout": 3}, (3, 8, 8), r"data.cutout=3: must be an even number"),
        ({"cutout": 4}, (5,), r"data.cutout=4 needs images"),
    ],
)
def test_invalid_erasing_values_are_refused(keys: dict[str, float], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_erasers(DataConfig(**keys), shape)  # type: ignore[arg-type]
    assert build_erasers(DataConfig(), (5,)) == []


def test_erased_areas_do_not_depend_on_the_ranks(tmp_path: object) -> None:
    keys = [*TINY, "train.epochs=1", "data.erase=0.5", "data.cutout=2", "data.mixup=0.2", "data.micro_batches=4"]
    for world in (1, 2, 3):
        good(world, [*keys, f"checkpoint.dir={tmp_path}/{world}"])
    from pathlib import Path

    curves = [final_losses(Path(f"{tmp_path}/{world}/run")) for world in (1, 2, 3)]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    np.testing.assert_allclose(curves[2], curves[0], rtol=1e-4)


def test_binary_cross_entropy_of_mixed_images_matches_timm() -> None:
    theirs = pytest.importorskip("timm.loss").BinaryCrossEntropy(smoothing=0.0)
    torch.manual_seed(0)
    scores, shares = torch.randn(6, 5), torch.rand(6, 5).softmax(1)
    found = Loss(OptimConfig(loss="bce")).sum(scores, Batch(torch.empty(6), shares)) / 6
    torch.testing.assert_close(found, theirs(scores, shares))


@pytest.mark.parametrize(("size", "share", "short"), [(224, 0.875, 256), (224, 0.9655, 232), (160, 1.0, 160)])
def test_test_images_match_torchvision(size: int, share: float, short: int) -> None:
    import io

    from sklearn.datasets import load_sample_image
    from torchvision.transforms import v2

    buffer = io.BytesIO()
    Image.fromarray(load_sample_image("china.jpg")).save(buffer, "png")
    whole = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    wanted = v2.CenterCrop(size)(v2.Resize(short, antialias=True)(whole))
    assert (middle(buffer.getvalue(), size, share).int() - wanted.int()).abs().max() <= 2


def test_test_images_may_be_larger_than_training_images(tmp_path: object) -> None:
    from pathlib import Path

    from sklearn.datasets import load_sample_image

    folder = Path(str(tmp_path))
    for part in ("train", "val"):
        for name in ("china.jpg", "flower.jpg"):
            (folder / part / name).mkdir(parents=True)
            Image.fromarray(load_sample_image(name)).save(folder / part / name / "0.jpg")
    keys = ["data.name=imagefolder", f"data.dir={folder}", "data.image_size=32", "data.workers=0"]
    data = open_data(config.load(None, [*keys, "data.test_image_size=48"]).data, torch.device("cpu"))
    assert next(iter(data.train_stream([(0, [0, 1])]))).images.shape == (2, 3, 32, 32)
    assert next(iter(data.test_batches([[0, 1]]))).images.shape == (2, 3, 48, 48)
    with pytest.raises(ConfigError, match=r"data.test_crop=0.0: must be above 0"):
        open_data(config.load(None, [*keys, "data.test_crop=0"]).data, torch.device("cpu"))


@pytest.mark.parametrize("name", config.shipped())
def test_a_shipped_recipe_can_be_loaded(name: str) -> None:
    config.load(name, [])


@pytest.mark.parametrize("more", [["data.name=digits"], ["data.name=test_recipes:drawing", "data.workers=0"]])
def test_the_first_version_of_a_sample_is_the_same_as_without_repeats(more: list[str]) -> None:
    plain = open_data(config.load(None, more).data)
    repeated = open_data(config.load(None, [*more, "data.repeats=3"]).data)
    size, numbers = plain.train_size, list(range(0, 60, 2))

    def images(data: Any, version: int, epoch: int = 1) -> torch.Tensor:
        batch = next(data.train_batches([[number + version * size for number in numbers]], epoch))
        assert torch.equal(batch.labels, next(plain.train_batches([numbers], 0)).labels)
        found: torch.Tensor = batch.images
        return found

    versions = [images(repeated, version) for version in range(3)]
    assert torch.equal(versions[0], images(plain, 0))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        same = (versions[first] == versions[second]).flatten(1).all(1)
        assert same.float().mean() < 0.5, "most digits are shifted by a different number of pixels"
    assert torch.equal(versions[2], images(repeated, 2)) and not torch.equal(versions[2], images(repeated, 2, 2))


def drawing(_: Any) -> Any:
    class Drawing:
        def __len__(self) -> int:
            return 70

        def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
            if not 0 <= number < 70:
                raise IndexError
            return number + torch.rand(3, 4, 4), number % 7

    return Drawing(), Drawing(), 7


@pytest.mark.parametrize("more", [[], ["data.trivialaugment=true"]])
def test_versions_of_encoded_images_differ_but_share_label_and_content(more: list[str], tmp_path: Path) -> None:
    """Each version has its own crop, flip and RandAugment. All versions of a sample share its label
    and content.
    """
    for part, count in (("train", 8), ("val", 2)):
        for number in range(count):
            path = tmp_path / part / f"{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(photographs().permute(1, 2, 0).numpy()).rotate(10 * number).save(path)
    keys = ["data.name=imagefolder", f"data.dir={tmp_path}", "data.image_size=24", "data.workers=0", *more]
    plain, repeated = (open_data(config.load(None, [*keys, *r]).data) for r in ([], ["data.repeats=2"]))
    first, second = ([number + version * 8 for number in range(8)] for version in (0, 1))
    (one,), (two,), (before,) = (
        list(data.train_batches([numbers], 3))
        for data, numbers in ((repeated, first), (repeated, second), (plain, first))
    )
    assert torch.equal(one.images, before.images) and torch.equal(one.labels, two.labels)
    assert not any(torch.equal(a, b) for a, b in zip(one.images, two.images, strict=True))


def test_invalid_repeats_are_refused() -> None:
    for keys, error in (
        (["data.repeats=0"], r"data.repeats=0: must be from 1 to data.batch=128"),
        (["data.repeats=3", "data.batch=2"], r"data.repeats=3: must be from 1 to data.batch=2"),
        (["data.repeats=3", "data.augment=false"], "all versions of a sample are the same; set data.augment=true"),
    ):
        with pytest.raises(ConfigError, match=error):
            open_data(config.load(None, keys).data)
