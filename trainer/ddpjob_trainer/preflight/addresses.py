"""The address under which other nodes find this one, as gloo and NCCL choose it."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.distributed.init_method import address_towards, meeting
from ddpjob_trainer.distributed.interfaces import interface_of, interfaces, is_loopback
from ddpjob_trainer.distributed.process_group import Group


@dataclass(frozen=True)
class NodeAddress:
    """`address`: where other nodes can reach this one; `gloo`: the one that gloo announces; `stack`: whose loopback.

    Its listener answers on `port` to those who know the token.
    """

    stack: str
    address: str
    gloo: str = ""
    interface: str = ""
    port: int = 0
    token: str = ""

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})" if self.interface else self.address


def own_address(group: Group) -> NodeAddress:
    """GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME if set, else what gloo takes, else the address towards rank 0.

    Raises OSError when the interface that is named does not exist.
    """
    named, nccl = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], os.environ.get("NCCL_SOCKET_IFNAME", "")
    address = gloo = _address_of(named) if named else _host_address()
    if not named and nccl and not nccl.startswith("^"):
        address = _address_of(named := _nccl_interface(nccl))
    elif not named and is_loopback(gloo) and group.world > group.local_world and not meeting().file:
        address = address_towards(meeting().address)
    return NodeAddress(network_stack(), address, gloo, named or interface_of(address))


def network_stack() -> str:
    """The same for processes that share a loopback: the kernel's start, and the network namespace in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _address_of(name: str) -> str:
    if name not in (there := interfaces()):
        known = ", ".join(there)
        raise OSError(f"interface {name} (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) has no address; there are {known}")
    return there[name][0]


def _nccl_interface(wanted: str) -> str:
    """The first interface that matches NCCL_SOCKET_IFNAME: prefixes of names, or whole names after `=`."""
    exact, words = wanted.startswith("="), [word.partition(":")[0] for word in wanted.removeprefix("=").split(",")]
    matches = (n for n in interfaces() if any(n == word if exact else n.startswith(word) for word in words))
    return next(matches, words[0])


def _host_address() -> str:
    """As gloo in torch finds it: the first address of the host's name that this machine has; else the loopback."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((where[0], 0))
                return str(where[0])
    return "127.0.0.1"
