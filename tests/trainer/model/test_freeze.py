"""Parameters that match model.freeze keep their values, on any number of ranks and across a
resume.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ddpjob_trainer import config, train
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import build_model
from ranks import TINY, final_losses, good, run, stop_at

FROZEN = [*TINY, "model.freeze=features.*", "optim.weight_decay=0.1"]


@pytest.mark.parametrize(
    "keys",
    [[], ["ddp.ordered=true", "data.micro_batches=2", "amp.level=O0"], ["amp.level=O2"]],
    ids=["", "ordered", "O2"],
)
def test_frozen_weights_keep_their_values_and_other_weights_train_as_usual(keys: list[str], tmp_path: Path) -> None:
    """Even weight decay must not change them."""
    good(1, [*FROZEN, *keys, f"checkpoint.dir={tmp_path / 'alone'}"])
    walk = [*FROZEN, *keys, f"checkpoint.dir={tmp_path / 'walk'}"]
    for world, stop in ((1, 3), (2, 9)):
        ended = run(world, walk, prepare=stop_at(stop))
        assert [end.code for end in ended] == [75] * world, ended
    good(1, walk)
    losses = [final_losses(tmp_path / folder / "run") for folder in ("alone", "walk")]
    # bfloat16 at O2 has a relative rounding error of 4e-3, and two ranks round their sums
    # differently than one.
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2 if "amp.level=O2" in keys else 1e-4)
    first = build_model(config.load(None, FROZEN).model, (1, 8, 8), 10, 0).state_dict()
    last = torch.load(tmp_path / "walk" / "step-000000016.pt", weights_only=True)
    for name, tensor in first.items():
        assert torch.equal(last["model"][name], tensor) is name.startswith("features."), name
    assert all(name.startswith("head.") for name in last["optimizer"]["state"])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_frozen_weights_may_change_at_a_resume(name: str, tmp_path: Path) -> None:
    """A user may train the head first. Regression: momenta for only some of the weights ended in a
    traceback.
    """
    keys = [*TINY, f"optim.name={name}", "optim.lr=0.01", "optim.ema_decay=0.5", f"checkpoint.dir={tmp_path}"]
    for world, more, stop in ((1, ["model.freeze=features.*"], 3), (2, [], 12), (1, ["model.freeze=features.*"], None)):
        ended = run(world, [*keys, *more], prepare=stop_at(stop) if stop else None)
        assert [end.code for end in ended] == [75 if stop else 0] * world, ended
    first = build_model(config.load(None, keys).model, (1, 8, 8), 10, 0).state_dict()
    middle, last = (torch.load(tmp_path / f"step-{step:09d}.pt", weights_only=True) for step in (12, 16))
    for weight, value in first.items():
        moved = [
            not torch.equal(*pair)
            for pair in ((value, middle["model"][weight]), (middle["model"][weight], last["model"][weight]))
        ]
        assert moved == [True, weight.startswith("head.")], weight
        torch.testing.assert_close(middle["average"]["averages"][weight], middle["model"][weight], rtol=1, atol=0.05)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("feature.*",), r"no parameter of small_cnn matches 'feature.\*'; use, for example, features\."),
        (("*",), r"no parameter is left to train"),
    ],
)
def test_invalid_patterns_of_frozen_parameters_are_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(freeze=patterns, width=4), (1, 8, 8), 10, 0)


def test_strategies_that_need_all_parameters_refuse_frozen_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.freeze: strategy=fsdp always trains all .* set strategy=ddp$"):
        train.run(config.load(None, [*FROZEN, "strategy=fsdp", f"checkpoint.dir={tmp_path}"]))
