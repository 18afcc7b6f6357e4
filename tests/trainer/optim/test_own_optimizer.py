"""A custom optimizer is refused if a restart would change its steps, even much later ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.own_optimizer import build_own


class Lookahead(torch.optim.SGD):
    """Keeps slow weights in its state, but the number of its steps in an attribute."""

    every, count = 5, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        for group in self.param_groups:
            for weight in group["params"]:
                slow = self.state[weight].setdefault("slow", weight.detach().clone())
                if self.count % self.every == 0:
                    weight.data.copy_(slow.lerp_(weight.detach(), 0.5))


class EverySeventh(Lookahead):
    """Its defect does not show if the state is loaded after a whole number of periods."""

    every = 7


class CountInGroup(torch.optim.SGD):
    """The weights differ only after step 40, but the settings differ from the beginning."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class Saved(torch.optim.SGD):
    """Keeps the number of its steps in its state, and settings of any kind in its groups."""

    def __init__(self, groups: Any, lr: float, weight_decay: float) -> None:
        super().__init__(groups, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.update(scale=torch.ones(2), sides=[torch.ones(2), 3], least=float("nan"))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["count"] = self.state[weight].get("count", 0) + 1
                if self.state[weight]["count"] % 5 == 0:
                    weight.data.mul_(0.5)


def build(name: str, lr: float = 0.1) -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(5))]
    return build_own(name, [{"params": weights}], lr, 0.0)


@pytest.mark.parametrize("lr", [0.1, 1e-9, 0.0])
@pytest.mark.parametrize(
    ("name", "step", "load"), [("Lookahead", 10, 7), ("EverySeventh", 21, 17), ("CountInGroup", 8, 7)]
)
def test_state_that_a_checkpoint_would_lose_is_detected_at_any_learning_rate(
    name: str, step: int, load: int, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    with pytest.raises(ConfigError, match=rf"mine:{name}: step {step} differs after a checkpoint of step {load} is"):
        build(f"mine:{name}", lr)


@pytest.mark.parametrize("name", ["mine:Saved", "torch.optim:RAdam", "torch.optim:ASGD", "torch.optim:Adafactor"])
def test_an_optimizer_that_keeps_all_state_in_its_state_dict_is_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    assert len(build(name).param_groups) == 1
