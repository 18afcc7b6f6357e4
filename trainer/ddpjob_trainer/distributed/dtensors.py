"""Handles sharded tensors (DTensor) without the slow import of torch.distributed.tensor."""

from __future__ import annotations

from typing import Any

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a DTensor, of which this rank holds only a shard."""
    return hasattr(tensor, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, without a copy. Return any other tensor unchanged."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def spread(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Distribute a whole tensor as a DTensor with the layout of `like`.

    The whole tensor must be the same on every rank.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
