"""Keeps the state of a script's training in the memory of every node of its DDPJob.

    snapshots = ddpjob_report.Snapshots(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in range(snapshots.step, steps):
        ...
        optimizer.step()
        snapshots.take(step + 1)

After a restart, training continues from the latest state that any node has in memory, instead of
from the newest checkpoint. Each node copies weights and optimizer state into its memory, as often
as it can in at most a hundredth of the training time (`recovery.snapshots`). With each copy, every
rank sends its private state to all nodes. This state consists of random generators, the states of
schedulers, scalers and loaders, and buffers that DDP does not synchronize.
"""

from __future__ import annotations

import array
import contextlib
import operator
import os
import pickle
import random
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.rank_snapshots import NONE, RankSnapshots, Restored, TorchExchange, explain_recursion
from ddpjob_pod.snapshot_store import SnapshotStore
from ddpjob_runtime import protocol

from ddpjob_report import link, stop

_OWN_BYTES = 1 << 16
"""Maximum total size of the tensors in an object's private state, in bytes. An object with larger
tensors belongs to the state that all ranks share.
"""
_SHARDING = {"FullyShardedDataParallel": "FSDP", "ZeroRedundancyOptimizer": "ZeRO", "ShardedTensor": "FSDP"}


class Snapshots:
    """Keeps the latest states in memory, and restores the latest one when the object is created.

    All ranks must create a `Snapshots` object.

    Attributes:
        step: number of steps completed in the restored state; 0 if no state was restored. If you
            load a checkpoint of your own afterwards, set `step` to the checkpoint's step, and begin
            your loop there.
        restored: whether a state in memory was restored.

    Outside a job, and with `recovery.snapshots: none`, the object neither restores nor keeps
    states.
    """

    _current: weakref.ref[Snapshots] | None = None
    """The object that currently keeps states in the node's memory; None before the first such
    object.
    """

    def __init__(self, *unnamed: Any, **objects: Any) -> None:
        """Restore the state of these objects in place, if any node has it in memory.

        Create this object once the process group exists and the model is on its device. The model
        may be wrapped (DistributedDataParallel, torch.compile) before or afterwards.

        Args:
            unnamed: must be empty, because every object needs a name.
            objects: all objects whose state is to be kept, by name: model, optimizer, scheduler,
                scaler, loader. Each must have `state_dict()` and `load_state_dict()`. All ranks
                must use the same names. Models, optimizers and objects with more than 64 KiB of
                tensors must have the same state on all ranks. Other objects may have different
                states.

        Raises:
            TypeError: an object has no name, lacks one of these methods, or is sharded (FSDP,
                ZeRO).
            ValueError: the state in memory does not fit an object, or ranks use different names;
                the message lists them.
            RuntimeError: the job has several ranks but no process group yet, a `Snapshots` object
                already exists, or a rank is gone.
        """
        _check(unnamed, objects)
        self._objects, self.step, self.restored = objects, 0, False
        self._snapshots: RankSnapshots | None = None
        self._last: int | None = None
        self._large: dict[str, Any] = {}
        job = JobEnvironment.read()
        if not objects or not job.may_have_snapshots or not (job.snapshot_folder or stop.torch_distributed()):
            return
        if Snapshots._current is not None and Snapshots._current() is not None:
            what = "an instance already exists, and both would write to the same memory"
            raise RuntimeError(f"ddpjob_report.Snapshots: {what}; pass all objects to one instance")
        if job.snapshot_folder:
            self._refuse_shards()
        self._exchange = current_exchange()
        given = {names.decode() for names in self._exchange.gather_bytes(", ".join(sorted(objects)).encode())}
        if len(given) > 1:
            what = f"all ranks must pass the same names, but they pass {' or '.join(sorted(given))}"
            raise ValueError(f"ddpjob_report.Snapshots: {what}; save the other objects in your own checkpoint")
        snapshots = open_memory(job, self._exchange)
        found = snapshots.restore(views=True)
        if snapshots.is_off:
            return
        self._snapshots = snapshots
        self._settle_early()
        if found is not None:
            self._load(found)
            self.step, self.restored = found.moment.step, True
            self._begin(self.step, protocol.MEMORY)
        Snapshots._current = weakref.ref(self)

    def take(self, step: int) -> None:
        """Keep the state after `step` steps in memory, if a copy is due. All ranks must call this.

        Call this after each step of the optimizer, the scheduler and the scaler. A second call with
        the same step does nothing. So if gradients accumulate over several batches, you can still
        call this after each batch, and the state is kept directly after each optimizer step.

        Args:
            step: number of optimizer steps since training began, including steps before a restart.

        Raises:
            TypeError: `step` is not a whole number, an object is sharded, or a state cannot be
                pickled.
            ValueError: `step` is lower than in the last call.
            RuntimeError: a rank is gone.
        """
        number, is_first = self._checked(step), self._last is None
        if number == (self.step if is_first else self._last):
            return
        self._last = number
        if self._snapshots is None:
            return
        if is_first:
            self._refuse_shards()  # The model may have been wrapped since this object was created, so check again.
            at = self.step or number - 1
            if self._snapshots.start.get("step") != at:
                self._begin(at, protocol.STORAGE if at else protocol.SCRATCH)
        self._snapshots.take(number, self._shared, self._own)
        self._large = {}
        link.post(self._snapshots.news())

    def _settle_early(self) -> None:
        """Let each optimizer complete the last copy before it takes a step, so that `take` need not
        wait for the copy.
        """
        import torch

        assert self._snapshots is not None
        settle = self._snapshots.settle
        for thing in self._objects.values():
            # A wrapper around an optimizer may lack such hooks.
            if isinstance(thing, torch.optim.Optimizer) and hasattr(thing, "_optimizer_step_pre_hooks"):
                thing.register_step_pre_hook(lambda *_: settle())
                self._snapshots.settles_early = True

    def _begin(self, step: int, source: str) -> None:
        assert self._snapshots is not None
        self._snapshots.begin(step, source)
        link.post(self._snapshots.news())

    def _checked(self, step: Any) -> int:
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if number < 0 or isinstance(step, bool):
            what = "must be the number of steps completed so far, at least 0"
            raise TypeError(f"ddpjob_report.Snapshots: take({step!r:.40}): {what}")
        if number < (self.step if self._last is None else self._last):
            if self._last is None:
                what = f"training continues from step {self.step}, which was restored from memory"
                remedy = "start the loop at snapshots.step, or set snapshots.step to the step of your checkpoint"
            else:
                what = f"the step must not decrease, but the last one was {self._last}"
                remedy = "count the steps since training started, over all epochs"
            raise ValueError(f"ddpjob_report.Snapshots: take({number}): {what}; {remedy}")
        return number

    def _shared(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks. It is needed only on ranks that keep
        states.
        """
        alike = {name: bare(thing).state_dict() for name, thing in self._objects.items() if _is_alike(thing)}
        return {**alike, **self._large}

    def _own(self) -> bytes:
        """Return this rank's private state, pickled.

        A state with large tensors is left out and added to `_large`, because it counts as shared.
        """
        import torch

        objects: dict[str, Any] = {}
        own: dict[str, Any] = {"objects": objects, "buffers": {}, **generators()}
        for name, thing in self._objects.items():
            if not _is_alike(thing):
                state = thing.state_dict()
                try:
                    large = sum(getattr(tensor, "nbytes", 0) for tensor in tensors_of(state)) > _OWN_BYTES
                except RecursionError:
                    raise TypeError(f"ddpjob_report.Snapshots: {name}: {explain_recursion(state)}") from None
                (self._large if large else objects)[name] = state
            elif isinstance(thing, torch.nn.Module) and self._keeps_buffers_of(thing):
                own["buffers"][name] = {key: value.detach().cpu() for key, value in bare(thing).named_buffers()}
        try:
            return pickle.dumps(own, protocol=4)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            names = ", ".join(name for name, state in objects.items() if not _is_picklable(state))
            what = f"state_dict() of {names} contains a value that cannot be pickled ({error})"
            raise TypeError(
                f"ddpjob_report.Snapshots: {what}; remove that value from the state, or leave {names} out"
            ) from error

    def _keeps_buffers_of(self, module: Any) -> bool:
        """Whether this rank keeps its own copy of the module's buffers.

        If there are several ranks, rank 0 keeps a copy. Each of the other ranks also keeps one,
        unless DDP broadcasts rank 0's buffers before each step.
        """
        return self._exchange.world > 1 and (
            self._exchange.rank == 0 or not getattr(module, "broadcast_buffers", False)
        )

    def _load(self, found: Restored) -> None:
        own = _read(found, self._exchange.rank)
        first = own if self._exchange.rank == 0 else _read(found, 0)
        # A rank that did not exist when the state was kept gets the states of rank 0, but keeps its
        # own random generators.
        states = {**first.get("objects", {}), **own.get("objects", {}), **found.tree}
        for name, thing in self._objects.items():
            inner = bare(thing)
            remedy = "pass the same objects as before the restart, or set recovery.snapshots: none"
            if name not in states:
                what = f"memory contains the state of {', '.join(sorted(states))}, but not of {name}"
                raise ValueError(f"ddpjob_report.Snapshots: {what}; {remedy}")
            try:
                inner.load_state_dict(_for_loading(inner, states[name]))
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                what = f"the state in memory does not fit {name}: {error}"
                raise ValueError(f"ddpjob_report.Snapshots: {what}; {remedy}") from error
            buffers = own.get("buffers", {}).get(name) or first.get("buffers", {}).get(name) or {}
            for key, buffer in inner.named_buffers() if buffers else ():
                buffer.copy_(buffers[key])
        if "torch" in own:
            set_generators(own)

    def _refuse_shards(self) -> None:
        for name, thing in self._objects.items():
            if sharding := sharding_of(thing):
                what = f"{name} is sharded over the ranks ({sharding}), but only whole states can be kept"
                raise TypeError(f"ddpjob_report.Snapshots: {what}; save it with torch.distributed.checkpoint instead")


def open_memory(job: JobEnvironment, exchange: TorchExchange, *, together: bool = False) -> RankSnapshots:
    """Open the node's memory for this rank.

    With `together`, all ranks must call the function that makes the state, even if only some of
    them keep it.
    """
    folder = Path(job.snapshot_folder) if job.snapshot_folder else None
    every = job.snapshot_interval if folder else NONE
    return RankSnapshots(SnapshotStore(folder), exchange, job.order, every, together=together)


def sharding_of(thing: Any) -> str:
    """Return the name of the method that shards a model or an optimizer over the ranks; empty if
    none does.
    """
    import torch

    parts: list[Any] = [thing]
    if isinstance(thing, torch.nn.Module):
        parts += [*thing.modules(), *thing.parameters(), *thing.buffers()]
    elif isinstance(thing, torch.optim.Optimizer):
        parts += [parameter for group in thing.param_groups for parameter in group["params"]]
    for part in parts:
        for kind in type(part).__mro__:
            if kind.__name__ in _SHARDING:
                return _SHARDING[kind.__name__]
        if hasattr(part, "full_tensor"):
            return "DTensor"
    return ""


def generators() -> dict[str, Any]:
    """Return the states of this rank's random generators, in the form that `set_generators` takes.

    The states are bytes. If they were tensors and lists of numbers, pickling them would take longer
    than the rest of a copy.
    """
    import torch

    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"random": (version, array.array("I", words).tobytes(), gauss)}
    states["torch"] = torch.get_rng_state().numpy().tobytes()
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        states["cuda"] = cuda.get_rng_state().numpy().tobytes()
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Set the random generators to these states: `random` and `torch`, and also `cuda` and `numpy`
    if the process uses them.
    """
    import torch

    version, words, gauss = states["random"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _check(unnamed: tuple[Any, ...], objects: dict[str, Any]) -> None:
    """Raise TypeError if an object has no name, or if it cannot return and load a state dict."""
    if unnamed or not objects:
        what = "pass objects by name, as in Snapshots(model=model, optimizer=optimizer)"
        raise TypeError(f"ddpjob_report.Snapshots: {what}")
    for name, thing in objects.items():
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            what = f"{name} must have state_dict() and load_state_dict(), but a {type(thing).__name__} does not"
            remedy = "skip the first batches yourself, or use torchdata's StatefulDataLoader"
            is_loader = hasattr(thing, "batch_sampler")
            raise TypeError(f"ddpjob_report.Snapshots: {what}; {remedy if is_loader else 'leave it out'}")


def _is_alike(thing: Any) -> bool:
    """Whether this object is a model or an optimizer. Their state is the same on all ranks."""
    import torch

    return isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))


