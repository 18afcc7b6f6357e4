"""Weights from which to start fine-tuning (`model.pretrained`), from a library or a file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.checkpoints.compatibility import (
    Tensors,
    check_finite,
    list_differences,
    read_whole,
    share_weights,
    summarize,
    weights_in,
)
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, first_line

_FILES = ("model.safetensors", "pytorch_model.bin", "*.safetensors", "*.bin", "*.pth", "*.pt")
"""Patterns for files with weights in a folder. The first file that matches the earliest pattern is
used.
"""
_OTHER_INPUTS = ("googlenet", "inception_v3")
"""torchvision models whose weights expect pixels to be normalized differently than in the trainer.
"""
_DEFAULT = "default"


def load_pretrained(
    config: ModelConfig, channels: int, model: Tensors, group: Group, alive: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Return, on every rank, {name: tensor} for all weights that fine-tuning of `model` starts
    from.

    Only rank 0 finds the weights, and prints which ones it uses. `alive` is called repeatedly while
    the ranks wait. Raises CheckpointError on every rank if the weights are not found or do not fit.
    """
    return share_weights(lambda: _take(config, channels, model), model, group, alive)


def _take(config: ModelConfig, channels: int, model: Tensors) -> dict[str, torch.Tensor]:
    key, found = f"model.pretrained={config.pretrained}", _find(config, channels)
    # Assume that the last entry of the state dict belongs to the model's last layer. This is true
    # of the models of torchvision and timm.
    head = [*model][-1].rpartition(".")[0]
    fresh = [
        name
        for name, tensor in model.items()
        if name.rpartition(".")[0] == head and (name not in found or found[name].shape != tensor.shape)
    ]
    weights = {name: tensor for name, tensor in found.items() if name not in fresh}
    if wrong := list_differences(weights, {name: it for name, it in model.items() if name not in fresh}):
        raise CheckpointError(
            f"{key} does not fit model.name={config.name}: {summarize(wrong)}. Only the last layer ({head}) may"
            " differ; set model.* to match the weights"
        )
    check_finite(key, config.pretrained, weights)
    new = f"; {', '.join(fresh)} start untrained, because their shapes differ" if fresh else ""
    print(f"{key}: {len(weights)} tensors{new}", flush=True)
    return weights


def _find(config: ModelConfig, channels: int) -> Tensors:
    kind, _, name = config.name.partition(":")
    wanted, key = config.pretrained, f"model.pretrained={config.pretrained}"
    path = Path(wanted).expanduser()
    if path.exists():
        inside = [file for pattern in _FILES for file in sorted(path.glob(pattern))] if path.is_dir() else []
        # If the folder has none of these files, or has checkpoints, read it as a checkpoint folder.
        path = inside[0] if inside and not any(path.glob("step-*")) else path
        return weights_in(read_whole(path, "model.pretrained"), path, average=True, key="model.pretrained")
    if kind not in ("torchvision", "timm"):
        raise CheckpointError(
            f"{key}: no such file or folder; only models of torchvision and timm have weights by name; for other "
            "models, set model.pretrained to a file or folder with a state dict"
        )
    try:
        return _of_torchvision(name, wanted) if kind == "torchvision" else _of_timm(name, wanted, channels)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{key}: the weights of {config.name} cannot be loaded ({first_line(error)}); without internet access, set"
            " this key to a file or folder with these weights"
        ) from error


def _of_torchvision(name: str, wanted: str) -> Tensors:
    import torchvision

    if name in _OTHER_INPUTS:
        raise CheckpointError(
            f"model.pretrained={wanted}: torchvision's weights for {name} need a different normalization of "
            "pixels; set model.pretrained to a file with other weights"
        )
    enum = torchvision.models.get_model_weights(name)
    known = {_DEFAULT: enum.DEFAULT, **{weights.name: weights for weights in enum}}
    if wanted not in known:
        raise CheckpointError(
            f"model.pretrained={wanted}: no such file, and torchvision:{name} has no weights of that name; use"
            f" {' or '.join(known)}"
        )
    state: Tensors = torchvision.models.get_model(name, weights=known[wanted]).state_dict()
    return state


def _of_timm(name: str, wanted: str, channels: int) -> Tensors:
    tag: dict[str, Any] = {} if wanted == _DEFAULT else {"pretrained_cfg": wanted}
    timm = importlib.import_module("timm")
    state: Tensors = timm.create_model(name, pretrained=True, in_chans=channels, **tag).state_dict()
    return state
