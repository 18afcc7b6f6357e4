"""torchrun's rendezvous handler, through which the coordinator sets the members and ranks of a
round.

To get its next group, torchrun's agent calls its handler's `next_rendezvous`. It then starts
workers with the rank, world size and store that the handler returns. With torchrun's own handler,
c10d, the agents find each other through a store, which each agent polls about once a second. If
there are many agents, they overwrite each other's view of the group. Here, the coordinator knows
which agents are ready, so an agent only waits for its `go`.

    agent -> coordinator   ready {host, port}      no workers here; a store would be at host:port
    coordinator -> agent   go {round 8, rank 2, world 3, members [rank 0's host and port]}

All that remains for the handler is to provide a store, hosted by rank 0's agent, in which the
round's workers meet.

- Standard: the agents meet at c10d's store next to the coordinator. Each round has its own key
  prefix (`RUN-8/`), so that keys of a dead round do not matter. Rank 0 opens a store for the
  workers and writes its address to c10d's store. The other agents poll for this address, because a
  store's own wait could not be interrupted when the round is over.
- Fast: there is no central store. Every agent opens a store before it sends `ready`. Only the store
  of rank 0 is used. The other agents drop their own stores and connect to it.

A round may end before it is complete, because one of its nodes has died. In that case, a store is
unreachable or a key is missing. Such an error (CAME_APART) makes the handler wait for the next
`go`. While the handler waits for a store, it keeps checking whether the round is over
(`must_restart`), so a dead rank 0 does not cost the others STORE_SECONDS.

The coordinator ends rounds, so `num_nodes_waiting` and `is_closed` never make torchrun restart or
stop on its own. Why: docs/decisions/0001, and 0008 for the two modes.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined, unused-ignore]
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from ddpjob_runtime import protocol, store
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.launcher.conduct_preflight import Abandoned, NodePreflight
from ddpjob_runtime.launcher.shutdown import Shutdown, log

FAST_BACKEND = "ddpjob"
STORE_SECONDS = 15.0
"""How many seconds to wait for a key in a complete rendezvous. If the key is still missing after
this time, the node that should have written it must be dead.
"""
CONNECT_SECONDS = 2.0
LOOKUP_SECONDS = 25.0
"""How many seconds connecting to a listening store may take. torch first looks up the store's host
name, and the name server may be slow or down.
"""
LONGEST_PAUSE = 0.5
"""Longest pause in seconds between checks of whether the store has a key. The store's own wait
could not be interrupted when the round is over.
"""
VERDICT_SECONDS = 30.0
"""How many seconds healthy nodes wait for the round to end once a link check has found a faulty
node. The faulty node exits during this time.
"""
CAME_APART = (RendezvousClosedError, RendezvousTimeoutError, dist.DistStoreError)
"""Errors that show that a node died before the round was complete. After such an error, the
coordinator forms a new round.
"""


class CoordinatedRendezvous(RendezvousHandler):
    """The part of the rendezvous that both modes share.

    `number` is the number of this node's round; 0 before its first round.
    """

    def __init__(
        self, client: MemberClient, shutdown: Shutdown, host: str, preflight: NodePreflight | None = None
    ) -> None:
        self._client, self._shutdown, self._host, self._preflight = client, shutdown, host, preflight
        self._server: Any = None
        self.number = 0

    def next_rendezvous(self) -> Any:
        """Wait until a round is complete, and return it.

        If the job is done, end the launcher instead.
        """
        while True:
            self._shutdown.block_if_begun()
            wanted = self._preflight.wanted_seconds if self._preflight is not None else 0
            go = self._client.wait_go(self._host, self._offer(), wanted)
            self._shutdown.block_if_begun()
            if go is None:
                self._shutdown.exit(protocol.EXIT_DONE, "Done", "")
            self.number = int(go["round"])
            try:
                info = self._join(go)
                if go.get("check") and self._preflight is not None:
                    self._check_links(self._preflight, info)
                return info
            except CAME_APART as error:
                if self._client.must_restart(self.number):
                    log(f"round {self.number} was cancelled before it started: {self._client.why}")
                else:
                    log(f"round {self.number} broke: {str(error)[:200]}")

    def _check_links(self, preflight: NodePreflight, info: Any) -> None:
        """Check the links between the round's nodes, before the workers start.

        Raises RendezvousClosedError if the round is over or the check has failed. A failed check
        also ends the round.
        """

        def over() -> bool:
            return self._shutdown.begun or self._client.must_restart(self.number)

        notes = PrefixStore("preflight/", info.store)
        try:
            verdict = preflight.check_links(notes, info.rank, info.world_size, self._host, over)
        except Abandoned:
            raise RendezvousClosedError(self._client.why) from None
        # torch raises RuntimeError if rank 0, which hosts the store, is gone.
        except RuntimeError as error:
            raise RendezvousClosedError(f"the link check lost its connection to the store: {error}") from error
        log(f"preflight: {verdict.failed or verdict.passed}")
        if not verdict.failed:
            if info.rank == 0:
                self._client.note(protocol.PREFLIGHT, verdict.passed)
            return
        if info.rank in verdict.culprits:
            self._shutdown.exit(protocol.EXIT_UNFIT, "PreflightFailed", verdict.culprits[info.rank])
        if info.rank == verdict.ends:
            self._shutdown.exit(1, "Error", f"preflight: {verdict.failed}")
        until = time.monotonic() + VERDICT_SECONDS
        while not over() and time.monotonic() < until:
            time.sleep(0.05)
        raise RendezvousClosedError(verdict.failed)

    def _offer(self) -> int:
        """Return the port of the store that this node would host as rank 0; 0 if it has no such
        store.
        """
        raise NotImplementedError

    def _join(self, go: dict[str, Any]) -> Any:
        """Form and return the group of this round.

        Raises one of CAME_APART if the group cannot be formed.
        """
        raise NotImplementedError

    # ---- other methods that torchrun calls

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0's launcher, and not a worker, hosts the workers' store; always True.

        A store hosted by a worker would listen on every address of the machine. Its port would be
        chosen before the store opens, so another program could take the port in the meantime.
        """
        return True

    def num_nodes_waiting(self) -> int:
        """Return 0, because only the coordinator decides when the group changes."""
        return 0

    def is_closed(self) -> bool:
        """Return False, because only the coordinator ends rounds."""
        return False

    def set_closed(self) -> None:
        """Do nothing, because only the coordinator ends rounds."""

    def shutdown(self) -> bool:
        """Do nothing, because a shutdown would end the rendezvous for the other nodes, too."""
        return True


