"""Evaluation that is exact on any number of ranks, because each test sample is counted on only one
rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddpjob_trainer.config.sections import EvalConfig
from ddpjob_trainer.data.dataset import UNREADABLE, DataSet
from ddpjob_trainer.data.sampler import DataShare, share
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.evaluation.accumulate import Accumulator, Adding, Evaluation
from ddpjob_trainer.lifecycle.signals import StopRequest

__all__ = ["EvalConfig", "Evaluation", "evaluate"]


@torch.no_grad()
def evaluate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    own: DataShare,
    data: DataSet,
    batch: int,
    group: Group,
    stop: StopRequest,
    *,
    config: EvalConfig | None = None,
    adding: Adding | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """Return the result on the test set, or None if SIGTERM arrived.

    The result is the same on every rank and for every number of ranks (up to the order of float64
    sums). `logits` returns the scores (n, classes) of images (n, channels, height, width) in
    evaluation mode. `own` is this rank's share of the test samples. If `own.counts` is false, this
    rank's scores are ignored. `adding` computes the result; by default, it handles classes
    according to `config`. `alive` is called in every round.

    Every rank runs the same number of rounds, and runs the model in each round, because a forward
    pass may be a collective. A rank that has used up its samples runs the model on the test set's
    first sample, and does not count the result.
    """
    mine = list(share(range(data.test_size), own.part, own.parts))
    rounds = -(-data.test_size // (batch * own.parts))
    parts = [mine[start * batch : (start + 1) * batch] for start in range(rounds)]
    accumulator = adding or Accumulator(data.classes, config)
    counted = unreadable = 0
    for part, samples in zip(parts, data.test_batches([part or [0] for part in parts]), strict=True):
        alive()
        agreement = stop.agreement(save_due=False)
        scores = logits(samples.images)
        if part and own.counts:
            count = len(part)
            if samples.labels.ndim == 1 and not samples.labels.is_floating_point():
                readable = samples.labels != UNREADABLE
                scores, labels, count = scores[readable], samples.labels[readable], int(readable.sum())
            else:
                labels = samples.labels
            accumulator.add(scores, labels)
            counted, unreadable = counted + count, unreadable + len(part) - count
        if agreement.wait()[0]:
            return None
    result = accumulator.reduce(group, counted, unreadable)
    if result.samples + result.unreadable != data.test_size:
        raise AssertionError(
            f"evaluation counted {result.samples} test samples and {result.unreadable} unreadable ones, but the "
            f"test set has {data.test_size}"
        )
    return result
