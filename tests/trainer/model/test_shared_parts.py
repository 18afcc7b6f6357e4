"""Ranks that share micro-batches compute the same as one rank for whole micro-batches: outputs,
gradients, statistics and random numbers.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from ddpjob_trainer.data.randomness import seed_torch
from ddpjob_trainer.data.sampler import Dealing, Dividing, Micro, SamplerState
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import TrainingError
from ddpjob_trainer.model.shared_parts import SharedParts, can_be_shared
from torch import nn

SAMPLES, MICROS = 26, 4
IMAGES = torch.randn(SAMPLES, 3, 6, 5, generator=torch.Generator().manual_seed(1)) * 2 + 3


class Meeting:
    """The exchange between ranks that are threads of one process. Each exchange waits for all
    ranks.
    """

    def __init__(self, world: int) -> None:
        self.sent: dict[int, Any] = {}
        self.barrier = threading.Barrier(world, timeout=60)
        self.messages = [0] * world

    def swap(self, rank: int, own: list[tuple[torch.Tensor, range]]) -> list[list[torch.Tensor]]:
        self.sent[rank] = own
        self.barrier.wait()
        found = []
        for values, holders in own:
            self.messages[rank] += len(holders) - 1
            found.append([values if other == rank else self._from(other, holders) for other in holders])
        self.barrier.wait()
        return found

    def _from(self, rank: int, holders: range) -> torch.Tensor:
        (values,) = (values for values, ranks in self.sent[rank] if ranks == holders)
        return values


class OneOf(Group):
    """A rank that runs as one of several threads."""

    def __init__(self, rank: int, world: int, meeting: Meeting) -> None:
        super().__init__(rank, world)
        object.__setattr__(self, "meeting", meeting)

    def swap(self, own: list[tuple[torch.Tensor, range]]) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = self.meeting.swap(self.rank, own)  # type: ignore[attr-defined]
        return found


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5, affine=False),
        nn.Flatten(), nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 2),
    ).double().float()  # fmt: skip


def dealt(world: int, stretch: float = 1.25, rank: int = 0) -> list[Micro]:
    dealing = Dealing(rank, world, MICROS, dividing=Dividing.EXACT, stretch=stretch)
    return dealing.deal(list(range(SAMPLES)), SamplerState())


def whole() -> dict[str, Any]:
    """Compute each micro-batch separately, with torch's own layers."""
    model, outputs, running = network(), [], []
    for micro in Dealing(0, 1, MICROS).deal(list(range(SAMPLES)), SamplerState()):
        own = network()
        own(IMAGES[micro.samples])
        running.append(
            [len(micro.samples) / SAMPLES * own[1].running_mean, len(micro.samples) / SAMPLES * own[1].running_var]
        )
        outputs.append(model(IMAGES[micro.samples]))
    result = torch.cat(outputs)
    result.square().sum().backward()
    return {
        "outputs": result.detach(),
        "gradients": [weight.grad for weight in model.parameters()],
        "running": [sum(column) for column in zip(*running, strict=True)],
    }


def shared(world: int, stretch: float = 1.25) -> dict[str, Any]:
    meeting = Meeting(world)
    models = [network() for _ in range(world)]

    def rank(number: int) -> tuple[Any, ...]:
        model = models[number]
        parts = SharedParts(model, OneOf(number, world, meeting))
        outputs, running, before = [], [], [model[1].running_mean.clone(), model[1].running_var.clone()]
        for micro in dealt(world, stretch, number):
            with parts.of_micro(micro):
                out = model(IMAGES[micro.samples])
            outputs.append((micro.samples[0], out.detach()))
            (out.square().sum()).backward()
            weight = len(micro.samples) / SAMPLES
            running.append([weight * model[1].running_mean, weight * model[1].running_var])
            for buffer, value in zip((model[1].running_mean, model[1].running_var), before, strict=True):
                buffer.copy_(value)
        return (
            outputs,
            [value.grad for value in model.parameters()],
            [sum(column) for column in zip(*running, strict=True)],
        )

    with ThreadPoolExecutor(world) as pool:
        ranks = list(pool.map(rank, range(world)))
    return {
        "outputs": torch.cat(
            [out for _, out in sorted((pair for own, _, _ in ranks for pair in own), key=lambda pair: pair[0])]
        ),
        "gradients": [sum(column) for column in zip(*(gradients for _, gradients, _ in ranks), strict=True)],
        "running": [sum(column) for column in zip(*(running for _, _, running in ranks), strict=True)],
        "messages": meeting.messages,
    }


