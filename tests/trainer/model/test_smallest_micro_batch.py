"""A micro-batch of one sample, which batch normalization cannot process, is found before training,
not at the end of an epoch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.model.models import needs_two_samples
from ranks import run

RESNET = ["data.name=synthetic", "data.shape=3,32,32", "data.classes=4", "model.name=torchvision:resnet18"]
RESNET += ["train.epochs=1", "eval.pictures=false", "train.timeout_seconds=60", "checkpoint.every_seconds=0"]


@pytest.mark.parametrize(
    ("name", "side", "expected"),
    [
        ("torchvision:resnet18", 32, True),
        ("torchvision:resnet18", 64, False),
        ("torchvision:vit_b_16", 224, False),
        ("resnet18_cifar", 32, False),
        ("small_cnn", 8, False),
    ],
)
def test_models_that_need_at_least_two_samples_are_recognized(name: str, side: int, expected: bool) -> None:
    assert needs_two_samples(ModelConfig(name=name), (3, side, side), 4) is expected


@pytest.mark.parametrize(
    ("size", "batch", "world", "remedy"),
    [
        (33, 32, 1, "data.batch=31"),
        (19, 16, 2, "data.batch=15"),
        (3, 10**9, 2, "a smaller data.micro_batches"),  # Regression: the search took minutes.
    ],
)
def test_a_single_sample_is_refused_before_the_first_step(
    size: int, batch: int, world: int, remedy: str, tmp_path: Path
) -> None:
    """The last batch has one sample (33 = 32 + 1), or three (19 = 16 + 3), of which one of two
    ranks gets a single one.
    """
    keys = [*RESNET, f"data.size={size}", f"data.batch={batch}", f"checkpoint.dir={tmp_path}"]
    for end in run(world, keys):
        assert end.code == 1 and f"ConfigError: data.batch={batch}: the smallest step has " in end.error, end
        assert f"; set {remedy}, or" in end.error


def test_a_run_with_the_suggested_remedy_trains(tmp_path: Path) -> None:
    keys = [*RESNET, "data.size=33", "data.batch=31", f"checkpoint.dir={tmp_path}"]
    (end,) = run(1, keys)
    assert end.code == 0, end
