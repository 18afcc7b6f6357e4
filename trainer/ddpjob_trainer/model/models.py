"""Models: a small CNN, ResNet-18 for CIFAR, models from torchvision and timm, and the user's own.

The small CNN adapts to the image size. The user's own model comes from a function that the
configuration names.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddpjob_trainer.config import patterns
from ddpjob_trainer.config.sections import AmpConfig, AmpLevel, MemoryLayout, ModelConfig, NormName
from ddpjob_trainer.data.randomness import seed_draws
from ddpjob_trainer.errors import ConfigError, TrainerError, first_line
from ddpjob_trainer.model.airbench import Airbench
from ddpjob_trainer.own_functions import load_function


def build_model(
    config: ModelConfig, shape: tuple[int, ...], classes: int, seed: int, device: torch.device | None = None
) -> nn.Module:
    """Return the network that the configuration names, on `device`.

    The network takes images of `shape` (channels, height, width). The initial weights depend only
    on `seed`. Raises ConfigError.
    """
    if config.channels_last is True and len(shape) != 3:
        raise ConfigError(
            "model.channels_last needs images (channels, height, width), but the data's samples have "
            f"the shape {shape}; leave out model.channels_last"
        )
    torch.manual_seed(seed)
    device = device or torch.device("cpu")
    # A user's function may also draw from Python's and numpy's generators, so seed these
    # generators, too. For other models, do not load numpy.
    with seed_draws(seed) if is_own(config) else nullcontext():
        model = _network(config, shape, classes).to(device)
    if config.zero_init_residual:
        for normalization in _last_normalizations(model, config, "zero_init_residual"):
            nn.init.zeros_(normalization.get_parameter("weight"))
    if config.drop_path:
        _drop_paths(model, config)
    if config.freeze:
        _freeze(model, config)
    if config.compile:
        _check_compiler()
    if config.channels_last is True:
        model = model.to(memory_format=torch.channels_last)
        model.register_forward_pre_hook(
            lambda _, inputs: tuple(images.contiguous(memory_format=torch.channels_last) for images in inputs)
        )
    if not config.sync_batchnorm:
        return model
    from ddpjob_trainer.model.sync_batchnorm import synchronize

    model = synchronize(model, device)
    if is_tied_to_micro_batches(model):
        random = "uses dropout, which drops different inputs"
        if getattr(model, _OWN, False):
            random = "may draw random numbers in its forward pass, which differ"
        path = "model.drop_path, or " if config.drop_path else ""
        raise ConfigError(
            f"model.sync_batchnorm: {config.name} {random} on a different number of ranks; leave out "
            f"{path}model.sync_batchnorm (each micro-batch then has its own statistics, on any number of ranks), "
            "or use a model without dropout"
        )
    return model


def choose_layout(config: ModelConfig, amp: AmpConfig, shape: tuple[int, ...], device: torch.device) -> ModelConfig:
    """Return the configuration with a definite memory layout in place of `auto`.

    `amp.level` must already be resolved.
    """
    if config.channels_last is not MemoryLayout.AUTO:
        return config
    fits = device.type == "cuda" and amp.level is not AmpLevel.O0 and len(shape) == 3 and not is_own(config)
    return replace(config, channels_last=fits)


def _freeze(model: nn.Module, config: ModelConfig) -> None:
    """Freeze the parameters named in model.freeze.

    Raises ConfigError if a pattern does not match any parameter, or if no parameter is left to
    train.
    """
    parameters = dict(model.named_parameters())
    for pattern in config.freeze:
        for name in patterns.select("model.freeze", pattern, parameters, config.name):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "model.freeze: no parameter is left to train; leave out the patterns that match the last layer"
        )


_LAST_NORMALIZATION = {"Bottleneck": "bn3", "BasicBlock": "bn2", "_Block": "bn2"}
"""Maps the class name of a residual block, in torchvision or in this file, to the name of the
block's last normalization."""


def _last_normalizations(model: nn.Module, config: ModelConfig, key: str) -> list[nn.Module]:
    """Return the last normalization of each residual block.

    Raises ConfigError for a model without such blocks.
    """
    last = [
        getattr(module, attribute)
        for module in model.modules()
        if (attribute := _LAST_NORMALIZATION.get(type(module).__name__)) and hasattr(module, attribute)
    ]
    if not last:
        raise ConfigError(
            f"model.{key}: {config.name} has no ResNet residual blocks; remove this key, or set model.name to a"
            " ResNet such as torchvision:resnet50"
        )
    return last


