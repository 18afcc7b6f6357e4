"""model.drop_path is torchvision's stochastic depth in each residual block, and is the same on any
number of ranks.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.data import sampler
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model import models, shared_parts
from ddpjob_trainer.model.models import build_model, is_tied_to_micro_batches
from ranks import good
from torch import nn
from torchvision.ops import StochasticDepth, stochastic_depth

IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TOLERANCE = 1e-4
"""Covers float32 sums in a different order over the four steps of RUN."""


def resnet(drop_path: float = 0.5, name: str = "resnet18_cifar") -> nn.Module:
    return build_model(ModelConfig(name=name, drop_path=drop_path), (3, 16, 16), 10, 3)


def paths(model: nn.Module) -> list[StochasticDepth]:
    return [module for module in model.modules() if isinstance(module, StochasticDepth)]


@pytest.mark.parametrize("name", ["resnet18_cifar", "torchvision:resnet18", "torchvision:resnet50"])
def test_drop_rates_rise_evenly_to_the_last_block_and_weights_keep_their_names(name: str) -> None:
    model = resnet(0.5, name)
    rates = [path.p for path in paths(model)]
    assert len(rates) == (16 if name.endswith("50") else 8) and rates[0] == 0 and rates[-1] == 0.5
    assert rates == pytest.approx([0.5 * number / (len(rates) - 1) for number in range(len(rates))])
    assert all(path.mode == "row" for path in paths(model))
    assert model.state_dict().keys() == resnet(0.0, name).state_dict().keys()
    assert is_tied_to_micro_batches(model) and shared_parts.can_be_shared(model)


def test_the_branch_of_each_block_goes_through_torchvisions_function() -> None:
    """The reference computes the blocks one by one with the same random numbers. It drops or scales
    each sample's branch as a whole.
    """
    model, plain = resnet(0.7).train(), resnet(0.0).train()
    torch.manual_seed(5)
    found = model(IMAGES)
    torch.manual_seed(5)
    values = plain.stem(IMAGES)
    for number, block in enumerate(plain.blocks):
        branch = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(values)))))
        branch = stochastic_depth(branch, 0.7 * number / 7, "row", training=True)
        values = torch.relu(branch + block.shortcut(values))
    assert torch.equal(found, plain.head(values.mean((2, 3))))
    assert not torch.equal(found, resnet(0.0).train()(IMAGES))


def test_evaluation_drops_no_branch_and_a_copied_model_has_its_own_mode() -> None:
    model, plain = resnet(0.7).eval(), resnet(0.0).eval()
    assert torch.equal(model(IMAGES), plain(IMAGES))
    trained = copy.deepcopy(model).train()
    torch.manual_seed(5)
    first = trained(IMAGES)
    assert not torch.equal(first, trained(IMAGES)) and torch.equal(model(IMAGES), plain(IMAGES))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop_path": 0.1}, r"model.drop_path: small_cnn has no ResNet residual blocks"),
        ({"name": "resnet18_cifar", "drop_path": 1.0}, r"model.drop_path=1.0: must be a probability below 1"),
        ({"name": "resnet18_cifar", "drop_path": -0.1}, r"model.drop_path=-0.1: must be a probability"),
        ({"name": "resnet18_cifar", "drop_path": 0.1, "sync_batchnorm": True}, r"leave out model.drop_path"),
    ],
)
def test_models_without_residual_blocks_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(**settings), (3, 32, 32), 10, 0)


@pytest.mark.parametrize("strategy", ["pipeline", "ddp_mp"])
def test_strategies_that_split_the_model_refuse_drop_path(strategy: str) -> None:
    arguments = ["model.name=resnet18_cifar", "model.drop_path=0.1"]
    with pytest.raises(ConfigError, match=rf"model.drop_path: strategy={strategy} splits the model"):
        config.load(None, [*arguments, f"strategy={strategy}"])
    assert config.load(None, [*arguments, "strategy=fsdp"]).model.drop_path == 0.1


RUN = [
    # Only two steps, because rounding differences between CPU models grow tenfold with each step.
    *("data.name=synthetic", "data.shape=1,8,8", "data.size=48", "data.batch=24", "data.micro_batches=4"),
    *("model.name=resnet18_cifar", "model.drop_path=0.5", "train.epochs=1", "train.log_every=1", "optim.lr=0.001"),
    *("optim.momentum=0", "checkpoint.every_seconds=0", "eval.pictures=false", "train.threads=1", "data.stretch=1.5"),
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(max(folder.glob("step-*.pt")), weights_only=True)["model"]
    return found


def distance(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].is_floating_point())


def drawn_by_rank(rank: int) -> None:
    """Deliberate defect: each rank draws only for its own samples."""
    forward = shared_parts.SharedParts._mask

    def own(self: Any, module: nn.Module, inner: Any, values: torch.Tensor) -> torch.Tensor:
        return inner(values) if isinstance(module, StochasticDepth) else forward(self, module, inner, values)

    shared_parts.SharedParts._mask = own  # type: ignore[method-assign]


@pytest.mark.slow
def test_stochastic_depth_is_identical_on_1_2_and_3_ranks(tmp_path: Path) -> None:
    """Each of 2 ranks takes whole micro-batches; 3 ranks share the four."""
    assert [sampler.Dealing(0, world, 4, dividing=sampler.Dividing.EXACT).passes(24) > 0 for world in (2, 3)] == [
        False,
        True,
    ]
    folders = {name: tmp_path / name for name in ("1", "2", "3", "without", "defect")}
    for world in (1, 2, 3):
        good(world, [*RUN, f"checkpoint.dir={folders[str(world)]}"])
    good(1, [*RUN, "model.drop_path=0", f"checkpoint.dir={folders['without']}"])
    good(3, [*RUN, f"checkpoint.dir={folders['defect']}"], prepare=drawn_by_rank)
    assert distance(folders["1"], folders["2"]) < TOLERANCE
    assert distance(folders["1"], folders["3"]) < TOLERANCE
    assert distance(folders["1"], folders["without"]) > 10 * TOLERANCE
    assert distance(folders["1"], folders["defect"]) > 10 * TOLERANCE


def test_the_shipped_recipe_uses_stochastic_depth(tmp_path: Path) -> None:
    assert config.load("imagenet-lamb", [f"data.dir={tmp_path}"]).model.drop_path == 0.05
    assert models._LAST_NORMALIZATION.keys() >= {"Bottleneck", "BasicBlock"}
