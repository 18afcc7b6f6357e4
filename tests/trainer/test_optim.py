"""The learning rate is a pure function of the step and equals torch's schedulers."""

from __future__ import annotations

import pytest
import torch
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim import OptimConfig, OptimizerName, ScheduleName, build_optimizer, learning_rate
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

STEPS, EPOCHS = 7, 12


def rates(config: OptimConfig) -> list[float]:
    return [learning_rate(config, step, STEPS, STEPS * EPOCHS) for step in range(STEPS * EPOCHS)]


def reference(make: type[LRScheduler], **arguments: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(optimizer, **arguments)
    values = []
    for _ in range(STEPS * EPOCHS):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_cosine_is_torchs() -> None:
    assert rates(OptimConfig(lr=0.4)) == pytest.approx(reference(CosineAnnealingLR, T_max=STEPS * EPOCHS))


def test_step_is_torchs() -> None:
    config = OptimConfig(lr=0.4, schedule=ScheduleName.STEP, milestones=(3.0, 8.0), gamma=0.2)
    assert rates(config) == pytest.approx(reference(MultiStepLR, milestones=[21, 56], gamma=0.2))


def test_warmup_rises_in_a_line_to_the_highest_rate() -> None:
    values = rates(OptimConfig(lr=0.4, warmup_epochs=2, schedule=ScheduleName.CONSTANT))
    assert values[:14] == pytest.approx([0.4 * (step + 1) / 14 for step in range(14)])
    assert values[14:] == [0.4] * (STEPS * EPOCHS - 14)


def test_cosine_after_warmup_begins_at_the_top_and_ends_near_zero() -> None:
    values = rates(OptimConfig(lr=0.4, warmup_epochs=1))
    assert max(values) == values[7] == 0.4 and 0 < values[-1] < 0.001


def test_optimizers_and_bad_values() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    assert isinstance(build_optimizer(OptimConfig(name=OptimizerName.ADAMW), weights), torch.optim.AdamW)
    assert build_optimizer(OptimConfig(nesterov=True), weights).defaults["nesterov"]
    with pytest.raises(ConfigError, match=r"optim.lr: -1"):
        build_optimizer(OptimConfig(lr=-1), weights)
    with pytest.raises(ConfigError, match=r"optim.nesterov: needs optim.momentum"):
        build_optimizer(OptimConfig(nesterov=True, momentum=0), weights)
