"""The private APIs of torch that the trainer replaces or calls, each wrapped in a function.

Any release of torch may rename these APIs. If one of them is missing, a TrainingError names it and
the versions to install. Without this check, there would be an AttributeError or, worse, no error at
all.

    replaced (all since torch 2.6, the oldest supported)
        torch._weights_only_unpickler.UnpicklingError   by a shorter one, at the first import of
                                                        checkpoints/torch_file.py
        torch.distributed.Work.wait                     by a timed version
        ProcessGroup._allgather_base and the like       by timed versions, on GPUs
    called
        Variable._execution_engine.queue_callback       marks the end of a rank's own backward pass
        GradScaler._found_inf_per_device                shares overflow between stages of a pipeline
        DistributedDataParallel._check_reducer_finalized  finds a weight without a gradient
        DTensor._spec                                   makes a shard of a checkpoint's layout
        _BatchNorm._check_input_dim                     refuses inputs as the layer itself would

GradScaler looks for the attribute `optimizer._step_supports_amp_scaling`. A version of torch that
no longer looks for the attribute would skip steps inside fused optimizers.
tests/trainer/optim/test_precision.py would detect this. The launcher has its own module,
`ddpjob_runtime/launcher/torch_parts.py`; neither module is allowed to import the other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddpjob_pod.own_work import COLLECTIVES

from ddpjob_trainer.errors import TrainingError

_LONGEST_MESSAGE = 1000


class _ShortUnpicklingError(pickle.UnpicklingError):
    """An error of torch's restricted unpickler, with a message of at most 1000 characters.

    torch.load searches the message with a regular expression whose time grows with the square of
    the longest word. A 20 kB file kept the CPU busy for eight seconds, and a 1 MB file would take
    hours.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(str(message)[:_LONGEST_MESSAGE])


def shorten_unpickling_errors() -> None:
    """Make torch.load raise errors with short messages for the rest of the process."""
    from torch import _weights_only_unpickler

    _replace(_weights_only_unpickler, "UnpicklingError", lambda _: _ShortUnpicklingError)


def wrap_waits(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method that waits for a collective.

    The replacement lasts for the rest of the process. `wrap` is given the original method, and
    returns the new one.
    """
    _replace(dist.Work, "wait", wrap)


def wrap_collectives(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the methods that begin a collective, if this version of torch has them.

    `wrap` is given an original method, and returns the new one.
    """
    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            _replace(dist.ProcessGroup, name, wrap)


def call_after_backward(act: Callable[[], None]) -> None:
    """Make torch call `act` at the end of the current backward pass.

    If several functions are registered in this way, torch calls them in the order of registration.
    """
    _part(_part(torch.autograd.Variable, "_execution_engine"), "queue_callback")(act)


def find_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return, for each device, whether the scaler has found a non-finite gradient.

    After this call, only the scaler decides whether the optimizer skips a step. Without the call, a
    fused optimizer would decide this itself. If it skipped its first step, SGD's momentum would
    stay uninitialized.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return list(_part(scaler, "_found_inf_per_device")(optimizer).values())


def check_all_reduced(network: torch.nn.parallel.DistributedDataParallel) -> None:
    """Raise RuntimeError if a parameter got no gradient in this step's backward pass."""
    _part(network, "_check_reducer_finalized")()


def check_dimensions(module: torch.nn.Module, values: torch.Tensor) -> None:
    """Raise ValueError if the batch normalization `module` rejects the shape of `values`."""
    _part(module, "_check_input_dim")(values)


def layout_of(sharded: Any) -> Any:
    """Return the layout of a DTensor (mesh, placements and shape)."""
    return _part(sharded, "_spec")


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(_part(owner, name)))


def _part(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        kind = owner if isinstance(owner, type) else type(owner)
        of = getattr(owner, "__name__", f"{kind.__module__}.{kind.__qualname__}")
        raise TrainingError(
            f"torch {torch.__version__} has no {of}.{name}, which the trainer needs; install an earlier torch "
            "(2.6 or later), or a later release of DDPJob"
        )
    return found