def _drop_paths(model: nn.Module, config: ModelConfig) -> None:
    """Add stochastic depth after the last normalization of each residual block, as timm does.

    Raises ConfigError.
    """
    from torchvision.ops import StochasticDepth

    if not 0 < config.drop_path < 1:
        raise ConfigError(f"model.drop_path={config.drop_path}: must be a probability below 1, for example 0.05")
    last = _last_normalizations(model, config, "drop_path")
    for number, normalization in enumerate(last):
        share = number / (len(last) - 1) if len(last) > 1 else 1.0
        normalization.add_module("drop_path", StochasticDepth(config.drop_path * share, "row"))
        normalization.register_forward_hook(_drop_path)


def _drop_path(normalization: nn.Module, _: Any, outputs: torch.Tensor) -> torch.Tensor:
    """Apply stochastic depth to the output of a normalization, in a forward hook.

    A wrapper would change the names of the weights in files, but a hook does not. The hook finds
    the layer through its argument, so in a copy of the model, it calls the copy's own layer.
    """
    kept: torch.Tensor = normalization.get_submodule("drop_path")(outputs)
    return kept


def _check_compiler() -> None:
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"model.compile: no C++ compiler ({', '.join(names)}) is installed; install g++, set CXX "
            "to a compiler, or set model.compile=false"
        )


def _network(config: ModelConfig, shape: tuple[int, ...], classes: int) -> nn.Module:
    kind, _, name = config.name.partition(":")
    if len(shape) != 3 and (not name or kind in ("torchvision", "timm")):
        raise ConfigError(
            f"model.name={config.name} needs images (channels, height, width), but the data's samples have the shape"
            f" {shape}; use your own model, model.name=package.module:function"
        )
    if config.name == "small_cnn":
        if config.width < 4 or config.width % 4:
            raise ConfigError(f"model.width={config.width}: must be a positive multiple of 4, for example 32")
        if not 0 <= config.dropout < 1:
            raise ConfigError(f"model.dropout={config.dropout}: must be a probability below 1, for example 0.1")
        return SmallCnn(shape, classes, config)
    if config.name == "resnet18_cifar":
        return ResNet18Cifar(shape[0], classes)
    if config.name == "airbench_cifar":
        return Airbench(shape, classes, config.width)
    if kind == "torchvision" and name:
        return _torchvision_model(name, shape, classes)
    if kind == "timm" and name:
        return _timm_model(name, shape, classes)
    if name:
        return _own_model(config.name, shape, classes)
    near = difflib.get_close_matches(
        config.name, ["small_cnn", "resnet18_cifar", "airbench_cifar", "torchvision:resnet50"], n=1, cutoff=0.4
    )
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"model.name: {config.name!r} is unknown; use small_cnn, resnet18_cifar, airbench_cifar, torchvision:NAME,"
        f" timm:NAME or package.module:function{hint}"
    )


def is_own(config: ModelConfig) -> bool:
    """Return whether the configuration names a user's function that builds the model."""
    kind, colon, _ = config.name.partition(":")
    return bool(colon) and kind not in ("torchvision", "timm")


def is_tied_to_micro_batches(model: nn.Module) -> bool:
    """Return whether, in training, a sample's output depends on random numbers or other samples."""
    return any(ties_samples(module) for module in model.modules())


def ties_samples(module: nn.Module) -> bool:
    """Return whether a layer's output for a sample depends on random numbers or on other samples.

    For the outermost module of a user's model, the result is always True, because the module's
    forward method may call functions that are not modules.
    """
    if getattr(module, _OWN, False):
        return True
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(module, _BatchNorm):
        return not hasattr(module, "is_synchronized") and not isinstance(module, nn.SyncBatchNorm)
    if isinstance(module, _DropoutNd):
        return module.p > 0
    random = ("dropout", "p", "drop_prob") if type(module).__name__ in RANDOM_PATHS else ("dropout",)
    return any(isinstance(share := getattr(module, name, 0), float) and share > 0 for name in random)


def needs_two_samples(
    config: ModelConfig, shape: tuple[int, ...], classes: int, early: tuple[int, ...] | None = None
) -> bool:
    """Return whether training fails on a micro-batch of one sample.

    Training fails if a normalization needs more than one value per channel, but the maps that reach
    it have shrunk to one pixel. If images grow to `shape` in later epochs, `early` is their shape
    in this epoch. The check uses meta tensors, so it does not compute any values.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    with torch.device("meta"):
        try:
            model = _network(config, shape, classes).train()
            if any(isinstance(module, _BatchNorm) for module in model.modules()):
                model(torch.empty(1, *(early or shape)))
        except Exception as error:  # The model may need values, which meta tensors do not have.
            return "more than 1 value per channel" in str(error)
    return False


def check_image_size(config: ModelConfig, shape: tuple[int, ...], classes: int, key: str) -> None:
    """Raise ConfigError if a model from torchvision or timm cannot process images of `shape`.

    The message names `key`, the setting for the image size. `key` is empty if there is no such
    setting.
    """
    if is_own(config) or ":" not in config.name:
        return
    try:
        with torch.device("meta"):
            _network(config, shape, classes).eval()(torch.empty(1, *shape))
        return
    except Exception:
        # Some models need values, which meta tensors do not have.
        model = _network(config, shape, classes).eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *shape))
    except Exception as error:
        remedy = f"set {key} to the size that the model expects, such as 224, or use" if key else "take"
        raise ConfigError(
            f"model.name={config.name} cannot take images of {' x '.join(map(str, shape[1:]))}"
            f" ({first_line(error).rstrip('.')}); {remedy} another model, such as resnet18_cifar"
        ) from error


@contextmanager
def explain_image_size(config: ModelConfig, shape: tuple[int, ...], classes: int, key: str) -> Iterator[None]:
    """Run a model's first forward pass within this context.

    If the pass fails, `check_image_size` finds out whether the image size is the cause. The check
    takes time, so it runs only after a pass has failed.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception:
        check_image_size(config, shape, classes, key)
        raise