def bare(thing: Any) -> Any:
    """Return the module without its wrappers (DDP, torch.compile).

    A wrapper would change the names in the module's state, and can be absent after a restart. For
    example, a job with one rank does not use DDP, but may have two ranks after a restart.
    """
    import torch

    while isinstance(thing, torch.nn.Module):
        if isinstance(thing, torch.nn.parallel.DistributedDataParallel):
            thing = thing.module
        elif isinstance(inner := thing._modules.get("_orig_mod"), torch.nn.Module):
            thing = inner
        else:
            break
    return thing


def _for_loading(thing: Any, state: Any) -> Any:
    """Return a state that an object can keep. `state` consists of views that are valid only until
    the next copy.

    A module copies the values of its parameters and buffers, so the views of these are returned
    unchanged. All other tensors are cloned here, because an object may keep them, as optimizers do.
    """
    import torch

    def copied(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: copied(value) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(copied(value) for value in node)
        return node.clone() if isinstance(node, torch.Tensor) else node

    if not isinstance(thing, torch.nn.Module) or not isinstance(state, dict):
        return copied(state)
    own = {
        name
        for name, _ in (*thing.named_parameters(remove_duplicate=False), *thing.named_buffers(remove_duplicate=False))
    }
    return {name: value if name in own else copied(value) for name, value in state.items()}


def _is_picklable(state: Any) -> bool:
    with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
        pickle.dumps(state, protocol=4)
        return True
    return False


def _read(found: Restored, rank: int) -> dict[str, Any]:
    content = found.owns.get(rank)
    return pickle.loads(content) if content else {}


def tensors_of(tree: Any) -> Iterator[Any]:
    """Yield all tensors and arrays in a state dict, at any depth."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_of(value)
    elif hasattr(tree, "nbytes"):
        yield tree


def current_exchange() -> TorchExchange:
    """Return the exchange between the ranks of the process group, or one for this process alone.

    Raises RuntimeError if the job has several ranks but no process group yet.
    """
    local, locals_ = (
        int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return TorchExchange(local, locals_)
    distributed = stop.torch_distributed()
    if distributed is None:
        raise RuntimeError(
            "ddpjob_report.Snapshots: the job has several ranks, but no process group yet; call "
            "torch.distributed.init_process_group() first"
        )
    return TorchExchange(local, locals_, distributed, stop.gloo_group(distributed))
