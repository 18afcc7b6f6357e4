"""What DistributedDataParallel sends instead of float32 gradients: PyTorch's communication hooks, by name."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.errors import ConfigError

if TYPE_CHECKING:
    from ddpjob_trainer.strategies.ddp import DdpConfig


class CommHook(enum.StrEnum):
    """Hooks by name."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    POWERSGD = "powersgd"


def check(config: DdpConfig) -> None:
    """Raises ConfigError when the options do not go together."""
    if config.comm_hook is CommHook.NONE:
        return
    if config.ordered:
        raise ConfigError(
            f"ddp.comm_hook={config.comm_hook.value}: shortens what ranks send, and ddp.ordered keeps it to the bit;"
            f" set ddp.comm_hook=none or ddp.ordered=false"
        )
    if config.comm_hook is CommHook.POWERSGD and config.powersgd_rank < 1:
        raise ConfigError(f"ddp.powersgd_rank: {config.powersgd_rank} is less than 1; write for example 2")
    if config.comm_hook is CommHook.POWERSGD and config.powersgd_start < 2:
        raise ConfigError(
            f"ddp.powersgd_start: {config.powersgd_start} is less than 2, and PyTorch's hook needs whole gradients at first;"
            f" write for example 1000"
        )


def register(network: DistributedDataParallel, config: DdpConfig) -> None:
    """Have the network's gradients sent as `config.comm_hook` says."""
    match config.comm_hook:
        case CommHook.FP16 | CommHook.BF16:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            half = config.comm_hook is CommHook.FP16
            network.register_comm_hook(None, default_hooks.fp16_compress_hook if half else default_hooks.bf16_compress_hook)
        case CommHook.POWERSGD:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=config.powersgd_rank,
                start_powerSGD_iter=config.powersgd_start,
            )
            network.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
