"""Mixup, CutMix and RandAugment agree with torchvision's. Their results depend only on the seed,
the epoch, and the sample or micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import write_cifar_binary, write_image_folder
from ddpjob_trainer import config
from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data import mixup
from ddpjob_trainer.data.augment import RandAugment
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import UNREADABLE, Batch
from ddpjob_trainer.data.sampler import Dealing
from ddpjob_trainer.errors import ConfigError
from ranks import final_losses, good
from torchvision.transforms import v2

MIXUP, CUTMIX = DataConfig(mixup=0.3), DataConfig(cutmix=1.0)


def batch(count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.rand(count, 3, 20, 30, generator=generator), torch.arange(count) % 4)


@pytest.mark.parametrize("key", range(8))
def test_mixup_matches_torchvision_with_the_same_lambda(key: int) -> None:
    mixed = mixup.mix(MIXUP, batch(), key, 4)
    share = float(mixed.labels[1, 1])
    transform = v2.MixUp(alpha=1.0, num_classes=4)
    transform.make_params = lambda _: {"lam": share}  # type: ignore[method-assign]
    images, labels = transform(batch().images, batch().labels)
    torch.testing.assert_close(mixed.images, images)
    torch.testing.assert_close(mixed.labels, labels)


@pytest.mark.parametrize("key", range(8))
def test_cutmix_matches_torchvision_with_the_same_rectangle(key: int) -> None:
    mixed = mixup.mix(CUTMIX, batch(), key, 4)
    changed = (mixed.images != batch().images).any(1).any(0)
    rows, columns = (torch.nonzero(changed.any(side)).flatten() for side in (1, 0))
    rectangle = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1) if len(rows) else (0, 0, 0, 0)
    share = 1 - (rectangle[2] - rectangle[0]) * (rectangle[3] - rectangle[1]) / 600
    transform = v2.CutMix(alpha=1.0, num_classes=4)
    transform.make_params = lambda _: {"box": rectangle, "lam_adjusted": share}  # type: ignore[method-assign]
    images, labels = transform(batch().images, batch().labels)
    assert torch.equal(mixed.images, images)
    torch.testing.assert_close(mixed.labels, labels)


def test_lambdas_and_areas_follow_the_papers_distributions() -> None:
    """The weights follow Beta(0.3, 0.3) for mixup. The area for CutMix is 1 - Beta(1, 1), minus the
    part beyond the border.
    """
    shares = np.array([float(mixup.mix(MIXUP, batch(2), key, 4).labels[0, 0]) for key in range(2000)])
    expected = np.random.default_rng(0).beta(0.3, 0.3, 20000)
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert abs(np.quantile(shares, quantile) - np.quantile(expected, quantile)) < 0.05
    areas = 1 - np.array([float(mixup.mix(CUTMIX, batch(2), key, 4).labels[0, 0]) for key in range(2000)])
    reference = [
        1 - v2.CutMix(alpha=1.0, num_classes=4).make_params([batch().images])["lam_adjusted"] for _ in range(2000)
    ]
    for quantile in (0.25, 0.5, 0.75, 0.9):
        assert abs(np.quantile(areas, quantile) - np.quantile(reference, quantile)) < 0.06


def test_with_mixup_and_cutmix_each_micro_batch_gets_one_of_them() -> None:
    both = DataConfig(mixup=0.3, cutmix=1.0)
    cut = 0
    for key in range(400):
        mixed = mixup.mix(both, batch(2), key, 4).images[0]
        cut += bool(((mixed == batch(2).images[0]) | (mixed == batch(2).images[1])).all())
    assert 150 < cut < 250


def test_mixing_depends_only_on_its_key_and_uses_no_other_generator() -> None:
    state = torch.get_rng_state()
    first, again, other = (mixup.mix(MIXUP, batch(), key, 4) for key in (5, 5, 6))
    assert torch.equal(first.images, again.images) and not torch.equal(first.images, other.images)
    assert torch.equal(torch.get_rng_state(), state)
    assert mixup.mix(DataConfig(), batch(), 0, 4).labels.dtype == torch.int64, (
        "nothing is mixed unless it is configured"
    )


@pytest.mark.parametrize("settings", [MIXUP, CUTMIX])
def test_an_unreadable_image_is_not_mixed_into_others(settings: DataConfig) -> None:
    whole = batch()
    labels = whole.labels.clone()
    labels[2] = UNREADABLE
    mixed = mixup.mix(settings, Batch(whole.images, labels, 1), 3, 4)
    reference = mixup.mix(settings, whole, 3, 4)
    for place in (2, 3):  # sample 3 is mixed with sample 2
        assert torch.equal(mixed.images[place], whole.images[place])
    assert mixed.labels[2].sum() == 0 and mixed.labels[3].tolist() == [0, 0, 0, 1]
    for place in (0, 1, 4, 5):
        assert torch.equal(mixed.images[place], reference.images[place]) and torch.equal(
            mixed.labels[place], reference.labels[place]
        )


def test_training_with_mixing_is_the_same_on_1_2_and_3_ranks(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    for world in (1, 2, 3):
        good(world, [*mixed_arguments(tmp_path), f"checkpoint.dir={tmp_path / str(world)}"])
    one = final_losses(tmp_path / "1" / "run")
    for world in (2, 3):
        np.testing.assert_allclose(final_losses(tmp_path / str(world) / "run"), one, rtol=1e-4)


def mixed_arguments(folder: Path) -> list[str]:
    return [
        "data.name=cifar10", f"data.dir={folder}", "data.batch=12", "data.micro_batches=3",
        "data.mixup=0.4", "data.cutmix=1",
        "data.randaugment_ops=2", "model.width=4", "train.epochs=2", "train.log_every=1", "optim.lr=0.05",
    ]  # fmt: skip


def partner_by_rank(rank: int) -> None:
    """Deliberate defect: each rank mixes different samples."""
    mix = mixup.mix
    mixup.mix = lambda settings, taken, key, classes: mix(settings, taken, key + rank, classes)


def dealt_by_rank(rank: int) -> None:
    """Deliberate defect: the ranks' parts are mixed as if they were micro-batches."""
    deal = Dealing.deal
    Dealing.deal = lambda self, samples, state: deal(Dealing(self.rank, self.world, self.world), samples, state)  # type: ignore[method-assign]


