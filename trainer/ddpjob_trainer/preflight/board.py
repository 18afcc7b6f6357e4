"""What ranks tell each other before there is a group: small JSON notes in the store, each waited for with a deadline."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ddpjob_trainer.errors import PreflightError
from ddpjob_trainer.group import Group
from ddpjob_trainer.rendezvous import meeting, open_store

T = TypeVar("T")
_TELL_SECONDS, _POLL_SECONDS = 5.0, 0.01


def within(seconds: float, waits_for: str, function: Callable[[], T]) -> T:
    """`function()`, in a thread that is left behind when it takes longer: a dead network file system answers nobody.

    Raises PreflightError when the time is over, and what the function raises.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name=f"preflight: {waits_for}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise PreflightError(f"no answer within {seconds:.0f} s while {waits_for}")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def say(text: str) -> None:
    """A line about the way, beside the table."""
    print(f"preflight: {text}", file=sys.stderr, flush=True)


class Board:
    """This rank's view of the notes."""

    def __init__(self, group: Group, join_seconds: float) -> None:
        """Raises PreflightError when the store cannot be reached, saying how far it got."""
        import torch.distributed as dist

        self._rank, self.stage_now = group.rank, "starting"
        if group.world == 1:
            self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
            return
        place = meeting()
        began = time.monotonic()
        if not place.file and (group.rank > 0 or place.agents):
            _reach_store(group.rank, place.address, place.port, join_seconds)
        left = max(1.0, join_seconds - (time.monotonic() - began))
        store = within(left + 5, f"opening the store at {place}", lambda: open_store(group, left))
        self.store = dist.PrefixStore("preflight", store)  # type: ignore[attr-defined]

    def stage(self, text: str) -> None:
        """What this rank is at, for those who wait for it."""
        self.stage_now = text
        self.store.set(f"stage/{self._rank}", text)

    def put(self, key: str, value: Any) -> None:
        """This rank's note under `key`."""
        self.store.set(f"{key}/{self._rank}", json.dumps(value))

    def tell(self, key: str, value: Any) -> None:
        """A note for all."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str, seconds: float, whose: str) -> Any:
        """A note for all, when it is there. Raises PreflightError."""
        deadline = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise PreflightError(
                    f"rank {self._rank} on {node_name()} waited {seconds:.0f} s in vain for {whose}; look at its own output"
                )
            time.sleep(_POLL_SECONDS)
        return json.loads(self.store.get(key))

    def gather(self, key: str, ranks: Iterable[int], seconds: float, what: str) -> dict[int, Any]:
        """The notes of those ranks that have written one in time; says who is waited for."""
        missing, found = sorted(ranks), {}
        began = told = time.monotonic()
        while missing:
            came = [rank for rank in missing if self.store.check([f"{key}/{rank}"])]
            found.update({rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in came})
            missing = [rank for rank in missing if rank not in found]
            now = time.monotonic()
            if now - began > seconds:
                break
            if missing and now - told > _TELL_SECONDS:
                told = now
                say(f"waiting for {what} of rank {', '.join(map(str, missing[:8]))} ({now - began:.0f} s, {seconds:.0f} s at most)")
            if missing and not came:
                time.sleep(_POLL_SECONDS)
        return found

    def stage_of(self, rank: int) -> str:
        """What a rank was at when it was heard of last."""
        return bytes(self.store.get(f"stage/{rank}")).decode() if self.store.check([f"stage/{rank}"]) else "starting"


def node_name() -> str:
    """The pod's name in a job, else the host's."""
    return os.environ.get("DDPJOB_POD") or socket.gethostname()


def _reach_store(rank: int, address: str, port: int, seconds: float) -> None:
    """Connect once by hand: torch tries again in silence, and does not say whether the name, the address or the port is wrong."""
    deadline = time.monotonic() + seconds
    told = time.monotonic()
    while True:
        try:
            found = within(seconds, f"looking up {address}", lambda: socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
            where = ", ".join(sorted({str(entry[4][0]) for entry in found}))
        except OSError as error:
            problem = f"the name {address} is not known here ({error.strerror}); check MASTER_ADDR and this node's DNS"
        else:
            try:
                with socket.create_connection((address, port), timeout=min(3.0, seconds)):
                    return
            except TimeoutError:
                problem = f"{where} does not answer on TCP port {port}; let it in at rank 0's node, and out at this one"
            except OSError as error:
                problem = f"{where}, TCP port {port}: {error.strerror}; check that rank 0 runs and that this is its address"
        now = time.monotonic()
        if now > deadline:
            raise PreflightError(f"rank {rank} on {node_name()} cannot reach rank 0 at {address}:{port} in {seconds:.0f} s: {problem}")
        if now - told > _TELL_SECONDS:
            told = now
            say(f"rank {rank} on {node_name()} waits for rank 0: {problem} ({deadline - now:.0f} s left)")
        time.sleep(0.1)
