"""PyTorch's communication hooks, which determine what DDP sends instead of float32 gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.config.sections import CommHook, DdpConfig
from ddpjob_trainer.errors import ConfigError


def check(config: DdpConfig) -> None:
    """Raise ConfigError if settings in the section `ddp` exclude each other or are out of range."""
    if config.comm_hook is CommHook.NONE:
        return
    if config.ordered:
        raise ConfigError(
            f"ddp.comm_hook={config.comm_hook.value} compresses gradients, but ddp.ordered must be bit-exact; set "
            f"ddp.comm_hook=none or ddp.ordered=false"
        )
    if config.comm_hook is CommHook.POWERSGD and config.powersgd_rank < 1:
        raise ConfigError(f"ddp.powersgd_rank={config.powersgd_rank}: must be at least 1, for example 2")
    if config.comm_hook is CommHook.POWERSGD and config.powersgd_start < 2:
        raise ConfigError(
            f"ddp.powersgd_start={config.powersgd_start}: must be at least 2, for example 1000, because"
            " PyTorch's hook"
            " needs whole gradients at first"
        )


def register(network: DistributedDataParallel, config: DdpConfig) -> Callable[[], None] | None:
    """Make DDP send the network's gradients through the hook that `config.comm_hook` names.

    Return a function that clears the hook's state, or None if the hook is stateless. If the
    gradients of a step were not finite, all ranks must call this function after the step.
    Otherwise, the hook's state would not be finite either, and would corrupt the gradients of all
    later steps.
    """
    match config.comm_hook:
        case CommHook.FP16 | CommHook.BF16:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            half = config.comm_hook is CommHook.FP16
            network.register_comm_hook(
                None, default_hooks.fp16_compress_hook if half else default_hooks.bf16_compress_hook
            )
        case CommHook.POWERSGD:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=config.powersgd_rank,
                start_powerSGD_iter=config.powersgd_start,
            )
            network.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

            def forget() -> None:
                for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                    memory.clear()

            return forget
    return None
