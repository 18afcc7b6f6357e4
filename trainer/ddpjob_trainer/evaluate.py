"""Evaluation that is exact on any number of ranks: each test sample is counted once, by one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddpjob_trainer.data import DataSet
from ddpjob_trainer.data.source import UNREADABLE
from ddpjob_trainer.group import Group
from ddpjob_trainer.metrics.tally import EvalConfig, Evaluation, Tally
from ddpjob_trainer.sampler import share
from ddpjob_trainer.signals import StopRequest
from ddpjob_trainer.strategies.base import Place

__all__ = ["EvalConfig", "Evaluation", "evaluate"]


@torch.no_grad()
def evaluate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    place: Place,
    data: DataSet,
    batch: int,
    device: torch.device,
    group: Group,
    stop: StopRequest,
    *,
    config: EvalConfig | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """The same result on every rank and for every number of ranks (up to the order of float64 sums); None when SIGTERM came.

    `logits` gives the scores (n, classes) of images (n, channels, height, width) on `device`, in evaluation mode. Test samples are dealt
    out by `place`; the scores of a rank that does not count are not looked at. `alive` is called each round.

    Every rank does the same number of rounds and has images in each, because a forward pass may be a collective: a rank whose samples are
    used up computes on the test set's first, and does not count it.
    """
    mine = share(list(range(data.test_size)), place.part, place.parts)
    rounds = -(-data.test_size // (batch * place.parts))
    parts = [mine[start * batch : (start + 1) * batch] for start in range(rounds)]
    tally = Tally(data.classes, config or EvalConfig())
    counted = unreadable = 0
    for part, loaded in zip(parts, data.test_batches([part or [0] for part in parts]), strict=True):
        alive()
        agreement = stop.agreement(save_due=False)
        samples = loaded.to(device)
        scores = logits(samples.images)
        if part and place.counts:
            readable = samples.labels != UNREADABLE
            tally.add(scores[readable], samples.labels[readable])
            count = int(readable.sum())
            counted, unreadable = counted + count, unreadable + len(part) - count
        if agreement.wait()[0]:
            return None
    result = tally.reduce(group, counted, unreadable)
    if result.samples + result.unreadable != data.test_size:
        raise AssertionError(f"evaluation counted {result.samples} + {result.unreadable} of {data.test_size} test samples")
    return result
