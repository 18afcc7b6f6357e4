"""Evaluation that is exact on any number of ranks: each test sample is counted once, by one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ddpjob_trainer.data import DataSet
from ddpjob_trainer.group import Group
from ddpjob_trainer.sampler import share
from ddpjob_trainer.signals import StopRequest


@dataclass(frozen=True)
class Evaluation:
    """Mean cross entropy and share of right first guesses over the whole test set."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, data: DataSet, batch: int, device: torch.device, group: Group, stop: StopRequest) -> Evaluation | None:
    """The same result on every rank and for every number of ranks (up to the order of float64 sums); None when SIGTERM came.

    Every rank does the same number of rounds, so that they can agree on a stop in each; a rank may have fewer samples than another.
    """
    mine = share(list(range(data.test_size)), group.rank, group.world)
    rounds = -(-data.test_size // (batch * group.world)) if data.test_size else 0
    each = max(1, batch)
    parts = [mine[start * each : (start + 1) * each] for start in range(rounds)]
    totals = torch.zeros(3, dtype=torch.float64)
    model.eval()
    try:
        for part in data.test_batches(parts):
            agreement = stop.agreement(save_due=False)
            images, labels = part.to(device).images, part.to(device).labels
            if len(labels):
                logits = model(images).float()
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
                right = (logits.argmax(1) == labels).sum()
                totals += torch.tensor([loss.item(), right.item(), len(labels)], dtype=torch.float64)
            if agreement.wait()[0]:
                return None
    finally:
        model.train()
    loss_sum, right_sum, count = group.sum(totals).tolist()
    if count != data.test_size:
        raise AssertionError(f"evaluation counted {count} of {data.test_size} test samples")
    return Evaluation(loss_sum / count, right_sum / count)
