"""A weight that two modules share, such as a language model's embedding and head, stays shared
across every resume.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ddpjob_trainer.commands import evaluate_checkpoint
from ranks import TINY, final_losses, good, metrics, run, stop_at

SOURCE = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Linear(64, classes, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(classes, classes), nn.ReLU()) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.middle = nn.Linear(classes, 64)
        self.middle.bias.requires_grad_(False)
        self.head = nn.Linear(64, classes)
        self.head.weight = self.first.weight

    def forward(self, images):
        values = self.first(images.flatten(1))
        for block in self.blocks:
            values = values + block(values)
        return self.head(self.middle(values))


def tied(shape, classes):
    return Tied(shape, classes)
"""
KEYS = [*TINY, "model.name=somebodys_tied:tied", "data.micro_batches=4", "optim.ema_decay=0.8"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "somebodys_tied.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("somebodys_tied", None)


def saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    content: dict[str, dict[str, torch.Tensor]] = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    return content


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_shards_of_a_tied_weight_can_be_saved_and_loaded(form: str, tmp_path: Path) -> None:
    alone, walk = tmp_path / "alone", tmp_path / "walk"
    good(1, [*KEYS, "strategy=single", f"checkpoint.dir={alone}"])
    for incarnation, world in enumerate((2, 3)):
        keys = [*KEYS, "strategy=fsdp", f"checkpoint.format={form}", f"checkpoint.dir={walk}"]
        ended = run(world, keys, prepare=stop_at(3 + 4 * incarnation))
        assert [end.code for end in ended] == [75] * world, ended
    good(2, [*KEYS, "strategy=fsdp", f"checkpoint.dir={walk}"])
    np.testing.assert_allclose(final_losses(walk / "run"), final_losses(alone / "run"), rtol=1e-4, atol=1e-4)
    for name, weight in saved(alone)["model"].items():
        torch.testing.assert_close(saved(walk)["model"][name], weight, rtol=1e-3, atol=1e-4)


def test_the_average_of_a_tied_weight_is_evaluated_instead_of_the_weight(tmp_path: Path) -> None:
    good(1, [*KEYS, "strategy=single", f"checkpoint.dir={tmp_path}"])
    evaluate_checkpoint.main([str(tmp_path), "eval.pictures=false", "-o", str(tmp_path / "eval")])
    in_training = metrics(tmp_path / "run", "eval")[-1]["loss"]
    (result,) = (tmp_path / "eval").glob("*.json")
    assert json.loads(result.read_text())["loss"] == pytest.approx(in_training, rel=1e-5)


def test_the_float32_copy_of_a_tied_weight_is_saved(tmp_path: Path) -> None:
    good(1, [*KEYS, "strategy=single", "amp.level=O2", "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    weights = saved(tmp_path)["model"]
    assert weights["head.weight"].dtype is torch.float32
    assert torch.equal(weights["head.weight"], weights["first.weight"])
