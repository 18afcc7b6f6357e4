"""Pretrained weights come from a library (by name), a file or a folder. Only the last layer may
differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from ddpjob_trainer import config, train
from ddpjob_trainer.checkpoints.pretrained import load_pretrained
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.model.models import build_model
from ranks import TINY, good

SHAPE, CLASSES = (3, 32, 32), 5
NAME = "torchvision:mobilenet_v3_small"


def loaded(pretrained: str, name: str = NAME, **keys: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return (the model's initial state, the state to start from)."""
    settings = ModelConfig(name=name, pretrained=pretrained, **keys)
    first = build_model(settings, SHAPE, CLASSES, 0).state_dict()
    return first, load_pretrained(settings, 3, first, Group(), lambda: None)


def weights(change: Callable[[dict[str, torch.Tensor]], Any] = lambda state: None) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    state: dict[str, torch.Tensor] = torchvision.models.mobilenet_v3_small().state_dict()
    change(state)
    return state


@pytest.mark.parametrize("given", ["default", "IMAGENET1K_V1", "folder", "safetensors", "file"])
def test_all_layers_except_the_last_start_from_pretrained_weights(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchvision finds its files in the cache, so nothing is downloaded."""
    state, pretrained = weights(), str(tmp_path) if given == "folder" else given
    if given == "safetensors":
        pretrained = str(tmp_path / "model.safetensors")
        pytest.importorskip("safetensors.torch").save_file(state, pretrained)
    else:
        of_torchvision = torchvision.models.MobileNet_V3_Small_Weights.DEFAULT.url.rpartition("/")[2]
        folder = tmp_path if given in ("folder", "file") else tmp_path / "hub" / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / (of_torchvision if folder is not tmp_path else "pytorch_model.bin"))
        pretrained = str(tmp_path / "pytorch_model.bin") if given == "file" else pretrained
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    first, found = loaded(pretrained)
    assert found.keys() == first.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, first[name] if name.startswith("classifier.3.") else state[name]), name
    assert "classifier.3.weight, classifier.3.bias start untrained, because their shapes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("features.0.0.weight"),
            r"does not fit .*: features.0.0.weight .* is not in",
        ),
        (lambda state: state.update(more=torch.ones(1)), r"more \(1,\) is not in the model. Only the last layer"),
        (lambda state: state["features.0.0.weight"].fill_(torch.nan), r"1 of the \d+ tensors in .* contain NaN"),
    ],
)
def test_other_differences_are_refused_and_listed(change: Any, message: str, tmp_path: Path) -> None:
    torch.save(weights(change), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=message):
        loaded(str(tmp_path / "w.pth"))


@pytest.mark.parametrize(
    ("pretrained", "name", "message"),
    [
        ("IMAGENET1K_V9", NAME, r"torchvision:mobilenet_v3_small has no weights of that name; use default or IMAGENET"),
        ("default", "torchvision:googlenet", r"googlenet need a different normalization of pixels; set model"),
        (
            "weights.pth",
            "small_cnn",
            r"no such file or folder; only models of torchvision and timm",
        ),
    ],
)
def test_pretrained_weights_that_do_not_exist_are_refused(pretrained: str, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        loaded(pretrained, name)


def test_two_ranks_start_from_a_checkpoint_with_different_classes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A restart resumes from its own checkpoint, even if the pretrained weights are gone."""
    keys = [*TINY, "data.name=synthetic", "data.shape=1,8,8", "data.size=200", "train.epochs=1"]
    train.run(config.load(None, [*keys, "data.classes=3", f"checkpoint.dir={tmp_path / 'first'}"]))
    second = [*keys, "optim.lr=0", f"model.pretrained={tmp_path / 'first'}", f"checkpoint.dir={tmp_path / 'second'}"]
    good(2, second)
    assert "head.weight, head.bias start untrained" in capfd.readouterr().out
    one, other = (
        torch.load(max((tmp_path / name).glob("step-*.pt")), weights_only=True)["model"] for name in ("first", "second")
    )
    assert all(torch.equal(one[name], other[name]) for name in one if not name.startswith("head."))
    (tmp_path / "first").rename(tmp_path / "gone")
    good(1, [*second, "train.epochs=2"])
