"""strategy=ddp: one process per device.

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
"""DDP's option to synchronize buffers. Its name depends on the version of torch."""


class Ddp(Strategy):
    """Each rank has the whole model. A group of one needs no wrapper."""

    divides = compiles_step = True
    _forget: Callable[[], None] | None = None
    """Clears the communication hook's state, if it has any."""
    _checked = False
    """Whether all weights are known to get gradients."""

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        super().__init__(config, group, device)
        self._arrived: set[torch.Tensor] = set()

    @property
    def waits_apart(self) -> bool:
        """Whether a rank's own work can be distinguished from its waiting.

        If ranks exchange batch statistics in each layer, this is only possible if the clock can
        measure the waits for these exchanges.
        """
        return self.clock.sees_waits or not (self.config.model.sync_batchnorm or self.parts)

    def prepare(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Prepare the model. Raises ConfigError if settings are mutually exclusive."""
        comm_hooks.check(self.config.ddp)
        if self.config.ddp.ordered and self.config.amp.level in (AmpLevel.O2, AmpLevel.O3):
            raise ConfigError("ddp.ordered needs bit-exact float32 sums; set amp.level=O0 or O1, or ddp.ordered=false")
        super().prepare(model, shape)
        # Faster cuDNN and cuBLAS kernels do not have a fixed order of addition.
        if self.config.ddp.ordered and self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.deterministic = True
            torch.use_deterministic_algorithms(True, warn_only=True)

    def batch_statistics(self) -> BatchStatistics:
        """Return the model's statistics. With ddp.ordered, they are added up in order, too."""
        return BatchStatistics(self.model, self.group, self.config.ddp.ordered)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP.

        DDP's broadcast of buffers at each step is off, because the trainer exchanges batch
        statistics exactly.
        """
        if self.group.world == 1 or self.config.ddp.ordered:
            return model
        options: dict[str, Any] = {_BUFFERS: False}
        network = DistributedDataParallel(model, device_ids=self.device_ids, gradient_as_bucket_view=True, **options)
        self._forget = comm_hooks.register(network, self.config.ddp)
        return network

    @property
    def device_ids(self) -> list[torch.device] | None:
        """The device of the model, or None if it is on several devices or on the CPU."""
        return None if self.device.type == "cpu" else [self.device]

    def weight(self, count: int) -> float:
        """Return the factor for a sample's loss. DDP averages over ranks."""
        return (1 if self.config.ddp.ordered else self.group.world) / count

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Use DDP's no_sync inside this `with`."""
        with self.network.no_sync() if isinstance(self.network, DistributedDataParallel) else nullcontext():
            yield
        self._arrived.clear()

    def update(self, rate: float) -> Update:
        """Take the optimizer's step.

        With a stateful communication hook, this waits for the device to find out whether the step
        was skipped.
        """
        update = super().update(rate)
        if self._forget is not None and bool(update.skipped):
            self._forget()
        return update

    def backward(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        """Compute the gradients of the mean loss on every rank.

        With ddp.ordered, each micro-batch's gradients are kept separate until the gradients of all
        ranks have arrived. Otherwise, autograd adds them to the gradients of the earlier
        micro-batches.
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
        """Record which weights get a gradient in the last micro-batch, after which DDP sends."""
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
        """Raise ConfigError if a weight got no gradient in the first step.

        In that case, DDP has not exchanged the gradients in the weight's bucket. DDP itself would
        report this only in the next step, by parameter number.
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
        """Raise ConfigError if a weight got no gradient in a later step.

        This is checked before the optimizer uses gradients from only this rank.
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
