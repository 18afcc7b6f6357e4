"""The model of a case, the same for the trainer and for the loop that it is compared with."""

from __future__ import annotations

from ddpjob_trainer.models import ModelConfig, build_model
from torch import nn

TINY = "tiny"
"""One layer over the image at 4x4 pixels: next to no arithmetic: the input decides, as beside an accelerator that is fast enough."""


def tiny(classes: int) -> nn.Module:
    """For images of any size."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))


def model_of(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """`tiny`, or NAME[:WIDTH] as the trainer knows it."""
    if name == TINY:
        return tiny(classes)
    if name.startswith("small_cnn:"):
        return build_model(ModelConfig(name="small_cnn", width=int(name.partition(":")[2])), shape, classes, 0)
    return build_model(ModelConfig(name=name), shape, classes, 0)


def trainer_arguments(name: str) -> list[str]:
    """The same model for the trainer; `tiny` is put in its place by trained.py."""
    if name == TINY:
        return []
    kind, _, width = name.partition(":")
    return [f"model.name={kind}", f"model.width={width}"] if kind == "small_cnn" else [f"model.name={name}"]
