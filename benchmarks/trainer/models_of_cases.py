"""The model of a case, which is the same for the trainer and for the loop it is compared with."""

from __future__ import annotations

from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.model.models import build_model
from torch import nn

TINY = "tiny"
"""One linear layer on the image at 4x4 pixels. It computes so little that the input limits the
speed, as with a fast GPU."""


def tiny(classes: int) -> nn.Module:
    """Return the tiny model, for images of any size."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))


def model_of(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return `tiny`, or the trainer's model NAME[:WIDTH]."""
    if name == TINY:
        return tiny(classes)
    if name.startswith("small_cnn:"):
        return build_model(ModelConfig(name="small_cnn", width=int(name.partition(":")[2])), shape, classes, 0)
    return build_model(ModelConfig(name=name), shape, classes, 0)


def trainer_arguments(name: str) -> list[str]:
    """Return the trainer's arguments for the same model. trained.py substitutes `tiny`."""
    if name == TINY:
        return []
    kind, _, width = name.partition(":")
    return [f"model.name={kind}", f"model.width={width}"] if kind == "small_cnn" else [f"model.name={name}"]