def _torchvision_model(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean torchvision:{near[0]}?" if near else ""
        raise ConfigError(f"model.name: torchvision has no classification model {name!r}{hint}")
    if shape[0] != 3:
        raise ConfigError(
            f"model.name=torchvision:{name}: torchvision's models need images with 3 channels, but the data's"
            f" have {shape[0]}; use small_cnn, resnet18_cifar, timm:NAME or your own model"
        )
    # Without this argument, googlenet and inception_v3 would also return the scores of their
    # auxiliary heads.
    plain = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **plain)
    return model


def _timm_model(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise ConfigError(f"model.name=timm:{name}: timm cannot be imported ({error}); run pip install timm") from error
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=shape[0])
    except RuntimeError as error:
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean timm:{near[0]}?" if near else ""
        raise ConfigError(f"model.name: timm cannot create {name!r} ({error}){hint}") from error
    return model


_OWN = "_ddpjob_own_model"
_WIDE = (torch.float64, torch.complex64, torch.complex128)
RANDOM_PATHS = ("StochasticDepth", "DropPath")
"""Class names of the layers in torchvision and timm that drop a branch at random."""


def _own_model(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model that the user's `package.module:function` builds from (shape, classes)."""
    build = load_function("model.name", name, ["torchvision", "timm"])
    model = build(shape, classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name={name} returned {type(model).__name__}; return a torch.nn.Module from"
            " function(shape, classes), whose output for images (n, channels, height, width) is (n, classes)"
        )
    values = itertools.chain(model.named_parameters(), model.named_buffers())
    if lazy := next((own for own, value in values if is_lazy(value)), None):
        raise ConfigError(
            f"model.name={name}: {lazy} belongs to a Lazy layer and has no shape before the first "
            "forward pass, so checkpoints cannot be loaded; call the model once before returning it: "
            "model(torch.zeros(2, *shape))"
        )
    trained = {own: weight for own, weight in model.named_parameters() if weight.requires_grad}
    if not trained:
        raise ConfigError(f"model.name={name} has no parameter to train; set requires_grad of at least one")
    if wide := next((own for own, weight in trained.items() if weight.dtype in _WIDE), None):
        raise ConfigError(
            f"model.name={name}: {wide} is {trained[wide].dtype}, but training computes in float32 or "
            "a smaller type; return model.float()"
        )
    if extra := next((own for own, value in model.state_dict().items() if not isinstance(value, torch.Tensor)), None):
        raise ConfigError(
            f"model.name={name}: {extra} in its state dict is not a tensor, so a run could not resume; return a tensor"
            " from get_extra_state, or keep the value in a buffer"
        )
    setattr(model, _OWN, True)
    # A user's function often returns a pretrained model in evaluation mode. Training must not begin
    # in evaluation mode, because the model would leave this mode only at the end of the first
    # evaluation.
    return model.train()


def _convolution(inputs: int, outputs: int, norm: NormName) -> list[nn.Module]:
    # GroupNorm computes statistics of single samples, so gradients do not depend on how a batch is
    # divided.
    normalized = nn.GroupNorm(4, outputs) if norm is NormName.GROUP else nn.BatchNorm2d(outputs)
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), normalized, nn.ReLU(inplace=True)]


class SmallCnn(nn.Module):
    """3x3 convolutions, max-pooling and a linear layer.

    Pooling halves the image until its shorter side is at most 4.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, config: ModelConfig) -> None:
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
        """Compute logits (n, classes) from images (n, channels, height, width)."""
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
    """ResNet-18 (He et al. 2015) with a 3x3 stem and no max-pooling, as usual for 32x32 images.

    The model has 11.2 million weights.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_Block(inputs, outputs, stride), _Block(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute logits (n, classes) from images (n, channels, height, width)."""
        features = self.blocks(self.stem(images)).mean((2, 3))
        logits: torch.Tensor = self.head(features)
        return logits
