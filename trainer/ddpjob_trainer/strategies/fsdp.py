"""strategy=fsdp: each rank keeps a shard of every weight and of its optimizer state (FSDP2).

The ranks gather the weights of one block at a time, when they compute this block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import AmpLevel
from ddpjob_trainer.distributed.dtensors import is_sharded, spread
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.precision import Precision
from ddpjob_trainer.strategies.strategy import State, Strategy, refuse_scalars, require_torch


class Fsdp(Strategy):
    """Applies PyTorch's fully_shard to each block of the model, and then to the rest of the model.

    A group of one rank does not need fully_shard.
    """

    equal = True  # Each forward pass gathers weights from all ranks.
    divides = True

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        super().__init__(config, group, device)
        self.recomputes = config.fsdp.recompute
        if self.recomputes and config.model.sync_batchnorm:
            raise ConfigError(
                "fsdp.recompute: model.sync_batchnorm exchanges statistics in the forward pass, which cannot be"
                " repeated; leave out one of the two"
            )
        if group.world > 1:
            if device.type == "cpu":
                # Before torch 2.7, FSDP2 needs streams that support events, and the CPU has no such
                # streams.
                require_torch("2.7", "strategy=fsdp on the CPU")
            self.precision = _Precision(config.amp, config.optim.clip_norm, device)

    @property
    def waits_apart(self) -> bool:
        """Whether the clock can distinguish a rank's own work from its waits for weights."""
        return self.clock.sees_waits or self.group.world == 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """Convert the module's parameters to DTensors, and return the same module."""
        if self.recomputes:
            for block in blocks(model):
                block.forward = partial(_recomputed, block.forward)
        if self.group.world == 1:
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        refuse_scalars(model, "fsdp")
        self.precision.over_parts = self.group.sum
        for parameter in model.parameters():
            # fully_shard refuses weights in channels_last, but images and activations may use it.
            parameter.data = parameter.data.contiguous()
        mesh = init_device_mesh(self.device.type, (self.group.world,))
        gathered = MixedPrecisionPolicy()
        # Classes of layers that compute with float32 weights, while all other layers use amp.dtype.
        whole: tuple[type[nn.Module], ...] = ()
        if self.config.amp.level is AmpLevel.O2:
            whole = (_BatchNorm,)
        elif self.config.amp.level is AmpLevel.O1 and self.config.fsdp.short_gathers:
            whole = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
        if whole:
            gathered = MixedPrecisionPolicy(param_dtype=self.precision.dtype, reduce_dtype=torch.float32)
        plain = MixedPrecisionPolicy(cast_forward_inputs=False)
        places = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
        # A weight that several modules share can belong to only one unit of fully_shard. A block
        # with such a weight is therefore not sharded on its own, but stays in the rest of the
        # model.
        apart = [block for block in blocks(model) if all(places[weight] == 1 for weight in block.parameters())]
        # The model itself comes last, because its unit consists of all remaining weights. These
        # weights are not resharded after the forward pass, because the backward pass needs them
        # immediately.
        for block in [*apart, model]:
            reshard = self.config.fsdp.reshard and block is not model
            norms: list[nn.Module] = [
                module for module in block.modules() if isinstance(module, whole) and not hasattr(module, "reshard")
            ]
            if norms:
                fully_shard(norms, mesh=mesh, reshard_after_forward=reshard, mp_policy=plain)
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=gathered)
        return model

    def weight(self, count: int) -> float:
        """Return the factor by which each sample's loss is multiplied.

        FSDP averages gradients over the ranks, so the factor includes the number of ranks.
        """
        return self.group.world / count

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Accumulate whole gradients on each rank within this context, without reducing them."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(self.network, FSDPModule):
            self.network.set_requires_gradient_sync(False)
        yield
        if isinstance(self.network, FSDPModule):
            self.network.set_requires_gradient_sync(True)

    def train_mode(self, training: bool) -> None:
        """Switch between training and evaluation, and free all gathered weights.

        Gathered values are not valid after the switch, because an evaluation may use the moving
        average instead of the weights.
        """
        super().train_mode(training)
        if self.group.world > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in self.network.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def layout(self, place: tuple[str | int, ...], shape: torch.Size) -> Any:
        """Return the layout of a weight, or of a value that the optimizer keeps for a weight.

        Return None for a value that is not sharded, such as a counter.
        """
        own = self._weights
        found = next((own[name] for name in place if name in own), None)
        return found if found is not None and is_sharded(found) and found.shape == shape else None

    @cached_property
    def _weights(self) -> dict[str | int, nn.Parameter]:
        """The parameters, keyed by name in the model's state. A shared weight has several names."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def load(self, state: State) -> None:
        """Load a state of whole tensors. Each rank keeps only its shard of every tensor."""
        if self.group.world == 1:
            super().load(state)
            return
        parameters = self._weights
        model = {name: _shard(value, parameters.get(name)) for name, value in state["model"].items()}
        moments = {
            name: {key: _shard(value, parameters.get(name)) for key, value in values.items()}
            for name, values in state["optimizer"]["state"].items()
        }
        super().load({**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}})


class _Precision(Precision):
    """Keeps the model in float32 at amp.level=O2.

    The ranks keep float32 shards of the weights, and gather the weights in amp.dtype.
    """

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the converted model. At amp.level=O2, return it unchanged."""
        return model if self.config.level is AmpLevel.O2 else super().convert(model)


def _recomputed(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Run a block's forward pass without keeping intermediate values.

    The backward pass repeats this forward pass to the end, because fully_shard counts the layers
    that have run.
    """
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    with set_checkpoint_early_stop(False):
        return checkpoint(forward, *inputs, use_reentrant=False, **more)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks. The weights of one block are gathered together.

    A block is a module that has weights and submodules. A block sequence is an nn.Sequential or
    nn.ModuleList with at least one block. The result contains the blocks in the innermost block
    sequences, and the largest blocks outside of block sequences.
    """
    found: list[nn.Module] = []
    for module in model.children():
        if any(_is_chain(inner) for inner in module.modules()):
            found += blocks(module)
        elif _is_block(module):
            found.append(module)
    return found


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList) and any(_is_block(member) for member in module)


def _shard(value: Any, parameter: Any) -> Any:
    """Return this rank's shard of a whole tensor, in the layout of `parameter`.

    A value that does not have the parameter's shape, such as a counter, is returned unchanged.
    """
    if not isinstance(value, torch.Tensor) or is_sharded(value) or parameter is None or value.shape != parameter.shape:
        return value
    return spread(value, parameter)
