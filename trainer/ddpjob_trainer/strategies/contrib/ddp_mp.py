"""strategy=ddp_mp: each replica's model is spread over several devices of its process.

DDP exchanges the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.data.randomness import derive, seed_torch
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.partition import MetaModel, split, to_sequential
from ddpjob_trainer.strategies.ddp import Ddp


class DdpMp(Ddp):
    """Spreads the model's stages over several devices.

    Each stage's input is moved to the stage's device. The modules of the model and their names do
    not change.
    """

    compiles_step = False
    # Layers draw random numbers on several devices, but `SharedParts` seeds only one device. Ranks
    # therefore cannot share a micro-batch.
    divides = False

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        if config.ddp_mp.devices < 1:
            raise ConfigError(
                f"ddp_mp.devices={config.ddp_mp.devices}: must be at least 1, the number of devices for each process"
            )
        super().__init__(config, group, device)

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this process, one for each of the model's stages."""
        number, kind = self.config.ddp_mp.devices, self.device.type
        if kind == "cpu":
            return [self.device] * number
        first, count = self.device.index, int(getattr(torch, kind).device_count())
        if first + number > count:
            raise ConfigError(
                f"ddp_mp.devices={number}: this process needs {kind} devices {first} to {first + number - 1},"
                f" but {count} are visible; start {count // number} processes per node, or use fewer devices"
                " for each"
            )
        return [torch.device(kind, first + part) for part in range(number)]

    @property
    def waits_apart(self) -> bool:
        """Always False, because the clock measures only one device and the work runs on several."""
        return False

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the stages to their devices, and wrap the model in DDP."""
        layers, devices = to_sequential(model), self.devices
        parts = split(layers, MetaModel(layers).costs(self.shape), len(devices), "ddp_mp.devices")
        for part, device in zip(parts, devices, strict=True):
            for layer in part:
                layer.module.to(device)
            part[0].module.register_forward_pre_hook(_sender(device))
        model.register_forward_hook(lambda _, __, scores: scores.to(self.device))
        return super().wrap(model)

    def seed(self, key: int) -> None:
        """Seed the random generators of all devices that this process uses."""
        super().seed(key)
        for number, device in enumerate(self.devices):
            if device != self.device:
                seed_torch(derive(key, number), device)

    @property
    def device_ids(self) -> None:
        """Return None, because the model is on several devices."""
        return


def _sender(device: torch.device) -> Any:
    """Return a forward pre-hook that moves a module's inputs to a device."""
    return lambda _, inputs: tuple(value.to(device, non_blocking=True) for value in inputs)
