"""Models: a small CNN that adapts to the images, ResNet-18 in its CIFAR form, torchvision's by name."""

from __future__ import annotations

import difflib
import enum
import os
import shutil
from dataclasses import dataclass

import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError


class NormName(enum.StrEnum):
    """Normalisations by name."""

    GROUP = "group"
    BATCH = "batch"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """The network."""

    name: str = "small_cnn"
    """small_cnn, resnet18_cifar, or torchvision:NAME for any classification model of torchvision, such as torchvision:resnet50."""
    width: int = 32
    """small_cnn: channels of the first layer."""
    norm: NormName = NormName.GROUP
    """small_cnn: group normalises each sample by itself, batch each micro-batch."""
    dropout: float = 0.0
    """small_cnn: share of the last layer's inputs that are left out at random."""
    sync_batchnorm: bool = False
    """Batch normalisation with statistics of all ranks' samples together (of the global batch, or of a portion of train.accumulate), not of
    micro-batches. One more exchange for each layer, forwards and backwards."""
    channels_last: bool = False
    """Images and weights lie in memory as (n, height, width, channels): faster convolutions where tensor cores work in float16."""
    compile: bool = False
    """torch.compile: the first steps take a minute or more, the others less time. Needs a C++ compiler."""


def build_model(config: ModelConfig, shape: tuple[int, int, int], classes: int, seed: int, device: torch.device | None = None) -> nn.Module:
    """The network for images of `shape` (channels, height, width), on `device`, with weights that depend on `seed` only.

    Raises ConfigError.
    """
    torch.manual_seed(seed)
    device = device or torch.device("cpu")
    model = _network(config, shape, classes).to(device)
    if config.compile:
        _check_compiler()
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
        model.register_forward_pre_hook(lambda _, inputs: tuple(images.contiguous(memory_format=torch.channels_last) for images in inputs))
    if not config.sync_batchnorm:
        return model
    from ddpjob_trainer.sync_batchnorm import synchronised

    model = synchronised(model, device)
    if is_tied_to_micro_batches(model):
        raise ConfigError(
            f"model.sync_batchnorm: {config.name} drops inputs out at random, and on another number of ranks others;"
            f" leave model.sync_batchnorm out (statistics are then those of data.micro_batches micro-batches, on any number of ranks),"
            f" or take a model without dropout"
        )
    return model


def _check_compiler() -> None:
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"model.compile: no C++ compiler ({', '.join(names)}) is here; install g++, name one in CXX, or set model.compile=false"
        )


def _network(config: ModelConfig, shape: tuple[int, int, int], classes: int) -> nn.Module:
    if config.name == "small_cnn":
        if config.width < 4 or config.width % 4:
            raise ConfigError(f"model.width: {config.width} is not a positive multiple of 4; write for example 32")
        if not 0 <= config.dropout < 1:
            raise ConfigError(f"model.dropout: {config.dropout} is not a share from 0 to below 1; write for example 0.1")
        return SmallCnn(shape, classes, config)
    if config.name == "resnet18_cifar":
        return ResNet18Cifar(shape[0], classes)
    kind, _, name = config.name.partition(":")
    if kind == "torchvision" and name:
        return _torchvision_model(name, classes)
    near = difflib.get_close_matches(config.name, ["small_cnn", "resnet18_cifar", "torchvision:resnet50"], n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"model.name: {config.name!r} is not known; write small_cnn, resnet18_cifar or torchvision:NAME{hint}")


def is_tied_to_micro_batches(model: nn.Module) -> bool:
    """Whether what the model makes of a sample in training depends on the others beside it, or on random numbers."""
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    def tied(module: nn.Module) -> bool:
        if isinstance(module, _BatchNorm):
            return not hasattr(module, "is_synchronised") and not isinstance(module, nn.SyncBatchNorm)
        if isinstance(module, _DropoutNd):
            return module.p > 0
        random = ("dropout", "p") if type(module).__name__ in ("StochasticDepth", "DropPath") else ("dropout",)
        return any(isinstance(share := getattr(module, name, 0), float) and share > 0 for name in random)

    return any(tied(module) for module in model.modules())


def _torchvision_model(name: str, classes: int) -> nn.Module:
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean torchvision:{near[0]}?" if near else ""
        raise ConfigError(f"model.name: torchvision has no classification model {name!r}{hint}")
    # These two return the scores of their auxiliary heads, too.
    plain = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **plain)
    return model


def _convolution(inputs: int, outputs: int, norm: NormName) -> list[nn.Module]:
    # A group's statistics are those of one sample, so that a gradient does not depend on how a batch is shared out.
    normalised = nn.GroupNorm(4, outputs) if norm is NormName.GROUP else nn.BatchNorm2d(outputs)
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), normalised, nn.ReLU(inplace=True)]


class SmallCnn(nn.Module):
    """3x3 convolutions; halves the image until 4 pixels are left at its shorter side, then one linear layer."""

    def __init__(self, shape: tuple[int, int, int], classes: int, config: ModelConfig) -> None:
        super().__init__()
        width, norm = config.width, config.norm
        channels, height, outputs = shape[0], min(shape[1:]), width
        layers: list[nn.Module] = _convolution(channels, width, norm)
        while height > 4:
            layers += [*_convolution(outputs, min(2 * outputs, 8 * width), norm), nn.MaxPool2d(2, ceil_mode=True)]
            outputs, height = min(2 * outputs, 8 * width), -(-height // 2)
        layers += _convolution(outputs, outputs, norm)
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(4 * outputs, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(n, channels, height, width) -> logits (n, classes)."""
        logits: torch.Tensor = self.head(self.dropout(self.pool(self.features(images)).flatten(1)))
        return logits


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18Cifar(nn.Module):
    """ResNet-18 (He et al. 2015) with a 3x3 stem and no max-pooling, the usual form for 32x32 images; 11.2 million weights."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_Block(inputs, outputs, stride), _Block(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(n, channels, height, width) -> logits (n, classes)."""
        features = self.blocks(self.stem(images)).mean((2, 3))
        logits: torch.Tensor = self.head(features)
        return logits
