"""strategy=horovod: one process per device; Horovod adds up gradients while they are computed.

horovodrun can start the ranks, and so can torchrun, --spawn or a DDPJob. Without horovodrun, rank 0
serves the rendezvous in its place. Horovod moves only gradients; the trainer's own small
collectives still use torch.distributed.
"""

from __future__ import annotations

import os
import socket
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.data.dataset import MicroBatches
from ddpjob_trainer.distributed.init_method import address_towards, free_port, meeting
from ddpjob_trainer.distributed.interfaces import interface_of
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.strategies.strategy import State, Strategy


class Horovod(Strategy):
    """Exchanges gradients with Horovod's DistributedOptimizer. Each rank has the whole model."""

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        self._hvd = _import_horovod()
        if device.type == "cuda" and not self._hvd.cuda_built():
            raise ConfigError(
                "strategy=horovod: this Horovod was built without CUDA; rebuild it with HOROVOD_GPU_OPERATIONS=NCCL"
                " python scripts/install_horovod.py in DDPJob's repository, or set train.backend=gloo to train"
                " on the CPU"
            )
        super().__init__(config, group, device)
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, round(config.train.timeout_seconds))))
        self._server = None if "HOROVOD_RANK" in os.environ else _meet(group)
        self._hvd.init()
        if (self._hvd.rank(), self._hvd.size()) != (group.rank, group.world):
            raise ConfigError(
                f"strategy=horovod: this process is rank {self._hvd.rank()} of {self._hvd.size()} for Horovod,"
                f" but rank {group.rank} of {group.world} for its launcher; unset HOROVOD_* in the environment,"
                " or start with"
                " horovodrun alone"
            )

    def prepare(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Take a model, and send rank 0's weights and optimizer state to every rank."""
        super().prepare(model, shape)
        self._broadcast()
        if any(weight.dtype is torch.bfloat16 for weight in self.model.parameters()):
            raise ConfigError(
                "strategy=horovod: Horovod 0.28 cannot add up bfloat16; set amp.dtype=float16, or amp.level=O1"
            )
        # Give Horovod an optimizer of its own. Horovod's hooks must be on the weights that receive
        # gradients, but the trainer's optimizer can work on float32 copies of these weights.
        self._exchange: Any = self._hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters()),
            named_parameters=self.model.named_parameters(),
            compression=getattr(self._hvd.Compression, self.config.horovod.compression),
            op=self._hvd.Sum,
        )

    def backward(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        """Compute and exchange the gradients.

        Ranks can have different numbers of micro-batches, so each rank sends its gradients only
        after its own last micro-batch.
        """
        self._exchange.set_backward_passes_per_step(len(micro_batches))
        losses = super().backward(micro_batches, count)
        self._exchange.synchronize()
        return losses

    def load(self, state: State) -> None:
        """Load a state, then send rank 0's weights and optimizer state to every rank."""
        super().load(state)
        self._broadcast()

    def _broadcast(self) -> None:
        """Send rank 0's weights, statistics and optimizer state to every rank."""
        self._hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        # If the optimizer has no state, Horovod would take a step to create one. This step would
        # apply weight decay to the weights.
        if self.optimizer.state:
            self._hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def close(self) -> None:
        """Shut down Horovod and its rendezvous server."""
        self._hvd.shutdown()
        if self._server is not None:
            self._server.stop()


def enter() -> None:
    """Set torch.distributed's variables from Horovod's, if horovodrun started this process.

    Must run before a rank reads the variable RANK. Raises ConfigError if Horovod is missing, or
    runs in its own elastic mode.
    """
    if "RANK" in os.environ or "HOROVOD_RANK" not in os.environ:
        return
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ConfigError(
            "strategy=horovod: elastic horovodrun does not keep the trainer's state; start it with only -np N,"
            " or use torchrun --nnodes MIN:MAX or a DDPJob, where the number of ranks can change with strategy=horovod"
        )
    hvd = _import_horovod()
    hvd.init()
    names = {"RANK": hvd.rank, "WORLD_SIZE": hvd.size, "LOCAL_RANK": hvd.local_rank, "LOCAL_WORLD_SIZE": hvd.local_size}
    os.environ.update({name: str(number()) for name, number in names.items()})
    host = address_towards(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1") or socket.gethostname())
    found = hvd.broadcast_object((host, free_port(host)) if hvd.rank() == 0 else None, root_rank=0, name="meeting")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = found[0], str(found[1])


def _import_horovod() -> ModuleType:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(
            f"strategy=horovod: Horovod cannot be imported ({error}). Run "
            "scripts/install_horovod.py in DDPJob's repository to build it for the installed torch, or use "
            "strategy=ddp, which gives the same results"
        ) from error
    module: ModuleType = hvd
    return module


def _meet(group: Group) -> Any:
    """Set the HOROVOD_* variables as horovodrun would set them.

    Return the rendezvous server on rank 0, and None on all other ranks. All ranks must call this
    together.
    """
    # Name each node after its first rank. Host names would not be unique, because several nodes can
    # run on the same machine.
    first = group.gather(group.rank - group.local_rank)
    local_ranks, local_sizes = group.gather(group.local_rank), group.gather(group.local_world)
    peers = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == group.local_rank]
    names = {
        "HOSTNAME": f"node-{first[group.rank]}",
        "RANK": group.rank,
        "SIZE": group.world,
        "LOCAL_RANK": group.local_rank,
        "LOCAL_SIZE": group.local_world,
        "CROSS_RANK": peers.index(group.rank),
        "CROSS_SIZE": len(peers),
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in names.items()})
    if group.world == 1:
        return None
    server = None
    if group.rank == 0:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        port = server.start()
        server.init(
            [
                SlotInfo(
                    f"node-{node}",
                    rank,
                    local,
                    local_ranks[:rank].count(local),
                    group.world,
                    size,
                    local_ranks.count(local),
                )
                for rank, (node, local, size) in enumerate(zip(first, local_ranks, local_sizes, strict=True))
            ]
        )
    address = address_towards(meeting().address or socket.gethostname())
    found = group.broadcast_bytes(f"{address} {port}".encode() if server is not None else None, 0).decode().split()
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = found
    if "HOROVOD_GLOO_IFACE" not in os.environ:
        if not (interface := interface_of(address)):
            remedy = "set HOROVOD_GLOO_IFACE to an interface that the other ranks can reach"
            raise ConfigError(f"strategy=horovod: no network interface has the address {address}; {remedy}")
        os.environ["HOROVOD_GLOO_IFACE"] = interface
    return server
