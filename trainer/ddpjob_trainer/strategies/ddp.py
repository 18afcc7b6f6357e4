"""strategy=ddp: one process per device, gradients averaged by DistributedDataParallel while they are computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.batch_statistics import BatchStatistics, ordered_parts
from ddpjob_trainer.data import Batch
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.precision import AmpLevel
from ddpjob_trainer.sampler import Micro
from ddpjob_trainer.strategies import comm_hooks
from ddpjob_trainer.strategies.base import Strategy, flat_gradients, set_gradients
from ddpjob_trainer.strategies.comm_hooks import CommHook

_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in signature(DistributedDataParallel).parameters else "broadcast_buffers"
"""As newer versions of torch call it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DdpConfig:
    """strategy=ddp."""

    ordered: bool = False
    """Add gradients up in the order of the micro-batches, whichever rank has them (needs data.micro_batches above 0): weights are then the
    same to the bit on any number of ranks. Costs an all-gather of data.micro_batches gradients instead of one all-reduce."""
    comm_hook: CommHook = CommHook.NONE
    """What ranks send: none, whole gradients; fp16, bf16, gradients of half the length; powersgd, products of two narrow matrices (Vogels
    et al. 2019; what these leave out is added to the next step's gradients). Results then depend on the number of ranks, by rounding or,
    with powersgd, more. powersgd's memory of what it left out is not in checkpoints: a restart begins without."""
    powersgd_rank: int = 1
    """powersgd: columns of the matrices. More are closer to the gradients and longer."""
    powersgd_start: int = 1000
    """powersgd: first step, after each start of the ranks, that is compressed."""


class Ddp(Strategy):
    """Each rank has the whole model. A group of one needs no wrapper."""

    def prepare(self, model: nn.Module) -> None:
        """As every strategy."""
        comm_hooks.check(self.config.ddp)
        if self.config.ddp.ordered and self.config.amp.level in (AmpLevel.O2, AmpLevel.O3):
            raise ConfigError("ddp.ordered: keeps float32 sums to the bit; set amp.level=O0 or O1, or ddp.ordered=false")
        super().prepare(model)
        self._ordered = self.config.ddp.ordered
        if self._ordered:
            self.statistics = BatchStatistics(self.model, self.group, ordered=True)
            if self.device.type == "cuda":  # Its faster kernels add up in any order.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.backends.cudnn.deterministic = True
                torch.use_deterministic_algorithms(True, warn_only=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Buffers are not broadcast at each step: batch statistics are exchanged exactly, by the trainer."""
        if self.group.world == 1 or self.config.ddp.ordered:
            return model
        options: dict[str, Any] = {_BUFFERS: False}
        network = DistributedDataParallel(model, device_ids=self.device_ids, gradient_as_bucket_view=True, **options)
        comm_hooks.register(network, self.config.ddp)
        return network

    @property
    def device_ids(self) -> list[torch.device] | None:
        """The device of the model; None where it is on several, or on the CPU."""
        return None if self.device.type == "cpu" else [self.device]

    def weight(self, count: int) -> float:
        """DDP averages over ranks."""
        return (1 if self.config.ddp.ordered else self.group.world) / count

    def without_exchange(self) -> AbstractContextManager[Any]:
        """DDP's no_sync."""
        if isinstance(self.network, DistributedDataParallel):
            return cast(AbstractContextManager[Any], self.network.no_sync())
        return super().without_exchange()

    def backward(self, micros: list[Micro], batches: Iterator[Batch], count: int) -> torch.Tensor:
        """As every strategy; in order, each micro-batch's gradients are kept apart until all ranks' are here."""
        if not self._ordered or self.group.world == 1:  # Autograd adds one micro-batch's gradients to those before it.
            return super().backward(micros, batches, count)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        own: list[tuple[int, torch.Tensor]] = []
        for micro in micros:
            total += self.backward_one(micro, next(batches), count)
            if micro.counts:
                own.append((micro.number, flat_gradients(self.model.parameters())))
            self.optimizer.zero_grad(set_to_none=True)
            self.model.zero_grad(set_to_none=True)
        self.statistics.exchange()
        weights = list(self.model.parameters())
        first, *others = ordered_parts(own, sum(weight.numel() for weight in weights), weights[0], self.group)
        summed = first.clone()
        for part in others:
            summed += part
        set_gradients(weights, summed)
        return total
