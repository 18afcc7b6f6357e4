"""A model that cannot process images of the configured size is refused with a one-line error that
names the setting.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ddpjob_trainer.commands import evaluate_checkpoint
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import build_model, check_image_size
from PIL import Image
from ranks import run

SYNTHETIC = ["data.name=synthetic", "data.shape=3,32,32", "data.classes=4", "data.size=32", "data.batch=16"]
SHORT = ["train.epochs=1", "eval.pictures=false", "train.timeout_seconds=60", "checkpoint.every_seconds=0"]


@pytest.fixture
def folder(tmp_path: Path) -> list[str]:
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40)).save(tmp_path / "images" / part / name / f"{number}.png")
    keys = ["data.name=imagefolder", f"data.dir={tmp_path / 'images'}", "data.batch=4", "data.workers=0"]
    return [*keys, *SHORT, f"checkpoint.dir={tmp_path / 'checkpoints'}"]


@pytest.mark.parametrize(
    ("name", "side", "reason"),
    [
        ("torchvision:alexnet", 32, "Output size is too small"),
        ("torchvision:vit_b_16", 32, "Expected 224 but got 32"),
        ("timm:vit_tiny_patch16_224", 32, "doesn't match model"),
    ],
)
def test_image_sizes_that_a_model_cannot_process_are_refused(name: str, side: int, reason: str) -> None:
    pytest.importorskip("timm") if name.startswith("timm") else None
    with pytest.raises(ConfigError, match=rf"model.name={name} cannot take images of 32 x 32 \(.*{reason}.*\); set K"):
        check_image_size(ModelConfig(name=name), (3, side, side), 4, "K")


@pytest.mark.parametrize("name", ["torchvision:regnet_y_400mf", "torchvision:alexnet", "small_cnn"])
def test_other_image_sizes_are_accepted(name: str) -> None:
    check_image_size(ModelConfig(name=name), (3, 64, 64), 4, "K")


def test_training_reports_an_unsuitable_image_size(folder: list[str], tmp_path: Path) -> None:
    (end,) = run(1, [*folder, "model.name=torchvision:alexnet", "data.image_size=32"])
    assert "ConfigError: model.name=torchvision:alexnet cannot take images of 32 x 32" in end.error, end
    assert "; set data.image_size to the size that the model expects" in end.error
    for end in run(2, [*SYNTHETIC, *SHORT, "model.name=torchvision:alexnet", f"checkpoint.dir={tmp_path / 'other'}"]):
        assert "cannot take images of 32 x 32" in end.error, end
        assert "; take another model, such as resnet18_cifar" in end.error


def test_the_size_of_test_images_is_checked_before_the_first_step(folder: list[str], tmp_path: Path) -> None:
    sizes = ["data.image_size=64", "data.test_image_size=32"]
    (end,) = run(1, [*folder, *sizes, "model.name=torchvision:alexnet"])
    assert "cannot take images of 32 x 32" in end.error and "; set data.test_image_size to" in end.error, end
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_the_evaluation_of_a_checkpoint_also_reports_an_unsuitable_image_size(
    folder: list[str], tmp_path: Path
) -> None:
    weights = tmp_path / "weights.pt"
    keys = [*folder, "model.name=torchvision:alexnet", "data.image_size=64", "data.test_image_size=32"]
    torch.save(build_model(ModelConfig(name="torchvision:alexnet"), (3, 64, 64), 2, 0).state_dict(), weights)
    with pytest.raises(ConfigError, match=r"cannot take images of 32 x 32 .*; set data.test_image_size to"):
        evaluate_checkpoint.main([str(weights), *keys])
