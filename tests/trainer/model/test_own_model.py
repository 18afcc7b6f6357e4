"""Any model can be given as the name of a function. Training is the same on any number of ranks and
across a stop and a resume.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ddpjob_trainer import train
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.distributed.dtensors import is_sharded
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import build_model, is_tied_to_micro_batches
from ddpjob_trainer.model.shared_parts import can_be_shared
from ranks import TINY, final_losses, good, metrics, run, stop_at
from torch import nn

SOURCE = '''
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """Batch normalization, and dropout that no module shows."""

    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.LazyLinear(classes)
        self(torch.zeros(2, *shape))

    def forward(self, images):
        return self.head(nn.functional.dropout(self.body(images), 0.2, self.training))


def net(shape, classes):
    return Net(shape, classes)


class Idle(Net):
    """Has a head that its forward pass does not use."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.old = nn.Linear(3, 3)


def idle(shape, classes):
    return Idle(shape, classes)


def stages(shape, classes):
    return nn.Sequential(Idle(shape, classes))


class Scaled(Net):
    """Scales by a factor that is trained."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images):
        return super().forward(images) * getattr(self, "scale", 1)


def scaled(shape, classes):
    return Scaled(shape, classes)


class Projected(Net):
    """Projects on directions from two unseeded numpy generators, the global one and its own."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        for name, draw in (("kept", np.random), ("mixed", np.random.default_rng())):
            self.register_buffer(name, torch.from_numpy(draw.random(classes) > 0.5), persistent=False)
        self.register_buffer("turned", torch.from_numpy(draw.random((classes, classes))).float().t())

    def forward(self, images):
        return super().forward(images) @ getattr(self, "turned", torch.eye(10))


def projected(shape, classes):
    return Projected(shape, classes)


def frozen(shape, classes):
    return nn.Linear(3, classes).requires_grad_(False)


def wide(shape, classes):
    return nn.Linear(3, classes).double()


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state):
        pass


def extra(shape, classes):
    return Extra(3, classes)


def detached(shape, classes):
    model = Net(shape, classes)
    model.register_forward_hook(lambda model, inputs, scores: scores.detach())
    return model


def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


class Alternating(Net):
    """One of two heads, in turn."""

    passes = 0

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.other = nn.Linear(self.head.in_features, classes)

    def forward(self, images):
        self.passes += 1
        return getattr(self, "other" if self.passes % 2 == 0 else "head")(self.body(images))


def alternating(shape, classes):
    return Alternating(shape, classes)


class Thinning(Net):
    """Leaves out a layer, first in its fourth forward pass."""

    passes = 0

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.other = nn.Linear(classes, classes)

    def forward(self, images):
        self.passes += self.training
        scores = super().forward(images)
        return scores if self.passes % 4 == 0 or not hasattr(self, "other") else self.other(scores)


def thinning(shape, classes):
    return Thinning(shape, classes)


def evaluating(shape, classes):
    return Net(shape, classes).eval()


def nothing(shape, classes):
    return "a model"


def of_1000_classes(shape, classes):
    return Net(shape, 1000)


def named(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), Wrapped())


