"""The state of a script's training, kept in the memory of every node of its DDPJob.

    snapshots = ddpjob_report.Snapshots(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in range(snapshots.step, steps):
        ...
        optimizer.step()
        snapshots.take(step + 1)

A restart continues after the newest step that any node has in memory, instead of after the newest
checkpoint. Each worker copies weights and optimizer state into its node's memory, at most as often
as that takes a hundredth of the time (`recovery.snapshots`). Everything that a rank has for itself
goes to all nodes with each copy: its random generators, the states of schedulers, scalers and
loaders, and buffers that DDP does not synchronize.
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.snapshot_store import SnapshotStore
from ddpjob_pod.snapshots import NONE, Restored, TorchExchange
from ddpjob_pod.snapshots import Snapshots as _Snapshots
from ddpjob_runtime import protocol

from ddpjob_report import link, stop

_OWN_BYTES = 1 << 16
"""An object with more bytes of tensors is part of the state that all ranks share."""


class Snapshots:
    """Keeps the newest states in memory, and restores the newest one at once. All ranks make one.

    Attributes:
        step: steps made by the restored state; 0 if there was none.
        restored: whether there was one. Otherwise load your own checkpoint, if you have one, and
            begin at its step.

    Outside a job, and with `recovery.snapshots: none`, it restores and keeps nothing.
    """

    def __init__(self, **objects: Any) -> None:
        """Restore the objects in place, if any node has their state in memory.

        Make it after the process group, and after the model is wrapped and on its device.

        Args:
            objects: all that have `state_dict()` and `load_state_dict()`, by a name: model,
                optimizer, scheduler, scaler, loader. Ranks give the same names.

        Raises:
            TypeError: an object has no such methods, or a part of the model is sharded (FSDP).
            ValueError: the state in memory does not fit an object; the message names it.
            RuntimeError: the job has several ranks and no process group yet, or a rank is gone.
        """
        for name, thing in objects.items():
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                what = f"{name} needs state_dict() and load_state_dict(), and a {type(thing).__name__} lacks them"
                raise TypeError(f"ddpjob_report.Snapshots: {what}")
        self._objects, self.step, self.restored = objects, 0, False
        self._snapshots: _Snapshots | None = None
        job = JobEnvironment.read()
        # A pod of before or after a change of recovery.snapshots agrees with the others.
        if not objects or not (job.snapshot_folder or (job.coordinator and stop.torch_distributed())):
            return
        self._exchange = _exchange()
        folder = Path(job.snapshot_folder) if job.snapshot_folder else None
        if folder is not None:
            self._check_that_nothing_is_sharded()
        every = job.snapshot_interval if folder else NONE
        order = job.group or (int(job.generation or 0), int(job.round or 0))
        snapshots = _Snapshots(SnapshotStore(folder), self._exchange, order, every)
        found = snapshots.restore()
        if snapshots.is_off:
            return
        self._snapshots = snapshots
        if found is not None:
            self._load(found)
            self.step, self.restored = found.moment.step, True
            self._snapshots.begin(self.step, protocol.MEMORY)
            link.post(self._snapshots.news())

    def take(self, step: int) -> None:
        """Keep the state after `step` steps, if that is due. All ranks call it after each step.

        Raises RuntimeError if a rank is gone, as any collective does.
        """
        if self._snapshots is None:
            return
        if not self._snapshots.start:
            self._snapshots.begin(step - 1, protocol.STORAGE if step > 1 else protocol.SCRATCH)
        self._snapshots.take(step, self._shared, self._own)
        link.post(self._snapshots.news())

    def _shared(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._objects.items() if self._is_shared(name)}

    def _is_shared(self, name: str) -> bool:
        """Whether all ranks have the same state of an object, as of a model under DDP."""
        torch = _torch()
        thing = self._objects[name]
        if isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)):
            return True
        return bool(sum(t.numel() * t.element_size() for t in _tensors(thing.state_dict())) > _OWN_BYTES)

    def _own(self) -> bytes:
        torch = _torch()
        own: dict[str, Any] = {"objects": {}, "buffers": {}, "random": random.getstate()}
        for name, thing in self._objects.items():
            if not self._is_shared(name):
                own["objects"][name] = thing.state_dict()
            elif isinstance(thing, torch.nn.Module) and self._keeps_buffers_of(thing):
                own["buffers"][name] = {key: value.detach().cpu() for key, value in thing.named_buffers()}
        own["torch"] = torch.get_rng_state()
        cuda = torch.cuda
        if cuda.is_available() and cuda.is_initialized():
            own["cuda"] = cuda.get_rng_state()
        if (numpy := sys.modules.get("numpy")) is not None:
            own["numpy"] = numpy.random.get_state()
        return pickle.dumps(own, protocol=4)

    def _keeps_buffers_of(self, module: Any) -> bool:
        """Whether this rank's buffers count. By default DDP broadcasts rank 0's before a step."""
        return self._exchange.world > 1 and (
            self._exchange.rank == 0 or not getattr(module, "broadcast_buffers", False)
        )

    def _load(self, found: Restored) -> None:
        torch = _torch()
        own = _read(found, self._exchange.rank)
        first = own if self._exchange.rank == 0 else _read(found, 0)
        # A rank that has joined since takes what rank 0 had, but not its random numbers.
        states = {**first.get("objects", {}), **own.get("objects", {}), **found.tree}
        for name, thing in self._objects.items():
            if name not in states:
                raise ValueError(
                    f"ddpjob_report.Snapshots: {name} has no state in memory, which has {', '.join(states)}"
                )
            try:
                thing.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"ddpjob_report.Snapshots: the state in memory does not fit {name}: {error}; give the objects as "
                    "before the restart, or set recovery.snapshots: none"
                ) from error
            buffers = own.get("buffers", {}).get(name) or first.get("buffers", {}).get(name) or {}
            for key, buffer in thing.named_buffers() if buffers else ():
                buffer.copy_(buffers[key])
        if "torch" in own:
            random.setstate(own["random"])
            torch.set_rng_state(own["torch"])
            if "cuda" in own and torch.cuda.is_available():
                torch.cuda.set_rng_state(own["cuda"])
            if "numpy" in own and "numpy" in sys.modules:
                sys.modules["numpy"].random.set_state(own["numpy"])

    def _check_that_nothing_is_sharded(self) -> None:
        for name in self._objects:
            if self._is_shared(name) and any(hasattr(t, "full_tensor") for t in _tensors(self._shared()[name])):
                what = f"{name} is sharded over the ranks (FSDP), and only whole states are kept"
                raise TypeError(f"ddpjob_report.Snapshots: {what}; save it by torch.distributed.checkpoint")


def _torch() -> Any:
    """Return torch. A script without it can use the rest of this package."""
    return importlib.import_module("torch")


def _read(found: Restored, rank: int) -> dict[str, Any]:
    content = found.owns.get(rank)
    return pickle.loads(content) if content else {}


def _tensors(tree: Any) -> Iterator[Any]:
    """Yield the tensors in a state dict."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif hasattr(tree, "element_size"):
        yield tree


def _exchange() -> TorchExchange:
    local, locals_ = (
        int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return TorchExchange(local, locals_)
    distributed = stop.torch_distributed()
    if distributed is None:
        raise RuntimeError(
            "ddpjob_report.Snapshots: the job has several ranks and no process group yet; call "
            "torch.distributed.init_process_group() before it"
        )
    return TorchExchange(local, locals_, distributed, stop.gloo_group(distributed))
