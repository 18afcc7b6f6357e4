"""Where the ranks of a life find each other: the store behind env://, tcp://HOST:PORT or file:///PATH, without waiting for anybody."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddpjob_trainer.errors import ConfigError, RendezvousError, first_line

if TYPE_CHECKING:
    from ddpjob_trainer.group import Group

INIT_METHOD = "DDPJOB_TRAINER_INIT"
"""Environment variable that holds the init method; the launcher of `--spawn` sets it. env:// where it is not set."""


@dataclass(frozen=True)
class Meeting:
    """What an init method says: a file, or the address and port of a TCP store; `agents`: a launcher serves it, not rank 0."""

    file: str = ""
    address: str = ""
    port: int = 0
    agents: bool = False

    def __str__(self) -> str:
        return self.file or f"{self.address}:{self.port}"


def read_method(method: str) -> Meeting:
    """`env://`, `tcp://HOST:PORT` or `file:///PATH`, with what the environment adds to it. Raises ConfigError with what to write."""
    url = urlsplit(method)
    if url.scheme == "file" and url.path.startswith("/") and not url.netloc:
        return Meeting(file=url.path)
    if url.scheme == "tcp":
        try:
            if url.hostname and url.port:
                return Meeting(address=url.hostname, port=url.port)
        except ValueError:
            pass  # The port is no number: the message below says how it is written.
    elif method == "env://":
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not address or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"several ranks need MASTER_ADDR and MASTER_PORT, and they are {address!r} and {port!r}:"
                " start with torchrun, with --spawn N, or set both to the host and a free port of rank 0"
            )
        return Meeting(address=address, port=int(port), agents=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    raise ConfigError(f"init method {method!r} is not known; write env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH")


def meeting() -> Meeting:
    """The one of this process, by its environment."""
    return read_method(os.environ.get(INIT_METHOD) or "env://")


def open_store(group: Group, timeout_seconds: float) -> Any:
    """This life's store (torch.distributed.Store), opened once per process; rank 0 serves it unless an agent does.

    Raises RendezvousError when it cannot be reached within the time or rank 0 cannot listen.
    """
    place, life = meeting(), os.environ.get("DDPJOB_FENCE") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (place, group, life) not in _stores:
        _stores[place, group, life] = _open(place, group, life, timeout_seconds)
    _stores[place, group, life].set_timeout(datetime.timedelta(seconds=timeout_seconds))  # Preflight has opened it with a shorter one.
    return _stores[place, group, life]


_stores: dict[tuple[Meeting, Group, str], Any] = {}
"""A file or a port is opened once: preflight and training meet at the same store."""


def _open(place: Meeting, group: Group, life: str, timeout_seconds: float) -> Any:
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_seconds)
    serves = group.rank == 0 and not place.agents
    if place.file and not Path(place.file).parent.is_dir():
        # torch would wait for it for five minutes, and no other thread of Python would run meanwhile.
        raise RendezvousError(f"rank {group.rank} cannot open {place}: its folder is not there. {_remedy(place, serves)}")
    try:
        if place.file:
            files = dist.FileStore(place.file, group.world)  # type: ignore[attr-defined]
            files.set_timeout(timeout)  # Bounds the wait for a file that is gone, too.
            return files
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.address, place.port, group.world, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=serves
        )
    except (RuntimeError, ValueError) as error:
        what = f"rank 0 cannot listen on {place}" if serves else f"rank {group.rank} cannot reach the store at {place}"
        raise RendezvousError(f"{what} within {timeout_seconds:.0f} s: {first_line(error)}. {_remedy(place, serves)}") from error
    if not place.agents:
        return store
    # An agent that restarts its workers in place hands them the same store again (torch 2.15); the addresses of the dead processes in it
    # make gloo wait for ever. Agents count their restarts each for itself, and one that has just come counts none: where there is a fence,
    # it is what all ranks of a life have in common.
    prefix = life if os.environ.get("DDPJOB_FENCE") else f"attempt_{life}"
    return dist.PrefixStore(f"/worker/{prefix}", store)  # type: ignore[attr-defined]


def address_towards(host: str) -> str:
    """The address that this machine has towards another, by which that one reaches it too. Sends nothing. Raises OSError."""
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on at this address, for now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _remedy(place: Meeting, serves: bool) -> str:
    if place.file:
        return "Give a file in a folder that exists and that every rank can write"
    if serves:
        return "Give another port (MASTER_PORT, or --init tcp://HOST:PORT), or end the program that has this one"
    return f"Check that rank 0 runs, that {place.address} is its address, and that its firewall lets in TCP port {place.port}"
