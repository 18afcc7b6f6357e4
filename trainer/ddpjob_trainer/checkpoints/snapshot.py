"""A snapshot: the state of training after a step, copied to the CPU so that training can go on while it is written.

The copy is all that training waits for. Its memory is used again by the next one; on an accelerator it is pinned, and the copies run in
the stream's order, so that not even they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddpjob_trainer.dtensors import is_sharded, local

Snapshot = dict[str, Any]
"""Tensors, numbers, text and dicts, lists and tuples of them."""

Path = tuple[str | int, ...]


def map_tensors(tree: Any, change: Callable[[Path, torch.Tensor], Any], path: Path = ()) -> Any:
    """A tree of the same shape with other tensors; containers are new, so that what training changes later does not show."""
    if isinstance(tree, torch.Tensor):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([map_tensors(value, change, (*path, index)) for index, value in enumerate(tree)])
    return tree


class Staging:
    """The memory on the CPU that holds one snapshot at a time."""

    def __init__(self) -> None:
        self._memory: dict[Path, torch.Tensor] = {}
        self._events: list[Any] = []

    def take(self, snapshot: Snapshot, *, whole: bool, wanted: bool = True) -> Snapshot:
        """A copy of `snapshot`; the one before it is gone. `settle()` before it is read.

        `whole`: tensors that are spread over ranks are put together, by all ranks at once; else each keeps its own part. A rank that does
        not want the copy takes part without making one, and gets an empty one.
        """
        used: dict[Path, torch.Tensor] = {}
        devices: set[torch.device] = set()

        def copy(path: Path, tensor: torch.Tensor) -> Any:
            tensor = tensor.detach()
            if is_sharded(tensor) and whole:
                tensor = tensor.full_tensor()  # type: ignore[attr-defined]
            if not wanted:
                return None
            own = local(tensor)
            used[path] = self._buffer(path, own)
            used[path].copy_(own, non_blocking=own.is_cuda)
            if own.is_cuda:
                devices.add(own.device)
            return used[path] if own is tensor else _with_local(tensor, used[path])

        taken = map_tensors(snapshot, copy)
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]  # A rank may have several devices.
        self._memory = used
        return taken if wanted else {}

    def settle(self) -> None:
        """Wait until the copies of the last `take` are complete; from any thread."""
        for event in self._events:
            event.synchronize()

    def _buffer(self, path: Path, like: torch.Tensor) -> torch.Tensor:
        known = self._memory.get(path)
        if known is not None and known.shape == like.shape and known.dtype == like.dtype and known.stride() == like.stride():
            return known
        return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)


def _with_local(sharded: Any, local: torch.Tensor) -> Any:
    """A DTensor of the same place in the whole, whose part is `local` on the CPU, whatever device its mesh has."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, sharded._spec, requires_grad=False)
