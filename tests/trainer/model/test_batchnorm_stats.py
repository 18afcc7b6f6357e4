"""Running statistics need only a few calls per step, regardless of the number of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddpjob_trainer.data.sampler import Micro
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.model.batchnorm_stats import BatchStatistics
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    """Counts ATen calls, and the tensors in their lists."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += max([1, *(len(value) for value in args if isinstance(value, list | tuple))])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [1, 53])
def test_updating_statistics_takes_as_many_calls_for_53_layers_as_for_one(layers: int) -> None:
    model = nn.Sequential(*(nn.BatchNorm2d(4) for _ in range(layers)))
    statistics = BatchStatistics(model, Group())
    with Count() as count:
        with statistics.of_micro(Micro(0, [0, 1], 1), 2):
            pass
        statistics.exchange()
    assert count.calls <= 14


def test_the_models_buffers_are_updated_in_place() -> None:
    """Other objects refer to these tensors, such as a moving average, or code that loads a state in
    place.
    """
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(5, momentum=None), nn.BatchNorm1d(2, affine=False))
    before = dict(model.named_buffers())
    values = {name: torch.rand(buffer.shape) if buffer.dim() else torch.tensor(7) for name, buffer in before.items()}
    model.load_state_dict({**model.state_dict(), **values})
    statistics = BatchStatistics(model, Group())
    for name, buffer in model.named_buffers():
        assert buffer is before[name] and torch.equal(buffer, values[name])
    with statistics.of_micro(Micro(0, [0, 1], 1), 2):
        model[0](torch.rand(2, 3, 4, 4))
    statistics.exchange()
    assert (
        model.state_dict()["0.running_mean"].tolist()
        == model[0].running_mean.tolist()
        != values["0.running_mean"].tolist()
    )
    assert [int(layer.num_batches_tracked) for layer in model] == [8, 8, 8]


def test_instance_normalization_uses_the_statistics_of_all_samples() -> None:
    """Regression: each rank kept the statistics of its own samples, so evaluations and checkpoints
    depended on the rank.
    """
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    whole, parts = (nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)) for _ in range(2))
    whole(images)
    statistics = BatchStatistics(parts, Group())
    for micro, part in enumerate(images.split([2, 4])):
        with statistics.of_micro(Micro(micro, list(range(len(part))), 1), 6):
            parts(part)
    statistics.exchange()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value)
