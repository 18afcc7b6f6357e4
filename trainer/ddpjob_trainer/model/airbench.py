"""The network of airbench94_muon for CIFAR-10, whose first layer is computed from the data.

Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024;
github.com/KellerJordan/cifar10-airbench.

Problem: neighbouring pixels are almost equal, so a network spends its first epochs learning filters
that tell them apart. Rule: the filters of the first convolution are the eigenvectors of a
covariance matrix, divided by their standard deviations. The matrix is computed from 2x2 patches of
the training images. The outputs of the convolution are uncorrelated and have a variance of 1. Each
filter occurs with both signs, because an activation follows.

Example: a patch of 2x2 pixels in 3 colours has 12 values, hence 12 eigenvectors and 24 filters.

The filters are a buffer, not a parameter, so every strategy keeps them fixed. Checkpoints contain
the filters, so only a new run computes them. Rank 0 computes the filters from the first samples of
epoch 0 and sends them to all ranks, so the filters do not depend on the number of ranks. `whiten`
does the same for a `Whitening` that is the first layer of the user's own model.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError

_SAMPLES, _AT_ONCE = 5000, 100
_RIDGE = 5e-4
"""Number added to each eigenvalue of the patches' covariance. Without this number, directions in
which patches hardly vary would be amplified too much.
"""
SMALLEST = 9
"""Minimum height and width of an image. The maps of a smaller image would become empty, because
each of the three groups halves them."""


class Whitening(nn.Module):
    """Convolves images (n, channels, height, width) with fixed filters, and adds a trained bias."""

    weight: torch.Tensor

    def __init__(self, channels: int, side: int = 2) -> None:
        super().__init__()
        start = nn.Conv2d(channels, 2 * channels * side**2, side)
        self.register_buffer("weight", start.weight.detach())
        self.bias = start.bias

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the feature maps.

        The maps are `side` - 1 pixels smaller than the images in both dimensions.
        """
        return nn.functional.conv2d(images, self.weight, self.bias)


def find_filters(model: nn.Module, data: DataSet) -> str:
    """Return the name that the Whitening's filters have in the model's state dict.

    Return an empty string if the model does not have a Whitening. Raises ConfigError if the layer
    and the images have different numbers of channels.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, Whitening):
            if layer.weight.shape[1] != data.shape[0]:
                raise ConfigError(
                    f"the model's Whitening layer takes {layer.weight.shape[1]} channels, but the "
                    f"data's images have {data.shape[0]}; make the Whitening layer the first layer"
                )
            return f"{name}.weight" if name else "weight"
    return ""


def whiten(weights: dict[str, torch.Tensor], name: str, data: DataSet, group: Group) -> dict[str, torch.Tensor]:
    """Return the state dict `weights` with newly computed filters under `name`.

    Rank 0 computes the filters. All ranks must call this together.
    """
    computed = torch.empty(weights[name].shape)
    if group.rank == 0:
        computed.copy_(filters(data, computed.shape[2]))
    group.broadcast_tensors([computed])
    return {**weights, name: computed}


@torch.no_grad()
def filters(data: DataSet, side: int) -> torch.Tensor:
    """Return filters (2 * channels * side^2, channels, side, side) for the training images.

    Compute in float64, because TensorFloat-32 would lose small eigenvalues.
    """
    numbers = range(min(_SAMPLES, data.train_size))
    parts = [list(numbers[first : first + _AT_ONCE]) for first in range(0, len(numbers), _AT_ONCE)]
    size = data.shape[0] * side**2
    total, count = torch.zeros(size, size, dtype=torch.float64), 0
    for batch in data.train_batches(parts, 0):
        patches = nn.functional.unfold(batch.images, side).transpose(1, 2).flatten(0, 1).double()
        total += (patches.T @ patches).cpu()
        count += len(patches)
    values, vectors = torch.linalg.eigh(total / count)
    scaled = (vectors / (values + _RIDGE).sqrt()).T.reshape(-1, data.shape[0], side, side)
    return torch.cat([scaled, -scaled])


class _Bias(nn.Module):
    """Adds a trained number to each channel, after a normalization without scale and bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.bias[:, None, None]


class _Head(nn.Linear):
    """A linear layer without bias.

    The initial weights have a variance of 1, and the layer divides the scores by `inputs`.
    """

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(inputs, classes, bias=False)
        with torch.no_grad():
            self.weight /= self.weight.std()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) / self.in_features


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a convolution whose first `inputs` filters initially copy the input channels."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.detach()[:inputs])
    return layer


def _group(inputs: int, outputs: int) -> nn.Sequential:
    # airbench takes only 200 steps, so a high momentum lets the running statistics adapt in time.
    # With affine=False, the normalization does not train a scale.
    norms = (nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4, affine=False) for _ in range(2))
    first, second = ([norm, _Bias(outputs), nn.GELU()] for norm in norms)
    return nn.Sequential(
        _convolution(inputs, outputs), nn.MaxPool2d(2), *first, _convolution(outputs, outputs), *second
    )


class Airbench(nn.Module):
    """A Whitening, three groups of two convolutions each, and a linear layer."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int) -> None:
        """Build the network. `width` is the number of channels in the first group.

        Raises ConfigError if the images or `width` are too small.
        """
        super().__init__()
        if min(shape[1:]) < SMALLEST:
            raise ConfigError(
                f"model.name=airbench_cifar needs images of at least {SMALLEST} x {SMALLEST} pixels, but the data's"
                f" have {shape[1]} x {shape[2]}; set model.name=small_cnn"
            )
        if width < 1:
            raise ConfigError(f"model.width={width}: must be at least 1, for example 64")
        self.whiten = Whitening(shape[0])
        channels = (len(self.whiten.weight), width, 4 * width, 4 * width)
        groups = [_group(*pair) for pair in pairwise(channels)]
        # After these groups, the maps of 32x32 images have 3x3 values.
        self.features = nn.Sequential(nn.GELU(), *groups, nn.AdaptiveMaxPool2d(1))
        self.head = _Head(channels[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute logits (n, classes) from images (n, channels, height, width)."""
        logits: torch.Tensor = self.head(self.features(self.whiten(images)).flatten(1))
        return logits