class StandardRendezvous(CoordinatedRendezvous):
    """The rendezvous in Standard mode. The agents meet at c10d's store next to the coordinator."""

    def __init__(
        self,
        client: MemberClient,
        shutdown: Shutdown,
        host: str,
        parameters: Any,
        preflight: NodePreflight | None = None,
    ) -> None:
        super().__init__(client, shutdown, host, preflight)
        self._parameters = parameters

    def get_backend(self) -> str:
        """Return the rendezvous backend that torchrun's arguments name."""
        return str(self._parameters.backend)

    def get_run_id(self) -> str:
        """Return the job's id, which is the same in all rounds."""
        return str(self._parameters.run_id)

    def _offer(self) -> int:
        return 0

    def _join(self, go: dict[str, Any]) -> Any:
        rank, known = int(go["rank"]), self._parameters
        host = str(known.local_addr or self._host)
        self._server = store.serve(host, seconds=STORE_SECONDS) if rank == 0 else None
        _, of_all = c10d_rendezvous_backend.create_backend(known)
        if self._client.must_restart(self.number):
            raise RendezvousClosedError(self._client.why)
        of_round = PrefixStore(f"{known.run_id}-{self.number}/", of_all)
        of_round.set_timeout(timedelta(seconds=STORE_SECONDS))
        ranks = PrefixStore("ranks/", of_round)
        if rank > 0:
            self._wait_for_first(ranks)
        first = RendezvousStoreInfo.build(rank, ranks, host, int(self._server.port) if rank == 0 else None)
        return RendezvousInfo(of_round, rank, int(go["world"]), first)

    def _wait_for_first(self, ranks: Any) -> None:
        """Wait until rank 0 has written its address to the store.

        Raises one of CAME_APART if the round ends first, or if rank 0 takes too long.
        """
        deadline, pause = time.monotonic() + STORE_SECONDS, 0.01
        while not ranks.check([RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]):
            if self._client.must_restart(self.number):
                raise RendezvousClosedError(self._client.why)
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"rank 0 of round {self.number} has not written its address to the store")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


class FastRendezvous(CoordinatedRendezvous):
    """The rendezvous in Fast mode. The agents meet at a store hosted by rank 0's agent."""

    def __init__(
        self,
        client: MemberClient,
        shutdown: Shutdown,
        host: str,
        run_id: str,
        preflight: NodePreflight | None = None,
    ) -> None:
        super().__init__(client, shutdown, host, preflight)
        self._run_id = run_id
        self._store: Any = None

    def get_backend(self) -> str:
        """Return the name under which this handler is registered as a backend."""
        return FAST_BACKEND

    def get_run_id(self) -> str:
        """Return the job's id, which is the same in all rounds."""
        return self._run_id

    def _offer(self) -> int:
        self._store = None
        self._server = store.serve(self._host, seconds=STORE_SECONDS)
        return int(self._server.port)

    def _join(self, go: dict[str, Any]) -> Any:
        rank, first = int(go["rank"]), go["members"][0]
        host, port = str(first["host"]), int(first["port"])
        if rank == 0:
            self._store = self._server
        else:
            self._server, self._store = None, self._connect(host, port)
        return RendezvousInfo(
            PrefixStore("agent/", self._store), rank, int(go["world"]), RendezvousStoreInfo(host, port)
        )

    def _connect(self, host: str, port: int) -> Any:
        began, wait = time.monotonic(), CONNECT_SECONDS
        while True:
            try:
                found = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=wait))
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                # torch looks up the host name before it connects, and its timeout includes this
                # lookup.
                wait = LOOKUP_SECONDS if _listens(host, port) else CONNECT_SECONDS
                if self._client.must_restart(self.number) or time.monotonic() > began + max(wait, STORE_SECONDS):
                    raise dist.DistStoreError(
                        f"the store of rank 0 at {host}:{port} is unreachable: {error}"
                    ) from error
                continue
            found.set_timeout(timedelta(seconds=STORE_SECONDS))
            return found


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
        return True
    except OSError:
        return False


def register_fast(client: MemberClient, shutdown: Shutdown, preflight: NodePreflight | None = None) -> None:
    """Register this rendezvous with torchrun, so that `--rdzv-backend=ddpjob` selects it."""

    def create(parameters: Any) -> Any:
        host = str(parameters.local_addr or "127.0.0.1")
        return FastRendezvous(client, shutdown, host, str(parameters.run_id), preflight)

    rendezvous_handler_registry.register(FAST_BACKEND, create)