@pytest.mark.parametrize("defect", [partner_by_rank, dealt_by_rank])
def test_the_comparison_detects_deliberate_defects(defect: Callable[[int], None], tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    good(1, [*mixed_arguments(tmp_path), f"checkpoint.dir={tmp_path / 'one'}"])
    good(2, [*mixed_arguments(tmp_path), f"checkpoint.dir={tmp_path / 'two'}"], prepare=defect)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(
            final_losses(tmp_path / "two" / "run"), final_losses(tmp_path / "one" / "run"), rtol=1e-4
        )


def test_randaugment_matches_torchvision_and_depends_on_seed_epoch_and_sample() -> None:
    image = (torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0)) * 255).byte()
    augment = RandAugment.of(DataConfig(randaugment_ops=2, randaugment_magnitude=15))
    assert augment is not None
    state = torch.get_rng_state()
    shown = [augment(image, 1, 2, number) for number in range(40)]
    assert torch.equal(torch.get_rng_state(), state), "the generator that dropout uses is not touched"
    assert torch.equal(augment(image, 1, 2, 7), shown[7])
    assert not all(torch.equal(augment(image, 1, 3, number), shown[number]) for number in range(40))
    operations: list[str] = []
    original = v2.RandAugment._apply_image_or_video_transform

    def reported(
        self: v2.RandAugment, image: torch.Tensor, identifier: str, *rest: object, **more: object
    ) -> torch.Tensor:
        operations.append(identifier)
        return original(self, image, identifier, *rest, **more)  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2.RandAugment, "_apply_image_or_video_transform", reported)
        for number in range(200):
            augment(image, 0, 0, number)
    assert len(operations) == 400 and set(operations) == set(v2.RandAugment._AUGMENTATION_SPACE)


@pytest.mark.parametrize("workers", [0, 2])
def test_randaugment_of_a_folder_does_not_depend_on_workers_or_other_samples(workers: int, tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    arguments = [
        "data.name=imagefolder",
        f"data.dir={tmp_path}",
        "data.image_size=16",
        "data.randaugment_ops=2",
        f"data.workers={workers}",
    ]
    data = open_data(config.load(None, arguments).data)
    (whole,) = data.train_batches([list(range(12))], 4)
    (some,) = data.train_batches([[7, 2]], 4)
    assert torch.equal(some.images, whole.images[[7, 2]])
    (plain,) = open_data(config.load(None, [*arguments, "data.randaugment_ops=0"]).data).train_batches(
        [list(range(12))], 4
    )
    assert not torch.equal(plain.images, whole.images)
    (test,) = data.test_batches([[7, 2]])
    (plain_test,) = open_data(config.load(None, [*arguments, "data.augment=false"]).data).test_batches([[7, 2]])
    assert torch.equal(test.images, plain_test.images), "test images are never augmented"


def test_invalid_settings_of_mixing_are_refused() -> None:
    for arguments, message in (
        (["data.mixup=-1"], r"data.mixup=-1.0: must be a finite number of at least 0, for example 0.2"),
        (["data.cutmix=.inf"], r"data.cutmix=inf: must be a finite"),
        (["data.randaugment_ops=2"], r"RandAugment needs colour images, but digits are grey"),
        (["data.name=synthetic", "data.randaugment_ops=2"], r"RandAugment needs uint8 images"),
        (
            ["data.name=synthetic", "data.trivialaugment=true"],
            r"data.trivialaugment: TrivialAugment needs uint8 images",
        ),
        (
            ["data.name=no.module:no", "data.trivialaugment=true"],
            r"data.trivialaugment has no effect .* augments its own samples",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            open_data(config.load(None, arguments).data)
    with pytest.raises(ConfigError, match=r"data.randaugment_magnitude=31: must be from 0 to 30"):
        RandAugment.of(DataConfig(randaugment_ops=1, randaugment_magnitude=31))
