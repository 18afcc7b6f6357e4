"""strategy=single: one process, one device."""

from __future__ import annotations

import torch

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.strategies.strategy import Strategy


class Single(Strategy):
    """Training in one process, without a group."""

    compiles_step = True

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        if group.world != 1:
            raise ConfigError(
                f"strategy={config.strategy.value} cannot use {group.world} ranks; set strategy=ddp, or start"
                " one process"
            )
        super().__init__(config, group, device)

    @property
    def waits_apart(self) -> bool:
        """True, because there are no other ranks to wait for."""
        return True
