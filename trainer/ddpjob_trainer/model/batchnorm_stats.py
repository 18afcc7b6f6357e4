"""Running statistics of batch normalization, independent of which rank computed a micro-batch.

In a step, every micro-batch starts from the same running statistics. At the end of the step, the
running statistics become the mean of the micro-batches' results, weighted by samples. The outcome
is the same as a single update with the mean of the micro-batches' statistics on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ddpjob_trainer.data.sampler import Micro
from ddpjob_trainer.distributed.process_group import Group


@torch.no_grad()
def move_running(module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update a layer's running statistics as torch does.

    `mean` and `variance` are the moments of the current batch. The variance is unbiased.
    """
    assert module.running_mean is not None and module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    momentum = 1 / int(module.num_batches_tracked) if module.momentum is None else module.momentum
    for running, moment in ((module.running_mean, mean), (module.running_var, variance)):
        running.lerp_(moment.to(running.dtype), momentum)


class BatchStatistics:
    """Combines a model's running means and variances over the ranks of a group.

    Does nothing for a model without running statistics. If `ordered` is set, the micro-batches'
    results are added up in micro-batch order, so the sum has identical bits on any number of ranks.
    The model's buffers become views of one flat tensor per device and format, so a step needs a few
    tensor operations in total instead of several per layer. A model can have only one
    BatchStatistics at a time.
    """

    def __init__(self, model: nn.Module, group: Group, ordered: bool = False) -> None:
        self._group, self._ordered = group, ordered
        # `_NormBase` also covers instance normalization, in which a user's model may track running
        # statistics.
        layers = [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]
        self._running = _flattened(
            [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
        )
        self._counters = _flattened(
            [
                layer.num_batches_tracked
                for layer in layers
                if isinstance(layer, _BatchNorm) and layer.num_batches_tracked is not None
            ]
        )
        self._before: list[torch.Tensor] | None = None
        self._total: torch.Tensor | None = None
        self._parts: list[tuple[int, torch.Tensor]] = []

    @contextmanager
    def of_micro(self, micro: Micro, count: int) -> Iterator[None]:
        """Run the forward pass of one micro-batch within this context.

        The micro-batch contributes to the step's statistics in proportion to its share of the
        step's `count` samples.
        """
        if not self._running:
            yield
            return
        now = [*self._running, *self._counters]
        if self._before is None:
            self._before = [value.clone() for value in now]
        else:
            for value, before in zip(now, self._before, strict=True):
                value.copy_(before)
        yield
        if not micro.counts:
            return
        part = _joined(self._running) * (len(micro.samples) / count)
        if self._ordered:
            self._parts.append((micro.number, part))
        else:
            self._total = part if self._total is None else self._total.add_(part)

    def exchange(self) -> None:
        """Combine the running statistics of all ranks at the end of a step.

        All ranks must call this together.
        """
        if not self._running or self._before is None:
            return
        before = _joined(self._before[: len(self._running)])
        if self._ordered:
            total = torch.zeros_like(before)
            for part in ordered_parts(self._parts, before.numel(), before, self._group):
                total += part
        else:
            total = self._group.sum(torch.zeros_like(before) if self._total is None else self._total)
        # A step that is skipped because its loss or a gradient is not finite must not affect the
        # statistics.
        total = torch.where(total.isfinite(), total, before)
        for value, piece in zip(
            self._running, torch.split(total, [value.numel() for value in self._running]), strict=True
        ):
            value.copy_(piece)
        for counter, was in zip(self._counters, self._before[len(self._running) :], strict=True):
            counter.copy_(was).add_(1)
        self._before, self._total, self._parts = None, None, []


def _flattened(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one flat tensor for each device and format, and make the buffers views of them."""
    flats = []
    for kind in dict.fromkeys((buffer.device, buffer.dtype) for buffer in buffers):
        alike = [buffer for buffer in buffers if (buffer.device, buffer.dtype) == kind]
        flats.append(torch.cat([buffer.detach().flatten() for buffer in alike]))
        for buffer, piece in zip(alike, torch.split(flats[-1], [buffer.numel() for buffer in alike]), strict=True):
            # Assign .data, so that the buffer remains the same tensor. autograd then does not count
            # later copies into the buffer as changes. In a pipeline, other micro-batches' forward
            # passes change the buffers before a micro-batch's backward pass. This is harmless,
            # because in training, autograd keeps the buffers for the backward pass but does not
            # read them.
            buffer.data = piece.view_as(buffer)
    return flats


def _joined(flats: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate flat tensors into one, with the device and format of the first tensor."""
    return flats[0] if len(flats) == 1 else torch.cat([flat.to(flats[0]) for flat in flats])


def ordered_parts(
    parts: list[tuple[int, torch.Tensor]], size: int, like: torch.Tensor, group: Group
) -> list[torch.Tensor]:
    """Return all ranks' tensors, in micro-batch order, on every rank.

    `parts` contains a pair for each of this rank's micro-batches: its number, and a flat tensor of
    `size` values. The result holds one such tensor for every micro-batch of all ranks. All ranks
    must call this together.
    """
    if group.world == 1:
        return [part for _, part in sorted(parts, key=lambda part: part[0])]
    counts = group.gather(len(parts))
    most = max(counts)
    numbers = torch.full((most,), -1, dtype=torch.int64)
    values = torch.zeros(most, size, dtype=like.dtype, device=like.device)
    for index, (number, part) in enumerate(parts):
        numbers[index] = number
        values[index] = part
    all_numbers, all_values = group.all_gather(numbers), group.all_gather(values)
    found = [
        (int(n), value)
        for ns, vs in zip(all_numbers, all_values, strict=True)
        for n, value in zip(ns, vs, strict=True)
        if n >= 0
    ]
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]
