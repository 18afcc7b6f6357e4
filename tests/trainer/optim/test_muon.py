"""Muon's steps equal those of its author's code, and a run with Muon gives the same result on any
number of ranks.
"""

from __future__ import annotations

import jordan
import pytest
import torch
from ddpjob_trainer.config.sections import OptimConfig, OptimizerName
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.muon import orthogonalize
from ddpjob_trainer.optim.optimizers import build_optimizer
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from torch import nn

MUON = OptimConfig(name=OptimizerName.MUON, muon_momentum=0.9, weight_decay=0.1)


def matrices() -> list[nn.Parameter]:
    """Return a wide and a tall matrix, and convolutions in both memory layouts."""
    torch.manual_seed(0)
    shapes = ((4, 6), (9, 4), (8, 3, 3, 3), (12, 2, 2, 2))
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    weights[3].data = weights[3].data.contiguous(memory_format=torch.channels_last)
    return weights


def set_gradients(weights: list[nn.Parameter], step: int) -> None:
    for place, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + place))


@pytest.mark.parametrize(("short", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_muon_matches_its_authors_code(short: torch.dtype, tolerance: float) -> None:
    """In bfloat16, fused products round differently, by up to 1 % of an update."""
    ours, theirs = matrices(), matrices()
    optimizer = build_optimizer(MUON, [(str(number), weight) for number, weight in enumerate(ours)], None, short)
    reference = jordan.Muon(theirs, 0.0, 0.1, 0.9, short)
    for step in range(5):
        set_learning_rate(optimizer, 0.3 / (step + 1))
        set_learning_rate(reference, 0.3 / (step + 1))
        for weights in (ours, theirs):
            set_gradients(weights, step)
        optimizer.step()
        reference.step()
    for own, other, start in zip(ours, theirs, matrices(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=tolerance)
        assert (own - start).abs().max() > 0.2


def test_an_orthogonalized_matrix_keeps_directions_and_has_singular_values_near_one() -> None:
    left, right = (torch.linalg.qr(torch.randn(side, 6, dtype=torch.float64))[0] for side in (6, 9))
    values = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.2, 0.1], dtype=torch.float64)
    for matrix, u, v in (
        (left * values @ right.T, left, right),
        (right * values @ left.T, right, left),
    ):
        found = u.T @ orthogonalize(matrix, 5, torch.float64) @ v
        kept = found.diagonal()
        assert 0.65 < kept.min() <= kept.max() < 1.25
        assert (found - kept.diag()).abs().max() < 1e-9


def test_other_parameters_take_the_steps_of_torchs_sgd() -> None:
    config = OptimConfig(name=OptimizerName.MUON, momentum=0.8, weight_decay=0.1, muon_except=("head.*",))
    start = {"body": torch.randn(3, 3), "bias": torch.randn(4), "head.weight": torch.randn(2, 5)}
    start["block.layer_scale"] = torch.randn(4, 1, 1)
    ours = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = build_optimizer(config, ours.items())
    reference = torch.optim.SGD(theirs.values(), lr=0, momentum=0.8, nesterov=True, weight_decay=0.1)
    for step in range(4):
        for weights, each in ((ours, optimizer), (theirs, reference)):
            set_gradients(list(weights.values()), step)
            set_learning_rate(each, 0.1 * (step + 1))
            each.step()
    for name in ("bias", "head.weight", "block.layer_scale"):
        torch.testing.assert_close(ours[name], theirs[name])
    assert (ours["body"] - theirs["body"]).abs().max() > 0.1


def test_muon_needs_at_least_one_iteration() -> None:
    with pytest.raises(ConfigError, match=r"^optim.muon_steps=0: must be at least 1; 5 is usual$"):
        build_optimizer(OptimConfig(name=OptimizerName.MUON, muon_steps=0), [])
