"""Batch normalization over all ranks on the CPU, which torch's SyncBatchNorm does not support.

The arithmetic is the same as torch's. Each rank's mean and sum of squares are weighted by the
rank's number of values, so ranks may have different shares of the samples, or none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.batchnorm_stats import move_running


def synchronize(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with synchronized layers in place of its batch normalization layers.

    The names and values of their parameters and buffers do not change. On an accelerator, the new
    layers are torch's own. On the CPU, they are this module's. Raises ConfigError if one of the
    model's batch normalization layers does more than normalize.
    """
    for module in model.modules():
        plain = isinstance(module, nn.SyncBatchNorm) or type(module).forward is _BatchNorm.forward
        if isinstance(module, _BatchNorm) and not plain:
            raise ConfigError(
                f"model.sync_batchnorm: this model's {type(module).__name__} does more than normalize, which a "
                "synchronized layer does not support; leave out model.sync_batchnorm (each micro-batch then has "
                "its own statistics, on any number of ranks)"
            )
    if device.type != "cpu":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        for module in converted.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = _SyncBatchNorm
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = CpuSyncBatchNorm
    return model


class _SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm, extended so that a rank's share of the samples may be empty.

    For an empty share, torch's layer would send zeros in the input's format. Ranks with samples
    send float32, so the formats would not match.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel():
            normalized: torch.Tensor = super().forward(input)
            return normalized
        return super().forward(input.float()).to(input.dtype)


class CpuSyncBatchNorm(_BatchNorm):
    """Normalizes (n, channels, ...) as nn.SyncBatchNorm does; n may be 0 on some ranks."""

    is_synchronized = True

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize (n, channels, ...) by the mean and variance of each channel.

        In training, the mean and variance cover the samples of all ranks, so all ranks must call
        this together. In evaluation, the running statistics are used.
        """
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            normalized: torch.Tensor = super().forward(input)
            return normalized
        self._check_input_dim(input)
        outputs: torch.Tensor
        outputs, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            move_running(self, mean, variance * count / (count - 1))
        return outputs


class _Normalize(torch.autograd.Function):
    """Maps (input, weight, bias, eps) to (output, mean, biased variance, count).

    A step takes one all-gather in the forward pass and one all-reduce in the backward pass.
    Forward: Chan, Golub and LeVeque, Updating formulae for sample variances, 1979. Backward: Ioffe
    and Szegedy, 2015.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        axes = [0, *range(2, input.dim())]
        values, channels = input.float(), input.shape[1]
        own = values.numel() // channels
        mean = values.mean(axes) if own else values.new_zeros(channels)
        squares = (values - _wide(mean, input)).square_().sum(axes)
        ours = torch.cat([mean, squares, values.new_tensor([own])])
        every = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(every, ours)
        means, sums, counts = torch.stack(every).double().tensor_split([channels, 2 * channels], 1)
        count = counts.sum()
        if count < 2:
            raise ValueError(
                f"expected more than 1 value per channel over all ranks, got input size {tuple(input.shape)}"
            )
        total_mean = (means * counts).sum(0) / count
        variance = (sums + counts * (means - total_mean).square()).sum(0) / count
        inverse = (variance + eps).rsqrt().float()
        total_mean = total_mean.float()
        normalized = (values - _wide(total_mean, input)).mul_(_wide(inverse, input))
        ctx.save_for_backward(normalized, weight, inverse)
        ctx.count, ctx.axes = float(count), axes
        outputs = normalized if weight is None else normalized * _wide(weight.float(), input)
        outputs = outputs if bias is None else outputs + _wide(bias.float(), input)
        statistics = total_mean, variance.float(), count.float()
        ctx.mark_non_differentiable(*statistics)
        return (outputs.to(input.dtype), *statistics)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalized, weight, inverse = ctx.saved_tensors
        slope = gradients[0].float()
        sums = torch.stack([slope.sum(ctx.axes), (slope * normalized).sum(ctx.axes)])
        for_bias, for_weight = sums.clone()
        dist.all_reduce(sums)
        level, tilt = (sums / ctx.count).unbind()
        scale = inverse if weight is None else inverse * weight.float()
        inputs = (slope - _wide(level, slope) - normalized * _wide(tilt, slope)) * _wide(scale, slope)
        own = (None, None) if weight is None else (for_weight.to(weight.dtype), for_bias.to(weight.dtype))
        return inputs.to(gradients[0].dtype), *own, None


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape (channels,) to (1, channels, 1, ...), with as many dimensions as `like`."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))