@pytest.mark.parametrize(("world", "stretch"), [(3, 2.0), (3, 1.0), (5, 1.0), (7, 1.0), (13, 1.0)])
def test_outputs_gradients_and_statistics_match_whole_micro_batches(world: int, stretch: float) -> None:
    assert all(micro.parts for micro in dealt(world, stretch))
    expected, found = whole(), shared(world, stretch)
    for key in ("outputs", "gradients", "running"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=2e-5)


def test_ranks_exchange_messages_only_with_ranks_that_share_a_micro_batch() -> None:
    """In one pass of 4 micro-batches on 3 ranks, only neighbours exchange messages: for 2 layers of
    images and 1 of features, in both directions.
    """
    assert shared(3, 2.0)["messages"] == [6, 12, 6]


def test_a_part_draws_the_same_numbers_as_the_whole_micro_batch() -> None:
    """Two layers follow each other, so the second one continues where the first one ended for the
    same micro-batch.
    """
    layers = nn.Sequential(nn.Dropout(0.4), nn.Dropout2d(0.3), StochasticDepth())
    expected = []
    for micro in Dealing(0, 1, MICROS).deal(list(range(SAMPLES)), SamplerState()):
        seed_torch(micro.key, torch.device("cpu"))
        expected.append(layers(IMAGES[micro.samples]))
    for world in (3, 5):
        found = []
        for rank in range(world):
            model = nn.Sequential(nn.Dropout(0.4), nn.Dropout2d(0.3), StochasticDepth())
            parts = SharedParts(model, Group(rank, world))
            for micro in dealt(world, 1.0, rank):
                with parts.of_micro(micro):
                    found.append((micro.samples[0], model(IMAGES[micro.samples])))
        together = torch.cat([values for _, values in sorted(found, key=lambda pair: pair[0])])
        torch.testing.assert_close(together, torch.cat(expected), rtol=1e-6, atol=0)


class Windows(nn.Module):
    """An attention over windows: its layers receive (n * windows, ...)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(values.reshape(2 * len(values), -1)).reshape(values.shape)
        return out


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(45)])
def test_a_layer_without_samples_raises_an_error_that_names_the_remedy(layer: nn.Module) -> None:
    model = Windows(layer)
    (micro, *_) = dealt(3)
    with (
        SharedParts(model, Group(0, 3)).of_micro(micro),
        pytest.raises(TrainingError, match=r"gets 10 rows for 5 samples, .* set data.exact=false"),
    ):
        model(IMAGES[micro.samples])


def test_a_dropout_layer_with_rate_0_accepts_any_input() -> None:
    model = Windows(nn.Dropout(0.0))
    (micro, *_) = dealt(3)
    with SharedParts(model, Group(0, 3)).of_micro(micro):
        assert torch.equal(model(IMAGES[micro.samples]), IMAGES[micro.samples])


class StochasticDepth(nn.Module):
    """A copy of torchvision's StochasticDepth."""

    p = 0.2

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        kept = torch.empty(len(values), *[1] * (values.dim() - 1)).bernoulli_(1 - self.p).div_(1 - self.p)
        return values * kept


class NormAndActivation(nn.BatchNorm2d):
    """A copy of timm's BatchNormAct2d."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("layer", "possible"),
    [
        (nn.BatchNorm2d(3), True),
        (NormAndActivation(3), False),
        (nn.Dropout(0.1), True),
        (nn.Dropout3d(0.1), True),
        (StochasticDepth(), True),
        (nn.GroupNorm(1, 3), True),
        (nn.AlphaDropout(0.1), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), False),
        (nn.MultiheadAttention(4, 2), True),
    ],
)
def test_layers_that_can_process_parts_are_recognized(layer: nn.Module, possible: bool) -> None:
    assert can_be_shared(nn.Sequential(nn.Linear(2, 2), layer)) == possible


def test_evaluation_and_whole_micro_batches_go_through_torchs_own_layers() -> None:
    plain, model = network(), network()
    parts = SharedParts(model, Group(0, 3))
    with parts.of_micro(Micro(0, [0, 1, 2], 1)):
        assert torch.equal(model(IMAGES[:3]), plain(IMAGES[:3]))
    model.eval()
    with parts.of_micro(dealt(3)[0]):
        assert torch.equal(model(IMAGES[:3]), plain.eval()(IMAGES[:3]))
