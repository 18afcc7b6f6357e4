"""strategy=fsdp: each rank keeps a part of every weight, and of its optimizer state; blocks are gathered while they compute (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpjob_trainer.dtensors import is_sharded, spread
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.group import Group
from ddpjob_trainer.precision import AmpLevel, Precision
from ddpjob_trainer.strategies.base import State, Strategy

if TYPE_CHECKING:
    from ddpjob_trainer.config import Config


@dataclass(kw_only=True, slots=True, frozen=True)
class FsdpConfig:
    """strategy=fsdp."""

    reshard: bool = True
    """Let go of a block's weights after its forward pass, and gather them again for the backward pass: less memory, half as much traffic
    again."""


class Fsdp(Strategy):
    """PyTorch's fully_shard on each block of the model and on what is left of it. A group of one needs no wrapper."""

    equal = True  # Each forward pass gathers weights from all ranks.

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        if config.ddp.ordered:
            raise ConfigError("ddp.ordered: strategy=fsdp adds gradients up inside its collectives; leave it out, or set strategy=ddp")
        super().__init__(config, group, device)
        if group.world > 1:
            self.precision = _Precision(config.amp, config.optim.clip_norm, device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same module, whose parameters become DTensors."""
        if self.group.world == 1:
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.precision.over_parts = self.group.sum
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard takes none in channels_last; images and activations may be.
        mesh = init_device_mesh(self.device.type, (self.group.world,))
        gathered = MixedPrecisionPolicy()
        if self.config.amp.level is AmpLevel.O2:
            gathered = MixedPrecisionPolicy(param_dtype=self.precision.dtype, reduce_dtype=torch.float32)
        plain = MixedPrecisionPolicy(cast_forward_inputs=False)
        for block in [*blocks(model), model]:  # The model last: what is left of it. Its backward pass follows at once.
            reshard = self.config.fsdp.reshard and block is not model
            norms: list[nn.Module] = [
                module for module in block.modules() if isinstance(module, _BatchNorm) and not hasattr(module, "reshard")
            ]
            if norms and self.config.amp.level is AmpLevel.O2:
                fully_shard(norms, mesh=mesh, reshard_after_forward=reshard, mp_policy=plain)
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=gathered)
        return model

    def weight(self, count: int) -> float:
        """FSDP averages over ranks."""
        return self.group.world / count

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Gradients stay whole, on each rank, until the last micro-batch."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(self.network, FSDPModule):
            self.network.set_requires_gradient_sync(False)
        yield
        if isinstance(self.network, FSDPModule):
            self.network.set_requires_gradient_sync(True)

    def train_mode(self, training: bool) -> None:
        """As every strategy; what an evaluation has gathered may be of other weights than those to train with."""
        super().train_mode(training)
        if self.group.world > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in self.network.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def load(self, state: State) -> None:
        """Each rank takes its part of whole tensors."""
        if self.group.world == 1:
            super().load(state)
            return
        parameters = dict(self.parameters)
        model = {name: _part(value, parameters.get(name)) for name, value in state["model"].items()}
        moments = {
            name: {key: _part(value, parameters.get(name)) for key, value in values.items()}
            for name, values in state["optimizer"]["state"].items()
        }
        super().load({**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}})


class _Precision(Precision):
    """O2: what ranks keep of the weights is the float32 copy, and they are gathered in amp.dtype; nothing to convert."""

    def convert(self, model: nn.Module) -> nn.Module:
        """As Precision's."""
        return model if self.config.level is AmpLevel.O2 else super().convert(model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the members of a model's chains of blocks, or its largest modules where it has no such chain.

    A chain is an nn.Sequential or nn.ModuleList with members that have weights and are themselves made of modules.
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


def _part(value: Any, parameter: Any) -> Any:
    """This rank's part of a whole tensor that is laid out as `parameter`; anything else (a counter, a buffer) as it is."""
    if not isinstance(value, torch.Tensor) or is_sharded(value) or parameter is None or value.shape != parameter.shape:
        return value
    return spread(value, parameter)
