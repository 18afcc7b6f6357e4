"""Learning rates that decay from block to block equal timm's for its models, and follow BEiT's rule
for other models.

The tests cover parameter groups without weight decay, frozen layers, every strategy's parameter
names, and a changed value at a resume.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torchvision
from ddpjob_trainer import train
from ddpjob_trainer.checkpoints import torch_file
from ddpjob_trainer.config import config
from ddpjob_trainer.config.sections import ModelConfig, OptimConfig, OptimizerName
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.depths import depths, describe_shares
from ddpjob_trainer.model.models import SmallCnn, build_model
from ddpjob_trainer.optim.optimizers import build_optimizer
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from ranks import TINY, good
from torch import nn

DECAY = 0.6
CONFIG = OptimConfig(name=OptimizerName.ADAMW, lr=0.2, weight_decay=0.05, layer_decay=DECAY, decay_norm_and_bias=False)


def rates(model: nn.Module, optim: OptimConfig = CONFIG) -> dict[str, tuple[float, float]]:
    """Return (learning rate, weight decay) of each trained parameter."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    optimizer = build_optimizer(optim, trained, depths(model))
    set_learning_rate(optimizer, 0.2)
    names = {weight: name for name, weight in trained}
    return {
        names[weight]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for weight in group["params"]
    }


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("freeze", [(), ("*.0.*",)])
def test_a_timm_model_gets_the_parameter_groups_that_timm_would_give_it(name: str, freeze: tuple[str, ...]) -> None:
    param_groups_layer_decay = pytest.importorskip("timm.optim").param_groups_layer_decay
    model = build_model(ModelConfig(name=f"timm:{name}", freeze=freeze), (3, 224, 224), 5, 0)
    unlike = {"pos_embed", "cls_token", "relative_position_bias_table"}
    never = [n for n, _ in model.named_parameters() if n.rpartition(".")[2] in unlike]
    theirs = param_groups_layer_decay(model, 0.05, never, layer_decay=DECAY)
    by_weight = {
        weight: (0.2 * group["lr_scale"], group["weight_decay"]) for group in theirs for weight in group["params"]
    }
    named = dict(model.named_parameters())
    found = rates(model)
    assert set(found) == {n for n, weight in named.items() if weight.requires_grad}
    assert {n: pytest.approx(by_weight[named[n]]) for n in found} == found
    assert len({rate for rate, _ in found.values()}) > 4


def beit(name: str) -> int:
    """Return the layer as get_layer_id_for_vit of BEiT and MAE does, for torchvision's names and
    four blocks.
    """
    if name in ("class_token", "encoder.pos_embedding") or name.startswith("conv_proj"):
        return 0
    block = re.match(r"encoder\.layers\.encoder_layer_(\d+)\.", name)
    return int(block[1]) + 1 if block else 5


def test_torchvisions_transformer_has_the_depths_of_beit() -> None:
    model = torchvision.models.VisionTransformer(16, 8, 4, 2, 8, 16, num_classes=3)
    assert depths(model) == {name: beit(name) for name, _ in model.named_parameters()}
    for name, (rate, decay) in rates(model).items():
        assert rate == pytest.approx(0.2 * DECAY ** (5 - beit(name))), name
        plain = (
            name.rpartition(".")[2] in ("class_token", "pos_embedding") or dict(model.named_parameters())[name].ndim < 2
        )
        assert decay == (0.0 if plain else 0.05), name


