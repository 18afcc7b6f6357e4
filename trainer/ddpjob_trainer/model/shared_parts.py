"""Lets several ranks share a micro-batch, with joint batch normalization and the same random
numbers.

`data/sampler.py` divides a micro-batch between ranks if whole micro-batches would leave ranks idle.
The result must be the same as on a single rank. Most layers treat every sample separately and work
unchanged. Two kinds of layers do not:

- Batch normalization needs the mean and variance over the whole micro-batch. Each rank adds up its
  part's moments, exchanges them with the micro-batch's other holders (`Group.swap`), and adds all
  of them in rank order, so the holders compute identical bits. The backward pass exchanges two more
  sums.
- Dropout and stochastic depth multiply by random numbers. Each rank draws the numbers for the whole
  micro-batch, seeded by its key, and uses the rows of its own part.

Example: ranks 0 and 1 hold samples e and f of micro-batch ef. A layer with 64 channels gets e on
rank 0 and f on rank 1. Each rank sends the other one 2 x 64 numbers, and both normalize by the mean
of e and f. Dropout draws a mask with two rows on both ranks; rank 0 applies the first row, rank 1
the second.

A rank can have parts of several micro-batches in the same pass, so that all ranks do the same
amount of work. A layer processes these parts together, so three parts do not need more kernels than
one. The overhead of a layer is one exchange in the forward pass and one in the backward pass.

Without parts, the model's own layers are used. A layer that ties samples together in any other way
cannot be shared (`can_be_shared`); in that case, whole micro-batches are distributed.

Why: docs/decisions/0006.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpjob_trainer.data.randomness import seed_torch
from ddpjob_trainer.data.sampler import Micro, Part
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import TrainingError
from ddpjob_trainer.model.batchnorm_stats import move_running
from ddpjob_trainer.model.models import RANDOM_PATHS, ties_samples
from ddpjob_trainer.private_torch import check_dimensions

Forward = Callable[[torch.Tensor], torch.Tensor]
_MASKS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""The batch normalization layers that use torch's own forward pass. A subclass may do more in its
forward pass. timm's subclass, for example, applies an activation.
"""


def can_be_shared(model: nn.Module) -> bool:
    """Return whether every layer that ties samples together can process parts of a micro-batch."""
    return all(type(module) in PLAIN_NORMS or _is_random(module) for module in model.modules() if ties_samples(module))


def _is_random(module: nn.Module) -> bool:
    """Return whether the layer multiplies its input by random numbers."""
    return type(module) in _MASKS or type(module).__name__ in RANDOM_PATHS


class SharedParts:
    """Replaces the forward passes of a model's layers with versions for parts of micro-batches.

    Must be created before the first forward pass.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._group = group
        self._parts: tuple[Part, ...] = ()
        self._sizes: dict[tuple[tuple[int, int], ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._random: list[Any] = []
        self._device = next((value.device for value in model.parameters()), torch.device("cpu"))
        for module in model.modules():
            # A random layer with probability 0 has no effect, so it keeps its own forward pass.
            masks = _is_random(module) and ties_samples(module)
            layer: Any = self._normalize if isinstance(module, _BatchNorm) else self._mask if masks else None
            if layer is not None:
                own: Any = torch.compiler.disable(partial(layer, module, module.forward))  # type: ignore[no-untyped-call]
                module.forward = own

    @contextmanager
    def of_micro(self, micro: Micro) -> Iterator[None]:
        """Run the forward pass of one micro-batch within this context.

        If the micro-batch does not have parts, the layers use their own forward passes.
        """
        self._parts = micro.parts
        self._random = [None] * len(micro.parts)
        try:
            yield
        finally:
            self._parts = ()

    def _mask(self, module: nn.Module, forward: Forward, values: torch.Tensor) -> torch.Tensor:
        """Multiply this rank's rows by the random factors that the layer would draw for them.

        The factors are drawn for whole micro-batches, so they do not depend on the number of ranks.
        """
        if not module.training or not self._parts:
            return forward(values)
        self._check_samples(module, values)
        layout = _layout(values)
        paths = type(module).__name__ in RANDOM_PATHS
        shape = [1] * (values.dim() - 1) if paths else values.shape[1:]
        factors = []
        for number, part in enumerate(self._parts):
            if self._random[number] is None:
                seed_torch(part.key, self._device)
            else:
                _set_random(self._random[number], self._device)
            ones = torch.ones(part.size, *shape, dtype=values.dtype, device=values.device)
            whole = forward(ones.contiguous(memory_format=layout))
            factors.append(whole[part.start : part.start + part.count])
            self._random[number] = _random(self._device)
        return values * torch.cat(factors)

    def _normalize(self, module: _BatchNorm, forward: Forward, values: torch.Tensor) -> torch.Tensor:
        if not module.training or not self._parts:
            return forward(values)
        self._check_samples(module, values)
        check_dimensions(module, values)
        outputs: torch.Tensor
        sizes = self._sizes_on(values.device)
        outputs, moments = _NormalizeParts.apply(
            values, module.weight, module.bias, module.eps, self._parts, sizes, self._group
        )
        if module.track_running_stats:
            # `moments` is the average of the micro-batches of which this rank has a part, weighted
            # by this rank's samples. The average of `moments` over all ranks, again weighted by
            # samples, covers all micro-batches.
            move_running(module, *moments)
        return outputs

    def _check_samples(self, module: nn.Module, values: torch.Tensor) -> None:
        """Raise TrainingError if a layer's rows are not samples.

        The rows may be windows or positions, for example. If a sample has several rows, it is
        unknown which rows belong to which part.
        """
        samples = sum(part.count for part in self._parts)
        if len(values) != samples:
            raise TrainingError(
                f"a {type(module).__name__} of the model gets {len(values)} rows for {samples} samples, so its"
                " micro-batches cannot be divided between ranks; use a number of ranks that divides"
                " data.micro_batches, or set"
                " data.exact=false"
            )

    def _sizes_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each part's micro-batch size, and each part's fraction of this rank's samples.

        The shapes are (parts, 1) and (parts,). Both tensors are the same in most steps, so they are
        kept on the device. Sending them to the device for each layer would mean waiting for the
        device.
        """
        key = tuple((part.size, part.count) for part in self._parts)
        if key not in self._sizes:
            table = torch.tensor(key, dtype=torch.float64, device=device)
            self._sizes[key] = table[:, :1], table[:, 1] / table[:, 1].sum()
        return self._sizes[key]


