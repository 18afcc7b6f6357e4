"""strategy=single: one process, one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.group import Group
from ddpjob_trainer.strategies.base import Strategy

if TYPE_CHECKING:
    from ddpjob_trainer.config import Config


class Single(Strategy):
    """Nothing is shared."""

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        if group.world != 1:
            raise ConfigError(f"strategy={config.strategy.value}: there are {group.world} ranks; set strategy=ddp, or start one process")
        super().__init__(config, group, device)
