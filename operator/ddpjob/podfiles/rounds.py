"""torchrun's rendezvous, a round at a time: the coordinator says who takes part, torch's own parts make them a group.

Standard: a c10d rendezvous with a run id of its own for every round, at the store beside the coordinator. Nobody waits for a node that
is not in the round, and what a dead node left behind is of no account.
Fast: the node of rank 0 hosts a store for the round; nobody else is needed.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import wire
from departure import Departure, say
from link import Link
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

FAST_BACKEND = "ddpjob"
STORE_SECONDS = 15.0  # a key of a rendezvous that is complete: its writer is there or dead
CONNECT_SECONDS = 2.0
CAME_APART = (RendezvousClosedError, RendezvousTimeoutError, dist.DistStoreError)
"""A node of the round died before the round was complete: the coordinator forms another one."""


class Rounds(RendezvousHandler):
    """The handler that torchrun's agent asks for every group. `number` is the round it is in, 0 before the first."""

    def __init__(self, link: Link, departure: Departure, host: str) -> None:
        self._link, self._departure, self._host = link, departure, host
        self.number = 0

    def next_rendezvous(self) -> Any:
        """Blocks until a round is complete; ends the process when the coordinator has nothing left to do."""
        while True:
            self._departure.park_if_leaving()
            go = self._link.wait_go(self._host, self._offer())
            self._departure.park_if_leaving()
            if go is None:
                self._departure.leave(wire.EXIT_DONE, "Done", "")
            self.number = int(go["round"])
            try:
                return self._join(go)
            except CAME_APART as error:
                if self._link.must_restart(self.number):
                    say(f"round {self.number} is over before it began: {self._link.why}")
                else:
                    say(f"round {self.number} came apart: {str(error)[:200]}")

    def _offer(self) -> int:
        """The port of a store that this node could host."""
        raise NotImplementedError

    def _join(self, go: dict[str, Any]) -> Any:
        """Make the round's members a group; one of CAME_APART when that cannot be."""
        raise NotImplementedError

    # ---- what torchrun asks besides

    def num_nodes_waiting(self) -> int:
        """None: the coordinator says when the group changes."""
        return 0

    def is_closed(self) -> bool:
        """Never: a round ends by the coordinator's word."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def shutdown(self) -> bool:
        """Nothing to shut down: it would end the rendezvous for the other nodes too."""
        return True


class StandardRounds(Rounds):
    """c10d at the coordinator's store."""

    def __init__(self, link: Link, departure: Departure, host: str, parameters: Any) -> None:
        super().__init__(link, departure, host)
        self._parameters = parameters
        self._inner: Any = None
        link.on_restart = self._abandon

    def get_backend(self) -> str:
        """As the user reads it in torchrun's arguments."""
        return str(self._parameters.backend)

    def get_run_id(self) -> str:
        """The job's, for all rounds."""
        return str(self._parameters.run_id)

    @property
    def use_agent_store(self) -> bool:
        """Workers host their own store, as with torchrun and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
        return False

    def _offer(self) -> int:
        return 0

    def _of_round(self, number: int, world: int) -> Any:
        known = self._parameters
        named = RendezvousParameters(
            known.backend, known.endpoint, f"{known.run_id}-{number}", world, world, local_addr=known.local_addr, **known.config
        )
        return registry.get_rendezvous_handler(named)

    def _join(self, go: dict[str, Any]) -> Any:
        number, world = self.number, int(go["world"])
        if self._inner is not None:
            self._inner.shutdown()  # ends its heartbeat; its round is over for everybody
        self._inner = self._of_round(number, world)
        if self._link.must_restart(number):
            raise RendezvousClosedError(self._link.why)
        info = self._inner.next_rendezvous()
        self._inner._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        return info

    def _abandon(self, number: int) -> None:
        """The round is over: whoever still waits in its rendezvous is let go by closing it, on a connection of its own."""
        if number < self.number:
            return

        def close() -> None:
            try:
                self._of_round(number, 1).set_closed()
            except RendezvousError as error:
                say(f"cannot close the rendezvous of round {number}: {error}")

        threading.Thread(target=close, name="ddpjob-abandon", daemon=True).start()


class FastRounds(Rounds):
    """A store for the round in the agent of its rank 0."""

    def __init__(self, link: Link, departure: Departure, host: str, run_id: str) -> None:
        super().__init__(link, departure, host)
        self._run_id = run_id
        self._server: Any = None
        self._store: Any = None

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return FAST_BACKEND

    def get_run_id(self) -> str:
        """The job's, for all rounds."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients of the agent's store: no port has to be found free twice."""
        return True

    def _offer(self) -> int:
        self._store = None
        self._server = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS))
        return int(self._server.port)

    def _join(self, go: dict[str, Any]) -> Any:
        rank, first = int(go["rank"]), go["members"][0]
        host, port = str(first["host"]), int(first["port"])
        if rank == 0:
            self._store = self._server
        else:
            self._server, self._store = None, self._connect(host, port)
        return RendezvousInfo(dist.PrefixStore("agent/", self._store), rank, int(go["world"]), RendezvousStoreInfo(host, port))

    def _connect(self, host: str, port: int) -> Any:
        deadline = time.monotonic() + STORE_SECONDS
        while True:
            try:
                store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_SECONDS))
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                if self._link.must_restart(self.number) or time.monotonic() > deadline:
                    raise dist.DistStoreError(f"no store of rank 0 at {host}:{port}: {error}") from error
                continue
            store.set_timeout(timedelta(seconds=STORE_SECONDS))
            return store


def register_fast(link: Link, departure: Departure) -> None:
    """Make `--rdzv-backend=ddpjob` known to torchrun."""

    def create(parameters: Any) -> Any:
        return FastRounds(link, departure, str(parameters.local_addr or "127.0.0.1"), str(parameters.run_id))

    rendezvous_handler_registry.register(FAST_BACKEND, create)
