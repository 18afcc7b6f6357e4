"""A model as a sequence of layers, split into stages of nearly equal cost.

Strategies that spread a model over devices use this module.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.airbench import Airbench
from ddpjob_trainer.model.models import ResNet18Cifar, SmallCnn

_FLOPS_PER_ELEMENT = 20
"""Cost of writing one value, in floating-point operations. The speed of normalization and
activation layers is limited by memory bandwidth, not by their little arithmetic.
"""


@dataclass(frozen=True)
class Layer:
    """A module in the sequence, and its name in the model.

    A module without weights may have any name.
    """

    name: str
    module: nn.Module

    @property
    def has_weights(self) -> bool:
        """Whether the layer has parameters."""
        return any(True for _ in self.module.parameters())


class Mean(nn.Module):
    """Averages each channel over the pixels: (n, channels, height, width) -> (n, channels)."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the mean of each channel."""
        return images.mean((2, 3))


def to_sequential(model: nn.Module) -> list[Layer]:
    """Return a model's modules in the order in which its forward pass calls them, one by one.

    Raises ConfigError if the forward pass is more than such a sequence of calls.
    """
    flatten = Layer("flatten", nn.Flatten())
    if isinstance(model, SmallCnn):
        return [*_layers(model, "features.*", "pool", "dropout"), flatten, *_layers(model, "head")]
    if isinstance(model, ResNet18Cifar):
        return [*_layers(model, "stem.*", "blocks.*"), Layer("mean", Mean()), *_layers(model, "head")]
    if isinstance(model, Airbench):
        return [*_layers(model, "whiten", "features.*"), flatten, *_layers(model, "head")]
    kind = f"{type(model).__module__}.{type(model).__name__}"
    if kind == "torchvision.models.resnet.ResNet":
        layers = ("conv1", "bn1", "relu", "maxpool", "layer1.*", "layer2.*", "layer3.*", "layer4.*", "avgpool")
        return [*_layers(model, *layers), flatten, *_layers(model, "fc")]
    if kind in ("torchvision.models.vgg.VGG", "torchvision.models.alexnet.AlexNet"):
        return [*_layers(model, "features.*", "avgpool"), flatten, *_layers(model, "classifier.*")]
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        # named_children would skip the second use of a module that occurs twice, for example an
        # activation.
        found = [Layer(name, module) for name, module in zip(model._modules, model, strict=True)]
        _check_own_weights(found)
        return found
    raise ConfigError(
        f"a {type(model).__name__} cannot be split into stages, because its modules are not a sequence; set"
        " model.name to small_cnn, resnet18_cifar, airbench_cifar, or a ResNet, VGG or AlexNet of torchvision; or set"
        " strategy=fsdp, which shards any model"
    )


def _check_own_weights(layers: list[Layer]) -> None:
    """Raise ConfigError if two layers share weights or running statistics.

    Such layers could end up in different stages, on different devices.
    """
    owners: dict[torch.Tensor, str] = {}
    for layer in layers:
        for value in (*layer.module.parameters(), *layer.module.buffers()):
            if (owner := owners.setdefault(value, layer.name)) != layer.name:
                raise ConfigError(
                    f"layers {owner} and {layer.name} of the model share weights, but two stages "
                    "cannot share them; set strategy=ddp"
                )


def _layers(model: nn.Module, *names: str) -> list[Layer]:
    found = []
    for name in names:
        outer, _, star = name.partition(".")
        module = model.get_submodule(outer)
        found += (
            [Layer(f"{outer}.{inner}", child) for inner, child in module.named_children()]
            if star
            else [Layer(outer, module)]
        )
    return found


class Stage(nn.Module):
    """Consecutive layers of a model, under the names that they have in the whole model."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        # A plain list does not register the layers as modules. The layers are registered below, by
        # name.
        self._layers = [layer.module for layer in layers]
        for layer in layers:
            *path, last = layer.name.split(".")
            owner: nn.Module = self
            for name in path:
                if name not in owner._modules:
                    owner.add_module(name, nn.Module())
                owner = owner.get_submodule(name)
            owner.add_module(last, layer.module)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for module in self._layers:
            values = module(values)
        return values


class MetaModel:
    """Finds the shapes and costs of layers on a meta-device copy, without computing any values."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._modules = [copy.deepcopy(layer.module).to("meta").eval() for layer in layers]

    @torch.no_grad()
    def outputs(self, images: Sequence[int]) -> list[torch.Tensor]:
        """Return each layer's output on the meta device.

        `images` is the shape of the images: (n, channels, height, width).
        """
        values = torch.empty(*images, device="meta")
        found = []
        for module in self._modules:
            values = module(values)
            found.append(values)
        return found

    @torch.no_grad()
    def costs(self, image: Sequence[int]) -> list[float]:
        """Return each layer's cost for one image of the shape `image` (channels, height, width).

        The cost is the number of arithmetic operations plus a constant for each value written. The
        cost is the same on every machine.
        """
        from torch.utils.flop_counter import FlopCounterMode

        values, found = torch.empty(1, *image, device="meta"), []
        for module in self._modules:
            with FlopCounterMode(display=False) as counter:
                values = module(values)
            found.append(float(counter.get_total_flops() + _FLOPS_PER_ELEMENT * values.numel()))
        return found


def split(layers: Sequence[Layer], costs: Sequence[float], parts: int, key: str) -> list[list[Layer]]:
    """Divide the layers into `parts` stages of consecutive layers.

    The division minimizes the cost of the most expensive stage. Each stage after the first begins
    with a layer that has weights. Raises ConfigError if there are fewer layers with weights than
    stages. Its message names the setting `key`.
    """
    starts = [0, *[index for index, layer in enumerate(layers) if layer.has_weights][1:]]
    if parts > len(starts):
        raise ConfigError(
            f"{key}: cannot make {parts} stages, because the model has only {len(starts)} modules with weights;"
            f" write at most {len(starts)}"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    ends = [*starts[1:], len(layers)]
    # Maps each `end` to the best division of the layers before `end`: (cost of the most expensive
    # stage, ends of the stages). At first, these layers form a single stage.
    best: dict[int, tuple[float, list[int]]] = {end: (sums[end], [end]) for end in ends}
    for _ in range(parts - 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for index, end in enumerate(ends):
            choices = [
                (max(best[start][0], sums[end] - sums[start]), [*best[start][1], end])
                for start in ends[:index]
                if start in best
            ]
            if choices:
                longer[end] = min(choices)
        best = longer
    bounds = [0, *best[len(layers)][1]]
    return [list(layers[start:end]) for start, end in itertools.pairwise(bounds)]
