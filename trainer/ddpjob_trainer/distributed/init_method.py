"""Lets ranks find each other through a store, and form a process group.

The store is reached through env://, tcp://HOST:PORT or file:///PATH.
"""

from __future__ import annotations

import datetime
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.distributed.devices import RankPlacement
from ddpjob_trainer.distributed.interfaces import is_loopback
from ddpjob_trainer.distributed.process_group import Group, destroy
from ddpjob_trainer.errors import ConfigError, RendezvousError, first_line

INIT_METHOD = "DDPJOB_TRAINER_INIT"
"""Environment variable with the init method, which `--spawn` sets. The default is env://."""


@dataclass(frozen=True)
class Meeting:
    """The meeting place that an init method names: a file, or the address and port of a TCP store.

    `agents` means that a launcher's agent serves the store instead of rank 0.
    """

    file: str = ""
    address: str = ""
    port: int = 0
    agents: bool = False

    def __str__(self) -> str:
        return self.file or f"{self.address}:{self.port}"


def read_method(method: str) -> Meeting:
    """Return the meeting place that an init method names.

    The method is `env://`, `tcp://HOST:PORT` or `file:///PATH`. For env://, environment variables
    name the address and port. Raises a ConfigError that includes the remedy.
    """
    url = urlsplit(method)
    if url.scheme == "file" and url.path.startswith("/") and not url.netloc:
        return Meeting(file=url.path)
    if url.scheme == "tcp":
        try:
            if url.hostname and url.port:
                return Meeting(address=url.hostname, port=url.port)
        except ValueError:
            pass  # The port is not a number, so the message below shows the syntax.
    elif method == "env://":
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not address or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"MASTER_ADDR={address!r} MASTER_PORT={port!r}: several ranks need both; start them with "
                "torchrun or --spawn N, or set both to rank 0's host and a free port there"
            )
        return Meeting(address=address, port=int(port), agents=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    raise ConfigError(f"init method {method!r} is unknown; use env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH")


def meeting() -> Meeting:
    """Return the meeting place that this process's environment names."""
    return read_method(os.environ.get(INIT_METHOD) or "env://")


def open_store(group: Group, timeout_seconds: float) -> Any:
    """Return this incarnation's store (torch.distributed.Store), and open it if necessary.

    Rank 0 serves the store, unless a launcher's agent does. This function does not wait for other
    ranks. Raises RendezvousError if the store cannot be reached in time or rank 0 cannot listen.
    """
    where = meeting()
    incarnation = JobEnvironment.read().fence or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (where, group, incarnation) not in _stores:
        _stores[where, group, incarnation] = _open(where, group, incarnation, timeout_seconds)
    _stores[where, group, incarnation].set_timeout(
        datetime.timedelta(seconds=timeout_seconds)
    )  # If preflight has opened the store, the store still has preflight's shorter timeout.
    return _stores[where, group, incarnation]


_stores: dict[tuple[Meeting, Group, str], Any] = {}
"""The stores that this process has opened, so that preflight and training share a store. A second
store could not use the same file or port.
"""


def _open(where: Meeting, group: Group, incarnation: str, timeout_seconds: float) -> Any:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    serves = group.rank == 0 and not where.agents
    if where.file and not Path(where.file).parent.is_dir():
        # Without this check, torch would wait five minutes for the folder and hold the GIL
        # meanwhile.
        raise RendezvousError(
            f"rank {group.rank} cannot open {where}: its folder does not exist. {_remedy(where, serves)}"
        )
    try:
        if where.file:
            files = dist.FileStore(where.file, group.world)  # type: ignore[attr-defined]
            files.set_timeout(timeout)  # This timeout also limits the wait for a file that does not exist.
            return files
        store = dist.TCPStore(  # type: ignore[attr-defined]
            where.address,
            where.port,
            group.world,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=serves,
            **(_loopback_listener(where, group) if serves else {}),
        )
    except (OSError, RuntimeError, ValueError) as error:
        what = f"rank 0 cannot listen on {where}" if serves else f"rank {group.rank} cannot reach the store at {where}"
        raise RendezvousError(
            f"{what} within {timeout_seconds:.0f} s: {first_line(error)}. {_remedy(where, serves)}"
        ) from error
    if not where.agents:
        return store
    # If an agent restarts its workers in place, the new workers get the same store (torch 2.15). A
    # separate prefix for each incarnation hides the addresses of dead processes, for which gloo
    # would wait forever. The prefix is the fence if there is one, because the fence is the same on
    # all ranks of an incarnation. Restart counts can differ, because each agent counts its own
    # restarts, starting at 0.
    prefix = incarnation if JobEnvironment.read().fence else f"attempt_{incarnation}"
    return dist.PrefixStore(f"/worker/{prefix}", store)  # type: ignore[attr-defined]


def _loopback_listener(where: Meeting, group: Group) -> dict[str, Any]:
    """Return arguments that let only this machine reach a TCPStore.

    By default, torch listens on every address, although the store has no authentication. The result
    is empty unless all ranks are on this machine and meet on its loopback. Raises OSError if the
    port is in use.
    """
    if group.world > group.local_world or any(where == known for known, *_ in _stores):
        # Either other nodes must reach the store as well, or this process is already listening.
        return {}
    family, kind, _, _, address = socket.getaddrinfo(where.address, where.port, type=socket.SOCK_STREAM)[0]
    if not is_loopback(str(address[0])):
        return {}
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Before torch 2.8, only the older of torch's two servers accepts an existing socket.
        return {"master_listen_fd": listener.detach(), "use_libuv": torch.__version__ >= "2.8"}


def address_towards(host: str) -> str:
    """Return the address at which `host` can reach this machine.

    This machine uses the same address when it connects to `host`. The lookup sends no packets.
    Raises OSError.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port on the address `host`.

    If possible, the port is outside the range that systems use for outgoing connections. Rank 0
    listens on the port only seconds later, so no other program should take it in the meantime.
    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(range(16000, 20000), 100):
        with socket.socket(family) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _remedy(where: Meeting, serves: bool) -> str:
    if where.file:
        return "Use a file in an existing folder that every rank can write"
    if serves:
        return "Use a different port (MASTER_PORT, or --init tcp://HOST:PORT), or stop the program that uses this port"
    check = f"Check that rank 0 is running, that {where.address} is its address"
    return f"{check}, and that its firewall allows TCP port {where.port}"


@contextmanager
def join_group(
    group: Group, placement: RankPlacement, timeout_seconds: float, *, one_device: bool = True
) -> Iterator[None]:
    """Join a process group for the duration of the `with` block.

    If `one_device` is set, this rank sends only from `placement.device`, so NCCL connects
    immediately. Otherwise, NCCL connects at the first collective of each group. If the block raises
    an exception, the group is not destroyed, because peers may be gone.
    """
    if group.world == 1:
        yield
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = open_store(group, timeout_seconds)
    bound: dict[str, Any] = {"device_id": placement.device} if one_device and placement.device.type == "cuda" else {}
    dist.init_process_group(
        placement.backend, timeout=timeout, store=store, rank=group.rank, world_size=group.world, **bound
    )
    yield
    destroy()