class Wrapped(nn.Module):
    def forward(self, scores):
        return {"scores": scores}
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module that can be imported, and yield its name."""
    (tmp_path / "somebodys_models.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "somebodys_models"
    sys.modules.pop("somebodys_models", None)


def test_a_custom_model_trains_on_1_2_1_ranks_as_on_one_rank(own: str, tmp_path: Path) -> None:
    keys = [*TINY, f"model.name={own}:net", "data.micro_batches=4"]
    good(1, [*keys, f"checkpoint.dir={tmp_path / 'alone'}"])
    walk = [*keys, f"checkpoint.dir={tmp_path / 'walk'}"]
    for world, stop in ((1, 3), (2, 9)):
        ended = run(world, walk, prepare=stop_at(stop))
        assert [end.code for end in ended] == [75] * world, ended
    good(1, walk)
    losses = [final_losses(tmp_path / folder / "run") for folder in ("alone", "walk")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    assert len(losses[0]) == 16


def test_a_model_given_in_evaluation_mode_is_trained_in_training_mode(own: str, tmp_path: Path) -> None:
    """Functions that load pretrained weights often return models in this mode. Regression: whenever
    training started, statistics differed and dropout was off until the first evaluation.
    """
    for name in ("net", "evaluating"):
        good(1, [*TINY, f"model.name={own}:{name}", "train.epochs=1", f"checkpoint.dir={tmp_path / name}"])
    losses = [final_losses(tmp_path / name / "run") for name in ("net", "evaluating")]
    assert losses[0] == losses[1]


def test_a_weight_without_a_gradient_is_refused_before_the_first_update(own: str, tmp_path: Path) -> None:
    """DDP would not reduce any gradient of the same bucket, and would fail in the next step."""
    keys = [*TINY, f"model.name={own}:idle", "train.epochs=1", f"checkpoint.dir={tmp_path}"]
    for ended in run(2, keys):
        assert ended.error.startswith("ConfigError"), ended
        assert "old.weight, old.bias got no gradient" in ended.error
        assert "model.freeze=old.weight,old.bias" in ended.error
    assert not list(tmp_path.glob("step-*"))
    good(2, [*keys, "model.freeze=old.weight,old.bias"])


@pytest.mark.parametrize("key", ["ddp.ordered=true", "strategy=fsdp"])
def test_random_numbers_drawn_by_the_model_are_the_same_on_all_ranks(key: str, own: str, tmp_path: Path) -> None:
    """DDP broadcasts rank 0's weights. Regression: with other strategies, each rank silently
    trained a different model.
    """
    folder = tmp_path / "values"

    def note(rank: int) -> None:
        evaluate = train.Trainer._evaluate_if_due

        def and_save(self: train.Trainer) -> bool:
            model = self.strategy.model
            values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            whole = {name: value.detach() for name, value in values.items() if not is_sharded(value)}
            torch.save(whole, folder / f"{self.step}-{rank}.pt")
            return evaluate(self)

        train.Trainer._evaluate_if_due = and_save  # type: ignore[method-assign]

    folder.mkdir()
    keys = [*TINY, f"model.name={own}:projected", "data.micro_batches=2", "train.epochs=1", key]
    good(2, [*keys, f"checkpoint.dir={tmp_path}"], prepare=note)
    assert len(list(folder.iterdir())) == 4
    for step in (0, 8):
        one, other = (torch.load(folder / f"{step}-{rank}.pt", weights_only=True) for rank in range(2))
        assert {"kept", "mixed", "turned"} < one.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), step


def test_weights_used_by_only_some_forward_passes_are_refused_before_any_update(own: str, tmp_path: Path) -> None:
    """DDP reduces gradients in the last pass of a step. Regression: the first step used each rank's
    own gradients, and a checkpoint contained the result.
    """
    keys = [
        *TINY,
        f"model.name={own}:alternating",
        "data.micro_batches=4",
        "train.epochs=1",
        "checkpoint.every_steps=1",
    ]
    for ended in run(2, [*keys, f"checkpoint.dir={tmp_path / 'ddp'}"]):
        assert re.match(r"ConfigError: .*other.weight, .* in some forward passes but not in others", ended.error), ended
        assert ended.error.endswith("set strategy=ddp ddp.ordered=true")
    assert not list((tmp_path / "ddp").glob("step-*"))
    good(2, [*keys, "ddp.ordered=true", f"checkpoint.dir={tmp_path / 'ordered'}"])


def test_a_weight_that_a_later_step_leaves_out_is_refused_before_its_update(own: str, tmp_path: Path) -> None:
    """Models that drop layers at random do this. Regression: the next step failed with torch's
    traceback, and a checkpoint contained an update by one rank's gradients.
    """
    keys = [*TINY, f"model.name={own}:thinning", "data.micro_batches=2", "train.epochs=1", "checkpoint.every_steps=1"]
    for ended in run(2, [*keys, f"checkpoint.dir={tmp_path / 'ddp'}"]):
        assert re.match(r"ConfigError: .*other.weight, other.bias got no gradient in a step", ended.error), ended
        assert ended.error.endswith("set strategy=ddp ddp.ordered=true")
    assert not (tmp_path / "ddp" / "step-000000004.pt").exists()
    good(2, [*keys, "ddp.ordered=true", f"checkpoint.dir={tmp_path / 'ordered'}"])


def test_with_ddp_ordered_a_weight_without_a_gradient_keeps_its_values(own: str, tmp_path: Path) -> None:
    """Regression: weight decay was applied to it on several ranks, but not on one."""
    keys = [*TINY, f"model.name={own}:idle", "ddp.ordered=true", "data.micro_batches=4", "optim.weight_decay=0.1"]
    weights = []
    for world in (1, 2):
        good(world, [*keys, f"checkpoint.dir={tmp_path / str(world)}"])
        weights.append(torch.load(tmp_path / str(world) / "step-000000016.pt", weights_only=True)["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("strategy", ["pipeline", "parameter_server"])
def test_a_weight_without_a_gradient_keeps_its_values_if_gradients_are_one_vector(
    strategy: str, own: str, tmp_path: Path
) -> None:
    keys = [*TINY, f"model.name={own}:stages", "data.micro_batches=4", "optim.weight_decay=0.1", "pipeline.stages=1"]
    weights = []
    for world, name in ((1, "single"), (2, strategy)):
        good(world, [*keys, f"strategy={name}", f"checkpoint.dir={tmp_path / name}"])
        weights.append(torch.load(tmp_path / name / "step-000000016.pt", weights_only=True)["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in ("0.old.weight", "0.old.bias"))


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_a_parameter_without_dimensions_cannot_be_sharded(strategy: str, own: str, tmp_path: Path) -> None:
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    for ended in run(2, [*TINY, f"model.name={own}:scaled", f"strategy={strategy}", f"checkpoint.dir={tmp_path}"]):
        assert (
            ended.error.startswith("ConfigError") and "scale of the model has no dimensions; give it" in ended.error
        ), ended


def test_a_forward_pass_that_draws_random_numbers_gets_fixed_micro_batches(own: str) -> None:
    model = build_model(ModelConfig(name=f"{own}:net"), (1, 8, 8), 10, 3)
    assert is_tied_to_micro_batches(model)
    assert not can_be_shared(model), "each micro-batch is processed by a single rank"
    again = build_model(ModelConfig(name=f"{own}:net"), (1, 8, 8), 10, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    drawn = [build_model(ModelConfig(name=f"{own}:projected"), (1, 8, 8), 10, seed).kept for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobodys_models:net", r"No module named 'nobodys_models'; put the module's folder on PYTHONPATH"),
        ("torchvison:resnet18", r"No module named 'torchvison'; did you mean torchvision:resnet18\?"),
        ("somebodys_models:nett", r"has no function 'nett'; did you mean somebodys_models:net\?"),
        ("somebodys_models:nothing", r"returned str; return a torch.nn.Module from function\(shape, classes\)"),
        (
            "somebodys_models:lazy",
            r"1.weight belongs to a Lazy layer and has no shape .*; call the model once before",
        ),
        ("somebodys_models:frozen", r"has no parameter to train; set requires_grad"),
        ("somebodys_models:wide", r"weight is torch.float64, but .*; return model.float\(\)"),
        ("somebodys_models:extra", r"_extra_state in its state dict is not a tensor, so a run could not resume"),
        ("timm:resnet18", r"timm cannot be imported .*; run pip install timm"),
        ("smallcnn", r"use small_cnn, .* or package.module:function; did you mean 'small_cnn'\?"),
    ],
)
def test_mistakes_in_a_custom_model_are_reported(
    name: str, message: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(name=name), (1, 8, 8), 10, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_1000_classes", r"output has the shape \(200, 1000\) for 200 samples of 10 classes; use a model whose"),
        ("detached", r"the loss does not depend on the model's trained parameters; look in .* for detach\(\)"),
        ("named", r"the model returns dict; return a tensor of scores"),
    ],
)
def test_an_output_of_the_wrong_size_ends_the_first_step(name: str, message: str, own: str, tmp_path: Path) -> None:
    """Regression: this was found only in the first evaluation, after epochs of training on classes
    that do not exist.
    """
    (end,) = run(1, [*TINY, f"model.name={own}:{name}", "train.eval_every=2", f"checkpoint.dir={tmp_path}"])
    assert end.code == 1 and re.search(message, end.error), end
    assert not metrics(tmp_path / "run", "step")


def test_timms_models_are_built_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for timm records the call. It uses timm's own drop path."""

    class DropPath(nn.Module):
        drop_prob = 0.1

    def create_model(name: str, *, pretrained: bool, num_classes: int, in_chans: int) -> nn.Module:
        assert (name, pretrained) == ("net", False)
        return nn.Sequential(nn.Conv2d(in_chans, num_classes, 3), DropPath())

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    model = build_model(ModelConfig(name="timm:net"), (2, 8, 8), 5, 0)
    assert model.get_parameter("0.weight").shape == (5, 2, 3, 3) and is_tied_to_micro_batches(model)