class _NormalizeParts(torch.autograd.Function):
    """Maps (input, weight, bias, eps, parts, result of `_sizes_on`, group) to (output, moments).

    The moments are for `move_running`. Sums over the pixels of a sample are float32. Sums over
    samples are float64, because raw second moments would lose precision in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        parts: tuple[Part, ...],
        sizes: tuple[torch.Tensor, torch.Tensor],
        group: Group,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = input[0, 0].numel()
        if min(part.size for part in parts) * pixels < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        values = input.float()
        if values.dim() > 2:
            # On the CPU, torch.var_mean would take 15 times as long as the following lines.
            axes = list(range(2, values.dim()))
            mean = values.mean(axes, keepdim=True)
            variance = torch.linalg.vector_norm(values - mean, dim=axes).square_().div_(pixels)
            mean = mean.flatten(1)
        else:
            variance, mean = torch.zeros_like(values), values
        mean = mean.double()
        first, second = _over_holders(mean, variance.double().addcmul_(mean, mean), pixels, parts, group)
        count = sizes[0] * pixels
        mean = first / count
        variance = (second / count).addcmul_(mean, mean, value=-1).clamp_(min=0)
        inverse = (variance + eps).rsqrt_()
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        outputs = torch.addcmul(_each(shift, parts, values), values, _each(scale, parts, values))
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.parts, ctx.group = parts, group
        moments = sizes[1] @ torch.cat([mean, variance * (count / (count - 1))], 1)
        moments = moments.view(2, -1)
        ctx.mark_non_differentiable(moments)
        return outputs.to(input.dtype, memory_format=_layout(input)), moments

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        values, slope = input.float(), gradients[0].float()
        level, tilt = slope, slope * values
        if values.dim() > 2:
            axes = list(range(2, values.dim()))
            level, tilt = slope.sum(axes), tilt.sum(axes)
        own = _by_part(level.double(), tilt.double(), ctx.parts)
        all_level, all_tilt = _sum_parts(own, ctx.parts, ctx.group)
        for_weight = ((own[:, 1] - mean * own[:, 0]) * inverse).sum(0)
        for_bias = own[:, 0].sum(0)
        scale = inverse if weight is None else inverse * weight
        # d input = scale * (slope - mean of slope - normalized * mean of (slope * normalized))
        of_values = (all_tilt - mean * all_level) * inverse.square() * -scale / count
        constant = -scale * all_level / count - of_values * mean
        inputs = torch.addcmul(_each(constant, ctx.parts, slope), slope, _each(scale, ctx.parts, slope))
        inputs.addcmul_(values, _each(of_values, ctx.parts, values))
        parameters = (None, None) if weight is None else (for_weight.to(weight.dtype), for_bias.to(weight.dtype))
        return inputs.to(gradients[0].dtype), *parameters, None, None, None, None


def _by_part(first: torch.Tensor, second: torch.Tensor, parts: tuple[Part, ...]) -> torch.Tensor:
    """Sum both tensors (samples, channels) over the samples of each part: (parts, 2, channels)."""
    sizes = [part.count for part in parts]
    both = torch.stack([first, second], 1)
    return torch.stack([piece.sum(0) for piece in torch.split(both, sizes)])


def _over_holders(
    first: torch.Tensor, second: torch.Tensor, pixels: int, parts: tuple[Part, ...], group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum both tensors over the pixels and samples of each whole micro-batch.

    Each tensor (samples, channels) contains means over `pixels` pixels of a sample.
    """
    return _sum_parts(_by_part(first, second, parts).mul_(pixels), parts, group)


def _sum_parts(own: torch.Tensor, parts: tuple[Part, ...], group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up each part's sums over all ranks that hold a part of the same micro-batch.

    The sums are added up in rank order, so that all holders compute identical bits.
    """
    every = group.swap([(values, part.holders) for values, part in zip(own, parts, strict=True)])
    both = torch.stack([torch.stack(found).sum(0) for found in every])
    return both[:, 0], both[:, 1]


def _each(values: torch.Tensor, parts: tuple[Part, ...], like: torch.Tensor) -> torch.Tensor:
    """Repeat each part's row of (parts, channels) for all samples of the part.

    The result is float32 (samples, channels, 1, ...), with as many dimensions as `like`.
    """
    chosen = values.float()
    chosen = torch.cat([row.expand(part.count, -1) for row, part in zip(chosen, parts, strict=True)])
    return chosen.reshape(*chosen.shape, *[1] * (like.dim() - 2))


def _layout(values: torch.Tensor) -> torch.memory_format:
    channels_last = values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last and not values.is_contiguous() else torch.contiguous_format


def _random(device: torch.device) -> Any:
    state = torch.default_generator.get_state()
    return state, None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random(state: Any, device: torch.device) -> None:
    torch.default_generator.set_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)
