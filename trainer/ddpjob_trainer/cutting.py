"""A model as a chain of modules, and its cut into parts of nearly equal cost; for strategies that spread a model over devices."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.models import ResNet18Cifar, SmallCnn

_FLOPS_PER_ELEMENT = 20
"""What a value that is written costs beside the arithmetic: normalisation and activation are bound by memory."""


@dataclass(frozen=True)
class Link:
    """A module of a chain, and its name in the model; what has no weights may have no name there."""

    name: str
    module: nn.Module

    @property
    def has_weights(self) -> bool:
        """Whether there is something to train."""
        return any(True for _ in self.module.parameters())


class Mean(nn.Module):
    """(n, channels, height, width) -> (n, channels)."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The mean over each image."""
        return images.mean((2, 3))


def chain(model: nn.Module) -> list[Link]:
    """The modules that, one after the other, are the model's forward pass. Raises ConfigError for a model that is no such chain."""
    flatten = Link("flatten", nn.Flatten())
    if isinstance(model, SmallCnn):
        return [*_links(model, "features.*", "pool", "dropout"), flatten, *_links(model, "head")]
    if isinstance(model, ResNet18Cifar):
        return [*_links(model, "stem.*", "blocks.*"), Link("mean", Mean()), *_links(model, "head")]
    kind = f"{type(model).__module__}.{type(model).__name__}"
    if kind == "torchvision.models.resnet.ResNet":
        layers = ("conv1", "bn1", "relu", "maxpool", "layer1.*", "layer2.*", "layer3.*", "layer4.*", "avgpool")
        return [*_links(model, *layers), flatten, *_links(model, "fc")]
    if kind in ("torchvision.models.vgg.VGG", "torchvision.models.alexnet.AlexNet"):
        return [*_links(model, "features.*", "avgpool"), flatten, *_links(model, "classifier.*")]
    if isinstance(model, nn.Sequential):
        return _links(model, *(name for name, _ in model.named_children()))
    raise ConfigError(
        f"a {type(model).__name__} cannot be cut into parts, because its modules are no chain: set model.name to small_cnn, resnet18_cifar,"
        f" or a ResNet, VGG or AlexNet of torchvision; or set strategy=fsdp, which spreads any model"
    )


def _links(model: nn.Module, *names: str) -> list[Link]:
    found = []
    for name in names:
        outer, _, star = name.partition(".")
        module = model.get_submodule(outer)
        found += [Link(f"{outer}.{inner}", child) for inner, child in module.named_children()] if star else [Link(outer, module)]
    return found


class Part(nn.Module):
    """Some links of a chain, one after the other, under the names that they have in the whole model."""

    def __init__(self, links: list[Link]) -> None:
        super().__init__()
        self._chain = [link.module for link in links]  # A list: registered below, under their names.
        for link in links:
            *path, last = link.name.split(".")
            owner: nn.Module = self
            for name in path:
                if name not in owner._modules:
                    owner.add_module(name, nn.Module())
                owner = owner.get_submodule(name)
            owner.add_module(last, link.module)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """What the last link gives."""
        for module in self._chain:
            values = module(values)
        return values


class Skeleton:
    """The chain without its weights (on the meta device): what comes out of each link, at no cost."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._modules = [copy.deepcopy(link.module).to("meta").eval() for link in links]

    @torch.no_grad()
    def outputs(self, images: Sequence[int]) -> list[torch.Tensor]:
        """Meta tensors that each link gives for images of a shape (n, channels, height, width)."""
        values = torch.empty(*images, device="meta")
        found = []
        for module in self._modules:
            values = module(values)
            found.append(values)
        return found

    @torch.no_grad()
    def costs(self, image: Sequence[int]) -> list[float]:
        """What each link costs for one image (channels, height, width): arithmetic, and values written. The same on every machine."""
        from torch.utils.flop_counter import FlopCounterMode

        values, found = torch.empty(1, *image, device="meta"), []
        for module in self._modules:
            with FlopCounterMode(display=False) as counter:
                values = module(values)
            found.append(float(counter.get_total_flops() + _FLOPS_PER_ELEMENT * values.numel()))
        return found


def cut(links: Sequence[Link], costs: Sequence[float], parts: int, key: str) -> list[list[Link]]:
    """The chain in `parts` parts, so that the dearest one is as cheap as can be; each begins with a module that has weights.

    Raises ConfigError, naming the configuration's `key`, when there are fewer such modules than parts.
    """
    starts = [0, *[place for place, link in enumerate(links) if link.has_weights][1:]]
    if parts > len(starts):
        raise ConfigError(
            f"{key}: {parts} parts, and the model is a chain of {len(starts)} modules with weights; write {len(starts)} at most"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    ends = [*starts[1:], len(links)]
    best: dict[int, tuple[float, list[int]]] = {end: (sums[end], [end]) for end in ends}  # The chain up to `end`, in one part.
    for _ in range(parts - 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for place, end in enumerate(ends):
            choices = [(max(best[start][0], sums[end] - sums[start]), [*best[start][1], end]) for start in ends[:place] if start in best]
            if choices:
                longer[end] = min(choices)
        best = longer
    bounds = [0, *best[len(links)][1]]
    return [list(links[start:end]) for start, end in itertools.pairwise(bounds)]
