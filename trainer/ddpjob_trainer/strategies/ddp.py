"""strategy=ddp: one process per device, each with a full copy of the model.

DistributedDataParallel averages gradients while they are computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import AmpLevel
from ddpjob_trainer.data.dataset import MicroBatches
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.batchnorm_stats import BatchStatistics, ordered_parts
from ddpjob_trainer.optim.precision import Update
from ddpjob_trainer.private_torch import check_all_reduced
from ddpjob_trainer.strategies import comm_hooks
from ddpjob_trainer.strategies.strategy import Strategy, flat_gradients, set_gradients

_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""DDP's option that controls the broadcast of buffers. Its name depends on the version of torch."""


class Ddp(Strategy):
    """Keeps the whole model on each rank. A group of one rank does not need DDP's wrapper."""

    divides = compiles_step = True
    _forget: Callable[[], None] | None = None
    """Clears the state of the communication hook. None if the hook is stateless."""
    _checked = False
    """Whether the first step has verified that all weights get gradients."""

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        super().__init__(config, group, device)
        self._arrived: set[torch.Tensor] = set()

    @property
    def waits_apart(self) -> bool:
        """Whether the clock can distinguish a rank's own work from its waits for other ranks.

        If ranks exchange batch statistics in each layer, the clock must also be able to measure the
        waits for these exchanges.
        """
        return self.clock.sees_waits or not (self.config.model.sync_batchnorm or self.parts)

    def prepare(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Take the model and build its optimizer.

        Raises ConfigError if settings exclude each other.
        """
        comm_hooks.check(self.config.ddp)
        if self.config.ddp.ordered and self.config.amp.level in (AmpLevel.O2, AmpLevel.O3):
            raise ConfigError("ddp.ordered needs bit-exact float32 sums; set amp.level=O0 or O1, or ddp.ordered=false")
        super().prepare(model, shape)
        # Avoid the faster cuDNN and cuBLAS kernels, because they do not add up numbers in a fixed
        # order.
        if self.config.ddp.ordered and self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.deterministic = True
            torch.use_deterministic_algorithms(True, warn_only=True)

    def batch_statistics(self) -> BatchStatistics:
        """Return the model's batch statistics.

        With ddp.ordered, the statistics are added up in the order of the micro-batches, as
        gradients are.
        """
        return BatchStatistics(self.model, self.group, self.config.ddp.ordered)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP.

        DDP's broadcast of the model's buffers is disabled, because the trainer itself exchanges the
        exact batch statistics.
        """
        if self.group.world == 1 or self.config.ddp.ordered:
            return model
        options: dict[str, Any] = {_BUFFERS: False}
        network = DistributedDataParallel(model, device_ids=self.device_ids, gradient_as_bucket_view=True, **options)
        self._forget = comm_hooks.register(network, self.config.ddp)
        return network

    @property
    def device_ids(self) -> list[torch.device] | None:
        """The value of DDP's `device_ids` option: a list with the model's device.

        The value is None if the model is on the CPU or on several devices.
        """
        return None if self.device.type == "cpu" else [self.device]

    def weight(self, count: int) -> float:
        """Return the factor by which each sample's loss is multiplied.

        DDP averages gradients over the ranks, so the factor includes the number of ranks. With
        ddp.ordered, the trainer sums the gradients instead, so the factor does not include this
        number.
        """
        return (1 if self.config.ddp.ordered else self.group.world) / count

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Accumulate gradients within this context, using DDP's no_sync."""
        with self.network.no_sync() if isinstance(self.network, DistributedDataParallel) else nullcontext():
            yield
        self._arrived.clear()

    def update(self, rate: float) -> Update:
        """Take an optimizer step.

        After a skipped step, the state of the communication hook must be cleared. If the hook has a
        state, this method therefore waits until the device reports whether the step was skipped.
        """
        update = super().update(rate)
        if self._forget is not None and bool(update.skipped):
            self._forget()
        return update

    def backward(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        """Compute the gradients of the mean loss on every rank.

        With ddp.ordered, each micro-batch's gradients are kept separate until the gradients of all
        ranks have arrived, and are then added up in a fixed order. Without ddp.ordered, autograd
        adds each micro-batch's gradients to the sum of the earlier gradients.
        """
        if not self.config.ddp.ordered or self.group.world == 1:
            if not isinstance(self.network, DistributedDataParallel):
                return super().backward(micro_batches, count)
            if self._checked:
                losses = super().backward(micro_batches, count)
                self._check_exchange(self.network)
                return losses
            with self._watching_gradients():
                losses = super().backward(micro_batches, count)
            self._check_gradients()
            return losses
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        own: list[tuple[int, torch.Tensor]] = []
        weights = list(self.model.parameters())
        for micro, batch in micro_batches:
            total += self.backward_one(micro, batch, count)
            if micro.counts:
                own.append((micro.number, flat_gradients(weights)))
            self.optimizer.zero_grad(set_to_none=True)
            self.model.zero_grad(set_to_none=True)
        self.statistics.exchange()
        first, *others = ordered_parts(own, sum(weight.numel() + 1 for weight in weights), weights[0], self.group)
        summed = first.clone()
        for part in others:
            summed += part
        set_gradients(weights, summed)
        return total

    @contextmanager
    def _watching_gradients(self) -> Iterator[None]:
        """Record which weights get a gradient in a step's last micro-batch.

        DDP exchanges gradients only during the backward pass of this micro-batch.
        """
        handles = [
            weight.register_post_accumulate_grad_hook(self._arrived.add)  # type: ignore[no-untyped-call]
            for weight in self.model.parameters()
            if weight.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_gradients(self) -> None:
        """Raise ConfigError if a weight got no gradient in the last micro-batch of the first step.

        DDP does not exchange the bucket of gradients that contains such a weight. DDP itself would
        report the weight only in the second step, and by its number instead of its name.
        """
        self._checked = True
        named = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        idle = [name for name, weight in named if weight.grad is None]
        late = [name for name, weight in named if weight not in self._arrived]
        self._arrived.clear()
        if not late:
            return
        shown, keys = _first_of(idle or late), self.config
        if idle:
            raise ConfigError(
                f"model.name={keys.model.name}: {shown} got no gradient, but strategy={keys.strategy.value}"
                " needs one for every parameter; remove unused parameters, or set strategy=ddp"
                f" model.freeze={','.join(idle)}"
            )
        raise ConfigError(
            f"model.name={keys.model.name}: {shown} got a gradient in some forward passes but not in others,"
            f" and strategy={keys.strategy.value} needs one for every parameter in a step's last pass; use all"
            " parameters in each pass, or set strategy=ddp ddp.ordered=true"
        )

    def _check_exchange(self, network: DistributedDataParallel) -> None:
        """Raise ConfigError if DDP did not exchange every gradient in a step after the first one.

        DDP skips the exchange if a weight got no gradient. This check runs before the optimizer
        step, so that no rank updates its weights with only its own gradients.
        """
        try:
            check_all_reduced(network)
        except RuntimeError as error:
            named = self.model.named_parameters()
            idle = [name for name, weight in named if weight.requires_grad and weight.grad is None]
            shown = _first_of(idle) or "a parameter"
            raise ConfigError(
                f"model.name={self.config.model.name}: {shown} got no gradient in a step after the first, but"
                f" strategy={self.config.strategy.value} needs one for every parameter in each step; use all"
                " parameters in each forward pass, or set strategy=ddp ddp.ordered=true"
            ) from error


def _first_of(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
