"""A snapshot: the state of training after a step, copied to the CPU.

Training waits until the copy is made, and continues while the copy is written to disk. The next
snapshot reuses the copy's memory. With an accelerator, that memory is pinned, and copies are made
asynchronously, in stream order.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from ddpjob_pod.rank_snapshots import explain_recursion

from ddpjob_trainer.distributed.dtensors import is_sharded, local
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.private_torch import layout_of

Snapshot = dict[str, Any]
"""The training state: a dict of tensors, numbers, strings, and dicts, lists and tuples of these."""

Path = tuple[str | int, ...]

Layout = Callable[[Path, torch.Size], Any]
"""A function that takes a tensor's path in a snapshot and the tensor's whole shape. It returns a
DTensor with the desired layout over the ranks, or None if every rank should have the whole tensor.
"""


def map_tensors(tree: Any, change: Callable[[Path, torch.Tensor], Any], path: Path = ()) -> Any:
    """Return a copy of the tree in which each tensor is replaced by the result of `change`.

    All containers are new, so a later change to the original ones does not affect the result.
    """
    if isinstance(tree, torch.Tensor):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([map_tensors(value, change, (*path, index)) for index, value in enumerate(tree)])
    return tree


_PLAIN = frozenset({type(None), bool, int, float, str})


def check(snapshot: Any) -> None:
    """Raise CheckpointError for a state that torch could save but a resume could not read.

    A resume reads with torch.load(weights_only=True), which refuses most objects, even numpy's.
    Without this check, such an object would be noticed only when a later run resumes.
    """
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("sampler"), dict):
        raise CheckpointError(
            "the state to save must be a dict that contains the sampler's position; add "
            "sampler.state_dict() under the key 'sampler'"
        )
    try:
        _check(snapshot, "")
    except RecursionError:
        raise CheckpointError(explain_recursion(snapshot)) from None


def _check(tree: Any, where: str) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _check(key, f"{where}, a key")
            _check(value, f"{where}[{key!r}]")
    elif type(tree) in (list, tuple, torch.Size):
        for index, value in enumerate(tree):
            _check(value, f"{where}[{index}]")
    elif type(tree) not in _PLAIN and not isinstance(tree, torch.Tensor) and not _can_be_read(tree):
        kind = type(tree)
        raise CheckpointError(
            f"the state to save has a {kind.__module__}.{kind.__qualname__} at state{where}, which a resume"
            " could not read; use tensors, numbers, strings, and dicts, lists and tuples of them,"
            " such as float(x) or torch.as_tensor(x)"
        )


def _can_be_read(value: Any) -> bool:
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception:  # Pickling a value of an arbitrary type can fail in many ways.
        return False
    return True


class Staging:
    """CPU memory that holds one snapshot at a time."""

    def __init__(self) -> None:
        self._memory: dict[Path, torch.Tensor] = {}
        self._events: list[Any] = []

    def take(self, snapshot: Snapshot, *, whole: bool, wanted: bool = True) -> Snapshot:
        """Start copying `snapshot` into this memory, and return the copy.

        The previous copy is overwritten. Call `settle()` before reading the new one. With `whole`,
        all ranks must call this together, because sharded tensors are gathered. Without `whole`,
        each rank copies only its own shards. A rank with `wanted=False` takes part in the
        gathering, but gets an empty copy.
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
            return used[path] if own is tensor else with_local(tensor, used[path])

        taken = map_tensors(snapshot, copy)
        # Each device has its own stream, and a rank can use several devices.
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._memory = used
        return taken if wanted else {}

    def settle(self) -> None:
        """Wait until the copies begun by the last `take` are complete. Any thread may call this."""
        for event in self._events:
            event.synchronize()

    def _buffer(self, path: Path, like: torch.Tensor) -> torch.Tensor:
        known = self._memory.get(path)
        if (
            known is not None
            and known.shape == like.shape
            and known.dtype == like.dtype
            and known.stride() == like.stride()
        ):
            return known
        return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)


def with_local(sharded: Any, local: torch.Tensor) -> Any:
    """Return a CPU DTensor with the layout of `sharded` and with `local` as this rank's shard.

    The mesh of `sharded` may be on a different device.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(local, layout_of(sharded), requires_grad=False)
