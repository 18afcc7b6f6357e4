"""Training images grow with the epoch (data.early_sizes): the sizes are the same on any number of
ranks and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import count_workers, write_image_folder
from ddpjob_trainer import config, run_plan, train
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import needs_two_samples
from ranks import TINY, final_losses, good, run, stop_at

SIZES = ["data.image_size=24", "data.early_sizes=12:1,16:2"]
TRAINED = [*TINY, *SIZES, "data.name=imagefolder", "data.workers=0", "data.batch=8", "data.micro_batches=2"]
TRAINED += ["train.epochs=3", "model.norm=batch", "ddp.ordered=true"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_image_folder(root, 10)
    return root


def opened(folder: Path, *keys: str) -> DataSet:
    return open_data(config.load(None, ["data.name=imagefolder", f"data.dir={folder}", "data.workers=0", *keys]).data)


@pytest.mark.parametrize("more", [[], ["data.augment=false"], ["data.workers=1"]])
def test_the_size_depends_on_the_epoch_alone(folder: Path, more: list[str]) -> None:
    data = opened(folder, *SIZES, *more)
    assert data.shape == (3, 24, 24)
    for epoch, batch in zip(
        (1, 3, 0, 2), data.train_stream((epoch, [0, 5, 13]) for epoch in (1, 3, 0, 2)), strict=True
    ):
        side = (12, 16, 24, 24)[epoch]
        assert data.shape_in(epoch) == (3, side, side)
        (fixed,) = opened(folder, *more, f"data.image_size={side}", "data.workers=0").train_batches([[0, 5, 13]], epoch)
        assert torch.equal(batch.images, fixed.images), "the same crops, flips and pixels as with one size"
    assert next(iter(data.test_batches([[0]]))).images.shape == (1, 3, 24, 24)


def test_workers_of_a_folder_end_when_its_data_is_dropped(folder: Path) -> None:
    assert count_workers(lambda: opened(folder, *SIZES, "data.workers=1")) == (1, 0)


def recorded(path: Path) -> Callable[[int], None]:
    """Return a hook that writes the FLOPs per sample of each report."""

    def prepare(_: int) -> None:
        machines = train.Machines

        def record(*figures: Any) -> Any:
            with path.open("a") as file:
                print(figures[5], file=file)
            return machines(*figures)

        train.Machines = record  # type: ignore[assignment,misc]

    return prepare


def test_growing_images_train_the_same_on_any_number_of_ranks_and_after_restarts(folder: Path, tmp_path: Path) -> None:
    """An epoch has three steps. Training is stopped within the first and the second epoch, while
    the next epoch's images may already be read. The losses are the same to the bit. A pipeline gets
    each size too.
    """
    keys = [*TRAINED, f"data.dir={folder}", "report.peak_flops=1e12"]
    good(1, [*keys, f"checkpoint.dir={tmp_path / 'whole'}"], prepare=recorded(tmp_path / "flops"))
    broken = [*keys, f"checkpoint.dir={tmp_path / 'broken'}"]
    for world, step in ((2, 2), (1, 5)):
        assert [end.code for end in run(world, broken, prepare=stop_at(step))] == [75] * world
    good(2, broken)
    assert final_losses(tmp_path / "broken" / "run") == final_losses(tmp_path / "whole" / "run")
    plain = [key for key in keys if not key.startswith("ddp.ordered")]
    good(2, [*plain, "strategy=pipeline", f"checkpoint.dir={tmp_path / 'pipeline'}"])
    assert final_losses(tmp_path / "pipeline" / "run") == pytest.approx(
        final_losses(tmp_path / "whole" / "run"), rel=1e-4
    )
    work = [float(line) for line in (tmp_path / "flops").read_text().split()]
    assert work[-1] > 0 and [each / work[-1] for each in work] == pytest.approx([1 / 4] * 3 + [4 / 9] * 3 + [1] * 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["data.early_sizes=12"], r"data.early_sizes=12: each size must be SIDE:EPOCHS; write, for example, 128:6"),
        (["data.early_sizes=12:2,16:2"], "sides and epochs must increase"),
        (["data.early_sizes=16:1,12:2"], "sides and epochs must increase"),
        (["data.early_sizes=24:1"], "all sides must be below data.image_size=24"),
        (["data.early_sizes=0:1"], "sides and epochs must increase"),
        (["data.early_sizes=8:1,9:2,10:3,11:4"], "must have at most 3 sizes"),
        (["data.early_sizes=8:1", "data.name=digits"], "data.early_sizes has no effect with data.name=digits"),
    ],
)
def test_wrong_sizes_are_refused(folder: Path, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder, "data.image_size=24", *keys)


def test_sizes_in_a_file_need_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("data: {early_sizes: [128:6, 160:12]}\n")
    assert config.load(str(tmp_path / "own.yaml"), []).data.early_sizes == ("128:6", "160:12")


def test_a_model_of_one_size_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    keys = ["model.name=torchvision:vit_b_16", "data.image_size=224", "data.early_sizes=160:1", "strategy=single"]
    with pytest.raises(ConfigError, match=r"cannot take images of 160 x 160 .*set data.early_sizes to \[\]"):
        settings = config.load(
            None, [*keys, "data.name=imagefolder", f"data.dir={folder}", f"checkpoint.dir={tmp_path}"]
        )
        run_plan.check_fit(settings, open_data(settings.data), train.open_strategy(settings, train.Group(), CPU))


def test_small_early_images_may_need_two_samples_per_micro_batch() -> None:
    model = config.load(None, ["model.name=torchvision:resnet18"]).model
    assert not needs_two_samples(model, (3, 64, 64), 4)
    assert needs_two_samples(model, (3, 64, 64), 4, (3, 32, 32))
