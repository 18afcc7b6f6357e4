"""strategy=parameter_server: rank 0 updates the weights, and the other ranks compute gradients.

Ranks communicate through torch.distributed.rpc. In each step, every worker pushes its gradients,
the server adds them up in rank order and updates the weights, and the workers pull the new weights.
This is the synchronous variant of the architecture in Li et al., Scaling Distributed Machine
Learning with the Parameter Server, 2014. The result is the same as that of a single process.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.data.dataset import MicroBatches
from ddpjob_trainer.data.sampler import DataShare
from ddpjob_trainer.distributed.init_method import open_store
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from ddpjob_trainer.optim.precision import Update
from ddpjob_trainer.strategies.strategy import (
    State,
    Strategy,
    flat_gradients,
    pieces_like,
    set_gradients,
)

_SERVER = 0
_SCHEME = "ddpjob"


class ParameterServer(Strategy):
    """Keeps the whole model on every rank. The server's copy is authoritative.

    Only the server has an optimizer state.
    """

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        if group.world < 2:
            raise ConfigError(
                "strategy=parameter_server: one rank is the server, so start at least 2 ranks (torchrun"
                " --nproc-per-node=2, --spawn 2, a DDPJob of 2 pods), or set strategy=single"
            )
        super().__init__(config, group, device)
        self._serves = group.rank == _SERVER
        _join(group, config.train.timeout_seconds)

    @property
    def data_share(self) -> DataShare:
        """This rank's share of the samples, which is empty on the server."""
        parts = self.group.world - 1
        return DataShare(parts, parts, counts=False) if self._serves else DataShare(self.group.rank - 1, parts)

    def backward(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        """Compute the gradients on the workers, and add them up on the server."""
        if not self._serves:
            losses = super().backward(micro_batches, count)
            _call(_push, self.group.rank, flat_gradients(list(self.model.parameters())).float().cpu())
            self.group.barrier()
            return losses
        for micro, _ in micro_batches:  # Every rank has a micro-batch, but the server's does not count.
            with self.statistics.of_micro(replace(micro, counts=False), count):
                pass
        self.statistics.exchange()
        # Wait until every worker has pushed its gradients. If a worker is gone, this fails.
        self.group.barrier()
        # GradScaler refuses to unscale gradients on a rank that has never scaled a loss, so scale a
        # zero.
        self.precision.scaled(torch.zeros((), device=self.device))
        total, *others = _buffer.take(range(1, self.group.world))
        for gradients in others:
            total += gradients
        set_gradients(list(self.model.parameters()), total)
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def update(self, rate: float) -> Update:
        """Take a step on the server, and copy the new weights to the workers."""
        if self._serves:
            update = super().update(rate)
            # Convert the norm and the flag, because both can be tensors on the server's device.
            update = Update(float(update.norm), bool(update.skipped))
            _buffer.put(_flat(self._weights()).cpu(), self.precision.state(), update)
            self.group.barrier()
        else:
            self.group.barrier()
            weights, precision, update = _call(_pull)
            torch._foreach_copy_(self._weights(), pieces_like(self._weights(), weights))
            self.precision.refresh()
            self.precision.load(precision)
            set_learning_rate(self.optimizer, rate)
            self.model.zero_grad(set_to_none=True)
            if self.average is not None:
                self.average.update(update.skipped)
        return update

    def _weights(self) -> list[torch.Tensor]:
        """Return the weights that the optimizer works on."""
        return [weight.detach() for _, weight in self.parameters]

    def state(self) -> State:
        """Return the whole state, with the server's optimizer state on all ranks.

        Each node keeps this state in memory, so training can continue from a worker's node if the
        server's node is lost.
        """
        state, content = super().state(), io.BytesIO()
        torch.save(state["optimizer"], content)
        sent = self.group.broadcast_bytes(content.getvalue(), _SERVER)
        state["optimizer"] = torch.load(io.BytesIO(sent), weights_only=True, map_location=self.device)
        return state

    def load(self, state: State) -> None:
        """Load a state. Only the server keeps the optimizer's part of it."""
        super().load(state)
        # Workers load the optimizer's state only so that all ranks fail together if the state does
        # not fit.
        if not self._serves:
            self.optimizer.state.clear()

    def close(self) -> None:
        """Leave the RPC group."""
        from torch.distributed import rpc

        rpc.shutdown()


class _ServerBuffer:
    """Keeps the workers' gradients and the latest weights on the server between RPCs.

    Workers push gradients into the buffer, and pull weights out of it. Several threads can use the
    buffer at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gradients: dict[int, torch.Tensor] = {}
        self._latest: Any = None

    def push(self, rank: int, gradients: torch.Tensor) -> None:
        with self._lock:
            self._gradients[rank] = gradients

    def take(self, ranks: range) -> list[torch.Tensor]:
        """Return the gradients of all `ranks` in rank order, and remove them from the buffer."""
        with self._lock:
            found = [self._gradients[rank] for rank in ranks]
            self._gradients.clear()
        return found

    def put(self, weights: torch.Tensor, precision: State, update: Update) -> None:
        with self._lock:
            self._latest = weights, precision, update

    def pull(self) -> Any:
        with self._lock:
            return self._latest


_buffer = _ServerBuffer()


def _push(rank: int, gradients: torch.Tensor) -> None:
    """Store a worker's gradients. A worker calls this on the server by RPC."""
    _buffer.push(rank, gradients)


def _pull() -> Any:
    """Return (weights, precision state, outcome of the step).

    A worker calls this on the server by RPC.
    """
    return _buffer.pull()


def _call(function: Any, *arguments: Any) -> Any:
    from torch.distributed import rpc

    return rpc.rpc_sync(f"rank-{_SERVER}", function, args=arguments)


def _join(group: Group, timeout_seconds: float) -> None:
    """Join the RPC group through the process group's store, without an additional port.

    Raises ConfigError if torch was built without RPC.
    """
    if not dist.is_available() or not dist.rpc.is_available():
        raise ConfigError(
            "strategy=parameter_server: this torch was built without torch.distributed.rpc; set strategy=ddp, "
            "or install a torch that has this module"
        )
    from torch.distributed import rpc
    from torch.distributed.rendezvous import register_rendezvous_handler

    def meet(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        store = dist.PrefixStore("parameter_server", open_store(group, timeout_seconds))  # type: ignore[attr-defined]
        yield store, group.rank, group.world

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{_SCHEME}://", rpc_timeout=timeout_seconds)
    register: Any = register_rendezvous_handler
    register(_SCHEME, meet)
    join: Any = rpc.init_rpc
    # RPC uses a deprecated kind of process group to check its members, and torch warns about that.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")
        join(f"rank-{group.rank}", rank=group.rank, world_size=group.world, rpc_backend_options=options)


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten().float() for tensor in tensors])
