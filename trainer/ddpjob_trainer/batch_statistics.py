"""Running statistics of batch normalisation that do not depend on which rank took which micro-batch.

In a step each micro-batch starts from the same running statistics; afterwards these become the mean of what the micro-batches made of them,
weighted by samples. That is one update with the mean of the micro-batches' statistics, as for a step on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpjob_trainer.group import Group
from ddpjob_trainer.sampler import Micro


class BatchStatistics:
    """The running means and variances of a model, over the ranks of a group; does nothing for a model without any.

    `ordered`: the sum over micro-batches is taken in their order, so that it is the same to the bit on any number of ranks.
    """

    def __init__(self, model: nn.Module, group: Group, ordered: bool = False) -> None:
        self._group, self._ordered = group, ordered
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
        # Their .data, so that a copy into them is no change in autograd's eyes: it keeps the buffers for the backward pass, where training
        # does not read them, and in a pipeline that of one micro-batch may come after the forward pass of the next.
        running = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
        self._running = [buffer.data for buffer in running]
        self._counters = [layer.num_batches_tracked.data for layer in layers if layer.num_batches_tracked is not None]
        self._before: list[torch.Tensor] | None = None
        self._parts: list[tuple[int, torch.Tensor]] = []

    @contextmanager
    def of_micro(self, micro: Micro, count: int) -> Iterator[None]:
        """Around the forward pass of a micro-batch, of a step of `count` samples in all."""
        if not self._running:
            yield
            return
        if self._before is None:
            self._before = [value.clone() for value in (*self._running, *self._counters)]
        torch._foreach_copy_([*self._running, *self._counters], self._before)
        yield
        if micro.counts:
            flat = torch.cat([value.flatten().to(self._running[0].device) for value in self._running])
            self._parts.append((micro.number, flat * (len(micro.samples) / count)))

    def exchange(self) -> None:
        """At the end of the step. All ranks together."""
        if not self._running or self._before is None:
            return
        size = sum(value.numel() for value in self._running)
        parts = ordered_parts(self._parts, size, self._running[0], self._group) if self._ordered else [part for _, part in self._parts]
        total = torch.zeros(size, dtype=self._running[0].dtype, device=self._running[0].device)
        for part in parts:
            total += part
        if not self._ordered:
            self._group.sum(total)
        # A step that is left out, for a loss or an overflow that is not finite, must not be in the statistics for ever.
        before = torch.cat([value.flatten().to(total.device) for value in self._before[: len(self._running)]])
        total = torch.where(total.isfinite(), total, before)
        pieces = torch.split(total, [value.numel() for value in self._running])
        torch._foreach_copy_(self._running, [piece.view_as(value) for piece, value in zip(pieces, self._running, strict=True)])
        torch._foreach_copy_(self._counters, [value + 1 for value in self._before[len(self._running) :]])
        self._before, self._parts = None, []


def ordered_parts(parts: list[tuple[int, torch.Tensor]], size: int, like: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """The flat parts (number, tensor) of all ranks in the order of their numbers, on every rank: (micro-batches, size) in memory."""
    if group.world == 1:
        return [part for _, part in sorted(parts, key=lambda part: part[0])]
    counts = group.gather(len(parts))
    most = max(counts)
    numbers = torch.full((most,), -1, dtype=torch.int64)
    values = torch.zeros(most, size, dtype=like.dtype, device=like.device)
    for place, (number, part) in enumerate(parts):
        numbers[place] = number
        values[place] = part
    all_numbers, all_values = group.all_gather(numbers), group.all_gather(values)
    found = [(int(n), value) for ns, vs in zip(all_numbers, all_values, strict=True) for n, value in zip(ns, vs, strict=True) if n >= 0]
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]
