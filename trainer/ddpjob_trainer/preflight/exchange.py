"""Lets ranks leave notes for each other before they form a group.

Notes are JSON in the store, and waiting for a note has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.distributed.init_method import meeting, open_store
from ddpjob_trainer.distributed.process_group import Group, in_thread
from ddpjob_trainer.errors import PreflightError, RendezvousError, TrainerError, first_line

T = TypeVar("T")
_NOTICE_SECONDS, _POLL_SECONDS, _DIAGNOSIS_SECONDS = 5.0, 0.01, 3.0


def within(seconds: float, doing: str, function: Callable[[], T]) -> T:
    """Run `function()` in a thread, and return its result, but wait no longer than `seconds`.

    A call that uses a dead network file system never returns, so its thread is abandoned. Raises
    PreflightError after `seconds`, and any error that the function raises.
    """
    answer = in_thread(f"preflight: {doing}", function)
    if not wait([answer], seconds).done:
        raise PreflightError(f"no response within {seconds:.0f} s while {doing}")
    return answer.result()


def attempt(seconds: float, doing: str, function: Callable[[], T]) -> tuple[T | None, str]:
    """Return (the function's value, ""), or (None, the reason why the function failed).

    The reason may be any error from a driver or a file system, because every such error is a
    finding.
    """
    try:
        return within(seconds, doing, function), ""
    except OSError as error:
        return None, error.strerror or str(error)
    except TrainerError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {first_line(error)}"


def node_name() -> str:
    """Return the pod's name inside a job, and the host's name outside a job."""
    return JobEnvironment.read().host


class Exchange:
    """Lets this rank leave notes and read other ranks' notes.

    In a note, a dataclass becomes a dict and keys become strings.
    """

    def __init__(self, group: Group, join_seconds: float) -> None:
        """Open the store.

        Raises PreflightError or RendezvousError if the store cannot be reached. The error's message
        states how far this rank got on the way to the store.
        """
        self._rank, self._hello = group.rank, {"host": node_name(), "leader": group.rank - group.local_rank}
        if group.world == 1:
            self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
            return
        where = meeting()
        # FileStore holds the GIL while it opens the file, so find out first whether the mount is
        # dead.
        if where.file:
            within(join_seconds, f"opening {where}", lambda: _try_to_open(where.file))
        try:
            store = within(join_seconds + 5, f"opening the store at {where}", lambda: open_store(group, join_seconds))
        except (PreflightError, RendezvousError):
            if where.file or (group.rank == 0 and not where.agents):
                raise
            failed = f"rank {self._rank} on {node_name()} could not reach rank 0 at {where} within {join_seconds:.0f} s"
            raise PreflightError(f"{failed}: {_diagnosis(where.address, where.port)}") from None
        self.store = dist.PrefixStore("preflight", store)  # type: ignore[attr-defined]

    def stage(self, text: str) -> None:
        """Leave a note that this rank has joined, with `text` as its current activity."""
        self.post("stage", {**self._hello, "at": text})

    def post(self, key: str, value: Any) -> None:
        """Leave a note from this rank for rank 0."""
        self.publish(f"{key}/{self._rank}", value)

    def publish(self, key: str, value: Any) -> None:
        """Leave a note that all ranks can read."""
        self.store.set(key, json.dumps(value, default=asdict))

    def decided(self, key: str, decide: Callable[[], Any], seconds: float) -> Any:
        """Return rank 0's decision. Rank 0 calls `decide`, and the other ranks wait for the result.

        Raises PreflightError if the decision does not arrive within `seconds`.
        """
        if self._rank == 0:
            self.publish(key, decide())
        if not (found := self._await([key], seconds)):
            waited = (
                f"rank {self._rank} on {node_name()} received no message '{key}' from rank 0 within {seconds:.0f} s"
            )
            raise PreflightError(f"{waited}; read rank 0's log")
        return found[key]

    def gather(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Return the notes named `key` that the ranks `ranks` leave within `seconds`."""
        keys = {f"{key}/{rank}": rank for rank in sorted(ranks)}
        found = self._await(list(keys), seconds)
        return {rank: found[key] for key, rank in keys.items() if key in found}

    def _await(self, keys: list[str], seconds: float) -> dict[str, Any]:
        """Return the notes that arrive within `seconds`.

        While rank 0 waits, it prints which notes are missing.
        """
        found, deadline, notice = dict[str, Any](), time.monotonic() + seconds, time.monotonic() + _NOTICE_SECONDS
        while True:
            found |= {k: json.loads(self.store.get(k)) for k in keys if k not in found and self.store.check([k])}
            missing, now = [key for key in keys if key not in found], time.monotonic()
            if not missing or now > deadline:
                return found
            if self._rank == 0 and now > notice:
                notice = now + _NOTICE_SECONDS
                text = (
                    f"waiting up to {deadline - now:.0f} s for these messages (MESSAGE/RANK): {', '.join(missing[:8])}"
                )
                print(f"preflight: {text}", file=sys.stderr, flush=True)
            time.sleep(_POLL_SECONDS)


def _try_to_open(file: str) -> None:
    # Ignore errors here, because the store's own error describes the problem better.
    with contextlib.suppress(OSError), Path(file).open("ab"):
        pass


def _diagnosis(address: str, port: int) -> str:
    """Describe whether the name, the address or the port is wrong.

    torch's own error does not distinguish these cases.
    """
    try:
        found = within(_DIAGNOSIS_SECONDS, f"looking up {address}", lambda: socket.getaddrinfo(address, port))
        where = ", ".join(sorted({str(entry[4][0]) for entry in found}))
    except OSError as error:
        return f"the name {address} cannot be resolved here ({error.strerror}); check MASTER_ADDR and this node's DNS"
    try:
        with socket.create_connection((address, port), timeout=_DIAGNOSIS_SECONDS):
            return (
                f"{where} responded only after the timeout on TCP port {port}; start all ranks at about the same time"
            )
    except TimeoutError:
        return f"{where} does not respond on TCP port {port}; allow this port on both nodes"
    except OSError as error:
        return f"{where}, TCP port {port}: {error.strerror}; check that rank 0 is running and that this is its address"