def test_the_depths_of_a_resnet_follow_its_blocks() -> None:
    model = torchvision.models.resnet18(num_classes=3)

    def by_hand(name: str) -> int:
        block = re.match(r"layer(\d)\.(\d)\.", name)
        return 2 * (int(block[1]) - 1) + int(block[2]) + 1 if block else 9 if name.startswith("fc.") else 0

    assert depths(model) == {name: by_hand(name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    "name", ["convnext_tiny", "efficientnet_b0", "swin_t", "regnet_y_400mf", "vgg11", "densenet121"]
)
def test_the_depths_of_any_model_rise_without_gaps_from_input_to_head(name: str) -> None:
    model = torchvision.models.get_model(name, num_classes=3)
    found = depths(model)
    in_order = [found[key] for key, _ in model.named_parameters()]
    assert in_order == sorted(in_order) and set(in_order) == set(range(in_order[-1] + 1)) and in_order[-1] >= 7


def test_the_depths_of_a_model_without_blocks_follow_its_layers() -> None:
    model = SmallCnn((1, 8, 8), 10, ModelConfig(width=4))
    found = depths(model)
    assert found["features.0.weight"] == found["features.1.weight"] == 0
    assert found["features.3.weight"] == 1 and found["head.weight"] == found["head.bias"] == max(found.values()) == 3


def test_frozen_layers_do_not_change_the_rates_of_other_layers() -> None:
    model, other = (torchvision.models.resnet18(num_classes=3) for _ in range(2))
    for name, weight in other.named_parameters():
        weight.requires_grad_(not name.startswith(("layer4", "conv1")))
    whole, part = rates(model), rates(other)
    assert part == {name: value for name, value in whole.items() if not name.startswith(("layer4", "conv1"))}


def test_a_decay_of_1_gives_a_single_group_and_invalid_values_are_refused() -> None:
    model = SmallCnn((1, 8, 8), 10, ModelConfig(width=4))
    assert len(build_optimizer(OptimConfig(), model.named_parameters(), depths(model)).param_groups) == 1
    for wrong in (0.0, 1.2, float("nan")):
        with pytest.raises(ConfigError, match=r"optim.layer_decay=.*: must be above 0 and at most 1"):
            build_optimizer(OptimConfig(layer_decay=wrong), model.named_parameters())


class HeadFirst(nn.Module):
    """A model whose head comes first, which the rule cannot detect."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2) for _ in range(3))


def test_the_printed_rates_show_a_head_at_the_wrong_depth() -> None:
    model = torchvision.models.VisionTransformer(16, 8, 4, 2, 8, 16, num_classes=3)
    assert describe_shares(depths(model), 0.5) == (
        "optim.layer_decay=0.5: 6 groups, whose learning rates rise from 0.0312 times optim.lr"
        " (class_token, conv_proj.weight, ...) to optim.lr (encoder.ln.weight, encoder.ln.bias, ...)"
    )
    assert "from 0.125 times optim.lr (head.weight, head.bias) to optim.lr (blocks.2." in describe_shares(
        depths(HeadFirst()), 0.5
    )


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_and_last_rates_are_printed_only_once(
    world: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = [*TINY, "train.epochs=1", "optim.layer_decay=0.5", f"checkpoint.dir={tmp_path}"]
    good(world, keys)
    line = "optim.layer_decay=0.5: 4 groups, whose learning rates rise from 0.125 times optim.lr (features.0.weight"
    assert capfd.readouterr().out.count(line) == 1


def test_a_group_matcher_without_timm_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HeadFirst()
    model.group_matcher = lambda coarse: {}  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "timm.models._manipulate", None)
    with pytest.raises(
        ConfigError, match=r"optim\.layer_decay: the model's group_matcher needs timm.*pip install timm"
    ):
        depths(model)


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_a_changed_layer_decay_applies_after_a_resume(tmp_path: Path, form: str) -> None:
    """The first half of the training has no layer decay. After the resume, the new rates apply, and
    momentum is kept.
    """
    tiny = [
        "strategy=single", "data.batch=256", "model.width=4", "train.eval_every=9", "optim.lr=0.05", "train.epochs=2",
        f"checkpoint.dir={tmp_path / 'a'}", f"checkpoint.format={form}", "checkpoint.every_epochs=1",
    ]  # fmt: skip
    assert train.run(config.load(None, [*tiny, "train.epochs=1", "optim.schedule=constant"])) == 0
    assert train.run(config.load(None, [*tiny, "optim.layer_decay=0.5", "optim.schedule=constant"])) == 0
    other = [*tiny[:-3], f"checkpoint.dir={tmp_path / 'b'}", "optim.layer_decay=0.5", "optim.schedule=constant"]
    assert train.run(config.load(None, other)) == 0
    if form == "torch":
        saved = [max((tmp_path / run).glob("step-*.pt")) for run in "ab"]
        states = [torch_file.decode(path.read_bytes())["optimizer"] for path in saved]
        scales = [[group.get("lr_scale") for group in state["groups"]] for state in states]
        assert scales[0] == scales[1] == [0.125, 0.25, 0.5, 1.0]
        assert [group["lr"] for group in states[0]["groups"]] == [0.05 * scale for scale in scales[0]]
    # The old value applies again.
    assert train.run(config.load(None, [*tiny, "train.epochs=3", "optim.schedule=constant"])) == 0
